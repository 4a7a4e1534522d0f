"""Every setting, its type, its default and its meaning. Imports no torch.

SkyRL's key names where they mean the same. ``None`` means "derived": :mod:`skyrl_train.config.derive` says how, and
:mod:`skyrl_train.config.refusals` what cannot work.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class TrainerMode(StrEnum):
    """Which trainer runs; everything else keeps its meaning."""

    sync = "sync"
    one_step_off = "one_step_off"
    fully_async = "fully_async"
    partial_rollout = "partial_rollout"


# What happens to a prompt whose rollout failed after all retries: the next prompt takes its seat, its seat is filled by
# samples without signal, or the run stops with a checkpoint. (The functional form, because "raise" is a keyword.)
FailurePolicy = StrEnum("FailurePolicy", {"replace": "replace", "mask": "mask", "raise": "raise"})


# What happens to groups whose samples all have the same reward, and so no signal (DAPO, arXiv 2503.14476). none: they are
# trained like all others. filter: they leave as they arrive; the next prompts take their seats. replace: copies of a
# batch's other groups take their place when it trains. (The functional form, because "replace" is a method of str.)
DynamicSampling = StrEnum("DynamicSampling", {"none": "none", "filter": "filter", "replace": "replace"})


class ResumeMode(StrEnum):
    """Which checkpoint a run starts from."""

    latest = "latest"  # the newest one of an unfinished run of the same configuration, if any
    never = "never"  # always a new run


@dataclass
class FullyAsyncConfig:
    max_staleness_steps: int = 4  # S: bound on the lag of a group, in steps
    pipeline_depth: float | None = None  # D: steps that generation may run ahead, also 0.5; None: min(1, S - slack)
    num_parallel_generation_workers: int | None = None  # W: groups generated at once; None: (D + 1) * B
    straggler_policy: str = "mask"  # mask | accept | wait | drop | path.to.Policy: what gives way beyond S
    sync_every_steps: int = 1  # k: optimizer steps from one publication to the next
    streaming_min_groups: int | None = None  # train on so many groups as soon as they are there; None: on whole batches
    overlap_publication: bool = False  # the next step begins when the weights are copied, not when they are served


@dataclass
class PartialRolloutConfig:
    oversubmit_factor: float = 2.0  # groups begun per group trained; the unfinished ones go on after the next update


@dataclass
class BuildModelConfig:
    """A small model with random weights and a character tokenizer, made on the spot."""

    alphabet: str = "0123456789"  # the characters of the tokenizer's vocabulary, beside its special tokens
    words: list[str] = field(default_factory=list)  # longer texts of one token each: the fixed parts of a tool call
    model_type: str = "qwen3"  # any causal LM type that transformers can build from a config
    hidden_size: int = 128
    num_layers: int = 2
    num_heads: int = 4
    intermediate_size: int = 256
    max_position_embeddings: int = 512


@dataclass
class LoraConfig:
    """A LoRA adapter (arXiv 2106.09685) is trained and published; the model's own weights stay. Needs peft."""

    rank: int = 0  # of each update; 0: no adapter, all weights are trained
    alpha: float = 16.0  # an update counts alpha / rank
    dropout: float = 0.0  # must be 0: the engines sample without it, and the first pass's proximal ratio would not be 1
    # The last parts of linear layers' names; all-linear: all but the head
    target_modules: list[str] = field(default_factory=lambda: ["all-linear"])
    exclude_modules: list[str] = field(default_factory=list)  # of those, by their names' last parts
    init_method: str = "kaiming"  # kaiming | gaussian: of A; B starts at 0, so that a run starts from the model itself


@dataclass
class ModelConfig:
    path: str | None = None  # a folder or hub name that transformers opens; None: build one
    build: BuildModelConfig = field(
        default_factory=BuildModelConfig
    )  # without a path: made on the spot, in <run>/model
    lora: LoraConfig = field(default_factory=LoraConfig)


@dataclass
class OptimizerConfig:
    lr: float = 1e-6
    adam_betas: list[float] = field(default_factory=lambda: [0.9, 0.999])
    adam_eps: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    scheduler: str = "constant"  # constant | linear | cosine (decays to 0 over the run)
    num_warmup_steps: int = 0
    # Pattern of parameter names -> factor of lr; the first that matches counts. LoRA+ is {"*.lora_B.*": 16}
    lr_multipliers: dict[str, float] = field(default_factory=dict)


@dataclass
class PolicyConfig:
    model: ModelConfig = field(default_factory=ModelConfig)
    optimizer_config: OptimizerConfig = field(default_factory=OptimizerConfig)
    dtype: str = "float32"  # of the trained weights: float32 | bfloat16
    fp32_head: bool = False  # logits by products in float32 under bfloat16 weights, as engines with a float32 head do
    compile: bool = False  # layers by torch.compile, their attention left out; the first steps are slow
    gradient_checkpointing: bool = False  # layers run again in the backward pass instead of keeping their activations


@dataclass
class CriticModelConfig:
    path: str | None = None  # a folder or hub name, of the policy's vocabulary; None: what the policy starts from


class TrainingStrategy(StrEnum):
    """Where the policy is trained."""

    local = "local"  # in this process, on one thread or one GPU
    fsdp2 = "fsdp2"  # by Ray actors, each with a shard of the parameters, on any number of nodes


@dataclass
class FSDPConfig:
    """The workers of ``trainer.strategy=fsdp2``: one rank each, a Ray actor with its own GPU or core."""

    num_workers: int = 2
    sequence_parallel_size: int = 1  # ranks that share sequences, a slice of the tokens each: for long ones
    shard_size: int | None = None  # ranks that a parameter is split over; fewer: copies of the policy (HSDP); None: all
    cpu_offload: bool = False  # parameters, gradients and moments in main memory; AdamW runs there
    reshard_after_forward: bool = True  # gathers a layer again for the backward pass; false: keeps it, in more memory
    ray_num_cpus: float = 1.0  # reserved for each worker
    ray_num_gpus: float | None = None  # None: 1 on the device cuda, else 0
    environment: dict[str, str] = field(default_factory=dict)  # variables of the workers' processes, such as NCCL's
    start_timeout_s: float = 600.0  # waiting for the cluster's resources and loading the model included


@dataclass
class CriticConfig:
    """The model that predicts returns, with ``trainer.algorithm.advantage_estimator=gae`` only. It has an optimizer, and
    with ``trainer.strategy=fsdp2`` workers, of its own."""

    model: CriticModelConfig = field(default_factory=CriticModelConfig)
    optimizer_config: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(lr=5e-6))
    dtype: str = "float32"  # of the trained weights: float32 | bfloat16
    gradient_checkpointing: bool = False
    device: str | None = None  # that trains it; None: trainer.device
    fsdp: FSDPConfig = field(default_factory=FSDPConfig)  # its workers, beside the policy's


class ProximalPolicy(StrEnum):
    """Around which policy the loss clips, and which one stands between behaviour and current policy in the correction."""

    step = "step"  # the policy as the step begins
    arrival = "arrival"  # the policy that was trained when the group was finished
    interpolated = "interpolated"  # between the behaviour policy and the step's, by the token's lag (A-3PO)


class RejectionLevel(StrEnum):
    """What is compared with the bounds, and what is rejected: each token, or a sequence by the mean, the sum or any of its
    tokens."""

    token = "token"
    sequence_mean = "sequence_mean"
    sequence_sum = "sequence_sum"
    sequence_max = "sequence_max"


class KlControlType(StrEnum):
    """Whether the coefficients of the KL divergence change."""

    fixed = "fixed"
    adaptive = "adaptive"


@dataclass
class RejectionConfig:
    """Tokens that do not train, because they are out of bounds; :mod:`skyrl_train.algorithms.off_policy.rejections`."""

    statistic: str = "ratio"  # ratio | k1 | k2 | k3 | probability_difference
    level: RejectionLevel = RejectionLevel.token
    low: float | None = None  # values below are rejected; None: none is
    high: float | None = None  # values above
    away_only: bool = False  # only tokens whose update leads further away (level=token)


@dataclass
class OffPolicyCorrectionConfig:
    tis_ratio_type: str | None = (
        "token"  # weights, proximal over behaviour: token | sequence | geometric | icepop | None
    )
    token_tis_ratio_clip_high: float = 2.0
    sequence_tis_ratio_clip_high: float = 5.0  # sequence, geometric
    icepop_ratio_low: float = 0.5  # icepop rejects tokens outside of the two
    icepop_ratio_high: float = 5.0
    rejections: list[RejectionConfig] = field(default_factory=list)
    m2po_threshold: float | None = None  # bound on the minibatch's mean squared log-ratio (0.04); None: no bound
    baseline_without_rejected: bool = False  # samples that are rejected or filtered as a whole are not compared with
    allow_uncorrected: bool = False  # the explicit opt-in that S > 0 without a correction needs


@dataclass
class CispoConfig:
    cispo_eps_clip_low: float = 1.0  # 1: no lower bound
    cispo_eps_clip_high: float = 5.0


@dataclass
class SapoConfig:
    tau_pos: float = 1.0
    tau_neg: float = 1.05


@dataclass
class ClipCovConfig:
    clip_ratio: float = 0.0002  # share of a minibatch's tokens
    clip_cov_lb: float = 1.0
    clip_cov_ub: float = 5.0


@dataclass
class KlCovConfig:
    kl_cov_frac: float = 0.0002  # share of a minibatch's tokens
    ppo_kl_coef: float = 1.0


@dataclass
class KlControlConfig:
    type: KlControlType = KlControlType.fixed
    kl_target: float = 0.1  # nats per token
    horizon: float = 10000.0  # samples


@dataclass
class OverlongConfig:
    """Responses by their number of sampled tokens, over all turns."""

    buffer_len: int = 0  # the penalty grows over the last so many tokens (DAPO); 0: no penalty
    penalty_factor: float = 1.0  # the penalty at max_response_len
    max_response_len: int | None = None  # tokens; needed by the penalty
    filter: bool = False  # samples that were cut off (stop reason length) train with loss mask 0


@dataclass
class AlgorithmConfig:
    """Whatever names a function (estimator, loss, reduction, ...) takes a registered name or an import path."""

    advantage_estimator: str = "grpo"  # grpo | rloo | reinforce++ | maxrl | gae (trains trainer.critic)
    grpo_norm_by_std: bool = True
    advantage_batch_normalize: bool | None = None  # over all tokens of a minibatch; None: with reinforce++ and gae
    gamma: float = 1.0  # discount per trained token: reinforce++, gae
    lambd: float = 1.0  # gae: 1 takes the whole return, 0 the next value alone
    value_clip: float | None = 0.2  # gae: how far a value may profit from moving in one step; None: without bound
    policy_loss_type: str = "ppo_clip"  # | dual_clip | gspo | cispo | sapo | clip_cov | kl_cov | importance_sampling
    eps_clip_low: float | None = None  # ppo_clip, dual_clip, gspo, clip_cov; None: 0.2, for gspo 3e-4
    eps_clip_high: float | None = None  # None: 0.2, for gspo 4e-4
    clip_ratio_c: float = 3.0  # dual_clip
    cispo: CispoConfig = field(default_factory=CispoConfig)
    sapo: SapoConfig = field(default_factory=SapoConfig)
    clip_cov: ClipCovConfig = field(default_factory=ClipCovConfig)
    kl_cov: KlCovConfig = field(default_factory=KlCovConfig)
    loss_reduction: str = "token_mean"  # token_mean | sequence_mean | prompt_mean | seq_mean_token_sum_norm
    max_seq_len: int | None = None  # tokens; what seq_mean_token_sum_norm divides by
    entropy_coef: float = 0.0
    kl_loss_coef: float = 0.0  # of the KL divergence from the policy that the run starts from; 0: there is no such term
    kl_reward_coef: float = 0.0  # the same, taken from the reward of each token
    kl_estimator_type: str = "k3"  # k1 (reward only) | k2 | k3 (Schulman 2020)
    kl_ctrl: KlControlConfig = field(default_factory=KlControlConfig)
    overlong: OverlongConfig = field(default_factory=OverlongConfig)
    proximal_policy: ProximalPolicy = ProximalPolicy.step
    dynamic_sampling: DynamicSampling = DynamicSampling.none
    max_filtered_share: float = 0.95  # filter: of the last 64 * B groups, at most 1,024; beyond it the run stops
    zero_variance_filter: bool = False  # groups whose samples all have the same reward train with loss mask 0
    off_policy_correction: OffPolicyCorrectionConfig = field(default_factory=OffPolicyCorrectionConfig)
    kwargs: dict[str, Any] = field(default_factory=dict)  # for estimators, losses, ... of your own


@dataclass
class FailureConfig:
    rollout_timeout_s: float | None = None  # wall-clock limit of one group's generation; None: no limit
    max_rollout_retries: int = 1
    on_rollout_failure: FailurePolicy = FailurePolicy["replace"]
    max_failed_rollouts: int = 16  # groups that may fail for good before the run stops with a checkpoint
    max_nonfinite_steps: int = (
        4  # in a row: optimizer steps skipped because loss or gradient is not finite; then it stops
    )
    max_engine_failures: int = 0  # times that a group may find no engine for fleet.wait_timeout_s and still go on
    stuck_after_s: float = (
        900.0  # neither a group nor a step ends for so long: the log says what is stuck, and since when
    )


@dataclass
class EvalConfig:
    """Evaluation of one policy version while training goes on. Off without an interval."""

    interval: int = 0  # steps; the policy after the last step is evaluated too; 0: never
    before_train: bool = False  # also the policy that the run starts from
    eval_data: list[str] = field(default_factory=list)  # as data.train_data; empty: ``generate`` prompts
    generate: int = 64  # prompts that the environment generates where there are no files
    seed: int = 1  # of the generated prompts
    n_samples_per_prompt: int = 1  # pass@k and avg@k for k = 1, 2, 4, ... up to it
    pass_threshold: float = 1.0  # a sample has passed when its reward is at least this
    sampling_params: dict[str, Any] = field(default_factory=dict)  # over generator.sampling_params
    max_parallel: int = 16  # evaluation prompts generated at once
    num_engines: int = 0  # of its own; 0: the run's engines, and the next publication waits until it has ended


@dataclass
class TrainerConfig:
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
    max_restarts: int = (
        0  # times that a run goes on from its last checkpoint after a worker with a shard of a model has died
    )
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


@dataclass
class RewardStageConfig:
    """Rewards by a function of yours instead of the generator's; see :mod:`skyrl_train.rollout.reward_function`."""

    function: str | None = None  # path.to:function or path.to:Class; None: the generator's rewards stand
    kwargs: dict[str, Any] = field(default_factory=dict)  # for the function, or for the constructor of the class
    placement: str | None = (
        None  # loop (async def only) | thread | process | ray; None: loop for async def, else thread
    )
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
    cpu_offload: bool | None = (
        None  # of workers and colocated: weights stay in main memory; None: trainer.fsdp.cpu_offload
    )
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
    replay: bool = True  # a checkpoint keeps what unfinished rollouts have sampled; resuming serves it again
    buffer_memory_bytes: int | None = None  # finished groups beyond it wait on the disk; None: all in memory
    num_actors: int = 0  # Ray actors that the generator runs in (environments, reward code, agents); 0: in the trainer
    ray_num_cpus: float = 1.0  # reserved for each of these actors
    stages: StagesConfig = field(default_factory=StagesConfig)


@dataclass
class SamplingConfig:
    """Mirrors :class:`skyrl_train.inference.interface.SamplingParams`; ``max_tokens`` bounds one turn."""

    max_tokens: int = 64
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    stop: list[str] = field(default_factory=list)
    stop_token_ids: list[int] = field(default_factory=list)
    ignore_eos: bool = False


@dataclass
class FleetConfig:
    """What happens to engines that fall silent or die."""

    max_restarts: int = 3  # of each engine; it has them again after five healthy minutes
    probe_interval_s: float = 10.0  # between two health probes, and the limit of one
    max_failed_probes: int = 3  # in a row; then the engine counts as dead
    wait_timeout_s: float = 60.0  # requests wait so long while no engine serves; then the run stops


@dataclass
class InferenceEngineConfig:
    backend: str = "embedded"  # embedded | vllm | vllm_remote | path.to.Factory
    placement: str = "process"  # process (its own) | thread (of the trainer's process; embedded only) | ray (an actor)
    num_engines: int = 1
    device: str = "cpu"
    dtype: str = "float32"  # of the served weights: float32 | bfloat16
    max_num_seqs: int = 128  # requests decoded at once, per engine
    max_model_len: int | None = None  # tokens per request; None: prompt and response limits, within the model's
    batch_invariant: bool = False  # embedded: a request's tokens do not depend on what else is in the batch (slower)
    tensor_parallel_size: int = 1  # vllm, per engine
    pipeline_parallel_size: int = 1  # vllm, per engine
    data_parallel_size: int = 1  # vllm, per engine
    engine_args: dict[str, Any] = field(default_factory=dict)  # any further argument of vLLM's AsyncEngineArgs
    environment: dict[str, str] = field(default_factory=dict)  # variables of the engine's processes: vllm, or in Ray
    remote_urls: list[str] = field(default_factory=list)  # vllm_remote: one server per engine
    remote_api_key_variable: str = "VLLM_API_KEY"  # the environment variable that holds the servers' key
    ray_num_cpus: float = 1.0  # reserved for each engine in a Ray actor
    ray_num_gpus: float = 0.0
    fleet: FleetConfig = field(default_factory=FleetConfig)


@dataclass
class ChatConfig:
    """How responses are read. None: by the model's family, else by its template and vocabulary."""

    tool_parser: str | None = None  # format of tool calls: qwen3, llama-3, deepseek-v3, ... | none
    reasoning_parser: str | None = None  # think | none


@dataclass
class GeneratorConfig:
    name: str = "gym"  # gym | harness | path.to.GeneratorClass
    kwargs: dict[str, Any] = field(default_factory=dict)  # for the generator's constructor
    n_samples_per_prompt: int = 8
    max_turns: int = 1
    max_input_length: int = 256  # tokens of a turn's input, the conversation so far included
    sampling_params: SamplingConfig = field(default_factory=SamplingConfig)
    inference_engine: InferenceEngineConfig = field(default_factory=InferenceEngineConfig)
    chat: ChatConfig = field(default_factory=ChatConfig)
    pause_mode: str = "keep"  # keep | recompute | abort | wait: in-flight requests during a weight update
    pause_timeout_s: float = 60.0  # of each phase of a publication
    verify_weights: bool = False  # checksum each publication
    # shared_memory | disk | delta | gloo | nccl | cuda_ipc | path.to.Transport; None: disk where a folder is named, else
    # shared_memory
    weight_transport: str | None = None
    weight_folder: str | None = None  # disk, delta: what trainer and engines share, under the same path
    weight_transport_kwargs: dict[str, Any] = field(default_factory=dict)  # for the transport's constructor


@dataclass
class EnvironmentConfig:
    env_class: str = "run_length"  # registered name, path.to.Class, skyrl_gym:<id> or reasoning_gym:<task>
    kwargs: dict[str, Any] = field(default_factory=dict)  # for the environment's constructor and its generated prompts


@dataclass
class DataConfig:
    """``train_data`` names files or folders; without any, ``generate`` asks the environment for prompts."""

    train_data: list[str] = field(default_factory=list)  # .jsonl | .parquet | a folder of datasets.save_to_disk
    prompt_key: str = "prompt"  # a string or a conversation
    generate: int = 512  # prompts that the environment generates where there are no files
    seed: int = 0  # of the generated prompts
    sampler: str | None = (
        None  # shuffle | sequential | weighted | path.to.Sampler; None: shuffle, or a stream's own order
    )
    sampler_kwargs: dict[str, Any] = field(default_factory=dict)  # weighted: {"weights": {data_source: weight}}
    streaming: bool = False  # files are read as they are needed, in their order, instead of at once


@dataclass
class RunConfig:
    """The root."""

    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    generator: GeneratorConfig = field(default_factory=GeneratorConfig)
    environment: EnvironmentConfig = field(default_factory=EnvironmentConfig)
    data: DataConfig = field(default_factory=DataConfig)
