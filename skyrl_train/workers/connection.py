"""A connection between a driver and an object that it hosts elsewhere: calls in both directions, start, death and stop.

    WorkerConnection (a Peer) ──batches of messages──> WorkerLink ~~> Peer in an actor, or a blocking loop on a Channel

The peer at each end batches the messages of one turn of its event loop. The driver's end also brings the host up, notices its
death, and lets it clean up before it is killed.
"""

from __future__ import annotations

import asyncio
import itertools
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from functools import partial
from inspect import isawaitable
from typing import Any, Protocol

from skyrl_train.errors import SkyRLError
from skyrl_train.runtime.concurrency import cancel_within
from skyrl_train.workers.messages import Call, Cancel, Failure, Item, LastWords, Message, PeerState, Result

CANCEL_LIMIT_S = 5.0  # time for served calls to clean up when the connection ends

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


class Channel(Protocol):
    """The end of a link that a blocking host has. Both methods raise EOFError once the driver's end is closed."""

    def receive(self, block: bool) -> list[Message]:
        """Return all messages that have arrived; with ``block`` at least one."""

    def send(self, messages: list[Message]) -> None:
        """Send a batch."""


class Peer:
    """Calls methods of the object at the other end, and runs the methods of ``served`` that the other end calls.

    All methods belong to one event loop.

    Args:
        transmit: sends a batch of messages; must not block.
        served: the object whose methods the other end may call; None: no calls are expected.
        gone_error: makes the error of calls after the connection has ended, from the reason.
        call_error: makes the error that a failed call raises.
        own_state: returns the state that travels with every batch (see :class:`PeerState`); None: no state is sent.
        on_state: takes the other end's state, before the messages that came with it.

    Attributes:
        gone: why the connection has ended; None: it has not.
        pending: by id, the future of each call, or the queue of each stream, that the other end has not answered.
        running: by id, the task of each call of the other end that runs here.
    """

    def __init__(
        self,
        transmit: Callable[[list[Message]], None],
        served: object = None,
        *,
        gone_error: Callable[[str], Exception] = ConnectionError,
        call_error: Callable[[Failure], Exception] = lambda failure: failure.error(SkyRLError, "the other end"),
        own_state: Callable[[], Any] = lambda: None,
        on_state: Callable[[Any], None] = lambda state: None,
    ) -> None:
        self.gone: str | None = None
        self.pending: dict[int, asyncio.Future[Any] | asyncio.Queue[Item | Result | Exception]] = {}
        self.running: dict[int, asyncio.Task[Any]] = {}
        self._transmit = transmit
        self._served = served
        self._gone_error = gone_error
        self._call_error = call_error
        self._own_state = own_state
        self._on_state = on_state
        self._ids = itertools.count(1)
        self._outbox: list[Message] = []

    # Calling the other end --------------------------------------------------------------------------------------------

    def call(self, method: str, *arguments: Any) -> asyncio.Future[Any]:
        """Start a call; its future has the result. Cancelling the future cancels the call, and does not wait for the clean-up.

        Raises:
            Exception: ``gone_error``, if the connection has ended. The future also raises ``call_error``.
        """
        self.raise_if_gone()
        call = Call(next(self._ids), method, arguments)
        reply = self.pending[call.id] = asyncio.get_running_loop().create_future()

        def ended(reply: asyncio.Future[Any]) -> None:
            del self.pending[call.id]
            if reply.cancelled():
                self._send(Cancel(call.id))

        reply.add_done_callback(ended)
        self._send(call)
        return reply

    async def call_to_end(self, method: str, *arguments: Any) -> Any:
        """Like :meth:`call`, but a cancelled caller returns only when the other end has cleaned up."""
        reply = self.call(method, *arguments)
        call_id = next(reversed(self.pending))  # of the call just made
        try:
            # Shielded, because a cancelled future would send a Cancel without a report of the end.
            return await asyncio.shield(reply)
        except asyncio.CancelledError:
            self._send(Cancel(call_id, report_end=True))
            await asyncio.wait([reply])
            raise

    async def stream(self, method: str, *arguments: Any) -> AsyncGenerator[Any, None]:
        """Yield the items of a streaming ``method``. Closing the iterator cancels the call at the other end."""
        self.raise_if_gone()
        call_id = next(self._ids)
        # Registered before the call is sent, so that its first item finds the queue.
        queue: asyncio.Queue[Item | Result | Exception] = asyncio.Queue()
        self.pending[call_id] = queue
        ended = False
        try:
            self._send(Call(call_id, method, arguments))
            while not ended:
                answer = await queue.get()
                ended = not isinstance(answer, Item)
                if isinstance(answer, Exception):
                    raise answer
                if isinstance(answer, Item) or answer.value is not None:
                    yield answer.value
        finally:
            del self.pending[call_id]
            if not ended:
                self._send(Cancel(call_id))

    def raise_if_gone(self) -> None:
        """Raise ``gone_error`` if the connection has ended."""
        if self.gone is not None:
            raise self._gone_error(self.gone)

    async def end(self, reason: str) -> None:
        """Cancel the calls that run here, then fail the pending ones. The first ``reason`` stays. Idempotent."""
        self.gone = self.gone or reason
        # Taken out first: the ends of these calls have no reader and send nothing.
        running, self.running = list(self.running.values()), {}
        # First, so that a caller that tries again elsewhere finds nothing left of the calls that it caused here.
        if running:
            await cancel_within(running, CANCEL_LIMIT_S)
        for waiting in self.pending.values():
            if isinstance(waiting, asyncio.Queue):
                waiting.put_nowait(self._gone_error(self.gone))
            elif not waiting.done():
                waiting.set_exception(self._gone_error(self.gone))

    # Messages ---------------------------------------------------------------------------------------------------------

    def deliver(self, messages: list[Message]) -> None:
        """Take a batch of the other end's messages."""
        for message in messages:
            match message:
                case Item() | Result() | Failure():
                    waiting = self.pending.get(message.id)
                    if waiting is None:
                        continue  # the call was cancelled while its answer travelled
                    answer = self._call_error(message) if isinstance(message, Failure) else message
                    if isinstance(waiting, asyncio.Queue):
                        waiting.put_nowait(answer)
                    elif not waiting.done():
                        if isinstance(answer, Exception):
                            waiting.set_exception(answer)
                        else:
                            waiting.set_result(answer.value)
                case Call():
                    task = asyncio.create_task(self._serve(message), name=f"serve-{message.method}")
                    self.running[message.id] = task
                    # A callback, because a task that is cancelled before its first step runs none of its code.
                    task.add_done_callback(partial(self._served_to_end, message.id))
                case Cancel():
                    if (running := self.running.get(message.id)) is not None:
                        # Without the entry, the end of the task sends no answer.
                        if not message.report_end:
                            del self.running[message.id]
                        running.cancel()
                case PeerState():
                    self._on_state(message.value)
                case LastWords():
                    self._lost(message.reason)

    def _lost(self, reason: str) -> None:
        """Take the last words of a hosted object; see :class:`WorkerConnection`."""

    def _send(self, message: Message) -> None:
        """Queue a message. All messages of one turn of the loop are sent together."""
        # The first message of a turn schedules the flush; later ones join its batch.
        if not self._outbox:
            asyncio.get_running_loop().call_soon(self._flush)
        self._outbox.append(message)

    def _flush(self) -> None:
        messages, self._outbox = self._outbox, []
        if messages and self.gone is None:
            try:
                state = self._own_state()
            except Exception as error:  # a hosted object of the user; the other end must not wait for the lost batch
                self._transmit([LastWords(f"its state cannot be read: {error!r}")])
                return
            if state is not None:
                # First in the batch, so that calls in it see the state of their sender.
                messages.insert(0, PeerState(state))
            self._transmit_apart(messages)

    def _transmit_apart(self, messages: list[Message]) -> None:
        """Send a batch. If a message cannot be pickled, only its own call fails, and the other messages are sent."""
        try:
            self._transmit(messages)
        except Exception as error:  # objects of the user raise anything when they are pickled
            if len(messages) > 1:
                for message in messages:
                    self._transmit_apart([message])
            else:
                self._refuse(messages[0], error)

    def _refuse(self, message: Message, error: Exception) -> None:
        """End the call of a message that cannot be sent."""
        match message:
            case Call():
                waiting = self.pending.get(message.id)
                if isinstance(waiting, asyncio.Queue):
                    waiting.put_nowait(error)
                elif waiting is not None and not waiting.done():
                    waiting.set_exception(error)
            case Item() | Result():
                # Without the entry, the end of a task that still runs sends no second answer.
                if (running := self.running.pop(message.id, None)) is not None:
                    running.cancel()
                self._transmit([Failure.of(message.id, error)])
            case PeerState():
                self._transmit([LastWords(f"its state cannot be sent: {error!r}")])
            case _:
                raise error

    # Serving the other end --------------------------------------------------------------------------------------------

    async def _serve(self, call: Call) -> Any:
        result = getattr(self._served, call.method)(*call.arguments)
        if not hasattr(result, "__aiter__"):
            return await result if isawaitable(result) else result
        async with aclosing(result):  # left early, the generator cleans up before the call ends
            async for item in result:
                self._send(Item(call.id, item))
        return None

    def _served_to_end(self, call_id: int, task: asyncio.Task[Any]) -> None:
        # Read the exception in any case: asyncio reports one that was never read.
        error = asyncio.CancelledError("it cancelled itself") if task.cancelled() else task.exception()
        if self.running.get(call_id) is task:
            del self.running[call_id]
            self._send(Result(call_id, task.result()) if error is None else Failure.of(call_id, error))


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
        if self.gone is not None:
            return
        self.gone = reason

        async def end_both_ends() -> None:
            await self.end(reason)
            await self.link.stop(graceful=False)
            if self._started:
                self._on_lost()

        self._ending = asyncio.create_task(end_both_ends(), name="worker-lost")
