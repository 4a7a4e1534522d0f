"""The endpoint that agents speak to, and a session per run of an agent."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from skyrl_train.config.keys import did_you_mean
from skyrl_train.errors import ConfigError
from skyrl_train.generators.harness.sampling import RunSampling, SessionSampling
from skyrl_train.inference.chat_service import ChatService
from skyrl_train.inference.interface import SamplingParams
from skyrl_train.inference.server.app import create_app
from skyrl_train.inference.server.endpoint import EndpointServer
from skyrl_train.inference.server.settings import ServerSettings
from skyrl_train.inference.sessions import OpenedSession, SessionLimits, SessionStore

if TYPE_CHECKING:
    from skyrl_train.inference.client import RequestClient

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RunSession:
    """One run's session, its key, and how its requests are sampled."""

    opened: OpenedSession
    sampling: SessionSampling


class SessionEndpoint:
    """Serves ``client`` over HTTP between ``start`` and ``stop``.

    Args:
        settings: fields of :class:`ServerSettings`.
        limits: fields of :class:`SessionLimits`.
        agents_choose: see :class:`RunSampling`.

    Raises:
        ConfigError: (constructor) an unknown or impossible setting.
    """

    def __init__(
        self,
        client: RequestClient,
        *,
        settings: Mapping[str, Any],
        limits: Mapping[str, Any],
        agents_choose: bool,
    ) -> None:
        self._sampling = RunSampling(client, agents_choose=agents_choose)
        self._limits = _dataclass(SessionLimits, limits, "session_limits")
        self._store = SessionStore(client.renderer, self._limits, self._wait_of_others)
        service = ChatService(self._sampling, client.renderer)
        self._settings = _dataclass(ServerSettings, settings, "endpoint")
        self._server = EndpointServer(create_app(service, client, self._store, self._settings))
        self._others_may_begin: Callable[[], bool] = lambda: True
        self._base_url: str | None = None

    async def start(self) -> None:
        """Listens.

        Raises:
            ConfigError: the address cannot be listened on.
        """
        self._base_url = await self._server.start()

    async def stop(self) -> None:
        """Interrupts what still runs and stops listening. Idempotent."""
        self._base_url = None
        await self._server.stop(drain_s=0)

    @property
    def base_url(self) -> str:
        """What an OpenAI client takes as ``base_url``.

        Raises:
            ConfigError: the endpoint does not listen.
        """
        if self._base_url is None:
            raise ConfigError("The harness generator was not started: await generator.start() before generate().")
        return self._base_url

    @property
    def admin_key(self) -> str | None:
        """The key that opens further sessions, if there is one."""
        return self._settings.admin_key

    def pace(self, may_begin: Callable[[], bool]) -> None:
        """Asked from now on before anyone but the run opens a session; where it says no, they are to come back later."""
        self._others_may_begin = may_begin

    def _wait_of_others(self) -> float | None:
        return None if self._others_may_begin() else self._limits.retry_after_s

    @contextmanager
    def session(self, run: SamplingParams, seed: int | None, trajectory: str) -> Iterator[RunSession]:
        """A session for the time of the context; what it still generates at its end is cancelled.

        The client knows its requests as the trajectory's.

        The run has admitted its sample: neither ``session_limits.max_sessions`` nor :meth:`pace` hold it up.
        """
        opened = self._store.open(reserved=True)
        session_id = opened.session.id
        try:
            yield RunSession(opened, self._sampling.open(session_id, run, seed, trajectory))
        finally:
            self._sampling.close(session_id)
            self._store.close(session_id)


def _dataclass(cls: type[T], values: Mapping[str, Any], setting: str) -> T:
    known = getattr(cls, "__dataclass_fields__")  # noqa: B009  # the type of any dataclass has no such attribute
    for name in values:
        if name not in known:
            raise ConfigError(f"generator.kwargs.{setting}.{name} is unknown.{did_you_mean(name, known)}")
    plain = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
    return cls(**plain)
