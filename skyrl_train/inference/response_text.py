"""Tokens to text, one token at a time, and the stop strings in the text of a response.

Text that was handed out is never taken back, and every sequence of tokens has a text.

| vocabulary | a token is | its text |
|---|---|---|
| byte-level | bytes | as soon as they complete a character |
| byte fallback | text, or one byte (``<0x0A>``) | at once; a byte's as soon as it completes a character |
| other | text | at once |

Bytes that form no character become U+FFFD; at most the three bytes of an unfinished character are held back. Valid text
is exactly what the tokenizer's own ``decode`` returns. For stray bytes of a byte-fallback vocabulary it differs: the
tokenizer decides over a whole run of bytes at once, so that one stray byte would turn characters into U+FFFD that were
handed out long before. ``tokenizers.decoders.DecodeStream`` cannot be used: it raises on such bytes, and it cannot flush
an unfinished character. A special token has no text and ends an unfinished character.
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

# The letters that byte-level vocabularies write bytes with (GPT-2's table): letter -> byte. Printable bytes are written as
# themselves, the others as the letters from U+0100 on.
_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_OTHERS = sorted(set(range(0x100)) - set(_PRINTABLE))
BYTE_LEVEL = {chr(byte): byte for byte in _PRINTABLE} | {chr(0x100 + i): byte for i, byte in enumerate(_OTHERS)}


class _Token(NamedTuple):
    """A single token: the bytes that it stands for (None if it stands for text), and its text when decoded alone (empty in a
    byte-level vocabulary, where the bytes are enough)."""

    data: bytes | None
    alone: str


@dataclass(frozen=True, eq=False)
class _Scheme:
    """How a tokenizer's decoder makes text, found by probing it. Each token is looked up once; None: the id has no token."""

    backend: Tokenizer
    special: frozenset[int]
    byte_level: bool
    byte_fallback: bool
    strips_first_space: bool
    known: dict[int, _Token | None] = field(default_factory=dict)

    def token(self, token_id: int) -> _Token | None:
        """Return a token that is not special; None for a row of the model's output without a token."""
        if token_id in self.known:
            return self.known[token_id]
        token, spelt = None, self.backend.id_to_token(token_id)
        if spelt is not None:
            data = None
            if self.byte_level:
                try:
                    data = bytes([BYTE_LEVEL[letter] for letter in spelt])
                except KeyError:
                    data = spelt.encode()  # an added token is spelt out
            elif self.byte_fallback and (match := _BYTE_TOKEN.fullmatch(spelt)):
                data = bytes([int(match[1], 16)])
            token = _Token(data, "" if self.byte_level else self.decode([token_id]))
        self.known[token_id] = token
        return token

    def decode(self, token_ids: list[int]) -> str:
        return str(self.backend.decode(token_ids, skip_special_tokens=True))


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


def token_bytes(tokenizer: PreTrainedTokenizerBase, size: int) -> list[bytes]:
    """Return what tokens ``0 .. size - 1`` add to a text; empty for special tokens and for ids without a token."""
    scheme, tokens = _scheme_of(tokenizer), []
    for token_id in range(size):
        token = None if token_id in scheme.special else scheme.token(token_id)
        data = b"" if token is None else token.data
        if token is not None and data is None:
            # Some decoders remove the space before a text, so the text is read behind another one.
            alone, twice = token.alone, scheme.decode([token_id, token_id])
            data = (twice[len(alone) :] if twice.startswith(alone) else alone).encode()
        tokens.append(data or b"")
    return tokens


class IncrementalText:
    """Decodes one response incrementally."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._scheme = _scheme_of(tokenizer)
        self._bytes = codecs.getincrementaldecoder("utf-8")("replace")
        self._last: int | None = None  # the token before, special ones left out
        self._last_text = ""

    def feed(self, token_id: int) -> str:
        """Return the text that this token completes; it may be empty."""
        scheme = self._scheme
        if token_id in scheme.special:
            return self.flush()
        token = scheme.token(token_id)
        if token is None:
            return ""
        if token.data is not None:
            text = self._bytes.decode(token.data)
            if scheme.byte_level:
                return text
            # Some decoders remove the space that their tokenizer puts before a text.
            if self._last is None and scheme.strips_first_space:
                text = text.removeprefix(" ")
        else:
            text = token.alone
            # The text after its predecessor may differ from the text alone, usually by a space at the beginning.
            if self._last is not None:
                both = scheme.decode([self._last, token_id])
                if both.startswith(self._last_text):
                    text = both[len(self._last_text) :]
            text = self.flush() + text
        self._last, self._last_text = token_id, token.alone
        return text

    def flush(self) -> str:
        """Return the replacement text of an unfinished character."""
        text = self._bytes.decode(b"", final=True)
        self._bytes.reset()
        return text


def text_of(tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int]) -> str:
    """Return the text of a whole response: the joined output of :class:`IncrementalText`."""
    scheme = _scheme_of(tokenizer)
    end = len(token_ids)
    # Most responses end with a special token, which has no text.
    while end and token_ids[end - 1] in scheme.special:
        end -= 1
    # The tokenizer decodes a whole response faster; the slow path is exact where it is not.
    ids = list(token_ids[:end])
    if scheme.special.isdisjoint(ids):  # a special token could cut a character in two
        text = scheme.decode(ids)
        if REPLACEMENT not in text:
            return text
    response = IncrementalText(tokenizer)
    return "".join([*map(response.feed, ids), response.flush()])


class ResponseText:
    """Decodes a response, finds the token that completes a stop string, and hands out text that is certain.

    The joined results of :meth:`take` and :meth:`rest` are the result of :meth:`whole`.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop: tuple[str, ...] = ()) -> None:
        self._decoder = IncrementalText(tokenizer)
        self._parts: list[str] = []
        self._stop = stop
        self._longest = max(map(len, stop), default=0)
        self._tail = ""
        self._length = 0
        self._untaken: list[str] = []
        self._taken = 0
        self.text_end: int | None = None  # characters of the response before the stop string, once it is found
        self.stop_string: str | None = None

    def feed(self, token_id: int, *, may_stop: bool) -> bool:
        """Take the next token. Returns True when it completes a stop string and ``may_stop`` (past ``min_tokens``) allows it."""
        text = self._decoder.feed(token_id)
        if not text:
            return False
        self._append(text)
        if not self._stop:
            return False
        # A stop string may begin in earlier tokens: search the new text together with the end of the old one.
        window = self._tail + text
        self._tail = window[-self._longest :]
        if not may_stop:
            return False
        # A match that ended before this token's text was already reported (or not allowed to stop).
        first_end = len(window) - len(text) + 1
        found = [(window.find(stop, max(0, first_end - len(stop))), stop) for stop in self._stop]
        found = [match for match in found if match[0] >= 0]
        if not found:
            return False
        start, self.stop_string = min(found, key=lambda match: match[0])
        self.text_end = self._length - len(window) + start
        return True

    def _append(self, text: str) -> None:
        self._length += len(text)
        self._parts.append(text)
        self._untaken.append(text)

    def take(self) -> str:
        """Return the text since the last call, up to a possible beginning of a stop string."""
        if not self._untaken:
            return ""
        text = "".join(self._untaken)
        end = self.text_end if self.text_end is not None else self._length - self._held()
        # Only text before ``end`` is certain: the rest may belong to a stop string.
        certain, rest = text[: max(0, end - self._taken)], text[max(0, end - self._taken) :]
        self._taken += len(certain)
        self._untaken = [rest] if rest else []
        return certain

    def whole(self) -> str:
        """Return the text of the finished response, up to its stop string."""
        if unfinished := self._decoder.flush():
            self._append(unfinished)
        return "".join(self._parts)[: self.text_end]

    def rest(self, whole: str) -> str:
        """Return the part of ``whole``, the response's text, that was not handed out yet."""
        rest = whole[self._taken :]
        self._taken, self._untaken = len(whole), []
        return rest

    def _held(self) -> int:
        """Return how many characters at the end could begin a stop string."""
        return next(
            (
                size
                for size in range(min(self._longest - 1, len(self._tail)), 0, -1)
                if any(stop.startswith(self._tail[-size:]) for stop in self._stop)
            ),
            0,
        )
