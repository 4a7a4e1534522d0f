"""A finished rollout group: the unit of admission, buffering and training."""

from __future__ import annotations

import copy
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np


def packed(typecode: str, numbers: Iterable[float]) -> np.ndarray:
    """Int64 of ``q``, float64 of ``d``; :mod:`array` reads a list in half of numpy's time.

    Raises:
        TypeError, OverflowError: of something that is no such number.
    """
    return np.array(array(typecode, numbers))


_LISTS = ("prompt_token_ids", "response_ids", "loss_mask", "logprobs", "versions", "rewards")


@dataclass(frozen=True)
class RolloutSequence:
    """One token sequence of a sample; the response-side lists are aligned token by token.

    ``loss_mask`` is 1 on sampled tokens; elsewhere ``logprobs`` is 0.0 and ``versions`` -1. ``rewards`` is per token
    (a reward for the whole response sits on its last token). What stages add is None until then, and 0.0 where the
    loss mask is 0.

    It keeps numbers in arrays, which the checks, the ages and the minibatch share, so nobody may change them: in lists they
    would take five times the memory, and Python's garbage collector visits every number in a list. A list is made anew
    whenever somebody asks for one.
    """

    prompt_token_ids: list[int]
    response_ids: list[int]
    loss_mask: list[int]
    logprobs: list[float]
    versions: list[int]
    rewards: list[float]
    stop_reason: str
    reference_logprobs: list[float] | None = None  # of the policy that the run started from
    proximal_logprobs: list[float] | None = None  # of the policy that was trained when the group was finished
    values: list[float] | None = None  # of the states that the tokens were sampled in, by the critic at the same time

    token_array: np.ndarray = field(init=False, repr=False, compare=False)  # int64, of the prompt and the response
    sampled: np.ndarray = field(init=False, repr=False, compare=False)  # bool [T], the loss mask
    logprob_array: np.ndarray = field(init=False, repr=False, compare=False)  # float64 [T]
    version_array: np.ndarray = field(init=False, repr=False, compare=False)  # int64 [T]
    reward_array: np.ndarray = field(init=False, repr=False, compare=False)  # float64 [T]

    def __post_init__(self) -> None:
        own = vars(self)
        own.update(
            token_array=packed("q", [*self.prompt_token_ids, *self.response_ids]),
            sampled=np.frombuffer(bytearray(self.loss_mask), np.bool_),
            logprob_array=packed("d", self.logprobs),
            version_array=packed("q", self.versions),
            reward_array=packed("d", self.rewards),
        )
        for name in _LISTS:
            del own[name]

    @classmethod
    def of_arrays(
        cls,
        tokens: np.ndarray,
        *,
        sampled: np.ndarray,
        logprobs: np.ndarray,
        versions: np.ndarray,
        rewards: np.ndarray,
        stop_reason: str,
    ) -> RolloutSequence:
        """Of numbers that are in arrays already, which become its own."""
        sequence = cls.__new__(cls)
        vars(sequence).update(
            token_array=tokens,
            sampled=sampled,
            logprob_array=logprobs,
            version_array=versions,
            reward_array=rewards,
            stop_reason=stop_reason,
        )
        return sequence

    def altered(self, **own: np.ndarray | list[float]) -> RolloutSequence:
        """A copy with other arrays of the response, or with what a stage adds; it shares the rest."""
        other = copy.copy(self)
        vars(other).update(own)
        return other

    if not TYPE_CHECKING:  # for which the lists are there

        def __getattr__(self, name: str) -> Any:
            if name not in _LISTS:
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)
            return self.arrays[name].tolist()

    @property
    def arrays(self) -> dict[str, np.ndarray]:
        """What the lists have, by their names."""
        prompt = self.num_prompt_tokens
        of_lists = (
            self.token_array[:prompt],
            self.token_array[prompt:],
            self.sampled.view(np.uint8),
            self.logprob_array,
            self.version_array,
            self.reward_array,
        )
        return dict(zip(_LISTS, of_lists, strict=True))

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
