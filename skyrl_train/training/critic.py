"""What one rank does to train the critic, beside and like :class:`skyrl_train.training.rank_trainer.RankTrainer`.

part ──rows──> micro-batches ──forward──> values ──value loss──> backward ──┐  (gradients add up, part by part)
                                                                            ▼
metrics <──statistics of all tokens───────────────────── scale, clip, AdamW: one optimizer step a pass
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from skyrl_train.algorithms.statistics import TokenStatistics
from skyrl_train.algorithms.values import value_loss, value_metrics, value_statistics
from skyrl_train.config.schema.trainer import TrainerConfig
from skyrl_train.errors import ConfigError, GeneratorOutputError
from skyrl_train.training.backend import Minibatch, TrainingSequence
from skyrl_train.training.batch import MicroBatch, flat_tokens
from skyrl_train.training.layout import RowLayout
from skyrl_train.training.logprobs import compute_device, share_weights_again
from skyrl_train.training.rank_steps import Part, RankSteps, smallest
from skyrl_train.training.ranks import Ranks
from skyrl_train.training.snapshots import Snapshots
from skyrl_train.training.value_model import can_pack, token_values


@dataclass(frozen=True, slots=True)
class _Trainable:
    """A micro-batch and what is known about its N tokens; tensors are ``[N]``."""

    micro_batch: MicroBatch
    old_values: torch.Tensor
    returns: torch.Tensor


class CriticTrainer(RankSteps):
    """A value model and its optimizer.

    The loss is the clipped squared error of each trained token (:func:`skyrl_train.algorithms.values.value_loss`), averaged
    over the tokens of the step; masked tokens leave the numerator and stay in the denominator, as in the policy's loss
    (SEMANTICS 7.3).
    """

    def __init__(
        self,
        model: PreTrainedModel,
        trainer_config: TrainerConfig,
        total_steps: int,
        ranks: Ranks,
        snapshots: Snapshots[Any],
    ) -> None:
        """
        Args:
            model: on its device, with a value head; its gradients are sums over all ranks once they have added up.
            trainer_config: of :func:`skyrl_train.config.derive.critic_trainer`.
            total_steps: optimizer minibatches of the whole run, which the learning-rate decay spans.
            snapshots: of the model and its optimizer: neither moves while one is being copied.

        Raises:
            ConfigError: an impossible number in ``trainer_config``, or ``packing`` is True, or ranks share sequences, and the
                model does not allow it.
            ModelError: the model has no body apart from its head.
        """
        super().__init__(model, trainer_config, total_steps, ranks, snapshots, whose="trainer.critic")
        sequence_ranks = ranks.sequence_ranks
        packed = trainer_config.packing is not False and can_pack(model, sequence_ranks)
        if not packed and (trainer_config.packing or sequence_ranks is not None):
            asked, remedy = "trainer.packing=true", "trainer.packing=null"
            if sequence_ranks is not None:
                asked = f"{sequence_ranks.setting}={sequence_ranks.size} needs packed rows"
                remedy = f"{sequence_ranks.setting}=1"
            raise ConfigError(
                f"{asked}: {type(model).__name__}, the critic's model, computes other values for packed sequences than for "
                f"single ones. Set {remedy}."
            )
        self._layout = RowLayout.of(model, packed=packed, micro_batch_tokens=trainer_config.micro_batch_tokens)

    def forward_values(self, sequences: Sequence[TrainingSequence]) -> list[torch.Tensor]:
        """See :meth:`CriticBackend.forward_values`."""
        with torch.no_grad():  # not inference_mode: weights that a sharded model gathers here are kept for training
            values = self._of_every_token(sequences, self._layout, self._check_tokens, self._values)
        share_weights_again(self.model)
        return values

    def update(self, minibatch: Minibatch) -> dict[str, float]:
        """See :meth:`Training.update`; ``update_epochs_per_batch`` optimizer steps at the step's learning rate.

        A pass whose loss or gradient is not finite, or that has no trained token, moves nothing; the former is counted
        in ``critic/skipped_nonfinite``. Metrics of several passes are averaged, that count is summed.

        Raises:
            ConfigError: a sequence does not fit ``micro_batch_tokens``.
            GeneratorOutputError: a sequence has no values and returns, or breaks the contract of TrainingSequence.
            ValueError: parts of a step were accumulated and neither finished nor discarded.
        """
        part = self._ranks.together(lambda: self._whole(minibatch))
        outcomes = []
        for _ in range(self._config.update_epochs_per_batch):
            self._add(part, self._loss, self._idle)
            outcomes.append(self.finish(minibatch.step))
        metrics = {key: sum(outcome[key] for outcome in outcomes) / len(outcomes) for key in outcomes[0]}
        metrics["critic/skipped_nonfinite"] *= len(outcomes)
        return metrics | {"critic/lr": outcomes[0]["critic/lr"]}

    def accumulate(self, part: Minibatch) -> None:
        """See :meth:`Training.accumulate`; errors as of :meth:`update`. One that fails on its way forgets everything
        accumulated."""
        self._add(self._ranks.together(lambda: self._further(part)), self._loss, self._idle)

    def finish(self, step: int) -> dict[str, float]:
        """See :meth:`Training.finish`; what moves nothing is described at :meth:`update`."""
        opened = self._ranks.together(lambda: self._opened(step))
        rate = self._learning_rate(step)
        try:
            statistics, denominators = self._ranks.combine(opened.statistics, opened.denominators)
            scale = 1.0 / max(math.fsum(denominators), 1.0)
            metrics = value_metrics(statistics, scale)
            grad_norm, skipped = self._move(rate, scale, metrics["loss/value"], statistics.tokens)
        finally:
            self.discard()
        of_update = {
            "critic/grad_norm": grad_norm,
            "critic/skipped_nonfinite": float(skipped),
            "critic/lr": rate,
        }
        return metrics | of_update

    def _loss(self, trainable: _Trainable) -> tuple[torch.Tensor, TokenStatistics]:
        values = self._values(trainable.micro_batch)
        clip = self._config.algorithm.value_clip
        losses, clipped = value_loss(values, trainable.old_values, trainable.returns, clip)
        return losses.sum(), value_statistics(losses, clipped, trainable.old_values, trainable.returns)

    def _idle(self) -> torch.Tensor:
        return self._values(smallest(self._layout))

    def _values(self, micro_batch: MicroBatch) -> torch.Tensor:
        return token_values(self.model, micro_batch, self._ranks.sequence_ranks)

    # ---- batches

    def _whole(self, minibatch: Minibatch) -> Part[_Trainable]:
        self._check_whole()
        return self._part(minibatch)

    def _further(self, part: Minibatch) -> Part[_Trainable]:
        self._check_further(part.step)
        return self._part(part)

    def _part(self, minibatch: Minibatch) -> Part[_Trainable]:
        """Checks the sequences and lays out those that have trained tokens; the others count in the denominator only."""
        self._check_tokens(minibatch.sequences)
        trained = [s for s in minibatch.sequences if bool(s.loss_mask.any())]
        values = [s.values for s in trained if s.values is not None and s.values.shape == s.token_ids.shape]
        returns = [s.returns for s in trained if s.returns is not None and s.returns.shape == s.token_ids.shape]
        if len(values) < len(trained) or len(returns) < len(trained):
            raise GeneratorOutputError(
                f"of {len(trained)} training sequences {len(values)} have a value and {len(returns)} a return for each token, "
                "which the critic learns from: the stage that adds values did not see their groups."
            )
        masks, device = [s.loss_mask for s in trained], compute_device(self.model)
        micro_batches = [
            _Trainable(
                micro_batch, flat_tokens(values, micro_batch).to(device), flat_tokens(returns, micro_batch).to(device)
            )
            for micro_batch in self._layout.micro_batches(trained, range(len(trained)), masks)
        ]
        return Part(minibatch.step, micro_batches, [float(s.tokens_in_denominator) for s in minibatch.sequences])

    def _check_tokens(self, sequences: Sequence[TrainingSequence]) -> None:
        for index, s in enumerate(sequences):
            where = f"training sequence {index} (group {s.group_index})"
            if len(s) == 0 or s.loss_mask.shape != s.token_ids.shape:
                raise GeneratorOutputError(f"{where} is empty or ragged: every field needs one entry per token.")
            if bool(s.loss_mask[0]):
                raise GeneratorOutputError(
                    f"{where} trains its first token, which nothing precedes; prompts need a token."
                )
        largest = max((int(s.token_ids.max()) for s in sequences), default=0)
        if largest >= self._vocab_size:
            raise GeneratorOutputError(
                f"token id {largest} is outside the critic's vocabulary of {self._vocab_size}. Point "
                "trainer.critic.model.path at a model of the policy's vocabulary."
            )
