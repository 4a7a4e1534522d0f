"""Reports a stuck run: which group, which engine, since when, and what the trainer waits for.

    a group or a step ends ──progress──> Watchdog ──nothing for limit_s──> describe() ──> say
    the event loop runs ─────answers───> LoopMonitor (a thread) ──no answer for limit_s──> the blocking call ──> say

It stops nothing: a rollout may take hours, and the reader of the message can judge. Other limits end what must end
(``rollout_timeout_s``, the health checks of engines, the time limits of a weight sync).
"""

from __future__ import annotations

import asyncio
import sys
import threading
import traceback
from collections.abc import Awaitable, Callable, Sequence
from types import TracebackType
from typing import Self

BLOCKED_S = 20.0  # nothing may block the event loop for so long; a waiting rollout may take hours
LOOK_S = 1.0  # between two looks at the event loop
INNERMOST_CALLS = 24  # of the stack of a blocked loop: a request of openai's client is 17 calls below the user's line


class Phase:
    """The current activity of the trainer and its start time.

    Args:
        clock: in seconds.
        name: the first activity, as a verb phrase.
    """

    def __init__(self, clock: Callable[[], float], name: str) -> None:
        self._clock = clock
        self._name = name
        self._since = clock()

    def enter(self, name: str) -> None:
        """Set the current activity."""
        self._name, self._since = name, self._clock()

    def describe(self) -> str:
        """Return one line with the activity and its duration."""
        return f"the trainer {self._name}, for {self._clock() - self._since:.0f} s"


class Watchdog:
    """Reports when there is no progress for ``limit_s``, and again after twice, four times, ... as long.

    Consumes progress; waits until the limit passes without any; unblocked by time; produces messages.

    Args:
        limit_s: seconds without progress.
        clock: in seconds.
        describe: returns a line per part of the run; called only for a report.
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
        self._task: asyncio.Task[None] | None = None
        self.progress()

    def progress(self) -> None:
        """Record progress."""
        self._moved_at = self._clock()
        self._patience_s = self._limit_s
        self._speaks_at = self._moved_at + self._limit_s

    def start(self) -> None:
        """Watch in the background until :meth:`stop`."""
        self._task = asyncio.create_task(self.run(), name="watchdog")

    def stop(self) -> None:
        """Stop watching."""
        if self._task is not None:
            self._task.cancel()

    @property
    def error(self) -> BaseException | None:
        """The error that ended the watching, if any."""
        task = self._task
        return task.exception() if task is not None and task.done() and not task.cancelled() else None

    async def run(self) -> None:
        """Watch until cancelled."""
        self.progress()
        while True:
            remaining_s = self._speaks_at - self._clock()
            if remaining_s > 0:
                # Progress may move the next message forward, but not closer than limit_s.
                await self._sleep(min(remaining_s, self._limit_s))
            else:
                self._speak()

    def _speak(self) -> None:
        stuck_s = self._clock() - self._moved_at
        try:
            described = self._describe()
        except Exception as error:  # a report must not end the run
            described = [f"(the description failed: {error!r})"]
        lines = "".join(f"\n  {line}" for line in described)
        self._say(f"no group and no step has ended for {stuck_s:.0f} s. Current activities of the run:{lines}")
        # Rarer each time: a rollout of many hours must not fill the log.
        self._patience_s *= 2
        self._speaks_at = self._clock() + self._patience_s


class LoopMonitor:
    """Detects, from a separate thread, that a blocking call stops the event loop.

    Such a call stops everything in the process, including the watchdog. The message names the task and the source line. Use
    ``with LoopMonitor(...)`` on the loop to watch.

    Args:
        limit_s: seconds for which the loop may be blocked.
        say: takes the message; called in the monitor's thread, once per blocking call.
    """

    def __init__(self, limit_s: float, say: Callable[[str], None]) -> None:
        self._limit_s = limit_s
        self._say = say
        self._loop: asyncio.AbstractEventLoop | None = None
        self._wake = threading.Event()  # set when the loop has answered, or the monitor is closed
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
                self._say(
                    f"a blocking call has stopped the event loop for {self._limit_s:g} s, and with it all rollouts, training "
                    f"and signals. Use a thread (asyncio.to_thread) or an asynchronous call instead of this one: "
                    f"{blocking_call(loop, self._watched_thread)}"
                )
                # One message per blocking call: wait for its end before watching again.
                self._wake.wait()
            self._closed.wait(min(self._limit_s, LOOK_S))


def blocking_call(loop: asyncio.AbstractEventLoop, thread: int) -> str:
    """Return the task that runs on ``loop`` now and its stack, innermost call first. Call it from another thread.

    Args:
        thread: identifier of the loop's thread.
    """
    task = asyncio.current_task(loop)
    frame = sys._current_frames().get(thread)
    calls = traceback.extract_stack(frame)[-INNERMOST_CALLS:] if frame is not None else []
    place = "".join(f"\n  {call.filename}:{call.lineno} in {call.name}" for call in reversed(calls))
    return ("no task" if task is None else f"task {task.get_name()!r}") + place
