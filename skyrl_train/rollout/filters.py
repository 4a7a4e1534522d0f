"""Groups without signal: filter them as they finish, replace them, or mask them. Pure.

A group whose samples all have the same return teaches nothing, because every advantage is 0 (DAPO, arXiv 2503.14476).

| setting | when | effect |
|---|---|---|
| ``dynamic_sampling=filter`` | when it finishes | it leaves, and the next prompt takes its slot: B groups with signal per step |
| ``dynamic_sampling=replace`` | when its batch trains | copies of the batch's other groups train in its place |
| ``zero_variance_filter`` | when its batch trains | trains with loss mask 0: no entropy bonus, no KL term, only the denominator |
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from skyrl_train.config.schema import AlgorithmConfig, DynamicSampling
from skyrl_train.errors import RolloutError
from skyrl_train.runtime.seeds import derive_seed
from skyrl_train.types import RolloutGroup

# The window over which the filtered share is measured: large enough that a rate of 0.9 does not reach 0.95 by chance.
WINDOW_STEPS = 64
WINDOW_GROUPS = 1024


def has_signal(group: RolloutGroup) -> bool:
    """Return whether the samples of ``group`` differ in their returns and at least one token may train.

    Returns are compared in float32, as the advantage estimators see them.
    """
    if group.masked or not any(len(sample.sampled_versions) for sample in group.samples):
        return False
    return len({np.float32(sample.reward) for sample in group.samples}) > 1


class SignalFilter:
    """Decides which finished groups are kept, and stops a run that would filter forever.

    Args:
        batch_groups: ``B``, groups per optimizer step.
        max_filtered_share: limit for the filtered share of the last ``window`` groups (64 steps, at most 1,024 groups).

    Attributes:
        window: groups over which the share is measured. Until so many have finished, the missing ones count as kept.
    """

    def __init__(self, batch_groups: int, max_filtered_share: float) -> None:
        self._limit = max_filtered_share
        self.window = min(WINDOW_STEPS * batch_groups, WINDOW_GROUPS)
        self._kept: deque[bool] = deque(maxlen=self.window)

    def keeps(self, group: RolloutGroup) -> bool:
        """Return whether the group has signal and keeps its slot."""
        keeps = has_signal(group)
        self._kept.append(keeps)
        return keeps

    def check(self) -> None:
        """Check the share of filtered groups.

        Raises:
            RolloutError: more than ``max_filtered_share`` of the window was filtered.
        """
        filtered = self._kept.count(False)
        if filtered > self._limit * self.window:
            raise RolloutError(
                f"{filtered} of the last {self.window} groups had no signal, because all samples of each had the same return; "
                f"more than trainer.algorithm.max_filtered_share = {self._limit} of them. The prompts are too easy or "
                "too hard for this policy, or the reward does not tell answers apart. Choose other prompts, raise "
                "generator.n_samples_per_prompt, or train on all groups (trainer.algorithm.dynamic_sampling=none); then run "
                "the same command again."
            )


def make_filter(algorithm: AlgorithmConfig, batch_groups: int) -> SignalFilter | None:
    """Return the filter of ``dynamic_sampling=filter``; None with other settings."""
    if algorithm.dynamic_sampling is not DynamicSampling.filter:
        return None
    return SignalFilter(batch_groups, algorithm.max_filtered_share)


def groups_to_train(
    batch: Sequence[RolloutGroup], algorithm: AlgorithmConfig, *, seed: int, step: int
) -> list[RolloutGroup]:
    """Return the groups that the policy trains on in the batch slots of ``batch``, in its order and of its length.

    The group indices of ``batch`` count as trained in any case.
    """
    groups = list(batch)
    if algorithm.dynamic_sampling is DynamicSampling.replace:
        groups = replace_without_signal(groups, derive_seed(seed, step))
    if algorithm.zero_variance_filter:
        # Masked tokens leave the numerator of the loss, but stay in the denominator.
        groups = [group if has_signal(group) else replace(group, masked=True) for group in groups]
    return groups


def replace_without_signal(batch: Sequence[RolloutGroup], seed: int) -> list[RolloutGroup]:
    """Return ``batch`` with copies of groups with signal in the place of groups without.

    Copies are drawn without replacement until each group was drawn once, so that no group weighs much more than another by
    chance. A batch in which no group has signal stays as it is.
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
        # Each group with signal was drawn once: begin another round.
        if not drawn:
            drawn = rng.sample(with_signal, len(with_signal))
        result.append(drawn.pop())
    return result
