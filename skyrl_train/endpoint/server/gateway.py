"""The state that all routes share: authentication, limits, metrics and the services behind the endpoint."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from weakref import WeakKeyDictionary

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.requests import Request

from skyrl_train.endpoint.dialects.responses import MAX_SHARED_RESPONSES, SHARED_LIFETIME_S, ResponseHistory
from skyrl_train.endpoint.server.connection import LARGE_BODY, Body, DisconnectWatcher, parse_json
from skyrl_train.endpoint.server.errors import ClientGoneError
from skyrl_train.endpoint.server.settings import ServerSettings, is_loopback
from skyrl_train.endpoint.sessions.session import Session
from skyrl_train.endpoint.sessions.store import SessionStore
from skyrl_train.inference.chat.requests import ChatRequest
from skyrl_train.inference.chat.service import ChatService
from skyrl_train.inference.client import RequestClient
from skyrl_train.inference.interface import LogitAdjustment, SamplingParams
from skyrl_train.inference.openai.dialect import TokenTexts
from skyrl_train.inference.openai.errors import DialectError
from skyrl_train.inference.pool.fleet import EngineState
from skyrl_train.inference.text_length import check_counts
from skyrl_train.runtime.concurrency import Signal

BUSY_RETRY_S = 1.0
SESSION_HEADER = "x-session-id"
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800, 3600)


@dataclass(frozen=True, slots=True)
class Principal:
    """The authenticated sender of a request. Generations without a session are not recorded."""

    is_admin: bool
    session: Session | None = None


class Gateway:
    """The services behind the endpoint, and who may use how much of them."""

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
        # A history is garbage collected together with its session.
        self.response_histories: WeakKeyDictionary[Session, ResponseHistory] = WeakKeyDictionary()
        # Who sends requests without a session has the administrator's rights, and may read what others send like that.
        self._shared_history = ResponseHistory(MAX_SHARED_RESPONSES, lifetime_s=SHARED_LIFETIME_S)
        self.started_at = int(time.time())
        self.in_flight = 0  # generations that hold a slot
        self.changed = Signal()  # notified when in_flight changes
        self.stopping = False  # new generations are rejected
        self.active_watchers: set[DisconnectWatcher] = (
            set()
        )  # of running generations; ``EndpointServer.stop`` interrupts them
        self.token_texts = TokenTexts(client.tokenizer)
        # Only the digest of the key is kept. Digests of equal length are compared in constant time.
        self._admin_digest = None if settings.admin_key is None else _digest(settings.admin_key)

    def authenticate(self, request: Request, *, open_session: bool = False) -> Principal:
        """Return the sender of a request.

        Args:
            open_session: open the session that the administrator names in ``x-session-id`` if it does not exist.

        Raises:
            DialectError: 401 without a valid key.
            QuotaError: the header names a new session and there is no room for it.
        """
        # A session's key decides alone; x-session-id is for the administrator only.
        headers = request.headers
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        sent = (bearer.strip() if scheme.lower() == "bearer" else "", headers.get("x-api-key", ""))
        # A client may send both: the key that it was given, and a token of its environment that means nothing here.
        keys = [key for key in sent if key]
        for key in keys:
            if (session := self.store.by_key(key)) is not None:
                return Principal(False, session)
        admin = self._admin_digest
        is_admin = admin is not None and any(hmac.compare_digest(_digest(key), admin) for key in keys)
        # Without keys, the Host header must name this machine too: a web page can send requests to loopback under its own
        # domain name (DNS rebinding).
        host = headers.get("host", "")
        name = host.rpartition(":")[0] if not host.endswith("]") and ":" in host else host
        if not is_admin and not (self.settings.open and (not host or is_loopback(name))):
            if not keys:
                raise DialectError(
                    "No API key was sent. Send the session's key as 'Authorization: Bearer KEY'.",
                    code="missing_api_key",
                    status=401,
                )
            raise DialectError("The API key is wrong, or its session has ended.", code="invalid_api_key", status=401)
        # From here on the sender has the administrator's rights.
        session_id = headers.get(SESSION_HEADER)
        if session_id is None:
            return Principal(True)
        session = self.store.get(session_id)
        if session is None and open_session:
            session = self.store.open(session_id).session
        return Principal(True, session)

    def response_history(self, session: Session | None) -> ResponseHistory:
        """Return the stored responses of a session, or of all requests without one."""
        return (
            self._shared_history if session is None else self.response_histories.setdefault(session, ResponseHistory())
        )

    async def read_body(self, request: Request) -> Body:
        """Read the JSON body of a request. Never holds more than ``max_body_bytes`` of it.

        Raises:
            DialectError: 413 if it is too large, 408 if too slow, 415 or 400 if it is not a JSON object or has more entries
                than the context can hold.
            ClientGoneError: the client disconnected while sending.
        """
        settings = self.settings
        too_large = DialectError(
            f"The body has more than {settings.max_body_bytes} bytes. Send less, or raise the endpoint's limit.",
            code="request_too_large",
            status=413,
        )
        # Reject by the announced length before reading anything.
        announced = request.headers.get("content-length", "")
        if announced.isdecimal() and int(announced) > settings.max_body_bytes:
            raise too_large
        received = bytearray()
        more = True
        try:
            async with asyncio.timeout(settings.body_timeout_s):
                while more:
                    message = await request.receive()
                    if message["type"] == "http.disconnect":
                        raise ClientGoneError
                    received += message.get("body", b"")
                    more = message.get("more_body", False)
                    if len(received) > settings.max_body_bytes:  # the announced length may be missing or wrong
                        raise too_large
        except TimeoutError:
            raise DialectError(
                f"The body did not arrive within {settings.body_timeout_s:g} s.", code="request_timeout", status=408
            ) from None
        raw, content_type = bytes(received), request.headers.get("content-type", "")
        if len(raw) > LARGE_BODY:
            body = Body(await asyncio.to_thread(parse_json, raw, content_type), len(raw))
        else:
            body = Body(parse_json(raw, content_type), len(raw))
        # Counting entries is much cheaper than validating or rendering a body that can never fit.
        check_counts(body.fields, self.client.capabilities.max_model_len)
        return body

    @property
    def model_names(self) -> list[str]:
        """The names of the policy, then the names of the LoRA adapters."""
        return [*self.settings.model_names, *self.client.adapters]

    def adapter(self, model: str) -> str | None:
        """Return the LoRA adapter that ``model`` names, or None for the policy.

        Raises:
            DialectError: 404 for an unknown name.
        """
        # Names of the policy come first: an adapter cannot hide the policy.
        if model in self.settings.model_names:
            return None
        if model in self.client.adapters:
            return model
        known = ", ".join(self.model_names)
        raise DialectError(
            f"The model {model!r:.100} is not served here. Served: {known}. Ask for one of them, or name this one in "
            "generator.kwargs.endpoint.model_names (skyrl-train serve: --name).",
            "model",
            "model_not_found",
            status=404,
        )

    def chat_request(self, model: str, request: ChatRequest) -> ChatRequest:
        """Return ``request`` with the adapter that ``model`` names.

        Raises:
            DialectError: the model is not served, or the engines do not support what the request asks for.
        """
        self.check_params(request.params, "top_logprobs", request.grammar_field)
        adapter = self.adapter(model)
        return request if adapter is None else replace(request, adapter=adapter)

    def check_params(self, params: SamplingParams, of_top_logprobs: str, of_grammar: str) -> None:
        """Raise DialectError if the engines cannot follow a grammar, sample like this, or return as many alternatives.

        Args:
            of_top_logprobs, of_grammar: the fields that ask for alternatives and for a grammar, as the caller names them.
        """
        can = self.client.capabilities
        if params.structured is not None and not can.structured_output:
            raise DialectError(
                f"{of_grammar}: the engines here cannot follow a format.", of_grammar, "unsupported_parameter"
            )
        if params.adjustment is not None and not can.logit_adjustment:
            neutral = LogitAdjustment()
            given = ("frequency_penalty", "presence_penalty", "repetition_penalty", "logit_bias")
            field = next(name for name in given if getattr(params.adjustment, name) != getattr(neutral, name))
            raise DialectError(f"The engines here have no {field}.", field, "unsupported_parameter")
        biases, tokens = () if params.adjustment is None else params.adjustment.logit_bias, len(self.client.tokenizer)
        unknown = next((token for token, _ in biases if token >= tokens), None)
        for field, asked, able in (("min_p", params.min_p > 0, can.min_p), ("logit_bias", biases, can.logit_bias)):
            if asked and not able:
                raise DialectError(
                    f"The engines here have no {field}: vLLM excludes it with speculative decoding.",
                    field,
                    "unsupported_parameter",
                )
        if unknown is not None:
            raise DialectError(
                f"logit_bias: {unknown} is not a token of the model, which has {tokens}.", "logit_bias", "invalid_value"
            )
        if params.top_logprobs > can.max_top_logprobs:
            raise DialectError(
                f"The engines here return at most {can.max_top_logprobs} alternatives per token.",
                of_top_logprobs,
                "unsupported_parameter",
            )

    @contextmanager
    def slot(self) -> Iterator[None]:
        """Hold one of the ``max_in_flight`` generation slots.

        Raises:
            DialectError: 429 when all slots are taken, 503 while the endpoint stops.
        """
        if self.stopping:
            raise stopping_error()
        if self.in_flight >= self.settings.max_in_flight:
            raise DialectError(
                f"{self.in_flight} requests are in flight, as many as this endpoint takes. Try again later.",
                code="rate_limit_exceeded",
                status=429,
                retry_after_s=BUSY_RETRY_S,
            )
        # No await between the check above and this line: concurrent requests cannot exceed the limit.
        self.in_flight += 1
        self.changed.notify()
        try:
            yield
        finally:
            self.in_flight -= 1
            self.changed.notify()


def gateway_of(request: Request) -> Gateway:
    """Return the gateway of the application that received the request."""
    gateway = request.app.state.gateway
    assert isinstance(gateway, Gateway)
    return gateway


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def stopping_error() -> DialectError:
    """Return the error of a generation that the endpoint rejects or interrupts because it stops."""
    return DialectError("The endpoint is stopping.", code="stopping", status=503, retry_after_s=BUSY_RETRY_S)


class ServerMetrics:
    """Prometheus metrics of one endpoint, in a private registry so that one process can have several endpoints.

    The label ``route`` is the route's pattern and never the path: clients choose paths, and every new label costs memory.
    """

    def __init__(self) -> None:
        registry = self._registry = CollectorRegistry()
        self.requests = Counter(
            "skyrl_http_requests",
            "Finished requests by route and status (499: the client disconnected).",
            ["route", "status"],
            registry=registry,
        )
        self.duration = Histogram(
            "skyrl_http_request_seconds",
            "Time from the request's headers to the end of its response.",
            ["route"],
            buckets=_SECONDS,
            registry=registry,
        )
        self.in_flight = Gauge("skyrl_http_requests_in_flight", "Requests in progress.", registry=registry)
        self._prompt_tokens = Counter("skyrl_prompt_tokens", "Prompt tokens of responses.", registry=registry)
        self._sampled_tokens = Counter("skyrl_sampled_tokens", "Sampled tokens of responses.", registry=registry)
        self._policy_version = Gauge("skyrl_policy_version", "Policy version of the engines.", registry=registry)
        self._engines = Gauge("skyrl_engines", "Inference engines by state.", ["state"], registry=registry)
        self._sessions = Gauge("skyrl_sessions", "Open sessions.", registry=registry)

    def count_tokens(self, prompt: int, sampled: int) -> None:
        """Count the tokens of a finished response."""
        self._prompt_tokens.inc(prompt)
        self._sampled_tokens.inc(sampled)

    def text(self, client: RequestClient, open_sessions: int) -> bytes:
        """Return all metrics in Prometheus' text format, with the current state of the engines."""
        # Gauges of the engines are set on demand, so that no event has to update them.
        self._policy_version.set(client.policy_version)
        states = list(client.engine_states.values())
        for state in EngineState:
            self._engines.labels(str(state)).set(states.count(state))
        self._sessions.set(open_sessions)
        return generate_latest(self._registry)
