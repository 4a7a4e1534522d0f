"""The endpoint inside a running event loop: no thread of its own, and no signal handler taken from the trainer."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator

import uvicorn
from fastapi import FastAPI

from skyrl_train.errors import ConfigError
from skyrl_train.inference.server.gateway import Gateway
from skyrl_train.inference.server.limits import limited_protocol
from skyrl_train.inference.server.settings import ServerSettings

BACKLOG = 4096
DATE_S = 1.0
EXIT_S = 5.0  # for what has been interrupted to say so


class _Server(uvicorn.Server):
    """Uvicorn without its polling: it begins and ends when it is told to."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening = asyncio.Event()
        self._asked_to_exit = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals belong to whoever runs the loop."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listening.set()

    def exit(self) -> None:
        """Lets ``serve`` return."""
        self.should_exit = True
        self._asked_to_exit.set()

    async def main_loop(self) -> None:
        while not await self.on_tick(0):  # sets the time in the Date header
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(DATE_S):
                    await self._asked_to_exit.wait()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Closes listeners and idle connections; what still answers has ``EXIT_S`` seconds."""
        for server in self.servers:
            server.close()
        for listener in sockets or ():
            listener.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        if self.server_state.tasks:
            _, late = await asyncio.wait(self.server_state.tasks, timeout=EXIT_S)
            for task in late:
                task.cancel()
            if late:
                await asyncio.wait(late)
        for connection in list(self.server_state.connections):
            connection.transport.abort()  # a reader that stands still would keep it open


class EndpointServer:
    """Serves an application until it is stopped.

    Args:
        app: from :func:`~skyrl_train.inference.server.app.create_app`.
    """

    def __init__(self, app: FastAPI) -> None:
        gateway = app.state.gateway
        assert isinstance(gateway, Gateway)
        self._gateway = gateway
        self._app = app
        self._server: _Server | None = None
        self._serving: asyncio.Task[None] | None = None

    async def start(self) -> str:
        """Listens, and returns the base URL: what an OpenAI client takes as ``base_url``.

        Raises:
            ConfigError: the address cannot be listened on.
        """
        settings = self._gateway.settings
        listener = _bind(settings)
        config = uvicorn.Config(
            self._app,
            http=limited_protocol(settings),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            backlog=BACKLOG,
            timeout_keep_alive=settings.keep_alive_s,
        )
        self._server = _Server(config)
        self._serving = asyncio.create_task(self._server.serve([listener]), name="endpoint")
        await self._server.listening.wait()
        host, port = listener.getsockname()[:2]
        return f"http://{f'[{host}]' if ':' in host else host}:{port}/v1"

    async def stop(self, drain_s: float = 10.0) -> None:
        """Takes nothing new, lets what runs end for ``drain_s`` seconds, then interrupts it. Idempotent."""
        if self._server is None or self._serving is None:
            return
        self._gateway.refuse()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(drain_s):
                await self._gateway.drained()
        self._gateway.interrupt()
        self._server.exit()
        await self._serving
        self._server = self._serving = None


def _bind(settings: ServerSettings) -> socket.socket:
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # a peer that vanished is found out
        listener.bind((settings.host.strip("[]"), settings.port))
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot listen on {settings.host}:{settings.port}: {error.strerror}") from error
    return listener
