"""Where groups are generated and wait, and the stages between generation and buffer: ``rollout``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class RewardStageConfig:
    """Rewards by a function of yours instead of the generator's; see :mod:`skyrl_train.rollout.reward_function`."""

    function: str | None = None  # path.to:function or path.to:Class; None: the generator's rewards stand
    kwargs: dict[str, Any] = field(default_factory=dict)  # for the function, or for the constructor of the class
    # loop (async def only) | thread | process | ray; None: loop for async def, else thread
    placement: str | None = None
    max_parallel: int = 8  # groups scored at once; beyond the loop, each by a thread, process or actor of its own
    timeout_s: float | None = None  # of scoring one group; None: no limit
    ray_num_cpus: float = 1.0  # reserved for each actor
    ray_num_gpus: float = 0.0


@dataclass
class ReferenceStageConfig:
    """Log-probs under the policy that the run starts from; with ``trainer.algorithm.kl_loss_coef`` or ``kl_reward_coef``."""

    # process | thread | ray | workers (one model sharded over Ray actors, as of strategy=fsdp2) |
    # colocated (beside the policy, in the ranks of strategy=fsdp2)
    placement: str = "process"
    max_parallel: int = 1  # groups scored at once, each by a copy of the model of its own
    num_workers: int = 2  # that share the model of placement=workers
    # Of workers and colocated: weights stay in main memory; None: trainer.fsdp.cpu_offload
    cpu_offload: bool | None = None
    device: str | None = None  # None: trainer.device
    ray_num_cpus: float = 1.0  # reserved for each actor
    ray_num_gpus: float = 0.0


@dataclass
class StagesConfig:
    """What happens to a group between its generation and the buffer, as soon as it is generated."""

    reward: RewardStageConfig = field(default_factory=RewardStageConfig)
    reference: ReferenceStageConfig = field(default_factory=ReferenceStageConfig)


@dataclass
class RolloutConfig:
    """How groups are kept between their generation and their training, and where the generator runs."""

    replay: bool = True  # a checkpoint keeps what unfinished rollouts have sampled; resuming serves it again
    buffer_memory_bytes: int | None = None  # finished groups beyond it wait on the disk; None: all in memory
    num_actors: int = 0  # Ray actors that the generator runs in (environments, reward code, agents); 0: in the trainer
    ray_num_cpus: float = 1.0  # reserved for each of these actors
    stages: StagesConfig = field(default_factory=StagesConfig)
