"""Messages between a driver and an object that it hosts elsewhere. Plain data; errors travel as class, message and traceback.

    caller ──Call, Cancel──> served object          served object ──Item*, then Result | Failure | Raised──> caller

Both ends may call. ``PeerState`` and ``LastWords`` belong to no call. On a socket a batch of messages is a frame: an 8-byte
big-endian length, and the pickled list. A pickle can run code: both ends are this program.
"""

from __future__ import annotations

import asyncio
import pickle
import traceback as tracebacks
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from skyrl_train import errors
from skyrl_train.errors import SkyRLError
from skyrl_train.runtime.pickling import by_position

HEADER_BYTES = 8


@by_position
@dataclass(frozen=True, slots=True)
class Call:
    """Call ``method`` of the served object. Each call is answered by one ``Result`` or ``Failure`` with its ``id``."""

    id: int
    method: str
    arguments: tuple[Any, ...] = ()


@by_position
@dataclass(frozen=True, slots=True)
class Cancel:
    """Cancel the call ``id``. Its end is answered only with ``report_end``, for callers that wait for the clean-up."""

    id: int
    report_end: bool = False


@by_position
@dataclass(frozen=True, slots=True)
class Item:
    """One item of a streaming call."""

    id: int
    value: Any


@by_position
@dataclass(frozen=True, slots=True)
class Result:
    """A call returned ``value``. After a stream: its last item, or None."""

    id: int
    value: Any = None


@dataclass(frozen=True, slots=True)
class Failure:
    """A call raised an error of class ``kind``. ``is_own``: the class is one of :mod:`skyrl_train.errors`."""

    id: int
    kind: str
    message: str
    traceback: str
    is_own: bool

    @classmethod
    def of(cls, call_id: int, error: BaseException) -> Failure:
        """Describe ``error``, which need not be picklable itself."""
        kind = type(error)
        # An error whose constructor takes more than a message (QuotaError) cannot be made again from its message.
        own = getattr(errors, kind.__name__, None) is kind and "__init__" not in vars(kind)
        trace = "".join(tracebacks.format_exception(error))
        return cls(call_id, kind.__name__, str(error), trace, own and isinstance(error, SkyRLError))

    def own_error(self) -> SkyRLError | None:
        """Return the error itself if its class is ours, else None."""
        if not self.is_own:
            return None
        error: SkyRLError = getattr(errors, self.kind)(self.message)
        error.add_note(self.traceback)
        return error

    def error(self, foreign: type[SkyRLError], who: str) -> SkyRLError:
        """Return the error itself if its class is ours, else a ``foreign`` one that names it: "``who`` raised KeyError: ...".

        The remote traceback is added as a note.
        """
        error = self.own_error()
        if error is None:
            error = foreign(f"{who} raised {self.kind}: {self.message}")
            error.add_note(self.traceback)
        return error


@dataclass(frozen=True, slots=True)
class Raised:
    """A call raised ``error``, which travels itself: for callers that treat errors of other libraries by their class."""

    id: int
    error: Exception

    @classmethod
    def of(cls, call_id: int, error: Exception) -> Raised:
        """Take the error, or its text if it cannot be pickled, with its traceback as a note."""
        trace = "".join(tracebacks.format_exception(error))
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:  # a class with a constructor of any kind
            error = RuntimeError(f"{type(error).__name__}: {error}")
        error.add_note(trace)
        return cls(call_id, error)


@dataclass(frozen=True, slots=True)
class PeerState:
    """The state of the sender, which travels with every batch of messages, such as the policy version."""

    value: Any


@dataclass(frozen=True, slots=True)
class LastWords:
    """The served object has failed as a whole and ends; ``reason`` says why."""

    reason: str


Message = Call | Cancel | Item | Result | Failure | Raised | PeerState | LastWords


def encode(messages: list[Message]) -> bytes:
    """Return one frame."""
    payload = pickle.dumps(messages, protocol=pickle.HIGHEST_PROTOCOL)
    return len(payload).to_bytes(HEADER_BYTES, "big") + payload


async def frames(reader: asyncio.StreamReader) -> AsyncIterator[list[Message]]:
    """Yield the messages of each frame, until the connection has ended."""
    while True:
        try:
            size = int.from_bytes(await reader.readexactly(HEADER_BYTES), "big")
            payload = await reader.readexactly(size)
        except (asyncio.IncompleteReadError, OSError):
            return
        yield pickle.loads(payload)
