"""Modelled training and weight sync: a backend whose work takes virtual time and which records its inputs."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from skyrl_train.algorithms.advantages import GroupRewards, register_advantage_estimator
from skyrl_train.config.schema import AlgorithmConfig
from skyrl_train.simulation.engine import TRANSPORT
from skyrl_train.training.backend import Minibatch, TrainingBackend, TrainingSequence
from skyrl_train.weight_sync.update import WeightTransport, WeightUpdate

Spend = Callable[[float], None]
ESTIMATOR = "modelled"


@register_advantage_estimator(ESTIMATOR)
def _own_return(group: GroupRewards, config: AlgorithmConfig) -> list[torch.Tensor]:
    """Return the return itself as advantage, so that a group may be a single sample."""
    return group.on_trained_tokens(group.returns)


@dataclass(frozen=True)
class TrainingSpeed:
    """Durations of a step, in virtual seconds. The time of a sequence counts all its tokens, masked ones too."""

    per_step_s: float = 0.0
    per_token_s: float = 0.0  # of the response; prompts are a token long here
    gather_s: float = 0.0  # copying the weights to the staging area


@dataclass(frozen=True)
class TrainedTokens:
    """The tokens of one step, as the backend received them."""

    step: int
    groups: int
    sampled: int  # tokens in all responses
    trained: int  # tokens with loss mask 1
    max_lag: int  # of a token with loss mask 1; -1 where there is none


@dataclass
class ModelledBackend(TrainingBackend):
    """A backend without a model; its only weight is the number of steps."""

    speed: TrainingSpeed
    spend: Spend
    steps: list[TrainedTokens] = field(default_factory=list)
    step: TrainedTokens | None = None  # the accumulated parts

    def forward_logprobs(self, sequences: Sequence[TrainingSequence]) -> list[torch.Tensor]:
        return [torch.zeros(len(sequence)) for sequence in sequences]

    def update(self, minibatch: Minibatch) -> dict[str, float]:
        self.accumulate(minibatch)
        return self.finish(minibatch.step)

    def accumulate(self, part: Minibatch) -> None:
        """Count the tokens of some of a step's groups."""
        versions = torch.cat([sequence.versions for sequence in part.sequences])
        trained = versions[torch.cat([sequence.loss_mask for sequence in part.sequences])]
        sampled = int((versions >= 0).sum())
        max_lag = part.step - 1 - int(trained.min()) if len(trained) else -1
        before = self.step or TrainedTokens(part.step, groups=0, sampled=0, trained=0, max_lag=-1)
        self.step = TrainedTokens(
            step=part.step,
            groups=before.groups + part.num_groups,
            sampled=before.sampled + sampled,
            trained=before.trained + len(trained),
            max_lag=max(before.max_lag, max_lag),
        )
        self.spend(self.speed.per_token_s * sampled)

    def finish(self, step: int) -> dict[str, float]:
        """Record the step over all parts."""
        self.spend(self.speed.per_step_s)
        assert self.step is not None and self.step.step == step, "a step ends with what it has accumulated"
        self.steps.append(self.step)
        self.step = None
        return {"loss/policy": 0.0, "policy/tokens": float(self.steps[-1].trained)}

    def discard(self) -> None:
        """Discard the parts of a step that will not be finished."""
        self.step = None

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield "steps", torch.tensor([float(len(self.steps))])

    def snapshot(self) -> dict[str, object]:
        return {"steps": len(self.steps)}

    def save(self, snapshot: dict[str, object], folder: Path) -> dict[str, str]:
        (folder / "steps.json").write_text(json.dumps(snapshot), encoding="utf-8")
        return {}

    def load(self, folder: Path) -> None:
        return None

    def export_hf(self, folder: Path) -> None:
        return None

    def offload_states(self) -> None:
        return None

    def reload_states(self) -> None:
        return None


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
