"""Training of the policy on one rank, except where the weights are stored and how they are saved.

A rank that trains alone is the local backend. Ranks that share sequences (sequence parallelism) get the same sequences and
compute the same loss, each from its slice of the tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel

from skyrl_train.algorithms.reductions import reduction_scale
from skyrl_train.algorithms.tokens import MinibatchTokens, TokenStatistics
from skyrl_train.config.schema import TrainerConfig
from skyrl_train.errors import GeneratorOutputError
from skyrl_train.models.folder import load_tokenizer, resolve_dtype
from skyrl_train.training.backend import Minibatch, TokenRecord, TrainingSequence
from skyrl_train.training.batch import MicroBatch, flat_tokens
from skyrl_train.training.collectives import Collectives
from skyrl_train.training.gradient_accumulator import GradientAccumulator, LossInputs, StepPart
from skyrl_train.training.objective import Objective, TokenFields
from skyrl_train.training.scorer import Scorer, compute_device
from skyrl_train.training.state import Snapshots
from skyrl_train.training.upload import upload


@dataclass(frozen=True, slots=True)
class PolicyMicroBatch(LossInputs):
    fields: TokenFields
    records: tuple[int | None, ...]  # the key of each sequence, for take_records()


class PolicyWorker(GradientAccumulator[PolicyMicroBatch]):
    """A HF causal LM and its optimizer.

    Log-probs are computed at the sampling temperature (logits / temperature; greedy counts as 1), like the behaviour
    log-probs. Top-p, top-k, min-p and min_tokens are not reproduced: they raise the behaviour log-probs by the probability mass
    that they cut off, which the off-policy metrics show.
    """

    role = "policy"
    loss_metric = "loss/policy"

    def __init__(
        self,
        model: PreTrainedModel,
        model_path: str,
        trainer_config: TrainerConfig,
        total_steps: int,
        temperature: float,
        collectives: Collectives,
        snapshots: Snapshots[Any],
    ) -> None:
        """
        Args:
            model: on its device; its gradients are sums over all ranks once they have added up.
            model_path: its origin, for messages, and for the tokenizer that grammars need.
            total_steps: optimizer minibatches of the whole run, over which the learning rate decays.
            temperature: of the sampled responses.
            snapshots: of the model and its optimizer: neither moves while one is being copied.

        Raises:
            ConfigError: an unknown name in ``trainer_config``, or a setting that the model does not allow.
        """
        super().__init__(model, trainer_config, total_steps, collectives, snapshots, "trainer.policy")
        self._model_path = model_path
        self._objective = Objective(trainer_config.algorithm)
        self.needs_whole_minibatch = self._objective.needs_minibatch_statistics
        self._scorer = Scorer(
            model,
            temperature=temperature,
            micro_batch_tokens=trainer_config.micro_batch_tokens,
            packing=trainer_config.packing,
            fp32_head=trainer_config.policy.fp32_head,
            sequence_ranks=collectives.sequence_ranks,
            dtype=resolve_dtype(trainer_config.policy.dtype),
            tokenizer=partial(load_tokenizer, model_path),
        )
        self._layout = self._scorer.layout
        self._records: dict[int, TokenRecord] = {}

    def forward_logprobs(self, sequences: Sequence[TrainingSequence]) -> list[torch.Tensor]:
        """See :meth:`TrainingBackend.forward_logprobs`."""
        return self._score_every_token(sequences)

    def _loss(self, micro_batch: PolicyMicroBatch) -> tuple[torch.Tensor, TokenStatistics]:
        logprobs, entropies = self._scorer.logprobs_and_entropies(
            micro_batch.micro_batch, differentiate_entropy=self._objective.differentiates_entropy
        )
        try:
            if any(record is not None for record in micro_batch.records):
                self._keep(micro_batch, logprobs.detach())
            return self._objective.loss(logprobs, entropies, micro_batch.fields)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # of the user's loss, correction or KL estimator
            self._loss_error = self._loss_error or error
            return logprobs.sum() * 0.0, TokenStatistics()

    def _keep(self, micro_batch: PolicyMicroBatch, logprobs: torch.Tensor) -> None:
        """Keep log-probs and weights of the recorded sequences."""
        counts = micro_batch.micro_batch.counts.tolist()
        weights = self._objective.weights(logprobs, micro_batch.fields)
        columns = [numbers.float().cpu().split(counts) for numbers in (logprobs, weights)]
        for record, of_logprobs, of_weights in zip(micro_batch.records, *columns, strict=True):
            if record is not None:
                # Of the first pass, before the step moves the policy. Copies: a part would keep the whole micro-batch.
                self._records.setdefault(record, TokenRecord(of_logprobs.numpy().copy(), of_weights.numpy().copy()))

    def take_records(self) -> dict[int, TokenRecord]:
        """See :meth:`TrainingBackend.take_records`."""
        records, self._records = self._records, {}
        return records

    def _scores(self, micro_batch: MicroBatch) -> torch.Tensor:
        return self._scorer.logprobs_and_entropies(micro_batch, differentiate_entropy=False)[0]

    def _step_metrics(
        self, statistics: TokenStatistics, denominators: Sequence[float]
    ) -> tuple[dict[str, float], float]:
        scale = reduction_scale(denominators)
        metrics = self._objective.metrics(statistics, scale)
        metrics["policy/tokens"] = float(statistics.tokens)
        return metrics, scale

    def finish(self, step: int) -> dict[str, float]:
        """See :meth:`GradientAccumulator.finish`; adds the learning rates of ``lr_multipliers``."""
        metrics = super().finish(step)
        for pattern, factor in self._config.policy.optimizer_config.lr_multipliers.items():
            metrics[f"policy/lr/{pattern}"] = metrics["policy/lr"] * factor
        return metrics

    def _part(self, minibatch: Minibatch) -> StepPart[PolicyMicroBatch]:
        self._check(minibatch.sequences)
        shares = [self._objective.share(s.counts) for s in minibatch.sequences]
        trained = [(s, share) for s, share in zip(minibatch.sequences, shares, strict=True) if bool(s.loss_mask.any())]
        if self._objective.needs_reference and (missing := [s for s, _ in trained if s.reference_logprobs is None]):
            raise GeneratorOutputError(
                f"{len(missing)} of {len(trained)} training sequences have no reference log-probs (the first is of group "
                f"{missing[0].group_index}), which trainer.algorithm.kl_loss_coef needs: the stage that adds them did not "
                "see their groups."
            )
        device, micro_batches = compute_device(self.model), []
        # Sequences with and without given proximal log-probs are packed apart, so a minibatch may have both.
        for is_given in (True, False):
            chosen = [(s, share) for s, share in trained if (s.proximal_logprobs is not None) is is_given]
            sequences = [s for s, _ in chosen]
            weights = torch.tensor([share.token_weight for _, share in chosen])
            proximal = [s.proximal_logprobs for s in sequences if s.proximal_logprobs is not None]
            reference = [s.reference_logprobs for s in sequences if s.reference_logprobs is not None]
            masks = [s.loss_mask for s in sequences]
            for micro_batch in self._layout.micro_batches(sequences, range(len(sequences)), masks):
                # The sequence of each scored token, [N].
                rows = torch.arange(len(micro_batch.indices)).repeat_interleave(micro_batch.counts)
                fields = TokenFields(
                    advantages=upload(flat_tokens([s.advantages for s in sequences], micro_batch), device),
                    behaviour_logprobs=upload(
                        flat_tokens([s.behaviour_logprobs for s in sequences], micro_batch), device
                    ),
                    token_weights=upload(weights[list(micro_batch.indices)][rows], device),
                    proximal_logprobs=upload(flat_tokens(proximal, micro_batch), device) if proximal else None,
                    sequence_index=upload(rows, device),
                    num_sequences=len(micro_batch.indices),
                    lags=upload(minibatch.step - 1 - flat_tokens([s.versions for s in sequences], micro_batch), device),
                    kl_factor=minibatch.kl_factor,
                    reference_logprobs=upload(flat_tokens(reference, micro_batch), device) if reference else None,
                )
                records = tuple(sequences[index].record for index in micro_batch.indices)
                micro_batches.append(PolicyMicroBatch(micro_batch, fields, records))
        return StepPart(minibatch.step, micro_batches, [share.denominator for share in shares])

    def _with_minibatch_inputs(self, part: StepPart[PolicyMicroBatch]) -> StepPart[PolicyMicroBatch]:
        """Add proximal log-probs where they are missing, and the statistics of the whole minibatch, if they are needed."""
        if self._config.update_epochs_per_batch == 1 and not self.needs_whole_minibatch:
            return part  # the current log-probs of the only pass are the proximal ones
        unscored = [batch for batch in part.micro_batches if batch.fields.proximal_logprobs is None]
        batches = [batch for batch in part.micro_batches if batch.fields.proximal_logprobs is not None]
        missing = self._collectives.all_reduce_max(len(unscored)) - len(unscored)
        # Before the first backward pass, so that these are log-probs of the policy at the beginning of the step.
        for batch in unscored:
            logprobs = self._scorer.logprobs(batch.micro_batch).clone()
            batches.append(replace(batch, fields=replace(batch.fields, proximal_logprobs=logprobs)))
        for _ in range(missing):
            self._scorer.logprobs(self._smallest_micro_batch())
        if self.needs_whole_minibatch:
            # A rank without sequences takes part in the exchange with None; the others' numbers need no contribution of it.
            mine = self._objective.minibatch_tokens([batch.fields for batch in batches]) if batches else None
            tokens = [of_rank for of_rank in self._collectives.all_gather(mine) if of_rank is not None]
            if tokens:
                merged = MinibatchTokens(*map(torch.cat, zip(*tokens, strict=True)))
                statistics = self._collectives.all_succeed(partial(self._objective.minibatch_statistics, merged))
                batches = [replace(b, fields=replace(b.fields, minibatch=statistics)) for b in batches]
        return replace(part, micro_batches=batches)

    def _check(self, sequences: Sequence[TrainingSequence]) -> None:
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
