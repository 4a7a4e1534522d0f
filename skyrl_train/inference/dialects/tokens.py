"""How single tokens are spelt, for log-probs: as text and as bytes."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_WORD_START = "\N{LOWER ONE EIGHTH BLOCK}"  # how sentencepiece vocabularies write a space


class TokenText(NamedTuple):
    """One token. ``text`` has a replacement character where the token is only a part of a character; ``bytes`` is exact."""

    text: str
    bytes: list[int]


class TokenTexts:
    """Looks up how the tokens of one vocabulary are spelt; each is worked out once."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, TokenText] = {}

    def __getitem__(self, token_id: int) -> TokenText:
        known = self._known.get(token_id)
        if known is None:
            known = self._known[token_id] = self._spell(token_id)
        return known

    def entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        """A token with its log-prob, as OpenAI writes it."""
        text, spelt = self[token_id]
        return {"token": text, "bytes": spelt, "logprob": logprob}

    def _spell(self, token_id: int) -> TokenText:
        piece = str(self._tokenizer.convert_ids_to_tokens(token_id) or "")
        text = str(self._tokenizer.decode([token_id], skip_special_tokens=False))
        if (byte := _BYTE.fullmatch(piece)) is not None:
            return TokenText(text, [int(byte[1], 16)])
        if piece.startswith(_WORD_START) and not text.startswith(" "):
            text = " " + text  # a decoder takes the space from the first word of a text
        if _REPLACEMENT in text and piece and all(character in _BYTE_LEVEL for character in piece):
            return TokenText(text, [_BYTE_LEVEL[character] for character in piece])
        return TokenText(text, list(text.encode()))


def _byte_level_alphabet() -> dict[str, int]:
    """The printable characters that byte-level vocabularies write bytes with (GPT-2's table)."""
    shown = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in shown]
    alphabet = {chr(byte): byte for byte in shown}
    alphabet.update({chr(256 + place): byte for place, byte in enumerate(others)})
    return alphabet


_BYTE_LEVEL = _byte_level_alphabet()
