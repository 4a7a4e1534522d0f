"""The environment interface: it turns a prompt into messages and answers into rewards, and ends the episode.

    init(prompt) ──messages──> policy ──text──> step(action) ──observations, reward, done──> policy ...   close()

The interface is skyrl-gym's, so a ``BaseTextEnv`` runs here unchanged. One instance lives for one episode. The calls of an
episode never overlap. The calls of a blocking environment all run on one thread, apart from the event loop.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NotRequired, TypedDict

from skyrl_train.types import ConversationType


@dataclass(frozen=True, slots=True)
class PromptRecord:
    """One row of a data set.

    Attributes:
        env_class: None stands for the run's ``environment.env_class``.
        is_text: the row has text, from which ``prompt`` has its only message.
    """

    uid: str
    prompt: ConversationType
    env_class: str | None = None
    env_extras: dict[str, Any] = field(default_factory=dict)
    data_source: str = ""
    is_text: bool = False

    def own_copy(self) -> PromptRecord:
        """Return a copy for user code, which may write into the prompt and the extras that it receives.

        If it wrote into the data set's own record, the next sample, attempt and epoch would get another prompt, and a
        resumed run would see another data set.
        """
        return replace(self, prompt=copied(self.prompt), env_extras=copied(self.env_extras))


def copied(value: Any) -> Any:
    """Return a copy for user code: of lists and dicts at any depth; everything else is shared."""
    # deepcopy() would also copy large values such as images.
    if type(value) is dict:
        return {key: copied(item) for key, item in value.items()}
    return [copied(item) for item in value] if type(value) is list else value


class EnvironmentStep(TypedDict):
    """The result of one action.

    ``observations`` are the messages before the policy's next turn; ignored when ``done``. ``postprocessed_action`` is
    skyrl-gym's request to replace the sampled text. Training stays token-exact: the sampled tokens are kept, and the
    request is counted (``generate/postprocessed_actions``).
    """

    observations: ConversationType
    reward: float
    done: bool
    metadata: NotRequired[dict[str, Any]]
    postprocessed_action: NotRequired[str | None]


class Environment(ABC):
    """Base class of this library's environments, and of yours.

    A subclass takes ``extras`` (the data row's other columns) and any keyword arguments, which a run sets with
    ``environment.kwargs``.

    Attributes:
        is_blocking: False promises that every method returns within microseconds and may run on the event loop.
        alphabet: the characters of prompts, observations and good answers, for ``trainer.policy.model.build.alphabet``;
            empty where any text may occur.
        takes_max_turns: whether ``extras["max_turns"]`` is ``generator.max_turns``.
    """

    is_blocking: ClassVar[bool] = True
    alphabet: ClassVar[str] = ""
    takes_max_turns: ClassVar[bool] = False

    def __init__(self, extras: Mapping[str, Any]) -> None:
        self.extras = extras

    @classmethod
    def generate_prompts(cls, count: int, seed: int) -> list[PromptRecord] | None:
        """Return ``count`` prompts as a function of ``seed`` (and of keyword arguments that a subclass adds).

        None, the default, means that prompts come from data files.
        """
        return None

    def init(self, prompt: ConversationType) -> tuple[ConversationType, dict[str, Any]]:
        """Return the messages that the policy sees first, and metadata."""
        return prompt, {}

    def observe_stop(self, stop_reason: str) -> None:  # noqa: B027 - most environments do not need it
        """Receive the reason why the action's text ended, ``"stop"`` or ``"length"``, before each ``step``.

        The text alone does not tell a finished answer from a truncated one.
        """

    @abstractmethod
    def step(self, action: str) -> EnvironmentStep:
        """Take the policy's text (without special tokens) and return its result."""

    def end_early(self) -> float:
        """Return a reward to add to the last action's, for an episode that ends before the environment is done.

        Called once after the last ``step``: its observations do not fit the context, or ``generator.max_turns`` is reached.
        An environment that rewards only a finished episode rewards what there is.
        """
        return 0.0

    def close(self) -> None:  # noqa: B027 - most environments hold nothing
        """Free the episode's resources. Called exactly once, however the episode ended."""

    def get_metrics(self) -> dict[str, Any]:
        """Return numbers about the finished episode. They are averaged over the group under ``environment/<key>``."""
        return {}


@dataclass(frozen=True)
class EnvironmentFactory:
    """Makes the environments of one ``env_class``.

    Attributes:
        name: as in the configuration.
        make: returns a new environment for one episode from the data row's other columns: an :class:`Environment`, or an
            object with its ``init``, ``step``, ``close`` and ``get_metrics``, such as skyrl-gym's ``BaseTextEnv``.
        generate_prompts: ``(count, seed)`` to prompts, or None where the environment needs data files.
        is_blocking: whether the environments need a thread.
        takes_max_turns: whether ``extras["max_turns"]`` is ``generator.max_turns``, as SkyRL's generator sets it for its own.
    """

    name: str
    make: Callable[[Mapping[str, Any]], Any]
    generate_prompts: Callable[[int, int], list[PromptRecord] | None] = lambda count, seed: None
    is_blocking: bool = True
    takes_max_turns: bool = False
