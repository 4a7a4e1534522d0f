"""One end of a connection between a driver and a hosted object: calls the other end, and serves its calls.

Peer ──batches of messages (one per turn of the loop)──> transmit ~~> deliver ──> Peer
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from inspect import isawaitable
from typing import Any

from skyrl_train.errors import SkyRLError
from skyrl_train.runtime.concurrency import cancel_within
from skyrl_train.workers.messages import Call, Cancel, Failure, Item, LastWords, Message, Result, State

CANCEL_LIMIT_S = 5.0  # time for served calls to clean up when the connection ends


def _plain_error(failure: Failure) -> Exception:
    return failure.error(SkyRLError, "the other end")


class Peer:
    """Calls methods of the object at the other end, and runs the methods of ``served`` that the other end calls.

    All methods belong to one event loop.

    Args:
        transmit: sends a batch of messages; must not block.
        served: the object whose methods the other end may call; None: no calls are expected.
        gone_error: makes the error of calls after the connection has ended, from the reason.
        call_error: makes the error that a failed call raises.
        own_state: returns the state that travels with every batch (see :class:`State`); None: no state is sent.
        on_state: takes the other end's state, before the messages that came with it.
    """

    def __init__(
        self,
        transmit: Callable[[list[Message]], None],
        served: object = None,
        *,
        gone_error: Callable[[str], Exception] = ConnectionError,
        call_error: Callable[[Failure], Exception] = _plain_error,
        own_state: Callable[[], Any] | None = None,
        on_state: Callable[[Any], None] | None = None,
    ) -> None:
        self.gone: str | None = None  # why the connection has ended
        self._transmit = transmit
        self._served = served
        self._gone_error = gone_error
        self._call_error = call_error
        self._own_state = own_state
        self._on_state = on_state
        self._ids = itertools.count(1)
        self._outbox: list[Message] = []
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._streams: dict[int, asyncio.Queue[Item | Result | Exception]] = {}
        self._running: dict[int, asyncio.Task[Any]] = {}

    @property
    def num_pending(self) -> int:
        """Calls that the other end has not answered."""
        return len(self._calls)

    @property
    def num_running(self) -> int:
        """Calls of the other end that run here."""
        return len(self._running)

    # Calling the other end --------------------------------------------------------------------------------------------

    def submit(self, method: str, *arguments: Any) -> asyncio.Future[Any]:
        """Start a call. Cancelling the future cancels the call at the other end.

        Raises:
            Exception: ``gone_error``, if the connection has ended.
        """
        return self._submit(method, arguments)[1]

    async def call(self, method: str, *arguments: Any) -> Any:
        """Return what ``method`` returns at the other end. A cancelled caller does not wait for the clean-up there.

        Raises:
            Exception: ``call_error`` or ``gone_error``.
        """
        return await self._submit(method, arguments)[1]

    async def call_to_end(self, method: str, *arguments: Any) -> Any:
        """Like :meth:`call`, but a cancelled caller returns only when the other end has cleaned up."""
        call_id, reply = self._submit(method, arguments)
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
        queue = self._streams[call_id] = asyncio.Queue()
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
            del self._streams[call_id]
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
        running, self._running = list(self._running.values()), {}
        # First, so that a caller that tries again elsewhere finds nothing left of the calls that it caused here.
        if running:
            await cancel_within(running, CANCEL_LIMIT_S)
        for reply in self._calls.values():
            if not reply.done():
                reply.set_exception(self._gone_error(self.gone))
        for queue in self._streams.values():
            queue.put_nowait(self._gone_error(self.gone))

    def _submit(self, method: str, arguments: tuple[Any, ...]) -> tuple[int, asyncio.Future[Any]]:
        self.raise_if_gone()
        call_id = next(self._ids)
        reply = self._calls[call_id] = asyncio.get_running_loop().create_future()
        reply.add_done_callback(lambda _: self._answered(call_id, reply))
        self._send(Call(call_id, method, arguments))
        return call_id, reply

    def _answered(self, call_id: int, reply: asyncio.Future[Any]) -> None:
        del self._calls[call_id]
        if reply.cancelled():
            self._send(Cancel(call_id))

    # Messages ---------------------------------------------------------------------------------------------------------

    def deliver(self, messages: list[Message]) -> None:
        """Take a batch of the other end's messages."""
        for message in messages:
            match message:
                case Item():
                    # The stream may be closed: a cancelled call can be answered before the other end hears of it.
                    if (queue := self._streams.get(message.id)) is not None:
                        queue.put_nowait(message)
                case Result() | Failure():
                    self._take_end(message)
                case Call():
                    self._run(message)
                case Cancel():
                    if (task := self._running.get(message.id)) is not None:
                        # Without the entry, the end of the task sends no answer.
                        if not message.report_end:
                            del self._running[message.id]
                        task.cancel()
                case State():
                    if self._on_state is not None:
                        self._on_state(message.value)
                case LastWords():
                    self._lost(message.reason)

    def _take_end(self, message: Result | Failure) -> None:
        if (queue := self._streams.get(message.id)) is not None:
            queue.put_nowait(message if isinstance(message, Result) else self._call_error(message))
        elif (reply := self._calls.get(message.id)) is not None and not reply.done():
            if isinstance(message, Result):
                reply.set_result(message.value)
            else:
                reply.set_exception(self._call_error(message))

    def _lost(self, reason: str) -> None:
        """Take the last words of a hosted object; see :class:`WorkerConnection`."""

    def _send(self, message: Message) -> None:
        """Queue a message; those of one turn of the loop travel together."""
        # The first message of a turn schedules the flush; later ones join its batch.
        if not self._outbox:
            asyncio.get_running_loop().call_soon(self._flush)
        self._outbox.append(message)

    def _flush(self) -> None:
        messages, self._outbox = self._outbox, []
        if messages and self.gone is None:
            if self._own_state is not None:
                # First in the batch, so that calls in it see the state of their sender.
                messages.insert(0, State(self._own_state()))
            self._transmit(messages)

    # Serving the other end --------------------------------------------------------------------------------------------

    def _run(self, call: Call) -> None:
        task = asyncio.create_task(self._serve(call), name=f"serve-{call.method}")
        self._running[call.id] = task
        task.add_done_callback(lambda _: self._served_to_end(call.id, task))

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
        if self._running.get(call_id) is task:
            del self._running[call_id]
            self._send(Result(call_id, task.result()) if error is None else Failure.of(call_id, error))
