"""Whether a plan fits the memory of the machine that it is made on, as far as the model's shape tells."""

from __future__ import annotations

from dataclasses import dataclass, replace

from skyrl_train.config import derive
from skyrl_train.config.machine import Machine
from skyrl_train.config.memory import MemoryEstimate
from skyrl_train.config.plan import Plan
from skyrl_train.config.schema.trainer import TrainerConfig
from skyrl_train.config.schema.training import TrainingStrategy

_GIB = 2**30
_STATE = "weights, gradients and moments"
_STATE_AND_SNAPSHOTS = "weights, gradients, moments and snapshots"


@dataclass(frozen=True, slots=True)
class Fit:
    """What does not fit. An impossible plan is refused; a tight one fits if it is lucky, and is only told."""

    impossible: list[str]
    tight: list[str]


@dataclass(frozen=True, slots=True)
class _Need:
    """What one device has to hold of the training."""

    what: str
    kept: str  # of what ``state_bytes`` are
    state_bytes: int  # for certain, while the run lasts
    activation_bytes: int  # at most, while a micro-batch is trained
    there_bytes: int
    remedy: str


def fit(plan: Plan, machine: Machine) -> Fit:
    """Compares what training holds with what is there. Engines are left out: they may be anywhere, and come and go."""
    impossible, tight = [], []
    for need in _needs(plan, machine):
        state, there = need.state_bytes, need.there_bytes
        if state > there:
            impossible.append(
                f"{need.what}: {need.kept} take {_gib(state)}, and there are {_gib(there)}. {need.remedy}"
            )
        elif state + need.activation_bytes > there:
            tight.append(
                f"{need.what}: {_gib(state)} of {need.kept}, and up to "
                f"{_gib(need.activation_bytes)} of activations, but there are {_gib(there)}. "
                f"{_fewer_activations(plan.config.trainer)} trainer.micro_batch_tokens, or: {need.remedy}"
            )
    return Fit(impossible, tight)


def _needs(plan: Plan, machine: Machine) -> list[_Need]:
    trainer, memory = plan.config.trainer, plan.memory
    if memory is None:
        return []
    sharded = trainer.strategy is TrainingStrategy.fsdp2
    on_gpu = trainer.device != "cpu"
    if on_gpu and not machine.gpu_bytes:
        return []  # on another machine, or none that says
    of_rank = _Need(
        f"Each of {trainer.fsdp.num_workers} ranks" if sharded else f"Training on {trainer.device}",
        _STATE if on_gpu else _STATE_AND_SNAPSHOTS,
        memory.rank_bytes
        + (memory.critic_bytes if not sharded and derive.critic_is_beside(trainer) else 0)
        + (0 if on_gpu else _snapshot_bytes(trainer, memory)),
        memory.activation_bytes,
        min(machine.gpu_bytes) if on_gpu else machine.main_memory_bytes,
        _remedy(trainer),
    )
    of_policy = _on_gpus(trainer, memory, of_rank, machine) if on_gpu else [of_rank]
    return [*of_policy, *_of_critic_workers(trainer, memory, machine)]


def _snapshot_bytes(trainer: TrainerConfig, memory: MemoryEstimate) -> int:
    """What each rank's snapshot takes of the main memory of its machine, wherever it trains."""
    sharded = trainer.strategy is TrainingStrategy.fsdp2
    with_critic = not sharded or derive.critic_is_colocated(trainer)
    together = memory.snapshot_bytes + (memory.critic_snapshot_bytes if with_critic else 0)
    return -(-together // memory.num_ranks)


def _on_gpus(trainer: TrainerConfig, memory: MemoryEstimate, of_rank: _Need, machine: Machine) -> list[_Need]:
    """What ranks hold on their GPUs, and those of this machine in its main memory."""
    sharded = trainer.strategy is TrainingStrategy.fsdp2
    offload = sharded and trainer.fsdp.cpu_offload
    here = min(trainer.fsdp.num_workers, len(machine.gpu_bytes)) if sharded else 1
    state = memory.rank_bytes if offload else memory.rank_elsewhere_bytes
    where = f", with {here} ranks{' and cpu_offload=true' if state else ''}" if sharded else ""
    in_main_memory = _Need(
        f"The main memory{where}",
        _STATE_AND_SNAPSHOTS if state else "snapshots for checkpoints",
        here * (state + _snapshot_bytes(trainer, memory)),
        0,
        machine.main_memory_bytes,
        "Use more nodes." if sharded else "Use a machine with more, or train an adapter (trainer.policy.model.lora).",
    )
    if not offload:
        return [of_rank, in_main_memory]
    remedy = "Use more nodes."
    if memory.rank_elsewhere_bytes:
        remedy = "Set cpu_offload=true in rollout.stages.reference and trainer.critic.fsdp too."
    return [in_main_memory, replace(of_rank, state_bytes=memory.rank_elsewhere_bytes, remedy=remedy)]


def _of_critic_workers(trainer: TrainerConfig, memory: MemoryEstimate, machine: Machine) -> list[_Need]:
    """What a critic's own workers hold; none where there are none. Of those on GPUs, their snapshots are on any machine."""
    critic, sharded = derive.critic_trainer(trainer), trainer.strategy is TrainingStrategy.fsdp2
    if not sharded or not memory.critic_bytes or derive.critic_is_colocated(trainer):
        return []
    on_gpu = critic.device != "cpu" and not critic.fsdp.cpu_offload
    if on_gpu and not machine.gpu_bytes:
        return []
    key, workers = "trainer.critic.fsdp", critic.fsdp.num_workers
    held = memory.critic_bytes + (0 if on_gpu else memory.critic_snapshot_bytes)
    return [
        _Need(
            f"Each of the critic's {workers} ranks",
            _STATE if on_gpu else _STATE_AND_SNAPSHOTS,
            -(-held // memory.critic_ranks),
            0,
            min(machine.gpu_bytes) if on_gpu else machine.main_memory_bytes,
            f"Use more than {key}.num_workers={workers}{f', or set {key}.cpu_offload=true' if on_gpu else ''}.",
        )
    ]


def _fewer_activations(trainer: TrainerConfig) -> str:
    """What to set, ending in what to do with the tokens of a micro-batch."""
    models = {"policy": trainer.policy.gradient_checkpointing}
    if derive.critic_is_beside(trainer):
        models["critic"] = trainer.critic.gradient_checkpointing
    keep = [f"trainer.{model}.gradient_checkpointing=true" for model, again in models.items() if not again]
    return f"Set {' and '.join(keep)}, lower" if keep else "Lower"


def _remedy(trainer: TrainerConfig) -> str:
    if trainer.strategy is TrainingStrategy.local:
        return "Use trainer.strategy=fsdp2 on several devices, or a smaller model."
    split = derive.fsdp_shard_size(trainer)
    wider = " or a larger trainer.fsdp.shard_size" if split < trainer.fsdp.num_workers else ""
    offload = ", or set trainer.fsdp.cpu_offload=true" if trainer.device != "cpu" else ""
    if derive.critic_is_colocated(trainer):
        offload += ", trainer.critic.fsdp.cpu_offload=true" if offload and not trainer.critic.fsdp.cpu_offload else ""
        offload += ", or trainer.critic.placement=workers"
    return f"Use more than trainer.fsdp.num_workers={trainer.fsdp.num_workers}{wider}{offload}."


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / _GIB:,.1f} GiB"
