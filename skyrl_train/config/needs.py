"""What the memories of a machine have to hold of a run's training: policy, critic, reference policy, and snapshots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from skyrl_train.config import derive
from skyrl_train.config.machine import Machine
from skyrl_train.config.memory import MemoryEstimate
from skyrl_train.config.schema.run import RunConfig
from skyrl_train.config.schema.trainer import TrainerConfig
from skyrl_train.config.schema.training import TrainingStrategy

_STATE = "weights, gradients and moments"
_STATE_AND_SNAPSHOTS = "weights, gradients, moments and snapshots"
_SNAPSHOTS = "snapshots for checkpoints"
_NAMES = {"critic": "critic", "reference": "reference policy"}
_REFERENCE = "rollout.stages.reference"


@dataclass(frozen=True, slots=True)
class Need:
    """What one device has to hold of the training."""

    what: str
    kept: str  # of what ``state_bytes`` are
    state_bytes: int  # for certain, while the run lasts
    activation_bytes: int  # at most, while a micro-batch is trained
    there_bytes: int
    remedy: str
    models: tuple[str, ...] = ()  # whose activations they are


def needs(config: RunConfig, memory: MemoryEstimate | None, machine: Machine) -> list[Need]:
    """Of each memory that this machine has, or another of the same kind; none where only loading the model would tell, or
    where the policy trains on GPUs that are not here."""
    if memory is None or (config.trainer.device != "cpu" and not machine.gpu_bytes):
        return []
    if config.trainer.strategy is TrainingStrategy.local:
        return [*_of_this_machine(config, memory, machine), *_of_reference_actors(config, memory, machine)]
    return [
        *_of_ranks(config, memory, machine),
        *_of_critic_workers(config.trainer, memory, machine),
        *_of_reference_alone(config, memory, machine),
        *_of_reference_actors(config, memory, machine),
    ]


# ---- strategy=local: by device


@dataclass(frozen=True, slots=True)
class _Held:
    """A model that this process holds, or a process of its own beside it."""

    whose: str  # policy | critic | reference
    device: str
    state_bytes: int
    activation_bytes: int = 0


def _of_this_machine(config: RunConfig, memory: MemoryEstimate, machine: Machine) -> list[Need]:
    """What lies on each device, and in main memory with the snapshots; GPUs that do not say what they have are left out."""
    held = _held(config, memory)
    devices = dict.fromkeys([*(each.device for each in held), "cpu"])
    return [
        _of_device(config, device, [each for each in held if each.device == device], memory, machine)
        for device in devices
        if device == "cpu" or machine.gpu_bytes
    ]


def _held(config: RunConfig, memory: MemoryEstimate) -> list[_Held]:
    trainer = config.trainer
    held = [_Held("policy", derive.one_name(trainer.device), memory.rank_bytes, memory.activation_bytes)]
    if derive.needs_critic(trainer.algorithm):
        device = derive.one_name(derive.critic_trainer(trainer).device)
        held.append(_Held("critic", device, memory.critic_bytes, memory.critic_activation_bytes))
    if derive.reference_is_here(config):
        device = derive.one_name(derive.reference_device(config))
        held.append(_Held("reference", device, _reference_here_bytes(config, memory)))
    return held


def _of_device(config: RunConfig, device: str, held: Sequence[_Held], memory: MemoryEstimate, machine: Machine) -> Need:
    trainer, on_gpu = config.trainer, device != "cpu"
    names = [each.whose for each in held]
    trained = tuple(name for name in names if name != "reference")
    if on_gpu:
        kept = _STATE if trained else "weights"
    else:
        kept = _STATE_AND_SNAPSHOTS if trained else "weights and snapshots" if names else _SNAPSHOTS
    if "policy" in names:
        what = f"Training on {trainer.device}"
    elif on_gpu:
        what = f"The {' and '.join(_NAMES[name] for name in names)} on {device}"
    else:
        what = "The main memory"
    return Need(
        what,
        kept,
        sum(each.state_bytes for each in held) + (0 if on_gpu else _snapshot_bytes(trainer, memory)),
        sum(each.activation_bytes for each in held),
        min(machine.gpu_bytes) if on_gpu else machine.main_memory_bytes,
        _device_remedy(config, device, names),
        trained,
    )


def _device_remedy(config: RunConfig, device: str, names: Sequence[str]) -> str:
    if "policy" in names or "critic" in names:
        remedy = "Use trainer.strategy=fsdp2 on several devices, or a smaller model"
    elif device == "cpu":
        remedy = "Use a machine with more, or train an adapter (trainer.policy.model.lora)"
    else:
        remedy = "Use a GPU with more"
    if "reference" in names:
        remedy += f", or set {_REFERENCE}.placement=workers{_fewer_copies(config)}"
    return f"{remedy}."


# ---- strategy=fsdp2: by rank


def _of_ranks(config: RunConfig, memory: MemoryEstimate, machine: Machine) -> list[Need]:
    trainer = config.trainer
    on_gpu = trainer.device != "cpu"
    of_rank = Need(
        f"Each of {trainer.fsdp.num_workers} ranks",
        _STATE if on_gpu else _STATE_AND_SNAPSHOTS,
        memory.rank_bytes + (0 if on_gpu else _snapshot_bytes(trainer, memory)),
        memory.activation_bytes,
        min(machine.gpu_bytes) if on_gpu else machine.main_memory_bytes,
        _ranks_remedy(trainer),
        ("policy", "critic") if derive.critic_is_colocated(trainer) else ("policy",),
    )
    return _on_gpus(config, memory, of_rank, machine) if on_gpu else [of_rank]


def _snapshot_bytes(trainer: TrainerConfig, memory: MemoryEstimate) -> int:
    """What each rank's snapshot takes of the main memory of its machine, wherever it trains."""
    sharded = trainer.strategy is TrainingStrategy.fsdp2
    with_critic = not sharded or derive.critic_is_colocated(trainer)
    together = memory.snapshot_bytes + (memory.critic_snapshot_bytes if with_critic else 0)
    return -(-together // memory.num_ranks)


def _on_gpus(config: RunConfig, memory: MemoryEstimate, of_rank: Need, machine: Machine) -> list[Need]:
    """What ranks hold on their GPUs, and those of this machine in its main memory, with a reference that lies there."""
    trainer = config.trainer
    offload = trainer.fsdp.cpu_offload
    here = min(trainer.fsdp.num_workers, len(machine.gpu_bytes))
    state = memory.rank_bytes if offload else memory.rank_elsewhere_bytes
    reference = _reference_here_bytes(config, memory) if derive.reference_device(config) == "cpu" else 0
    in_main_memory = Need(
        f"The main memory, with {here} ranks{' and cpu_offload=true' if state else ''}",
        _STATE_AND_SNAPSHOTS if state else "weights and snapshots" if reference else _SNAPSHOTS,
        here * (state + _snapshot_bytes(trainer, memory)) + reference,
        0,
        machine.main_memory_bytes,
        f"Use more nodes{f', or set {_REFERENCE}.placement=workers{_fewer_copies(config)}' if reference else ''}.",
    )
    if not offload:
        return [of_rank, in_main_memory]
    remedy = "Use more nodes."
    if memory.rank_elsewhere_bytes:
        remedy = "Set cpu_offload=true in rollout.stages.reference and trainer.critic.fsdp too."
    return [in_main_memory, replace(of_rank, state_bytes=memory.rank_elsewhere_bytes, remedy=remedy)]


def _ranks_remedy(trainer: TrainerConfig) -> str:
    split = derive.fsdp_shard_size(trainer)
    wider = " or a larger trainer.fsdp.shard_size" if split < trainer.fsdp.num_workers else ""
    offload = ", or set trainer.fsdp.cpu_offload=true" if trainer.device != "cpu" else ""
    if derive.critic_is_colocated(trainer):
        offload += ", trainer.critic.fsdp.cpu_offload=true" if offload and not trainer.critic.fsdp.cpu_offload else ""
        offload += ", or trainer.critic.placement=workers"
    return f"Use more than trainer.fsdp.num_workers={trainer.fsdp.num_workers}{wider}{offload}."


def _of_critic_workers(trainer: TrainerConfig, memory: MemoryEstimate, machine: Machine) -> list[Need]:
    """What a critic's own workers hold; none where there are none. Of those on GPUs, their snapshots are on any machine."""
    critic = derive.critic_trainer(trainer)
    if not memory.critic_bytes or derive.critic_is_colocated(trainer):
        return []
    on_gpu = critic.device != "cpu" and not critic.fsdp.cpu_offload
    if on_gpu and not machine.gpu_bytes:
        return []
    key, workers = "trainer.critic.fsdp", critic.fsdp.num_workers
    held = memory.critic_bytes + (0 if on_gpu else memory.critic_snapshot_bytes)
    return [
        Need(
            f"Each of the critic's {workers} ranks",
            _STATE if on_gpu else _STATE_AND_SNAPSHOTS,
            -(-held // memory.critic_ranks),
            memory.critic_activation_bytes if on_gpu or critic.device == "cpu" else 0,
            min(machine.gpu_bytes) if on_gpu else machine.main_memory_bytes,
            f"Use more than {key}.num_workers={workers}{f', or set {key}.cpu_offload=true' if on_gpu else ''}.",
            ("critic",),
        )
    ]


# ---- the reference policy


def _reference_here_bytes(config: RunConfig, memory: MemoryEstimate) -> int:
    """Of all copies of a reference in threads or processes on this machine."""
    copies = config.rollout.stages.reference.max_parallel if derive.reference_is_here(config) else 0
    return copies * memory.apart_reference_bytes


def _fewer_copies(config: RunConfig) -> str:
    copies = config.rollout.stages.reference.max_parallel
    return f", or {_REFERENCE}.max_parallel below {copies}" if copies > 1 else ""


def _of_reference_alone(config: RunConfig, memory: MemoryEstimate, machine: Machine) -> list[Need]:
    """A reference on this machine where ranks train: on a GPU of its own, or in main memory beside a rank that trains there."""
    held, device = _reference_here_bytes(config, memory), derive.reference_device(config)
    on_gpu = device != "cpu"
    if not held or (on_gpu and not machine.gpu_bytes) or (not on_gpu and config.trainer.device != "cpu"):
        return []
    beside = 0 if on_gpu else memory.rank_bytes + _snapshot_bytes(config.trainer, memory)
    return [
        Need(
            f"The reference policy on {device}" if on_gpu else "The reference policy and a rank",
            "weights" if on_gpu else _STATE_AND_SNAPSHOTS,
            held + beside,
            0,
            min(machine.gpu_bytes) if on_gpu else machine.main_memory_bytes,
            f"Set {_REFERENCE}.placement=workers{_fewer_copies(config)}.",
        )
    ]


def _of_reference_actors(config: RunConfig, memory: MemoryEstimate, machine: Machine) -> list[Need]:
    """What a reference's own Ray actors hold, a copy or a shard each; none where there are none."""
    reference = config.rollout.stages.reference
    if not memory.apart_reference_bytes or derive.reference_is_here(config):
        return []
    sharded = reference.placement == "workers"
    on_gpu = derive.reference_device(config) != "cpu" and not (sharded and derive.reference_offload(config))
    if on_gpu and not machine.gpu_bytes:
        return []
    remedy = f"Set {_REFERENCE}.placement=workers."
    if sharded:
        offload = f", or set {_REFERENCE}.cpu_offload=true" if on_gpu else ""
        remedy = f"Use more than {_REFERENCE}.num_workers={reference.num_workers}{offload}."
    return [
        Need(
            f"Each of the reference's {reference.num_workers if sharded else reference.max_parallel} actors",
            "weights",
            -(-memory.apart_reference_bytes // (reference.num_workers if sharded else 1)),
            0,
            min(machine.gpu_bytes) if on_gpu else machine.main_memory_bytes,
            remedy,
        )
    ]
