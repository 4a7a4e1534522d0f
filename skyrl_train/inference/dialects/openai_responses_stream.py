"""A response of OpenAI's dialect as events."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from skyrl_train.inference.chat.messages import ToolCallDelta
from skyrl_train.inference.chat.requests import ChatChoice, ChatEvent
from skyrl_train.inference.dialects.dialect import Frame
from skyrl_train.inference.dialects.errors import DialectError
from skyrl_train.inference.dialects.openai_responses_output import (
    ResponseBody,
    SampledTokens,
    call_item,
    item_id,
    last_status,
    message_item,
    reasoning_item,
)

_PREFIXES = {"reasoning": "rs", "message": "msg", "function_call": "fc"}
_PIECES = {
    "reasoning": "response.reasoning_text",
    "message": "response.output_text",
    "function_call": "response.function_call_arguments",
}


@dataclass(slots=True)
class _Open:
    """The item that is being written. ``call`` is the number of its call, None of other items."""

    kind: str
    id: str
    call: int | None = None
    call_id: str = ""
    name: str = ""
    text: str = ""


class ResponsesStream:
    """created, in_progress; every item from added to done with its deltas between; completed, incomplete or failed.

    One item is open at a time. What a parser gives later than its place (text behind a call) gets an item of its own.
    ``logprobs`` is given where the caller asked for log-probs: they come when a text is done.
    """

    def __init__(self, body: ResponseBody, logprobs: SampledTokens | None) -> None:
        self._body = body
        self._logprobs = logprobs
        self._number = 0  # of the next event
        self._done: list[dict[str, Any]] = []
        self._open: _Open | None = None
        self._reasoning = ""

    def opened(self) -> list[Frame]:
        """created and in_progress."""
        body = self._body.in_progress()
        return [self._frame("response.created", response=body), self._frame("response.in_progress", response=body)]

    def event(self, event: ChatEvent) -> list[Frame]:
        """What the event adds to the items, and the end of the response where it is the last."""
        delta, frames = event.delta, []
        if self._logprobs is not None:
            self._logprobs.add(event.chunk.token_ids, event.chunk.logprobs, event.chunk.top_logprobs)
        if delta.reasoning_content:
            self._reasoning += delta.reasoning_content
            frames += self._go_on("reasoning", delta.reasoning_content)
        if delta.content:
            frames += self._go_on("message", delta.content)
        for call in delta.tool_calls:
            frames += self._call(call)
        if event.choice is not None:
            frames += self._end(event.choice)
        return frames

    def closed(self) -> list[Frame]:
        """Nothing: the last event has said it all."""
        return []

    def failed(self, error: DialectError) -> list[Frame]:
        """failed, with the items that were done."""
        return [self._frame("response.failed", response=self._body.failed(error, self._done))]

    def _end(self, choice: ChatChoice) -> list[Frame]:
        frames = []
        if self._open is None and not self._done:
            frames += self._add(_Open("message", self._next_id("message")))
        frames += self._finish(last_status(choice))
        body = self._body.ended(choice, self._done, None)
        return [*frames, self._frame(f"response.{body['status']}", response=body)]

    def _go_on(self, kind: str, text: str) -> list[Frame]:
        frames = []
        if self._open is None or self._open.kind != kind:
            frames += self._finish("completed")
            frames += self._add(_Open(kind, self._next_id(kind)))
        return [*frames, *self._piece(text)]

    def _call(self, call: ToolCallDelta) -> list[Frame]:
        frames = []
        if self._open is None or self._open.call != call.index:
            frames += self._finish("completed")
            opened = _Open("function_call", self._next_id("function_call"), call.index, call.id or "", call.name or "")
            frames += self._add(opened)
        return [*frames, *(self._piece(call.arguments) if call.arguments else [])]

    def _next_id(self, kind: str) -> str:
        return item_id(_PREFIXES[kind], self._body.context.unique, len(self._done))

    def _add(self, item: _Open) -> list[Frame]:
        self._open = item
        shown = self._item("in_progress")
        if item.kind == "function_call":
            return [self._item_frame("response.output_item.added", shown)]
        part = shown["content"].pop()
        return [
            self._item_frame("response.output_item.added", shown),
            self._part_frame("response.content_part.added", part=part),
        ]

    def _piece(self, text: str) -> list[Frame]:
        item = self._current()
        item.text += text
        return [self._part_frame(f"{_PIECES[item.kind]}.delta", delta=text, **_no_logprobs(item))]

    def _finish(self, status: str) -> list[Frame]:
        """Ends the open item, if there is one."""
        if self._open is None:
            return []
        item, shown = self._open, self._item(status)
        if item.kind == "function_call":
            frames = [self._part_frame(f"{_PIECES[item.kind]}.done", arguments=item.text)]
        else:
            part = shown["content"][0]
            logprobs = {"logprobs": part["logprobs"]} if item.kind == "message" else {}
            frames = [
                self._part_frame(f"{_PIECES[item.kind]}.done", text=item.text, **logprobs),
                self._part_frame("response.content_part.done", part=part),
            ]
        frames.append(self._item_frame("response.output_item.done", shown))
        self._done.append(shown)
        self._open = None
        return frames

    def _item(self, status: str) -> dict[str, Any]:
        item = self._current()
        if item.kind == "reasoning":
            return reasoning_item(item.id, item.text, status)
        if item.kind == "function_call":
            return call_item(item.id, item.call_id, item.name, item.text, status)
        found = [] if self._logprobs is None else self._logprobs.of_text(item.text, self._reasoning)
        return message_item(item.id, item.text, status, found)

    def _current(self) -> _Open:
        assert self._open is not None
        return self._open

    def _item_frame(self, name: str, item: dict[str, Any]) -> Frame:
        return self._frame(name, output_index=len(self._done), item=item)

    def _part_frame(self, name: str, **fields: Any) -> Frame:
        item = self._current()
        place = {} if item.kind == "function_call" else {"content_index": 0}
        return self._frame(name, item_id=item.id, output_index=len(self._done), **place, **fields)

    def _frame(self, name: str, **fields: Any) -> Frame:
        number, self._number = self._number, self._number + 1
        return Frame({"type": name, "sequence_number": number, **fields}, name)


def _no_logprobs(item: _Open) -> dict[str, list[Any]]:
    return {"logprobs": []} if item.kind == "message" else {}
