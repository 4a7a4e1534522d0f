"""A finished rollout group: the unit of admission, buffering and training."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain


@dataclass(frozen=True)
class RolloutSequence:
    """One token sequence of a sample; the response-side lists are aligned token by token.

    ``loss_mask`` is 1 on sampled tokens; elsewhere ``logprobs`` is 0.0 and ``versions`` -1. ``rewards`` is per token
    (a reward for the whole response sits on its last token). What stages add is None until then, and 0.0 where the
    loss mask is 0.
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


@dataclass(frozen=True)
class Sample:
    """One trajectory. It is several sequences where its history was rewritten (a session that branched), else one.

    Each sampled token is trained in one sequence only; the others repeat it, if at all, with loss mask 0.
    """

    sequences: tuple[RolloutSequence, ...]

    @cached_property
    def rewards(self) -> list[float]:
        """The rewards of all tokens, sequence after sequence."""
        return [reward for sequence in self.sequences for reward in sequence.rewards]

    @cached_property
    def reward(self) -> float:
        """The return of the trajectory: the sum over all its sequences."""
        return sum(self.rewards)

    @cached_property
    def sampled_versions(self) -> list[int]:
        """The policy version of each trained token."""
        return [version for sequence in self.sequences for version in sequence.versions if version >= 0]


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
        return min(chain.from_iterable(s.sampled_versions for s in self.samples), default=self.submitted_version)

    @cached_property
    def newest_version(self) -> int:
        """The newest policy version among the sampled tokens."""
        return max(chain.from_iterable(s.sampled_versions for s in self.samples), default=self.submitted_version)

    def lag(self, step: int) -> int:
        """``(t - 1) - oldest version``: how many versions behind step ``t``'s policy its oldest token is."""
        return (step - 1) - self.oldest_version
