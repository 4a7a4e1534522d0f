"""The trainer's mode, its steps, its checkpoints, and the sections below ``trainer``."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from skyrl_train.config.schema.algorithm import AlgorithmConfig
from skyrl_train.config.schema.evaluation import EvalConfig
from skyrl_train.config.schema.failures import FailureConfig
from skyrl_train.config.schema.training import CriticConfig, FSDPConfig, PolicyConfig, TrainingStrategy


class TrainerMode(StrEnum):
    """Which trainer runs; everything else keeps its meaning."""

    sync = "sync"
    one_step_off = "one_step_off"
    fully_async = "fully_async"
    partial_rollout = "partial_rollout"


class ResumeMode(StrEnum):
    """Which checkpoint a run starts from."""

    latest = "latest"  # the newest one of an unfinished run of the same configuration, if any
    never = "never"  # always a new run


@dataclass
class FullyAsyncConfig:
    """How far generation runs ahead of training, and what gives way (``trainer.mode=fully_async``)."""

    max_staleness_steps: int = 4  # S: bound on the lag of a group, in steps
    pipeline_depth: float | None = None  # D: steps that generation may run ahead, also 0.5; None: min(2, S - k + 1)
    num_parallel_generation_workers: int | None = None  # W: groups generated at once; None: (D + 1) * B
    straggler_policy: str = "mask"  # mask | accept | wait | burst | drop | path.to.Policy: what gives way beyond S
    sync_every_steps: int = 1  # k: optimizer steps from one publication to the next
    streaming_min_groups: int | None = None  # train on so many groups as soon as they are there; None: on whole batches
    overlap_publication: bool = False  # the next step begins when the weights are copied, not when they are served


@dataclass
class PartialRolloutConfig:
    """How much is begun for each step (``trainer.mode=partial_rollout``)."""

    oversubmit_factor: float = 2.0  # groups begun per group trained; the unfinished ones go on after the next update


@dataclass
class TrainerConfig:
    """A run: its mode, its steps, where it trains, and what it leaves behind."""

    mode: TrainerMode = TrainerMode.sync
    run_name: str = "run"
    runs_dir: str = "runs"
    run_dir: str | None = None  # None: runs_dir/run_name-N, resumed while unfinished and of the same configuration
    seed: int = 0
    epochs: int = 1
    max_steps: int | None = None  # optimizer steps; None: as many full minibatches as the epochs hold
    policy_mini_batch_size: int = 16  # B: groups per optimizer step
    train_batch_size: int | None = None  # sync: groups per generation phase, a multiple of B; None: B
    update_epochs_per_batch: int = 1  # passes over a minibatch; more than 1 computes proximal log-probs first
    micro_batch_tokens: int = 16384  # per forward/backward pass, padding included where there is any
    packing: bool | None = None  # several sequences in a row, without padding; None: where the model keeps them apart
    strategy: TrainingStrategy = TrainingStrategy.local
    fsdp: FSDPConfig = field(default_factory=FSDPConfig)
    # Times that a run goes on from its last checkpoint after a worker with a shard of a model has died
    max_restarts: int = 0
    device: str = "cpu"  # that trains: cpu | cuda | cuda:N (local); cpu or cuda of each worker (fsdp2)
    ckpt_interval: int = 50  # steps; 0: only at the end and on SIGTERM
    max_ckpts_to_keep: int = 2
    ckpt_path: str | None = None  # a URL (s3://, gs://, ...; fsspec) for this run alone; None: in the run folder
    resume: ResumeMode = ResumeMode.latest
    samples_per_step: int = 2  # groups written to samples.jsonl each step
    trackers: list[str] = field(default_factory=lambda: ["tensorboard"])
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    fully_async: FullyAsyncConfig = field(default_factory=FullyAsyncConfig)
    partial_rollout: PartialRolloutConfig = field(default_factory=PartialRolloutConfig)
    failures: FailureConfig = field(default_factory=FailureConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
