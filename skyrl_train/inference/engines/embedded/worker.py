"""The loop around the engine core: it owns the model, in a thread or in a process of its own.

consumes        commands from its channel: all that are there, between two decode steps
waits for       a command, when the core has nothing to do
unblocked by    the channel
produces        a batch of events for the commands, before the step that they let begin, and one for the step

Weights are received in a thread beside it, one update at a time: sampling waits for the load only.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

from skyrl_train.errors import EngineError, RequestError, SkyRLError
from skyrl_train.inference.engines.embedded.core import EmbeddedEngineCore
from skyrl_train.inference.engines.embedded.messages import (
    READY_CALL,
    Abort,
    Add,
    Call,
    Close,
    Command,
    Died,
    Event,
    Method,
    Refused,
    Reply,
)
from skyrl_train.inference.interface import EngineHealth

logger = logging.getLogger(__name__)


class Channel(Protocol):
    """The worker's end. Both methods raise ``EOFError`` once the other end is gone."""

    def receive(self, block: bool) -> list[Command]:
        """All commands that have arrived; with ``block`` at least one."""

    def send(self, events: list[Event]) -> None: ...


class Worker:
    """Builds the core with ``build`` and serves it until ``Close`` or the end of the channel."""

    def __init__(self, build: Callable[[], EmbeddedEngineCore], channel: Channel) -> None:
        self._build = build
        self._channel = channel
        self._core: EmbeddedEngineCore
        self._sending = threading.Lock()
        self._receiving = ThreadPoolExecutor(1, "weight-reception")

    def run(self) -> None:
        """Returns when there is nobody left to serve. Failures are logged and told to the proxy as ``Died``."""
        try:
            self._core = self._build()
            try:
                self._send([Reply(READY_CALL)])
                self._serve()
            finally:
                self._receiving.shutdown(cancel_futures=True)
                self._core.close()
        except EOFError:
            return
        except SkyRLError as error:
            self._say_last(str(error))
        except Exception as error:  # the model's code can raise anything; whoever waits must hear of it
            logger.exception("The embedded engine failed.")
            self._say_last(f"the engine failed: {type(error).__name__}: {error}")

    def _serve(self) -> None:
        service = Service(self._core)
        while True:
            events: list[Event] = []
            for command in self._channel.receive(block=not self._core.runnable):
                if isinstance(command, Close):
                    return
                if isinstance(command, Call) and command.method is Method.RECEIVE:
                    self._receiving.submit(self._receive, command)
                else:
                    events += service.handle(command)
            self._send(events)  # whoever resumed the engine must not wait for its next step
            self._send(service.step())

    def _receive(self, call: Call) -> None:
        try:
            self._core.receive(call.argument)
            reply = Reply(call.call_id)
        except Exception as error:  # whoever publishes must hear of it
            logger.exception("The embedded engine failed to receive weights.")
            reply = Reply(call.call_id, error=f"the weights could not be received: {type(error).__name__}: {error}")
        with contextlib.suppress(EOFError):  # nobody is left to hear it; the loop learns of that by itself
            self._send([reply])

    def _send(self, events: list[Event]) -> None:
        if events:
            with self._sending:
                self._channel.send(events)

    def _say_last(self, message: str) -> None:
        try:
            self._send([Died(message)])
        except EOFError:
            return


class Service:
    """What a core says to commands, and what its steps say: the worker's half of the protocol, without a loop."""

    def __init__(self, core: EmbeddedEngineCore) -> None:
        self._core = core
        self._pausing: list[int] = []  # calls of pause() that are not answered yet
        self._busy_s = 0.0

    def step(self) -> list[Event]:
        """One decode step, if there is something to do, and answers to the pauses that wait for no further one."""
        events: list[Event] = []
        if self._core.runnable:
            began = time.perf_counter()
            events += self._core.step()
            self._busy_s += time.perf_counter() - began
        if self._core.paused and self._pausing:
            events += [Reply(call_id) for call_id in self._pausing]
            self._pausing.clear()
        return events

    def handle(self, command: Add | Abort | Call) -> list[Event]:
        """Does what ``command`` asks, between two steps."""
        events: list[Event] = []
        if isinstance(command, Add):
            try:
                self._core.add(command)
            except RequestError as error:
                events.append(Refused(command.request_id, str(error)))
        elif isinstance(command, Abort):
            events += self._core.abort(command.request_ids)
        elif isinstance(command, Call):
            try:
                self._answer(command, events)
            except EngineError as error:
                events.append(Reply(command.call_id, error=str(error)))
        return events

    def _answer(self, call: Call, events: list[Event]) -> None:
        core = self._core
        value: Any = None
        match call.method:
            case Method.PAUSE:
                events += core.pause(call.argument)
                self._pausing.append(call.call_id)
                return
            case Method.RESUME:
                core.resume()
                events += [Reply(late, error="The engine was resumed before it was paused.") for late in self._pausing]
                self._pausing.clear()
            case Method.SLEEP:
                core.sleep()
            case Method.WAKE_UP:
                core.wake_up()
            case Method.ABORT_ALL:
                events += core.abort()
            case Method.RECEIVE:
                core.receive(call.argument)
            case Method.LOAD:
                core.load(call.argument)
                value = core.policy_version
            case Method.HEALTH:
                value = self._health()
            case Method.CHECKSUM:
                value = core.served_checksum()
        events.append(Reply(call.call_id, value))

    def _health(self) -> EngineHealth:
        core = self._core
        return EngineHealth(
            alive=True,
            policy_version=core.policy_version,
            running=core.running,
            waiting=core.waiting,
            paused=core.paused,
            generated_tokens=core.generated_tokens,
            prefill_tokens=core.prefill_tokens,
            busy_s=self._busy_s,
        )
