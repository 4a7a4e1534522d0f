"""Rewards computed apart from the rollout: a function scores the samples of each finished group."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from skyrl_train.environments.base import PromptRecord
from skyrl_train.errors import NonFiniteRewardError, RolloutError, StageError
from skyrl_train.generators.validation import is_finite
from skyrl_train.rollout.group import RolloutGroup, RolloutSequence, Sample
from skyrl_train.rollout.placement.base import CallFailed, Place
from skyrl_train.rollout.reward_function import GroupToReward, SampleToReward

logger = logging.getLogger(__name__)


class RewardStage:
    """Puts the function's rewards in the place of the generator's.

    A function that raises, hangs or ends its process is tried again with the same samples; nothing is generated again. When
    that is of no use, the rollout has failed. A function that returns something else than its rewards stops the run.

    Args:
        decode: the text of some tokens, special ones left out.
        max_parallel: groups that are scored at once.
        attempts: how often a group is tried, at least once.
        timeout_s: limit of one attempt; None: no limit.
        on_failure: is told the group's name and the reason of each attempt that fails.
    """

    name = "reward"

    def __init__(
        self,
        place: Place,
        decode: Callable[[Sequence[int]], str],
        *,
        max_parallel: int,
        attempts: int = 1,
        timeout_s: float | None = None,
        on_failure: Callable[[str, str], None] = lambda name, reason: None,
    ) -> None:
        self._place = place
        self._decode = decode
        self.max_parallel = max_parallel
        self._attempts = attempts
        self._timeout_s = timeout_s
        self._on_failure = on_failure

    async def start(self) -> None:
        """See :class:`Stage`."""
        await self._place.start()

    async def run(self, group: RolloutGroup, record: PromptRecord) -> RolloutGroup:
        """See :class:`Stage`."""
        question = group_to_reward(record, group.samples, self._decode)
        return replace(group, samples=with_rewards(group.samples, await self._ask(group.name, question)))

    async def _ask(self, name: str, question: GroupToReward) -> Any:
        attempt = 0
        while True:
            attempt += 1
            try:
                return await self._place.call(question, self._timeout_s)
            except CallFailed as failure:
                reason = f"its reward function failed: {failure.reason}"
                self._on_failure(name, reason)
                if attempt >= self._attempts:
                    raise RolloutError(
                        f"the rollout of prompt {question.uid!r} has no reward after {attempt} attempts; the last time "
                        f"{reason}"
                    ) from failure
                logger.warning("%s: %s (attempt %d of %d)", name, reason, attempt, self._attempts)

    async def aclose(self) -> None:
        """See :class:`Stage`."""
        await self._place.aclose()


def group_to_reward(
    record: PromptRecord, samples: Sequence[Sample], decode: Callable[[Sequence[int]], str]
) -> GroupToReward:
    """What the reward function is asked. Pure."""
    record = record.own_copy()
    return GroupToReward(
        uid=record.uid,
        data_source=record.data_source,
        prompt=record.prompt,
        env_extras=record.env_extras,
        samples=tuple(_sample_to_reward(sample, decode) for sample in samples),
    )


def _sample_to_reward(sample: Sample, decode: Callable[[Sequence[int]], str]) -> SampleToReward:
    last = sample.sequences[-1]
    return SampleToReward(
        text=decode(last.response_ids),
        prompt_token_ids=last.prompt_token_ids,
        response_ids=last.response_ids,
        loss_mask=last.loss_mask,
        stop_reason=last.stop_reason,
        reward=sample.reward,
    )


def with_rewards(samples: Sequence[Sample], answer: Any) -> tuple[Sample, ...]:
    """``samples`` with the rewards of ``answer`` alone, each on the last token of its sample. Pure.

    A sample without any token has nowhere to keep one.

    Raises:
        StageError: ``answer`` is not one number per sample.
        NonFiniteRewardError: one of them is NaN or infinite, or is so in float32.
    """
    try:
        rewards = [float(value) if is_finite(value) else math.nan for value in answer]
    except (TypeError, ValueError):
        rewards = []
    if len(rewards) == len(samples) and any(map(math.isnan, rewards)):
        raise NonFiniteRewardError(
            f"the reward function (rollout.stages.reward.function) returned {answer!r:.200}; rewards must be finite, also as "
            "float32"
        )
    if len(rewards) != len(samples):
        raise StageError(
            f"The reward function (rollout.stages.reward.function) returned {answer!r:.200} for {len(samples)} samples. It "
            "has to return one finite number for each of them, in their order."
        )
    return tuple(_with_reward(sample, reward) for sample, reward in zip(samples, rewards, strict=True))


def _with_reward(sample: Sample, reward: float) -> Sample:
    sequences: list[RolloutSequence] = []
    for sequence in reversed(sample.sequences):
        rewards = np.zeros(sequence.num_response_tokens)
        if len(rewards):
            rewards[-1], reward = reward, 0.0
        sequences.append(replace(sequence, reward_array=rewards))
    return Sample(tuple(reversed(sequences)))
