"""The driver's end of a hosted object: start with a time limit, health, death, and a graceful stop before the kill."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from skyrl_train.workers.messages import Message
from skyrl_train.workers.peer import Peer

OnMessages = Callable[[list[Message]], None]
OnGone = Callable[[str], None]


class StartError(Exception):
    """The host of an object cannot be brought up; the message says why."""


class WorkerLink(ABC):
    """Brings up the host of an object, and carries batches of messages both ways, in order.

    A link is used once. All methods and callbacks belong to the driver's event loop.
    """

    @abstractmethod
    async def start(self, on_messages: OnMessages, on_gone: OnGone) -> None:
        """Bring the host up. ``on_gone`` is told once when it has ended, and why.

        Raises:
            StartError: it cannot be brought up.
        """

    @abstractmethod
    def send(self, messages: list[Message]) -> None:
        """Send a batch; never blocks. It is lost if the host is gone."""

    @abstractmethod
    async def stop(self, graceful: bool) -> None:
        """End the host and wait for its end; ``graceful``: let it clean up first. Idempotent, also without ``start``."""

    async def diagnosis(self) -> str:
        """Say what a start that takes too long may wait for."""
        return ""


class WorkerConnection(Peer):
    """Calls to one hosted object. After its death every pending and further call raises ``gone_error`` at once.

    Used for one life of the object; a restart needs a new connection.

    Args:
        link: brings the host up.
        on_lost: called when the object has died (not after :meth:`stop`), after its calls have failed.
        peer_options: see :class:`Peer`.
    """

    def __init__(
        self,
        link: WorkerLink,
        *,
        gone_error: Callable[[str], Exception],
        on_lost: Callable[[], None] = lambda: None,
        **peer_options: Any,
    ) -> None:
        super().__init__(link.send, gone_error=gone_error, **peer_options)
        self.link = link
        self._on_lost = on_lost
        self._started = False
        self._ending: asyncio.Task[None] | None = None

    async def start(self, *arguments: Any, timeout_s: float | None = None) -> Any:
        """Bring the host up and return what the object's ``start(*arguments)`` returns. A failed start leaves nothing.

        Args:
            timeout_s: limit of all of it, waiting for resources included; None: no limit.

        Raises:
            Exception: ``gone_error`` if the host did not come up in time or died meanwhile; ``call_error`` if the object
                could not be built.
        """
        try:
            async with asyncio.timeout(timeout_s):
                await self.link.start(self.deliver, self._lost)
                result = await self.call("start", *arguments)
        except TimeoutError:
            await self.stop("it did not start in time")
            # The usual cause is a cluster without free resources, which the link can name.
            raise self._gone_error(f"it did not start within {timeout_s:g} s. {await self.link.diagnosis()}") from None
        except StartError as error:
            await self.stop("it did not start")
            raise self._gone_error(f"it did not start: {error}") from error
        except BaseException:
            await self.stop("it did not start")
            raise
        self._started = True
        return result

    async def stop(self, reason: str = "it was stopped") -> None:
        """End the object, gracefully if it still answers; pending calls fail with ``reason``. Idempotent."""
        # Read before end(), which sets the reason: a dead or half-started object cannot clean up.
        answers = self._started and self.gone is None
        await self.end(reason)
        if self._ending is not None:
            await self._ending
        await self.link.stop(graceful=answers)

    def _lost(self, reason: str) -> None:
        """Take the end of the host, or the last words of the object."""
        # The first reason stays: later reports are consequences of it.
        if self.gone is None:
            self.gone = reason
            self._ending = asyncio.create_task(self._end_lost(reason), name="worker-lost")

    async def _end_lost(self, reason: str) -> None:
        await self.end(reason)
        await self.link.stop(graceful=False)
        if self._started:
            self._on_lost()
