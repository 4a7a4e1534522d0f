"""A small critic and minibatches that it can learn from."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from training_worlds import backend, config, minibatch

from skyrl_train.config import derive
from skyrl_train.config.schema import TrainerConfig
from skyrl_train.training.actor_critic import ActorCritic
from skyrl_train.training.backend import CriticBackend, Minibatch, TrainingSequence
from skyrl_train.training.local_backend import LocalCritic


def critic_config(**changes: object) -> TrainerConfig:
    """What a critic is built from; ``changes`` as for :func:`training_worlds.config`."""
    quick = {"algorithm__advantage_estimator": "gae", "critic__optimizer_config__lr": 1e-2}
    return derive.critic_trainer(config(**(quick | changes)))


def critic(folder: str, **changes: object) -> LocalCritic:
    return LocalCritic(folder, critic_config(**changes), total_steps=10)


def off_zero(folder: str, **changes: object) -> LocalCritic:
    """In float64, with a head that is not 0: under that one the body has no gradient."""
    trained = critic(folder, **changes)
    head = trained.model.get_output_embeddings()
    with torch.no_grad():
        head.weight.copy_(torch.randn(head.weight.shape, generator=torch.Generator().manual_seed(3)))
    trained.model.double()
    return trained


def actor_critic(folder: str, **changes: object) -> ActorCritic:
    once = changes.get("update_epochs_per_batch", 1) == 1
    return ActorCritic(backend(folder, **changes), critic(folder, **changes), in_parts=once)


def with_values(batch: Minibatch, of: CriticBackend | None = None, seed: int = 0) -> Minibatch:
    """With returns that the first token of a sequence and the place in it tell, and values: the critic's, or random."""
    generator = torch.Generator().manual_seed(seed)
    values = of.forward_values(batch.sequences) if of is not None else None
    sequences: list[TrainingSequence] = []
    for index, s in enumerate(batch.sequences):
        old = torch.randn(len(s), generator=generator) if values is None else values[index]
        returns = torch.linspace(0, 1, len(s)) + 0.3 * (s.token_ids[0] % 3)
        sequences.append(dataclasses.replace(s, values=old * s.loss_mask, returns=returns * s.loss_mask))
    return dataclasses.replace(batch, sequences=sequences)


def valued_minibatch(seed: int = 0, step: int = 1, **kwargs: Any) -> Minibatch:
    return with_values(minibatch(seed, step, **kwargs), seed=seed)


def values_of(sequences: Sequence[TrainingSequence], model: torch.nn.Module) -> list[torch.Tensor]:
    """One sequence after the other, without rows and hooks: the head of the hidden state before each token."""
    results = []
    for s in sequences:
        hidden = model.base_model(input_ids=s.token_ids[None], use_cache=False).last_hidden_state[0]
        values = model.get_output_embeddings()(hidden).squeeze(1)
        results.append(torch.cat([values.new_zeros(1), values[:-1]]))
    return results
