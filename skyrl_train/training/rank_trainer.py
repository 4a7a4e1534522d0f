"""What one rank does to train the policy: everything but where the weights lie and how they are saved.

part ──pack──> micro-batches ──forward──> log-probs ──objective──> loss ──backward──┐  (gradients add up, part by part)
                                                                                    ▼
metrics <──statistics of all tokens──────────────────────────── scale, clip, AdamW: one optimizer step a pass

A rank that trains alone is the local backend. Of several, each is given some of a part's sequences; all make the same
number of forward and backward passes, because a model whose parameters lie on all of them runs on all of them or not at
all, and a rank with less to do makes empty ones. Ranks that share sequences (sequence parallelism) are given the same ones
and compute the same loss, each from its slice of the tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import PreTrainedModel

from skyrl_train.algorithms.minibatch import MinibatchTokens
from skyrl_train.algorithms.reductions import reduction_scale
from skyrl_train.algorithms.statistics import TokenStatistics
from skyrl_train.config.schema.trainer import TrainerConfig
from skyrl_train.errors import ConfigError, GeneratorOutputError
from skyrl_train.models.folder import resolve_dtype
from skyrl_train.training.backend import Minibatch, TrainingSequence
from skyrl_train.training.batch import MicroBatch, flat_tokens
from skyrl_train.training.logprobs import compute_device
from skyrl_train.training.objective import Objective, TokenFields
from skyrl_train.training.rank_steps import Part, RankSteps, smallest
from skyrl_train.training.ranks import Ranks
from skyrl_train.training.scorer import Scorer
from skyrl_train.training.snapshots import Snapshots


@dataclass(frozen=True, slots=True)
class _Scorable:
    """A micro-batch and what is known about its tokens."""

    micro_batch: MicroBatch
    fields: TokenFields


class RankTrainer(RankSteps):
    """A HF causal LM and its optimizer.

    Log-probs are those of the sampling temperature (logits / temperature; greedy counts as 1), because the behaviour
    log-probs are. Top-p, top-k and min-p are not reproduced: with them the behaviour log-probs are larger by the mass
    cut off, which the off-policy metrics show.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        model_path: str,
        trainer_config: TrainerConfig,
        total_steps: int,
        temperature: float,
        ranks: Ranks,
        snapshots: Snapshots[Any],
    ) -> None:
        """
        Args:
            model: on its device; its gradients are sums over all ranks once they have added up.
            model_path: where it came from, for messages.
            total_steps: optimizer minibatches of the whole run, which the learning-rate decay spans.
            temperature: of the sampled responses.
            snapshots: of the model and its optimizer: neither moves while one is being copied.

        Raises:
            ConfigError: an unknown name or an impossible number in ``trainer_config``.
        """
        if trainer_config.update_epochs_per_batch < 1:
            raise ConfigError(
                f"trainer.update_epochs_per_batch must be at least 1, got {trainer_config.update_epochs_per_batch}."
            )
        if trainer_config.micro_batch_tokens < 1:
            raise ConfigError(
                f"trainer.micro_batch_tokens must be at least 1, got {trainer_config.micro_batch_tokens}."
            )
        super().__init__(model, trainer_config, total_steps, ranks, snapshots)
        self._model_path = model_path
        self._objective = Objective(trainer_config.algorithm)
        self._scorer = Scorer(
            model,
            temperature=temperature,
            micro_batch_tokens=trainer_config.micro_batch_tokens,
            packing=trainer_config.packing,
            fp32_head=trainer_config.policy.fp32_head,
            sequence_ranks=ranks.sequence_ranks,
            dtype=resolve_dtype(trainer_config.policy.dtype),
        )

    # ---- numbers

    def forward_logprobs(self, sequences: Sequence[TrainingSequence]) -> list[torch.Tensor]:
        """See :meth:`TrainingBackend.forward_logprobs`."""
        return self._of_every_token(sequences, self._scorer.layout, self._check_sequences, self._scorer.logprobs)

    def update(self, minibatch: Minibatch) -> dict[str, float]:
        """See :meth:`TrainingBackend.update`; ``update_epochs_per_batch`` optimizer steps at the step's learning rate.

        A pass whose loss or gradient is not finite, or that has no trained token, moves nothing; the former is counted
        in ``policy/skipped_nonfinite``. Metrics of several passes are averaged, that count is summed.

        Raises:
            ConfigError: a sequence does not fit ``micro_batch_tokens``.
            GeneratorOutputError: a sequence breaks the contract of :class:`TrainingSequence`.
            ValueError: parts of a step were accumulated and neither finished nor discarded.
        """
        part = self._ranks.together(lambda: self._whole(minibatch))
        passes = self._config.update_epochs_per_batch
        if passes > 1 or self._objective.needs_minibatch_facts:
            part = self._with_facts(self._with_proximal(part))
        outcomes = []
        for _ in range(passes):
            self._add(part, self._loss, self._idle)
            outcomes.append(self.finish(minibatch.step))
        same_in_all = {k: v for k, v in outcomes[0].items() if k.startswith("policy/lr") or k == "policy/tokens"}
        metrics = {key: sum(outcome[key] for outcome in outcomes) / passes for key in outcomes[0]} | same_in_all
        metrics["policy/skipped_nonfinite"] *= passes
        return metrics

    def accumulate(self, part: Minibatch) -> None:
        """See :meth:`TrainingBackend.accumulate`.

        A part that is refused leaves what was accumulated as it was. One that fails on its way (no memory, say) is half
        in the gradients: everything accumulated is forgotten then.

        Raises:
            ConfigError: ``update_epochs_per_batch`` is more than 1, the loss needs whole minibatches, or a sequence does
                not fit ``micro_batch_tokens``.
            GeneratorOutputError: a sequence breaks the contract of :class:`TrainingSequence`.
            ValueError: the part is of another step than the ones before it.
        """
        self._add(self._ranks.together(lambda: self._further(part)), self._loss, self._idle)

    def finish(self, step: int) -> dict[str, float]:
        """See :meth:`TrainingBackend.finish`; what moves nothing is described at :meth:`update`."""
        opened = self._ranks.together(lambda: self._opened(step))
        rate = self._learning_rate(step)
        try:
            statistics, denominators = self._ranks.combine(opened.statistics, opened.denominators)
            scale = reduction_scale(denominators)
            metrics = self._objective.metrics(statistics, scale)
            grad_norm, skipped = self._move(rate, scale, metrics["loss/policy"], statistics.tokens)
        finally:
            self.discard()
        return metrics | {
            "policy/grad_norm": grad_norm,
            "policy/skipped_nonfinite": float(skipped),
            "policy/lr": rate,
            **{
                f"policy/lr/{pattern}": rate * factor
                for pattern, factor in self._config.policy.optimizer_config.lr_multipliers.items()
            },
            "policy/tokens": float(statistics.tokens),
        }

    def _loss(self, scorable: _Scorable) -> tuple[torch.Tensor, TokenStatistics]:
        logprobs, entropies = self._scorer.logprobs_and_entropies(
            scorable.micro_batch, differentiate_entropy=self._objective.differentiates_entropy
        )
        return self._objective.loss(logprobs, entropies, scorable.fields)

    def _idle(self) -> torch.Tensor:
        layout = self._scorer.layout
        return self._scorer.logprobs_and_entropies(smallest(layout), differentiate_entropy=False)[0]

    # ---- batches

    def _whole(self, minibatch: Minibatch) -> Part[_Scorable]:
        self._check_whole()
        return self._part(minibatch)

    def _further(self, part: Minibatch) -> Part[_Scorable]:
        self._check_further(part.step)
        if self._objective.needs_minibatch_facts:
            raise ConfigError(
                "The configured loss or correction looks at whole minibatches before it trains. Set "
                "trainer.fully_async.streaming_min_groups=null."
            )
        return self._part(part)

    def _part(self, minibatch: Minibatch) -> Part[_Scorable]:
        """Checks the sequences and packs those that have trained tokens; the others count in the denominators only.

        Sequences with and without given proximal log-probs are packed apart, so that a mixture does not matter.
        """
        self._check_sequences(minibatch.sequences)
        trained = [s for s in minibatch.sequences if bool(s.loss_mask.any())]
        if self._objective.needs_reference and (missing := [s for s in trained if s.reference_logprobs is None]):
            raise GeneratorOutputError(
                f"{len(missing)} of {len(trained)} training sequences have no reference log-probs (the first is of group "
                f"{missing[0].group_index}), which trainer.algorithm.kl_loss_coef needs: the stage that adds them did not "
                "see their groups."
            )
        given = [s for s in trained if s.proximal_logprobs is not None]
        derived = [s for s in trained if s.proximal_logprobs is None]
        return Part(
            step=minibatch.step,
            micro_batches=[*self._scorable(given, minibatch), *self._scorable(derived, minibatch)],
            denominators=[self._objective.share(s.counts).denominator for s in minibatch.sequences],
        )

    def _scorable(self, sequences: Sequence[TrainingSequence], of: Minibatch) -> Iterator[_Scorable]:
        """Micro-batches of sequences of ``of`` that have trained tokens, and proximal log-probs either all or none."""
        masks = [s.loss_mask for s in sequences]
        weights = torch.tensor([self._objective.share(s.counts).token_weight for s in sequences])
        proximal = [s.proximal_logprobs for s in sequences if s.proximal_logprobs is not None]
        reference = [s.reference_logprobs for s in sequences if s.reference_logprobs is not None]
        device = compute_device(self.model)
        for micro_batch in self._scorer.layout.micro_batches(sequences, range(len(sequences)), masks):
            rows = torch.arange(len(micro_batch.indices)).repeat_interleave(micro_batch.counts)
            fields = TokenFields(
                advantages=flat_tokens([s.advantages for s in sequences], micro_batch).to(device),
                behaviour_logprobs=flat_tokens([s.behaviour_logprobs for s in sequences], micro_batch).to(device),
                token_weights=weights[list(micro_batch.indices)][rows].to(device),
                proximal_logprobs=flat_tokens(proximal, micro_batch).to(device) if proximal else None,
                sequence_index=rows.to(device),
                num_sequences=len(micro_batch.indices),
                lags=(of.step - 1 - flat_tokens([s.versions for s in sequences], micro_batch)).to(device),
                kl_factor=of.kl_factor,
                reference_logprobs=flat_tokens(reference, micro_batch).to(device) if reference else None,
            )
            yield _Scorable(micro_batch, fields)

    def _with_proximal(self, part: Part[_Scorable]) -> Part[_Scorable]:
        """The part with the log-probs of the policy as it is now wherever the trainer gave none."""
        derived = [scorable for scorable in part.micro_batches if scorable.fields.proximal_logprobs is None]
        given = [scorable for scorable in part.micro_batches if scorable.fields.proximal_logprobs is not None]
        scored, lacking = [], self._lacking(len(derived))
        for scorable in derived:
            logprobs = self._scorer.logprobs(scorable.micro_batch).clone()
            scored.append(replace(scorable, fields=replace(scorable.fields, proximal_logprobs=logprobs)))
        for _ in range(lacking):
            self._scorer.logprobs(smallest(self._scorer.layout))
        return replace(part, micro_batches=[*given, *scored])

    def _with_facts(self, part: Part[_Scorable]) -> Part[_Scorable]:
        """The part, which is a whole minibatch with its proximal log-probs, with what its loss needs to know about all of it."""
        if not self._objective.needs_minibatch_facts:
            return part
        fields = [scorable.fields for scorable in part.micro_batches]
        mine = self._objective.minibatch_tokens(fields) if fields else None
        parts = [tokens for tokens in self._ranks.of_all(mine) if tokens is not None]
        if not parts:
            return part
        facts = self._objective.minibatch_facts(MinibatchTokens(*map(torch.cat, zip(*parts, strict=True))))
        known = [replace(s, fields=replace(s.fields, minibatch=facts)) for s in part.micro_batches]
        return replace(part, micro_batches=known)

    def _check_sequences(self, sequences: Sequence[TrainingSequence]) -> None:
        for index, s in enumerate(sequences):
            where = f"training sequence {index} (group {s.group_index})"
            fields = [s.loss_mask, s.advantages, s.behaviour_logprobs]
            fields += [added for added in (s.proximal_logprobs, s.reference_logprobs) if added is not None]
            if any(field.shape != s.token_ids.shape for field in fields):
                raise GeneratorOutputError(f"{where} is ragged: every field needs one entry per token ({len(s)}).")
            if len(s) == 0:
                raise GeneratorOutputError(f"{where} is empty; a prompt needs at least one token.")
            if bool(s.loss_mask[0]):
                raise GeneratorOutputError(
                    f"{where} trains its first token, which nothing precedes; prompts need a token."
                )
            if s.counted_tokens is not None and s.counted_tokens < int(s.loss_mask.sum()):
                raise GeneratorOutputError(
                    f"{where} counts {s.counted_tokens} tokens but trains {int(s.loss_mask.sum())}; masking only "
                    "takes tokens away."
                )
        largest = max((int(s.token_ids.max()) for s in sequences), default=0)
        if largest >= self._vocab_size:
            raise GeneratorOutputError(
                f"token id {largest} is outside the model's vocabulary of {self._vocab_size}; "
                f"use the tokenizer of {self._model_path!r}."
            )
