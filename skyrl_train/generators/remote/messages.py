"""What travels between the process that trains and an actor in which a generator runs. Data, and nothing else.

| from the centre | | from the actor | |
|---|---|---|---|
| ``Begin`` | play this | ``Played`` | what became of it |
| ``Cancel`` | nobody wants it any more | ``Ask`` | sample a response |
| ``Part`` | a piece of a response | ``Withdraw`` | nobody wants it any more |
| ``Answer`` | a response | ``Failed`` | a call failed |
| ``Failed`` | a request failed | | |
"""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from skyrl_train import errors
from skyrl_train.errors import RolloutError, SkyRLError
from skyrl_train.generators.construction import GeneratorSpec
from skyrl_train.inference.fleet import EngineState
from skyrl_train.inference.interface import EngineCapabilities
from skyrl_train.inference.requests import Generation, GenerationChunk, GenerationRequest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class CentralState:
    """What the central client says of itself, and whether rollouts may begin that nobody asked for."""

    policy_version: int
    capabilities: EngineCapabilities
    adapters: Mapping[str, str]
    engine_states: Mapping[int, EngineState]
    may_begin: bool


@dataclass(frozen=True, slots=True)
class Setup:
    """What an actor starts with.

    Args:
        tool_parser, reasoning_parser: see :class:`~skyrl_train.inference.chat.renderer.ChatRenderer`.
        folder: where the centre runs: what settings name by a relative path lies there.
        search_path: where the centre imports from.
    """

    spec: GeneratorSpec
    tokenizer: PreTrainedTokenizerBase
    tool_parser: str | None
    reasoning_parser: str | None
    folder: str
    search_path: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Begin:
    """Play a pickled ``GeneratorInput`` under this number."""

    call: int
    pickled: bytes


@dataclass(frozen=True, slots=True)
class Cancel:
    """Cancel a call; its end is reported all the same."""

    call: int


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of a streamed response; the last one has ``generation``."""

    ask: int
    chunk: GenerationChunk


@dataclass(frozen=True, slots=True)
class Answer:
    """A response that has ended."""

    ask: int
    generation: Generation


@dataclass(frozen=True, slots=True)
class Played:
    """A call has ended with a pickled ``GeneratorOutput``."""

    call: int
    pickled: bytes


@dataclass(frozen=True, slots=True)
class Ask:
    """Sample a response under this number."""

    ask: int
    request: GenerationRequest
    streamed: bool = False


@dataclass(frozen=True, slots=True)
class Withdraw:
    """Cancel a request; nobody waits for its answer."""

    ask: int


@dataclass(frozen=True, slots=True)
class Failed:
    """A call, a request or a start has raised ``kind``, a class of :mod:`skyrl_train.errors`."""

    number: int
    kind: str
    message: str
    traceback: str

    @classmethod
    def of(cls, number: int, error: BaseException) -> Failed:
        """An error as data: ours under its own class, anybody else's as a :class:`RolloutError` that names it."""
        trace = "".join(traceback.format_exception(error))
        kind = type(error).__name__
        if isinstance(error, SkyRLError) and getattr(errors, kind, None) is type(error):
            return cls(number, kind, str(error), trace)
        return cls(number, RolloutError.__name__, f"it raised {error!r}", trace)

    def error(self) -> SkyRLError:
        """The same error on this side of the border, with the other side's traceback as a note."""
        try:
            error: SkyRLError = getattr(errors, self.kind)(self.message)
        except TypeError:  # one that is made of more than a message
            error = RolloutError(f"it raised {self.kind}: {self.message}")
        error.add_note(self.traceback)
        return error


Command = Begin | Cancel | Part | Answer | Failed
Event = Played | Ask | Withdraw | Failed


@dataclass(frozen=True, slots=True)
class Message:
    """Commands in the order in which they were given, and how things stand."""

    state: CentralState
    commands: tuple[Command, ...]
