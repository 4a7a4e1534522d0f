"""What the endpoint counts, in Prometheus' text format."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from skyrl_train.inference.client import RequestClient
from skyrl_train.inference.fleet import EngineState

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800, 3600)


class ServerMetrics:
    """Counters of one endpoint; a registry of its own, so that several can live in one process.

    ``route`` is the route's pattern, never the path, which a caller chooses.
    """

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self.requests = Counter(
            "skyrl_http_requests",
            "Requests answered, by route and status (499: the caller left).",
            ["route", "status"],
            registry=self._registry,
        )
        self._duration = Histogram(
            "skyrl_http_request_seconds",
            "From a request's head to the end of its answer.",
            ["route"],
            buckets=_SECONDS,
            registry=self._registry,
        )
        self.in_flight = Gauge("skyrl_http_requests_in_flight", "Requests being answered.", registry=self._registry)
        self._prompt_tokens = Counter("skyrl_prompt_tokens", "Prompt tokens of responses.", registry=self._registry)
        self._sampled_tokens = Counter("skyrl_sampled_tokens", "Sampled tokens of responses.", registry=self._registry)
        self._policy_version = Gauge("skyrl_policy_version", "The version that is served.", registry=self._registry)
        self._engines = Gauge("skyrl_engines", "Inference engines, by state.", ["state"], registry=self._registry)
        self._sessions = Gauge("skyrl_sessions", "Sessions that are open.", registry=self._registry)

    def answered(self, route: str, status: int, seconds: float) -> None:
        """A request is over."""
        self.requests.labels(route, str(status)).inc()
        self._duration.labels(route).observe(seconds)

    def tokens(self, prompt: int, sampled: int) -> None:
        """A response has ended; each of its tokens is counted once."""
        self._prompt_tokens.inc(prompt)
        self._sampled_tokens.inc(sampled)

    @contextmanager
    def answering(self) -> Iterator[None]:
        """Counts a request in flight."""
        self.in_flight.inc()
        try:
            yield
        finally:
            self.in_flight.dec()

    def text(self, client: RequestClient, open_sessions: int) -> bytes:
        """Everything, with a snapshot of the engines."""
        self._policy_version.set(client.policy_version)
        states = list(client.engine_states.values())
        for state in EngineState:
            self._engines.labels(str(state)).set(states.count(state))
        self._sessions.set(open_sessions)
        return generate_latest(self._registry)
