"""Tokens to text, one token at a time: what was handed out is never taken back, and no sequence of tokens is refused.

| vocabulary | a token is | its text |
|---|---|---|
| byte-level | bytes | as soon as they complete a character |
| byte fallback | text, or one byte (``<0x0A>``) | at once; a byte's as soon as it completes a character |
| other | text | at once |

Bytes that are no character become U+FFFD, and at most the three bytes of an unfinished character are held back. Valid
text is what the tokenizer's own ``decode`` gives. For stray bytes of a byte-fallback vocabulary it is not: the tokenizer
decides over a whole run of bytes at once, so that one stray byte would turn characters into U+FFFD that were handed out
long before. A special token has no text, and ends an unfinished character.
"""

from __future__ import annotations

import codecs
import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

REPLACEMENT = "\ufffd"

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_CACHED_TOKENIZERS = 8


class _Token(NamedTuple):
    """A token by itself: the bytes that it stands for, or None where it stands for text; and its text in either case."""

    data: bytes | None
    alone: str


@dataclass(frozen=True, eq=False)
class _Scheme:
    """How a tokenizer's decoder makes text, found by trying it. Each token is worked out once; ``None`` is no token."""

    backend: Tokenizer
    special: frozenset[int]
    byte_level: bool
    byte_fallback: bool
    strips_first_space: bool
    known: dict[int, _Token | None] = field(default_factory=dict)

    def token(self, token_id: int) -> _Token | None:
        """A token that is not special; None for a row of the model's output that no token belongs to."""
        if token_id in self.known:
            return self.known[token_id]
        spelt = self.backend.id_to_token(token_id)
        token = None if spelt is None else _Token(self.bytes_of(spelt), self.decode(token_id))
        self.known[token_id] = token
        return token

    def decode(self, *token_ids: int) -> str:
        return str(self.backend.decode(list(token_ids), skip_special_tokens=True))

    def bytes_of(self, token: str) -> bytes | None:
        """The bytes that the token stands for; None where it stands for text."""
        if self.byte_level:
            try:
                return bytes([_BYTES[letter] for letter in token])
            except KeyError:
                return token.encode()  # an added token is spelt as it is
        match = _BYTE_TOKEN.fullmatch(token) if self.byte_fallback else None
        return None if match is None else bytes([int(match[1], 16)])


@functools.lru_cache(maxsize=_CACHED_TOKENIZERS)
def _scheme_of(tokenizer: PreTrainedTokenizerBase) -> _Scheme:
    backend = tokenizer.backend_tokenizer
    decoder = backend.decoder
    added = backend.get_added_tokens_decoder()
    return _Scheme(
        backend,
        frozenset(index for index, token in added.items() if token.special),
        byte_level=decoder is not None and decoder.decode(["âĤ¬"]) == "€",
        byte_fallback=decoder is not None and decoder.decode(["<0xE2>", "<0x82>", "<0xAC>"]) == "€",
        strips_first_space=decoder is not None and decoder.decode(["<0x20>", "<0x20>"]) == " ",
    )


class IncrementalText:
    """The text of one response."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._scheme = _scheme_of(tokenizer)
        self._bytes = codecs.getincrementaldecoder("utf-8")("replace")
        self._last: int | None = None  # the token before, special ones left out
        self._last_text = ""

    def feed(self, token_id: int) -> str:
        """The text that the token makes certain; it may be empty."""
        scheme = self._scheme
        if token_id in scheme.special:
            return self.flush()
        token = scheme.token(token_id)
        if token is None:
            return ""
        if token.data is None:
            return self.flush() + self._plain(token_id, token.alone)
        text = self._bytes.decode(token.data)
        if scheme.byte_level:
            return text
        if self._last is None and scheme.strips_first_space:
            text = text.removeprefix(" ")
        self._last, self._last_text = token_id, token.alone
        return text

    def flush(self) -> str:
        """The text of an unfinished character, which nothing can complete any more."""
        text = self._bytes.decode(b"", final=True)
        self._bytes.reset()
        return text

    def _plain(self, token_id: int, alone: str) -> str:
        """Text may depend on the token before: whether there is one, and how that one ends."""
        text = alone
        if self._last is not None:
            both = self._scheme.decode(self._last, token_id)
            if both.startswith(self._last_text):
                text = both[len(self._last_text) :]
        self._last, self._last_text = token_id, alone
        return text


def text_of(tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int]) -> str:
    """The text of a whole response: what :class:`IncrementalText` makes of its tokens, joined."""
    scheme = _scheme_of(tokenizer)
    end = len(token_ids)
    while end and token_ids[end - 1] in scheme.special:
        end -= 1
    ids = list(token_ids[:end])
    if scheme.special.isdisjoint(ids):  # else a character could be cut in two by a special token
        text = scheme.decode(*ids)
        if REPLACEMENT not in text:
            return text
    response = IncrementalText(tokenizer)
    return "".join([*map(response.feed, ids), response.flush()])


def _letters() -> dict[str, int]:
    """The letter for each byte in byte-level vocabularies: itself where it can be seen, else one from U+0100 on."""
    seen = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(0x100) if byte not in set(seen)]
    return {chr(byte): byte for byte in seen} | {chr(0x100 + index): byte for index, byte in enumerate(hidden)}


_BYTES = _letters()
