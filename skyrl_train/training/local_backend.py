"""Trains the policy in this process, on one thread or one GPU.

minibatch ──pack──> micro-batches ──forward──> log-probs ──objective──> loss ──backward──┐  (gradients add up)
                                                                                         ▼
metrics <──records of every token──────────────────────────────────────────── clip, AdamW: one optimizer step a pass
"""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import SafetensorError
from transformers import PreTrainedModel

from skyrl_train.config.schema import TrainerConfig
from skyrl_train.errors import CheckpointError, ConfigError, GeneratorOutputError
from skyrl_train.models.folder import load_model, load_tokenizer, quiet_transformers
from skyrl_train.training.backend import Minibatch, TrainingBackend, TrainingSequence
from skyrl_train.training.batch import MicroBatch, collate, flat_tokens, pack_by_tokens
from skyrl_train.training.logprobs import scored_logits, token_entropies, token_logprobs
from skyrl_train.training.objective import Objective, TokenFields, TokenRecord
from skyrl_train.training.optimizer import PolicyOptimizer
from skyrl_train.training.schedule import learning_rate
from skyrl_train.training.state import BackendState, detached_copy, read_state, write_state


@dataclass(frozen=True, slots=True)
class _Part:
    """A micro-batch of an update and what is known about its tokens."""

    micro_batch: MicroBatch
    fields: TokenFields


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
        self._temperature = temperature if temperature > 0 else 1.0
        self._objective = Objective(trainer_config.algorithm)
        self._model = load_model(model_path, trainer_config.policy.dtype, trainer_config.device)
        self._model.eval()
        self._vocab_size = int(self._model.config.get_text_config().vocab_size)
        self._optimizer = PolicyOptimizer(self._model, trainer_config.policy.optimizer_config)

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
        for micro_batch in self._micro_batches(sequences, scorable, everything):
            logprobs = self._score(micro_batch).float().cpu()
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
        """
        self._check_sequences(minibatch.sequences)
        rate = learning_rate(
            minibatch.step,
            peak=self._config.policy.optimizer_config.lr,
            schedule=self._config.policy.optimizer_config.scheduler,
            num_warmup_steps=self._config.policy.optimizer_config.num_warmup_steps,
            total_steps=self._total_steps,
        )
        parts = self._parts(minibatch.sequences)
        passes = self._config.update_epochs_per_batch
        if passes > 1:
            parts = [self._with_proximal(part) for part in parts]
        outcomes = [self._pass(parts, rate) for _ in range(passes)]
        metrics = {key: sum(outcome[key] for outcome in outcomes) / passes for key in outcomes[0]}
        metrics["policy/skipped_nonfinite"] *= passes
        metrics["policy/lr"] = rate
        metrics["policy/tokens"] = float(sum(part.micro_batch.targets.shape[0] for part in parts))
        return metrics

    def _pass(self, parts: Sequence[_Part], rate: float) -> dict[str, float]:
        """One optimizer step over all micro-batches."""
        self._optimizer.zero_grad()
        records: list[TokenRecord] = []
        for part in parts:
            loss, record = self._loss(part)
            loss.backward()
            records.append(record)
        metrics = self._objective.metrics(records)
        if not parts:
            return metrics | {"policy/grad_norm": 0.0, "policy/skipped_nonfinite": 0.0}
        outcome = self._optimizer.step(rate) if math.isfinite(metrics["loss/policy"]) else None
        return metrics | {
            "policy/grad_norm": outcome.grad_norm if outcome is not None else math.nan,
            "policy/skipped_nonfinite": float(outcome is None or not outcome.applied),
        }

    def _loss(self, part: _Part) -> tuple[torch.Tensor, TokenRecord]:
        logits = scored_logits(self._model, part.micro_batch, self._temperature)
        logprobs = token_logprobs(logits, part.micro_batch.targets.to(logits.device))
        with torch.set_grad_enabled(self._objective.differentiates_entropy):
            entropy = token_entropies(logits)
        return self._objective.loss(logprobs, entropy, part.fields)

    @torch.inference_mode()
    def _score(self, micro_batch: MicroBatch) -> torch.Tensor:
        """Log-probs ``[N]`` of the micro-batch's scored tokens under the current policy."""
        logits = scored_logits(self._model, micro_batch, self._temperature)
        return token_logprobs(logits, micro_batch.targets.to(logits.device))

    # ---- batches

    def _micro_batches(
        self, sequences: Sequence[TrainingSequence], indices: Sequence[int], scored: Sequence[torch.Tensor]
    ) -> Iterator[MicroBatch]:
        lengths = [len(sequences[index]) for index in indices]
        for chosen in pack_by_tokens(lengths, self._config.micro_batch_tokens):
            yield collate(sequences, [indices[position] for position in chosen], scored)

    def _parts(self, sequences: Sequence[TrainingSequence]) -> list[_Part]:
        """The micro-batches of the sequences that have trained tokens; the others count in the denominators only."""
        masks = [sequence.loss_mask for sequence in sequences]
        trained_tokens = torch.tensor([int(mask.sum()) for mask in masks])
        weights = self._objective.reduction_weights(trained_tokens).float()
        trained = [index for index, count in enumerate(trained_tokens.tolist()) if count > 0]
        given = [s.proximal_logprobs for s in sequences if s.proximal_logprobs is not None]
        proximal = given if len(given) == len(sequences) else None
        device = self._model.device
        parts = []
        for micro_batch in self._micro_batches(sequences, trained, masks):
            chosen = torch.tensor(micro_batch.indices)
            fields = TokenFields(
                advantages=flat_tokens([s.advantages for s in sequences], micro_batch).to(device),
                behaviour_logprobs=flat_tokens([s.behaviour_logprobs for s in sequences], micro_batch).to(device),
                reduction_weights=weights[chosen].repeat_interleave(trained_tokens[chosen]).to(device),
                proximal_logprobs=flat_tokens(proximal, micro_batch).to(device) if proximal is not None else None,
            )
            parts.append(_Part(micro_batch, fields))
        return parts

    def _with_proximal(self, part: _Part) -> _Part:
        """The part with the log-probs of the policy as it is now, unless the trainer gave them."""
        if part.fields.proximal_logprobs is not None:
            return part
        logprobs = self._score(part.micro_batch).clone()
        return replace(part, fields=replace(part.fields, proximal_logprobs=logprobs))

    def _check_sequences(self, sequences: Sequence[TrainingSequence]) -> None:
        for index, s in enumerate(sequences):
            where = f"training sequence {index} (group {s.group_index})"
            fields = [s.loss_mask, s.advantages, s.behaviour_logprobs]
            fields += [s.proximal_logprobs] if s.proximal_logprobs is not None else []
            if any(field.shape != s.token_ids.shape for field in fields):
                raise GeneratorOutputError(f"{where} is ragged: every field needs one entry per token ({len(s)}).")
            if len(s) == 0:
                raise GeneratorOutputError(f"{where} is empty; a prompt needs at least one token.")
            if bool(s.loss_mask[0]):
                raise GeneratorOutputError(
                    f"{where} trains its first token, which nothing precedes; prompts need a token."
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
