"""The output of OpenAI's responses: items, the response object, and the events of a stream."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from skyrl_train.inference.chat.messages import AssistantMessage, ToolCallDelta
from skyrl_train.inference.chat.requests import ChatChoice, ChatEvent
from skyrl_train.inference.interface import TopLogprobs
from skyrl_train.inference.openai.dialect import Frame, ResponseContext
from skyrl_train.inference.openai.errors import DialectError
from skyrl_train.inference.openai.tokens import TokenTexts

_ID_PREFIXES = {"reasoning": "rs", "message": "msg", "function_call": "fc"}
_EVENT_NAMES = {
    "reasoning": "response.reasoning_text",
    "message": "response.output_text",
    "function_call": "response.function_call_arguments",
}


def _item_id(kind: str, unique: str, position: int) -> str:
    """Return an id that names the response, so that items that come back can be grouped by response."""
    return f"{_ID_PREFIXES[kind]}_{unique}_{position}"


def _reasoning_item(item_id: str, text: str, status: str) -> dict[str, Any]:
    return {
        "id": item_id,
        "type": "reasoning",
        "status": status,
        "summary": [],
        "content": [{"type": "reasoning_text", "text": text}],
        "encrypted_content": None,
    }


def _message_item(item_id: str, text: str, status: str, logprobs: Sequence[Mapping[str, Any]] = ()) -> dict[str, Any]:
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs)}
    return {"id": item_id, "type": "message", "status": status, "role": "assistant", "content": [part]}


def _call_item(item_id: str, call_id: str, name: str, arguments: str, status: str) -> dict[str, Any]:
    return {
        "id": item_id,
        "type": "function_call",
        "status": status,
        "call_id": call_id,
        "name": name,
        "arguments": arguments,
    }


def _last_status(choice: ChatChoice) -> str:
    """Return the status of the last item; only that one can be incomplete."""
    return "incomplete" if choice.finish_reason == "length" else "completed"


def output_items(choice: ChatChoice, unique: str, logprobs: SampledTokens | None) -> list[dict[str, Any]]:
    """Convert a sampled message into at least one item: reasoning, text, function calls.

    Args:
        unique: the identity of the response, part of the items' ids.
        logprobs: the sampled tokens if the client wants log-probs.
    """
    message = choice.message
    items = []
    if message.reasoning_content:
        items.append(_reasoning_item(_item_id("reasoning", unique, 0), message.reasoning_content, "completed"))
    if message.content or not (items or message.tool_calls):
        found = [] if logprobs is None else logprobs.of_text(message.content, message.reasoning_content or "")
        items.append(_message_item(_item_id("message", unique, len(items)), message.content, "completed", found))
    for call in message.tool_calls:
        item_id = _item_id("function_call", unique, len(items))
        items.append(_call_item(item_id, call.id, call.name, call.arguments, "completed"))
    # The token limit can only cut off what was sampled last.
    items[-1]["status"] = _last_status(choice)
    return items


@dataclass(frozen=True, slots=True)
class ResponseBody:
    """The response object. ``echo`` has the fields that repeat the request; ``token_ids`` adds the ``skyrl`` object."""

    model: str
    echo: Mapping[str, Any]
    token_ids: bool
    context: ResponseContext

    def in_progress(self) -> dict[str, Any]:
        """Return the object before anything is sampled."""
        return self._body("in_progress", [])

    def ended(self, choice: ChatChoice, output: list[dict[str, Any]], reused_tokens: int | None) -> dict[str, Any]:
        """Return the finished object; ``reused_tokens`` is None in streams, which do not know it."""
        incomplete = choice.finish_reason == "length"
        generation = choice.generation
        input_tokens, output_tokens = len(generation.prompt_token_ids), len(generation.token_ids)
        body = self._body("incomplete" if incomplete else "completed", output)
        body["incomplete_details"] = {"reason": "max_output_tokens"} if incomplete else None
        body["usage"] = {
            "input_tokens": input_tokens,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": output_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": input_tokens + output_tokens,
        }
        if self.token_ids:
            body["skyrl"] = {
                "prompt_token_ids": generation.prompt_token_ids,
                "token_ids": generation.token_ids,
                "logprobs": generation.logprobs,
                "versions": generation.versions,
                "segments": generation.segments,
                "restarts": generation.restarts,
            }
            if reused_tokens is not None:
                body["skyrl"]["reused_tokens"] = reused_tokens
        return body

    def failed(self, error: DialectError, output: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the object after an error, with the items that were complete by then."""
        code = {429: "rate_limit_exceeded"}.get(
            error.status, "server_error" if error.status >= 500 else "invalid_prompt"
        )
        return {**self._body("failed", output), "error": {"code": code, "message": error.message}}

    def _body(self, status: str, output: list[dict[str, Any]]) -> dict[str, Any]:
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


class SampledTokens:
    """The tokens of a response that are sampled so far, to find the log-probs of a text among them."""

    def __init__(self, texts: TokenTexts) -> None:
        self._texts = texts
        self._entries: list[dict[str, Any]] = []

    def add(self, token_ids: Sequence[int], logprobs: Sequence[float], top: TopLogprobs | None) -> None:
        """Add sampled tokens. ``top`` has the alternatives per token; None if none were requested."""
        alternatives = top or [[]] * len(token_ids)
        for token_id, logprob, others in zip(token_ids, logprobs, alternatives, strict=True):
            entry = self._texts.entry(token_id, logprob)
            entry["top_logprobs"] = [self._texts.entry(other, value) for other, value in others]
            self._entries.append(entry)

    def of_text(self, text: str, after: str) -> list[dict[str, Any]]:
        """Return the entries of the tokens that spell ``text`` after the reasoning ``after``.

        The first and the last token may spell more than ``text``. Returns an empty list if the tokens do not spell it,
        because a parser joined it from several pieces.
        """
        # Bytes, because a character may consist of several tokens.
        spelt = b"".join(bytes(entry["bytes"]) for entry in self._entries)
        # Search after the reasoning, because the same words may occur in it.
        start = max(spelt.find(after.encode()), 0) + len(after.encode())
        start = spelt.find(text.encode(), start)
        if start < 0 or not text:
            return []
        found, place, end = [], 0, start + len(text.encode())
        for entry in self._entries:
            following = place + len(entry["bytes"])
            if place < end and following > start:  # the token overlaps the text
                found.append(entry)
            place = following
        return found


@dataclass(slots=True)
class _OpenItem:
    """The item that is being streamed. ``call`` is the index of its function call; None for other items."""

    kind: str
    id: str
    call: int | None = None
    call_id: str = ""
    name: str = ""
    text: str = ""


class ResponsesStream:
    """Formats a response as events: created, in_progress; per item added, deltas, done; completed, incomplete or failed.

    One item is open at a time. Text that a parser returns after a call gets a new item.

    Args:
        logprobs: the sampled tokens if the client wants log-probs, which are sent at the end of each text.
        on_end: called with the whole message before the last event is formatted.
    """

    def __init__(
        self, body: ResponseBody, logprobs: SampledTokens | None, on_end: Callable[[AssistantMessage], None]
    ) -> None:
        self._body = body
        self._logprobs = logprobs
        self._on_end = on_end
        self._sequence_number = 0  # of the next event
        self._done: list[dict[str, Any]] = []
        self._open: _OpenItem | None = None
        self._reasoning = ""

    def opened(self) -> list[Frame]:
        """Return created and in_progress."""
        body = self._body.in_progress()
        return [self._frame("response.created", response=body), self._frame("response.in_progress", response=body)]

    def event(self, event: ChatEvent) -> list[Frame]:
        """Return the deltas of an event, and the end of the response if it is the last event."""
        delta, choice = event.delta, event.choice
        frames: list[Frame] = []
        if choice is not None:
            self._on_end(choice.message)  # before the client can name this response in its next request
        if self._logprobs is not None:
            self._logprobs.add(event.chunk.token_ids, event.chunk.logprobs, event.chunk.top_logprobs)
        if delta.reasoning_content:
            self._reasoning += delta.reasoning_content
            frames += self._text("reasoning", delta.reasoning_content)
        if delta.content:
            frames += self._text("message", delta.content)
        for call in delta.tool_calls:
            frames += self._call(call)
        if choice is not None:
            if self._open is None and not self._done:  # a response has at least one item
                frames += self._add(_OpenItem("message", self._next_id("message")))
            frames += self._finish(_last_status(choice))
            body = self._body.ended(choice, self._done, None)
            frames.append(self._frame(f"response.{body['status']}", response=body))
        return frames

    def closed(self) -> list[Frame]:
        """Return nothing: the last event has ended the response."""
        return []

    def failed(self, error: DialectError) -> list[Frame]:
        """Return the event that ends a stream after an error, with the items that were done."""
        return [self._frame("response.failed", response=self._body.failed(error, self._done))]

    def _text(self, kind: str, text: str) -> list[Frame]:
        """Add ``text`` to the open item if it is of this kind, otherwise to a new one."""
        frames = []
        if self._open is None or self._open.kind != kind:
            frames += self._finish("completed")
            frames += self._add(_OpenItem(kind, self._next_id(kind)))
        return [*frames, self._delta(text)]

    def _call(self, call: ToolCallDelta) -> list[Frame]:
        frames = []
        if self._open is None or self._open.call != call.index:
            frames += self._finish("completed")
            item_id = self._next_id("function_call")
            frames += self._add(_OpenItem("function_call", item_id, call.index, call.id or "", call.name or ""))
        return [*frames, self._delta(call.arguments)] if call.arguments else frames

    def _next_id(self, kind: str) -> str:
        return _item_id(kind, self._body.context.unique, len(self._done))

    def _add(self, item: _OpenItem) -> list[Frame]:
        self._open = item
        shown = self._shown("in_progress")
        position = len(self._done)
        if item.kind == "function_call":
            return [self._frame("response.output_item.added", output_index=position, item=shown)]
        part = shown["content"].pop()  # the part has its own event
        return [
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
        item, shown = self._open, self._shown(status)
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

    def _shown(self, status: str) -> dict[str, Any]:
        """Return the open item as the client sees it."""
        item = self._open
        assert item is not None
        if item.kind == "reasoning":
            return _reasoning_item(item.id, item.text, status)
        if item.kind == "function_call":
            return _call_item(item.id, item.call_id, item.name, item.text, status)
        found = [] if self._logprobs is None else self._logprobs.of_text(item.text, self._reasoning)
        return _message_item(item.id, item.text, status, found)

    def _part_frame(self, name: str, **fields: Any) -> Frame:
        item = self._open
        assert item is not None
        place = {} if item.kind == "function_call" else {"content_index": 0}
        return self._frame(name, item_id=item.id, output_index=len(self._done), **place, **fields)

    def _frame(self, name: str, **fields: Any) -> Frame:
        number, self._sequence_number = self._sequence_number, self._sequence_number + 1
        return Frame({"type": name, "sequence_number": number, **fields}, name)
