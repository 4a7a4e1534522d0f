"""Whether a plan fits the memory of the machine that it is made on, as far as the model's shape tells."""

from __future__ import annotations

from dataclasses import dataclass

from skyrl_train.config import derive
from skyrl_train.config.machine import Machine
from skyrl_train.config.memory import MemoryEstimate
from skyrl_train.config.plan import Plan
from skyrl_train.config.schema.trainer import TrainerConfig
from skyrl_train.config.schema.training import TrainingStrategy

_GIB = 2**30


@dataclass(frozen=True, slots=True)
class Fit:
    """What does not fit. An impossible plan is refused; a tight one fits if it is lucky, and is only told."""

    impossible: list[str]
    tight: list[str]


@dataclass(frozen=True, slots=True)
class _Need:
    """What one device has to hold of the training."""

    what: str
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
                f"{need.what}: weights, gradients, moments and snapshots take {_gib(state)}, and there are {_gib(there)}. "
                f"{need.remedy}"
            )
        elif state + need.activation_bytes > there:
            tight.append(
                f"{need.what}: {_gib(state)} of weights, gradients, moments and snapshots, and up to "
                f"{_gib(need.activation_bytes)} of activations, but there are {_gib(there)}. Set "
                f"trainer.policy.gradient_checkpointing=true, lower trainer.micro_batch_tokens, or: {need.remedy}"
            )
    return Fit(impossible, tight)


def _needs(plan: Plan, machine: Machine) -> list[_Need]:
    trainer, memory = plan.config.trainer, plan.memory
    if memory is None:
        return []
    sharded = trainer.strategy is TrainingStrategy.fsdp2
    on_gpu = trainer.device != "cpu"
    critic_beside = not sharded and derive.critic_trainer(trainer).device == trainer.device
    snapshot = 0 if sharded or on_gpu else memory.snapshot_bytes  # else it lies elsewhere, or is one of several there
    of_rank = _Need(
        f"Each of {trainer.fsdp.num_workers} ranks" if sharded else f"Training on {trainer.device}",
        memory.rank_bytes + (memory.critic_bytes if critic_beside else 0) + snapshot,
        memory.activation_bytes,
        min(machine.gpu_bytes, default=0) if on_gpu else machine.main_memory_bytes,
        _remedy(trainer),
    )
    if on_gpu and not machine.gpu_bytes:
        return []  # on another machine, or none that says
    if not (sharded and trainer.fsdp.cpu_offload and on_gpu):
        return [of_rank]
    return _offloaded(trainer, memory, of_rank, machine)


def _offloaded(trainer: TrainerConfig, memory: MemoryEstimate, of_rank: _Need, machine: Machine) -> list[_Need]:
    here = min(trainer.fsdp.num_workers, len(machine.gpu_bytes))
    in_main = _Need(
        f"The main memory, with {here} ranks and trainer.fsdp.cpu_offload=true",
        here * memory.rank_bytes,
        0,
        machine.main_memory_bytes,
        "Use more nodes.",
    )
    on_gpu = _Need(of_rank.what, 0, of_rank.activation_bytes, of_rank.there_bytes, "use more nodes.")
    return [in_main, on_gpu]


def _remedy(trainer: TrainerConfig) -> str:
    if trainer.strategy is TrainingStrategy.local:
        return "Use trainer.strategy=fsdp2 on several devices, or a smaller model."
    split = derive.fsdp_shard_size(trainer)
    wider = " or a larger trainer.fsdp.shard_size" if split < trainer.fsdp.num_workers else ""
    offload = ", or set trainer.fsdp.cpu_offload=true" if trainer.device != "cpu" else ""
    return f"Use more than trainer.fsdp.num_workers={trainer.fsdp.num_workers}{wider}{offload}."


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / _GIB:,.1f} GiB"
