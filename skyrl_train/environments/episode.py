"""One environment for the length of one trajectory, kept off the event loop where it may block.

    event loop ──calls, in order──> daemon thread of the episode ──results──> event loop

A blocking environment has its own thread. So its calls never overlap, objects that belong to one thread (sqlite, browsers)
work, and a call that hangs costs one trajectory instead of a slot in a shared pool. The thread is a daemon, because a hung
environment must not keep a finished run from exiting.

Each way to the thread and back takes longer than most environments do, so calls that follow one another share one: ``make`` and
``init``, ``get_metrics`` and ``close``. The thread of an episode that has ended well can serve a later one.
"""

from __future__ import annotations

import asyncio
import logging
import math
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from types import TracebackType
from typing import Any, Self

from skyrl_train.environments.base import Environment, EnvironmentFactory, EnvironmentStep
from skyrl_train.errors import GeneratorOutputError, RolloutError
from skyrl_train.events.log import NO_EVENTS, EventLog
from skyrl_train.runtime.process import DaemonThreadPool
from skyrl_train.types import ConversationType

logger = logging.getLogger(__name__)
SHORTEST_RECORDED_S = 0.001  # shorter calls are no events: no picture shows them


@dataclass(slots=True)
class EnvironmentCall:
    """A call of an environment in its thread.

    Attributes:
        environment: its name.
        call: its method.
    """

    environment: str
    call: str = ""
    thread: int = 0  # 0: it has not begun

    def stack(self) -> str:
        """Return where the thread is now, as in a traceback."""
        frame = sys._current_frames().get(self.thread)
        return "" if frame is None else "".join(traceback.format_stack(frame))


_running: dict[str, EnvironmentCall] = {}  # by sample


def environment_call(session: str) -> EnvironmentCall | None:
    """Return the call that the environment of a sample is in; None: it is in none, or in another process."""
    return _running.get(session)


class Episode:
    """``async with Episode(factory, extras, uid)`` closes the environment however the body ends. The first call makes it.

    Each call of a millisecond or more is recorded in ``events`` under the sample ``session``.

    If the body raised, the environment is closed in the background (it may hang) and a failing ``close`` is only logged.
    Otherwise ``close`` is awaited and its failure raised.

    Exceptions of the environment become a :class:`~skyrl_train.errors.RolloutError` that names the environment and the
    prompt, with the original as its cause. A result of ``init`` or ``step`` that breaks the contract is a GeneratorOutputError,
    which stops the run: the next attempt would return the same.

    Args:
        idle_threads: threads for episodes of blocking environments. This one takes one, if there is one, and leaves its own.
    """

    def __init__(
        self,
        factory: EnvironmentFactory,
        extras: Mapping[str, Any],
        uid: str,
        *,
        events: EventLog = NO_EVENTS,
        session: str | None = None,
        idle_threads: list[DaemonThreadPool] | None = None,
    ) -> None:
        self._factory = factory
        self._extras = extras
        self._uid = uid
        self._events = events
        self._session = session
        self._idle_threads = idle_threads
        self._thread: DaemonThreadPool | None = None
        self._environment: Any = None  # see EnvironmentFactory.make
        self._made = False

    async def __aenter__(self) -> Self:
        if self._factory.is_blocking:
            # One thread, so that calls run in order. A shared pool would fill up with hung environments.
            idle = self._idle_threads
            self._thread = idle.pop() if idle else DaemonThreadPool(max_threads=1, name="environment")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:
            self._abandon()
            return
        try:
            if self._environment is not None:
                await self._call(("close", self._close))
        except asyncio.CancelledError:
            # Perhaps before the thread took the call. If not, this second close does nothing.
            self._abandon()
            raise
        except BaseException:
            self._leave_thread(None)
            raise
        self._leave_thread(self._idle_threads)

    def _leave_thread(self, idle: list[DaemonThreadPool] | None) -> None:
        if self._thread is not None:
            if idle is None:
                self._thread.shutdown(wait=False)
            else:
                idle.append(self._thread)

    async def init(self, prompt: ConversationType) -> tuple[ConversationType, dict[str, Any]]:
        """Return the messages that the policy sees first, and metadata. The environment gets copies of the messages."""

        def init() -> tuple[ConversationType, dict[str, Any]]:
            method = self._environment.init
            return _checked_init(method([dict(message) for message in prompt]), method, self._factory.name)

        answer: tuple[ConversationType, dict[str, Any]] = await self._call(("init", init))
        return answer

    async def step(self, action: str, stop_reason: str) -> EnvironmentStep:
        """Take the policy's text, which ended for ``stop_reason``, and return the checked result."""

        def step() -> EnvironmentStep:
            # skyrl-gym's environments have no such method.
            if isinstance(self._environment, Environment):
                self._environment.observe_stop(stop_reason)
            return _checked(self._environment.step(action), self._environment.step, self._factory.name)

        result: EnvironmentStep = await self._call(("step", step))
        return result

    async def end_early(self) -> float:
        """Tell the environment that the episode ends before it is done, and return the reward that it adds for that."""
        # skyrl-gym's environments have no such method, and most others have only the one that does nothing.
        if getattr(type(self._environment), "end_early", Environment.end_early) is Environment.end_early:
            return 0.0

        def end_early() -> float:
            method = self._environment.end_early
            answer = method()
            if not _is_number(answer):
                raise GeneratorOutputError(
                    f"end_early() of environment {self._factory.name!r}{_place(method)} returned {answer!r:.200}. It must return "
                    "a number: the reward to add for an episode that ends before it is done."
                )
            reward = float(answer)
            if not math.isfinite(reward):
                raise ValueError(f"end_early() returned the reward {reward}; it must be finite")
            return reward

        reward: float = await self._call(("end_early", end_early))
        return reward

    async def end(self) -> dict[str, Any]:
        """Return the environment's numbers about the episode, and close it."""
        numbers: dict[str, Any] = {}

        def get_metrics() -> None:
            method = self._environment.get_metrics
            answer = method()
            if not isinstance(answer, Mapping):
                raise GeneratorOutputError(
                    f"get_metrics() of environment {self._factory.name!r}{_place(method)} returned {answer!r:.200}. It must "
                    "return a dict of numbers, such as {}."
                )
            numbers.update(answer)
            for name, value in numbers.items():
                if getattr(value, "ndim", None) == 0:  # a number of numpy or torch
                    value = numbers[name] = value.item()
                # It would make the mean of the group no number.
                if isinstance(value, Real) and not math.isfinite(value):
                    raise ValueError(f"get_metrics() returned {name}={value}; it must be finite")

        await self._call(("get_metrics", get_metrics), ("close", self._close))
        return numbers

    async def _call(self, *calls: tuple[str, Callable[[], Any]]) -> Any:
        """Run ``calls``, pairs of a name and a function, in their order, and return the result of the last one."""
        if not self._made:
            calls = (("make", self._make), *calls)
        self._made = True
        running = EnvironmentCall(self._factory.name)
        times = [self._events.now()]  # the begin of the first call, and the end of each

        def run() -> Any:
            result = None
            running.thread = threading.get_ident()
            for running.call, function in calls:
                result = self._run(function)
                times.append(self._events.now())
            return result

        try:
            if self._thread is None:
                return run()
            if self._session is not None:
                _running[self._session] = running
            return await asyncio.get_running_loop().run_in_executor(self._thread, run)
        finally:
            if self._session is not None:
                _running.pop(self._session, None)
            ended = len(times) - 1
            times.append(self._events.now())  # of the call that has failed, or still runs without its caller
            for place, (name, _) in enumerate(calls[: ended + 1]):
                t0, t1 = times[place : place + 2]
                if t1 - t0 >= SHORTEST_RECORDED_S and self._events.wants(self._session):
                    of_call = {"call": name, "t0": t0, "t1": t1, "ok": place < ended}
                    self._events.detail("environment", self._session, {"name": self._factory.name, **of_call})

    def _make(self) -> None:
        # In the environment's thread: if the episode is cancelled meanwhile, the queued close() finds it.
        self._environment = self._factory.make(self._extras)

    def _run(self, function: Callable[[], Any]) -> Any:
        try:
            return function()
        except GeneratorOutputError:
            raise
        except BaseException as error:  # also SystemExit: model output that calls exit() must not end the training run
            if self._thread is None and isinstance(error, KeyboardInterrupt):
                raise  # Ctrl-C, which only the main thread receives
            raise RolloutError(
                f"Environment {self._factory.name!r} failed on prompt {self._uid!r}: {type(error).__name__}: {error}"
            ) from error

    def _close(self) -> None:
        environment, self._environment = self._environment, None
        if environment is not None:  # None: make() failed, or closed already
            environment.close()

    def _abandon(self) -> None:
        """Close the environment without waiting for it."""

        def close() -> None:
            try:
                self._run(self._close)
            except RolloutError:
                logger.warning("Environment %s raised while it was closed.", self._factory.name, exc_info=True)

        if self._thread is None:
            close()
        else:
            # Not through the event loop, which may be closed when a hung call ends.
            self._thread.submit(close)
            self._thread.shutdown(wait=False)


def _checked_init(answer: Any, method: Callable[..., Any], name: str) -> tuple[ConversationType, dict[str, Any]]:
    """Return the result of ``method``, the ``init`` of the environment ``name``.

    Raises:
        GeneratorOutputError: it is no pair of messages and metadata.
    """
    is_pair = isinstance(answer, list | tuple) and len(answer) == 2
    if not is_pair or not isinstance(answer[0], Sequence) or not all(map(_is_message, answer[0])):
        raise GeneratorOutputError(
            f"init() of environment {name!r}{_place(method)} returned {answer!r:.200}. It must return the first messages and a "
            "dict, such as prompt, {}."
        )
    return answer[0], answer[1]


def _checked(step: Any, method: Callable[[str], Any], name: str) -> EnvironmentStep:
    """Return the result of ``method``, the ``step`` of the environment ``name``, with all fields.

    Raises:
        GeneratorOutputError: a field is missing or of another type.
        ValueError: the reward is not finite.
    """
    is_mapping = isinstance(step, Mapping)
    reward = step.get("reward") if is_mapping else None
    observations = step.get("observations") or () if is_mapping else None
    if (
        not is_mapping
        or not _is_number(reward)
        or "done" not in step
        or not isinstance(observations, list | tuple)
        or not (step["done"] or all(map(_is_message, observations)))
    ):
        raise GeneratorOutputError(
            f"step() of environment {name!r}{_place(method)} returned {step!r:.200}. It must return a dict with a number as "
            'reward, such as {"observations": [], "reward": 1.0, "done": True}; with "done": False, observations are the '
            'messages of the next turn, such as {"role": "user", "content": "Wrong."}.'
        )
    # A NaN would spread to every advantage of the group.
    reward = float(step["reward"])
    if not math.isfinite(reward):
        raise ValueError(f"step() returned the reward {reward}; it must be finite")
    return {
        "observations": list(observations),
        "reward": reward,
        "done": bool(step["done"]),
        "metadata": dict(step.get("metadata") or {}),
        "postprocessed_action": step.get("postprocessed_action"),
    }


def _is_number(value: Any) -> bool:
    """Return whether ``value`` is a number, also of another library. A text is none, although float() would read it."""
    return hasattr(value, "__float__") and not isinstance(value, str)


def _is_message(value: Any) -> bool:
    """Return whether ``value`` has a role and a content; the renderer checks parts of a content."""
    return (
        isinstance(value, Mapping)
        and isinstance(value.get("role"), str)
        and (isinstance(value.get("content"), str | list | tuple) or value["role"] == "assistant")
    )


def _place(method: Callable[..., Any]) -> str:
    code = getattr(getattr(method, "__func__", None), "__code__", None)
    return "" if code is None else f" ({code.co_filename}:{code.co_firstlineno})"
