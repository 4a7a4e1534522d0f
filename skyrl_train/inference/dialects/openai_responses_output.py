"""What OpenAI's dialect of responses answers: output items, and the response object around them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from skyrl_train.inference.chat.requests import ChatChoice
from skyrl_train.inference.dialects.dialect import ResponseContext
from skyrl_train.inference.dialects.errors import DialectError
from skyrl_train.inference.dialects.tokens import TokenTexts
from skyrl_train.inference.interface import TopLogprobs


def reasoning_item(item_id: str, text: str, status: str) -> dict[str, Any]:
    """What the model thought."""
    return {
        "id": item_id,
        "type": "reasoning",
        "status": status,
        "summary": [],
        "content": [{"type": "reasoning_text", "text": text}],
        "encrypted_content": None,
    }


def message_item(item_id: str, text: str, status: str, logprobs: Sequence[Mapping[str, Any]] = ()) -> dict[str, Any]:
    """What the model said."""
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs)}
    return {"id": item_id, "type": "message", "status": status, "role": "assistant", "content": [part]}


def call_item(item_id: str, call_id: str, name: str, arguments: str, status: str) -> dict[str, Any]:
    """A call that the model made."""
    return {
        "id": item_id,
        "type": "function_call",
        "status": status,
        "call_id": call_id,
        "name": name,
        "arguments": arguments,
    }


def output_items(choice: ChatChoice, unique: str, logprobs: SampledTokens | None) -> list[dict[str, Any]]:
    """A sampled message as items: reasoning, what was said, calls; never none."""
    message = choice.message
    items = []
    if message.reasoning_content:
        items.append(reasoning_item(item_id("rs", unique, 0), message.reasoning_content, "completed"))
    if message.content or not (items or message.tool_calls):
        found = [] if logprobs is None else logprobs.of_text(message.content, message.reasoning_content or "")
        items.append(message_item(item_id("msg", unique, len(items)), message.content, "completed", found))
    for call in message.tool_calls:
        items.append(call_item(item_id("fc", unique, len(items)), call.id, call.name, call.arguments, "completed"))
    items[-1]["status"] = last_status(choice)
    return items


def item_id(prefix: str, unique: str, position: int) -> str:
    """Names the response that an item belongs to, so that items that come back find together."""
    return f"{prefix}_{unique}_{position}"


def last_status(choice: ChatChoice) -> str:
    """Of the last item, which alone can be cut off."""
    return "incomplete" if choice.finish_reason == "length" else "completed"


@dataclass(frozen=True, slots=True)
class ResponseBody:
    """The response object. ``echo`` are the fields that repeat the request; ``token_ids`` adds the ``skyrl`` object."""

    model: str
    echo: Mapping[str, Any]
    token_ids: bool
    context: ResponseContext

    def in_progress(self) -> dict[str, Any]:
        """Before anything is sampled."""
        return self._body("in_progress", [])

    def ended(self, choice: ChatChoice, output: list[dict[str, Any]], reused_tokens: int | None) -> dict[str, Any]:
        """After the end; ``reused_tokens`` is None where it is not known."""
        cut = choice.finish_reason == "length"
        body = self._body("incomplete" if cut else "completed", output)
        body["incomplete_details"] = {"reason": "max_output_tokens"} if cut else None
        body["usage"] = _usage(choice)
        if self.token_ids:
            body["skyrl"] = _skyrl(choice)
            if reused_tokens is not None:
                body["skyrl"]["reused_tokens"] = reused_tokens
        return body

    def failed(self, error: DialectError, output: list[dict[str, Any]]) -> dict[str, Any]:
        """After an error, with what was complete by then."""
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


def _usage(choice: ChatChoice) -> dict[str, Any]:
    generation = choice.generation
    taken, given = len(generation.prompt_token_ids), len(generation.token_ids)
    return {
        "input_tokens": taken,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": given,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": taken + given,
    }


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


class SampledTokens:
    """The tokens of one answer as far as they are sampled, to find the log-probs of a text among them."""

    def __init__(self, texts: TokenTexts) -> None:
        self._texts = texts
        self._entries: list[dict[str, Any]] = []

    def add(self, token_ids: Sequence[int], logprobs: Sequence[float], top: TopLogprobs | None) -> None:
        """Takes the tokens sampled next; ``top`` is None where no alternatives were asked for."""
        alternatives = top or [[]] * len(token_ids)
        for token_id, logprob, others in zip(token_ids, logprobs, alternatives, strict=True):
            entry = self._texts.entry(token_id, logprob)
            entry["top_logprobs"] = [self._texts.entry(other, value) for other, value in others]
            self._entries.append(entry)

    def of_text(self, text: str, after: str) -> list[dict[str, Any]]:
        """The tokens that spell ``text`` behind ``after`` (the reasoning); those at its edges may spell more.

        None where the tokens do not spell it: it was put together from several pieces.
        """
        spelt = b"".join(bytes(entry["bytes"]) for entry in self._entries)
        start = max(spelt.find(after.encode()), 0) + len(after.encode())
        start = spelt.find(text.encode(), start)
        if start < 0 or not text:
            return []
        found, place, end = [], 0, start + len(text.encode())
        for entry in self._entries:
            following = place + len(entry["bytes"])
            if place < end and following > start:
                found.append(entry)
            place = following
        return found
