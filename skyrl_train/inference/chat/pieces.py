"""Sampled tokens as text and marks, one token at a time.

    token ──> text as far as it is certain ──> split at marks ──> Piece ...

A mark encloses reasoning or tool calls in a chat format (``<think>``, ``<tool_call>``). If the vocabulary has a token for
it, only that token counts, and the same letters spelled out are text; otherwise the letters count. A character or a mark
that may still be incomplete is held back.

Tokens are decoded one at a time, so that the pieces do not depend on how tokens are grouped into calls.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
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


class Vocabulary:
    """A tokenizer with its ``added`` tokens (id to text) and the ids of the ``special`` ones."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        added = tokenizer.backend_tokenizer.get_added_tokens_decoder()
        self.tokenizer = tokenizer
        self.added: Mapping[int, str] = {index: token.content for index, token in added.items()}
        self.special = frozenset(index for index, token in added.items() if token.special)


class PieceReader:
    """Turns the tokens of one response into pieces.

    Args:
        marks: text to meaning.
        silent: tokens that end a response; they are not part of its text.
    """

    def __init__(self, vocabulary: Vocabulary, marks: Mapping[str, Mark], silent: frozenset[int]) -> None:
        self._vocabulary = vocabulary
        self._decoder = IncrementalText(vocabulary.tokenizer)
        self._marks = marks
        self._atomic = {index: marks[text] for index, text in vocabulary.added.items() if text in marks}
        self._silent = silent
        # Marks that are not one token are looked for in the text. Longest first: one may begin with another.
        spelt = set(marks) - {vocabulary.added[index] for index in self._atomic}
        self._spelt = sorted(spelt, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, self._spelt)))
        self._first_letters = {mark[0] for mark in spelt}
        self._held = ""  # text that may begin a mark

    def feed(self, token_id: int) -> list[Piece]:
        """Return the pieces that ``token_id`` completes."""
        if token_id in self._silent:
            return self.flush()
        mark = self._atomic.get(token_id)
        special = token_id in self._vocabulary.special
        if mark is None and not special:
            return self._split(self._decoder.feed(token_id))
        # A special token ends an unfinished character, and text before it can no longer become a mark.
        pieces = self.flush()
        shown = len(self._decoder.feed(token_id))
        return [*pieces, Piece(self._vocabulary.added[token_id], shown, mark, special=mark is None)]

    def flush(self) -> list[Piece]:
        """Return text that was held back, as plain text."""
        pieces = self._split(self._decoder.flush())
        held, self._held = self._held, ""
        return [*pieces, Piece(held, len(held))] if held else pieces

    def _split(self, text: str) -> list[Piece]:
        """Split text at the marks that it spells; hold back an end that may begin a mark."""
        if not text:
            return []
        if not self._spelt:
            return [Piece(text, len(text))]
        text = self._held + text
        pieces, start = [], 0
        for match in self._pattern.finditer(text):
            before, found = text[start : match.start()], match.group()
            pieces += [Piece(before, len(before)), Piece(found, len(found), self._marks[found])]
            start = match.end()
        # The end may be the first letters of a mark whose other letters come with later tokens.
        rest = text[start:]
        held = 0
        for size in range(min(len(self._spelt[0]) - 1, len(rest)), 0, -1):
            # The first letter alone rules out most suffixes.
            if rest[-size] in self._first_letters and any(mark.startswith(rest[-size:]) for mark in self._spelt):
                held = size
                break
        certain = rest[: len(rest) - held]
        self._held = rest[len(rest) - held :]
        pieces.append(Piece(certain, len(certain)))
        return [piece for piece in pieces if piece.text]
