"""What an environment is: it turns a prompt into messages, answers into rewards, and says when the episode is over.

    init(prompt) ──messages──> policy ──text──> step(action) ──observations, reward, done──> policy ...   close()

The shape is skyrl-gym's, so that a ``BaseTextEnv`` runs here unchanged. One instance lives for one episode; the calls
of an episode never overlap, and those of a blocking environment all run on one thread that is not the event loop's.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NotRequired, Protocol, TypedDict

from skyrl_train.generators.base import ConversationType


@dataclass(frozen=True, slots=True)
class PromptRecord:
    """One row of a data set. ``env_class`` None means the run's ``environment.env_class``."""

    uid: str
    prompt: ConversationType
    env_class: str | None = None
    env_extras: dict[str, Any] = field(default_factory=dict)
    data_source: str = ""

    def own_copy(self) -> PromptRecord:
        """The same row for somebody else's code, which may write into the prompt and the extras that it is given.

        Written into, the data set's own would be another prompt in the next sample, attempt and epoch, and another data set to
        a run that resumes.
        """
        return replace(self, prompt=_copied(self.prompt), env_extras=_copied(self.env_extras))


def _copied(value: Any) -> Any:
    """Lists and dicts at any depth are copied; what else there is, is shared."""
    if type(value) is dict:
        return {key: _copied(item) for key, item in value.items()}
    return [_copied(item) for item in value] if type(value) is list else value


class EnvironmentStep(TypedDict):
    """What one action led to.

    ``observations`` are the messages before the policy's next turn (ignored when ``done``). ``postprocessed_action`` is
    skyrl-gym's wish to put another text in the place of what was sampled; training stays token-exact, so the sampled
    tokens are kept and the wish is counted (``generate/postprocessed_actions``).
    """

    observations: ConversationType
    reward: float
    done: bool
    metadata: NotRequired[dict[str, Any]]
    postprocessed_action: NotRequired[str | None]


class TextEnvironment(Protocol):
    """The methods that an episode needs; skyrl-gym's ``BaseTextEnv`` has them."""

    def init(self, prompt: Any) -> tuple[ConversationType, dict[str, Any]]: ...

    def step(self, action: str) -> Any: ...

    def close(self) -> None: ...

    def get_metrics(self) -> dict[str, Any]: ...


class Environment(ABC):
    """Base of this library's environments, and a convenient one for yours.

    A subclass takes ``extras`` (the data row's other columns) and whatever keyword arguments it names; a run sets those
    by ``environment.kwargs``. ``is_blocking`` False promises that every method returns within microseconds and may run
    on the event loop. ``alphabet`` has the characters that prompts, observations and good answers are made of, for
    ``trainer.policy.model.build.alphabet``; empty where any text may occur.
    """

    is_blocking: ClassVar[bool] = True
    alphabet: ClassVar[str] = ""

    def __init__(self, extras: Mapping[str, Any]) -> None:
        self.extras = extras

    @classmethod
    def generate_prompts(cls, count: int, seed: int) -> list[PromptRecord] | None:
        """Returns ``count`` prompts as a function of ``seed`` (and of keyword arguments that a subclass adds).

        None, the default, says that this environment lives on data files.
        """
        return None

    def init(self, prompt: ConversationType) -> tuple[ConversationType, dict[str, Any]]:
        """Returns the messages that the policy sees first, and metadata."""
        return prompt, {}

    def observe_stop(self, stop_reason: str) -> None:  # noqa: B027 - most environments need not know
        """Told before each ``step`` why the action's text ended: ``"stop"`` or ``"length"``.

        Text alone cannot tell a finished answer from one that was cut off.
        """

    @abstractmethod
    def step(self, action: str) -> EnvironmentStep:
        """Takes the policy's text (special tokens left out) and returns what it led to."""

    def close(self) -> None:  # noqa: B027 - most environments hold nothing
        """Frees what the episode holds. Called exactly once, however the episode ended."""

    def get_metrics(self) -> dict[str, Any]:
        """Numbers about the finished episode; averaged over the group under ``environment/<key>``."""
        return {}
