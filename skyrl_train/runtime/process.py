"""Process-wide helpers: daemon threads for blocking calls, signal handlers, garbage collection.

A call that hangs (such as a request without a time limit in a user's generator) must cost no more than its thread. asyncio's
default executor has few threads, so a few hung calls stop every ``asyncio.to_thread``, including checkpoints and weight
syncs; and the program cannot exit before all of them return.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import resource
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

MAX_THREADS = 512
SHUTDOWN_LIMIT_S = 5.0


class DaemonThreadPool(ThreadPoolExecutor):
    """Runs each call in a daemon thread, up to ``max_threads`` at once; further calls wait.

    A ``ThreadPoolExecutor`` because an event loop accepts no other default executor. It does not use the threads of that
    class, for which the interpreter waits at exit.

    Args:
        name: of the threads, with a number behind it.
        shutdown_limit_s: time limit of :meth:`shutdown` for running calls; after that they are abandoned.
    """

    def __init__(
        self, max_threads: int = MAX_THREADS, *, name: str = "call", shutdown_limit_s: float = SHUTDOWN_LIMIT_S
    ) -> None:
        # Its threads are never started, because submit() is overridden.
        super().__init__(max_workers=1)
        self._max_threads = max_threads
        self._name = name
        self._shutdown_limit_s = shutdown_limit_s
        self._state = threading.Condition()
        self._calls: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._started = 0
        self._idle = 0
        self._ended = False

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Call ``fn`` in a thread.

        Raises:
            RuntimeError: after :meth:`shutdown`.
        """
        future: Future[T] = Future()
        with self._state:
            if self._ended:
                raise RuntimeError("cannot schedule new futures after shutdown")
            self._calls.append((future, lambda: fn(*args, **kwargs)))
            # An idle thread takes the call; otherwise a new one starts, up to the limit.
            if self._idle >= len(self._calls):
                self._state.notify()
            elif self._started < self._max_threads:
                self._started += 1
                name = f"{self._name}-{self._started}"
                threading.Thread(target=self._work, name=name, daemon=True).start()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Accept no more calls. Wait for the current ones, at most ``shutdown_limit_s``."""
        with self._state:
            self._ended = True
            while cancel_futures and self._calls:
                self._calls.popleft()[0].cancel()
            self._state.notify_all()
            if wait:
                self._state.wait_for(lambda: self._started == 0, self._shutdown_limit_s)

    def _work(self) -> None:
        while True:
            with self._state:
                self._idle += 1
                self._state.wait_for(lambda: bool(self._calls) or self._ended)
                self._idle -= 1
                # After a shutdown, the calls that are queued still run.
                if not self._calls:
                    self._started -= 1
                    self._state.notify_all()
                    return
                future, function = self._calls.popleft()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                result = function()
            except BaseException as error:  # raised where the future is awaited
                future.set_exception(error)
            else:
                future.set_result(result)
            del future, function  # an idle thread must not keep objects alive


def in_lasting_thread(function: Callable[[], object]) -> None:
    """Run ``function`` in a thread that, on success, lives as long as this process.

    For functions that start processes which the kernel ends together with the starting thread, such as Ray's local cluster.
    Started from the thread pool of an event loop, the cluster would end with that loop, and a restarted run would miss it.
    """
    ended: Future[None] = Future()

    def run() -> None:
        try:
            function()
        except BaseException as error:
            ended.set_exception(error)
        else:
            ended.set_result(None)
            threading.Event().wait()

    threading.Thread(target=run, name="ray", daemon=True).start()
    ended.result()


@contextmanager
def keeping_signal_handlers() -> Iterator[None]:
    """Restore the process's handlers of SIGTERM and SIGINT after the block.

    For libraries that install handlers below Python, which then never sees the signal. Works in any thread, unlike
    ``signal.signal``.
    """
    numbers = (signal.SIGTERM, signal.SIGINT)
    get, put = ctypes.pythonapi.PyOS_getsig, ctypes.pythonapi.PyOS_setsig
    get.restype = put.restype = ctypes.c_void_p
    before = [get(number) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            put(number, ctypes.c_void_p(handler))


@contextmanager
def gc_paused() -> Iterator[None]:
    """Inside the block, collect no garbage; exempt what exists at its end from collection, until ``gc.unfreeze()``.

    For large imports. They make half a million objects that stay: looking at them again and again takes a fifth of the time.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if enabled:
            gc.enable()


# Thresholds of the young, middle and full collections. Objects that survive a young collection mostly belong to a group in
# flight, have no cycles, and are freed by their reference counts: a middle collection would walk all of them for nothing, and a
# full one all groups (0.6 s with 5,000). Each now runs once per two million objects, about 25,000 trajectories.
_GC_THRESHOLDS = (2_000, 1_000, 1)


@contextmanager
def gc_tuned() -> Iterator[None]:
    """Inside the block, exempt existing objects from garbage collection and make all but young collections rare.

    Enter it once everything is imported and built. Otherwise full collections block the event loop and take as much processor
    time as all other control work.
    """
    previous = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_GC_THRESHOLDS)
    try:
        yield
    finally:
        gc.set_threshold(*previous)
        gc.unfreeze()  # objects still frozen at exit outlive the interpreter, and extension modules report them as leaked


def resident_bytes() -> int:
    """Return the resident memory of this process; where the system has no ``/proc``, its peak."""
    try:
        return int(Path("/proc/self/statm").read_bytes().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except FileNotFoundError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


class LogFile(logging.FileHandler):
    """A log on a disk that may be full or gone: lines are lost then, and the error to see is the run's own."""

    def handleError(self, record: logging.LogRecord) -> None:
        if not isinstance(sys.exception(), OSError):
            super().handleError(record)

    def close(self) -> None:
        with suppress(OSError):
            super().close()


def add_log_file(path: Path) -> logging.Handler:
    """Append this library's log from INFO on to ``path``.

    Returns:
        The handler, which the caller removes and closes, or leaves to the end of the process.
    """
    handler = LogFile(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    library = logging.getLogger("skyrl_train")
    library.setLevel(min(logging.INFO, library.getEffectiveLevel()))
    library.addHandler(handler)
    return handler


def write_output_to(path: Path) -> None:
    """Append all output of this process to ``path``: standard output and error, of native code too, and this library's log."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    os.close(descriptor)
    add_log_file(path)
