"""The interface between the harness generator and an agent, and agents that are Python functions.

    AgentTask ──FunctionAgent.run or ProcessAgent.run──> AgentResult
                      │
                      └── requests to base_url with api_key, recorded as the task's session

A function agent is ``async def run(prompt, base_url, api_key) -> float | dict``. Agents that are programs are in
:mod:`~skyrl_train.generators.harness.process`.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import math
import os
import re
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit
from urllib.request import proxy_bypass

from skyrl_train.errors import ConfigError

_REDACTED = "<api key>"
_REDACTED_LENGTH = 8  # the shortest part of a key that is redacted, in characters
_ARGUMENTS = ("prompt", "base_url", "api_key", "extras", "session_id", "seed", "on_close")
_CLOSE_S = 10.0  # for each function that an agent wants to be called at its end
_SHAPE = 'Return a number, or {"reward": number, "turn_rewards": [number, ...], "metrics": {name: number}}.'


class AgentError(Exception):
    """A run failed. The generator converts it into a RolloutError that names the sample.

    ``output``: of an agent that is a program, both streams, without its API key.
    """

    def __init__(self, message: str, output: str = "") -> None:
        super().__init__(message)
        self.output = output


class AgentContractError(AgentError):
    """The agent does not do what every agent has to do, so another attempt would not help: it stops the training run."""


class CloseHooks:
    """The functions that an agent wants to be called at the end of its run, however it ends: ``on_close(function, *arguments)``.

    A thread that exceeds its time limit cannot be stopped, but the sandbox or the browser that it opened can be closed.
    """

    def __init__(self) -> None:
        # Each with the event loop in which it was registered; None: in a thread without one.
        self._hooks: list[tuple[Callable[[], Any], asyncio.AbstractEventLoop | None]] = []
        self._lock = threading.Lock()
        self._closed = False

    def __call__(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Call ``function(*arguments)`` at the end of the run; what was registered last is called first.

        Coroutine functions are awaited. Others are called where they were registered: on the event loop or in a thread. A thread
        that has outlived its run has the function called at once.

        Raises:
            RuntimeError: the run has ended and this is a coroutine function, which nobody would await.
        """
        hook = functools.partial(function, *arguments)
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            loop = None
        with self._lock:
            if not self._closed:
                self._hooks.append((hook, loop))
                return
        if inspect.iscoroutinefunction(hook):
            raise RuntimeError("The agent's run has ended: it is too late for on_close.")
        hook()

    async def close(self) -> list[BaseException]:
        """Call all functions, each with a time limit, and return what they raised."""
        with self._lock:
            self._closed = True
        errors: list[BaseException] = []
        for hook, loop in reversed(self._hooks):
            try:
                async with asyncio.timeout(_CLOSE_S):
                    if inspect.iscoroutinefunction(hook):
                        await hook()
                    elif loop is asyncio.get_running_loop():
                        hook()
                    else:
                        await _in_thread(hook, "agent-close")
            except TimeoutError:
                errors.append(TimeoutError(f"{hook.func!r} took longer than {_CLOSE_S:g} s"))
            except (Exception, SystemExit) as error:
                errors.append(error)
        return errors


@dataclass(frozen=True, slots=True)
class AgentTask:
    """One sample to generate.

    Args:
        prompt: the conversation of the data row.
        extras: the other columns of the data row.
        base_url: for OpenAI clients; ends in ``/v1``. Anthropic clients take ``server_url``.
        seed: for randomness in the agent itself.
        on_close: takes the functions to be called at the end of the run.
    """

    prompt: Sequence[Mapping[str, Any]]
    extras: Mapping[str, Any]
    base_url: str
    api_key: str = field(repr=False)
    session_id: str
    seed: int | None
    on_close: CloseHooks = field(default_factory=CloseHooks)

    @property
    def server_url(self) -> str:
        """The endpoint's URL without ``/v1``."""
        return self.base_url.removesuffix("/v1")

    def redact(self, text: str) -> str:
        """Return ``text`` without the API key, and without any part of it that has at least 8 characters.

        Parts matter because outputs are truncated before they are shown, possibly inside a key.
        """
        key, size = self.api_key, min(_REDACTED_LENGTH, len(self.api_key))
        parts = "|".join(re.escape(key[start : start + size]) for start in range(len(key) - size + 1))
        kept: list[str] = []
        end = 0
        for match in re.finditer(f"(?={parts})", text):  # lookahead, because parts of a key overlap
            if match.start() > end or not kept:
                kept += [text[end : match.start()], _REDACTED]
            end = match.start() + size
        return "".join([*kept, text[end:]])


@dataclass(frozen=True, slots=True)
class AgentResult:
    """The result that an agent returned. Without rewards here, the agent must have posted them to the endpoint.

    Args:
        turn_rewards: one per turn, in the order in which the responses ended.
        metrics: averaged over the samples as ``environment/<name>``.
        remark: explains in an error message why there is no reward.
        output: of an agent that is a program, both streams, without its API key.
    """

    reward: float | None = None
    turn_rewards: Sequence[float] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)
    remark: str = "it returned none"
    output: str = field(default="", repr=False)


def to_result(value: Any) -> AgentResult:
    """Convert an agent's return value: a number, a mapping, or None if the reward was posted to the endpoint.

    Raises:
        AgentContractError: it has another shape.
        AgentError: it contains a number that is not finite.
    """
    if value is None:
        return AgentResult()
    if not isinstance(value, Mapping):
        return AgentResult(_number(value, "the reward"))
    # A misspelt key would silently drop a reward.
    unknown = sorted(str(key) for key in value.keys() - {"reward", "turn_rewards", "metrics"})
    if unknown:
        raise AgentContractError(f"it returned an object with the unknown key {unknown[0]!r}. {_SHAPE}")
    reward, turns, metrics = (value.get(key) for key in ("reward", "turn_rewards", "metrics"))
    turns = () if turns is None else turns.tolist() if hasattr(turns, "tolist") else turns  # an array or a tensor
    if not isinstance(turns, list | tuple) or not isinstance(metrics or {}, Mapping):
        raise AgentContractError(f"it returned turn_rewards={turns!r:.80} and metrics={metrics!r:.80}. {_SHAPE}")
    return AgentResult(
        reward=None if reward is None else _number(reward, "the reward"),
        turn_rewards=[_number(value, f"turn_rewards[{turn}]") for turn, value in enumerate(turns)],
        metrics={str(name): _number(value, f"metrics[{name!r}]") for name, value in (metrics or {}).items()},
    )


def _number(value: Any, what: str) -> float:
    kind: type[AgentError] = AgentError  # NaN is a fault of one run
    # Numbers of other libraries are fine, with one element. A text is not, although float() would read it.
    if hasattr(value, "__float__") and not isinstance(value, str):
        try:
            number = float(value)
        except OverflowError:  # an integer beyond all floats
            number = math.inf
        except (TypeError, ValueError, RuntimeError):  # numpy's and torch's arrays of several elements
            number, kind = math.nan, AgentContractError
    else:
        number, kind = math.nan, AgentContractError
    if not math.isfinite(number):
        raise kind(f"{what} that it returned is {value!r:.80}, not a finite number. {_SHAPE}")
    return number


def direct_connections(url: str) -> dict[str, str]:
    """Return the variables with which HTTP clients reach ``url`` without a proxy: they use the proxy of the environment even for
    this machine, unless ``NO_PROXY`` names it."""
    host = urlsplit(url).hostname or ""
    if proxy_bypass(host):  # also by a pattern, to which no name may be added
        return {}
    hosts = ",".join(filter(None, (os.environ.get("NO_PROXY") or os.environ.get("no_proxy"), host)))
    return {"NO_PROXY": hosts, "no_proxy": hosts}


class FunctionAgent:
    """Calls a function with the arguments that it names: ``prompt, base_url, api_key, extras, session_id, seed, on_close``.

    An async function runs on the control loop and must not block it. Other functions run in a new thread each. A thread
    cannot be stopped from outside: after a timeout it runs until its next request, which the endpoint rejects.

    Raises:
        ConfigError: (constructor) the object is not callable with these arguments.
    """

    def __init__(self, function: Callable[..., Any], name: str) -> None:
        if not callable(function):
            raise ConfigError(f"generator.kwargs.agent={name!r} is a {type(function).__name__}, not a function.")
        parameters = inspect.signature(function).parameters.values()
        kinds = inspect.Parameter
        named = [p for p in parameters if p.kind in (kinds.POSITIONAL_OR_KEYWORD, kinds.KEYWORD_ONLY)]
        unknown = [p.name for p in named if p.name not in _ARGUMENTS and p.default is kinds.empty]
        # A function with **kwargs takes all arguments.
        takes_any = any(parameter.kind is kinds.VAR_KEYWORD for parameter in parameters)
        if unknown and not takes_any:
            raise ConfigError(
                f"generator.kwargs.agent={name!r} asks for {unknown[0]!r}. An agent may name {', '.join(_ARGUMENTS)}."
            )
        code = getattr(inspect.unwrap(function), "__code__", None)
        self.place = name if code is None else f"{code.co_filename}:{code.co_firstlineno} in {code.co_name}"
        self._function = function
        self._names = list(_ARGUMENTS) if takes_any else [p.name for p in named if p.name in _ARGUMENTS]
        # Decides where the function runs; a wrapper without async is called in a thread.
        self._is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
            getattr(function, "__call__", None)  # noqa: B004  # an object with an async __call__
        )

    async def run(self, task: AgentTask) -> AgentResult:
        """Call the function and return its result.

        Raises:
            AgentError: it called ``exit()`` or returned a reward that is not finite.
            AgentContractError: it returned something else than a reward.
            Exception: any exception that the function raised.
        """
        arguments = {name: getattr(task, name) for name in self._names}
        try:
            call = functools.partial(self._function, **arguments)
            value = await (call() if self._is_async else _in_thread(call, f"agent-{task.session_id}"))
        except SystemExit as error:  # would end the training run
            raise AgentError(f"it ended itself with exit status {error.code}") from error
        return to_result(value)


async def _in_thread(function: Callable[[], Any], name: str) -> Any:
    """Run a function in a daemon thread. One that never returns blocks neither a thread pool nor the process's exit."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Any] = loop.create_future()

    def settle(set_result: Callable[[Any], None], value: Any) -> None:
        if not done.done():  # the waiter may have been cancelled by the timeout
            set_result(value)

    def call() -> None:
        try:
            value = function()
        except BaseException as error:
            # A future rejects StopIteration, and other BaseExceptions would end the event loop.
            if not isinstance(error, Exception) or isinstance(error, StopIteration):
                error = AgentError(f"it ended itself: {error!r}")
            outcome = done.set_exception, error
        else:
            outcome = done.set_result, value
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, *outcome)

    thread = threading.Thread(target=call, name=name, daemon=True)
    thread.start()
    try:
        return await done
    except asyncio.CancelledError as error:
        frame = sys._current_frames().get(thread.ident or 0)
        if frame is not None:
            error.add_note(f"The thread is here:\n{''.join(traceback.format_stack(frame))}")
        raise
