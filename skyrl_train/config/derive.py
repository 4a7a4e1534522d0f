"""Values that follow from other settings: those left at None, and questions that several rooms ask. One function each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from skyrl_train.config.import_path import import_name, is_import_path
from skyrl_train.config.keys import did_you_mean
from skyrl_train.config.model_shape import ModelShape
from skyrl_train.config.schema import (
    AlgorithmConfig,
    InferenceEngineConfig,
    ModelConfig,
    PolicyConfig,
    ProximalPolicy,
    RunConfig,
    TrainerConfig,
    TrainerMode,
    TrainingStrategy,
)
from skyrl_train.errors import ConfigError

# ---- the mode and its sizes: S, D, k, W

# By import path: a trainer imports torch, which a configuration must not.
TRAINER_CLASSES = {
    TrainerMode.sync: "skyrl_train.trainer:PPOTrainer",
    TrainerMode.one_step_off: "skyrl_train.one_step_off_trainer:OneStepOffTrainer",
    TrainerMode.fully_async: "skyrl_train.fully_async_trainer:FullyAsyncTrainer",
    TrainerMode.partial_rollout: "skyrl_train.partial_rollout_trainer:PartialRolloutTrainer",
}


def trainer_mode(mode: str) -> TrainerMode:
    """Return the built-in mode that ``trainer.mode`` means.

    The import path of a class means the mode of its nearest built-in ancestor: a subclass of ``FullyAsyncTrainer`` is
    planned as ``fully_async``.

    Raises:
        ConfigError: the mode is unknown, or the import path leads to no subclass of ``PPOTrainer``.
    """
    if mode in TrainerMode.__members__:
        return TrainerMode(mode)
    remedy = (
        f"Set it to {', '.join(TrainerMode)}, or to a subclass of skyrl_train.PPOTrainer, as package.module:MyTrainer or "
        "file.py:MyTrainer."
    )
    if not is_import_path(mode):
        raise ConfigError(f"trainer.mode={mode} is unknown.{did_you_mean(mode, TrainerMode.__members__)} {remedy}")
    cls = import_name(mode, "trainer.mode")
    built_in = {path: name for name, path in TRAINER_CLASSES.items()}
    # By path and not by class, because the trainers import torch.
    for ancestor in getattr(cls, "__mro__", ()):  # nearest first
        path = f"{ancestor.__module__}:{ancestor.__qualname__}"
        if path in built_in:
            return built_in[path]
    raise ConfigError(f"trainer.mode={mode} is no subclass of PPOTrainer. {remedy}")


def is_async(config: RunConfig) -> bool:
    """Return whether generation runs ahead of training in any way."""
    return trainer_mode(config.trainer.mode) is not TrainerMode.sync


def is_fully_async(config: RunConfig) -> bool:
    """Return whether generation never stops; most settings of ``trainer.fully_async`` count only then."""
    return trainer_mode(config.trainer.mode) is TrainerMode.fully_async


def train_batch_size(config: RunConfig) -> int:
    """Return the groups per generation phase: a multiple of B in sync, and B in all other modes."""
    size = config.trainer.train_batch_size
    return config.trainer.policy_mini_batch_size if size is None or is_async(config) else size


def max_staleness_steps(config: RunConfig) -> int:
    """Return S, the bound on a group's lag. In sync, the last of a batch's k minibatches is k - 1 steps old when it trains."""
    mode = trainer_mode(config.trainer.mode)
    if mode is TrainerMode.sync:
        return weight_sync_interval(config) - 1
    return 1 if mode is TrainerMode.one_step_off else config.trainer.fully_async.max_staleness_steps


def generate_ahead_steps(config: RunConfig) -> float | None:
    """Return D, the steps that generation may run ahead. None: it adapts during the run, up to ``S - k + 1``."""
    mode = trainer_mode(config.trainer.mode)
    if mode is TrainerMode.sync:
        return 0
    if mode is TrainerMode.one_step_off:
        return 1
    if mode is TrainerMode.partial_rollout:
        return config.trainer.partial_rollout.oversubmit_factor - 1
    depth = config.trainer.fully_async.generate_ahead_steps
    # With S < k there is no depth to adapt; 0 makes S < k - 1 an error like any other depth that is too large.
    return 0 if depth is None and max_staleness_steps(config) < weight_sync_interval(config) else depth


def largest_depth(config: RunConfig) -> float:
    """Return the largest depth of the run: D, or what ``S >= D + k - 1`` allows if it adapts."""
    depth = generate_ahead_steps(config)
    return max_staleness_steps(config) - weight_sync_interval(config) + 1 if depth is None else depth


def weight_sync_interval(config: RunConfig) -> int:
    """Return k, the optimizer steps between two weight syncs. In sync, the minibatches of a batch."""
    if not is_async(config):
        return train_batch_size(config) // config.trainer.policy_mini_batch_size
    return config.trainer.fully_async.weight_sync_interval if is_fully_async(config) else 1


def capacity(config: RunConfig) -> int:
    """Return how many groups may be admitted and untrained at once: ``(D + k) * B`` with the largest D, rounded down."""
    minibatch = config.trainer.policy_mini_batch_size
    return int(largest_depth(config) * minibatch + 1e-9) + weight_sync_interval(config) * minibatch


def num_workers(config: RunConfig) -> int:
    """Return W, the groups generated at once: by default as many as are ever admitted."""
    if not is_async(config):
        return train_batch_size(config)
    workers = config.trainer.fully_async.num_parallel_generation_workers if is_fully_async(config) else None
    return capacity(config) if workers is None else workers


def overlap_weight_sync(config: RunConfig) -> bool:
    """Return whether the next step begins before the engines serve the weights of the last one.

    One step off always does: the next batch has ended before the weight sync begins. Fully asynchronous runs do by default with
    a given depth of at least one step. A depth that adapts counts the groups that run when a step begins. With overlap more of
    them run then, so the depth and the lag would grow (``guess_number``: from 2 to 4, at equal speed).
    """
    if not is_fully_async(config):
        return trainer_mode(config.trainer.mode) is TrainerMode.one_step_off
    asynchronous = config.trainer.fully_async
    if asynchronous.overlap_weight_sync is not None:
        return asynchronous.overlap_weight_sync
    return asynchronous.generate_ahead_steps is not None and begins_during_weight_sync(config)


def begins_during_weight_sync(config: RunConfig) -> bool:
    """Return whether the depth leaves the groups with which a step begins, before the engines serve the last version."""
    minibatch = config.trainer.policy_mini_batch_size
    begins_with = config.trainer.fully_async.streaming_min_groups or minibatch
    return round(largest_depth(config) * minibatch, 6) >= begins_with


def staleness_policy(config: RunConfig) -> str:
    """Return the policy for groups beyond S. One step off always waits: a resumed run finishes its last batch first."""
    one_step_off = trainer_mode(config.trainer.mode) is TrainerMode.one_step_off
    return "wait" if one_step_off else config.trainer.fully_async.staleness_policy


def streaming_min_groups(config: RunConfig) -> int | None:
    """Return how many groups train as soon as they are ready; None: whole minibatches."""
    return config.trainer.fully_async.streaming_min_groups if is_fully_async(config) else None


def total_steps(config: RunConfig, dataset_len: int | None) -> int:
    """Return the optimizer steps: ``max_steps``, or as many full minibatches as all epochs together hold."""
    if config.trainer.max_steps is not None:
        return config.trainer.max_steps
    assert dataset_len is not None, "a stream without max_steps is an error in config.validate"
    return config.trainer.epochs * dataset_len // config.trainer.policy_mini_batch_size


def max_model_len(config: RunConfig, shape: ModelShape | None) -> int:
    """Return the tokens per request: prompt and response limits, within the positions of the model."""
    explicit = config.generator.inference_engine.max_model_len
    if explicit is not None:
        return explicit
    longest = config.generator.max_input_length + config.generator.sampling_params.max_tokens
    positions = None if shape is None else shape.max_position_embeddings
    return longest if positions is None else min(longest, positions)


# ---- the algorithm

WHOLE_MINIBATCH_LOSSES = ("clip_cov", "kl_cov")
CLIPPED_LOSSES = ("ppo_clip", "dual_clip", "gspo", "clip_cov")


def training_executor(trainer: TrainerConfig, engine: InferenceEngineConfig) -> str:
    """Return where a model trains: in ``ray`` actors, in a child ``process`` or in a ``thread`` of this process.

    Without a setting, :mod:`skyrl_train.build.processes` uses a thread where a process would lack a loss or an estimator of this
    program.
    """
    if trainer.strategy is not TrainingStrategy.local:
        return "ray"
    if trainer.executor is not None:
        return trainer.executor
    return "process" if trainer.device == "cpu" and engine.executor != "thread" else "thread"


def clip_bounds(algorithm: AlgorithmConfig) -> tuple[float, float]:
    """Return how far below and above 1 the ratio of a clipped loss counts.

    The ratio of gspo is a mean over a sequence and moves a thousandth as far as a token's: the paper (arXiv 2507.18071) has
    3e-4 and 4e-4.
    """
    low, high = (3e-4, 4e-4) if algorithm.policy_loss_type == "gspo" else (0.2, 0.2)
    given_low, given_high = algorithm.eps_clip_low, algorithm.eps_clip_high
    return low if given_low is None else given_low, high if given_high is None else given_high


def normalizes_over_minibatch(algorithm: AlgorithmConfig) -> bool:
    """Return whether advantages are normalized over all tokens of a minibatch.

    This belongs to the definition of reinforce++, and to PPO as it is used for language models.
    """
    if algorithm.advantage_batch_normalize is None:
        return algorithm.advantage_estimator in ("reinforce++", "gae")
    return algorithm.advantage_batch_normalize


def needs_reference(algorithm: AlgorithmConfig) -> bool:
    """Return whether groups need log-probs of the policy that the run starts from."""
    return algorithm.kl_loss_coef > 0 or algorithm.kl_reward_coef > 0


def needs_critic(algorithm: AlgorithmConfig) -> bool:
    """Return whether advantages need values, and so a critic."""
    return algorithm.advantage_estimator == "gae"


# ---- engines and weight transport

BACKENDS = ("embedded", "vllm", "vllm_remote")


@dataclass(frozen=True, slots=True)
class Transport:
    """A built-in weight transport.

    Attributes:
        path: the import path of its class, imported only where it is used.
        backends: the engines that it reaches.
        folder: it needs ``generator.weight_folder``.
        gpu: trainer and engines must be on GPUs.
        copies: of the weights, in the trainer's memory.
    """

    path: str
    backends: tuple[str, ...]
    folder: bool = False
    gpu: bool = False
    copies: int = 2


TRANSPORTS: Mapping[str, Transport] = {
    "shared_memory": Transport("skyrl_train.weight_sync.shared_memory:SharedMemoryTransport", BACKENDS),
    "disk": Transport("skyrl_train.weight_sync.disk:DiskTransport", BACKENDS, folder=True, copies=0),
    "delta": Transport("skyrl_train.weight_sync.delta:DeltaTransport", BACKENDS, folder=True, copies=1),
    "gloo": Transport("skyrl_train.weight_sync.process_group:GlooTransport", ("embedded", "vllm")),
    "nccl": Transport("skyrl_train.weight_sync.process_group:NcclTransport", ("embedded", "vllm"), gpu=True),
    "cuda_ipc": Transport("skyrl_train.weight_sync.cuda_ipc:CudaIpcTransport", ("embedded", "vllm"), gpu=True),
}


def weight_transport(config: RunConfig) -> str:
    """Return the transport's name.

    By default disk if a folder is named, CUDA IPC on shared GPUs, gloo to engines in other Ray actors, else shared memory.
    """
    if config.generator.weight_transport is not None:
        return config.generator.weight_transport
    if config.generator.weight_folder is not None:
        return "disk"
    engine, trainer = config.generator.inference_engine, config.trainer
    if engines_share_ranks(config) and engine.backend in TRANSPORTS["cuda_ipc"].backends:
        return "cuda_ipc"
    if engine.executor == "ray" and engine.backend in TRANSPORTS["gloo"].backends:
        return "gloo"
    on_one_gpu = trainer.device != "cpu" and engine_device_names(engine) == {full_device_name(trainer.device)}
    colocated = trainer.placement.colocate_all and engine.executor == "process"
    return "cuda_ipc" if colocated and on_one_gpu else "shared_memory"


def num_evaluation_engines(config: RunConfig) -> int:
    """Return the number of separate engines for the evaluation; 0 if nothing is ever evaluated."""
    return config.trainer.eval.num_engines if config.trainer.eval.interval > 0 else 0


def num_all_engines(config: RunConfig) -> int:
    """Return the number of the run's and the evaluation's engines, in this order."""
    return config.generator.inference_engine.num_engines + num_evaluation_engines(config)


# ---- training workers and the critic

# Settings of trainer.critic.fsdp that are about the critic's model, and so also count for a critic in the policy's ranks.
COLOCATED_CRITIC_SETTINGS = ("cpu_offload", "reshard_after_forward")


# The activations of 10,000 tokens in bfloat16 then take 20 GiB or more, a quarter of a GPU's memory.
CHECKPOINTED_PARAMETERS = 1_000_000_000


def fsdp_shard_size(trainer: TrainerConfig) -> int:
    """Return the number of workers that each parameter is split over."""
    split = trainer.fsdp.shard_size
    return trainer.fsdp.num_workers if split is None else split


def fsdp_num_gpus(trainer: TrainerConfig) -> float:
    """Return the GPUs that each worker reserves: none on the CPU, else by default one."""
    wanted = trainer.fsdp.ray_num_gpus
    return float(trainer.device == "cuda") if wanted is None or trainer.device == "cpu" else wanted


def critic_is_colocated(trainer: TrainerConfig) -> bool:
    """Return whether the ranks that train the policy also hold the critic."""
    sharded = trainer.strategy is TrainingStrategy.fsdp2
    return sharded and needs_critic(trainer.algorithm) and trainer.critic.placement == "colocated"


def critic_shares_memory(trainer: TrainerConfig) -> bool:
    """Return whether a critic computes in the policy's memory: in its ranks, or in this process on the same device."""
    if trainer.strategy is TrainingStrategy.fsdp2:
        return critic_is_colocated(trainer)
    return needs_critic(trainer.algorithm) and (
        full_device_name(critic_trainer(trainer).device) == full_device_name(trainer.device)
    )


def gradient_checkpointing(trainer: TrainerConfig, num_parameters: int) -> bool:
    """Return whether layers run again in the backward pass of a model of this size: by default large ones on GPUs."""
    wanted = trainer.policy.gradient_checkpointing
    return trainer.device != "cpu" and num_parameters >= CHECKPOINTED_PARAMETERS if wanted is None else wanted


def full_device_name(device: str) -> str:
    """Return the name with its index: ``cuda`` is the first GPU."""
    return "cuda:0" if device == "cuda" else device


def critic_model(trainer: TrainerConfig) -> ModelConfig:
    """Return the model that the critic starts from: by default the policy's."""
    path = trainer.critic.model.path
    return trainer.policy.model if path is None else ModelConfig(path=path)


def critic_trainer(trainer: TrainerConfig) -> TrainerConfig:
    """Return the trainer settings for the critic: its own in the fields of the policy's."""
    critic, fsdp, device = trainer.critic, trainer.critic.fsdp, trainer.critic.device or trainer.device
    # Ranks and device are the policy's; only the treatment of the critic's own weights can differ.
    if critic_is_colocated(trainer):
        fsdp = replace(trainer.fsdp, **{name: getattr(fsdp, name) for name in COLOCATED_CRITIC_SETTINGS})
        device = trainer.device
    policy = PolicyConfig(
        optimizer_config=critic.optimizer_config,
        dtype=critic.dtype,
        gradient_checkpointing=critic.gradient_checkpointing,
    )
    return replace(trainer, policy=policy, fsdp=fsdp, device=device)


# ---- the reference policy


def reference_is_colocated(config: RunConfig) -> bool:
    """Return whether the ranks that train the policy also hold the reference policy."""
    return needs_reference(config.trainer.algorithm) and config.rollout.stages.reference.executor == "colocated"


def reference_is_local(config: RunConfig) -> bool:
    """Return whether a reference policy is in threads of the trainer's process, or in processes on the same machine."""
    executor = config.rollout.stages.reference.executor
    return needs_reference(config.trainer.algorithm) and executor in ("thread", "process")


def reference_offload(config: RunConfig) -> bool:
    """Return whether the weights of a sharded reference policy stay in main memory."""
    wanted = config.rollout.stages.reference.cpu_offload
    return config.trainer.fsdp.cpu_offload if wanted is None else wanted


def reference_device(config: RunConfig) -> str:
    """Return the device of the reference policy: by default the policy's, and always if it is colocated."""
    reference = config.rollout.stages.reference
    return config.trainer.device if reference.executor == "colocated" else reference.device or config.trainer.device


def reference_num_gpus(config: RunConfig) -> float:
    """Return the GPUs that each of the reference's actors reserves: none on the CPU, else by default one per worker."""
    reference = config.rollout.stages.reference
    if reference_device(config) == "cpu":
        return 0.0
    return reference.ray_num_gpus or float(reference.executor == "workers")


# ---- the proximal policy


def has_replica(config: RunConfig) -> bool:
    """Return whether proximal log-probs come from a replica of the policy with its own resources."""
    return (
        config.trainer.algorithm.proximal_policy is ProximalPolicy.arrival
        and config.rollout.stages.proximal.executor != "trainer"
    )


def replica_device(config: RunConfig) -> str:
    """Return the device of the replica: by default the policy's."""
    return config.rollout.stages.proximal.device or config.trainer.device


def replica_num_gpus(config: RunConfig) -> float:
    """Return the GPUs that the replica's actor reserves: none on the CPU, else by default one."""
    if replica_device(config) == "cpu":
        return 0.0
    wanted = config.rollout.stages.proximal.ray_num_gpus
    return 1.0 if wanted is None else wanted


def trains_on_gpus(config: RunConfig) -> bool:
    """Return whether policy, critic, reference policy or replica compute on GPUs."""
    trainer = config.trainer
    devices = [trainer.device]
    devices += [critic_trainer(trainer).device] if needs_critic(trainer.algorithm) else []
    devices += [reference_device(config)] if needs_reference(trainer.algorithm) else []
    devices += [replica_device(config)] if has_replica(config) else []
    return any(device != "cpu" for device in devices)


# ---- the engines' GPUs


def engine_num_gpus(engine: InferenceEngineConfig) -> int:
    """Return the GPUs that an engine computes on: one per rank."""
    if engine.device == "cpu":
        return 0
    return 1 if engine.backend == "embedded" else engine.tensor_parallel_size * engine.pipeline_parallel_size


def engine_ray_num_gpus(engine: InferenceEngineConfig) -> float:
    """Return the GPUs that the actor of an engine reserves: by default those that it computes on, unless it names one."""
    if engine.ray_num_gpus is not None:
        return engine.ray_num_gpus
    return float(engine_num_gpus(engine)) if engine.device == "cuda" else 0.0


def engines_share_ranks(config: RunConfig) -> bool:
    """Return whether engines in Ray use the GPUs of the ranks that train the policy, in turns with them."""
    engine, trainer = config.generator.inference_engine, config.trainer
    sharded = trainer.strategy is TrainingStrategy.fsdp2 and trainer.device == "cuda"
    return trainer.placement.colocate_all and sharded and engine.executor == "ray" and engine.device == "cuda"


def engine_devices(engine: InferenceEngineConfig, index: int) -> list[int]:
    """Return the GPUs of this machine that engine number ``index`` of vLLM computes on; empty on a CPU.

    The numbers of the evaluation's engines continue after those of the run's.
    """
    each = engine_num_gpus(engine)
    mine = range(index * each, (index + 1) * each)
    return list(mine) if engine.devices is None else [engine.devices[position] for position in mine]


def engines_share_trainer_gpu(config: RunConfig) -> bool:
    """Return whether engines of this machine use the GPU on which a local trainer trains."""
    engine, trainer = config.generator.inference_engine, config.trainer
    if trainer.strategy is not TrainingStrategy.local or trainer.device == "cpu":
        return False
    here = engine.executor != "ray" and engine.backend != "vllm_remote"
    return here and full_device_name(trainer.device) in engine_device_names(engine)


def engine_device_names(engine: InferenceEngineConfig) -> set[str]:
    """Return the devices of the run's engines on this machine, as :func:`full_device_name` does."""
    if engine.backend == "embedded" or engine.device == "cpu":
        return {full_device_name(engine.device)}
    gpus = range(engine.num_engines * engine_num_gpus(engine)) if engine.devices is None else engine.devices
    return {f"cuda:{gpu}" for gpu in gpus}


VLLM_UTILIZATION = 0.92  # vLLM's default of gpu_memory_utilization
CUDA_CONTEXT = 0.02  # of a GPU's memory, which a process takes beside its tensors


def trainer_memory_fraction(config: RunConfig) -> float | None:
    """Return the part of its GPU that local training may use, because vLLM on the same GPU has the rest all the time; None: there
    is no such engine.

    An engine that ends and starts again needs its part free. Without a limit, torch might keep some of it by then.
    """
    engine, trainer = config.generator.inference_engine, config.trainer
    takes_turns = trainer.placement.colocate_all or engine.engine_args.get("enable_sleep_mode")
    local = trainer.strategy is TrainingStrategy.local and trainer.device != "cpu"
    if not local or takes_turns or engine.backend != "vllm" or engine.executor == "ray" or engine.device == "cpu":
        return None
    device = full_device_name(trainer.device)
    indices = range(num_all_engines(config))
    ranks = sum(device == f"cuda:{gpu}" for index in indices for gpu in engine_devices(engine, index))
    utilization = float(engine.engine_args.get("gpu_memory_utilization", VLLM_UTILIZATION))
    if not ranks or engine.engine_args.get("kv_cache_memory_bytes") is not None:
        return None
    return max(CUDA_CONTEXT, 1 - ranks * utilization - CUDA_CONTEXT)


def engines_start_first(config: RunConfig) -> bool:
    """Return whether training may load its models only when the engines run.

    vLLM measures the free memory of its GPU while it starts. Memory that another process takes meanwhile counts as its own
    and is missing from its KV cache; memory that one gives back ends the start. With ``colocate_all``, training needs the
    memory that engines free asleep.
    """
    if config.trainer.placement.colocate_all:
        return True
    return config.generator.inference_engine.backend not in ("embedded", "vllm_remote") and trains_on_gpus(config)
