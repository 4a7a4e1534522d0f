"""Trains the policy in this process, on one thread or one GPU.

part ──pack──> micro-batches ──forward──> log-probs ──objective──> loss ──backward──┐  (gradients add up, part by part)
                                                                                    ▼
metrics <──statistics of all tokens──────────────────────────── scale, clip, AdamW: one optimizer step a pass
"""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from safetensors import SafetensorError
from transformers import PreTrainedModel

from skyrl_train.algorithms.reductions import reduction_scale
from skyrl_train.algorithms.statistics import TokenStatistics
from skyrl_train.config.schema import TrainerConfig
from skyrl_train.errors import CheckpointError, ConfigError, GeneratorOutputError
from skyrl_train.models.folder import load_model, load_tokenizer, quiet_transformers
from skyrl_train.training.activations import checkpoint_activations
from skyrl_train.training.backend import Minibatch, TrainingBackend, TrainingSequence
from skyrl_train.training.batch import MicroBatch, flat_tokens
from skyrl_train.training.objective import Objective, TokenFields
from skyrl_train.training.optimizer import PolicyOptimizer
from skyrl_train.training.schedule import learning_rate
from skyrl_train.training.scorer import Scorer
from skyrl_train.training.state import BackendState, detached_copy, read_state, write_state


@dataclass(frozen=True, slots=True)
class _Scorable:
    """A micro-batch and what is known about its tokens."""

    micro_batch: MicroBatch
    fields: TokenFields


@dataclass(frozen=True, slots=True)
class _Part:
    """Some groups of a step, ready to be trained."""

    step: int
    micro_batches: list[_Scorable]  # of the sequences that have trained tokens
    denominators: list[float]  # of all sequences


@dataclass(frozen=True, slots=True)
class _OpenStep:
    """What was accumulated of a step; its gradients are in the optimizer."""

    step: int
    statistics: TokenStatistics = field(default_factory=TokenStatistics)
    denominators: list[float] = field(default_factory=list)


class LocalBackend(TrainingBackend):
    """A HF causal LM and its optimizer.

    Log-probs are those of the sampling temperature (logits / temperature; greedy counts as 1), because the behaviour
    log-probs are. Top-p, top-k and min-p are not reproduced: with them the behaviour log-probs are larger by the mass
    cut off, which the off-policy metrics show. The model stays in evaluation mode: dropout would make the proximal
    ratio of the first pass differ from 1. Same inputs give bit-identical weights on the CPU with a fixed number of
    threads.
    """

    def __init__(
        self, model_path: str, trainer_config: TrainerConfig, total_steps: int, temperature: float, seed: int
    ) -> None:
        """
        Args:
            total_steps: optimizer minibatches of the whole run, which the learning-rate decay spans.
            temperature: of the sampled responses.
            seed: of torch's generators, for models that draw random numbers in their forward pass.

        Raises:
            ConfigError: an unknown name or an impossible number in ``trainer_config``.
            ModelError: the model folder cannot be used.
        """
        if trainer_config.update_epochs_per_batch < 1:
            raise ConfigError(
                f"trainer.update_epochs_per_batch must be at least 1, got {trainer_config.update_epochs_per_batch}."
            )
        if trainer_config.micro_batch_tokens < 1:
            raise ConfigError(
                f"trainer.micro_batch_tokens must be at least 1, got {trainer_config.micro_batch_tokens}."
            )
        torch.manual_seed(seed)
        self._model_path = model_path
        self._config = trainer_config
        self._total_steps = total_steps
        self._objective = Objective(trainer_config.algorithm)
        self._model = load_model(model_path, trainer_config.policy.dtype, trainer_config.device)
        self._model.eval()
        if trainer_config.policy.gradient_checkpointing:
            checkpoint_activations(self._model)
        self._vocab_size = int(self._model.config.get_text_config().vocab_size)
        self._scorer = Scorer(
            self._model,
            temperature=temperature,
            micro_batch_tokens=trainer_config.micro_batch_tokens,
            packing=trainer_config.packing,
            fp32_head=trainer_config.policy.fp32_head,
        )
        self._optimizer = PolicyOptimizer(self._model, trainer_config.policy.optimizer_config)
        self._open: _OpenStep | None = None

    @property
    def model(self) -> PreTrainedModel:
        """The policy, live."""
        return self._model

    # ---- numbers

    def forward_logprobs(self, sequences: Sequence[TrainingSequence]) -> list[torch.Tensor]:
        """See :meth:`TrainingBackend.forward_logprobs`."""
        self._check_sequences(sequences)
        results = [torch.zeros(len(sequence)) for sequence in sequences]
        everything = [torch.ones(len(sequence), dtype=torch.bool) for sequence in sequences]
        scorable = [index for index, sequence in enumerate(sequences) if len(sequence) > 1]
        for micro_batch in self._scorer.micro_batches(sequences, scorable, everything):
            logprobs = self._scorer.logprobs(micro_batch).float().cpu()
            counts = [len(sequences[index]) - 1 for index in micro_batch.indices]
            for index, values in zip(micro_batch.indices, logprobs.split(counts), strict=True):
                results[index][1:] = values
        return results

    def update(self, minibatch: Minibatch) -> dict[str, float]:
        """See :meth:`TrainingBackend.update`; ``update_epochs_per_batch`` optimizer steps at the step's learning rate.

        A pass whose loss or gradient is not finite, or that has no trained token, moves nothing; the former is counted
        in ``policy/skipped_nonfinite``. Metrics of several passes are averaged, that count is summed.

        Raises:
            ConfigError: a sequence does not fit ``micro_batch_tokens``.
            GeneratorOutputError: a sequence breaks the contract of :class:`TrainingSequence`.
            ValueError: parts of a step were accumulated and neither finished nor discarded.
        """
        if self._open is not None:
            raise ValueError(f"step {self._open.step} has begun part by part; finish or discard it before an update")
        part = self._part(minibatch)
        passes = self._config.update_epochs_per_batch
        if passes > 1 or self._objective.needs_minibatch_facts:
            part = self._with_facts(replace(part, micro_batches=[self._with_proximal(s) for s in part.micro_batches]))
        outcomes = []
        for _ in range(passes):
            self._add(part)
            outcomes.append(self.finish(minibatch.step))
        same_in_all = {key: outcomes[0][key] for key in ("policy/lr", "policy/tokens")}
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
        if self._config.update_epochs_per_batch > 1:
            raise ConfigError(
                f"trainer.update_epochs_per_batch={self._config.update_epochs_per_batch} needs whole minibatches: later "
                "passes train on all groups again. Set it to 1, or trainer.fully_async.streaming_min_groups=null."
            )
        if self._objective.needs_minibatch_facts:
            raise ConfigError(
                "The configured loss or correction looks at whole minibatches before it trains. Set "
                "trainer.fully_async.streaming_min_groups=null."
            )
        if self._open is not None and self._open.step != part.step:
            raise ValueError(f"step {self._open.step} is neither finished nor discarded, and step {part.step} begins")
        self._add(self._part(part))

    def finish(self, step: int) -> dict[str, float]:
        """See :meth:`TrainingBackend.finish`; what moves nothing is described at :meth:`update`."""
        if self._open is None or self._open.step != step:
            raise ValueError(f"step {step} has nothing accumulated, so it cannot be finished")
        opened = self._open
        scale = reduction_scale(opened.denominators)
        rate = self._learning_rate(step)
        try:
            metrics = self._objective.metrics(opened.statistics, scale)
            grad_norm, skipped = 0.0, False
            if opened.statistics.tokens:
                outcome = self._optimizer.step(rate, scale) if math.isfinite(metrics["loss/policy"]) else None
                grad_norm = outcome.grad_norm if outcome is not None else math.nan
                skipped = outcome is None or not outcome.applied
        finally:
            self.discard()
        return metrics | {
            "policy/grad_norm": grad_norm,
            "policy/skipped_nonfinite": float(skipped),
            "policy/lr": rate,
            "policy/tokens": float(opened.statistics.tokens),
        }

    def discard(self) -> None:
        """See :meth:`TrainingBackend.discard`."""
        self._open = None
        self._optimizer.zero_grad()

    def _learning_rate(self, step: int) -> float:
        optimizer = self._config.policy.optimizer_config
        return learning_rate(
            step,
            peak=optimizer.lr,
            schedule=optimizer.scheduler,
            num_warmup_steps=optimizer.num_warmup_steps,
            total_steps=self._total_steps,
        )

    def _add(self, part: _Part) -> None:
        """Adds the part's gradients to those of its step."""
        opened = self._open = self._open or _OpenStep(part.step)
        try:
            for scorable in part.micro_batches:
                loss, statistics = self._loss(scorable)
                loss.backward()
                opened.statistics.add(statistics)
        except BaseException:
            self.discard()
            raise
        opened.denominators.extend(part.denominators)

    def _loss(self, scorable: _Scorable) -> tuple[torch.Tensor, TokenStatistics]:
        logprobs, entropies = self._scorer.logprobs_and_entropies(
            scorable.micro_batch, differentiate_entropy=self._objective.differentiates_entropy
        )
        return self._objective.loss(logprobs, entropies, scorable.fields)

    # ---- batches

    def _part(self, minibatch: Minibatch) -> _Part:
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
        return _Part(
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
        device = self._model.device
        for micro_batch in self._scorer.micro_batches(sequences, range(len(sequences)), masks):
            rows = torch.arange(len(micro_batch.indices)).repeat_interleave(micro_batch.counts)
            fields = TokenFields(
                advantages=flat_tokens([s.advantages for s in sequences], micro_batch).to(device),
                behaviour_logprobs=flat_tokens([s.behaviour_logprobs for s in sequences], micro_batch).to(device),
                token_weights=weights[list(micro_batch.indices)][rows].to(device),
                proximal_logprobs=flat_tokens(proximal, micro_batch).to(device) if proximal else None,
                sequence_index=rows.to(device),
                num_sequences=len(micro_batch.indices),
                lags=(of.step - 1 - flat_tokens([s.versions for s in sequences], micro_batch)).to(device),
                reference_logprobs=flat_tokens(reference, micro_batch).to(device) if reference else None,
                kl_factor=of.kl_factor,
            )
            yield _Scorable(micro_batch, fields)

    def _with_proximal(self, scorable: _Scorable) -> _Scorable:
        """The micro-batch with the log-probs of the policy as it is now, unless the trainer gave them."""
        if scorable.fields.proximal_logprobs is not None:
            return scorable
        logprobs = self._scorer.logprobs(scorable.micro_batch).clone()
        return replace(scorable, fields=replace(scorable.fields, proximal_logprobs=logprobs))

    def _with_facts(self, part: _Part) -> _Part:
        """The part, which is a whole minibatch with its proximal log-probs, with what its loss needs to know about all of it."""
        fields = [scorable.fields for scorable in part.micro_batches]
        if not self._objective.needs_minibatch_facts or not fields:
            return part
        facts = self._objective.minibatch_facts(self._objective.minibatch_tokens(fields))
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

    # ---- weights and checkpoints

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See :meth:`TrainingBackend.named_weights`; tied weights appear once."""
        for name, parameter in self._model.named_parameters():
            yield name, parameter.detach()

    def snapshot(self) -> dict[str, object]:
        """See :meth:`TrainingBackend.snapshot`; the copies lie in main memory."""
        return dict(detached_copy(self._live_state()).as_mapping())

    def save(self, snapshot: dict[str, object], folder: Path) -> None:
        """See :meth:`TrainingBackend.save`.

        Raises:
            OSError: the disk is full or the folder cannot be written.
        """
        write_state(BackendState.from_mapping(snapshot), folder)

    def load(self, folder: Path) -> None:
        """See :meth:`TrainingBackend.load`."""
        state = read_state(folder, like=self._live_state(), misfit=self._optimizer.check_state_dict)
        self.discard()
        with torch.no_grad():
            for name, weight in self._model.named_parameters():
                weight.copy_(state.weights[name])
        self._optimizer.load_state_dict(state.optimizer)
        torch.set_rng_state(state.rng["cpu"])
        if "cuda" in state.rng and self._model.device.type == "cuda":
            torch.cuda.set_rng_state(state.rng["cuda"], self._model.device)

    def export_hf(self, folder: Path) -> None:
        """See :meth:`TrainingBackend.export_hf`; the tokenizer comes along. Replaces ``folder`` as a whole.

        Raises:
            CheckpointError: the folder cannot be written; what was there stays.
        """
        unfinished = folder.with_name(f".tmp-{folder.name}")
        try:
            shutil.rmtree(unfinished, ignore_errors=True)
            with quiet_transformers():
                self._model.save_pretrained(unfinished)
                load_tokenizer(self._model_path).save_pretrained(unfinished)
            shutil.rmtree(folder, ignore_errors=True)
            os.replace(unfinished, folder)
        except (OSError, SafetensorError) as error:
            shutil.rmtree(unfinished, ignore_errors=True)
            raise CheckpointError(
                f"The policy cannot be exported to {folder}: {error}. Free space or choose another place; the run's "
                "checkpoints hold the same weights."
            ) from error

    def _live_state(self) -> BackendState:
        rng = {"cpu": torch.get_rng_state()}
        if self._model.device.type == "cuda":
            rng["cuda"] = torch.cuda.get_rng_state(self._model.device)
        return BackendState(weights=dict(self.named_weights()), optimizer=self._optimizer.state_dict(), rng=rng)
