"""What a generator is: anything that turns prompts into rewarded, token-exact trajectories.

The fields are SkyRL's, plus ``rollout_versions``: a generator written for SkyRL needs its import lines changed and the
versions passed through from the client.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypedDict

from skyrl_train.errors import RolloutError
from skyrl_train.inference.interface import InferenceEngineInput, InferenceEngineOutput

ConversationType = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class TrajectoryID:
    """Names one sample: ``instance_id`` is the prompt's, ``repetition_id`` counts the samples of its group."""

    instance_id: str
    repetition_id: int

    def to_string(self) -> str:
        return f"{self.instance_id}_{self.repetition_id}"


@dataclass(frozen=True, slots=True)
class BatchMetadata:
    """Where a batch belongs. ``seeds`` has one seed per trajectory; use it for everything random in that trajectory."""

    global_step: int
    training_phase: Literal["train", "eval"]
    seeds: tuple[int, ...] = ()


class GeneratorInput(TypedDict):
    """One entry per trajectory in each list (a group's prompt is repeated ``n_samples_per_prompt`` times)."""

    prompts: list[ConversationType]
    env_classes: list[str]
    env_extras: list[dict[str, Any]]
    sampling_params: Mapping[str, Any] | None
    trajectory_ids: list[TrajectoryID]
    batch_metadata: BatchMetadata


class GeneratorOutput(TypedDict):
    """One entry per trajectory, or with ``is_last_step`` per sequence of one, in each list.

    A trajectory of several sequences (its history was rewritten, so that no single sequence holds what was sampled) is
    several entries in a row with the same trajectory id; ``is_last_step`` is True on its last one. Its return is the sum
    of all their rewards. Each sampled token has loss mask 1 in one of them only.

    The inner lists of ``response_ids``, ``loss_masks``, ``rollout_logprobs`` and ``rollout_versions`` are aligned token
    by token. ``loss_masks`` is 1 on sampled tokens and 0 on everything else in the response (tool results, templates);
    there ``rollout_logprobs`` is 0.0 and ``rollout_versions`` -1. ``rewards`` has a float per response or per token.
    """

    prompt_token_ids: list[list[int]]
    response_ids: list[list[int]]
    rewards: list[float] | list[list[float]]
    loss_masks: list[list[int]]
    stop_reasons: list[str] | None
    rollout_metrics: dict[str, float] | None
    rollout_logprobs: list[list[float]] | None
    rollout_versions: list[list[int]] | None
    trajectory_ids: list[TrajectoryID] | None
    is_last_step: list[bool] | None


async def play(generator: GeneratorInterface, input_batch: GeneratorInput) -> GeneratorOutput:
    """What ``generator`` makes of ``input_batch``; who needs trajectories calls this and not ``generate``.

    Raises:
        RolloutError: it called ``exit()``, or code did that it ran; as it is, that would end the training run.
        Exception: whatever else it raised.
    """
    try:
        return await generator.generate(input_batch)
    except SystemExit as error:
        raise RolloutError(f"it ended itself with exit status {error.code}") from error


class GenerationClient(Protocol):
    """What a generator needs of the inference client: one blocking call, whatever happens underneath."""

    async def generate(self, engine_input: InferenceEngineInput) -> InferenceEngineOutput:
        """Samples one response per prompt; ids, log-probs, versions and stop reasons come back token by token."""


class GeneratorInterface(ABC):
    """One call generates one group; many calls run at once on the control loop, so nothing in it may block."""

    async def start(self) -> None:
        """Called once, before the first ``generate`` and when the engines serve. Opens what the generator needs."""
        return

    def pace(self, may_begin: Callable[[], bool]) -> None:
        """Called once before ``start``. ``may_begin`` says whether there is room for rollouts that the trainer did not ask
        for, such as sessions that other programs open; it is False while the staleness budget is spent."""
        return

    async def aclose(self) -> None:
        """Called once after the last ``generate`` has ended, also where ``start`` failed. Frees what ``start`` opened."""
        return

    @abstractmethod
    async def generate(self, input_batch: GeneratorInput) -> GeneratorOutput:
        """Generates a trajectory for each entry of ``input_batch``.

        A call sees one blocking whole: weight updates, aborts and engine deaths happen underneath. It may raise; the
        trainer retries the group.
        """
