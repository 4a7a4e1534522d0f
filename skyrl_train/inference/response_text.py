"""The text of a response as its tokens arrive, and the stop strings in it, across any segment boundary (SEMANTICS 2.4)."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class ResponseText:
    """Decodes incrementally, reports the token that completes a stop string, and hands out text that is certain.

    Decoding one token at a time is wrong for byte-level vocabularies; the tokenizers library's ``DecodeStream`` holds
    text back until it is a valid prefix of the whole decoding.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop: tuple[str, ...] = ()) -> None:
        from tokenizers.decoders import DecodeStream

        self._backend = tokenizer.backend_tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)
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
        text = self._stream.step(self._backend, token_id) or ""
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
