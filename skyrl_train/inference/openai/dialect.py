"""The interface of a chat dialect: it parses request bodies into ``ChatRequest`` and formats results as response bodies.

    body ──ChatDialect.parse──> ChatCall ──request──> ChatService
                                         ──response(result)────> body
                                         ──stream()──> ChatStream: opened / event / closed / failed ──> Frames

Dialects are pure: time and ids come from :class:`ResponseContext`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from skyrl_train.inference.chat.requests import ChatEvent, ChatRequest, ChatResult
from skyrl_train.inference.openai.errors import DialectError
from skyrl_train.inference.openai.tokens import TokenTexts


class Frame(NamedTuple):
    """One server-sent event. ``data`` is sent as JSON, a string verbatim; ``event`` is its name, if the dialect uses names."""

    data: Mapping[str, Any] | str
    event: str | None = None


@dataclass(frozen=True, slots=True)
class ResponseContext:
    """The facts that a response needs besides the result.

    Args:
        unique: a hexadecimal id of the response; the dialect adds its prefix.
        created: seconds since the epoch.
        tokens: the spelling of single tokens, for log-probs.
    """

    unique: str
    created: int
    tokens: TokenTexts


class ChatStream(Protocol):
    """Formats one streamed response: ``opened``, then each ``event``, then ``closed`` or ``failed``."""

    def opened(self) -> list[Frame]:
        """Return the frames before the first event."""

    def event(self, event: ChatEvent) -> list[Frame]:
        """Return the frames of a piece; there may be none."""

    def closed(self) -> list[Frame]:
        """Return the frames after the last choice."""

    def failed(self, error: DialectError) -> list[Frame]:
        """Return the frames of an error, after which none follow."""


class ChatCall(Protocol):
    """A parsed body."""

    @property
    def model(self) -> str:
        """The name that the caller gave."""

    @property
    def streamed(self) -> bool:
        """Whether the caller wants events."""

    @property
    def request(self) -> ChatRequest:
        """The request for the chat service."""

    def response(self, result: ChatResult, context: ResponseContext) -> dict[str, Any]:
        """Return the body of a response that is not streamed."""

    def stream(self, context: ResponseContext) -> ChatStream:
        """Return the formatter of one streamed response."""


class ChatDialect(Protocol):
    """A chat dialect; modules and objects implement it."""

    def parse(self, body: Mapping[str, Any]) -> ChatCall:
        """Parse a body.

        Raises:
            DialectError: the body is wrong, or asks for what is not supported; ``param`` names the field.
        """

    def error(self, error: DialectError) -> dict[str, Any]:
        """Return the body of an error response."""
