"""What all routes of one endpoint share."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from starlette.requests import Request
from starlette.types import Receive

from skyrl_train.concurrency import Signal
from skyrl_train.inference.chat.requests import ChatRequest
from skyrl_train.inference.chat_service import ChatService
from skyrl_train.inference.client import RequestClient
from skyrl_train.inference.dialects.dialect import ResponseContext
from skyrl_train.inference.dialects.errors import DialectError
from skyrl_train.inference.dialects.openai_responses_history import ResponseHistories
from skyrl_train.inference.dialects.sizes import check_counts
from skyrl_train.inference.dialects.tokens import TokenTexts
from skyrl_train.inference.server.auth import Authenticator, Caller
from skyrl_train.inference.server.connection import Body, Watch, read_json
from skyrl_train.inference.server.metrics import ServerMetrics
from skyrl_train.inference.server.settings import ServerSettings
from skyrl_train.inference.sessions.store import SessionStore

BUSY_RETRY_S = 1.0


class Gateway:
    """The services behind the endpoint, who may use them, and how many at once."""

    def __init__(
        self,
        service: ChatService,
        client: RequestClient,
        store: SessionStore,
        settings: ServerSettings,
    ) -> None:
        self.service = service
        self.client = client
        self.store = store
        self.settings = settings
        self.metrics = ServerMetrics()
        self.response_histories = ResponseHistories()
        self.started_at = int(time.time())
        self._authenticator = Authenticator(settings, store)
        self._tokens = TokenTexts(client.tokenizer)
        self._watches: set[Watch] = set()
        self._slots = 0
        self.changed = Signal()  # requests came or went
        self._stopping = False

    def caller(self, request: Request, *, opens_session: bool = False) -> Caller:
        """Who sent a request; ``opens_session`` where it is one that a new session may begin with.

        Raises:
            DialectError: 401 without a valid key.
            QuotaError: it names a new session, and there is no room for it.
        """
        return self._authenticator.caller(request.headers, opens_session=opens_session)

    async def body(self, request: Request) -> Body:
        """A request's body, within the endpoint's limits and with no more entries than the context could hold.

        Raises:
            DialectError: it is too large, too slow, no JSON object, or more than fits the context.
            ClientGoneError: the caller left in the middle.
        """
        body = await read_json(request, self.settings.max_body_bytes, self.settings.body_timeout_s)
        check_counts(body.fields, self.client.capabilities.max_model_len)
        return body

    def adapter(self, model: str) -> str | None:
        """The LoRA adapter that ``model`` names; None for the policy.

        Raises:
            DialectError: 404 for a name that is neither.
        """
        if model in self.settings.model_names:
            return None
        if model in self.client.adapters:
            return model
        known = ", ".join(self.model_names)
        raise DialectError(
            f"The model {model!r:.100} is not served here. Served: {known}.", "model", "model_not_found", status=404
        )

    def chat_request(self, model: str, request: ChatRequest) -> ChatRequest:
        """A dialect's request for the model that its caller named.

        Raises:
            DialectError: the model is not served, or the engines cannot do what is asked.
        """
        can, params = self.client.capabilities, request.params
        if params.structured is not None and not can.structured_output:
            raise DialectError("The engines here cannot follow a format.", "response_format", "unsupported_parameter")
        self.check_top_logprobs(params.top_logprobs, "top_logprobs")
        adapter = self.adapter(model)
        return request if adapter is None else replace(request, adapter=adapter)

    def check_top_logprobs(self, asked: int, param: str) -> None:
        """Raises DialectError where the engines return fewer alternatives than asked for."""
        most = self.client.capabilities.max_top_logprobs
        if asked > most:
            raise DialectError(
                f"The engines here return at most {most} alternatives per token.", param, "unsupported_parameter"
            )

    @property
    def model_names(self) -> list[str]:
        """The policy's names, then the adapters'."""
        return [*self.settings.model_names, *self.client.adapters]

    def context(self) -> ResponseContext:
        """The identity of a new response."""
        return ResponseContext(secrets.token_hex(16), int(time.time()), self._tokens)

    @contextmanager
    def slot(self) -> Iterator[None]:
        """A place among the generations in flight.

        Raises:
            DialectError: 429 when all are taken, 503 while the endpoint stops.
        """
        if self._stopping:
            raise _stopping()
        if self._slots >= self.settings.max_in_flight:
            raise DialectError(
                f"{self._slots} requests are in flight, as many as this endpoint takes. Try again later.",
                code="rate_limit_exceeded",
                status=429,
                retry_after_s=BUSY_RETRY_S,
            )
        self._slots += 1
        self.changed.notify()
        try:
            yield
        finally:
            self._slots -= 1
            self.changed.notify()

    @property
    def in_flight(self) -> int:
        """Generations that have a place."""
        return self._slots

    async def drained(self) -> None:
        """Returns when no generation is in flight."""
        await self.changed.wait_until(lambda: not self._slots)

    @contextmanager
    def watch(self, receive: Receive) -> Iterator[Watch]:
        """A watch over a request's connection, which also ends when the endpoint does."""
        watch = Watch(receive)
        self._watches.add(watch)
        try:
            yield watch
        finally:
            self._watches.discard(watch)

    def refuse(self) -> None:
        """From now on generations are refused; those in flight go on."""
        self._stopping = True

    def interrupt(self) -> None:
        """Ends the generations in flight with an error."""
        for watch in list(self._watches):
            watch.interrupt(_stopping())


def _stopping() -> DialectError:
    return DialectError("The endpoint is being stopped.", code="stopping", status=503, retry_after_s=BUSY_RETRY_S)


def gateway_of(request: Request) -> Gateway:
    """The gateway of the application that a request came to."""
    gateway = request.app.state.gateway
    assert isinstance(gateway, Gateway)
    return gateway
