"""The text of a response as its tokens arrive, and the stop strings in it, across any segment boundary (SEMANTICS 2.4)."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


# A character has at most four bytes: when this many tokens in a row make no text, hardly any of them ever will.
_MAX_UNDECODED_TOKENS = 16


class ResponseText:
    """Decodes incrementally, reports the token that completes a stop string, and hands out text that is certain.

    Decoding one token at a time is wrong for byte-level vocabularies; the tokenizers library's ``DecodeStream`` holds
    text back until it is a valid prefix of the whole decoding. Tokens that make no text for too long are decoded as they
    are, because holding them back costs the square of their number: a diverged policy samples stray bytes for ever.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop: tuple[str, ...] = ()) -> None:
        self._backend = tokenizer.backend_tokenizer
        self._begin_stream()
        self._stop = stop
        self._longest = max(map(len, stop), default=0)
        self._tail = ""
        self._length = 0
        self._untaken: list[str] = []
        self._taken = 0
        self.text_end: int | None = None  # characters of the response before the stop string, once it is found
        self.stop_string: str | None = None

    @property
    def stops(self) -> bool:
        """Whether there are stop strings to look for."""
        return bool(self._stop)

    def feed(self, token_id: int, *, may_stop: bool) -> bool:
        """Takes the next token; True when it completes a stop string (and ``may_stop``, that is, past ``min_tokens``)."""
        text = self._decode(token_id)
        if not text:
            return False
        self._length += len(text)
        self._untaken.append(text)
        if not self._stop:
            return False
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

    def _begin_stream(self) -> None:
        from tokenizers.decoders import DecodeStream

        self._stream = DecodeStream(skip_special_tokens=True)
        self._undecoded: list[int] = []

    def _decode(self, token_id: int) -> str:
        text = self._stream.step(self._backend, token_id) or ""
        if text:
            self._undecoded.clear()
        else:
            self._undecoded.append(token_id)
            if len(self._undecoded) == _MAX_UNDECODED_TOKENS:
                text = str(self._backend.decode(self._undecoded, skip_special_tokens=True))
                self._begin_stream()
        return text

    def take(self) -> str:
        """The text since the last call, up to where a stop string may have begun."""
        if not self._untaken:
            return ""
        text = "".join(self._untaken)
        end = self.text_end if self.text_end is not None else self._length - self._held()
        certain, rest = text[: max(0, end - self._taken)], text[max(0, end - self._taken) :]
        self._taken += len(certain)
        self._untaken = [rest] if rest else []
        return certain

    def rest(self, whole: str) -> str:
        """What of ``whole``, the decoded response up to its end, was not handed out yet."""
        rest = whole[self._taken :]
        self._taken, self._untaken = len(whole), []
        return rest

    def _held(self) -> int:
        """Characters at the end that could be the beginning of a stop string."""
        return next(
            (
                size
                for size in range(min(self._longest - 1, len(self._tail)), 0, -1)
                if any(stop.startswith(self._tail[-size:]) for stop in self._stop)
            ),
            0,
        )
