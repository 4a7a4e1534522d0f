"""Says what is stuck when nothing moves: which group, which engine, since when, and what the trainer waits for.

    a group ends, a step ends ──progress──> Watchdog ──nothing for limit_s──> describe() ──> say
    the event loop turns ──────answers────> LoopMonitor (a thread) ──no answer for limit_s──> the blocking call ──> say

It ends nothing: a rollout may take hours, and whoever reads the message knows better. What must end has limits of its own
(``rollout_timeout_s``, the engines' probes, the time-outs of a publication).
"""

from __future__ import annotations

import asyncio
import sys
import threading
import traceback
from collections.abc import Awaitable, Callable, Sequence
from types import TracebackType
from typing import Self

INNERMOST_CALLS = 12  # of a blocked loop's stack: the blocking call, and how the trainer came to it


class Phase:
    """What a loop is doing, and since when.

    Args:
        clock: in seconds.
        name: of what it does first.
    """

    def __init__(self, clock: Callable[[], float], name: str) -> None:
        self._clock = clock
        self._name = name
        self._since = clock()

    def enter(self, name: str) -> None:
        """From now on it does this."""
        self._name, self._since = name, self._clock()

    def describe(self) -> str:
        """One line."""
        return f"the trainer: {self._name}, for {self._clock() - self._since:.0f} s"


class Watchdog:
    """Speaks once when nothing has moved for ``limit_s``, and again after twice, four times, ... as long.

    Consumes progress; waits for the limit to pass without any; unblocked by time; produces messages.

    Args:
        limit_s: seconds without progress.
        clock: in seconds.
        describe: what to say, a line per part of the run; called only when something is to be said.
        say: takes the message.
        sleep: waits for seconds of ``clock``.
    """

    def __init__(
        self,
        limit_s: float,
        clock: Callable[[], float],
        describe: Callable[[], Sequence[str]],
        say: Callable[[str], None],
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._limit_s = limit_s
        self._clock = clock
        self._describe = describe
        self._say = say
        self._sleep = sleep
        self._patience_s = limit_s
        self._moved_at = self._speaks_at = clock()
        self._task: asyncio.Task[None] | None = None
        self.progress()

    def progress(self) -> None:
        """Something moved."""
        self._moved_at = self._clock()
        self._patience_s = self._limit_s
        self._speaks_at = self._moved_at + self._limit_s

    def start(self) -> None:
        """Watches in the background until :meth:`stop`."""
        self._task = asyncio.create_task(self.run(), name="watchdog")

    def stop(self) -> None:
        """Watches no more."""
        if self._task is not None:
            self._task.cancel()

    @property
    def error(self) -> BaseException | None:
        """What ended the watching."""
        task = self._task
        return task.exception() if task is not None and task.done() and not task.cancelled() else None

    async def run(self) -> None:
        """Watches until it is cancelled."""
        self.progress()
        while True:
            remaining_s = self._speaks_at - self._clock()
            if remaining_s > 0:
                # Progress may bring the next message forward, to no less than limit_s from then.
                await self._sleep(min(remaining_s, self._limit_s))
            else:
                self._speak()

    def _speak(self) -> None:
        stuck_s = self._clock() - self._moved_at
        try:
            described = self._describe()
        except Exception as error:  # what it says is for a reader; a run must not end for it
            described = [f"(it cannot be described: {error!r})"]
        lines = "".join(f"\n  {line}" for line in described)
        self._say(f"no group and no step has ended for {stuck_s:.0f} s. This is what the run is busy with:{lines}")
        self._patience_s *= 2
        self._speaks_at = self._clock() + self._patience_s


class LoopMonitor:
    """Notices, from a thread of its own, that the event loop does not turn: somebody runs a blocking call on it.

    Such a call stops everything in the process, the watchdog included. The message has the task and the place in the code.
    ``with LoopMonitor(...)`` on the loop that is to be watched.

    Args:
        limit_s: seconds for which the loop may not turn.
        say: takes the message; called in the monitor's thread, once per call that blocks.
    """

    def __init__(self, limit_s: float, say: Callable[[str], None]) -> None:
        self._limit_s = limit_s
        self._say = say
        self._loop: asyncio.AbstractEventLoop | None = None
        self._wake = threading.Event()  # the loop has answered, or the monitor is closed
        self._closed = threading.Event()
        self._watched_thread = 0

    def __enter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._watched_thread = threading.get_ident()
        threading.Thread(target=self._watch, name="loop-monitor", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._closed.set()
        self._wake.set()

    def _watch(self) -> None:
        loop = self._loop
        assert loop is not None, "the monitor was entered"
        while not self._closed.is_set():
            self._wake.clear()
            try:
                loop.call_soon_threadsafe(self._wake.set)
            except RuntimeError:  # the loop is closed
                return
            if not self._wake.wait(self._limit_s) and not self._closed.is_set():
                self._say(self._message(loop))
                self._wake.wait()
            self._closed.wait(self._limit_s)

    def _message(self, loop: asyncio.AbstractEventLoop) -> str:
        return (
            f"the control loop has not turned for {self._limit_s:g} s, and with it all rollouts, training and signals stand "
            f"still. Use a thread (asyncio.to_thread) or an asynchronous call instead of this one: "
            f"{blocking_call(loop, self._watched_thread)}"
        )


def blocking_call(loop: asyncio.AbstractEventLoop, thread: int) -> str:
    """The task that runs on ``loop`` now and where it is, innermost call first; to be called from another thread.

    Args:
        thread: the identifier of the loop's.
    """
    task = asyncio.current_task(loop)
    frame = sys._current_frames().get(thread)
    calls = traceback.extract_stack(frame)[-INNERMOST_CALLS:] if frame is not None else []
    place = "".join(f"\n  {call.filename}:{call.lineno} in {call.name}" for call in reversed(calls))
    return ("no task" if task is None else f"task {task.get_name()!r}") + place
