"""Shared by the tests of sessions: a readable renderer, and responses to planned prompts."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from skyrl_train.endpoint.sessions import Session, TurnPlan
from skyrl_train.errors import ConfigError
from skyrl_train.inference.chat.requests import AssistantMessage, ChatChoice, ToolCall
from skyrl_train.inference.interface import StopReason
from skyrl_train.inference.requests import Generation

ROLES = {"system": 1, "user": 2, "assistant": 3, "tool": 4}
END, TOOLS = 5, 6
SAMPLED = 5000  # a sampled character is another token than a rendered one, so that reuse shows


class ReadableRenderer:
    """One token per character: ``<role> c o n t e n t <end>``; tools come first, if there are any."""

    def __init__(self, extends: bool = True) -> None:
        self.extends = extends
        self.rendered_messages = 0

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        template_kwargs: Mapping[str, Any] | None = None,
        continue_final: bool = False,
    ) -> list[int]:
        return [TOOLS] * len(tools) + self._messages(messages, continue_final)

    def extend(
        self,
        prompt_token_ids: Sequence[int],
        response_ids: Sequence[int],
        new_messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        template_kwargs: Mapping[str, Any] | None = None,
        continue_final: bool = False,
    ) -> list[int]:
        if not self.extends:
            raise ConfigError("this template rewrites earlier answers")
        return [*prompt_token_ids, *response_ids, END, *self._messages(new_messages, continue_final)]

    def retokenise(self, token_ids: Sequence[int]) -> list[int]:
        return [token - SAMPLED if token >= SAMPLED else token for token in token_ids]

    def _messages(self, messages: Sequence[Mapping[str, Any]], continue_final: bool) -> list[int]:
        self.rendered_messages += len(messages)
        tokens: list[int] = []
        for message in messages:
            tokens += [ROLES[message["role"]], *text_tokens(str(message.get("content") or "")), END]
        return tokens[:-1] if continue_final else [*tokens, ROLES["assistant"]]


def text_tokens(text: str) -> list[int]:
    return [ord(character) for character in text]


def sampled_tokens(text: str) -> list[int]:
    return [SAMPLED + ord(character) for character in text] or [SAMPLED]


_logprobs = itertools.count(1)


def generation(prompt: list[int], token_ids: list[int], version: int = 0, **fields: Any) -> Generation:
    """Every log-prob is another one, so that a token can be found by it."""
    return Generation(
        prompt_token_ids=prompt,
        token_ids=token_ids,
        logprobs=[-next(_logprobs) * 2.0**-20 for _ in token_ids],
        versions=[version] * len(token_ids),
        stop_reason=StopReason.STOP,
        text="",
        **fields,
    )


def choice(
    plan: TurnPlan,
    content: str,
    *,
    version: int = 0,
    reasoning: str | None = None,
    calls: Sequence[ToolCall] = (),
    token_ids: list[int] | None = None,
) -> ChatChoice:
    tokens = sampled_tokens(content) if token_ids is None else token_ids
    message = AssistantMessage(content, reasoning, tuple(calls))
    return ChatChoice(0, message, "stop", generation(plan.prompt_token_ids, tokens, version))


def ask(session: Session, messages: Sequence[Mapping[str, Any]], answer: str, **options: Any) -> TurnPlan:
    """Plans and records one turn."""
    plan = session.plan(messages)
    session.record(plan, choice(plan, answer, **options))
    return plan


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str | None, **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **fields}


def new_session(**options: Any) -> Session:
    return Session("s", ReadableRenderer(), **options)
