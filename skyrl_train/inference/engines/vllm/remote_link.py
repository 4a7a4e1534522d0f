"""One vLLM server for as long as it is the same one: its calls, and the moment from which there is no answer any more."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

from skyrl_train.errors import EngineDeadError, EngineError, SkyRLError
from skyrl_train.inference.engines.vllm.remote_connection import Connection
from skyrl_train.inference.engines.vllm.remote_facts import Facts
from skyrl_train.inference.engines.vllm.remote_server import ENGINE_PATH, REQUESTS_PATH

T = TypeVar("T")
RETRY_S = 0.5  # between looks for a server that is still starting; nothing announces it


class ServerLink:
    """Every call ends with the server's answer or with the server's death, whichever is first.

    Args:
        on_death: hears once why the server is gone, before any call learns of it.
    """

    def __init__(self, connection: Connection, facts: Facts, on_death: Callable[[str], None]) -> None:
        self.connection = connection
        self.facts = facts
        self._on_death = on_death
        self._death: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._facts_now = Fresh(lambda: connection.get(ENGINE_PATH))
        self._requests_now = Fresh(lambda: connection.get(REQUESTS_PATH))

    async def post(self, path: str, body: Mapping[str, Any] | None = None, *, patient: bool = False) -> Any:
        """See :meth:`Connection.post`."""
        return await self.answer(self.connection.post(path, body, patient=patient))

    async def requests(self) -> Mapping[str, Any]:
        """The server's unfinished requests; see :func:`remote_server.unfinished`."""
        seen: Mapping[str, Any] = await self.answer(self._requests_now.get())
        return seen

    async def look(self) -> Facts:
        """What the server is now.

        Raises:
            EngineDeadError: it does not answer, its engine is dead, or it is another one than before.
        """
        try:
            facts = Facts.parse(await self.answer(self._facts_now.get()))
        except SkyRLError as error:
            self.die(str(error))
            raise self.dead() from error
        if facts.instance != self.facts.instance:
            self.die("it was started again and holds no published weights")
        elif facts.dead:
            self.die("its engine process is dead")
        if self._death.done():
            raise self.dead()
        return facts

    async def answer(self, call: Awaitable[T]) -> T:
        """Waits for ``call`` or the server's death.

        Raises:
            EngineDeadError: the server is gone.
        """
        pending = asyncio.ensure_future(call)
        try:
            either: set[asyncio.Future[Any]] = {pending, self._death}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        except BaseException:
            pending.cancel()
            raise
        if not pending.done():
            pending.cancel()
            await asyncio.gather(pending, return_exceptions=True)
            raise self.dead()
        try:
            return pending.result()
        except EngineDeadError as error:
            self.die(str(error))
            raise self.dead() from error

    def die(self, reason: str) -> None:
        """Every pending and later call raises EngineDeadError. Only the first reason counts."""
        if not self._death.done():
            self._on_death(reason)
            self._death.set_result(reason)

    def dead(self) -> EngineDeadError:
        """What calls raise from the death on."""
        return gone(self._death.result())


class Fresh:
    """Shares one look among all who want to see at least the present: never an answer that was asked for before."""

    def __init__(self, look: Callable[[], Awaitable[Any]]) -> None:
        self._look = look
        self._running: asyncio.Future[Any] | None = None
        self._next: asyncio.Future[Any] | None = None

    async def get(self) -> Any:
        """What there is to see after this call."""
        if self._next is None:
            self._next = asyncio.ensure_future(self._after(self._running))
        return await asyncio.shield(self._next)

    async def _after(self, running: asyncio.Future[Any] | None) -> Any:
        if running is not None:
            await asyncio.wait({running})
        self._running, self._next = self._next, None
        return await self._look()


async def wait_for_server(connection: Connection, url: str, timeout_s: float) -> Facts:
    """What the server is, once it is up and its engine lives.

    Raises:
        ConfigError: it refuses the key, or lacks the middleware.
        EngineDeadError: it is not up in time.
    """
    reason = "it did not answer"
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                try:
                    facts = Facts.parse(await connection.get(ENGINE_PATH))
                except EngineError as error:
                    reason = str(error)
                else:
                    if not facts.dead:
                        return facts
                    reason = "its engine process is dead"
                await asyncio.sleep(RETRY_S)
    except TimeoutError:
        raise EngineDeadError(f"No vLLM server at {url} within start_timeout_s={timeout_s:g}: {reason}") from None


def gone(reason: str) -> EngineDeadError:
    """The error of a server that is not there."""
    return EngineDeadError(f"The remote vLLM engine is gone: {reason}")
