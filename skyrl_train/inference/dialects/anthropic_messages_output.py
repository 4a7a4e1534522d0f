"""What Anthropic's dialect answers: a message, the same message as events, an error."""

from __future__ import annotations

import json
from typing import Any

from skyrl_train.inference.chat.messages import ToolCallDelta
from skyrl_train.inference.chat.requests import ChatChoice, ChatEvent, ChatResult
from skyrl_train.inference.dialects.anthropic_messages_blocks import (
    SIGNATURE,
    content_blocks,
    text_block,
    thinking_block,
    tool_input,
    tool_use_block,
)
from skyrl_train.inference.dialects.dialect import Frame, ResponseContext
from skyrl_train.inference.dialects.errors import DialectError

_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def anthropic_error(error: DialectError) -> dict[str, Any]:
    """Anthropic's shape, also of an error event inside a stream."""
    kind = _ERROR_TYPES.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": error.message}}


def message_body(model: str, result: ChatResult, context: ResponseContext, token_ids: bool) -> dict[str, Any]:
    """A message that is not streamed. ``token_ids``: with the ``skyrl`` object."""
    choice = result.choices[0]
    body = {
        **_head(model, context),
        "content": content_blocks(choice.message),
        **_ending(choice),
        "usage": _usage(choice),
    }
    if token_ids:
        body["skyrl"] = {**_skyrl(choice), "reused_tokens": result.reused_tokens}
    return body


class MessagesStream:
    """message_start; start, deltas and stop of every content block; message_delta with what the end knows; message_stop.

    One block is open at a time. What a parser gives later than its place (text behind a call) gets a block of its own.
    The input of a call comes in one delta at its end: only then is it known to be a JSON object.
    """

    def __init__(self, model: str, context: ResponseContext, token_ids: bool) -> None:
        self._head = _head(model, context)
        self._token_ids = token_ids
        self._blocks = 0  # started so far; the open one is the last
        self._open: str | int | None = None  # "thinking", "text", or the number of a call
        self._arguments = ""

    def opened(self) -> list[Frame]:
        """message_start. The length of the prompt is known at the end only: message_delta has it."""
        usage = {**_NO_CACHE, "input_tokens": 0, "output_tokens": 0}
        message = {**self._head, "content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
        return [_frame("message_start", message=message)]

    def event(self, event: ChatEvent) -> list[Frame]:
        """What the event adds to the blocks, and the end of the message where it is the last."""
        delta, frames = event.delta, []
        if delta.reasoning_content:
            frames += self._switch("thinking", thinking_block(""))
            frames.append(self._delta(type="thinking_delta", thinking=delta.reasoning_content))
        if delta.content:
            frames += self._switch("text", text_block(""))
            frames.append(self._delta(type="text_delta", text=delta.content))
        for call in delta.tool_calls:
            frames += self._call(call)
        if event.choice is not None:
            frames += self._end(event.choice)
        return frames

    def closed(self) -> list[Frame]:
        """message_stop."""
        return [_frame("message_stop")]

    def failed(self, error: DialectError) -> list[Frame]:
        """The error; nothing follows it."""
        return [Frame(anthropic_error(error), "error")]

    def _call(self, call: ToolCallDelta) -> list[Frame]:
        frames = self._switch(call.index, tool_use_block(call.id or "", call.name or "", {}))
        self._arguments += call.arguments
        return frames

    def _switch(self, to: str | int, block: dict[str, Any]) -> list[Frame]:
        """Stops the open block and starts another, unless it is the open one that goes on."""
        if self._open == to:
            return []
        frames = self._stop()
        self._open = to
        self._blocks += 1
        return [*frames, _frame("content_block_start", index=self._blocks - 1, content_block=block)]

    def _stop(self) -> list[Frame]:
        if self._open is None:
            return []
        frames = []
        if self._open == "thinking":
            frames.append(self._delta(type="signature_delta", signature=SIGNATURE))
        elif self._open != "text":
            partial = json.dumps(tool_input(self._arguments), ensure_ascii=False)
            frames.append(self._delta(type="input_json_delta", partial_json=partial))
            self._arguments = ""
        self._open = None
        return [*frames, _frame("content_block_stop", index=self._blocks - 1)]

    def _end(self, choice: ChatChoice) -> list[Frame]:
        extension = {"skyrl": _skyrl(choice)} if self._token_ids else {}
        ended = _frame("message_delta", delta=_ending(choice), usage=_usage(choice), **extension)
        return [*self._stop(), ended]

    def _delta(self, **delta: str) -> Frame:
        return _frame("content_block_delta", index=self._blocks - 1, delta=delta)


def _frame(name: str, **fields: Any) -> Frame:
    return Frame({"type": name, **fields}, name)


def _head(model: str, context: ResponseContext) -> dict[str, Any]:
    return {"id": f"msg_{context.unique}", "type": "message", "role": "assistant", "model": model}


def _ending(choice: ChatChoice) -> dict[str, Any]:
    reason = {"tool_calls": "tool_use", "length": "max_tokens", "stop": "end_turn"}[choice.finish_reason]
    sequence = choice.generation.stop_string if choice.finish_reason == "stop" else None
    return {"stop_reason": reason if sequence is None else "stop_sequence", "stop_sequence": sequence}


_NO_CACHE = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}


def _usage(choice: ChatChoice) -> dict[str, int]:
    generation = choice.generation
    tokens = {"input_tokens": len(generation.prompt_token_ids), "output_tokens": len(generation.token_ids)}
    return {**_NO_CACHE, **tokens}


def _skyrl(choice: ChatChoice) -> dict[str, Any]:
    generation = choice.generation
    return {
        "prompt_token_ids": generation.prompt_token_ids,
        "token_ids": generation.token_ids,
        "logprobs": generation.logprobs,
        "versions": generation.versions,
        "segments": generation.segments,
        "restarts": generation.restarts,
    }
