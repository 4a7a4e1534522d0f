"""What happens to groups without signal: filtered as they arrive, replaced, or masked (SEMANTICS 4.5). Pure.

A group whose samples all have the same return teaches nothing: every advantage is 0 (DAPO, arXiv 2503.14476).

| setting | when | what |
|---|---|---|
| ``dynamic_sampling=filter`` | it arrives | it leaves, the next prompt takes its seat: every step trains B groups with signal |
| ``dynamic_sampling=replace`` | its batch trains | copies of the batch's other groups train in its place |
| ``zero_variance_filter`` | its batch trains | it trains with loss mask 0: no entropy bonus, no KL term, only the denominator |
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from skyrl_train.config.schema.algorithm import AlgorithmConfig, DynamicSampling
from skyrl_train.errors import RolloutError
from skyrl_train.inference.randomness import mix
from skyrl_train.rollout.group import RolloutGroup

# Over how many groups the filtered share is judged: enough for a rate of 0.9 not to pass for 0.95 by chance.
WINDOW_STEPS = 64
WINDOW_GROUPS = 1024


def has_signal(group: RolloutGroup) -> bool:
    """Whether the samples of ``group`` differ in their returns, and a token of it may train.

    Returns are compared in float32, as the advantage estimators see them.
    """
    if group.masked or not any(len(sample.sampled_versions) for sample in group.samples):
        return False
    return len({np.float32(sample.reward) for sample in group.samples}) > 1


class SignalFilter:
    """The verdict on each finished group, and the end of a run that would filter for ever.

    Args:
        batch_groups: ``B``, groups per optimizer step.
        max_filtered_share: of the last ``window`` groups, 64 steps' worth but at most 1,024.
    """

    def __init__(self, batch_groups: int, max_filtered_share: float) -> None:
        self._limit = max_filtered_share
        self._verdicts: deque[bool] = deque(maxlen=min(WINDOW_STEPS * batch_groups, WINDOW_GROUPS))

    @property
    def window(self) -> int:
        """The number of groups over which the share is judged. Before so many have come, the missing ones count as kept."""
        return self._verdicts.maxlen or 0

    def keeps(self, group: RolloutGroup) -> bool:
        """Whether the group has signal, and so a seat."""
        keeps = has_signal(group)
        self._verdicts.append(keeps)
        return keeps

    def check(self) -> None:
        """
        Raises:
            RolloutError: more than ``max_filtered_share`` of the window was filtered.
        """
        filtered = self._verdicts.count(False)
        if filtered > self._limit * self.window:
            raise RolloutError(
                f"{filtered} of the last {self.window} groups had no signal, because all samples of each were worth the "
                f"same; more than trainer.algorithm.max_filtered_share = {self._limit} of them. The prompts are too easy or "
                "too hard for this policy, or the reward does not tell answers apart. Choose other prompts, raise "
                "generator.n_samples_per_prompt, or train on all groups (trainer.algorithm.dynamic_sampling=none); then run "
                "the same command again."
            )


def make_filter(algorithm: AlgorithmConfig, batch_groups: int) -> SignalFilter | None:
    """The filter that ``dynamic_sampling`` asks for; None where groups stay whatever they are worth."""
    if algorithm.dynamic_sampling is not DynamicSampling.filter:
        return None
    return SignalFilter(batch_groups, algorithm.max_filtered_share)


def groups_to_train(
    batch: Sequence[RolloutGroup], algorithm: AlgorithmConfig, *, seed: int, step: int
) -> list[RolloutGroup]:
    """What the policy is trained with where ``batch`` has the seats of ``step``; in its order and of its length.

    The seats, and so the ordinals that count as trained, are those of ``batch`` in any case.
    """
    groups = list(batch)
    if algorithm.dynamic_sampling is DynamicSampling.replace:
        groups = replace_without_signal(groups, mix(seed, step))
    if algorithm.zero_variance_filter:
        groups = mask_without_signal(groups)
    return groups


def replace_without_signal(batch: Sequence[RolloutGroup], seed: int) -> list[RolloutGroup]:
    """``batch`` with copies of groups that have signal in the place of those that have none.

    Drawn without putting back until each was drawn once: no group weighs much more than another by chance. A batch in
    which none has signal stays as it is.
    """
    with_signal = [group for group in batch if has_signal(group)]
    if not with_signal:
        return list(batch)
    rng = random.Random(seed)
    drawn: list[RolloutGroup] = []
    result = []
    for group in batch:
        if has_signal(group):
            result.append(group)
            continue
        if not drawn:
            drawn = rng.sample(with_signal, len(with_signal))
        result.append(drawn.pop())
    return result


def mask_without_signal(batch: Sequence[RolloutGroup]) -> list[RolloutGroup]:
    """``batch`` with every group without signal masked: its tokens leave the numerator of the loss, not the denominator."""
    return [group if has_signal(group) else replace(group, masked=True) for group in batch]
