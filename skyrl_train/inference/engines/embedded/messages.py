"""What the engine's proxy and its worker say to each other. Plain data, no torch: the proxy's process may not need it.

proxy ──Add, Abort, Call, Close──> worker          worker ──Tokens, Refused, Reply, Died──> proxy
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from skyrl_train.config.schema.model import LoraConfig
from skyrl_train.inference.interface import SamplingParams, TokenChunk


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """What the worker needs to build its engine."""

    model_path: str
    device: str
    dtype: str
    max_num_seqs: int
    max_model_len: int
    batch_invariant: bool
    seed: int
    lora: LoraConfig | None = None  # the model keeps its folder's weights, and publications bring this adapter


class Method(StrEnum):
    """What a :class:`Call` asks for; each is answered by one :class:`Reply`."""

    ABORT_ALL = "abort_all"
    PAUSE = "pause"
    RESUME = "resume"
    SLEEP = "sleep"
    WAKE_UP = "wake_up"
    RECEIVE = "receive"
    LOAD = "load"
    HEALTH = "health"
    CHECKSUM = "checksum"


@dataclass(frozen=True, slots=True)
class Add:
    """A request; answered by one last :class:`Tokens` or by :class:`Refused`, before it by chunks of ``stream_every``."""

    request_id: int
    prompt: list[int]
    params: SamplingParams
    stream_every: int  # 0: no chunks


@dataclass(frozen=True, slots=True)
class Abort:
    """Nobody waits for these requests any more. Not answered."""

    request_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Call:
    call_id: int
    method: Method
    argument: Any = None


@dataclass(frozen=True, slots=True)
class Close:
    """The worker ends."""


@dataclass(frozen=True, slots=True)
class Tokens:
    request_id: int
    chunk: TokenChunk


@dataclass(frozen=True, slots=True)
class Refused:
    """The request cannot be served; ``message`` says why."""

    request_id: int
    message: str


@dataclass(frozen=True, slots=True)
class Reply:
    """``error`` is the message of an EngineError, or None."""

    call_id: int
    value: Any = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Died:
    """The worker's last word."""

    message: str


Command = Add | Abort | Call | Close
Event = Tokens | Refused | Reply | Died
READY_CALL = 0  # the call id of the reply that says "up"
