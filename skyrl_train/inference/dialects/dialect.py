"""What a chat dialect is: a body comes in, ChatRequest goes down, ChatEvents or a ChatResult come up, bodies go out.

    body ──ChatDialect.parse──> ChatCall ──request──> ChatService
                                         ──response(result)────> body
                                         ──stream()──> ChatStream: opened / event / closed / failed ──> Frames

Everything here is pure: no clock, no ids of its own, no network.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from skyrl_train.inference.chat.requests import ChatEvent, ChatRequest, ChatResult
from skyrl_train.inference.dialects.errors import DialectError
from skyrl_train.inference.dialects.tokens import TokenTexts


class Frame(NamedTuple):
    """One server-sent event. ``data`` is sent as JSON, a string as it stands; ``event`` names it where the dialect does."""

    data: Mapping[str, Any] | str
    event: str | None = None


@dataclass(frozen=True, slots=True)
class ResponseContext:
    """What a response needs besides the result.

    Args:
        unique: hexadecimal, different for every response; the dialect puts its prefix before it.
        created: seconds since the epoch.
        tokens: the spelling of single tokens, for log-probs.
    """

    unique: str
    created: int
    tokens: TokenTexts


class ChatStream(Protocol):
    """One streamed response. Frames of ``opened``, then of every event, then of ``closed`` or of ``failed``."""

    def opened(self) -> list[Frame]:
        """Before the first event."""

    def event(self, event: ChatEvent) -> list[Frame]:
        """A piece of an answer; no frames where the dialect has nothing to say about it."""

    def closed(self) -> list[Frame]:
        """After the last answer has ended."""

    def failed(self, error: DialectError) -> list[Frame]:
        """Instead of anything further."""


class ChatCall(Protocol):
    """A parsed body."""

    @property
    def model(self) -> str:
        """As the caller named it."""

    @property
    def streamed(self) -> bool:
        """Whether the caller wants events."""

    @property
    def request(self) -> ChatRequest:
        """What the chat service is asked."""

    def response(self, result: ChatResult, context: ResponseContext) -> dict[str, Any]:
        """The body of a response that is not streamed."""

    def stream(self, context: ResponseContext) -> ChatStream:
        """The translator of one streamed response."""


class ChatDialect(Protocol):
    """A dialect of chat; modules and objects alike."""

    def parse(self, body: Mapping[str, Any]) -> ChatCall:
        """Reads a body.

        Raises:
            DialectError: the body is wrong, or asks for what is not supported; ``param`` names the field.
        """

    def error(self, error: DialectError) -> dict[str, Any]:
        """The body of an error response."""
