"""A finished rollout group: the unit of admission, buffering and training."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np


def packed(typecode: str, numbers: Iterable[float]) -> np.ndarray:
    """Int64 of ``q``, float64 of ``d``; :mod:`array` reads a list in half of numpy's time.

    Raises:
        TypeError, OverflowError: of something that is no such number.
    """
    return np.array(array(typecode, numbers))


@dataclass(frozen=True, eq=False)
class RolloutSequence:
    """One token sequence of a sample: ``P`` tokens of prompt and ``T`` of response.

    Its numbers are in arrays, which the checks, the ages and the minibatch share, so nobody may change them: in lists they
    would take five times the memory, and Python's garbage collector visits every number in a list. The properties that are
    lists are made anew whenever somebody asks for one.

    Attributes:
        token_array: prompt and response, int64 [P + T].
        sampled: the loss mask, bool [T]: the tokens that the policy sampled and trains on.
        logprob_array: of the policy that sampled them, float64 [T]; elsewhere 0.0.
        version_array: of that policy, int64 [T]; elsewhere -1.
        reward_array: float64 [T]; a reward for the whole response sits on its last token.
        stop_reason: why the response ended.
        reference_logprobs: of the policy that the run started from, [T]; None until the stage that computes them. Like the
            next two, 0.0 where the loss mask is 0.
        proximal_logprobs: of the policy that was trained when the group was finished.
        values: of the states that the tokens were sampled in, by the critic at the same time.
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
        **by_stages: list[float] | None,
    ) -> RolloutSequence:
        """Of numbers that are in lists; ``by_stages``: what stages added, by the names of the attributes.

        Raises:
            TypeError, ValueError, OverflowError: of something that is no such number.
        """
        return cls(
            token_array=packed("q", [*prompt_token_ids, *response_ids]),
            sampled=np.frombuffer(bytearray(loss_mask), np.bool_),
            logprob_array=packed("d", logprobs),
            version_array=packed("q", versions),
            reward_array=packed("d", rewards),
            stop_reason=stop_reason,
            **by_stages,
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RolloutSequence) and _in_lists(self.row()) == _in_lists(other.row())

    def row(self) -> dict[str, Any]:
        """What :meth:`of_lists` takes, in arrays instead of lists."""
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
        }

    @property
    def prompt_token_ids(self) -> list[int]:
        """The prompt."""
        return self._list(self.token_array[: self.num_prompt_tokens])

    @property
    def response_ids(self) -> list[int]:
        """The response."""
        return self._list(self.token_array[self.num_prompt_tokens :])

    @property
    def loss_mask(self) -> list[int]:
        """1 on the sampled tokens of the response, else 0."""
        return self._list(self.sampled.view(np.uint8))

    @property
    def logprobs(self) -> list[float]:
        """Of the response's tokens, by the policy that sampled them."""
        return self._list(self.logprob_array)

    @property
    def versions(self) -> list[int]:
        """Of the policy that sampled them."""
        return self._list(self.version_array)

    @property
    def rewards(self) -> list[float]:
        """Of the response's tokens."""
        return self._list(self.reward_array)

    @staticmethod
    def _list(numbers: np.ndarray) -> list[Any]:
        made: list[Any] = numbers.tolist()
        return made

    @property
    def num_prompt_tokens(self) -> int:
        """How many tokens the prompt has."""
        return len(self.token_array) - len(self.version_array)

    @property
    def num_response_tokens(self) -> int:
        """How many tokens the response has: ``T``."""
        return len(self.version_array)

    @cached_property
    def num_sampled(self) -> int:
        """Tokens with loss mask 1."""
        return int(np.count_nonzero(self.sampled))


def _in_lists(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in row.items()}


@dataclass(frozen=True)
class Sample:
    """One trajectory. It is several sequences where its history was rewritten (a session that branched), else one.

    Each sampled token is trained in one sequence only; the others repeat it, if at all, with loss mask 0.
    """

    sequences: tuple[RolloutSequence, ...]

    @property
    def rewards(self) -> list[float]:
        """The rewards of all tokens, sequence after sequence: a list of the caller's own."""
        rewards: list[float] = []
        for sequence in self.sequences:
            rewards += sequence.reward_array.tolist()
        return rewards

    @cached_property
    def reward(self) -> float:
        """The return of the trajectory: the sum over all its sequences."""
        return sum(float(sequence.reward_array.sum()) for sequence in self.sequences)

    @cached_property
    def sampled_versions(self) -> np.ndarray:
        """The policy version of each trained token, int64."""
        if len(self.sequences) == 1 and self.sequences[0].num_sampled == self.sequences[0].num_response_tokens:
            return self.sequences[0].version_array
        nothing = np.empty(0, np.int64)
        return np.concatenate([nothing, *(sequence.version_array[sequence.sampled] for sequence in self.sequences)])


@dataclass(frozen=True)
class RolloutGroup:
    """All ``n_samples_per_prompt`` samples of one prompt. ``submitted_version`` is the policy's when it was admitted.

    A ``masked`` group takes its seat but trains nothing: all its tokens have loss mask 0, and still count in the
    denominator of the loss. A negative ordinal is of no training stream: ``-1 - row`` of the prompts of an evaluation.
    """

    ordinal: int
    uid: str
    data_source: str
    samples: tuple[Sample, ...]
    submitted_version: int
    metrics: dict[str, float] = field(default_factory=dict)
    masked: bool = False

    @property
    def name(self) -> str:
        """What messages call it."""
        if self.ordinal >= 0:
            return f"group {self.ordinal}"
        source = f" of data source {self.data_source!r}" if self.data_source else ""
        prompt = f"row {-1 - self.ordinal} (counted from 0, prompt {self.uid!r}){source}"
        return f"evaluation of version {self.submitted_version}, {prompt}"

    @cached_property
    def oldest_version(self) -> int:
        """The oldest policy version among the sampled tokens (of a group without any: the one it was admitted under)."""
        return min((int(v.min()) for v in self._sampled_versions), default=self.submitted_version)

    @cached_property
    def newest_version(self) -> int:
        """The newest policy version among the sampled tokens."""
        return max((int(v.max()) for v in self._sampled_versions), default=self.submitted_version)

    @property
    def _sampled_versions(self) -> Iterator[np.ndarray]:
        """Of the samples that have sampled tokens."""
        return (versions for sample in self.samples if len(versions := sample.sampled_versions))

    def lag(self, step: int) -> int:
        """``(t - 1) - oldest version``: how many versions behind step ``t``'s policy its oldest token is."""
        return (step - 1) - self.oldest_version
