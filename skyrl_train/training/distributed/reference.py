"""A policy that stays as it is, sharded over workers of its own: the reference of a KL term where one device cannot hold it."""

from __future__ import annotations

from collections.abc import Sequence

from skyrl_train.config.schema.trainer import TrainerConfig
from skyrl_train.training.distributed.ray_backend import RayBackend
from skyrl_train.training.frozen_policy import TokensToScore


class ShardedReference:
    """What :class:`FrozenPolicy` is, by a worker group. Nothing is ever trained, so that no rank holds gradients or moments.

    Args:
        trainer: as of the policy; ``fsdp`` says how many workers there are, and where.

    Raises:
        ConfigError, ModelError, TrainingWorkerError: (constructor) as of :class:`RayBackend`.
    """

    def __init__(self, model_path: str, trainer: TrainerConfig, temperature: float) -> None:
        self._backend = RayBackend(model_path, trainer, total_steps=1, temperature=temperature, seed=trainer.seed)

    def __call__(self, sequences: Sequence[TokensToScore]) -> list[list[float]]:
        """See :meth:`FrozenPolicy.__call__`.

        Raises:
            TrainingWorkerError: a worker is gone.
        """
        laid_out = [sequence.training_sequence() for sequence in sequences]
        scored = self._backend.forward_logprobs(laid_out)
        return [
            (values * sequence.loss_mask)[len(tokens.prompt_token_ids) :].tolist()
            for tokens, sequence, values in zip(sequences, laid_out, scored, strict=True)
        ]

    def close(self) -> None:
        """Ends the workers. Idempotent."""
        self._backend.close()
