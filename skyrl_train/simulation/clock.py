"""An event loop in virtual time: when nothing is ready, its clock jumps to the next timer.

    ready callbacks ──run──> nothing ready ──jump──> next timer       nothing ready and no timer: a deadlock, which is raised

``asyncio.sleep``, ``asyncio.timeout`` and ``loop.time`` keep their meaning. Work for executors runs inline, so that no thread
races the virtual clock; it declares its duration with :meth:`VirtualTimeLoop.spend`.
"""

from __future__ import annotations

import asyncio
import math
import selectors
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from functools import partial
from typing import Any, TypeVar

from skyrl_train.errors import SimulationError

T = TypeVar("T")

_RESOLUTION_S = 1e-9  # by which asyncio runs a timer early, if need be


class _JumpingSelector(selectors.DefaultSelector):
    """Polls files (signals arrive through one) without waiting, and advances virtual time instead."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        events = super().select(0)
        if events:
            return events
        if timeout is None:
            raise SimulationError(
                "everything waits and no timer is set: a deadlock. the stacks of asyncio.all_tasks() show where."
            )
        if timeout > 0:
            self.now += timeout
            if math.ulp(self.now) > _RESOLUTION_S:  # late in a long run, rounding would keep a due timer from running
                self.now = math.nextafter(self.now, math.inf)
        return []


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """An asyncio loop that never waits in real time.

    An executor counts as one thread: each of its calls starts when the one before has ended. Calls without an executor
    (``asyncio.to_thread``) all run concurrently.
    """

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)
        self._spent_s: float | None = None  # by the call that runs now
        self._began_s = 0.0  # when that call began
        self._free_at: dict[Executor, float] = {}

    def time(self) -> float:
        """Return virtual seconds since the loop was created."""
        return self._jumping.now

    def clock(self) -> float:
        """Return the same, and within an executor call the time that it has come to: the loop learns it at the call's end."""
        return self.time() if self._spent_s is None else self._began_s + self._spent_s

    def spend(self, seconds: float) -> None:
        """Add to the duration of the running executor call; called by the work itself.

        Raises:
            SimulationError: called on the loop itself, where nothing may block.
        """
        if self._spent_s is None:
            raise SimulationError("modelled work runs on the event loop; blocking work belongs in an executor")
        self._spent_s += seconds

    def run_in_executor(self, executor: Executor | None, func: Callable[..., T], *args: Any) -> asyncio.Future[T]:  # type: ignore[override]  # typeshed's TypeVarTuple says the same
        """Call ``func`` at once; the future is done when the modelled time of the call has passed."""
        starts_at = self.time() if executor is None else max(self.time(), self._free_at.get(executor, 0.0))
        future: asyncio.Future[T] = self.create_future()
        settle: Callable[[], None]
        outer = self._spent_s, self._began_s  # the call may start another one
        self._spent_s, self._began_s = 0.0, starts_at
        try:
            settle = partial(future.set_result, func(*args))
        except Exception as error:
            settle = partial(future.set_exception, error)
        finally:
            ends_at = starts_at + self._spent_s
            self._spent_s, self._began_s = outer
        if executor is not None:
            self._free_at[executor] = ends_at

        def deliver() -> None:
            if not future.done():  # its caller may have been cancelled
                settle()

        self.call_at(ends_at, deliver)
        return future


def run_in_virtual_time(main: Callable[[VirtualTimeLoop], Coroutine[Any, Any, T]]) -> T:
    """Run ``main(loop)`` on a new virtual-time loop and return its result.

    Raises:
        SimulationError: a deadlock: all tasks wait, and no timer or callback is left.
    """
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        loop = runner.get_loop()
        assert isinstance(loop, VirtualTimeLoop)
        return runner.run(main(loop))
