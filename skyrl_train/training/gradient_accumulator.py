"""One optimizer step from many micro-batches on one rank: the common part of the workers of policy and critic.

part ──_part──> micro-batches ──_loss──> loss ──backward──┐  (gradients add up, part by part)
                                                          ▼
metrics <──_step_metrics── statistics of all tokens ── scale, clip, AdamW: one optimizer step a pass

Each rank gets some of a part's sequences. All ranks make the same number of forward and backward passes, because a model whose
parameters are sharded over all ranks runs on all of them or not at all; a rank with less work makes empty passes.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, TypeVar

import torch
from transformers import PreTrainedModel

from skyrl_train.algorithms.tokens import TokenStatistics
from skyrl_train.config.schema import TrainerConfig
from skyrl_train.errors import ConfigError
from skyrl_train.training.backend import Minibatch, TrainingSequence
from skyrl_train.training.batch import MicroBatch, RowLayout
from skyrl_train.training.collectives import Collectives
from skyrl_train.training.optimizer import PolicyOptimizer
from skyrl_train.training.schedules import learning_rate
from skyrl_train.training.state import Snapshots


@dataclass(frozen=True, slots=True)
class LossInputs:
    """A micro-batch; the classes of policy and critic add the inputs of their loss."""

    micro_batch: MicroBatch


M = TypeVar("M", bound=LossInputs)


@dataclass(frozen=True, slots=True)
class OpenStep:
    """The accumulated part of a step; its gradients are in the optimizer."""

    step: int
    statistics: TokenStatistics = field(default_factory=TokenStatistics)
    denominators: list[float] = field(default_factory=list)
    # Of this rank's micro-batches: rows and tokens; inputs, and room for inputs.
    shapes: list[torch.Size] = field(default_factory=list)
    inputs: list[tuple[int, int]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class StepPart(Generic[M]):
    """Some groups of a step, ready to be trained."""

    step: int
    micro_batches: list[M]  # of this rank's sequences that have trained tokens
    denominators: list[float]  # of all its sequences


class GradientAccumulator(ABC, Generic[M]):
    """A model, its optimizer, and at most one step that has begun.

    The model is in evaluation mode: with dropout, log-probs and values computed before a step would differ from the step's.

    Args:
        model: on its device; its gradients are sums over all ranks once they have added up.
        trainer_config: with the settings of this model in ``policy``.
        total_steps: optimizer minibatches of the whole run, over which the learning rate decays.
        snapshots: of the model and its optimizer: neither moves while one is being copied.
        section: the section of the configuration with the model's settings, for messages.

    Raises:
        ConfigError: the scheduler is unknown, or a pattern of ``lr_multipliers`` matches nothing.
    """

    role: ClassVar[str]  # prefix of the metrics: policy, critic
    loss_metric: ClassVar[str]  # a step whose value is not finite is skipped
    needs_whole_minibatch = False  # the loss looks at all groups of a step before its first backward pass
    _layout: RowLayout  # set by the subclass

    def __init__(
        self,
        model: PreTrainedModel,
        trainer_config: TrainerConfig,
        total_steps: int,
        collectives: Collectives,
        snapshots: Snapshots[Any],
        section: str,
    ) -> None:
        self.model: PreTrainedModel = model
        model.eval()
        self._config = trainer_config
        self._total_steps = total_steps
        self._collectives = collectives
        self._snapshots = snapshots
        self._vocab_size = int(model.config.get_text_config().vocab_size)
        self.optimizer = PolicyOptimizer(model, trainer_config.policy.optimizer_config, section)
        self._open: OpenStep | None = None
        # What the loss raised in this pass. The pass goes on with a loss of 0, because the other ranks of a sharded model run it.
        self._loss_error: Exception | None = None

    @property
    def has_open_step(self) -> bool:
        """Whether a step has begun part by part, and has neither been finished nor discarded."""
        return self._open is not None

    def update(self, minibatch: Minibatch) -> dict[str, float]:
        """See :meth:`Training.update`; makes ``update_epochs_per_batch`` optimizer steps at the step's learning rate.

        A pass whose loss or gradient is not finite, or that has no trained token, moves nothing; the former is counted
        in ``<role>/skipped_nonfinite``. Metrics of several passes are averaged, this count is summed.

        Raises:
            ConfigError: a sequence does not fit ``micro_batch_tokens``, the schedule gives no learning rate, or in the first pass
                the loss raised or the device has too little memory. Nothing has moved.
            GeneratorOutputError: a sequence breaks the contract of :class:`TrainingSequence`, or does not follow its grammar.
            RuntimeError: the loss raised in a later pass.
            ValueError: parts of a step were accumulated and neither finished nor discarded.
        """

        def prepare() -> StepPart[M]:
            if self._open is not None:
                raise ValueError(
                    f"step {self._open.step} has begun part by part; finish or discard it before an update"
                )
            return self._part(minibatch)

        # Everything that can be rejected is rejected before the first pass, on all ranks or on none.
        with self._enough_memory():
            part = self._with_minibatch_inputs(self._collectives.all_succeed(prepare))
            self._add(part)
        outcomes = [self.finish(minibatch.step)]
        passes = self._config.update_epochs_per_batch
        for _ in range(passes - 1):
            self._add(part, has_moved=True)
            outcomes.append(self.finish(minibatch.step))
        metrics = {key: sum(outcome[key] for outcome in outcomes) / passes for key in outcomes[0]}
        # Equal in all passes: not averaged, which would round.
        constant = (f"{self.role}/lr", f"{self.role}/tokens")
        metrics |= {key: value for key, value in outcomes[0].items() if key.startswith(constant)}
        metrics[f"{self.role}/skipped_nonfinite"] *= passes
        return metrics

    def accumulate(self, part: Minibatch) -> None:
        """See :meth:`Training.accumulate`.

        A part that is rejected leaves the accumulated state as it was. A part that fails half-way (out of memory, say) is partly
        in the gradients: everything accumulated is discarded then.

        Raises:
            ConfigError: ``update_epochs_per_batch`` is more than 1, the loss needs whole minibatches, a sequence does not fit
                ``micro_batch_tokens``, the loss raised, or the device has too little memory.
            GeneratorOutputError: a sequence breaks the contract of :class:`TrainingSequence`, or does not follow its grammar.
            ValueError: the part is of another step than the ones before it.
        """

        def prepare() -> StepPart[M]:
            if self._config.update_epochs_per_batch > 1:
                raise ConfigError(
                    f"trainer.update_epochs_per_batch={self._config.update_epochs_per_batch} needs whole minibatches: later "
                    "passes train on all groups again. Set it to 1, or trainer.fully_async.streaming_min_groups=null."
                )
            if self._open is not None and self._open.step != part.step:
                raise ValueError(
                    f"step {self._open.step} is neither finished nor discarded, and step {part.step} begins"
                )
            if self.needs_whole_minibatch:
                raise ConfigError(
                    "The configured loss or correction looks at whole minibatches before it trains. Set "
                    "trainer.fully_async.streaming_min_groups=null."
                )
            return self._part(part)

        with self._enough_memory():
            self._add(self._collectives.all_succeed(prepare))

    def finish(self, step: int) -> dict[str, float]:
        """See :meth:`Training.finish`; :meth:`update` says when nothing moves."""

        def accumulated() -> tuple[OpenStep, float]:
            if self._open is None or self._open.step != step:
                raise ValueError(f"step {step} has nothing accumulated, so it cannot be finished")
            return self._open, self._learning_rate(step)

        opened, rate = self._collectives.all_succeed(accumulated)
        try:
            statistics, denominators = self._collectives.all_reduce_statistics(opened.statistics, opened.denominators)
            metrics, scale = self._step_metrics(statistics, denominators)
            grad_norm = 0.0  # of a step without trained tokens, on all ranks: it moves nothing
            if statistics.tokens:
                self._snapshots.copied()  # a snapshot under way reads the weights and moments
                # A loss that is not finite may have finite gradients, so it is checked as well.
                grad_norm = self.optimizer.step(rate, scale) if math.isfinite(metrics[self.loss_metric]) else math.nan
        finally:
            # Also after an error: the gradients may be scaled by then, so the step cannot be finished a second time.
            self.discard()
        metrics[f"{self.role}/grad_norm"] = grad_norm
        metrics[f"{self.role}/skipped_nonfinite"] = float(not math.isfinite(grad_norm))
        metrics[f"{self.role}/lr"] = rate
        metrics[f"{self.role}/micro_batches"] = float(len(opened.shapes))
        metrics[f"{self.role}/distinct_shapes"] = float(len(set(opened.shapes)))
        if opened.inputs:
            inputs, room = (sum(counts) for counts in zip(*opened.inputs, strict=True))
            metrics[f"{self.role}/micro_batch_fill"] = inputs / room
        return metrics

    def _learning_rate(self, step: int) -> float:
        optimizer_config = self._config.policy.optimizer_config
        return learning_rate(
            step,
            peak=optimizer_config.lr,
            schedule=optimizer_config.scheduler,
            num_warmup_steps=optimizer_config.num_warmup_steps,
            total_steps=self._total_steps,
        )

    def discard(self) -> None:
        """See :meth:`Training.discard`."""
        self._open = self._loss_error = None
        self.optimizer.adamw.zero_grad(set_to_none=True)  # frees the memory of the gradients

    @contextmanager
    def _enough_memory(self) -> Iterator[None]:
        """Name the setting if the device has too little memory for the passes inside, before any weight moves."""
        try:
            yield
        except torch.OutOfMemoryError as error:
            raise ConfigError(
                f"trainer.micro_batch_tokens={self._config.micro_batch_tokens}: a pass over a micro-batch needs more memory than "
                f"the device has ({error}). Lower it, and give the same command to continue."
            ) from error

    def _add(self, part: StepPart[M], *, has_moved: bool = False) -> None:
        """Add the part's gradients to the gradients of its step; discard everything accumulated if that fails half-way.

        Args:
            has_moved: an earlier pass of the step has moved the weights.

        Raises:
            ConfigError: nothing has moved, and the loss raised on some rank.
            RuntimeError: the weights have moved, and the loss raised on some rank.
        """
        opened = self._open = self._open or OpenStep(part.step)

        def check_loss() -> None:
            error, self._loss_error = self._loss_error, None
            if error is not None:
                # Errors of this library and the standard one: every rank can read them.
                raised = f"The loss of step {part.step} raised {error!r}"
                if has_moved:
                    raise RuntimeError(
                        f"{raised} in a later pass, after the first one had moved the weights"
                    ) from error
                raise ConfigError(f"{raised}. Mend it, and give the same command to continue.") from error

        try:
            # Asked before the first pass: between passes, ranks exchange nothing else.
            missing = self._collectives.all_reduce_max(len(part.micro_batches)) - len(part.micro_batches)
            for micro_batch in part.micro_batches:
                of_tokens, statistics = self._loss(micro_batch)
                of_tokens.backward()
                opened.statistics.add(statistics)
                batch = micro_batch.micro_batch
                opened.shapes.append(batch.input_ids.shape)
                opened.inputs.append((batch.inputs, self._layout.room(batch)))
            for _ in range(missing):
                # Gradients of 0: the pass only takes part in the collectives of a sharded model.
                (self._scores(self._smallest_micro_batch()).sum() * 0.0).backward()
            self._collectives.all_succeed(check_loss)
        except BaseException:
            self.discard()
            raise
        opened.denominators.extend(part.denominators)

    @torch.no_grad()  # not inference_mode: weights that a sharded model gathers here are kept for training
    def _score_every_token(self, sequences: Sequence[TrainingSequence]) -> list[torch.Tensor]:
        """Return one float32 tensor ``[T]`` on the CPU per sequence: the scores of all tokens, 0 for the first."""

        def prepare() -> list[MicroBatch]:
            self._check(sequences)
            everything = [torch.ones(len(sequence), dtype=torch.bool) for sequence in sequences]
            # A sequence of one token has nothing to score, and would be an empty row.
            scorable = [index for index, sequence in enumerate(sequences) if len(sequence) > 1]
            return self._layout.micro_batches(sequences, scorable, everything)

        results = [torch.zeros(len(sequence)) for sequence in sequences]
        micro_batches = self._collectives.all_succeed(prepare)
        missing = self._collectives.all_reduce_max(len(micro_batches)) - len(micro_batches)
        # Copied to the CPU only when all passes are queued: a GPU would stand still while the next one is prepared.
        computed = [self._scores(micro_batch).float() for micro_batch in micro_batches]
        for micro_batch, scores in zip(micro_batches, computed, strict=True):
            counts = [len(sequences[index]) - 1 for index in micro_batch.indices]
            for index, of_sequence in zip(micro_batch.indices, scores.cpu().split(counts), strict=True):
                results[index][1:] = of_sequence
        for _ in range(missing):
            self._scores(self._smallest_micro_batch())
        return results

    def _smallest_micro_batch(self) -> MicroBatch:
        """Return a micro-batch of one token that is scored from one other, for empty passes beside other ranks' passes."""
        nothing = torch.zeros(2)
        ids = torch.zeros(2, dtype=torch.int64)
        pair = TrainingSequence(ids, nothing > 0, nothing, nothing, ids - 1, 0)
        (micro_batch,) = self._layout.micro_batches([pair], [0], [torch.ones(2, dtype=torch.bool)])
        return micro_batch

    def _with_minibatch_inputs(self, part: StepPart[M]) -> StepPart[M]:
        """Add inputs of the loss that need the whole minibatch, before its first pass."""
        return part

    @abstractmethod
    def _check(self, sequences: Sequence[TrainingSequence]) -> None:
        """Raise GeneratorOutputError for sequences that cannot be scored."""

    @abstractmethod
    def _part(self, minibatch: Minibatch) -> StepPart[M]:
        """Check the sequences and lay out the ones with trained tokens; the others count in the denominators only."""

    @abstractmethod
    def _loss(self, micro_batch: M) -> tuple[torch.Tensor, TokenStatistics]:
        """Return the unscaled loss of a micro-batch (a scalar) and the statistics of its tokens."""

    @abstractmethod
    def _scores(self, micro_batch: MicroBatch) -> torch.Tensor:
        """Return the log-prob or the value ``[N]`` of each scored token, by one forward pass."""

    @abstractmethod
    def _step_metrics(
        self, statistics: TokenStatistics, denominators: Sequence[float]
    ) -> tuple[dict[str, float], float]:
        """Return the metrics of a step over all ranks, with ``loss_metric`` among them, and the scale of its gradients."""
