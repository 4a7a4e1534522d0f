"""Threads for blocking calls beside the event loop, where some calls may never return, and signals whatever such a call does.

A call that hangs (a request without a time-out, in somebody's generator) must cost no more than its own thread. asyncio's
default executor has few threads, so some hung calls stop every ``asyncio.to_thread``, checkpoints and publications
included; and a program cannot exit before all of them have returned.
"""

from __future__ import annotations

import ctypes
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

MAX_THREADS = 512
SHUTDOWN_LIMIT_S = 5.0


class LeavableThreads(ThreadPoolExecutor):
    """As many daemon threads as there are calls at once, up to ``max_threads``; further calls wait for their turn.

    It is a ``ThreadPoolExecutor`` because an event loop accepts no other default executor. None of its threads is one of
    that class's: the interpreter waits for those at exit.

    Args:
        shutdown_limit_s: how long :meth:`shutdown` waits for calls that run; after that they are left behind.
    """

    def __init__(self, max_threads: int = MAX_THREADS, *, shutdown_limit_s: float = SHUTDOWN_LIMIT_S) -> None:
        super().__init__(max_workers=1)
        self._max_threads = max_threads
        self._shutdown_limit_s = shutdown_limit_s
        self._state = threading.Condition()
        self._calls: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._started = 0
        self._idle = 0
        self._ended = False

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Calls ``fn`` in a thread.

        Raises:
            RuntimeError: after :meth:`shutdown`.
        """
        future: Future[T] = Future()
        with self._state:
            if self._ended:
                raise RuntimeError("cannot schedule new futures after shutdown")
            self._calls.append((future, lambda: fn(*args, **kwargs)))
            if self._idle >= len(self._calls):
                self._state.notify()
            elif self._started < self._max_threads:
                self._started += 1
                threading.Thread(target=self._work, name=f"call-{self._started}", daemon=True).start()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Takes no more calls; waits for those that run or wait, as long as the limit allows."""
        with self._state:
            self._ended = True
            while cancel_futures and self._calls:
                self._calls.popleft()[0].cancel()
            self._state.notify_all()
            if wait:
                self._state.wait_for(lambda: self._started == 0, self._shutdown_limit_s)

    def _work(self) -> None:
        while (call := self._next()) is not None:
            future, function = call
            if not future.set_running_or_notify_cancel():
                continue
            try:
                result = function()
            except BaseException as error:  # it belongs to whoever waits for the future
                future.set_exception(error)
            else:
                future.set_result(result)
            del call, future, function  # while it idles, a thread keeps nothing alive

    def _next(self) -> tuple[Future[Any], Callable[[], Any]] | None:
        with self._state:
            self._idle += 1
            self._state.wait_for(lambda: bool(self._calls) or self._ended)
            self._idle -= 1
            if self._calls:
                return self._calls.popleft()
            self._started -= 1
            self._state.notify_all()
            return None


def in_lasting_thread(function: Callable[[], object]) -> None:
    """Runs ``function`` in a thread that, if it succeeds, is there as long as this process.

    For what asks the kernel to end a process with the thread that started it, as Ray does of a cluster on this machine: started
    by an event loop's pool, it would be gone with that loop, and a run that starts again would look for it.
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
    """Puts the process's handlers of SIGTERM and Ctrl-C back as they were, whatever the block has done to them.

    For libraries that install their own beneath Python, which would not hear of the signal then. Any thread may call this, as
    ``signal.signal`` may not be.
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
