"""The plan as ``--dry-run`` prints it: one line per fact, nothing to be computed by the reader."""

from __future__ import annotations

from typing import TYPE_CHECKING

from skyrl_train.config import derive
from skyrl_train.config.memory import MemoryEstimate
from skyrl_train.config.schema.algorithm import AlgorithmConfig
from skyrl_train.config.schema.run import RunConfig
from skyrl_train.config.schema.trainer import TrainerConfig, TrainerMode
from skyrl_train.config.schema.training import OptimizerConfig, TrainingStrategy

if TYPE_CHECKING:
    from skyrl_train.config.plan import Plan

_MIB = 2**20
Rows = list[tuple[str, str]]


def sections(plan: Plan) -> list[tuple[str, Rows]]:
    """Titles, each with its facts by name."""
    return [
        ("run", _run_rows(plan)),
        ("data", _data_rows(plan)),
        ("asynchrony" if plan.mode is not TrainerMode.sync else "generation", _rollout_rows(plan)),
        ("engines", _engine_rows(plan)),
        ("memory", _memory_rows(plan.config.trainer, plan.memory)),
    ]


def _run_rows(plan: Plan) -> Rows:
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
        *_reference_rows(plan),
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


def _adapter_rows(config: RunConfig) -> Rows:
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


def _critic_rows(trainer: TrainerConfig) -> Rows:
    if not derive.needs_critic(trainer.algorithm):
        return []
    critic, algorithm = derive.critic_trainer(trainer), trainer.algorithm
    where = "in this process" if trainer.strategy is TrainingStrategy.local else _critic_ranks(trainer, critic)
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


def _critic_ranks(trainer: TrainerConfig, critic: TrainerConfig) -> str:
    offload = ", state in main memory" if critic.fsdp.cpu_offload else ""
    if derive.critic_is_colocated(trainer):
        return f"in the policy's ranks{offload}"
    together = critic.fsdp.sequence_parallel_size
    slices = f", {together} share each micro-batch" if together > 1 else ""
    each = _reserved(critic.fsdp.ray_num_cpus, derive.fsdp_num_gpus(critic))
    return f"{critic.fsdp.num_workers} Ray actors of its own with {each} each{slices}{offload}"


def _reserved(cpus: float, gpus: float) -> str:
    """What Ray keeps free for an actor."""
    return f"{cpus:g} CPUs" + (f" and {gpus:g} GPUs" if gpus else "")


def _reference_rows(plan: Plan) -> Rows:
    config, memory = plan.config, plan.memory
    if not derive.needs_reference(config.trainer.algorithm):
        return []
    held = 0 if memory is None else memory.reference_bytes + memory.apart_reference_bytes
    each = " each" if config.rollout.stages.reference.max_parallel > 1 else ""
    size = f", {_mib(held)} of weights{each}" if held else ""
    return [("reference", f"{_reference_place(config)}, on {derive.reference_device(config)}{size}")]


def _reference_place(config: RunConfig) -> str:
    reference, trainer = config.rollout.stages.reference, config.trainer
    offload = ", weights in main memory" if derive.reference_offload(config) else ""
    if derive.reference_is_colocated(config):
        return f"in the policy's {trainer.fsdp.num_workers} ranks{offload}"
    reserved = f"of {_reserved(reference.ray_num_cpus, derive.reference_num_gpus(config))}"
    if reference.placement == "workers":
        return f"sharded over {reference.num_workers} Ray actors {reserved} each{offload}"
    copies = reference.max_parallel
    one, several = {
        "thread": ("a thread of this process", "threads of this process"),
        "process": ("a process of its own", "processes of its own"),
        "ray": (f"a Ray actor {reserved}", f"Ray actors {reserved} each"),
    }[reference.placement]
    return f"in {one}" if copies == 1 else f"a copy in each of {copies} {several}"


def _micro_batch_row(trainer: TrainerConfig) -> str:
    rows = {None: "packed where the model allows it", True: "packed", False: "padded"}[trainer.packing]
    checkpointing = "; layers run again in the backward pass" if trainer.policy.gradient_checkpointing else ""
    return f"up to {trainer.micro_batch_tokens:,} tokens, {rows}{checkpointing}"


def _rank_rows(config: RunConfig) -> Rows:
    trainer = config.trainer
    if trainer.strategy is TrainingStrategy.local:
        return []
    each = _reserved(trainer.fsdp.ray_num_cpus, derive.fsdp_num_gpus(trainer))
    talk = "NCCL and gloo" if trainer.device == "cuda" else "gloo"
    together = trainer.fsdp.sequence_parallel_size
    slices = f"; {together} share each micro-batch, a slice of the tokens each" if together > 1 else ""
    copies = trainer.fsdp.num_workers // derive.fsdp_shard_size(trainer)
    slices += f"; {copies} copies of the policy" if copies > 1 else ""
    slices += "; state in main memory" if trainer.fsdp.cpu_offload else ""
    restarts = f"; up to {trainer.max_restarts} restarts from the last checkpoint" if trainer.max_restarts else ""
    return [("ranks", f"{trainer.fsdp.num_workers} Ray actors (FSDP2, {talk}), each with {each}{slices}{restarts}")]


def _data_rows(plan: Plan) -> Rows:
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


def _rollout_rows(plan: Plan) -> Rows:
    return [*_asynchrony_rows(plan), *_actor_rows(plan.config)]


def _actor_rows(config: RunConfig) -> Rows:
    actors = config.rollout.num_actors
    if not actors:
        return []
    of_evaluation = f", and {actors} more for the evaluation's own engines" if config.trainer.eval.num_engines else ""
    return [("rollouts", f"in {actors} Ray actors of {config.rollout.ray_num_cpus:g} CPUs each{of_evaluation}")]


def _asynchrony_rows(plan: Plan) -> Rows:
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
        ("weight updates", _publication_row(plan, "after each step (k=1)" if k == 1 else f"every k={k} steps")),
    ]
    if plan.streaming_min_groups is not None:
        rows.append(
            ("streaming", f"a step trains on {plan.streaming_min_groups} groups or more as soon as they are there")
        )
    return rows


_PROMISES = {
    "accept": "a group that is older still is trained, corrected and counted",
    "wait": "never exceeded: the trainer waits where it must",
    "burst": "never exceeded: the trainer waits where it must; none begins while enough steps are ready",
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


def _engine_rows(plan: Plan) -> Rows:
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
    return [
        ("parameters", _parameters_row(memory)),
        *([("each rank", _rank_row(ranks, memory))] if ranks > 1 else []),
        (
            "trainer",
            f"{_mib(memory.trainer_bytes)} (weights {_mib(memory.policy_bytes)}, "
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
            f"{_mib(memory.engine_bytes)} (weights {_mib(memory.engine_weight_bytes)}, "
            f"KV cache {_mib(memory.kv_cache_bytes)})",
        ),
    ]


def _rank_row(ranks: int, memory: MemoryEstimate) -> str:
    elsewhere = memory.rank_elsewhere_bytes
    apart = f", and {_mib(elsewhere)} by another cpu_offload of reference or critic" if elsewhere else ""
    return f"{_mib(memory.rank_bytes)} of {ranks}{apart}"


def _parameters_row(memory: MemoryEstimate) -> str:
    if memory.num_trained == memory.num_parameters:
        return f"{memory.num_parameters:,}"
    return f"{memory.num_parameters:,}, and {memory.num_trained:,} of the adapter, which are trained"


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / _MIB:,.1f} MiB"
