"""Every setting: its type, its limits, its default and its meaning. Imports no torch.

    RunConfig
     ├─ trainer ────┬─ policy, critic (model, optimizer), fsdp, placement
     │              ├─ algorithm, fully_async, partial_rollout
     │              └─ failures, eval
     ├─ rollout ────── stages (reward, reference)
     ├─ generator ──── sampling_params, inference_engine (fleet), chat
     ├─ environment
     └─ data

The classes below stand in reverse order, because a section needs the classes of its subsections. Names of settings are
SkyRL's where they mean the same. ``None`` means "derived" (:mod:`skyrl_train.config.derive`). The limits of a value are in
its ``Annotated`` type; :mod:`skyrl_train.config.validate` checks them, and the combinations of settings.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Any

from annotated_types import Ge, Gt, Interval


class OneOf:
    """Limits text to ``names``, or with ``import_path`` also to the import path of a class or function of the user."""

    def __init__(self, *names: str, import_path: bool = False) -> None:
        self.names, self.import_path = names, import_path


Count = Annotated[int, Ge(1)]
CountOrZero = Annotated[int, Ge(0)]
NonNegative = Annotated[float, Interval(ge=0, lt=math.inf)]
Positive = Annotated[float, Gt(0)]
Share = Annotated[float, Interval(ge=0, le=1)]
Dtype = Annotated[str, OneOf("float32", "bfloat16")]

ALL_LINEAR = "all-linear"  # of LoraConfig.target_modules


# ---- trainer.policy.model, trainer.critic.model


@dataclass
class BuildModelConfig:
    """A small model with random weights and a character tokenizer, built in ``<run>/model`` if no path is given."""

    alphabet: str = "0123456789"  # characters of the tokenizer's vocabulary, besides its special tokens
    words: list[str] = field(default_factory=list)  # longer texts of one token each: the fixed parts of a tool call
    model_type: str = "qwen3"  # any causal LM type that transformers can build from a config
    hidden_size: Count = 128  # width of the residual stream
    num_layers: Count = 2  # transformer layers
    num_heads: Count = 4  # attention heads
    intermediate_size: Count = 256  # width of the MLPs
    max_position_embeddings: Count = 512  # longest sequence, in tokens


@dataclass
class LoraConfig:
    """A LoRA adapter (arXiv 2106.09685) that is trained and sent to the engines instead of all weights. Needs peft."""

    rank: CountOrZero = 0  # 0: no adapter, all weights are trained
    alpha: Positive = 16.0  # an update is scaled by alpha / rank
    dropout: float = 0.0  # must be 0: the engines sample without it, and the first pass's proximal ratio would not be 1
    # Last parts of the names of linear layers; all-linear: all but the head
    target_modules: list[str] = field(default_factory=lambda: [ALL_LINEAR])
    exclude_modules: list[str] = field(default_factory=list)  # layers to leave out, by the last parts of their names
    init_method: str = "kaiming"  # kaiming | gaussian: of A; B starts at 0, so that a run starts from the base model


@dataclass
class ModelConfig:
    """The model that the policy starts from."""

    path: str | None = None  # a folder or hub name that transformers opens; None: build one
    build: BuildModelConfig = field(default_factory=BuildModelConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)


@dataclass
class CriticModelConfig:
    """The model that the critic starts from; a value head replaces its own head."""

    path: str | None = None  # a folder or hub name with the policy's vocabulary; None: the policy's starting model


# ---- trainer.policy, trainer.critic, trainer.fsdp


class TrainingStrategy(StrEnum):
    """The place where policy and critic are trained."""

    local = "local"  # on this machine, on the CPU or one GPU (see executor)
    fsdp2 = "fsdp2"  # by Ray actors, each with a shard of the parameters, on any number of nodes


@dataclass
class OptimizerConfig:
    """AdamW. The gradient norm is the L2 norm over all trained parameters."""

    lr: Annotated[float, Interval(gt=0, lt=math.inf)] = 1e-6  # learning rate, after the warm-up
    adam_betas: list[float] = field(default_factory=lambda: [0.9, 0.999])  # decay of the first and the second moment
    adam_eps: Positive = 1e-8  # added to the denominator of an update
    weight_decay: Annotated[float, Ge(0)] = 0.0  # decoupled, times lr per step
    max_grad_norm: Positive = 1.0  # larger gradients are scaled down to it
    scheduler: str = "constant"  # constant | linear | cosine (decays to 0 over the run) | path.to.Schedule
    num_warmup_steps: CountOrZero = 0  # the learning rate grows linearly over them
    # Pattern of parameter names -> factor of lr; the first match counts, 0 freezes. LoRA+ is {"*.lora_B.*": 16}
    lr_multipliers: dict[str, NonNegative] = field(default_factory=dict)


@dataclass
class PolicyConfig:
    """The model that is trained and sent to the engines."""

    model: ModelConfig = field(default_factory=ModelConfig)
    optimizer_config: OptimizerConfig = field(default_factory=OptimizerConfig)
    dtype: Dtype = "float32"  # of the trained weights: float32 | bfloat16
    fp32_head: bool = False  # float32 logits from bfloat16 weights, like engines with a float32 head
    compile: bool = False  # torch.compile for the layers without their attention; the first steps are slow
    # Recompute activations in the backward pass: less memory, a fifth more time. None: on a GPU, from a billion parameters on
    gradient_checkpointing: bool | None = None


@dataclass
class FSDPConfig:
    """The workers of ``trainer.strategy=fsdp2``: one rank each, a Ray actor with its own GPU or core."""

    num_workers: Count = 2  # number of ranks
    sequence_parallel_size: Count = 1  # ranks that share each sequence, a slice of its tokens each; for long sequences
    shard_size: int | None = (
        None  # ranks that a parameter is split over; fewer than all: several copies (HSDP); None: all
    )
    cpu_offload: bool = False  # parameters, gradients and moments in main memory; AdamW runs on the CPU
    reshard_after_forward: bool = (
        True  # gather each layer again for the backward pass; false: keep it, with more memory
    )
    ray_num_cpus: Annotated[float, Ge(0)] = 1.0  # reserved for each worker
    ray_num_gpus: Annotated[float, Ge(0)] | None = None  # None: 1 on the device cuda, else 0
    environment: dict[str, str] = field(default_factory=dict)  # variables of the workers' processes, such as NCCL's
    start_timeout_s: Positive = 600.0  # includes the wait for the cluster's resources, but not loading the models


@dataclass
class PlacementConfig:
    """The parts of a run that share devices."""

    # sync, partial_rollout: engines and trainer use the same devices in turns. Engines sleep while the policy trains, and the
    # training state is in main memory while they generate. false: both stay on their devices
    colocate_all: bool = False


@dataclass
class CriticConfig:
    """The model that predicts returns, and its optimizer; used only with ``trainer.algorithm.advantage_estimator=gae``."""

    model: CriticModelConfig = field(default_factory=CriticModelConfig)
    optimizer_config: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(lr=5e-6))
    dtype: Dtype = "float32"  # of the trained weights: float32 | bfloat16
    # Recompute activations in the backward pass: less memory, a fifth more time. None: on a GPU, from a billion parameters on
    gradient_checkpointing: bool | None = None
    device: str | None = None  # None: trainer.device
    # With strategy=fsdp2: workers (separate ones, described by ``fsdp`` below) | colocated (in the policy's workers)
    placement: Annotated[str, OneOf("workers", "colocated")] = "workers"
    fsdp: FSDPConfig = field(default_factory=FSDPConfig)  # colocated: only cpu_offload and reshard_after_forward count


# ---- trainer.algorithm

# The functional form, because "replace" is a method of str.
DynamicSampling = StrEnum("DynamicSampling", {"none": "none", "filter": "filter", "replace": "replace"})


class ProximalPolicy(StrEnum):
    """The policy that the loss clips around, and that separates behaviour and current policy in the correction."""

    step = "step"  # the policy at the beginning of the step
    arrival = "arrival"  # the policy at the time when the group was finished
    interpolated = "interpolated"  # between the behaviour policy and the step's, by the token's lag (A-3PO)


class RejectionLevel(StrEnum):
    """The value that a rejection rule compares with its bounds: each token, or a sequence's mean, sum or largest token value."""

    token = "token"
    sequence_mean = "sequence_mean"
    sequence_sum = "sequence_sum"
    sequence_max = "sequence_max"


class KlControlType(StrEnum):
    """Coefficients of the KL divergence that are fixed, or that change during the run."""

    fixed = "fixed"
    adaptive = "adaptive"


@dataclass
class RejectionConfig:
    """A rule that excludes out-of-bounds tokens from training; see :mod:`skyrl_train.algorithms.off_policy`."""

    statistic: str = "ratio"  # ratio | k1 | k2 | k3 | probability_difference
    level: RejectionLevel = RejectionLevel.token
    low: float | None = None  # smaller values are rejected; None: no lower bound
    high: float | None = None  # larger values are rejected; None: no upper bound
    away_only: bool = False  # reject only tokens whose update leads further away (level=token)


@dataclass
class OffPolicyCorrectionConfig:
    """The correction for tokens that another policy has sampled: importance weights and rejections."""

    # Weights, proximal over behaviour: token | sequence | geometric | icepop | path.to:function | None
    tis_ratio_type: str | None = "token"
    token_tis_ratio_clip_high: Positive = 2.0  # token: largest weight
    sequence_tis_ratio_clip_high: Positive = 5.0  # sequence, geometric: largest weight
    icepop_ratio_low: Annotated[float, Ge(0)] = 0.5  # icepop rejects tokens outside of the two bounds
    icepop_ratio_high: Positive = 5.0  # the upper of these bounds
    rejections: list[RejectionConfig] = field(default_factory=list)  # rules that exclude tokens; each is such an object
    m2po_threshold: Positive | None = None  # bound on the minibatch's mean squared log-ratio (0.04); None: no bound
    baseline_without_rejected: bool = (
        False  # leave samples that are rejected or filtered as a whole out of the baseline
    )
    allow_uncorrected: bool = False  # needed to train on older tokens (S > 0) without any correction


@dataclass
class CispoConfig:
    """Bounds on the ratio, as distances from 1, for ``policy_loss_type=cispo``."""

    cispo_eps_clip_low: Annotated[float, Ge(0)] = 1.0  # 1: no lower bound
    cispo_eps_clip_high: Annotated[float, Ge(0)] = 5.0  # the ratio is at most 1 + this


@dataclass
class SapoConfig:
    """Temperatures for positive and for other advantages, for ``policy_loss_type=sapo``."""

    tau_pos: Positive = 1.0  # tokens with a positive advantage
    tau_neg: Positive = 1.05  # all other tokens


@dataclass
class ClipCovConfig:
    """For ``policy_loss_type=clip_cov``: some tokens with a covariance within the bounds do not train."""

    clip_ratio: Share = 0.0002  # share of a minibatch's tokens
    clip_cov_lb: float = 1.0  # lower bound on the covariance
    clip_cov_ub: float = 5.0  # upper bound on the covariance


@dataclass
class KlCovConfig:
    """For ``policy_loss_type=kl_cov``: the tokens with the largest covariances get a KL penalty."""

    kl_cov_frac: Share = 0.0002  # share of a minibatch's tokens
    ppo_kl_coef: Annotated[float, Ge(0)] = 1.0  # weight of the penalty


@dataclass
class KlControlConfig:
    """A schedule for the coefficients of the KL divergence, which can follow the measured divergence."""

    type: KlControlType = KlControlType.fixed  # adaptive: the coefficients follow the measured divergence
    kl_target: Positive = 0.1  # nats per token
    horizon: Positive = 10000.0  # samples


@dataclass
class OverlongConfig:
    """Treatment of long responses; lengths are sampled tokens over all turns."""

    buffer_len: CountOrZero = 0  # the penalty grows over the last so many tokens (DAPO); 0: no penalty
    penalty_factor: Annotated[float, Ge(0)] = 1.0  # the penalty at max_response_len
    max_response_len: int | None = None  # tokens; required by the penalty
    filter: bool = False  # samples that were cut off (stop reason length) train with loss mask 0


@dataclass
class AlgorithmConfig:
    """Advantages, losses, KL divergence, off-policy correction. Each function is named by a registered name or import path."""

    advantage_estimator: str = "grpo"  # grpo | rloo | reinforce++ | maxrl | gae (trains trainer.critic)
    grpo_norm_by_std: bool = True  # grpo: divide advantages by the standard deviation of the group's rewards
    advantage_batch_normalize: bool | None = None  # over all tokens of a minibatch; None: with reinforce++ and gae
    gamma: Share = 1.0  # discount per trained token: reinforce++, gae; 1: no discount
    lambd: Share = 1.0  # gae: 1 takes the whole return, 0 only the next value
    # gae: a value that moves further than this from its old one lowers the loss no more; None: no bound
    value_clip: Positive | None = 0.2
    # ppo_clip | dual_clip | gspo | cispo | sapo | clip_cov | kl_cov | importance_sampling
    policy_loss_type: str = "ppo_clip"
    eps_clip_low: Annotated[float, Interval(ge=0, lt=1)] | None = None  # clipped losses; None: 0.2, for gspo 3e-4
    eps_clip_high: Annotated[float, Ge(0)] | None = None  # None: 0.2, for gspo 4e-4
    clip_ratio_c: float = 3.0  # dual_clip
    cispo: CispoConfig = field(default_factory=CispoConfig)
    sapo: SapoConfig = field(default_factory=SapoConfig)
    clip_cov: ClipCovConfig = field(default_factory=ClipCovConfig)
    kl_cov: KlCovConfig = field(default_factory=KlCovConfig)
    loss_reduction: str = "token_mean"  # token_mean | sequence_mean | prompt_mean | seq_mean_token_sum_norm
    max_seq_len: Count | None = None  # tokens; the divisor of seq_mean_token_sum_norm
    entropy_coef: Annotated[float, Ge(0)] = 0.0  # weight of the entropy bonus in the loss; 0: none
    kl_loss_coef: NonNegative = 0.0  # of the KL divergence from the policy that the run starts from; 0: no such term
    kl_reward_coef: NonNegative = 0.0  # the same, subtracted from the reward of each token
    kl_estimator_type: str = "k3"  # k1 (reward only) | k2 | k3 (Schulman 2020)
    kl_ctrl: KlControlConfig = field(default_factory=KlControlConfig)
    overlong: OverlongConfig = field(default_factory=OverlongConfig)
    proximal_policy: ProximalPolicy = ProximalPolicy.step
    # Groups whose samples all have the same reward and so give no signal (DAPO, arXiv 2503.14476). none: they are trained like
    # all others. filter: they are dropped on arrival, and the next prompts take their slots. replace: copies of other groups
    # of the batch replace them when it trains
    dynamic_sampling: DynamicSampling = DynamicSampling.none
    # filter: the run stops if more of the last 64 * B groups (at most 1,024) were filtered. At 1 it would never stop
    max_filtered_share: Annotated[float, Interval(gt=0, lt=1)] = 0.95
    zero_variance_filter: bool = False  # groups whose samples all have the same reward train with loss mask 0
    off_policy_correction: OffPolicyCorrectionConfig = field(default_factory=OffPolicyCorrectionConfig)
    kwargs: dict[str, Any] = field(default_factory=dict)  # for the user's own estimators, losses, ...


# ---- trainer.fully_async, trainer.partial_rollout, trainer.failures, trainer.eval


@dataclass
class FullyAsyncConfig:
    """The staleness bound, and the steps that generation may run ahead (``trainer.mode=fully_async``)."""

    max_staleness_steps: CountOrZero = 4  # S: bound on the lag of a group, in steps; 0: the synchronous order
    generate_ahead_steps: NonNegative | None = (
        None  # D: steps that generation may run ahead, also 0.5; None: as many as slow groups require, up to S-k+1
    )
    num_parallel_generation_workers: int | None = None  # W: groups generated at once; None: (largest D + k) * B
    staleness_policy: str = "mask"  # mask | accept | wait | drop | path.to.Policy: for groups beyond S
    weight_sync_interval: Count = 1  # k: optimizer steps between two weight syncs
    streaming_min_groups: Count | None = None  # train as soon as so many groups are ready; None: on whole batches
    # Begin the next step once the weights are copied, before the engines serve them; None: if generate_ahead_steps is given and
    # leaves a step something to train on meanwhile (at least 1)
    overlap_weight_sync: bool | None = None


@dataclass
class PartialRolloutConfig:
    """The number of groups begun for each step (``trainer.mode=partial_rollout``)."""

    # Groups begun per trained group; unfinished ones continue after the next update. Below 1, no step would be full
    oversubmit_factor: Annotated[float, Interval(ge=1, lt=math.inf)] = 2.0


# The functional form, because "raise" is a keyword.
FailurePolicy = StrEnum("FailurePolicy", {"replace": "replace", "mask": "mask", "raise": "raise"})


@dataclass
class FailureConfig:
    """Retries, and the failures that stop the run."""

    rollout_timeout_s: Positive | None = None  # wall-clock limit for generating one group; None: no limit
    max_rollout_retries: CountOrZero = 1  # further attempts at a group that failed
    # A prompt whose rollout failed after all retries. replace: the next prompt takes its slot. mask: samples without signal fill
    # its slot. raise: the run stops with a checkpoint
    on_rollout_failure: FailurePolicy = FailurePolicy["replace"]
    max_failed_rollouts: Count = 16  # groups that may fail for good before the run stops with a checkpoint
    max_nonfinite_steps: CountOrZero = 4  # consecutive steps skipped for a loss or gradient that is not finite
    max_engine_failures: CountOrZero = 0  # times that a group may find no engine for fleet.wait_timeout_s
    stuck_after_s: Positive = 900.0  # if neither a group nor a step ends for so long, the log says what is stuck


@dataclass
class EvalConfig:
    """Evaluation of single policy versions during training. Off without an interval."""

    interval: CountOrZero = 0  # steps; the policy after the last step is evaluated too; 0: never
    before_train: bool = False  # also evaluate the policy that the run starts from
    eval_data: list[str] = field(default_factory=list)  # like data.train_data; empty: ``generate`` prompts
    generate: Count = 64  # prompts that the environment generates if there are no files
    seed: int = 1  # of the generated prompts
    n_samples_per_prompt: Count = 1  # pass@k and avg@k for k = 1, 2, 4, ... up to it
    pass_threshold: Annotated[float, Interval(gt=-math.inf, lt=math.inf)] = (
        1.0  # a sample passes with at least this reward
    )
    sampling_params: dict[str, Any] = field(default_factory=dict)  # override generator.sampling_params
    max_parallel: Count = 16  # evaluation prompts generated at once
    num_engines: CountOrZero = (
        0  # separate engines; 0: the run's engines, and the next weight sync waits for the evaluation
    )
    # Such as eval/reward or eval/pass@1: each evaluated step gets a checkpoint, and the one with the highest value stays;
    # export and eval know it as RUN:best. None: only the newest checkpoints stay
    best_metric: str | None = None


# ---- trainer


class TrainerMode(StrEnum):
    """The built-in trainers. ``trainer.mode`` also takes the import path of a subclass of one of them."""

    sync = "sync"
    one_step_off = "one_step_off"
    fully_async = "fully_async"
    partial_rollout = "partial_rollout"


class ResumeMode(StrEnum):
    """The checkpoint that a run starts from."""

    latest = "latest"  # the newest one of an unfinished run whose settings allow it (config/compare.py), if any
    never = "never"  # always a new run


@dataclass
class TrainerConfig:
    """A run: its mode, its length, where it trains, and its outputs."""

    mode: str = "sync"  # sync | one_step_off | fully_async | partial_rollout | path.to:MyTrainer, a subclass
    run_name: str = "run"  # the run folder is runs_dir/run_name-N
    runs_dir: str = "runs"  # the folder of run folders
    run_dir: str | None = None  # None: runs_dir/run_name-N, resumed if it is unfinished and its settings allow it
    seed: int = 0  # of everything random in the run, except generated prompts
    epochs: Count = 1  # passes over the data; with max_steps, only those over a stream count
    max_steps: Count | None = None  # optimizer steps; None: as many full minibatches as the epochs hold
    policy_mini_batch_size: Count = 16  # B: groups per optimizer step
    train_batch_size: Count | None = None  # sync: groups per generation phase, a multiple of B; None: B
    update_epochs_per_batch: Count = 1  # passes over a minibatch; more than 1 computes proximal log-probs first
    micro_batch_tokens: Count = 16384  # per forward/backward pass, including padding
    packing: bool | None = None  # several sequences in a row, without padding; None: if the model keeps them apart
    strategy: TrainingStrategy = TrainingStrategy.local
    # strategy=local: process (the control loop does not slow it down) | thread; None: process on the CPU, unless the engine is in
    # a thread too, or a program with threads (a notebook) has registered the loss or the estimator itself
    executor: Annotated[str, OneOf("process", "thread")] | None = None
    fsdp: FSDPConfig = field(default_factory=FSDPConfig)
    placement: PlacementConfig = field(default_factory=PlacementConfig)
    max_restarts: CountOrZero = 0  # restarts from the last checkpoint after a training process or worker has died
    device: str = "cpu"  # for training: cpu | cuda | cuda:N (local); cpu or cuda of each worker (fsdp2)
    tf32: bool = False  # on a GPU, products of float32 matrices with 10 bits of mantissa (TF32): several times faster
    ckpt_interval: CountOrZero = 50  # steps; 0: only at the end and on SIGTERM
    max_ckpts_to_keep: Count = 2  # the newest ones; older ones are removed, except for eval.best_metric
    hf_save_interval: CountOrZero = 0  # steps; each writes <run>/policies/global_step_N, which stays; 0: never
    ckpt_path: str | None = None  # a URL (s3://, gs://, ...; fsspec) for this run alone; None: the run folder
    resume: ResumeMode = ResumeMode.latest
    # An earlier checkpoint of run_dir, once: the same command again continues. None: the newest one
    resume_step: CountOrZero | None = None
    # RUN, RUN:STEP or RUN:best: a new run starts from the policy of that run's checkpoint, and from its critic if it has one
    init_from: str | None = None
    samples_per_step: CountOrZero = 2  # groups recorded in samples/ of each step and evaluation; 0: none
    # Requests, environment calls and agents in events/; beyond it, some groups have none. The life of groups is always there
    max_events_per_s: CountOrZero = 100
    # tensorboard | wandb | mlflow | trackio | swanlab | path.to.Tracker
    trackers: list[str] = field(default_factory=lambda: ["tensorboard"])
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    fully_async: FullyAsyncConfig = field(default_factory=FullyAsyncConfig)
    partial_rollout: PartialRolloutConfig = field(default_factory=PartialRolloutConfig)
    failures: FailureConfig = field(default_factory=FailureConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)


# ---- rollout


@dataclass
class RewardStageConfig:
    """A reward function that replaces the generator's rewards; see :mod:`skyrl_train.rollout.stages.reward`."""

    function: str | None = None  # path.to:function or path.to:Class; None: the generator's rewards
    kwargs: dict[str, Any] = field(default_factory=dict)  # for the function, or for the constructor of the class
    # loop (async def only) | thread | process | ray; None: loop for async def, else thread
    executor: Annotated[str, OneOf("loop", "thread", "process", "ray")] | None = None
    max_parallel: Count = 8  # groups scored at once; except in the loop, each in a separate thread, process or actor
    timeout_s: Positive | None = None  # for scoring one group; None: no limit
    ray_num_cpus: Annotated[float, Ge(0)] = 1.0  # reserved for each actor
    ray_num_gpus: Annotated[float, Ge(0)] = 0.0  # the same for GPUs


@dataclass
class ReferenceStageConfig:
    """Log-probs under the policy that the run starts from, for ``trainer.algorithm.kl_loss_coef`` or ``kl_reward_coef``."""

    # process | thread | ray | workers (one model sharded over Ray actors, as with strategy=fsdp2) |
    # colocated (next to the policy, in the ranks of strategy=fsdp2)
    executor: Annotated[str, OneOf("process", "thread", "ray", "workers", "colocated")] = "process"
    max_parallel: Count = 1  # groups scored at once, each by a separate copy of the model
    num_workers: Count = 2  # that share the model of executor=workers
    cpu_offload: bool | None = None  # workers, colocated: keep weights in main memory; None: trainer.fsdp.cpu_offload
    device: str | None = None  # None: trainer.device
    ray_num_cpus: Annotated[float, Ge(0)] = 1.0  # reserved for each actor
    ray_num_gpus: Annotated[float, Ge(0)] = 0.0  # the same for GPUs


@dataclass
class ProximalStageConfig:
    """Proximal log-probs of groups as they arrive, for ``trainer.algorithm.proximal_policy=arrival``."""

    # trainer (the trained policy itself, between two calls of the trainer) | process | thread | ray (a replica of the policy with
    # its own resources, which receives every weight sync)
    executor: Annotated[str, OneOf("trainer", "process", "thread", "ray")] = "trainer"
    device: str | None = None  # of a replica; None: trainer.device
    ray_num_cpus: Annotated[float, Ge(0)] = 1.0  # reserved for a replica's actor
    ray_num_gpus: Annotated[float, Ge(0)] | None = None  # the same for GPUs; None: 1 on cuda


@dataclass
class StagesConfig:
    """The stages that a group passes between its generation and the buffer."""

    reward: RewardStageConfig = field(default_factory=RewardStageConfig)
    reference: ReferenceStageConfig = field(default_factory=ReferenceStageConfig)
    proximal: ProximalStageConfig = field(default_factory=ProximalStageConfig)


@dataclass
class RolloutConfig:
    """The processes of the generator, and the storage of groups until they are trained."""

    replay: bool = True  # checkpoints keep the tokens of unfinished rollouts; a resumed run serves them again
    buffer_memory_bytes: CountOrZero | None = None  # finished groups beyond it wait on disk; None: all in memory
    num_actors: CountOrZero = 0  # Ray actors for the generator (environments, reward code, agents); 0: in the trainer
    ray_num_cpus: Annotated[float, Ge(0)] = 1.0  # reserved for each of these actors
    stages: StagesConfig = field(default_factory=StagesConfig)


# ---- generator


@dataclass
class FleetConfig:
    """Health checks and restarts of engines."""

    max_restarts: CountOrZero = 3  # of each engine; the count starts again after five healthy minutes
    probe_interval_s: Positive = 10.0  # between two health probes, and the time limit of one
    max_failed_probes: Count = 3  # consecutive ones after which the engine counts as dead
    wait_timeout_s: Annotated[float, Ge(0)] = 60.0  # how long requests wait while no engine serves; then the run stops


@dataclass
class InferenceEngineConfig:
    """The engines that sample."""

    # embedded | vllm | vllm_remote | path.to.Factory
    backend: Annotated[str, OneOf("embedded", "vllm", "vllm_remote", import_path=True)] = "embedded"
    # process (a separate one) | thread (of the trainer's process; embedded only) | ray (an actor)
    executor: Annotated[str, OneOf("process", "thread", "ray")] = "process"
    num_engines: Count = 1  # one model copy each
    device: str = "cpu"  # cpu | cuda | cuda:N (embedded)
    dtype: Dtype = "float32"  # of the served weights: float32 | bfloat16
    max_num_seqs: Count = 128  # requests decoded at once, per engine
    max_model_len: int | None = None  # tokens per request; None: prompt and response limits, within the model's
    batch_invariant: bool = False  # embedded: tokens of a request do not depend on the rest of the batch (slower)
    tensor_parallel_size: Count = 1  # vllm, per engine
    pipeline_parallel_size: Count = 1  # vllm, per engine
    # vllm, executor=process: indices of this machine's GPUs, one per rank of each engine, the engines in order; a GPU named
    # twice is shared. None: 0, 1, 2, ... on device=cuda
    devices: list[int] | None = None
    engine_args: dict[str, Any] = field(default_factory=dict)  # any further argument of vLLM's AsyncEngineArgs
    environment: dict[str, str] = field(default_factory=dict)  # variables of the engine's processes: vllm, or in Ray
    remote_urls: list[str] = field(default_factory=list)  # vllm_remote: one server per engine
    remote_api_key_variable: str = "VLLM_API_KEY"  # the environment variable that holds the servers' key
    ray_num_cpus: Annotated[float, Ge(0)] = 1.0  # reserved for each engine in a Ray actor
    # None: on device=cuda one per rank, else 0. Below 1: engines share a GPU
    ray_num_gpus: Annotated[float, Ge(0)] | None = None
    fleet: FleetConfig = field(default_factory=FleetConfig)


@dataclass
class SamplingConfig:
    """Mirrors :class:`skyrl_train.inference.interface.SamplingParams`; ``max_tokens`` limits one turn."""

    max_tokens: Count = 64  # longest response of a turn
    min_tokens: CountOrZero = 0  # fewest tokens of a response: no stop token or text ends it before
    temperature: NonNegative = 1.0  # 0: greedy
    top_p: Annotated[float, Interval(gt=0, le=1)] = 1.0  # 1: off
    top_k: int = -1  # -1: off
    min_p: Share = 0.0  # 0: off
    stop: list[str] = field(default_factory=list)  # texts that end a response
    stop_token_ids: list[int] = field(default_factory=list)  # tokens that end a response
    ignore_eos: bool = False  # continue after the end-of-sequence token


@dataclass
class ChatConfig:
    """Parsers of responses. None: chosen by the model's family, else by its template and vocabulary."""

    tool_parser: str | None = None  # format of tool calls: qwen3, llama-3, deepseek-v3, ... | none
    reasoning_parser: str | None = None  # think | none


@dataclass
class GeneratorConfig:
    """The generator, its limits, and the weight sync to its engines."""

    name: str = "gym"  # gym | harness | skyrl (one of SkyRL) | path.to.GeneratorClass
    kwargs: dict[str, Any] = field(default_factory=dict)  # for the generator's constructor
    n_samples_per_prompt: Count = 8  # size of a group
    max_turns: Count = 1  # turns of an episode in an environment
    max_input_length: Count = 256  # tokens of a turn's input, including the conversation so far
    sampling_params: SamplingConfig = field(default_factory=SamplingConfig)
    inference_engine: InferenceEngineConfig = field(default_factory=InferenceEngineConfig)
    chat: ChatConfig = field(default_factory=ChatConfig)
    chat_template: str | None = None  # a file with a Jinja template; None: the tokenizer's
    chat_template_kwargs: dict[str, Any] = field(
        default_factory=dict
    )  # such as {enable_thinking: false}; those of a request win over them
    # The treatment of requests in flight during a weight sync
    pause_mode: Annotated[str, OneOf("keep", "recompute", "abort", "wait")] = "keep"
    pause_timeout_s: Positive = 60.0  # for each phase of a weight sync
    verify_weights: bool = False  # checksum each weight sync
    # shared_memory | disk | delta | gloo | nccl | cuda_ipc | path.to.Transport; None: disk if a folder is named, gloo to engines
    # in Ray actors, cuda_ipc if engine processes and trainer share one GPU in turns, else shared_memory
    weight_transport: str | None = None
    weight_folder: str | None = None  # disk, delta: a folder that trainer and engines share, under the same path
    weight_transport_kwargs: dict[str, Any] = field(default_factory=dict)  # for the transport's constructor


# ---- environment, data


@dataclass
class EnvironmentConfig:
    """The environment that answers the policy and rewards it."""

    # A registered name, path.to.Class or path.to:function, skyrl_gym:<id>, reasoning_gym:<task>, verifiers:<name>
    env_class: str = "run_length"
    kwargs: dict[str, Any] = field(default_factory=dict)  # for the environment's constructor and its generated prompts
    modules: list[str] = field(default_factory=list)  # files or modules that register environments, to import first


@dataclass
class DataConfig:
    """The prompts: from the files in ``train_data``, or generated by the environment."""

    # .jsonl | .csv | .parquet | a folder of data | a name on the hub, such as openai/gsm8k:main:train
    train_data: list[str] = field(default_factory=list)
    prompt_key: str = "prompt"  # a string or a conversation
    # Prompts of more than generator.max_input_length tokens. error: the run does not start; filter: they are left out;
    # truncate: the longest message loses its beginning; keep: they stay, and their rollouts fail
    on_long_prompt: Annotated[str, OneOf("error", "filter", "truncate", "keep")] = "error"
    generate: int = 512  # prompts that the environment generates if there are no files
    seed: int = 0  # of the generated prompts
    # shuffle | sequential | weighted | path.to.Sampler; None: shuffle, or a stream's own order
    sampler: Annotated[str, OneOf("shuffle", "sequential", "weighted", import_path=True)] | None = None
    sampler_kwargs: dict[str, Any] = field(default_factory=dict)  # weighted: {"weights": {data_source: weight}}
    streaming: bool = False  # read files when they are needed, in their order, instead of at once


@dataclass
class RunConfig:
    """The root."""

    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    generator: GeneratorConfig = field(default_factory=GeneratorConfig)
    environment: EnvironmentConfig = field(default_factory=EnvironmentConfig)
    data: DataConfig = field(default_factory=DataConfig)
