"""What follows from the settings where they are left at None. One function per derived value."""

from __future__ import annotations

from dataclasses import replace

from skyrl_train.config.model_shape import ModelShape
from skyrl_train.config.schema.algorithm import AlgorithmConfig
from skyrl_train.config.schema.model import ModelConfig
from skyrl_train.config.schema.run import RunConfig
from skyrl_train.config.schema.trainer import TrainerConfig, TrainerMode
from skyrl_train.config.schema.training import PolicyConfig, TrainingStrategy


def is_async(config: RunConfig) -> bool:
    """Whether generation runs ahead of training, in whatever order."""
    return config.trainer.mode is not TrainerMode.sync


def is_fully_async(config: RunConfig) -> bool:
    """Whether generation never stops; all settings of ``trainer.fully_async`` count only then."""
    return config.trainer.mode is TrainerMode.fully_async


def max_staleness_steps(config: RunConfig) -> int:
    """S: the bound on a group's lag. In sync, a batch of k minibatches is k - 1 steps old when its last one trains; one
    step off says it in its name."""
    if config.trainer.mode is TrainerMode.sync:
        return steps_per_publication(config) - 1
    if config.trainer.mode is TrainerMode.one_step_off:
        return 1
    return config.trainer.fully_async.max_staleness_steps


# Where generation and training are balanced, one step ahead lets the trainer wait for a fifth of its time, and two do not; more
# than two mostly ages what is trained (docs/benchmarks.md, "How far ahead").
DEFAULT_DEPTH = 2


def pipeline_depth(config: RunConfig) -> float:
    """D: steps that generation may run ahead; 2 where S leaves room for it."""
    if config.trainer.mode is TrainerMode.sync:
        return 0
    if config.trainer.mode is TrainerMode.one_step_off:
        return 1
    if config.trainer.mode is TrainerMode.partial_rollout:
        return config.trainer.partial_rollout.oversubmit_factor - 1
    depth = config.trainer.fully_async.pipeline_depth
    return max(0, min(DEFAULT_DEPTH, deepest(config))) if depth is None else depth


def deepest(config: RunConfig) -> int:
    """The largest D that S allows: ``S >= D + k - 1``."""
    return max_staleness_steps(config) - (steps_per_publication(config) - 1)


def steps_per_publication(config: RunConfig) -> int:
    """k: optimizer steps from one publication to the next. In sync, the minibatches of a batch."""
    if config.trainer.mode is TrainerMode.sync:
        return train_batch_size(config) // config.trainer.policy_mini_batch_size
    return config.trainer.fully_async.sync_every_steps if is_fully_async(config) else 1


WHOLE_MINIBATCH_LOSSES = ("clip_cov", "kl_cov")
CLIPPED_LOSSES = ("ppo_clip", "dual_clip", "gspo", "clip_cov")


def clip_bounds(algorithm: AlgorithmConfig) -> tuple[float, float]:
    """How far below and above 1 the ratio of a clipped loss counts. That of gspo is a mean over a sequence, so it moves a
    thousandth as far as a token's: the paper's bounds are 3e-4 and 4e-4."""
    low, high = (3e-4, 4e-4) if algorithm.policy_loss_type == "gspo" else (0.2, 0.2)
    given = algorithm.eps_clip_low, algorithm.eps_clip_high
    return low if given[0] is None else given[0], high if given[1] is None else given[1]


def normalizes_over_minibatch(algorithm: AlgorithmConfig) -> bool:
    """Whether advantages are normalised over all tokens of a minibatch; it belongs to the definition of reinforce++, and
    to PPO as language models are trained with it."""
    if algorithm.advantage_batch_normalize is None:
        return algorithm.advantage_estimator in ("reinforce++", "gae")
    return algorithm.advantage_batch_normalize


def needs_reference(algorithm: AlgorithmConfig) -> bool:
    """Whether groups need log-probs of the policy that the run starts from."""
    return algorithm.kl_loss_coef > 0 or algorithm.kl_reward_coef > 0


def needs_critic(algorithm: AlgorithmConfig) -> bool:
    """Whether advantages need values, and so a critic."""
    return algorithm.advantage_estimator == "gae"


def critic_is_colocated(trainer: TrainerConfig) -> bool:
    """Whether the ranks that train the policy hold the critic too."""
    return needs_critic(trainer.algorithm) and trainer.critic.placement == "colocated"


def critic_is_beside(trainer: TrainerConfig) -> bool:
    """Whether there is a critic that computes where the policy does: in its ranks, or in this process on the same device."""
    if trainer.strategy is TrainingStrategy.fsdp2:
        return critic_is_colocated(trainer)
    return needs_critic(trainer.algorithm) and one_name(critic_trainer(trainer).device) == one_name(trainer.device)


def one_name(device: str) -> str:
    """The same name for the same device of this machine: ``cuda`` is its first GPU."""
    return "cuda:0" if device == "cuda" else device


# Settings of ``trainer.critic.fsdp`` that a critic in the policy's ranks has, because they are about the model and not about the
# ranks.
OF_COLOCATED_CRITIC = ("cpu_offload", "reshard_after_forward")


def critic_model(trainer: TrainerConfig) -> ModelConfig:
    """The model that the critic starts from: that of the policy, unless it has one of its own."""
    path = trainer.critic.model.path
    return trainer.policy.model if path is None else ModelConfig(path=path)


def critic_trainer(trainer: TrainerConfig) -> TrainerConfig:
    """The settings that the critic is trained by, in the places where those of the policy are."""
    critic, fsdp = trainer.critic, trainer.critic.fsdp
    if critic_is_colocated(trainer):
        fsdp = replace(trainer.fsdp, **{name: getattr(fsdp, name) for name in OF_COLOCATED_CRITIC})
    policy = PolicyConfig(
        optimizer_config=critic.optimizer_config,
        dtype=critic.dtype,
        gradient_checkpointing=critic.gradient_checkpointing,
    )
    return replace(trainer, policy=policy, fsdp=fsdp, device=critic.device or trainer.device)


def overlap_publication(config: RunConfig) -> bool:
    """Whether the next step begins before the engines serve the weights of the last one."""
    return is_fully_async(config) and config.trainer.fully_async.overlap_publication


def weight_transport(config: RunConfig) -> str:
    """How weights travel: a folder that was named is used; without one, trainer and engines share a machine."""
    if config.generator.weight_transport is not None:
        return config.generator.weight_transport
    return "shared_memory" if config.generator.weight_folder is None else "disk"


def straggler_policy(config: RunConfig) -> str:
    """What gives way beyond S. One step off always waits: a batch that a resumed run has not finished goes first."""
    one_step_off = config.trainer.mode is TrainerMode.one_step_off
    return "wait" if one_step_off else config.trainer.fully_async.straggler_policy


def streaming_min_groups(config: RunConfig) -> int | None:
    """Groups that train as soon as they are there; None: whole minibatches."""
    return config.trainer.fully_async.streaming_min_groups if is_fully_async(config) else None


def train_batch_size(config: RunConfig) -> int:
    """Groups per generation phase; B unless the synchronous trainer is told otherwise."""
    size = config.trainer.train_batch_size
    return config.trainer.policy_mini_batch_size if size is None else size


def num_workers(config: RunConfig) -> int:
    """W: groups generated at once; as many as admission ever lets in."""
    if config.trainer.mode is TrainerMode.sync:
        return train_batch_size(config)
    workers = config.trainer.fully_async.num_parallel_generation_workers if is_fully_async(config) else None
    return capacity(config) if workers is None else workers


def capacity(config: RunConfig) -> int:
    """Groups that may be admitted and untrained at once: ``(D + k) * B``, rounded down."""
    minibatch = config.trainer.policy_mini_batch_size
    return int(pipeline_depth(config) * minibatch + 1e-9) + steps_per_publication(config) * minibatch


def longest_request(config: RunConfig) -> int:
    """Tokens of the longest sequence that prompt and response limits allow."""
    return config.generator.max_input_length + config.generator.sampling_params.max_tokens


def max_model_len(config: RunConfig, shape: ModelShape | None) -> int:
    """Tokens per request: prompt and response limits, within what the model has positions for."""
    explicit = config.generator.inference_engine.max_model_len
    if explicit is not None:
        return explicit
    longest = longest_request(config)
    return longest if shape is None else min(longest, shape.max_position_embeddings)


def total_steps(config: RunConfig, dataset_len: int | None) -> int:
    """Optimizer steps: ``max_steps``, or as many full minibatches as the epochs hold (no barrier between epochs)."""
    if config.trainer.max_steps is not None:
        return config.trainer.max_steps
    assert dataset_len is not None, "a stream needs max_steps, which was checked"
    return config.trainer.epochs * dataset_len // config.trainer.policy_mini_batch_size


def reference_is_colocated(config: RunConfig) -> bool:
    """Whether the ranks that train the policy hold the reference policy too."""
    return needs_reference(config.trainer.algorithm) and config.rollout.stages.reference.placement == "colocated"


def reference_offload(config: RunConfig) -> bool:
    """Whether the weights of a sharded reference policy stay in main memory."""
    wanted = config.rollout.stages.reference.cpu_offload
    return config.trainer.fsdp.cpu_offload if wanted is None else wanted


def reference_device(config: RunConfig) -> str:
    """Where the reference policy computes."""
    return config.rollout.stages.reference.device or config.trainer.device


def reference_is_here(config: RunConfig) -> bool:
    """Whether there is a reference policy in a thread of the trainer's process, or in a process on the same machine."""
    return needs_reference(config.trainer.algorithm) and config.rollout.stages.reference.placement in (
        "thread",
        "process",
    )


def trains_on_gpus(config: RunConfig) -> bool:
    """Whether policy, critic or reference policy compute on GPUs."""
    trainer = config.trainer
    devices = [trainer.device]
    devices += [critic_trainer(trainer).device] if needs_critic(trainer.algorithm) else []
    devices += [reference_device(config)] if needs_reference(trainer.algorithm) else []
    return any(device != "cpu" for device in devices)


def reference_num_gpus(config: RunConfig) -> float:
    """GPUs that each of the reference's actors reserves; of its own workers, one where they compute on one."""
    reference = config.rollout.stages.reference
    by_default = reference.placement == "workers" and reference_device(config).startswith("cuda")
    return reference.ray_num_gpus or float(by_default)


def fsdp_shard_size(trainer: TrainerConfig) -> int:
    """Workers that each parameter is split over; the copies of the policy are as many as they fit into the workers."""
    split = trainer.fsdp.shard_size
    return trainer.fsdp.num_workers if split is None else split


def fsdp_num_gpus(trainer: TrainerConfig) -> float:
    """GPUs that each worker reserves: one where it trains on one."""
    wanted = trainer.fsdp.ray_num_gpus
    return float(trainer.device == "cuda") if wanted is None else wanted
