"""How sequences become rows for one model: packed or padded, within a budget of tokens and the model's positions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from skyrl_train.errors import GeneratorOutputError
from skyrl_train.training.backend import TrainingSequence
from skyrl_train.training.batch import MicroBatch, collate_packed, collate_padded, pack_rows, pad_rows


@dataclass(frozen=True, slots=True)
class RowLayout:
    """How rows are laid out."""

    packed: bool  # several sequences in a row instead of padding
    micro_batch_tokens: int  # per forward pass, padding included
    positions: int | None  # of the model; None: without limit

    @classmethod
    def of(cls, model: PreTrainedModel, *, packed: bool, micro_batch_tokens: int) -> RowLayout:
        positions: int | None = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        return cls(packed, micro_batch_tokens, positions)

    def micro_batches(
        self, sequences: Sequence[TrainingSequence], indices: Sequence[int], scored: Sequence[torch.Tensor]
    ) -> Iterator[MicroBatch]:
        """Splits the sequences at ``indices``; ``scored[i]`` (bool ``[T]``) marks the scored tokens of sequence ``i``.

        Raises:
            ConfigError: a sequence does not fit the token budget.
            GeneratorOutputError: a sequence is longer than the model has positions.
        """
        lengths = [len(sequences[index]) for index in indices]
        longest = max(lengths, default=0)
        if self.positions is not None and longest > self.positions:
            raise GeneratorOutputError(
                f"a sequence has {longest} tokens, but the model only {self.positions} positions. Lower "
                "generator.max_input_length or generator.sampling_params.max_tokens."
            )
        split, collate = (pack_rows, collate_packed) if self.packed else (pad_rows, collate_padded)
        for chosen in split(lengths, self.micro_batch_tokens):
            yield collate(sequences, [indices[position] for position in chosen], scored)

    def every_token(self, sequences: Sequence[TrainingSequence]) -> list[MicroBatch]:
        """Micro-batches in which every token that something precedes is scored; errors as of :meth:`micro_batches`."""
        everything = [torch.ones(len(sequence), dtype=torch.bool) for sequence in sequences]
        scorable = [index for index, sequence in enumerate(sequences) if len(sequence) > 1]
        return list(self.micro_batches(sequences, scorable, everything))


def two_short_sequences(vocab_size: int) -> list[TrainingSequence]:
    """Sequences to try a model's ways on, whatever its vocabulary."""
    ids = torch.arange(7) % vocab_size
    return [_unlabelled(ids[:4]), _unlabelled(ids[4:])]


def _unlabelled(token_ids: torch.Tensor) -> TrainingSequence:
    nothing = torch.zeros(len(token_ids))
    return TrainingSequence(token_ids, nothing > 0, nothing, nothing, torch.full_like(token_ids, -1), 0)
