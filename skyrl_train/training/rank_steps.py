"""Steps that grow part by part on one rank: what the trainers of policy and critic share."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch
from transformers import PreTrainedModel

from skyrl_train.algorithms.statistics import TokenStatistics
from skyrl_train.config.schema.trainer import TrainerConfig
from skyrl_train.errors import ConfigError
from skyrl_train.training.backend import TrainingSequence
from skyrl_train.training.batch import MicroBatch
from skyrl_train.training.layout import RowLayout
from skyrl_train.training.optimizer import PolicyOptimizer
from skyrl_train.training.ranks import Ranks
from skyrl_train.training.schedule import learning_rate
from skyrl_train.training.snapshots import Snapshots

M = TypeVar("M")  # a micro-batch, and what is known about its tokens


@dataclass(frozen=True, slots=True)
class OpenStep:
    """What was accumulated of a step; its gradients are in the optimizer."""

    step: int
    statistics: TokenStatistics = field(default_factory=TokenStatistics)
    denominators: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Part(Generic[M]):
    """Some groups of a step, ready to be trained."""

    step: int
    micro_batches: list[M]  # of this rank's sequences that have trained tokens
    denominators: list[float]  # of all its sequences


class RankSteps:
    """A model, its optimizer, and at most one step that has begun. The model is in evaluation mode: dropout would make what
    is computed before a step differ from what the step computes.

    Args:
        model: on its device; its gradients are sums over all ranks once they have added up.
        trainer_config: with the settings of this model in ``policy``.
        total_steps: optimizer minibatches of the whole run, which the learning-rate decay spans.
        snapshots: of the model and its optimizer: neither moves while one is being copied.
        whose: the section of the configuration with the model's settings, for messages.

    Raises:
        ConfigError: an impossible number in ``trainer_config``.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        trainer_config: TrainerConfig,
        total_steps: int,
        ranks: Ranks,
        snapshots: Snapshots[Any],
        whose: str = "trainer.policy",
    ) -> None:
        self.model: PreTrainedModel = model
        model.eval()
        self._config = trainer_config
        self._total_steps = total_steps
        self._ranks = ranks
        self._snapshots = snapshots
        self._vocab_size = int(model.config.get_text_config().vocab_size)
        self.optimizer = PolicyOptimizer(model, trainer_config.policy.optimizer_config, whose)
        self._open: OpenStep | None = None

    def discard(self) -> None:
        """See :meth:`Training.discard`."""
        self._open = None
        self.optimizer.zero_grad()

    def _learning_rate(self, step: int) -> float:
        optimizer = self._config.policy.optimizer_config
        return learning_rate(
            step,
            peak=optimizer.lr,
            schedule=optimizer.scheduler,
            num_warmup_steps=optimizer.num_warmup_steps,
            total_steps=self._total_steps,
        )

    def _move(self, rate: float, scale: float, loss: float, tokens: int) -> tuple[float, bool]:
        """The optimizer step with the gradients that have added up, if there are any and all is finite; the norm of the
        gradients, and whether something that was not finite has kept it from moving."""
        if not tokens:
            return 0.0, False
        self._snapshots.copied()
        outcome = self.optimizer.step(rate, scale) if math.isfinite(loss) else None
        return (math.nan, True) if outcome is None else (outcome.grad_norm, not outcome.applied)

    def _of_every_token(
        self,
        sequences: Sequence[TrainingSequence],
        layout: RowLayout,
        check: Callable[[Sequence[TrainingSequence]], None],
        score: Callable[[MicroBatch], torch.Tensor],
    ) -> list[torch.Tensor]:
        """What ``score`` says of each token that something precedes: float32 ``[T]`` on the CPU per sequence, the first 0.

        Args:
            check: raises if the sequences cannot be scored.
            score: the numbers of a micro-batch, one for each of its tokens.
        """

        def laid_out() -> list[MicroBatch]:
            check(sequences)
            return layout.every_token(sequences)

        results = [torch.zeros(len(sequence)) for sequence in sequences]
        micro_batches = self._ranks.together(laid_out)
        lacking = self._lacking(len(micro_batches))
        for micro_batch in micro_batches:
            scores = score(micro_batch).float().cpu()
            counts = [len(sequences[index]) - 1 for index in micro_batch.indices]
            for index, of_sequence in zip(micro_batch.indices, scores.split(counts), strict=True):
                results[index][1:] = of_sequence
        for _ in range(lacking):
            score(smallest(layout))
        return results

    def _add(
        self, part: Part[M], loss: Callable[[M], tuple[torch.Tensor, TokenStatistics]], idle: Callable[[], torch.Tensor]
    ) -> None:
        """Adds the part's gradients to those of its step; where that fails on its way, everything accumulated is forgotten.

        Args:
            loss: of a micro-batch, with what is counted of its tokens.
            idle: what the model says of the smallest micro-batch, for passes on nothing beside the other ranks' passes.
        """
        opened = self._open = self._open or OpenStep(part.step)
        try:
            lacking = self._lacking(len(part.micro_batches))
            for micro_batch in part.micro_batches:
                of_tokens, statistics = loss(micro_batch)
                of_tokens.backward()
                opened.statistics.add(statistics)
            for _ in range(lacking):
                (idle().sum() * 0.0).backward()
        except BaseException:
            self.discard()
            raise
        opened.denominators.extend(part.denominators)

    def _lacking(self, passes: int) -> int:
        """How many more passes another rank makes. Asked before the first one: between passes, ranks exchange nothing else."""
        return self._ranks.largest(passes) - passes

    def _check_whole(self) -> None:
        """Raises if a step has begun part by part."""
        if self._open is not None:
            raise ValueError(f"step {self._open.step} has begun part by part; finish or discard it before an update")

    def _check_further(self, step: int) -> None:
        """Raises unless a part of ``step`` may come now."""
        if self._config.update_epochs_per_batch > 1:
            raise ConfigError(
                f"trainer.update_epochs_per_batch={self._config.update_epochs_per_batch} needs whole minibatches: later "
                "passes train on all groups again. Set it to 1, or trainer.fully_async.streaming_min_groups=null."
            )
        if self._open is not None and self._open.step != step:
            raise ValueError(f"step {self._open.step} is neither finished nor discarded, and step {step} begins")

    def _opened(self, step: int) -> OpenStep:
        if self._open is None or self._open.step != step:
            raise ValueError(f"step {step} has nothing accumulated, so it cannot be finished")
        return self._open


def smallest(layout: RowLayout) -> MicroBatch:
    """A micro-batch of one token that is scored from one other, for passes on nothing beside other ranks' passes."""
    unknown = torch.zeros(2)
    ids = torch.zeros(2, dtype=torch.int64)
    pair = TrainingSequence(ids, unknown > 0, unknown, unknown, ids - 1, 0)
    return next(layout.micro_batches([pair], [0], [torch.ones(2, dtype=torch.bool)]))
