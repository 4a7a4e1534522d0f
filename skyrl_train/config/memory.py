"""What a run keeps in memory, from the model's shape."""

from __future__ import annotations

from dataclasses import dataclass

from skyrl_train.config import derive
from skyrl_train.config.activation_memory import activation_bytes
from skyrl_train.config.model_shape import BYTES_PER_ELEMENT, ModelShape, model_shape
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
    # In main memory from the first checkpoint on, wherever the training is: a copy of weights and moments (of each copy of the
    # policy, where there are several), and of the critic's.
    snapshot_bytes: int = 0
    critic_snapshot_bytes: int = 0
    num_ranks: int = 1  # that share the weights, gradients and moments of a copy; the staging copies are all rank 0's
    activation_bytes: int = 0  # of each rank, at most, beside what stays
    critic_activation_bytes: int = 0  # of each rank of a critic that computes elsewhere
    reference_bytes: int = 0  # of a reference that the same ranks hold
    apart_reference_bytes: int = 0  # of each copy of a reference that is anywhere else
    # Of a reference and a critic that the same ranks hold: in the memory that the policy's state is in, and in the other one.
    beside_bytes: int = 0
    elsewhere_bytes: int = 0
    critic_ranks: int = 1  # that share a copy of the critic

    @property
    def trainer_bytes(self) -> int:
        """What the training backend holds, all its ranks together."""
        state = self.policy_bytes + self.gradient_bytes + self.optimizer_bytes
        return state + self.reference_bytes + self.staging_bytes + self.critic_bytes

    @property
    def rank_bytes(self) -> int:
        """What each rank holds where the policy's state is: that, and what is beside it; the layer that it computes with comes
        whole on top."""
        state = self.policy_bytes + self.gradient_bytes + self.optimizer_bytes
        return -(-(state + self.beside_bytes) // self.num_ranks)

    @property
    def rank_elsewhere_bytes(self) -> int:
        """What each rank holds in the other memory: on the GPU where the policy's state is in main memory, or in main memory."""
        return -(-self.elsewhere_bytes // self.num_ranks)

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
    critic_shape = _critic_shape(config.trainer, shape)
    critic = 0 if critic_shape is None else critic_shape.num_parameters
    reference, apart = _reference_bytes(config, parameters)
    activations, of_critic_alone = _activation_bytes(config, shape, critic_shape, max_model_len)
    beside, elsewhere = _of_policy_ranks(config, reference, critic * of_critic)
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
        snapshot_bytes=learning * (trained + 2 * _FLOAT32_BYTES),
        critic_snapshot_bytes=critic * (of_critic - _FLOAT32_BYTES),
        num_ranks=derive.fsdp_shard_size(config.trainer) if sharded else 1,
        activation_bytes=activations,
        critic_activation_bytes=of_critic_alone,
        reference_bytes=reference,
        apart_reference_bytes=apart,
        beside_bytes=beside,
        elsewhere_bytes=elsewhere,
        critic_ranks=derive.fsdp_shard_size(derive.critic_trainer(config.trainer)) if sharded else 1,
    )


def _reference_bytes(config: RunConfig, parameters: int) -> tuple[int, int]:
    """Of a reference: in the policy's ranks, and of a copy of it anywhere else."""
    policy, stage = config.trainer.policy, config.rollout.stages.reference
    if not derive.needs_reference(config.trainer.algorithm):
        return 0, 0
    sharded = stage.placement in ("colocated", "workers")
    each = _FLOAT32_BYTES if sharded and not policy.model.lora.rank else BYTES_PER_ELEMENT[policy.dtype]
    return (parameters * each, 0) if derive.reference_is_colocated(config) else (0, parameters * each)


def _of_policy_ranks(config: RunConfig, reference: int, critic: int) -> tuple[int, int]:
    """What the policy's ranks hold of a reference and a critic: in the memory that the policy's state is in, and in the other."""
    trainer = config.trainer
    held = [(reference, derive.reference_offload(config))]
    if derive.critic_is_colocated(trainer):
        held.append((critic, trainer.critic.fsdp.cpu_offload))
    one_memory = trainer.device == "cpu"
    beside = sum(each for each, offloaded in held if one_memory or offloaded == trainer.fsdp.cpu_offload)
    return beside, sum(each for each, _ in held) - beside


def _activation_bytes(
    config: RunConfig, policy: ModelShape, critic: ModelShape | None, max_model_len: int
) -> tuple[int, int]:
    """Of the policy, and of a critic where it computes in the same memory: in the same ranks one of them at a time, in this
    process both at once. And of a critic in another memory."""
    trainer, tokens = config.trainer, _micro_batch_tokens(config, max_model_len)
    of_policy = activation_bytes(trainer, policy, tokens)
    if critic is None:
        return of_policy, 0
    of_critic = activation_bytes(derive.critic_trainer(trainer), critic, tokens)
    if not derive.critic_is_beside(trainer):
        return of_policy, of_critic
    return (max(of_policy, of_critic) if derive.critic_is_colocated(trainer) else of_policy + of_critic), 0


def _micro_batch_tokens(config: RunConfig, max_model_len: int) -> int:
    """Of the largest micro-batch that the run can have."""
    sequences = config.trainer.policy_mini_batch_size * config.generator.n_samples_per_prompt
    return min(config.trainer.micro_batch_tokens, sequences * max_model_len)


def _critic_shape(trainer: TrainerConfig, of_policy: ModelShape) -> ModelShape | None:
    if not derive.needs_critic(trainer.algorithm):
        return None
    return of_policy if trainer.critic.model.path is None else model_shape(derive.critic_model(trainer))


def _weight_bytes(dtype: str, sharded: bool) -> int:
    """Of one trained weight, with its float32 master where it is narrower."""
    if sharded:  # it is its own master: what is narrower is a layer at a time, while it computes
        return _FLOAT32_BYTES
    trained = BYTES_PER_ELEMENT[dtype]
    return trained + (_FLOAT32_BYTES if trained < _FLOAT32_BYTES else 0)
