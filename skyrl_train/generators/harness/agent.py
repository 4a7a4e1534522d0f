"""What an agent is to the generator: something that is given a task and may say what its run was worth.

AgentTask ──Agent.run──> AgentResult
               │
               └── requests to base_url with api_key: they are recorded as the task's session
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, Protocol

_REDACTED = "<api key>"
_TELLING_CHARACTERS = 8  # of a key in a row


@dataclass(frozen=True, slots=True)
class AgentTask:
    """One sample to be played.

    Args:
        prompt: the conversation of the data row.
        extras: the other columns of the data row.
        base_url: for OpenAI clients, ends in ``/v1``; Anthropic's clients want it without.
        seed: for everything random in the agent itself.
    """

    prompt: Sequence[Mapping[str, Any]]
    extras: Mapping[str, Any]
    base_url: str
    api_key: str = field(repr=False)
    session_id: str
    seed: int | None

    @property
    def server_url(self) -> str:
        """The endpoint without ``/v1``."""
        return self.base_url.removesuffix("/v1")

    def redact(self, text: str) -> str:
        """``text`` without the key and without any part of it that is long enough to be told from chance.

        Texts are cut somewhere before they are shown, and so may a key have been.
        """
        return _without_parts(text, self.api_key)


@dataclass(frozen=True, slots=True)
class AgentResult:
    """What an agent says of its run. Without a reward and turn rewards, they must have been posted to the endpoint.

    ``turn_rewards``: one per turn, in the order in which the responses ended. ``metrics`` are averaged over the samples as
    ``environment/<name>``. ``remark`` is for the message where a reward turns out to be missing.
    """

    reward: float | None = None
    turn_rewards: Sequence[float] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)
    remark: str = "it returned none"


class Agent(Protocol):
    """Runs tasks, many at once."""

    async def run(self, task: AgentTask) -> AgentResult:
        """Plays one task. Cancelling it ends everything that the run has started.

        Raises:
            AgentError: the run failed, and the message says how.
        """


def _without_parts(text: str, key: str) -> str:
    size = min(_TELLING_CHARACTERS, len(key))
    parts = "|".join(re.escape(key[place : place + size]) for place in range(len(key) - size + 1))
    kept: list[str] = []
    end = 0
    for match in re.finditer(f"(?={parts})", text):  # looking ahead: parts of a key overlap
        if match.start() > end or not kept:
            kept += [text[end : match.start()], _REDACTED]
        end = match.start() + size
    return "".join([*kept, text[end:]])


class AgentError(Exception):
    """A run failed; the generator makes a RolloutError of it that names the sample."""


_SHAPE = 'Return a number, or {"reward": number, "turn_rewards": [number, ...], "metrics": {name: number}}.'


def to_result(value: Any) -> AgentResult:
    """Reads what an agent returned: a number, a mapping, or None where the reward was posted to the endpoint.

    Raises:
        AgentError: it is anything else, or has a number that is not finite.
    """
    if value is None:
        return AgentResult()
    if not isinstance(value, Mapping):
        return AgentResult(_number(value, "the reward"))
    unknown = sorted(str(key) for key in value.keys() - {"reward", "turn_rewards", "metrics"})
    if unknown:
        raise AgentError(f"it returned an object with the unknown key {unknown[0]!r}. {_SHAPE}")
    reward, turns, metrics = (value.get(key) for key in ("reward", "turn_rewards", "metrics"))
    if not isinstance(turns or [], list | tuple) or not isinstance(metrics or {}, Mapping):
        raise AgentError(f"it returned turn_rewards={turns!r:.80} and metrics={metrics!r:.80}. {_SHAPE}")
    return AgentResult(
        reward=None if reward is None else _number(reward, "the reward"),
        turn_rewards=[_number(value, f"turn_rewards[{turn}]") for turn, value in enumerate(turns or ())],
        metrics={str(name): _number(value, f"metrics[{name!r}]") for name, value in (metrics or {}).items()},
    )


def _number(value: Any, what: str) -> float:
    if not isinstance(value, Real) or not math.isfinite(value):
        raise AgentError(f"{what} that it returned is {value!r:.80}, not a finite number. {_SHAPE}")
    return float(value)
