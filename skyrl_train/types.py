"""Data types that all packages share: the input and output of a generator, and finished rollout groups.

Imports nothing of this package.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from typing import Any, Literal, NotRequired, TypedDict

import numpy as np

ConversationType = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class TrajectoryID:
    """Name of a sample: ``instance_id`` names the prompt, ``repetition_id`` counts the samples of its group."""

    instance_id: str
    repetition_id: int

    def to_string(self) -> str:
        """Return the session id of the sample's requests: with it they stay on one engine, and a resume replays them."""
        return f"{self.instance_id}_{self.repetition_id}"


@dataclass(frozen=True, slots=True)
class BatchMetadata:
    """Context of a batch.

    Attributes:
        global_step: one more than the policy version that the engines served when the attempt began; in an evaluation the
            version that is evaluated.
        seeds: one seed per trajectory; use it for all random choices in that trajectory.
    """

    global_step: int
    training_phase: Literal["train", "eval"]
    seeds: tuple[int, ...] = ()


class GeneratorInput(TypedDict):
    """One entry per trajectory in each list (a group's prompt is repeated ``n_samples_per_prompt`` times).

    Attributes:
        prompts: conversations, lists of ``{"role", "content"}``.
        env_classes: names of environments.
        env_extras: the other columns of the data row.
        sampling_params: for the client; None: ``generator.sampling_params``.
    """

    prompts: list[ConversationType]
    env_classes: list[str]
    env_extras: list[dict[str, Any]]
    sampling_params: Mapping[str, Any] | None
    trajectory_ids: list[TrajectoryID]
    batch_metadata: BatchMetadata


@dataclass(frozen=True, slots=True)
class GrammarSpan:
    """Tokens ``start`` to ``stop - 1`` of a response were sampled under one grammar, from its beginning.

    ``kind`` and ``value`` are the fields of its :class:`~skyrl_train.inference.interface.StructuredOutput`; ``stop_token_ids``
    belong to the request.
    """

    start: int
    stop: int
    kind: str
    value: str
    stop_token_ids: tuple[int, ...] = ()

    def moved(self, tokens: int) -> GrammarSpan:
        """Return the span, ``tokens`` further right."""
        return replace(self, start=self.start + tokens, stop=self.stop + tokens)


class GeneratorOutput(TypedDict):
    """One entry per trajectory in each list, or per sequence of a trajectory if ``is_last_step`` is given.

    A trajectory has several sequences if its history was rewritten, so that no single sequence contains all sampled tokens.
    They are consecutive entries with the same trajectory id; ``is_last_step`` is True on the last one. The return of the
    trajectory is the sum of their rewards. Each sampled token has loss mask 1 in exactly one of them.

    The inner lists of ``response_ids``, ``loss_masks``, ``rollout_logprobs`` and ``rollout_versions`` are aligned by token.
    ``loss_masks`` is 1 on sampled tokens and 0 on all other tokens of the response (tool results, templates), where
    ``rollout_logprobs`` is 0.0 and ``rollout_versions`` -1. ``rewards`` has one float per response or per token.
    ``prompt_token_ids`` is the prompt of the first request. ``rollout_metrics`` maps names to numbers; those below
    ``environment/`` need no declaration. ``rollout_grammars`` has the spans of each response that were sampled under a grammar;
    the trainer masks the same tokens.
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
    rollout_grammars: NotRequired[list[list[GrammarSpan]]]


class PauseMode(StrEnum):
    """How running requests are treated while weights are replaced."""

    KEEP = "keep"  # they pause; their KV cache stays, computed by the old weights
    RECOMPUTE = "recompute"  # they pause; their KV cache is recomputed with the new weights
    ABORT = "abort"  # they return their tokens with stop reason "abort"; the client resubmits them
    WAIT = "wait"  # they finish first; new requests wait


def packed(typecode: str, numbers: Iterable[float]) -> np.ndarray:
    """Convert numbers to an int64 (``q``) or float64 (``d``) array. :mod:`array` takes half of numpy's time for a list.

    Raises:
        TypeError, OverflowError: an element is no such number.
    """
    return np.array(array(typecode, numbers))


@dataclass(frozen=True, eq=False)
class RolloutSequence:
    """One token sequence of a sample: ``P`` prompt tokens and ``T`` response tokens.

    Numbers are stored in arrays, which validation, staleness and minibatches share: do not modify them. Lists would take five
    times the memory, and Python's garbage collector would visit every number. Each access to a list property makes a new list.

    Attributes:
        token_array: prompt and response, int64 [P + T].
        sampled: the loss mask, bool [T]: tokens that the policy sampled and trains on.
        logprob_array: log-probs of the sampling policy, float64 [T]; 0.0 where ``sampled`` is False.
        version_array: versions of the sampling policy, int64 [T]; -1 where ``sampled`` is False.
        reward_array: float64 [T]; a reward for the whole response is on its last token.
        stop_reason: reason for the end of the response.
        reference_logprobs: log-probs of the initial policy, [T]; None until a stage computes them. 0.0 where the loss mask is
            0, like the next two.
        proximal_logprobs: log-probs of the trained policy at the time when the group finished, [T].
        values: the critic's values at that time of the states in which the tokens were sampled, [T].
        grammars: spans of the response that were sampled under a grammar.
    """

    token_array: np.ndarray
    sampled: np.ndarray
    logprob_array: np.ndarray
    version_array: np.ndarray
    reward_array: np.ndarray
    stop_reason: str
    reference_logprobs: list[float] | None = None
    proximal_logprobs: list[float] | None = None
    values: list[float] | None = None
    grammars: tuple[GrammarSpan, ...] = ()

    @classmethod
    def of_lists(
        cls,
        prompt_token_ids: Sequence[int],
        response_ids: Sequence[int],
        loss_mask: Sequence[int],
        logprobs: Sequence[float],
        versions: Sequence[int],
        rewards: Sequence[float],
        stop_reason: str,
        grammars: Iterable[Sequence[Any]] = (),
        **by_stages: list[float] | None,
    ) -> RolloutSequence:
        """Convert lists to a sequence.

        Args:
            grammars: the values of each span in their order.
            by_stages: numbers added by stages, by the names of the attributes.

        Raises:
            TypeError, ValueError, OverflowError: an element is no such number.
        """
        return cls(
            token_array=packed("q", [*prompt_token_ids, *response_ids]),
            sampled=np.frombuffer(bytearray(loss_mask), np.bool_),
            logprob_array=packed("d", logprobs),
            version_array=packed("q", versions),
            reward_array=packed("d", rewards),
            stop_reason=stop_reason,
            grammars=tuple(
                GrammarSpan(start, stop, kind, value, tuple(stop_ids))
                for start, stop, kind, value, stop_ids in grammars
            ),
            **by_stages,
        )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, RolloutSequence):
            return False
        theirs = other.row()
        return all(
            np.array_equal(mine, theirs[name])
            if isinstance(mine, np.ndarray) or isinstance(theirs[name], np.ndarray)
            else mine == theirs[name]
            for name, mine in self.row().items()
        )

    def row(self) -> dict[str, Any]:
        """Return the arguments of :meth:`of_lists`, as arrays instead of lists."""
        # Views instead of copies: a checkpoint encodes thousands of sequences.
        prompt = self.num_prompt_tokens
        return {
            "prompt_token_ids": self.token_array[:prompt],
            "response_ids": self.token_array[prompt:],
            "loss_mask": self.sampled.view(np.uint8),
            "logprobs": self.logprob_array,
            "versions": self.version_array,
            "rewards": self.reward_array,
            "stop_reason": self.stop_reason,
            "reference_logprobs": self.reference_logprobs,
            "proximal_logprobs": self.proximal_logprobs,
            "values": self.values,
            "grammars": [astuple(span) for span in self.grammars],
        }

    @property
    def prompt_token_ids(self) -> list[int]:
        """Tokens of the prompt, [P]."""
        ids: list[int] = self.token_array[: self.num_prompt_tokens].tolist()
        return ids

    @property
    def response_ids(self) -> list[int]:
        """Tokens of the response, [T]."""
        ids: list[int] = self.token_array[self.num_prompt_tokens :].tolist()
        return ids

    @property
    def loss_mask(self) -> list[int]:
        """1 on the sampled tokens of the response, else 0, [T]."""
        mask: list[int] = self.sampled.view(np.uint8).tolist()
        return mask

    @property
    def logprobs(self) -> list[float]:
        """Log-probs of the response under the sampling policy, [T]."""
        logprobs: list[float] = self.logprob_array.tolist()
        return logprobs

    @property
    def versions(self) -> list[int]:
        """Versions of the sampling policy, [T]."""
        versions: list[int] = self.version_array.tolist()
        return versions

    @property
    def rewards(self) -> list[float]:
        """Rewards per token of the response, [T]."""
        rewards: list[float] = self.reward_array.tolist()
        return rewards

    def response_runs(self) -> Iterator[tuple[bool, list[int]]]:
        """Yield the longest runs of response tokens that are all sampled or all not, with whether they are sampled."""
        ids, start = self.response_ids, 0
        ends = [*(np.flatnonzero(np.diff(self.sampled)) + 1).tolist(), len(ids)] if ids else []
        for end in ends:
            yield bool(self.sampled[start]), ids[start:end]
            start = end

    @property
    def num_prompt_tokens(self) -> int:
        """Number of prompt tokens, ``P``."""
        return len(self.token_array) - len(self.version_array)

    @property
    def num_response_tokens(self) -> int:
        """Number of response tokens, ``T``."""
        return len(self.version_array)

    @cached_property
    def num_sampled(self) -> int:
        """Number of tokens with loss mask 1."""
        return int(np.count_nonzero(self.sampled))


@dataclass(frozen=True)
class Sample:
    """One trajectory: one sequence, or several if its history was rewritten (a session that branched).

    Each sampled token is trained in one sequence only; other sequences that contain it have loss mask 0 there.
    ``reward_parts``: numbers that the reward function returned beside the reward; None: it returned none.
    """

    sequences: tuple[RolloutSequence, ...]
    reward_parts: Mapping[str, float] | None = None

    @property
    def rewards(self) -> list[float]:
        """Rewards of all tokens, sequence after sequence, as a new list."""
        rewards: list[float] = []
        for sequence in self.sequences:
            rewards += sequence.reward_array.tolist()
        return rewards

    @cached_property
    def reward(self) -> float:
        """Return of the trajectory: the sum over all its sequences."""
        return sum(float(sequence.reward_array.sum()) for sequence in self.sequences)

    @cached_property
    def sampled_versions(self) -> np.ndarray:
        """Policy version of each trained token, int64."""
        # The common case, one sequence with sampled tokens only, needs no copy.
        if len(self.sequences) == 1 and self.sequences[0].num_sampled == self.sequences[0].num_response_tokens:
            return self.sequences[0].version_array
        # concatenate() raises without any array; a sample without sequences has none.
        nothing = np.empty(0, np.int64)
        return np.concatenate([nothing, *(sequence.version_array[sequence.sampled] for sequence in self.sequences)])


@dataclass(frozen=True)
class RolloutGroup:
    """All ``n_samples_per_prompt`` samples of one prompt. ``submitted_version``: policy version at its admission.

    A ``masked`` group takes a batch slot but trains nothing: all its tokens have loss mask 0, and still count in the
    denominator of the loss. A negative group index ``-1 - row`` belongs to the prompts of an evaluation. ``generation_s``:
    duration of the attempt that generated it.
    """

    group_index: int
    uid: str
    data_source: str
    samples: tuple[Sample, ...]
    submitted_version: int
    metrics: dict[str, float] = field(default_factory=dict)
    masked: bool = False
    generation_s: float = field(default=0.0, compare=False)

    @property
    def name(self) -> str:
        """Name in messages."""
        if self.group_index >= 0:
            return f"group {self.group_index}"
        source = f" of data source {self.data_source!r}" if self.data_source else ""
        prompt = f"row {-1 - self.group_index} (counted from 0, prompt {self.uid!r}){source}"
        return f"evaluation of version {self.submitted_version}, {prompt}"

    @cached_property
    def oldest_version(self) -> int:
        """Oldest policy version among the sampled tokens; without any, the version at admission."""
        sampled = (sample.sampled_versions for sample in self.samples)
        return min((int(versions.min()) for versions in sampled if len(versions)), default=self.submitted_version)

    @cached_property
    def newest_version(self) -> int:
        """Newest policy version among the sampled tokens."""
        sampled = (sample.sampled_versions for sample in self.samples)
        return max((int(versions.max()) for versions in sampled if len(versions)), default=self.submitted_version)

    @property
    def mean_reward(self) -> float | None:
        """Mean return of the samples; None: the group failed, and has none."""
        rewards = [sample.reward for sample in self.samples if sample.sequences]
        return sum(rewards) / len(rewards) if rewards else None

    def lag(self, step: int) -> int:
        """Return ``(t - 1) - oldest version``: versions between the oldest token and the policy of step ``t``."""
        return (step - 1) - self.oldest_version
