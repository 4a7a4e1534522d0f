"""Agents that are Python functions: ``async def run(prompt, base_url, api_key) -> float | dict``."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable
from typing import Any

from skyrl_train.errors import ConfigError
from skyrl_train.generators.harness.agent import AgentError, AgentResult, AgentTask, to_result

_OFFERED = ("prompt", "base_url", "api_key", "extras", "session_id", "seed")


class FunctionAgent:
    """Calls a function with those of ``prompt, base_url, api_key, extras, session_id, seed`` that it names.

    An async function runs on the control loop, where everything that takes time must be awaited. Any other runs in a
    thread of its own; a thread cannot be ended from outside, so that after a timeout it runs on until its next request,
    which is refused.

    Raises:
        ConfigError: (constructor) it cannot be called like that.
    """

    def __init__(self, function: Callable[..., Any], name: str) -> None:
        if not callable(function):
            raise ConfigError(f"generator.kwargs.agent={name!r} is a {type(function).__name__}, not a function.")
        self._function = function
        self._names = _accepted(function, name)
        self._is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
            getattr(function, "__call__", None)  # noqa: B004  # an object with an async __call__
        )

    async def run(self, task: AgentTask) -> AgentResult:
        """Calls the function.

        Raises:
            AgentError: it raised, or returned no reward.
        """
        arguments = {name: getattr(task, name) for name in self._names}
        try:
            value = await (self._function(**arguments) if self._is_async else _in_thread(self._function, arguments))
        except SystemExit as error:  # would end the training run
            raise AgentError(f"it ended itself with exit status {error.code}") from error
        return to_result(value)


def _accepted(function: Callable[..., Any], name: str) -> list[str]:
    parameters = inspect.signature(function).parameters.values()
    kinds = inspect.Parameter
    if any(parameter.kind is kinds.VAR_KEYWORD for parameter in parameters):
        return list(_OFFERED)
    named = [p for p in parameters if p.kind in (kinds.POSITIONAL_OR_KEYWORD, kinds.KEYWORD_ONLY)]
    unknown = [p.name for p in named if p.name not in _OFFERED and p.default is kinds.empty]
    if unknown:
        raise ConfigError(
            f"generator.kwargs.agent={name!r} asks for {unknown[0]!r}. An agent is given those of {', '.join(_OFFERED)} "
            "that it names."
        )
    return [parameter.name for parameter in named if parameter.name in _OFFERED]


async def _in_thread(function: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    """Runs a function in a daemon thread: one that never returns keeps neither a pool's seat nor the process."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Any] = loop.create_future()

    def settle(set_result: Callable[[Any], None], value: Any) -> None:
        if not done.done():
            set_result(value)

    def call() -> None:
        try:
            value = function(**arguments)
        except BaseException as error:
            outcome = done.set_exception, error if _can_travel(error) else _ended(error)
        else:
            outcome = done.set_result, value
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, *outcome)

    threading.Thread(target=call, name=f"agent-{arguments.get('session_id', '')}", daemon=True).start()
    return await done


def _can_travel(error: BaseException) -> bool:
    """Whether a future takes it, and whoever awaits that survives it. Of a StopIteration, neither is so."""
    return isinstance(error, Exception) and not isinstance(error, StopIteration)


def _ended(error: BaseException) -> AgentError:
    return AgentError(f"it ended itself: {error!r}")
