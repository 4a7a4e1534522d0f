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
    fully_async = "fully_async"


class StragglerPolicyName(StrEnum):
    """What gives way when a group needs more than S steps of time (SEMANTICS 4.2)."""

    accept = "accept"  # the bound: train it anyway, corrected and counted
    wait = "wait"  # time: the trainer waits where it must; no trained group exceeds S


# What happens to a prompt whose rollout failed after all retries: the next prompt takes its seat, or the run stops with
# a checkpoint. (The functional form, because "raise" is a keyword.)
FailurePolicy = StrEnum("FailurePolicy", {"replace": "replace", "raise": "raise"})


class ResumeMode(StrEnum):
    """Which checkpoint a run starts from."""

    latest = "latest"  # the newest one of an unfinished run of the same configuration, if any
    never = "never"  # always a new run


@dataclass
class FullyAsyncConfig:
    max_staleness_steps: int = 4  # S: bound on the lag of a group, in steps
    pipeline_depth: int | None = None  # D: steps that generation may run ahead; None: min(1, S)
    num_parallel_generation_workers: int | None = None  # W: groups generated at once; None: (D + 1) * B
    straggler_policy: StragglerPolicyName = StragglerPolicyName.accept


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
class ModelConfig:
    path: str | None = None  # a folder or hub name that transformers opens; None: build one
    build: BuildModelConfig = field(
        default_factory=BuildModelConfig
    )  # without a path: made on the spot, in <run>/model


@dataclass
class OptimizerConfig:
    lr: float = 1e-6
    adam_betas: list[float] = field(default_factory=lambda: [0.9, 0.999])
    adam_eps: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    scheduler: str = "constant"  # constant | linear | cosine (decays to 0 over the run)
    num_warmup_steps: int = 0


@dataclass
class PolicyConfig:
    model: ModelConfig = field(default_factory=ModelConfig)
    optimizer_config: OptimizerConfig = field(default_factory=OptimizerConfig)
    dtype: str = "float32"  # of the trained weights: float32 | bfloat16


@dataclass
class OffPolicyCorrectionConfig:
    tis_ratio_type: str | None = "token"  # truncated importance sampling, proximal over behaviour: token | None
    token_tis_ratio_clip_high: float = 2.0
    allow_uncorrected: bool = False  # the explicit opt-in that S > 0 without a correction needs


@dataclass
class AlgorithmConfig:
    advantage_estimator: str = "grpo"
    grpo_norm_by_std: bool = True
    policy_loss_type: str = "ppo_clip"
    eps_clip_low: float = 0.2
    eps_clip_high: float = 0.2
    loss_reduction: str = "token_mean"  # token_mean | sequence_mean
    entropy_coef: float = 0.0
    off_policy_correction: OffPolicyCorrectionConfig = field(default_factory=OffPolicyCorrectionConfig)


@dataclass
class FailureConfig:
    rollout_timeout_s: float | None = None  # wall-clock limit of one group's generation; None: no limit
    max_rollout_retries: int = 1
    on_rollout_failure: FailurePolicy = FailurePolicy["replace"]
    max_failed_rollouts: int = 16  # groups that may fail for good before the run stops with a checkpoint


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
    micro_batch_tokens: int = 16384  # padded tokens per forward/backward pass
    device: str = "cpu"  # of the local training backend
    ckpt_interval: int = 50  # steps; 0: only at the end and on SIGTERM
    max_ckpts_to_keep: int = 2
    resume: ResumeMode = ResumeMode.latest
    samples_per_step: int = 2  # groups written to samples.jsonl each step
    trackers: list[str] = field(default_factory=lambda: ["tensorboard"])
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    fully_async: FullyAsyncConfig = field(default_factory=FullyAsyncConfig)
    failures: FailureConfig = field(default_factory=FailureConfig)


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
    remote_staging_folder: str | None = None  # a folder that trainer and servers share; None: they share a machine
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


@dataclass
class RunConfig:
    """The root."""

    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    generator: GeneratorConfig = field(default_factory=GeneratorConfig)
    environment: EnvironmentConfig = field(default_factory=EnvironmentConfig)
    data: DataConfig = field(default_factory=DataConfig)
