"""What a training process is sent: the settings of a model, training sequences, transports; and what is said when it dies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from skyrl_train.config.schema import TrainerConfig
from skyrl_train.training.backend import TrainingSequence

if TYPE_CHECKING:
    from skyrl_train.weight_sync.update import WeightTransport

_TENSOR_FIELDS = (
    "token_ids",
    "loss_mask",
    "advantages",
    "behaviour_logprobs",
    "versions",
    "proximal_logprobs",
    "reference_logprobs",
    "values",
    "returns",
)
# Small, or absent from most sequences: sent as they are.
_PLAIN_FIELDS = ("group_index", "counted_tokens", "group_tokens", "group_sequences", "grammars", "record")


class Role(StrEnum):
    """The role of a model in the run. Ranks hold at most one model of each role."""

    policy = "policy"
    reference = "reference"  # a copy of the initial policy that never changes
    critic = "critic"  # a value model


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """The arguments from which every rank builds its part of a model; see :class:`LocalBackend`."""

    model_path: str
    trainer: TrainerConfig  # for a critic, from :func:`skyrl_train.config.derive.critic_trainer`
    total_steps: int
    temperature: float
    seed: int
    memory_fraction: float | None = None  # of its GPU that local training may use; None: all


@dataclass(frozen=True, slots=True)
class PackedSequences:
    """Training sequences in the form in which they are sent to another process: a few flat arrays, the values of each field
    end to end.

    Each field has a separate length per sequence (-1: the sequence lacks it), so that ragged sequences arrive unchanged and are
    rejected where all sequences are checked.
    """

    plain: dict[str, list[Any]]
    lengths: dict[str, list[int]]
    values: dict[str, npt.NDArray[np.generic]]

    @classmethod
    def of(cls, sequences: Sequence[TrainingSequence]) -> PackedSequences:
        """Pack sequences."""
        lengths: dict[str, list[int]] = {}
        values: dict[str, npt.NDArray[np.generic]] = {}
        for name in _TENSOR_FIELDS:
            column = [getattr(sequence, name) for sequence in sequences]
            present = [tensor for tensor in column if tensor is not None]
            lengths[name] = [-1 if tensor is None else len(tensor) for tensor in column]
            values[name] = torch.cat(present).numpy() if present else np.zeros(0)
        return cls({name: [getattr(s, name) for s in sequences] for name in _PLAIN_FIELDS}, lengths, values)

    def unpack(self) -> list[TrainingSequence]:
        """Return the original sequences."""
        columns: dict[str, list[Any]] = {name: list(column) for name, column in self.plain.items()}
        for name in _TENSOR_FIELDS:
            lengths = self.lengths[name]
            together = torch.from_numpy(self.values[name].copy())  # Ray's arrays are read-only
            parts = iter(together.split([length for length in lengths if length >= 0]))
            columns[name] = [next(parts) if length >= 0 else None for length in lengths]
        return [
            TrainingSequence(**{name: column[index] for name, column in columns.items()})
            for index in range(len(self.plain[_PLAIN_FIELDS[0]]))
        ]


def transport_key(known: list[WeightTransport], transport: WeightTransport) -> int:
    """Return the number by which another process knows ``transport``: each call sends it a new copy, of which it keeps the first.

    Args:
        known: the transports so far; a new one is added.
    """
    if all(each is not transport for each in known):
        known.append(transport)
    return next(number for number, each in enumerate(known) if each is transport)


def recovery_advice(trainer: TrainerConfig) -> str:
    """Say how a run continues after the death of a training process."""
    if not trainer.max_restarts:
        return (
            "Give the same command to continue from the last checkpoint, or set trainer.max_restarts to have that done."
        )
    return (
        f"With trainer.max_restarts={trainer.max_restarts}, the run continues from its last checkpoint until that many restarts "
        "are used up; after them, give the same command."
    )
