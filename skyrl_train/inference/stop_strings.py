"""Finds stop strings in a response as its tokens arrive, across any segment boundary (SEMANTICS 2.4)."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class StopStringMatcher:
    """Decodes incrementally and reports the token that completes a stop string.

    Decoding one token at a time is wrong for byte-level vocabularies; the tokenizers library's ``DecodeStream`` holds
    text back until it is a valid prefix of the whole decoding.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop: tuple[str, ...]) -> None:
        from tokenizers.decoders import DecodeStream

        self._backend = tokenizer.backend_tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)
        self._stop = stop
        self._longest = max(map(len, stop))
        self._tail = ""
        self._length = 0
        self.text_end: int | None = None  # characters of the response before the stop string, once it is found

    def feed(self, token_id: int, *, may_stop: bool) -> bool:
        """Takes the next token; True when it completes a stop string (and ``may_stop``, that is, past ``min_tokens``)."""
        text = self._stream.step(self._backend, token_id) or ""
        self._length += len(text)
        window = self._tail + text
        self._tail = window[-self._longest :]
        if not may_stop:
            return False
        # A match that ended before this token's text was already reported (or not allowed to stop).
        first_end = len(window) - len(text) + 1
        starts = [window.find(stop, max(0, first_end - len(stop))) for stop in self._stop]
        found = [start for start in starts if start >= 0]
        if not text or not found:
            return False
        self.text_end = self._length - len(window) + min(found)
        return True
