"""Handlers of SIGTERM, SIGINT (Ctrl-C) and SIGHUP (a closed terminal) that work even if a call blocks the event loop.

    first signal ──> the event loop is asked to stop ──> checkpoint, exit 0
                            └── it does not respond for limit_s (a call blocks it) ──> like the second signal
    second signal ──> the process ends by the signal, at once

Python runs these handlers between two instructions of the main thread, also while a call blocks its event loop. asyncio's
handlers would wait until the loop responds.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any, Self

from skyrl_train.runtime.watchdog import blocking_call

logger = logging.getLogger(__name__)

INTERRUPTED = 130  # exit code of a command that Ctrl-C has ended
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
SAME_SIGNAL_S = 0.5  # one Ctrl-C may arrive twice: from the terminal, and from a launcher that forwards it
LISTEN_LIMIT_S = 60.0
LAST_LIMIT_S = 5.0  # for a main thread in a call that does not return to Python


@contextmanager
def stop_signals_as_ctrl_c() -> Iterator[None]:
    """Make SIGTERM and SIGHUP raise KeyboardInterrupt in the main thread, like Ctrl-C, until :class:`StopSignals` takes over."""
    previous = {
        number: signal.signal(number, signal.default_int_handler)
        for number in (signal.SIGTERM, signal.SIGHUP)
        if not _is_under_nohup(number)
    }
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _is_under_nohup(number: signal.Signals) -> bool:
    """Return whether the run is to outlive its terminal, whose end ``number`` would tell."""
    return number is signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN


class StopSignals:
    """Use ``with StopSignals(...)`` in the main thread, on the event loop to stop.

    Args:
        stop: called on the event loop after the first signal.
        before_end: called before the process ends by a signal, for example to restore the cursor of the terminal.
        limit_s: time limit for the event loop to respond to the first signal.
    """

    def __init__(
        self, stop: Callable[[], None], before_end: Callable[[], None], *, limit_s: float = LISTEN_LIMIT_S
    ) -> None:
        self._stop = stop
        self._before_end = before_end
        self._limit_s = limit_s
        self._loop: asyncio.AbstractEventLoop | None = None
        self._asked_at: float | None = None
        self._heard = threading.Event()
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        for number in STOP_SIGNALS:
            if _is_under_nohup(number):
                continue
            self._previous[number] = signal.signal(number, self._arrived)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._heard.set()
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _arrived(self, number: int, frame: FrameType | None) -> None:
        if self._asked_at is None:
            self._asked_at = time.monotonic()
            threading.Thread(target=self._insist, args=(number,), name="stop", daemon=True).start()
            assert self._loop is not None, "handlers are installed on entering"
            # Two callbacks in this order: a stop that raises must not look like a loop that does not respond.
            self._loop.call_soon_threadsafe(self._heard.set)
            self._loop.call_soon_threadsafe(self._stop)
        elif time.monotonic() - self._asked_at >= min(SAME_SIGNAL_S, self._limit_s):
            self._before_end()
            # The default handler ends the process with the exit status of this signal.
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def _insist(self, number: int) -> None:
        if not self._heard.wait(self._limit_s):
            assert self._loop is not None, "handlers are installed on entering"
            call = blocking_call(self._loop, threading.main_thread().ident or 0)
            logger.error("the run cannot stop, because a call blocks its event loop; the process ends now. %s", call)
            os.kill(os.getpid(), number)  # handled like a second signal
            if not self._heard.wait(LAST_LIMIT_S):
                os.kill(os.getpid(), signal.SIGKILL)
