"""One environment for the length of one trajectory, kept off the event loop where it may block.

    event loop ──calls, in order──> daemon thread of the episode ──results──> event loop

A blocking environment has a thread of its own: its calls never overlap, objects that belong to one thread (sqlite,
browsers) work, and a call that hangs costs its own trajectory and not a place in a shared pool. The thread is a daemon
because a hung environment must not keep a finished run from exiting.
"""

from __future__ import annotations

import asyncio
import logging
import math
import queue
import threading
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Self, TypeVar

from skyrl_train.environments.base import Environment, EnvironmentStep, TextEnvironment
from skyrl_train.environments.registry import EnvironmentFactory
from skyrl_train.errors import RolloutError
from skyrl_train.generators.base import ConversationType

_log = logging.getLogger(__name__)
T = TypeVar("T")


class EpisodeThread:
    """Runs calls one after the other on a daemon thread."""

    def __init__(self, name: str) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        threading.Thread(target=self._work, name=name, daemon=True).start()

    def submit(self, function: Callable[[], T]) -> asyncio.Future[T]:
        """Queues ``function`` and returns the future of its result. Cancelling the future does not stop the call."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def settle(result: T | None, error: Exception | None) -> None:
            if future.cancelled():
                return
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(result)  # type: ignore[arg-type]

        def run() -> None:
            result, error = None, None
            try:
                result = function()
            except Exception as raised:
                error = raised
            try:
                loop.call_soon_threadsafe(settle, result, error)
            except RuntimeError:
                _log.debug("An environment call ended after its event loop had closed.")

        self._calls.put(run)
        return future

    def stop(self) -> None:
        """Ends the thread after the calls that are queued."""
        self._calls.put(None)

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            call()


class Episode:
    """``async with Episode(factory, extras, uid)``: makes the environment, and closes it however the body ends.

    If the body raised, the environment is closed without being waited for (it may hang) and a failing ``close`` is only
    logged; else ``close`` is awaited and its failure raised.

    Whatever the environment raises comes as a :class:`~skyrl_train.errors.RolloutError` that names the environment and
    the prompt, with the original as its cause.
    """

    def __init__(self, factory: EnvironmentFactory, extras: Mapping[str, Any], uid: str) -> None:
        self._factory = factory
        self._extras = extras
        self._uid = uid
        self._thread: EpisodeThread | None = None
        self._environment: TextEnvironment | None = None

    async def __aenter__(self) -> Self:
        if self._factory.is_blocking:
            self._thread = EpisodeThread(f"environment {self._factory.name}")
        try:
            await self._call(self._make)
        except BaseException:
            self._abandon()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:
            self._abandon()
            return
        try:
            await self._call(self._close)
        finally:
            if self._thread is not None:
                self._thread.stop()

    async def init(self, prompt: ConversationType) -> tuple[ConversationType, dict[str, Any]]:
        return await self._call(lambda: self._made.init([dict(message) for message in prompt]))

    async def step(self, action: str, stop_reason: str) -> EnvironmentStep:
        def step() -> EnvironmentStep:
            if isinstance(self._made, Environment):
                self._made.observe_stop(stop_reason)
            return _checked(self._made.step(action))

        return await self._call(step)

    async def get_metrics(self) -> dict[str, Any]:
        return await self._call(lambda: dict(self._made.get_metrics()))

    @property
    def _made(self) -> TextEnvironment:
        assert self._environment is not None, "the episode has not begun"
        return self._environment

    def _make(self) -> None:
        self._environment = self._factory.make(self._extras)

    def _close(self) -> None:
        if self._environment is not None:
            self._environment.close()

    async def _call(self, function: Callable[[], T]) -> T:
        if self._thread is None:
            return self._run(function)
        return await self._thread.submit(lambda: self._run(function))

    def _run(self, function: Callable[[], T]) -> T:
        try:
            return function()
        except BaseException as error:  # it may run what a model wrote: exit() would end the training run
            if self._thread is None and isinstance(error, KeyboardInterrupt):
                raise  # somebody's Ctrl-C, which only the main thread gets
            raise RolloutError(
                f"Environment {self._factory.name!r} failed on prompt {self._uid!r}: {type(error).__name__}: {error}"
            ) from error

    def _abandon(self) -> None:
        def close() -> None:
            try:
                self._run(self._close)
            except RolloutError:
                _log.warning("Environment %s raised while it was closed.", self._factory.name, exc_info=True)

        if self._thread is None:
            close()
        else:
            self._thread.submit(close)
            self._thread.stop()


def _checked(step: Any) -> EnvironmentStep:
    """What ``step`` returned, complete and finite.

    Raises:
        ValueError: a field is missing or the reward is no finite number.
    """
    if not isinstance(step, Mapping) or not {"reward", "done"} <= step.keys():
        raise ValueError(f"step() must return a dict with observations, reward and done, got {step!r:.200}")
    reward = float(step["reward"])
    if not math.isfinite(reward):
        raise ValueError(f"step() returned the reward {reward}; it must be finite")
    return {
        "observations": list(step.get("observations") or ()),
        "reward": reward,
        "done": bool(step["done"]),
        "metadata": dict(step.get("metadata") or {}),
        "postprocessed_action": step.get("postprocessed_action"),
    }
