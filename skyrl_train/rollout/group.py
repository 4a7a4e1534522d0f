"""A finished rollout group: the unit of admission, buffering and training."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain

import numpy as np


@dataclass(frozen=True)
class RolloutSequence:
    """One token sequence of a sample; the response-side lists are aligned token by token.

    ``loss_mask`` is 1 on sampled tokens; elsewhere ``logprobs`` is 0.0 and ``versions`` -1. ``rewards`` is per token
    (a reward for the whole response sits on its last token). What stages add is None until then, and 0.0 where the
    loss mask is 0.

    The lists are for everybody. The arrays are the same numbers for what looks at all of them, and are made once (from
    :mod:`array`, which reads a list in half of numpy's time): checks, ages and the minibatch share them, so nobody may
    change them.
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

    @cached_property
    def token_array(self) -> np.ndarray:
        """Int64, of the prompt and the response."""
        return np.asarray(array("q", self.prompt_token_ids + self.response_ids))

    @cached_property
    def sampled(self) -> np.ndarray:
        """The loss mask as bool ``[T]`` over the response."""
        return np.frombuffer(bytearray(self.loss_mask), np.bool_)

    @cached_property
    def logprob_array(self) -> np.ndarray:
        """Float64 ``[T]`` over the response."""
        return np.asarray(array("d", self.logprobs))

    @cached_property
    def version_array(self) -> np.ndarray:
        """Int64 ``[T]`` over the response."""
        return np.asarray(array("q", self.versions))


@dataclass(frozen=True)
class Sample:
    """One trajectory. It is several sequences where its history was rewritten (a session that branched), else one.

    Each sampled token is trained in one sequence only; the others repeat it, if at all, with loss mask 0.
    """

    sequences: tuple[RolloutSequence, ...]

    @cached_property
    def rewards(self) -> list[float]:
        """The rewards of all tokens, sequence after sequence; of a single one its own list, which nobody may change."""
        if len(self.sequences) == 1:
            return self.sequences[0].rewards
        return list(chain.from_iterable(sequence.rewards for sequence in self.sequences))

    @cached_property
    def reward(self) -> float:
        """The return of the trajectory: the sum over all its sequences."""
        return sum(self.rewards)

    @cached_property
    def sampled_versions(self) -> np.ndarray:
        """The policy version of each trained token, int64."""
        nothing = np.empty(0, np.int64)
        versions = np.concatenate([nothing, *(sequence.version_array for sequence in self.sequences)])
        of_sampled: np.ndarray = versions[versions >= 0]
        return of_sampled


@dataclass(frozen=True)
class RolloutGroup:
    """All ``n_samples_per_prompt`` samples of one prompt. ``submitted_version`` is the policy's when it was admitted.

    A ``masked`` group takes its seat but trains nothing: all its tokens have loss mask 0, and still count in the
    denominator of the loss.
    """

    ordinal: int
    uid: str
    data_source: str
    samples: tuple[Sample, ...]
    submitted_version: int
    metrics: dict[str, float] = field(default_factory=dict)
    masked: bool = False

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
