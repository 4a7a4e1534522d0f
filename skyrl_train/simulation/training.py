"""Modelled training and publication: a backend whose work takes virtual time and which looks at what it is given."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from skyrl_train.algorithms.advantages import ADVANTAGE_ESTIMATORS
from skyrl_train.inference.weight_update import WeightUpdate
from skyrl_train.publication.base import WeightTransport
from skyrl_train.simulation.engine import TRANSPORT
from skyrl_train.training.backend import Minibatch, TrainingBackend, TrainingSequence

Spend = Callable[[float], None]
ESTIMATOR = "modelled"


@ADVANTAGE_ESTIMATORS.register(ESTIMATOR)
def _own_return(returns: torch.Tensor, loss_masks: Sequence[torch.Tensor], *, norm_by_std: bool) -> list[torch.Tensor]:
    """The return itself: the one estimator for which a group may be a single sample."""
    return [value * mask.float() for value, mask in zip(returns, loss_masks, strict=True)]


@dataclass(frozen=True)
class TrainingSpeed:
    """What a step takes, in virtual seconds. The time of a sequence counts all its tokens, masked ones too."""

    per_step_s: float = 0.0
    per_token_s: float = 0.0  # of the response; prompts are a token long here
    gather_s: float = 0.0  # copying the weights to the staging area


@dataclass(frozen=True)
class TrainedTokens:
    """What one step trained on, as the backend saw it."""

    step: int
    groups: int
    sampled: int  # tokens in all responses
    trained: int  # tokens with loss mask 1
    max_lag: int  # of a token with loss mask 1; -1 where there is none


@dataclass
class ModelledBackend(TrainingBackend):
    """Its only weight is the number of steps."""

    speed: TrainingSpeed
    spend: Spend
    steps: list[TrainedTokens] = field(default_factory=list)
    _parts: list[Minibatch] = field(default_factory=list)

    def forward_logprobs(self, sequences: Sequence[TrainingSequence]) -> list[torch.Tensor]:
        return [torch.zeros(len(sequence)) for sequence in sequences]

    def update(self, minibatch: Minibatch) -> dict[str, float]:
        self.accumulate(minibatch)
        return self.finish(minibatch.step)

    def accumulate(self, part: Minibatch) -> None:
        """Adds the gradient of some of a step's groups."""
        self._parts.append(part)
        self.spend(self.speed.per_token_s * sum(_response_tokens(sequence) for sequence in part.sequences))

    def finish(self, step: int) -> dict[str, float]:
        """The optimizer step over all parts."""
        self.spend(self.speed.per_step_s)
        parts, self._parts = self._parts, []
        self.steps.append(_seen(step, parts))
        return {"loss/policy": 0.0, "policy/tokens": float(self.steps[-1].trained)}

    def discard(self) -> None:
        """Forgets the parts of a step that will not be finished."""
        self._parts = []

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield "steps", torch.tensor([float(len(self.steps))])

    def snapshot(self) -> dict[str, object]:
        return {"steps": len(self.steps)}

    def save(self, snapshot: dict[str, object], folder: Path) -> None:
        (folder / "steps.json").write_text(json.dumps(snapshot), encoding="utf-8")

    def load(self, folder: Path) -> None:
        return None

    def export_hf(self, folder: Path) -> None:
        return None


def _response_tokens(sequence: TrainingSequence) -> int:
    return int((sequence.versions >= 0).sum())


def _seen(step: int, parts: Sequence[Minibatch]) -> TrainedTokens:
    sequences = [sequence for part in parts for sequence in part.sequences]
    versions = torch.cat([sequence.versions for sequence in sequences])
    masks = torch.cat([sequence.loss_mask for sequence in sequences])
    trained = versions[masks]
    return TrainedTokens(
        step=step,
        groups=sum(part.num_groups for part in parts),
        sampled=int((versions >= 0).sum()),
        trained=int(masks.sum()),
        max_lag=step - 1 - int(trained.min()) if len(trained) else -1,
    )


class ModelledTransport(WeightTransport):
    """Gathering takes time; nothing is copied."""

    name = TRANSPORT

    def __init__(self, gather_s: float, spend: Spend) -> None:
        self._gather_s = gather_s
        self._spend = spend

    def gather(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> WeightUpdate:
        self._spend(self._gather_s)
        return WeightUpdate(version, TRANSPORT, "", 0, ())

    def close(self) -> None:
        return None
