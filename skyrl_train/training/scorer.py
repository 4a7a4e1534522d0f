"""Scores token sequences under a causal LM: the one place that runs the policy's forward pass.

sequences ──micro_batches──> MicroBatch (within the token budget) ──score──> log-probs, entropies of its scored tokens
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from transformers import PreTrainedModel

from skyrl_train.training.backend import TrainingSequence
from skyrl_train.training.batch import MicroBatch, collate, pack_by_tokens
from skyrl_train.training.logprobs import scored_logits, token_entropies, token_logprobs


class Scorer:
    """Log-probs are those of the sampling temperature (logits / temperature; greedy counts as 1)."""

    def __init__(self, model: PreTrainedModel, *, temperature: float, micro_batch_tokens: int) -> None:
        """
        Args:
            micro_batch_tokens: padded tokens per forward pass.
        """
        self._model = model
        self._temperature = temperature if temperature > 0 else 1.0
        self._micro_batch_tokens = micro_batch_tokens

    def micro_batches(
        self, sequences: Sequence[TrainingSequence], indices: Sequence[int], scored: Sequence[torch.Tensor]
    ) -> Iterator[MicroBatch]:
        """Splits the sequences at ``indices``; ``scored[i]`` (bool ``[T]``) marks the scored tokens of sequence ``i``.

        Raises:
            ConfigError: a sequence does not fit the token budget.
        """
        lengths = [len(sequences[index]) for index in indices]
        for chosen in pack_by_tokens(lengths, self._micro_batch_tokens):
            yield collate(sequences, [indices[position] for position in chosen], scored)

    @torch.inference_mode()
    def logprobs(self, micro_batch: MicroBatch) -> torch.Tensor:
        """Log-probs ``[N]`` of the scored tokens, without gradient."""
        logits = scored_logits(self._model, micro_batch, self._temperature)
        return token_logprobs(logits, micro_batch.targets.to(logits.device))

    def logprobs_and_entropies(
        self, micro_batch: MicroBatch, *, differentiate_entropy: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probs ``[N]`` of the scored tokens, with gradient, and the entropies ``[N]`` of what they were drawn from."""
        logits = scored_logits(self._model, micro_batch, self._temperature)
        logprobs = token_logprobs(logits, micro_batch.targets.to(logits.device))
        with torch.set_grad_enabled(differentiate_entropy):
            entropies = token_entropies(logits)
        return logprobs, entropies
