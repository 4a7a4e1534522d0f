"""The output of OpenAI's responses: items, the response object, and the events of a stream."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from skyrl_train.inference.chat.requests import AssistantMessage, ChatChoice, ChatEvent
from skyrl_train.inference.openai.dialect import Frame, ResponseContext, training_data
from skyrl_train.inference.openai.errors import DialectError

_ID_PREFIXES = {"reasoning": "rs", "message": "msg", "function_call": "fc"}
_EVENT_NAMES = {
    "reasoning": "response.reasoning_text",
    "message": "response.output_text",
    "function_call": "response.function_call_arguments",
}


@dataclass(slots=True)
class _OutputItem:
    """An output item. ``call_index`` is the position of a function call among the calls of its message."""

    kind: str  # a key of _ID_PREFIXES
    id: str
    text: str = ""  # of a function call: its arguments
    call_index: int | None = None
    call_id: str = ""
    name: str = ""

    @classmethod
    def numbered(cls, kind: str, unique: str, position: int, **fields: Any) -> _OutputItem:
        """Return an item whose id names the response, so that items that come back can be grouped by response."""
        return cls(kind, f"{_ID_PREFIXES[kind]}_{unique}_{position}", **fields)

    def shown(self, status: str, logprobs: Sequence[Mapping[str, Any]] = ()) -> dict[str, Any]:
        """Return the item as the client sees it."""
        head = {"id": self.id, "type": self.kind, "status": status}
        if self.kind == "function_call":
            return {**head, "call_id": self.call_id, "name": self.name, "arguments": self.text}
        if self.kind == "reasoning":
            content = [{"type": "reasoning_text", "text": self.text}]
            return {**head, "summary": [], "content": content, "encrypted_content": None}
        part = {"type": "output_text", "text": self.text, "annotations": [], "logprobs": list(logprobs)}
        return {**head, "role": "assistant", "content": [part]}


def output_items(choice: ChatChoice, unique: str, entries: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Convert a sampled message into at least one item: reasoning, text, function calls.

    Args:
        unique: the identity of the response, part of the items' ids.
        entries: the sampled tokens if the client wants log-probs, otherwise none.
    """
    message = choice.message
    reasoning, items = message.reasoning_content or "", []
    if reasoning:
        items.append(_OutputItem.numbered("reasoning", unique, 0, text=reasoning).shown("completed"))
    if message.content or not (items or message.tool_calls):
        item = _OutputItem.numbered("message", unique, len(items), text=message.content)
        items.append(item.shown("completed", tokens_of_text(entries, message.content, reasoning)))
    for call in message.tool_calls:
        fields = {"text": call.arguments, "call_id": call.id, "name": call.name}
        items.append(_OutputItem.numbered("function_call", unique, len(items), **fields).shown("completed"))
    # The token limit can only cut off what was sampled last.
    items[-1]["status"] = _last_status(choice)
    return items


def _last_status(choice: ChatChoice) -> str:
    return "incomplete" if choice.finish_reason == "length" else "completed"


def tokens_of_text(entries: Sequence[Mapping[str, Any]], text: str, after: str) -> list[Mapping[str, Any]]:
    """Return the entries of the tokens that spell ``text`` after the reasoning ``after``.

    The first and the last token may spell more than ``text``. Returns an empty list if the tokens do not spell it, because
    a parser joined it from several pieces.
    """
    if not text or not entries:
        return []
    # Bytes, because a character may consist of several tokens.
    spelt = b"".join(bytes(entry["bytes"]) for entry in entries)
    # Search after the reasoning, because the same words may occur in it.
    start = max(spelt.find(after.encode()), 0) + len(after.encode())
    start = spelt.find(text.encode(), start)
    if start < 0:
        return []
    found, place, end = [], 0, start + len(text.encode())
    for entry in entries:
        following = place + len(entry["bytes"])
        if place < end and following > start:  # the token overlaps the text
            found.append(entry)
        place = following
    return found


@dataclass(frozen=True, slots=True)
class ResponseBody:
    """The response object. ``echo`` has the fields that repeat the request; ``token_ids`` adds the ``skyrl`` object."""

    model: str
    echo: Mapping[str, Any]
    token_ids: bool
    context: ResponseContext

    def ended(self, choice: ChatChoice, output: list[dict[str, Any]], reused_tokens: int | None) -> dict[str, Any]:
        """Return the finished object; ``reused_tokens`` is None in streams, which do not know it."""
        incomplete = choice.finish_reason == "length"
        generation = choice.generation
        input_tokens, output_tokens = len(generation.prompt_token_ids), len(generation.token_ids)
        body = self.body("incomplete" if incomplete else "completed", output)
        body["incomplete_details"] = {"reason": "max_output_tokens"} if incomplete else None
        body["usage"] = {
            "input_tokens": input_tokens,
            "input_tokens_details": {"cached_tokens": generation.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": output_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": input_tokens + output_tokens,
        }
        if self.token_ids:
            body["skyrl"] = {"prompt_token_ids": generation.prompt_token_ids, **training_data(generation)}
            if reused_tokens is not None:
                body["skyrl"]["reused_tokens"] = reused_tokens
        return body

    def failed(self, error: DialectError, output: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the object after an error, with the items that were complete by then."""
        code = {429: "rate_limit_exceeded"}.get(
            error.status, "server_error" if error.status >= 500 else "invalid_prompt"
        )
        return {**self.body("failed", output), "error": {"code": code, "message": error.message}}

    def body(self, status: str, output: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the object with the output so far."""
        return {
            "id": f"resp_{self.context.unique}",
            "object": "response",
            "created_at": self.context.created,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "model": self.model,
            "output": output,
            "usage": None,
            **self.echo,
        }


class ResponsesStream:
    """Formats a response as events: created, in_progress; per item added, deltas, done; completed, incomplete or failed.

    One item is open at a time. Text that a parser returns after a call gets a new item.

    Args:
        logprobs: the client wants log-probs, which are sent at the end of each text.
        on_end: called with the finished object and the whole message before the last event is returned.
    """

    def __init__(
        self, body: ResponseBody, logprobs: bool, on_end: Callable[[Mapping[str, Any], AssistantMessage], None]
    ) -> None:
        self._body = body
        self._logprobs = logprobs
        self._on_end = on_end
        self._entries: list[dict[str, Any]] = []  # the tokens sampled so far, if the client wants log-probs
        self._sequence_number = 0  # of the next event
        self._done: list[dict[str, Any]] = []
        self._open: _OutputItem | None = None
        self._reasoning = ""

    def opened(self, prompt_token_ids: list[int]) -> list[Frame]:
        """Return created and in_progress, which show nothing of the prompt."""
        body = self._body.body("in_progress", [])
        return [self._frame("response.created", response=body), self._frame("response.in_progress", response=body)]

    def event(self, event: ChatEvent) -> list[Frame]:
        """Return the deltas of an event, and the end of the response if it is the last event."""
        delta, choice = event.delta, event.choice
        frames: list[Frame] = []
        if self._logprobs:
            chunk, texts = event.chunk, self._body.context.tokens
            self._entries += texts.entries(chunk.token_ids, chunk.logprobs, chunk.top_logprobs)
        self._reasoning += delta.reasoning_content
        for kind, text in (("reasoning", delta.reasoning_content), ("message", delta.content)):
            if text:
                if self._open is None or self._open.kind != kind:
                    frames += self._start(kind)
                frames.append(self._delta(text))
        for call in delta.tool_calls:
            if self._open is None or self._open.call_index != call.index:
                frames += self._start(
                    "function_call", call_index=call.index, call_id=call.id or "", name=call.name or ""
                )
            if call.arguments:
                frames.append(self._delta(call.arguments))
        if choice is not None:
            if self._open is None and not self._done:  # a response has at least one item
                frames += self._start("message")
            frames += self._finish(_last_status(choice))
            body = self._body.ended(choice, self._done, None)
            self._on_end(body, choice.message)  # before the client can name this response in its next request
            frames.append(self._frame(f"response.{body['status']}", response=body))
        return frames

    def closed(self) -> list[Frame]:
        """Return nothing: the last event has ended the response."""
        return []

    def failed(self, error: DialectError) -> list[Frame]:
        """Return the event that ends a stream after an error, with the items that were done."""
        return [self._frame("response.failed", response=self._body.failed(error, self._done))]

    def _start(self, kind: str, **fields: Any) -> list[Frame]:
        """End the open item, and open a new one."""
        frames = self._finish("completed")
        position = len(self._done)
        self._open = _OutputItem.numbered(kind, self._body.context.unique, position, **fields)
        shown = self._open.shown("in_progress")
        if kind == "function_call":
            return [*frames, self._frame("response.output_item.added", output_index=position, item=shown)]
        part = shown["content"].pop()  # the part has its own event
        return [
            *frames,
            self._frame("response.output_item.added", output_index=position, item=shown),
            self._part_frame("response.content_part.added", part=part),
        ]

    def _delta(self, text: str) -> Frame:
        assert self._open is not None
        self._open.text += text
        logprobs: dict[str, Any] = {"logprobs": []} if self._open.kind == "message" else {}
        return self._part_frame(f"{_EVENT_NAMES[self._open.kind]}.delta", delta=text, **logprobs)

    def _finish(self, status: str) -> list[Frame]:
        """End the open item, if there is one."""
        if self._open is None:
            return []
        item = self._open
        found = tokens_of_text(self._entries, item.text, self._reasoning) if item.kind == "message" else ()
        shown = item.shown(status, found)
        if item.kind == "function_call":
            frames = [self._part_frame(f"{_EVENT_NAMES[item.kind]}.done", arguments=item.text)]
        else:
            part = shown["content"][0]
            logprobs = {"logprobs": part["logprobs"]} if item.kind == "message" else {}
            frames = [
                self._part_frame(f"{_EVENT_NAMES[item.kind]}.done", text=item.text, **logprobs),
                self._part_frame("response.content_part.done", part=part),
            ]
        frames.append(self._frame("response.output_item.done", output_index=len(self._done), item=shown))
        self._done.append(shown)  # its length is the output_index of the next item
        self._open = None
        return frames

    def _part_frame(self, name: str, **fields: Any) -> Frame:
        item = self._open
        assert item is not None
        place = {} if item.kind == "function_call" else {"content_index": 0}
        return self._frame(name, item_id=item.id, output_index=len(self._done), **place, **fields)

    def _frame(self, name: str, **fields: Any) -> Frame:
        number, self._sequence_number = self._sequence_number, self._sequence_number + 1
        return Frame({"type": name, "sequence_number": number, **fields}, name)
