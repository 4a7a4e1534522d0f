"""How policy and critic are trained: their models, their optimizers, and the workers of fsdp2."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from skyrl_train.config.schema.model import ModelConfig


@dataclass
class OptimizerConfig:
    """AdamW. The gradient's norm is the L2 norm over all trained parameters."""

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
    """The model that is trained and published."""

    model: ModelConfig = field(default_factory=ModelConfig)
    optimizer_config: OptimizerConfig = field(default_factory=OptimizerConfig)
    dtype: str = "float32"  # of the trained weights: float32 | bfloat16
    fp32_head: bool = False  # logits by products in float32 under bfloat16 weights, as engines with a float32 head do
    compile: bool = False  # layers by torch.compile, their attention left out; the first steps are slow
    gradient_checkpointing: bool = False  # layers run again in the backward pass instead of keeping their activations


@dataclass
class CriticModelConfig:
    """The model that the critic starts from, a value head in the place of its own."""

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
    start_timeout_s: float = 600.0  # waiting for the cluster's resources included, loading the models not


@dataclass
class CriticConfig:
    """The model that predicts returns, with ``trainer.algorithm.advantage_estimator=gae`` only. It has an optimizer of its
    own."""

    model: CriticModelConfig = field(default_factory=CriticModelConfig)
    optimizer_config: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(lr=5e-6))
    dtype: str = "float32"  # of the trained weights: float32 | bfloat16
    gradient_checkpointing: bool = False
    device: str | None = None  # that trains it; None: trainer.device
    # trainer.strategy=fsdp2: workers (its own, of ``fsdp`` below) | colocated (those of the policy hold it too)
    placement: str = "workers"
    fsdp: FSDPConfig = field(default_factory=FSDPConfig)  # colocated: cpu_offload and reshard_after_forward alone
