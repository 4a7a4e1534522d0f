"""The resolved plan of a run: every derived number, for the trainers and for ``skyrl-train plan``."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from skyrl_train.config import derive
from skyrl_train.config.import_path import is_import_path, place_of
from skyrl_train.config.memory import MemoryEstimate, estimate_memory
from skyrl_train.config.model_shape import model_shape
from skyrl_train.config.schema import (
    AlgorithmConfig,
    OptimizerConfig,
    RunConfig,
    TrainerConfig,
    TrainerMode,
    TrainingStrategy,
)
from skyrl_train.config.validate import raise_errors, validate

_MIB = 2**20
_WEIGHTED_SUM = "skyrl_train.rollout.stages.reward:WeightedSum"
Rows = list[tuple[str, str]]  # facts by name


@dataclass(frozen=True, slots=True)
class Plan:
    """The resolved run. Letters as in the documentation: B, n, S, D, k, W."""

    config: RunConfig
    mode: TrainerMode  # a user's trainer class has the mode of its nearest built-in ancestor
    dataset_len: int | None  # prompts; None: a stream
    total_steps: int
    steps_per_epoch: float | None  # None: a stream; the tail of an epoch flows into the next one
    policy_mini_batch_size: int  # B
    n_samples_per_prompt: int  # n
    train_batch_size: int  # groups per generation phase
    max_staleness_steps: int  # S; in sync, batch // minibatch - 1
    generate_ahead_steps: float | None  # D; None: it adapts, up to S - k + 1
    weight_sync_interval: int  # k
    overlap_weight_sync: bool
    streaming_min_groups: int | None  # None: a step begins with all its groups
    capacity: int  # groups that may be admitted and untrained at once: (D + k) * B with the largest D, rounded down
    num_workers: int  # W
    staleness_policy: str
    max_model_len: int  # tokens per request, prompt and response
    memory: MemoryEstimate | None  # None: only loading the model would tell
    warnings: tuple[str, ...] = ()  # one sentence or two for each setting that has no effect

    def describe(self) -> str:
        """Return a table for ``skyrl-train plan``: one line per fact, in sections."""
        sections = [
            ("run", _run_rows(self)),
            ("samples", _sample_rows(self.config)),
            ("data", _data_rows(self)),
            ("asynchrony" if self.mode is not TrainerMode.sync else "generation", _rollout_rows(self)),
            ("engines", _engine_rows(self)),
            ("memory", _memory_rows(self.config.trainer, self.memory)),
        ]
        return table(sections)


def table(sections: Sequence[tuple[str, Rows]]) -> str:
    """Return one line per fact, in sections."""
    width = max(len(name) for _, rows in sections for name, _ in rows)
    lines: list[str] = []
    for title, rows in sections:
        lines.append(title)
        lines += [f"  {name:<{width}}  {value}" for name, value in rows]
    return "\n".join(lines)


def resolve(
    config: RunConfig, dataset_len: int | None, known_names: Mapping[str, Collection[str]] | None = None
) -> Plan:
    """Validate the configuration and derive everything that it leaves open.

    Args:
        dataset_len: prompts in the training set; None: a stream.
        known_names: see :func:`skyrl_train.config.validate.validate`.

    Raises:
        ConfigError: the configuration cannot work, or not with a data set of this size.
    """
    validation = validate(config, known_names)
    raise_errors(validation.errors)
    minibatch, epochs = config.trainer.policy_mini_batch_size, config.trainer.epochs
    # After the validation: these derivations assume settings that can work.
    steps = derive.total_steps(config, dataset_len)
    if dataset_len is not None and dataset_len < 1:
        raise_errors(["The data set has no prompts. Name files in data.train_data, or set data.generate."])
    if dataset_len is not None and steps < 1:
        raise_errors(
            [
                f"{epochs} epoch(s) of {dataset_len} prompts do not fill one minibatch of {minibatch}. Set "
                f"trainer.epochs={-(-minibatch // dataset_len)}, or trainer.policy_mini_batch_size={dataset_len} or less."
            ]
        )
    shape = model_shape(config.trainer.policy.model)
    max_model_len = derive.max_model_len(config, shape)
    return Plan(
        config=config,
        mode=derive.trainer_mode(config.trainer.mode),
        dataset_len=dataset_len,
        total_steps=steps,
        steps_per_epoch=None if dataset_len is None else dataset_len / minibatch,
        policy_mini_batch_size=minibatch,
        n_samples_per_prompt=config.generator.n_samples_per_prompt,
        train_batch_size=derive.train_batch_size(config),
        max_staleness_steps=derive.max_staleness_steps(config),
        generate_ahead_steps=derive.generate_ahead_steps(config),
        weight_sync_interval=derive.weight_sync_interval(config),
        overlap_weight_sync=derive.overlap_weight_sync(config),
        streaming_min_groups=derive.streaming_min_groups(config),
        capacity=derive.capacity(config),
        num_workers=derive.num_workers(config),
        staleness_policy=derive.staleness_policy(config),
        max_model_len=max_model_len,
        memory=estimate_memory(config, shape, max_model_len),
        warnings=tuple(validation.warnings),
    )


def length_warnings(plan: Plan) -> Iterator[str]:
    """Yield a sentence for each setting that the number of steps leaves without effect: a warm-up that is longer than the run, as
    in a short trial of a recipe, and epochs that the run goes beyond."""
    trainer, steps = plan.config.trainer, plan.total_steps
    passes = 0.0 if plan.dataset_len is None else steps * plan.policy_mini_batch_size / plan.dataset_len
    if trainer.epochs != 1 and passes > trainer.epochs:
        yield (
            f"trainer.epochs={trainer.epochs} with trainer.max_steps={steps}, which alone ends the run, after {passes:.1f} "
            "epochs. Set trainer.max_steps=null, or leave trainer.epochs out."
        )
    optimizers = {"policy": trainer.policy.optimizer_config}
    if derive.needs_critic(trainer.algorithm):
        optimizers["critic"] = trainer.critic.optimizer_config
    for model, optimizer in optimizers.items():
        if optimizer.num_warmup_steps > steps:
            yield (
                f"trainer.{model}.optimizer_config.num_warmup_steps={optimizer.num_warmup_steps}, and the run has {steps} steps: "
                f"the learning rate never reaches {optimizer.lr:g}. Set num_warmup_steps below {steps}, or train for longer."
            )


# ---- the rows of the description


def _run_rows(plan: Plan) -> Rows:
    trainer = plan.config.trainer
    policy, optimizer, lora = trainer.policy, trainer.policy.optimizer_config, trainer.policy.model.lora
    build = policy.model.build
    model = policy.model.path or (
        f"a new {build.model_type}, {build.num_layers} layers of {build.hidden_size}, "
        f"{len(set(build.alphabet))} characters"
    )
    executor = derive.training_executor(trainer, plan.config.generator.inference_engine)
    rows = [
        ("mode", plan.mode.value if trainer.mode == plan.mode else f"{trainer.mode} ({plan.mode})"),
        ("model", f"{model} ({policy.dtype}, on {trainer.device}, {executor})"),
    ]
    engine = plan.config.generator.inference_engine
    slow = ["trainer.policy.dtype"] * (trainer.device != "cpu" and policy.dtype == "float32" and not trainer.tf32)
    critic = derive.critic_trainer(trainer)
    if derive.needs_critic(trainer.algorithm) and critic.device != "cpu" and not trainer.tf32:
        slow += ["trainer.critic.dtype"] * (critic.policy.dtype == "float32")
    slow += ["generator.inference_engine.dtype"] * (engine.device != "cpu" and engine.dtype == "float32")
    if slow:
        said = (
            f"{' and '.join(f'{key}=float32' for key in slow)}: a GPU multiplies bfloat16 matrices many times as fast"
        )
        rows.append(("precision", f"{said}; set {' '.join(f'{key}=bfloat16' for key in slow)}"))
    if trainer.init_from is not None:
        rows.append(("starts from", f"the policy of {trainer.init_from}"))
    if lora.rank:
        but = f" but {', '.join(lora.exclude_modules)}" if lora.exclude_modules else ""
        rows.append(
            (
                "adapter",
                f"LoRA of rank {lora.rank}, alpha {lora.alpha:g}, on {', '.join(lora.target_modules)}{but}; only the adapter is "
                "trained and sent to the engines",
            )
        )
    rates = "".join(f", x {factor:g} for {pattern}" for pattern, factor in optimizer.lr_multipliers.items())
    never = ", which this run does not reach the end of" if optimizer.num_warmup_steps > plan.total_steps else ""
    packing = {None: "packed if the model allows it", True: "packed", False: "padded"}[trainer.packing]
    checkpointed = bool(policy.gradient_checkpointing) if plan.memory is None else "policy" in plan.memory.checkpointed
    checkpointing = "; layers run again in the backward pass" if checkpointed else ""
    checkpoints = f"every {trainer.ckpt_interval} steps" if trainer.ckpt_interval else "at the end"
    return [
        *rows,
        *_rank_rows(trainer),
        ("algorithm", _algorithm_row(trainer.algorithm)),
        ("correction", _correction_row(trainer.algorithm)),
        ("learning rate", f"{_learning_rate(optimizer, rates)}{never}"),
        *_critic_rows(trainer),
        *_reference_rows(plan),
        *_replica_rows(plan),
        ("micro-batches", f"up to {trainer.micro_batch_tokens:,} tokens, {packing}{checkpointing}"),
        ("run folder", trainer.run_dir or f"{trainer.runs_dir}/{trainer.run_name}-N"),
        ("checkpoints", checkpoints if trainer.ckpt_path is None else f"{checkpoints}, in {trainer.ckpt_path}"),
    ]


def _learning_rate(optimizer: OptimizerConfig, rates: str = "") -> str:
    return f"{optimizer.lr:g}{rates}, {optimizer.scheduler}, warm-up {optimizer.num_warmup_steps} steps"


def _rank_rows(trainer: TrainerConfig) -> Rows:
    if trainer.strategy is TrainingStrategy.local:
        return []
    together, copies = trainer.fsdp.sequence_parallel_size, trainer.fsdp.num_workers // derive.fsdp_shard_size(trainer)
    backends = "NCCL and gloo" if trainer.device == "cuda" else "gloo"
    row = (
        f"{trainer.fsdp.num_workers} Ray actors (FSDP2, {backends}), each with "
        f"{_reserved(trainer.fsdp.ray_num_cpus, derive.fsdp_num_gpus(trainer))}"
    )
    row += f"; {together} share each micro-batch, a slice of the tokens each" if together > 1 else ""
    row += f"; {copies} copies of the policy" if copies > 1 else ""
    row += "; state in main memory" if trainer.fsdp.cpu_offload else ""
    row += f"; up to {trainer.max_restarts} restarts from the last checkpoint" if trainer.max_restarts else ""
    return [("ranks", row)]


def _reserved(cpus: float, gpus: float) -> str:
    """Describe what Ray reserves for an actor."""
    return f"{cpus:g} CPUs" + (f" and {gpus:g} GPUs" if gpus else "")


def _algorithm_row(algorithm: AlgorithmConfig) -> str:
    low, high = derive.clip_bounds(algorithm)
    clips = algorithm.policy_loss_type in derive.CLIPPED_LOSSES
    bounds = f" within [1 - {low:g}, 1 + {high:g}]" if clips else ""
    return (
        f"{algorithm.advantage_estimator}, {algorithm.policy_loss_type}{bounds} around the policy of the "
        f"{algorithm.proximal_policy}, {algorithm.loss_reduction}"
    )


def _correction_row(algorithm: AlgorithmConfig) -> str:
    """Describe the correction of tokens that another policy, or another program, has sampled."""
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


def _critic_rows(trainer: TrainerConfig) -> Rows:
    if not derive.needs_critic(trainer.algorithm):
        return []
    critic, algorithm = derive.critic_trainer(trainer), trainer.algorithm
    offload = ", state in main memory" if critic.fsdp.cpu_offload else ""
    if trainer.strategy is TrainingStrategy.local:
        where = "in this process"
    elif derive.critic_is_colocated(trainer):
        where = f"in the policy's ranks{offload}"
    else:
        together = critic.fsdp.sequence_parallel_size
        slices = f", {together} share each micro-batch" if together > 1 else ""
        each = _reserved(critic.fsdp.ray_num_cpus, derive.fsdp_num_gpus(critic))
        where = f"{critic.fsdp.num_workers} separate Ray actors with {each} each{slices}{offload}"
    clip = "unbounded" if algorithm.value_clip is None else f"moves of {algorithm.value_clip:g}"
    model = trainer.critic.model.path or "the policy's model"
    return [
        (
            "critic",
            f"{model} ({critic.policy.dtype}, on {critic.device}, {where}), gamma {algorithm.gamma:g}, "
            f"lambda {algorithm.lambd:g}, {clip}",
        ),
        ("its learning rate", _learning_rate(critic.policy.optimizer_config)),
    ]


def _replica_rows(plan: Plan) -> Rows:
    config, proximal = plan.config, plan.config.rollout.stages.proximal
    if not derive.has_replica(config):
        return []
    where = {"thread": "a thread of this process", "process": "a separate process"}.get(
        proximal.executor, f"a Ray actor of {_reserved(proximal.ray_num_cpus, derive.replica_num_gpus(config))}"
    )
    return [("proximal policy", f"a replica of the policy on {derive.replica_device(config)}, in {where}")]


def _reference_rows(plan: Plan) -> Rows:
    config, memory, reference = plan.config, plan.memory, plan.config.rollout.stages.reference
    if not derive.needs_reference(config.trainer.algorithm):
        return []
    copies, offload = reference.max_parallel, ", weights in main memory" if derive.reference_offload(config) else ""
    reserved = f"of {_reserved(reference.ray_num_cpus, derive.reference_num_gpus(config))}"
    one, several = {
        "thread": ("a thread of this process", "threads of this process"),
        "process": ("a separate process", "separate processes"),
        "ray": (f"a Ray actor {reserved}", f"Ray actors {reserved} each"),
    }.get(reference.executor, ("", ""))
    if derive.reference_is_colocated(config):
        where = f"in the policy's {config.trainer.fsdp.num_workers} ranks{offload}"
    elif reference.executor == "workers":
        where = f"sharded over {reference.num_workers} Ray actors {reserved} each{offload}"
    else:
        where = f"in {one}" if copies == 1 else f"a copy in each of {copies} {several}"
    held = 0 if memory is None else memory.reference_bytes + memory.apart_reference_bytes
    each = " each" if copies > 1 and one else ""
    size = f", {_mib(held)} of weights{each}" if held else ""
    return [("reference", f"{where}, on {derive.reference_device(config)}{size}")]


def _sample_rows(config: RunConfig) -> Rows:
    """Describe what generates the samples and what rewards them, with file and line of the user's code."""
    generator, environment, reward = config.generator, config.environment.env_class, config.rollout.stages.reward
    name, kwargs, own_conversations = generator.name, generator.kwargs, environment.startswith("verifiers:")
    source, judge = name, "the generator"
    if name == "harness":
        program = kwargs.get("command")
        agent = _with_place(str(kwargs.get("agent")))
        if isinstance(program, list):
            agent = f"the program {shlex.join(map(str, program))}"
        source, judge = f"harness, which runs {agent} for each sample", "the agent"
    elif name == "gym":
        judge = "the environment"
    elif name == "skyrl":
        source = f"skyrl, which calls {_with_place(str(kwargs.get('cls', 'the generator of skyrl-gym')))}"
    else:
        source = _with_place(name)
    rows = [("generator", source)]
    if name != "harness" or own_conversations:  # an agent knows no environment, except the one that runs these
        turns = "" if own_conversations else f", up to {generator.max_turns} turn(s)"
        rows.append(("environment", f"{_with_place(environment)}{turns}"))
    if reward.function is None:
        return [*rows, ("reward", f"by {judge}")]
    parts = reward.kwargs.get("functions")
    summed = reward.function == _WEIGHTED_SUM and isinstance(parts, list)
    by = f"the sum of {', '.join(map(_with_place, parts))}" if summed and parts else _with_place(reward.function)
    return [*rows, ("reward", f"by {by}, in place of {judge}'s")]


def _with_place(path: str) -> str:
    """Return the name of a class or function with its file and line, if these can be found."""
    place = place_of(path) if is_import_path(path) else None
    return path if place is None else f"{path} ({place})"


def _data_rows(plan: Plan) -> Rows:
    data, environment = plan.config.data, plan.config.environment.env_class
    source = ", ".join(data.train_data) or f"generated by {environment} (seed {data.seed})"
    prompts, steps = source, f"{plan.total_steps:,}, or until the stream ends"
    if plan.dataset_len is not None:
        epochs = plan.total_steps * plan.policy_mini_batch_size / plan.dataset_len
        prompts = f"{plan.dataset_len:,}, {source}"
        steps = f"{plan.total_steps:,} ({epochs:.2f} epochs; {plan.steps_per_epoch:g} steps each)"
    return [
        ("prompts", prompts),
        ("steps", steps),
        (
            "a step trains on",
            f"B={plan.policy_mini_batch_size} groups of n={plan.n_samples_per_prompt}: "
            f"{plan.policy_mini_batch_size * plan.n_samples_per_prompt} samples",
        ),
    ]


def _rollout_rows(plan: Plan) -> Rows:
    bound, k, actors = plan.max_staleness_steps, plan.weight_sync_interval, plan.config.rollout.num_actors
    if plan.mode is TrainerMode.sync:
        rows = [("groups at once", f"{plan.train_batch_size} (trainer.fully_async.* has no effect in this mode)")]
    else:
        guarantee = _GUARANTEES.get(plan.staleness_policy, f"beyond it, {plan.staleness_policy} decides")
        meanwhile = {
            TrainerMode.one_step_off: ", when nothing is in flight",
            TrainerMode.partial_rollout: ", while all requests are interrupted",
        }.get(plan.mode, f"; requests in flight: {plan.config.generator.pause_mode}")
        overlap = "; the next step begins meanwhile" if plan.overlap_weight_sync else ""
        when = "after each step (k=1)" if k == 1 else f"every k={k} steps"
        depth = plan.generate_ahead_steps
        rows = [
            (
                "depth",
                f"D adapts to the slowest groups: up to {derive.largest_depth(plan.config):g} step(s) that generation runs ahead"
                if depth is None
                else f"D={depth:g} step(s) that generation runs ahead",
            ),
            ("bound", f"S={bound}; {guarantee}"),
            ("deadline", f"a group whose oldest token has version v trains by step v + {bound + 1}"),
            ("workers", f"W={plan.num_workers} groups generated at once"),
            ("capacity", f"(D + k) * B = {plan.capacity} groups admitted and untrained"),
            ("weight updates", f"{when}{meanwhile}{overlap}"),
        ]
    if plan.streaming_min_groups is not None:
        rows.append(
            ("streaming", f"a step trains on {plan.streaming_min_groups} groups or more as soon as they are there")
        )
    if actors:
        more = f", and {actors} more for the evaluation's engines" if derive.num_evaluation_engines(plan.config) else ""
        rows.append(("rollouts", f"in {actors} Ray actors of {plan.config.rollout.ray_num_cpus:g} CPUs each{more}"))
    return rows


_GUARANTEES = {
    "accept": "an older group is trained all the same, corrected and counted",
    "wait": "never exceeded: the trainer waits if it must",
    "mask": "older tokens are not trained",
    "drop": "an older group is dropped, and the next prompt takes its slot",
}


def _engine_rows(plan: Plan) -> Rows:
    generator, engine = plan.config.generator, plan.config.generator.inference_engine
    sampling = generator.sampling_params
    folder = f" in {generator.weight_folder}" if generator.weight_folder is not None else ""
    checksummed = ", checksummed" if generator.verify_weights else ""
    invariant = ", batch-invariant" if engine.batch_invariant and engine.backend == "embedded" else ""
    devices = engine.device
    if engine.backend == "vllm" and engine.executor == "process" and engine.device != "cpu":
        of_each = (derive.engine_devices(engine, index) for index in range(engine.num_engines))
        devices = " and ".join("+".join(f"cuda:{gpu}" for gpu in gpus) for gpus in of_each)
    sharing = []
    if plan.config.trainer.placement.colocate_all:
        sharing = [
            "in turns: engines sleep while the policy trains, and its state is in main memory while they generate"
        ]
    elif derive.engines_share_trainer_gpu(plan.config):
        shared = derive.full_device_name(plan.config.trainer.device)
        sharing = [f"trainer and engines share {shared}: each is slower while the other computes there"]
    return [
        (
            "engines",
            f"{engine.num_engines} x {engine.backend} ({engine.dtype}, on {devices}, {engine.executor})",
        ),
        *(("devices", said) for said in sharing),
        ("weights travel by", f"{derive.weight_transport(plan.config)}{folder}{checksummed}"),
        ("requests", f"{engine.max_num_seqs} at once per engine, up to {plan.max_model_len} tokens{invariant}"),
        ("sampling", f"temperature {sampling.temperature:g}, up to {sampling.max_tokens} tokens a turn"),
    ]


def _memory_rows(trainer: TrainerConfig, memory: MemoryEstimate | None) -> Rows:
    if memory is None:
        return [("estimate", "unknown until the model is loaded")]
    ranks = trainer.fsdp.num_workers if trainer.strategy is TrainingStrategy.fsdp2 else 1
    copies = ranks // memory.num_ranks
    each = f", in each of {copies} copies of the policy" if copies > 1 else ""
    beside = f", critic {_mib(memory.critic_bytes)}" if memory.critic_bytes else ""
    beside += f", reference {_mib(memory.reference_bytes)}" if memory.reference_bytes else ""
    alone = (
        f", and {_mib(memory.critic_activation_bytes)} where the critic is" if memory.critic_activation_bytes else ""
    )
    elsewhere = memory.rank_elsewhere_bytes
    apart = f", and {_mib(elsewhere)} by another cpu_offload of reference or critic" if elsewhere else ""
    state = memory.policy_bytes + memory.gradient_bytes + memory.optimizer_bytes
    trainer_bytes = state + memory.reference_bytes + memory.staging_bytes + memory.critic_bytes
    parameters = f"{memory.num_parameters:,}"
    if memory.num_trained != memory.num_parameters:
        parameters += f", and {memory.num_trained:,} of the adapter, which are trained"
    return [
        ("parameters", parameters),
        *([("each rank", f"{_mib(memory.rank_bytes)} of {ranks}{apart}")] if ranks > 1 else []),
        (
            "trainer",
            f"{_mib(trainer_bytes)} (weights {_mib(memory.policy_bytes)}, "
            f"gradients {_mib(memory.gradient_bytes)}, optimizer {_mib(memory.optimizer_bytes)}, "
            f"staging {_mib(memory.staging_bytes)}{beside}){each}",
        ),
        (
            "snapshot",
            f"{_mib(memory.snapshot_bytes + memory.critic_snapshot_bytes)} of main memory, from the first checkpoint on{each}",
        ),
        (
            "activations",
            f"up to {_mib(memory.activation_bytes)} on top{' of each rank' if ranks > 1 else ''}{alone}",
        ),
        (
            "engines",
            f"{_mib(memory.engine_weight_bytes + memory.kv_cache_bytes)} (weights {_mib(memory.engine_weight_bytes)}, "
            f"KV cache {_mib(memory.kv_cache_bytes)})",
        ),
    ]


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / _MIB:,.1f} MiB"
