"""What a run keeps in memory, from the model's shape."""

from __future__ import annotations

from dataclasses import dataclass

from skyrl_train.config import derive
from skyrl_train.config.activation_memory import activation_bytes
from skyrl_train.config.model_shape import BYTES_PER_ELEMENT, ModelShape, model_shape
from skyrl_train.config.schema.model import ModelConfig
from skyrl_train.config.schema.run import RunConfig
from skyrl_train.config.schema.trainer import TrainerConfig
from skyrl_train.config.schema.training import TrainingStrategy
from skyrl_train.config.transports import staging_copies

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
    critic_bytes: int = 0  # weights, gradients and moments of a critic, over all its ranks; 0 where its size is unknown
    snapshot_bytes: int = 0  # in main memory from the first checkpoint on: weights and moments, the critic's too
    num_ranks: int = 1  # that share the weights, gradients and moments of a copy; the staging copies are all rank 0's
    activation_bytes: int = 0  # of each rank, at most, beside what stays
    reference_bytes: int = 0  # of a reference that the same ranks hold in the same memory

    @property
    def trainer_bytes(self) -> int:
        """What the training backend holds, all its ranks together."""
        return self._shared_bytes + self.staging_bytes + self.critic_bytes

    @property
    def rank_bytes(self) -> int:
        """What each rank holds of the policy's state and of a reference; the layer that it computes with comes whole on top."""
        return -(-self._shared_bytes // self.num_ranks)

    @property
    def _shared_bytes(self) -> int:
        return self.policy_bytes + self.gradient_bytes + self.optimizer_bytes + self.reference_bytes

    @property
    def engine_bytes(self) -> int:
        """What the engines hold."""
        return self.engine_weight_bytes + self.kv_cache_bytes


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
    critic = _critic_parameters(config.trainer, shape)
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
        critic_bytes=critic * of_critic,
        snapshot_bytes=learning * (trained + 2 * _FLOAT32_BYTES) + critic * (of_critic - _FLOAT32_BYTES),
        num_ranks=derive.fsdp_shard_size(config.trainer) if sharded else 1,
        activation_bytes=activation_bytes(config.trainer, shape, _micro_batch_tokens(config, max_model_len)),
        reference_bytes=_reference_bytes(config, parameters),
    )


def _reference_bytes(config: RunConfig, parameters: int) -> int:
    trainer = config.trainer
    moved = derive.reference_offload(config) != trainer.fsdp.cpu_offload and trainer.device != "cpu"
    if moved or not derive.reference_is_colocated(config):
        return 0
    return parameters * (BYTES_PER_ELEMENT[trainer.policy.dtype] if trainer.policy.model.lora.rank else _FLOAT32_BYTES)


def _micro_batch_tokens(config: RunConfig, max_model_len: int) -> int:
    """Of the largest micro-batch that the run can have."""
    sequences = config.trainer.policy_mini_batch_size * config.generator.n_samples_per_prompt
    return min(config.trainer.micro_batch_tokens, sequences * max_model_len)


def _critic_parameters(trainer: TrainerConfig, of_policy: ModelShape) -> int:
    path = trainer.critic.model.path
    shape = of_policy if path is None else model_shape(ModelConfig(path=path))
    return shape.num_parameters if shape is not None and derive.needs_critic(trainer.algorithm) else 0


def _weight_bytes(dtype: str, sharded: bool) -> int:
    """Of one trained weight, with its float32 master where it is narrower."""
    if sharded:  # it is its own master: what is narrower is a layer at a time, while it computes
        return _FLOAT32_BYTES
    trained = BYTES_PER_ELEMENT[dtype]
    return trained + (_FLOAT32_BYTES if trained < _FLOAT32_BYTES else 0)
