"""The text of a response as its tokens arrive, and the stop strings in it, across any segment boundary (SEMANTICS 2.4)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from skyrl_train.inference.incremental_text import IncrementalText

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class ResponseText:
    """Decodes incrementally, reports the token that completes a stop string, and hands out text that is certain.

    What :meth:`take` and :meth:`rest` hand out, joined, is what :meth:`whole` returns.
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

    @property
    def stops(self) -> bool:
        """Whether there are stop strings to look for."""
        return bool(self._stop)

    def feed(self, token_id: int, *, may_stop: bool) -> bool:
        """Takes the next token; True when it completes a stop string (and ``may_stop``, that is, past ``min_tokens``)."""
        text = self._decoder.feed(token_id)
        if not text:
            return False
        self._append(text)
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

    def _append(self, text: str) -> None:
        self._length += len(text)
        self._parts.append(text)
        self._untaken.append(text)

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

    def whole(self) -> str:
        """The text of the response, which has ended, up to its stop string."""
        if unfinished := self._decoder.flush():
            self._append(unfinished)
        return "".join(self._parts)[: self.text_end]

    def rest(self, whole: str) -> str:
        """What of ``whole``, the response's text, was not handed out yet."""
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
