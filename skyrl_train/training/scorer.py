"""Scores token sequences under a causal LM: the one place that runs the policy's forward pass.

sequences ──micro_batches──> MicroBatch (within the token budget) ──score──> log-probs, entropies of its scored tokens
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from skyrl_train.errors import ConfigError, ModelError
from skyrl_train.training.attention import keep_caps, packing_obstacle, use_segments
from skyrl_train.training.batch import MicroBatch, collate_packed, collate_padded
from skyrl_train.training.head import LogitRule
from skyrl_train.training.layout import RowLayout, two_short_sequences
from skyrl_train.training.logprobs import can_chunk, chunked_scores, full_scores, share_weights_again
from skyrl_train.training.sequence_parallel import SequenceRanks


@dataclass(frozen=True, slots=True)
class _Way:
    """How rows are laid out, and how log-probs come of them."""

    packed: bool
    chunked: bool


class Scorer:
    """Log-probs are those of the sampling temperature (logits / temperature; greedy counts as 1).

    Sequences are packed into rows without padding where the model's attention can keep them apart, and logits of all
    tokens never exist at once where it is known what the model does after its head. The constructor decides both and
    checks them against the model's own forward pass on a few tokens; a sharded model's ranks construct it together.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        temperature: float,
        micro_batch_tokens: int,
        packing: bool | None = None,
        fp32_head: bool = False,
        sequence_ranks: SequenceRanks | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """
        Args:
            micro_batch_tokens: per forward pass, padding included.
            packing: several sequences in a row instead of padding; None: where the model allows it.
            fp32_head: the head's products in float32, whatever the dtype of the model.
            sequence_ranks: those that score every micro-batch together, a slice of its tokens each; None: this one alone.
            dtype: what the model computes in; None: that of its parameters. A sharded one may have wider ones.

        Raises:
            ConfigError: ``packing`` or ``fp32_head`` is True, or there are ``sequence_ranks``, and the model does not allow it.
            ModelError: the model is no causal language model.
        """
        self._model = model
        self._fp32_head = False
        self._sequence_ranks = sequence_ranks
        self._rule = LogitRule.of(model, temperature if temperature > 0 else 1.0)
        keep_caps(model)
        self._way = self._fastest_right_way(packing, dtype or model.dtype)
        if not self._way.packed and (packing or sequence_ranks is not None):
            obstacle = packing_obstacle(model) or "computes other log-probs for packed sequences than for single ones"
            asked, remedy = "trainer.packing=true", "trainer.packing=null"
            if sequence_ranks is not None:
                asked = f"{sequence_ranks.setting}={sequence_ranks.size} needs packed rows"
                remedy = f"{sequence_ranks.setting}=1"
            raise ConfigError(f"{asked}: {type(model).__name__} {obstacle}. Set {remedy}.")
        if fp32_head and not self._way.chunked:
            raise ConfigError(
                f"trainer.policy.fp32_head=true: {type(model).__name__} is not known to end in a linear head with at most "
                "a scale and a cap after it. Set it to false."
            )
        self._fp32_head = fp32_head
        self.layout = RowLayout.of(model, packed=self._way.packed, micro_batch_tokens=micro_batch_tokens)

    @property
    def packs(self) -> bool:
        """Whether several sequences share a row."""
        return self._way.packed

    # Not inference_mode: weights that a sharded model gathers here for the first time are kept for training.
    @torch.no_grad()
    def logprobs(self, micro_batch: MicroBatch) -> torch.Tensor:
        """Log-probs ``[N]`` of the scored tokens, without gradient."""
        return self._scores(micro_batch, self._way, differentiate_entropy=False)[0]

    def logprobs_and_entropies(
        self, micro_batch: MicroBatch, *, differentiate_entropy: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probs ``[N]`` of the scored tokens, with gradient, and the entropies ``[N]`` of what they were drawn from."""
        return self._scores(micro_batch, self._way, differentiate_entropy=differentiate_entropy)

    def _scores(
        self, micro_batch: MicroBatch, way: _Way, *, differentiate_entropy: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ranks, number = self._sequence_ranks, len(micro_batch.targets)
        if ranks is None or not way.packed:
            return self._scores_here(micro_batch, way, differentiate_entropy=differentiate_entropy)
        part, own = ranks.slice_of(micro_batch)
        logprobs, entropies = self._scores_here(part, way, differentiate_entropy=differentiate_entropy)
        return ranks.join(logprobs, own, number), ranks.join(entropies, own, number)

    def _scores_here(
        self, micro_batch: MicroBatch, way: _Way, *, differentiate_entropy: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rule, fp32 = self._rule, self._fp32_head
        if way.chunked:
            scores = chunked_scores(
                self._model, micro_batch, rule, fp32=fp32, differentiate_entropy=differentiate_entropy
            )
        else:
            scores = full_scores(
                self._model, micro_batch, rule.temperature, differentiate_entropy=differentiate_entropy
            )
        if not torch.is_grad_enabled():
            share_weights_again(self._model)
        return scores

    @torch.no_grad()
    def _fastest_right_way(self, packing: bool | None, dtype: torch.dtype) -> _Way:
        """The first way that agrees with the model's own logits of padded sequences."""
        sequences = two_short_sequences(self._model.config.get_text_config().vocab_size)
        everything = [torch.ones(len(sequence), dtype=torch.bool) for sequence in sequences]
        plain = _Way(packed=False, chunked=False)
        padded = collate_padded(sequences, [0, 1], everything)
        expected = self._scores(padded, plain, differentiate_entropy=False)[0]
        tolerance = 0.1 if dtype.itemsize < 4 else 2e-3
        packable = packing is not False and use_segments(self._model)
        ways = [_Way(packed, chunked) for packed in (True, False) for chunked in (True, False)]
        for way in ways[:-1]:
            if way.packed > packable or way.chunked > can_chunk(self._model):
                continue
            batch = collate_packed(sequences, [0, 1], everything) if way.packed else padded
            try:
                scores = self._scores(batch, way, differentiate_entropy=False)[0]
            except (ModelError, TypeError):
                continue
            if torch.allclose(scores, expected, atol=tolerance, rtol=0.0):
                return way
        return plain
