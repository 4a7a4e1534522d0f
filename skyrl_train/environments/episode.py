"""One environment for the length of one trajectory, kept off the event loop where it may block.

    event loop ──calls, in order──> daemon thread of the episode ──results──> event loop

A blocking environment has its own thread. So its calls never overlap, objects that belong to one thread (sqlite, browsers)
work, and a call that hangs costs one trajectory instead of a slot in a shared pool. The thread is a daemon, because a hung
environment must not keep a finished run from exiting.
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

from skyrl_train.environments.base import Environment, EnvironmentFactory, EnvironmentStep, TextEnvironment
from skyrl_train.errors import RolloutError
from skyrl_train.types import ConversationType

logger = logging.getLogger(__name__)
T = TypeVar("T")


class EpisodeThread:
    """Runs calls in order on a daemon thread."""

    def __init__(self, name: str) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        threading.Thread(target=self._work, name=name, daemon=True).start()

    def submit(self, function: Callable[[], T]) -> asyncio.Future[T]:
        """Queue ``function`` and return the future of its result. Cancelling the future does not stop the call."""
        # Not run_in_executor: a shared pool would fill up with hung environments.
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def settle(result: T | None, error: Exception | None) -> None:
            # The trajectory was cancelled while the call ran; its result has no reader.
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
                logger.debug("An environment call ended after its event loop had closed.")

        self._calls.put(run)
        return future

    def stop(self) -> None:
        """End the thread after the queued calls."""
        self._calls.put(None)

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            call()


class Episode:
    """``async with Episode(factory, extras, uid)`` makes the environment, and closes it however the body ends.

    If the body raised, the environment is closed in the background (it may hang) and a failing ``close`` is only logged.
    Otherwise ``close`` is awaited and its failure raised.

    Exceptions of the environment become a :class:`~skyrl_train.errors.RolloutError` that names the environment and the
    prompt, with the original as its cause.
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

        def make() -> None:
            self._environment = self._factory.make(self._extras)

        try:
            await self._call(make)
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
        """Return the messages that the policy sees first, and metadata. The environment gets copies of the messages."""
        return await self._call(lambda: self._made.init([dict(message) for message in prompt]))

    async def step(self, action: str, stop_reason: str) -> EnvironmentStep:
        """Take the policy's text, which ended for ``stop_reason``, and return the checked result."""

        def step() -> EnvironmentStep:
            # skyrl-gym's environments have no such method.
            if isinstance(self._made, Environment):
                self._made.observe_stop(stop_reason)
            return _checked(self._made.step(action))

        return await self._call(step)

    async def get_metrics(self) -> dict[str, Any]:
        """Return the environment's numbers about the episode."""
        return await self._call(lambda: dict(self._made.get_metrics()))

    @property
    def _made(self) -> TextEnvironment:
        assert self._environment is not None, "the episode has not begun"
        return self._environment

    async def _call(self, function: Callable[[], T]) -> T:
        if self._thread is None:
            return self._run(function)
        return await self._thread.submit(lambda: self._run(function))

    def _run(self, function: Callable[[], T]) -> T:
        try:
            return function()
        except (
            BaseException
        ) as error:  # the environment may run model output, whose exit() must not end the training run
            if self._thread is None and isinstance(error, KeyboardInterrupt):
                raise  # Ctrl-C, which only the main thread receives
            raise RolloutError(
                f"Environment {self._factory.name!r} failed on prompt {self._uid!r}: {type(error).__name__}: {error}"
            ) from error

    def _close(self) -> None:
        if self._environment is not None:
            self._environment.close()

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
            self._thread.submit(close)
            self._thread.stop()


def _checked(step: Any) -> EnvironmentStep:
    """Return the result of ``step`` with all fields.

    Raises:
        ValueError: a field is missing, or the reward is not a finite number.
    """
    if not isinstance(step, Mapping) or not {"reward", "done"} <= step.keys():
        raise ValueError(f"step() must return a dict with observations, reward and done, got {step!r:.200}")
    # A NaN would spread to every advantage of the group.
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
