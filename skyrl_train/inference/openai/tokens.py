"""The spelling of single tokens as text and bytes, for log-probs."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, NamedTuple

from skyrl_train.inference.response_text import BYTE_LEVEL, REPLACEMENT

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_WORD_START = "\N{LOWER ONE EIGHTH BLOCK}"  # how sentencepiece vocabularies write a space


class TokenText(NamedTuple):
    """One token. ``text`` has a replacement character if the token is only part of a character; ``bytes`` is exact."""

    text: str
    bytes: list[int]


class TokenTexts:
    """Caches the spelling of a vocabulary's tokens."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, TokenText] = {}

    def __getitem__(self, token_id: int) -> TokenText:
        known = self._known.get(token_id)
        if known is None:
            known = self._known[token_id] = self._spell(token_id)
        return known

    def entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        """Return a token with its log-prob in OpenAI's shape."""
        text, spelt = self[token_id]
        return {"token": text, "bytes": spelt, "logprob": logprob}

    def _spell(self, token_id: int) -> TokenText:
        piece = str(self._tokenizer.convert_ids_to_tokens(token_id) or "")
        text = str(self._tokenizer.decode([token_id], skip_special_tokens=False))
        if (byte := _BYTE.fullmatch(piece)) is not None:
            return TokenText(text, [int(byte[1], 16)])
        if piece.startswith(_WORD_START) and not text.startswith(" "):
            text = " " + text  # decoders drop the space before the first word
        if REPLACEMENT in text and piece and all(character in BYTE_LEVEL for character in piece):
            return TokenText(text, [BYTE_LEVEL[character] for character in piece])
        return TokenText(text, list(text.encode()))
