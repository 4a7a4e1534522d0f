"""Where a stage computes: on the event loop, in threads, in processes, or in Ray actors.

    stage ──call(argument)──> Place ──> a worker's copy of the Work ──> result, or CallFailed

The work is described as plain data and built where it runs. What it raises comes back as data too: a class name, a message
and a traceback, so that no exception has to survive a border that it was not made for.
"""

from __future__ import annotations

import asyncio
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from inspect import isawaitable
from typing import Any

from skyrl_train import errors
from skyrl_train.config.import_path import import_name
from skyrl_train.errors import SkyRLError, StageError

Function = Callable[[Any], Any]


@dataclass(frozen=True, slots=True)
class Work:
    """What is computed.

    Args:
        factory: import path of what returns a function of one argument; called with ``arguments``, plain data.
    """

    factory: str
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def build(self) -> Function:
        """The function."""
        function: Function = import_name(self.factory, "factory", "function")(**self.arguments)
        return function


class CallFailed(Exception):
    """A call did not end well: the work raised, took too long, or ended its worker. ``reason`` completes "..., because".

    ``error``: what the work raised, where that is an error of ours.
    """

    def __init__(self, reason: str, detail: str = "", error: SkyRLError | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.error = error
        if detail:
            self.add_note(detail)


@dataclass(frozen=True, slots=True)
class Returned:
    """What a call returned."""

    value: Any


@dataclass(frozen=True, slots=True)
class Raised:
    """What a call raised."""

    kind: str  # the name of the class
    message: str
    traceback: str

    @classmethod
    def of(cls, error: BaseException) -> Raised:
        return cls(type(error).__name__, str(error), "".join(traceback.format_exception(error)))

    def call_failed(self) -> CallFailed:
        """As the failure of a call."""
        return CallFailed(f"it raised {self.kind}: {self.message}", self.traceback, self._ours())

    def start_failed(self) -> SkyRLError:
        """As the failure of a start: an error of ours is itself again, anything else a :class:`StageError`."""
        ours = self._ours()
        if ours is not None:
            return ours
        error = StageError(f"{self.kind} was raised: {self.message}")
        error.add_note(self.traceback)
        return error

    def _ours(self) -> SkyRLError | None:
        kind = getattr(errors, self.kind, None)
        if not (isinstance(kind, type) and issubclass(kind, SkyRLError)):
            return None
        # Only the message came back: no error that is made of more (QuotaError) can be made again.
        return None if "__init__" in vars(kind) else kind(self.message)


Outcome = Returned | Raised


def outcome_of(function: Callable[..., Any], *arguments: Any) -> Outcome:
    """Calls ``function`` and waits for what it returns; for threads that have no event loop."""
    try:
        value = function(*arguments)
        if isawaitable(value):
            value = asyncio.run(_awaited(value))
        return Returned(value)
    except (Exception, SystemExit) as error:  # comes back as data, whatever it is
        return Raised.of(error)


async def _awaited(value: Any) -> Any:
    return await value


class Place(ABC):
    """Somewhere to call a work. All methods belong to the control loop and none blocks it."""

    @abstractmethod
    async def start(self) -> None:
        """Builds the work.

        Raises:
            SkyRLError: it cannot be built.
        """

    @abstractmethod
    async def call(self, argument: Any, timeout_s: float | None = None) -> Any:
        """What the work returns for ``argument``. Waits for its turn first, which ``timeout_s`` does not include.

        Raises:
            CallFailed: the work raised, took longer than ``timeout_s``, or its worker has ended.
        """

    @abstractmethod
    async def aclose(self) -> None:
        """Ends everything. Idempotent; fine without :meth:`start`."""
