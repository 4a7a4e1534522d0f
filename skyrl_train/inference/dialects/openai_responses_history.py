"""What ``previous_response_id`` names: the messages of earlier responses, kept per session."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

from skyrl_train.inference.chat.messages import AssistantMessage
from skyrl_train.inference.chat.requests import ChatEvent, ChatResult
from skyrl_train.inference.dialects import openai_responses
from skyrl_train.inference.dialects.dialect import ChatCall, ChatStream, Frame, ResponseContext
from skyrl_train.inference.dialects.errors import DialectError
from skyrl_train.inference.dialects.openai_responses import ResponsesCall

MAX_RESPONSES = 256  # of one session; the oldest is forgotten first

Conversation = tuple[Mapping[str, Any], ...]


class ResponseHistory:
    """The conversations of one session's latest responses, by response id."""

    def __init__(self, max_responses: int = MAX_RESPONSES) -> None:
        self._max_responses = max_responses
        self._conversations: OrderedDict[str, Conversation] = OrderedDict()

    def __len__(self) -> int:
        return len(self._conversations)

    def keep(self, response_id: str, conversation: Conversation) -> None:
        """Remembers what a response ended with."""
        self._conversations[response_id] = conversation
        while len(self._conversations) > self._max_responses:
            self._conversations.popitem(last=False)

    def conversation(self, response_id: str) -> Conversation:
        """The messages up to the end of a response.

        Raises:
            DialectError: it is not known (any more).
        """
        known = self._conversations.get(response_id)
        if known is None:
            raise DialectError(
                f"The previous response {response_id!r:.100} is not stored in this session: it was sent with store: false, "
                f"has failed, or is older than the last {self._max_responses}. Send the conversation as input instead.",
                "previous_response_id",
                "previous_response_not_found",
            )
        return known


class ResponseHistories:
    """The histories of all sessions; one is forgotten when its session is."""

    def __init__(self) -> None:
        self._of: WeakKeyDictionary[object, ResponseHistory] = WeakKeyDictionary()

    def __len__(self) -> int:
        return len(self._of)

    def of(self, session: object) -> ResponseHistory:
        """The history of a session."""
        return self._of.setdefault(session, ResponseHistory())


class SessionResponses:
    """The dialect of one session's requests; without a session nothing is kept, and nothing can be named."""

    def __init__(self, history: ResponseHistory | None) -> None:
        self._history = history

    def parse(self, body: Mapping[str, Any]) -> ChatCall:
        """Reads a body, and puts the conversation of the previous response before its input.

        Raises:
            DialectError: the body is wrong, or the previous response is not known.
        """
        call = openai_responses.parse(body)
        if self._history is None:
            if call.previous_response_id is not None:
                raise DialectError(
                    "previous_response_id takes a session: use a session's key, or send the conversation as input.",
                    "previous_response_id",
                    "unsupported_parameter",
                )
            return dataclasses.replace(call, store=False)
        if call.previous_response_id is not None:
            call = call.behind(self._history.conversation(call.previous_response_id))
        return _KeptCall(call, self._history) if call.store else call

    def error(self, error: DialectError) -> dict[str, Any]:
        """The body of an error response."""
        return openai_responses.error(error)


class _KeptCall:
    """A call whose response is remembered when it ends."""

    def __init__(self, call: ResponsesCall, history: ResponseHistory) -> None:
        self._call = call
        self._history = history
        self.model = call.model
        self.streamed = call.streamed
        self.request = call.request

    def response(self, result: ChatResult, context: ResponseContext) -> dict[str, Any]:
        """The body of a response that is not streamed."""
        body = self._call.response(result, context)
        self.keep(result.choices[0].message, context)
        return body

    def stream(self, context: ResponseContext) -> ChatStream:
        """The translator of one streamed response."""
        return _KeptStream(self, self._call.stream(context), context)

    def keep(self, answer: AssistantMessage, context: ResponseContext) -> None:
        """Remembers the response."""
        self._history.keep(f"resp_{context.unique}", self._call.conversation(answer))


class _KeptStream:
    """A stream whose response is remembered before its last event is told."""

    def __init__(self, call: _KeptCall, stream: ChatStream, context: ResponseContext) -> None:
        self._call = call
        self._stream = stream
        self._context = context

    def opened(self) -> list[Frame]:
        """Before the first event."""
        return self._stream.opened()

    def event(self, event: ChatEvent) -> list[Frame]:
        """A piece of an answer."""
        if event.choice is not None:
            self._call.keep(event.choice.message, self._context)
        return self._stream.event(event)

    def closed(self) -> list[Frame]:
        """After the last answer has ended."""
        return self._stream.closed()

    def failed(self, error: DialectError) -> list[Frame]:
        """Instead of anything further."""
        return self._stream.failed(error)
