"""Sampled tokens as text and marks, one token at a time.

    token ──> text as far as it is certain ──> split at marks ──> Piece ...

A mark encloses reasoning or tool calls in a chat format (``<think>``, ``<tool_call>``). If the vocabulary has a token for
it, only that token counts, and the same letters spelled out are text; otherwise the letters count. A character or a mark
that may still be incomplete is held back.

Tokens are decoded one at a time, so that the pieces do not depend on how tokens are grouped into calls.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from skyrl_train.inference.response_text import IncrementalText

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Mark(Enum):
    """The meaning of a mark in a response."""

    THINK = "opens reasoning"
    THINK_END = "closes reasoning"
    TOOL = "opens tool calls"
    TOOL_END = "closes tool calls"
    INNER = "separates parts of a tool call"


@dataclass(frozen=True, slots=True)
class Piece:
    """Text, or a mark (``mark``), or another special token that is not shown (``special``).

    ``shown`` is its number of characters in the response decoded without special tokens.
    """

    text: str
    shown: int
    mark: Mark | None = None
    special: bool = False


@dataclass(frozen=True)
class Vocabulary:
    """A tokenizer with its ``added`` tokens (id to text) and the ids of the ``special`` ones."""

    tokenizer: PreTrainedTokenizerBase
    added: Mapping[int, str]
    special: frozenset[int]

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase) -> Vocabulary:
        """Build it from a tokenizer."""
        added = tokenizer.backend_tokenizer.get_added_tokens_decoder()
        return cls(
            tokenizer,
            {index: token.content for index, token in added.items()},
            frozenset(index for index, token in added.items() if token.special),
        )


class PieceReader:
    """Turns the tokens of one response into pieces.

    Args:
        marks: text to meaning.
        silent: tokens that end a response; they are not part of its text.
    """

    def __init__(self, vocabulary: Vocabulary, marks: Mapping[str, Mark], silent: frozenset[int]) -> None:
        self._vocabulary = vocabulary
        self._decoder = IncrementalText(vocabulary.tokenizer)
        self._atomic = {index: marks[text] for index, text in vocabulary.added.items() if text in marks}
        atomic_texts = {vocabulary.added[index] for index in self._atomic}
        self._finder = _MarkFinder({text: mark for text, mark in marks.items() if text not in atomic_texts})
        self._silent = silent

    def feed(self, token_id: int) -> list[Piece]:
        """Return the pieces that ``token_id`` completes."""
        if token_id in self._silent:
            return self.flush()
        mark = self._atomic.get(token_id)
        special = token_id in self._vocabulary.special
        if mark is None and not special:
            return self._plain(self._decoder.feed(token_id))
        pieces = self.flush()
        shown = len(self._decoder.feed(token_id))
        return [*pieces, Piece(self._vocabulary.added[token_id], shown, mark, special=mark is None)]

    def flush(self) -> list[Piece]:
        """Return text that was held back, as plain text."""
        return [*self._plain(self._decoder.flush()), *self._finder.flush()]

    def _plain(self, text: str) -> list[Piece]:
        return self._finder.feed(text) if text else []


class _MarkFinder:
    """Splits text at marks that have no token in the vocabulary."""

    def __init__(self, marks: Mapping[str, Mark]) -> None:
        self._marks = marks
        longest_first = sorted(marks, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)))
        self._first = {mark[0] for mark in marks}
        self._longest = max(map(len, marks), default=0)
        self._held = ""

    def feed(self, text: str) -> list[Piece]:
        if not self._marks:
            return [Piece(text, len(text))]
        return list(self._split(self._held + text))

    def _split(self, text: str) -> Iterator[Piece]:
        start = 0
        for match in self._pattern.finditer(text):
            yield from _plain(text[start : match.start()])
            yield Piece(match.group(), len(match.group()), self._marks[match.group()])
            start = match.end()
        end = len(text) - self._partial(text[start:])
        yield from _plain(text[start:end])
        self._held = text[end:]

    def _partial(self, text: str) -> int:
        """Return the length of the longest suffix of ``text`` that begins a mark."""
        for size in range(min(self._longest - 1, len(text)), 0, -1):
            if text[-size] in self._first and any(mark.startswith(text[-size:]) for mark in self._marks):
                return size
        return 0

    def flush(self) -> list[Piece]:
        held, self._held = self._held, ""
        return list(_plain(held))


def _plain(text: str) -> Iterator[Piece]:
    if text:
        yield Piece(text, len(text))
