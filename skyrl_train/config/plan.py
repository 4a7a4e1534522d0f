"""What a configuration amounts to: every derived number, for the trainers and for ``--dry-run``."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from skyrl_train.config import derive, refusals
from skyrl_train.config.activation_memory import activation_bytes
from skyrl_train.config.limits import Problems
from skyrl_train.config.model_shape import BYTES_PER_ELEMENT, ModelShape, model_shape
from skyrl_train.config.schema import (
    AlgorithmConfig,
    OptimizerConfig,
    RunConfig,
    TrainerConfig,
    TrainerMode,
    TrainingStrategy,
)
from skyrl_train.config.transports import staging_copies

_MIB = 2**20
_FLOAT32_BYTES = 4


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """Bytes that stay allocated during training; activations come on top. From the model's shape, not measured."""

    num_parameters: int
    num_trained: int  # fewer where an adapter is trained
    policy_bytes: int  # the trained weights, with float32 masters where they are narrower
    gradient_bytes: int  # float32
    optimizer_bytes: int  # the two moments of AdamW, float32
    staging_bytes: int  # copies of the weights on their way to the engines
    engine_weight_bytes: int  # all engines together
    kv_cache_bytes: int  # all embedded engines together, every slot full
    critic_bytes: int = 0  # weights, gradients and moments of a critic of the policy's size, over all its ranks
    num_ranks: int = 1  # that share the weights, gradients and moments of a copy; the staging copies are all rank 0's
    activation_bytes: int = 0  # of each rank, at most, beside what stays

    @property
    def trainer_bytes(self) -> int:
        """What the training backend holds, all its ranks together."""
        return self.policy_bytes + self.gradient_bytes + self.optimizer_bytes + self.staging_bytes + self.critic_bytes

    @property
    def rank_bytes(self) -> int:
        """What each rank holds of the policy's state; the layer that it computes with comes whole on top."""
        return -(-(self.policy_bytes + self.gradient_bytes + self.optimizer_bytes) // self.num_ranks)

    @property
    def engine_bytes(self) -> int:
        """What the engines hold."""
        return self.engine_weight_bytes + self.kv_cache_bytes


@dataclass(frozen=True, slots=True)
class Plan:
    """The resolved run. Letters as in the documentation: B, n, S, D, k, W."""

    config: RunConfig
    mode: TrainerMode
    dataset_len: int | None  # prompts; None: a stream
    total_steps: int
    steps_per_epoch: float | None  # None: a stream; the tail of an epoch flows into the next one
    policy_mini_batch_size: int  # B
    n_samples_per_prompt: int  # n
    train_batch_size: int  # groups per generation phase
    max_staleness_steps: int  # S; in sync, batch // minibatch - 1
    pipeline_depth: float  # D
    steps_per_publication: int  # k
    overlap_publication: bool
    streaming_min_groups: int | None  # None: a step begins with all its groups
    num_workers: int  # W
    straggler_policy: str
    max_model_len: int  # tokens per request, prompt and response
    memory: MemoryEstimate | None  # None: only loading the model would tell

    @property
    def capacity(self) -> int:
        """Groups that may be admitted and untrained at once: ``(D + k) * B``, rounded down."""
        return derive.capacity(self.config)

    @property
    def sequences_per_step(self) -> int:
        """Samples that one optimizer step trains on."""
        return self.policy_mini_batch_size * self.n_samples_per_prompt

    def describe(self) -> str:
        """A table for ``--dry-run``: one line per fact, grouped, nothing to be computed by the reader."""
        sections = [
            ("run", _run_rows(self)),
            ("data", _data_rows(self)),
            ("asynchrony" if self.mode is not TrainerMode.sync else "generation", _rollout_rows(self)),
            ("engines", _engine_rows(self)),
            ("memory", _memory_rows(self.memory)),
        ]
        width = max(len(name) for _, rows in sections for name, _ in rows)
        lines: list[str] = []
        for title, rows in sections:
            lines.append(title)
            lines += [f"  {name:<{width}}  {value}" for name, value in rows]
        return "\n".join(lines)


def resolve(
    config: RunConfig, dataset_len: int | None, known_names: Mapping[str, Collection[str]] | None = None
) -> Plan:
    """Derives everything that the configuration leaves open.

    Args:
        dataset_len: prompts in the training set; None: a stream.
        known_names: see :func:`skyrl_train.config.refusals.refuse`.

    Raises:
        ConfigError: the configuration, or the configuration with a data set of this size, cannot work.
    """
    refusals.refuse(config, known_names)
    steps = derive.total_steps(config, dataset_len)
    refusals.raise_problems(list(_problems_with_data(config, dataset_len, steps)))
    shape = model_shape(config.trainer.policy.model)
    length = derive.max_model_len(config, shape)
    return Plan(
        config=config,
        mode=config.trainer.mode,
        dataset_len=dataset_len,
        total_steps=steps,
        steps_per_epoch=None if dataset_len is None else dataset_len / config.trainer.policy_mini_batch_size,
        policy_mini_batch_size=config.trainer.policy_mini_batch_size,
        n_samples_per_prompt=config.generator.n_samples_per_prompt,
        train_batch_size=derive.train_batch_size(config),
        max_staleness_steps=derive.max_staleness_steps(config),
        pipeline_depth=derive.pipeline_depth(config),
        steps_per_publication=derive.steps_per_publication(config),
        overlap_publication=derive.overlap_publication(config),
        streaming_min_groups=derive.streaming_min_groups(config),
        num_workers=derive.num_workers(config),
        straggler_policy=derive.straggler_policy(config),
        max_model_len=length,
        memory=estimate_memory(config, shape, length),
    )


def estimate_memory(config: RunConfig, shape: ModelShape | None, max_model_len: int) -> MemoryEstimate | None:
    """Adds up what a local backend and the embedded engines allocate for a model of this shape; None where only loading the
    model would tell.
    """
    lora = config.trainer.policy.model.lora
    learning = None if shape is None else shape.adapter_parameters(lora) if lora.rank else shape.num_parameters
    if shape is None or learning is None:
        return None
    engine = config.generator.inference_engine
    sharded = config.trainer.strategy is TrainingStrategy.fsdp2
    served = BYTES_PER_ELEMENT[engine.dtype]
    parameters = shape.num_parameters
    base = parameters if lora.rank else 0
    trained = _weight_bytes(config.trainer.policy.dtype, sharded)
    of_critic = _weight_bytes(config.trainer.critic.dtype, sharded) + 3 * _FLOAT32_BYTES
    slots = engine.num_engines * engine.max_num_seqs
    return MemoryEstimate(
        num_parameters=parameters,
        num_trained=learning,
        policy_bytes=base * BYTES_PER_ELEMENT[config.trainer.policy.dtype] + learning * trained,
        gradient_bytes=learning * _FLOAT32_BYTES,
        optimizer_bytes=learning * 2 * _FLOAT32_BYTES,
        staging_bytes=staging_copies(config) * learning * served,
        engine_weight_bytes=engine.num_engines * (base + learning) * served,
        kv_cache_bytes=slots * max_model_len * shape.kv_elements_per_token * served,
        critic_bytes=parameters * of_critic if derive.needs_critic(config.trainer.algorithm) else 0,
        num_ranks=derive.fsdp_shard_size(config.trainer) if sharded else 1,
        activation_bytes=activation_bytes(config.trainer, shape, _micro_batch_tokens(config, max_model_len)),
    )


def _micro_batch_tokens(config: RunConfig, max_model_len: int) -> int:
    """Of the largest micro-batch that the run can have."""
    sequences = config.trainer.policy_mini_batch_size * config.generator.n_samples_per_prompt
    return min(config.trainer.micro_batch_tokens, sequences * max_model_len)


def _weight_bytes(dtype: str, sharded: bool) -> int:
    """Of one trained weight, with its float32 master where it is narrower."""
    if sharded:  # it is its own master: what is narrower is a layer at a time, while it computes
        return _FLOAT32_BYTES
    trained = BYTES_PER_ELEMENT[dtype]
    return trained + (_FLOAT32_BYTES if trained < _FLOAT32_BYTES else 0)


def _problems_with_data(config: RunConfig, dataset_len: int | None, steps: int) -> Problems:
    minibatch = config.trainer.policy_mini_batch_size
    if dataset_len is None:
        return
    if dataset_len < 1:
        yield "The data set has no prompts. Name files in data.train_data, or set data.generate."
    elif steps < 1:
        yield (
            f"{config.trainer.epochs} epoch(s) of {dataset_len} prompts do not fill one minibatch of {minibatch}. Set "
            f"trainer.epochs={-(-minibatch // dataset_len)}, or trainer.policy_mini_batch_size={dataset_len} or less."
        )


def _run_rows(plan: Plan) -> list[tuple[str, str]]:
    trainer = plan.config.trainer
    optimizer = trainer.policy.optimizer_config
    folder = trainer.run_dir or f"{trainer.runs_dir}/{trainer.run_name}-N"
    build = trainer.policy.model.build
    never = ", which this run does not reach the end of" if optimizer.num_warmup_steps > plan.total_steps else ""
    model = trainer.policy.model.path or (
        f"a new {build.model_type}, {build.num_layers} layers of {build.hidden_size}, "
        f"{len(set(build.alphabet))} characters"
    )
    return [
        ("mode", plan.mode.value),
        ("model", f"{model} ({trainer.policy.dtype}, on {trainer.device})"),
        *_adapter_rows(plan.config),
        *_rank_rows(plan.config),
        ("algorithm", _algorithm_row(trainer.algorithm)),
        ("correction", _correction_row(trainer.algorithm)),
        (
            "learning rate",
            f"{optimizer.lr:g}{_rate_words(optimizer)}, {optimizer.scheduler}, warm-up {optimizer.num_warmup_steps} steps{never}",
        ),
        *_critic_rows(trainer),
        ("micro-batches", _micro_batch_row(trainer)),
        ("run folder", folder),
        ("checkpoints", _checkpoint_row(trainer)),
    ]


def _algorithm_row(algorithm: AlgorithmConfig) -> str:
    low, high = derive.clip_bounds(algorithm)
    clips = algorithm.policy_loss_type in derive.CLIPPED_LOSSES
    bounds = f" within [1 - {low:g}, 1 + {high:g}]" if clips else ""
    return (
        f"{algorithm.advantage_estimator}, {algorithm.policy_loss_type}{bounds} around the policy of the "
        f"{algorithm.proximal_policy}, {algorithm.loss_reduction}"
    )


def _correction_row(algorithm: AlgorithmConfig) -> str:
    """What is done about tokens that another policy, or another program, has sampled."""
    correction, parts = algorithm.off_policy_correction, []
    bounds = {
        "token": f"ratios up to {correction.token_tis_ratio_clip_high:g}",
        "sequence": f"ratios of sequences up to {correction.sequence_tis_ratio_clip_high:g}",
        "geometric": f"mean ratios of sequences up to {correction.sequence_tis_ratio_clip_high:g}",
        "icepop": f"ratios within [{correction.icepop_ratio_low:g}, {correction.icepop_ratio_high:g}], others rejected",
    }
    if (kind := correction.tis_ratio_type) is not None:
        parts.append(f"weights {kind}: {bounds.get(kind, 'your own')}")
    for rule in correction.rejections:
        low, high = ("" if bound is None else f"{bound:g}" for bound in (rule.low, rule.high))
        parts.append(f"rejected: {rule.statistic} by {rule.level} outside [{low}, {high}]")
    if correction.m2po_threshold is not None:
        parts.append(f"rejected: M2PO beyond {correction.m2po_threshold:g}")
    return "; ".join(parts) or "none"


def _checkpoint_row(trainer: TrainerConfig) -> str:
    when = f"every {trainer.ckpt_interval} steps" if trainer.ckpt_interval else "at the end"
    return when if trainer.ckpt_path is None else f"{when}, in {trainer.ckpt_path}"


def _adapter_rows(config: RunConfig) -> list[tuple[str, str]]:
    lora = config.trainer.policy.model.lora
    if not lora.rank:
        return []
    targets = ", ".join(lora.target_modules)
    but = f" but {', '.join(lora.exclude_modules)}" if lora.exclude_modules else ""
    return [
        (
            "adapter",
            f"LoRA of rank {lora.rank}, alpha {lora.alpha:g}, on {targets}{but}; it alone is trained and published",
        )
    ]


def _rate_words(optimizer: OptimizerConfig) -> str:
    return "".join(f", x {factor:g} for {pattern}" for pattern, factor in optimizer.lr_multipliers.items())


def _critic_rows(trainer: TrainerConfig) -> list[tuple[str, str]]:
    if not derive.needs_critic(trainer.algorithm):
        return []
    critic, algorithm = derive.critic_trainer(trainer), trainer.algorithm
    workers = f"{critic.fsdp.num_workers} Ray actors of its own"
    where = "in this process" if trainer.strategy is TrainingStrategy.local else workers
    clip = "unbounded" if algorithm.value_clip is None else f"moves of {algorithm.value_clip:g}"
    optimizer = critic.policy.optimizer_config
    model = trainer.critic.model.path or "the policy's model"
    return [
        (
            "critic",
            f"{model} ({critic.policy.dtype}, on {critic.device}, {where}), gamma {algorithm.gamma:g}, "
            f"lambda {algorithm.lambd:g}, {clip}",
        ),
        ("its learning rate", f"{optimizer.lr:g}, {optimizer.scheduler}, warm-up {optimizer.num_warmup_steps} steps"),
    ]


def _micro_batch_row(trainer: TrainerConfig) -> str:
    rows = {None: "packed where the model allows it", True: "packed", False: "padded"}[trainer.packing]
    checkpointing = "; layers run again in the backward pass" if trainer.policy.gradient_checkpointing else ""
    return f"up to {trainer.micro_batch_tokens:,} tokens, {rows}{checkpointing}"


def _rank_rows(config: RunConfig) -> list[tuple[str, str]]:
    trainer = config.trainer
    if trainer.strategy is TrainingStrategy.local:
        return []
    gpus = derive.fsdp_num_gpus(trainer)
    each = f"{trainer.fsdp.ray_num_cpus:g} CPUs" + (f" and {gpus:g} GPUs" if gpus else "")
    talk = "NCCL and gloo" if trainer.device == "cuda" else "gloo"
    together = trainer.fsdp.sequence_parallel_size
    slices = f"; {together} share each micro-batch, a slice of the tokens each" if together > 1 else ""
    copies = trainer.fsdp.num_workers // derive.fsdp_shard_size(trainer)
    slices += f"; {copies} copies of the policy" if copies > 1 else ""
    slices += "; state in main memory" if trainer.fsdp.cpu_offload else ""
    restarts = f"; up to {trainer.max_restarts} restarts from the last checkpoint" if trainer.max_restarts else ""
    return [("ranks", f"{trainer.fsdp.num_workers} Ray actors (FSDP2, {talk}), each with {each}{slices}{restarts}")]


def _data_rows(plan: Plan) -> list[tuple[str, str]]:
    data, environment = plan.config.data, plan.config.environment.env_class
    source = ", ".join(data.train_data) or f"generated by {environment} (seed {data.seed})"
    prompts, steps = source, f"{plan.total_steps:,}, or until the stream ends"
    if plan.dataset_len is not None:
        epochs = plan.total_steps * plan.policy_mini_batch_size / plan.dataset_len
        prompts = f"{plan.dataset_len:,}, {source}"
        steps = f"{plan.total_steps:,} ({epochs:.2f} epochs; {plan.steps_per_epoch:g} steps each)"
    return [
        ("environment", f"{environment}, up to {plan.config.generator.max_turns} turn(s)"),
        ("prompts", prompts),
        ("steps", steps),
        (
            "a step trains on",
            f"B={plan.policy_mini_batch_size} groups of n={plan.n_samples_per_prompt}: "
            f"{plan.sequences_per_step} samples",
        ),
    ]


def _rollout_rows(plan: Plan) -> list[tuple[str, str]]:
    return [*_asynchrony_rows(plan), *_actor_rows(plan.config)]


def _actor_rows(config: RunConfig) -> list[tuple[str, str]]:
    actors = config.rollout.num_actors
    if not actors:
        return []
    of_evaluation = f", and {actors} more for the evaluation's own engines" if config.trainer.eval.num_engines else ""
    return [("rollouts", f"in {actors} Ray actors of {config.rollout.ray_num_cpus:g} CPUs each{of_evaluation}")]


def _asynchrony_rows(plan: Plan) -> list[tuple[str, str]]:
    if plan.mode is TrainerMode.sync:
        return [("groups at once", f"{plan.train_batch_size} (trainer.fully_async.* has no effect in this mode)")]
    bound, k = plan.max_staleness_steps, plan.steps_per_publication
    promise = _PROMISES.get(plan.straggler_policy, f"beyond it, {plan.straggler_policy} decides")
    rows = [
        ("depth", f"D={plan.pipeline_depth:g} step(s) that generation runs ahead"),
        ("bound", f"S={bound}; {promise}"),
        ("deadline", f"a group whose oldest token has version v trains by step v + {bound + 1}"),
        ("workers", f"W={plan.num_workers} groups generated at once"),
        ("capacity", f"(D + k) * B = {plan.capacity} groups admitted and untrained"),
        ("weight updates", _publication_row(plan, "after each step" if k == 1 else f"every k={k} steps")),
    ]
    if plan.streaming_min_groups is not None:
        rows.append(
            ("streaming", f"a step trains on {plan.streaming_min_groups} groups or more as soon as they are there")
        )
    return rows


_PROMISES = {
    "accept": "a group that is older still is trained, corrected and counted",
    "wait": "never exceeded: the trainer waits where it must",
    "mask": "tokens that are older still are not trained",
    "drop": "a group that is older still is dropped, and the next prompt takes its seat",
}


def _publication_row(plan: Plan, when: str) -> str:
    if plan.mode is TrainerMode.one_step_off:
        return f"{when}, when nothing is in flight"
    if plan.mode is TrainerMode.partial_rollout:
        return f"{when}, while all requests are interrupted"
    overlap = "; the next step begins meanwhile" if plan.overlap_publication else ""
    return f"{when}; requests in flight: {plan.config.generator.pause_mode}{overlap}"


def _engine_rows(plan: Plan) -> list[tuple[str, str]]:
    engine, sampling = plan.config.generator.inference_engine, plan.config.generator.sampling_params
    invariant = ", batch-invariant" if engine.batch_invariant else ""
    return [
        (
            "engines",
            f"{engine.num_engines} x {engine.backend} ({engine.dtype}, on {engine.device}, {engine.placement})",
        ),
        ("weights travel by", _transport_row(plan)),
        ("requests", f"{engine.max_num_seqs} at once per engine, up to {plan.max_model_len} tokens{invariant}"),
        ("sampling", f"temperature {sampling.temperature:g}, up to {sampling.max_tokens} tokens a turn"),
    ]


def _transport_row(plan: Plan) -> str:
    generator, name = plan.config.generator, derive.weight_transport(plan.config)
    folder = f" in {generator.weight_folder}" if generator.weight_folder is not None else ""
    return f"{name}{folder}{', checksummed' if generator.verify_weights else ''}"


def _memory_rows(memory: MemoryEstimate | None) -> list[tuple[str, str]]:
    if memory is None:
        return [("estimate", "unknown until the model is loaded")]
    critic = f", critic {_mib(memory.critic_bytes)}" if memory.critic_bytes else ""
    return [
        ("parameters", _parameters_row(memory)),
        *([("each rank", f"{_mib(memory.rank_bytes)} of {memory.num_ranks}")] if memory.num_ranks > 1 else []),
        (
            "trainer",
            f"{_mib(memory.trainer_bytes)} (weights {_mib(memory.policy_bytes)}, "
            f"gradients {_mib(memory.gradient_bytes)}, optimizer {_mib(memory.optimizer_bytes)}, "
            f"staging {_mib(memory.staging_bytes)}{critic})",
        ),
        (
            "activations",
            f"up to {_mib(memory.activation_bytes)} on top{' of each rank' if memory.num_ranks > 1 else ''}",
        ),
        (
            "engines",
            f"{_mib(memory.engine_bytes)} (weights {_mib(memory.engine_weight_bytes)}, "
            f"KV cache {_mib(memory.kv_cache_bytes)})",
        ),
    ]


def _parameters_row(memory: MemoryEstimate) -> str:
    if memory.num_trained == memory.num_parameters:
        return f"{memory.num_parameters:,}"
    return f"{memory.num_parameters:,}, and {memory.num_trained:,} of the adapter, which are trained"


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / _MIB:,.1f} MiB"
