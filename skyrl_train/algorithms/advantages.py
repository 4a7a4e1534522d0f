"""Advantage estimators: from the rewards of one rollout group to an advantage per token.

Each sees one group, so a step may train group by group as they arrive. What looks at all groups of a step is one thing,
:func:`normalized_over_minibatch`, which needs the whole minibatch (``advantage_batch_normalize``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import torch

from skyrl_train.algorithms.registry import Registry
from skyrl_train.config.schema.algorithm import AlgorithmConfig
from skyrl_train.errors import GeneratorOutputError

STD_EPSILON = 1e-6  # added to the standard deviation: bounds the advantage of a group whose returns hardly differ


@dataclass(frozen=True, slots=True)
class GroupRewards:
    """What a group of n samples was worth. A sample of several sequences has the tokens of all of them in a row."""

    token_rewards: Sequence[Sequence[float]]  # per sample [T_i], shaped (:mod:`skyrl_train.algorithms.rewards`)
    loss_masks: Sequence[torch.Tensor]  # per sample bool (or 0/1) [T_i], True on sampled tokens
    in_baseline: Sequence[bool]  # per sample: whether the others are compared with it
    values: Sequence[torch.Tensor] | None = None  # per sample [T_i], the critic's; None: there is no critic

    def __post_init__(self) -> None:
        """
        Raises:
            GeneratorOutputError: a reward is not finite.
            ValueError: the fields are of different numbers of samples.
        """
        counts = (len(self.token_rewards), len(self.loss_masks), len(self.in_baseline))
        if len(set(counts)) > 1:
            raise ValueError("a group of {} rewards, {} loss masks and {} samples in its baseline".format(*counts))
        for index, rewards in enumerate(self.token_rewards):
            if not math.isfinite(sum(rewards)):
                raise GeneratorOutputError(
                    f"sample {index} of a group of {counts[0]} has the return {sum(rewards)}; rewards must be finite. Check "
                    "the environment or the reward function."
                )

    @property
    def returns(self) -> torch.Tensor:
        """The return of each sample, float32 ``[n]``: the undiscounted sum of its per-token rewards."""
        return torch.tensor([sum(rewards) for rewards in self.token_rewards], dtype=torch.float32)

    def compared(self) -> torch.Tensor:
        """The returns of the samples in the baseline, float64 ``[m]``; of all where none is."""
        returns = self.returns.double()
        return returns[torch.tensor(self.in_baseline)] if any(self.in_baseline) else returns

    def on_trained_tokens(self, of_samples: torch.Tensor) -> list[torch.Tensor]:
        """One value per sample to float32 ``[T_i]`` per sample: on each token with loss mask 1, 0 elsewhere."""
        return [value * mask.bool() for value, mask in zip(of_samples.float(), self.loss_masks, strict=True)]


class AdvantageEstimator(Protocol):
    """Rewards of one group to per-token advantages."""

    def __call__(self, group: GroupRewards, config: AlgorithmConfig) -> list[torch.Tensor]:
        """``config.kwargs`` holds the parameters of an estimator of one's own.

        Returns:
            Per sample float32 ``[T_i]``; 0 where the mask is False.
        """
        ...


ADVANTAGE_ESTIMATORS: Registry[AdvantageEstimator] = Registry("trainer.algorithm.advantage_estimator")


@ADVANTAGE_ESTIMATORS.register("grpo")
def grpo(group: GroupRewards, config: AlgorithmConfig) -> list[torch.Tensor]:
    """Group relative advantages (DeepSeekMath, arXiv 2402.03300, outcome supervision).

    ``A_i = (R_i - mean(R)) / (std(R) + STD_EPSILON)``, the same for every trained token of sample ``i``; without
    ``grpo_norm_by_std`` the division is left out (Dr. GRPO, arXiv 2503.20783). ``std`` has Bessel's correction; mean and
    std are over the samples in the baseline. Where those are equal, or one, all advantages are exactly 0: rounding in
    the mean must not become a signal.
    """
    compared = group.compared()
    if _all_equal(compared):
        return group.on_trained_tokens(torch.zeros_like(group.returns))
    outcome = group.returns.double() - compared.mean()
    if config.grpo_norm_by_std:
        outcome = outcome / (compared.std() + STD_EPSILON)
    return group.on_trained_tokens(outcome)


@ADVANTAGE_ESTIMATORS.register("rloo")
def rloo(group: GroupRewards, config: AlgorithmConfig) -> list[torch.Tensor]:
    """REINFORCE leave one out (arXiv 2402.14740): ``A_i = R_i - mean of the other samples' returns``.

    The others are those in the baseline; a sample that is not in it is compared with all that are. Equal returns, and a
    baseline of one, give exactly 0.
    """
    compared, returns = group.compared(), group.returns.double()
    if _all_equal(compared):
        return group.on_trained_tokens(torch.zeros_like(returns))
    inside = torch.tensor(group.in_baseline) if any(group.in_baseline) else torch.ones(len(returns), dtype=torch.bool)
    others = (compared.sum() - torch.where(inside, returns, 0.0)) / (len(compared) - inside.double())
    return group.on_trained_tokens(returns - others)


@ADVANTAGE_ESTIMATORS.register("maxrl")
def maxrl(group: GroupRewards, config: AlgorithmConfig) -> list[torch.Tensor]:
    """Maximum likelihood RL (MaxRL, arXiv 2602.02710): ``A_i = (R_i - mean(R)) / mean(R)``, for rewards that are 0 or 1, at
    least not negative.

    Dividing by the mean return (the pass rate) in place of the deviation makes the sum over a group an estimate of the
    gradient of ``log pass rate``, to the order that n samples allow: rare successes weigh more. Equal returns give
    exactly 0; so does a group without any success.

    Raises:
        GeneratorOutputError: a return is negative.
    """
    compared = group.compared()
    if bool((group.returns < 0).any()):
        raise GeneratorOutputError(
            f"trainer.algorithm.advantage_estimator=maxrl divides by the mean return, and one of {group.returns.tolist()} is "
            "negative. Use rewards of at least 0 (without penalties for length or KL), or another estimator."
        )
    if _all_equal(compared):
        return group.on_trained_tokens(torch.zeros_like(group.returns))
    return group.on_trained_tokens((group.returns.double() - compared.mean()) / compared.mean())


@ADVANTAGE_ESTIMATORS.register("gae")
def gae_of_samples(group: GroupRewards, config: AlgorithmConfig) -> list[torch.Tensor]:
    """Generalized advantage estimation with the critic's values (:func:`gae`), then normalised over the minibatch as in
    PPO (:func:`normalized_over_minibatch`). Samples are not compared with each other, so a group of one will do.

    Raises:
        ValueError: the group has no values.
    """
    if group.values is None:
        raise ValueError("generalized advantages need the values of a critic")
    return [
        gae(torch.tensor(rewards, dtype=torch.float64), values, mask, config.gamma, config.lambd)[0].float()
        for rewards, values, mask in zip(group.token_rewards, group.values, group.loss_masks, strict=True)
    ]


@ADVANTAGE_ESTIMATORS.register("reinforce++")
def reinforce_plus_plus(group: GroupRewards, config: AlgorithmConfig) -> list[torch.Tensor]:
    """REINFORCE++ (arXiv 2501.03262): ``A_t = sum over k >= t of gamma^(k - t) r_k``, discounted per trained token, then
    normalised over the minibatch (:func:`normalized_over_minibatch`).

    There is no baseline of the group, so a group of one will do. A reward on a token that is not trained counts for the
    trained one before it (:func:`rewards_of_trained_tokens`).
    """
    advantages = []
    for rewards, mask in zip(group.token_rewards, group.loss_masks, strict=True):
        of_trained = rewards_of_trained_tokens(rewards, mask)
        togo, ahead = torch.zeros(len(mask), dtype=torch.float64), 0.0
        for place, reward in zip(reversed(mask.nonzero().flatten().tolist()), reversed(of_trained), strict=True):
            ahead = reward + config.gamma * ahead
            togo[place] = ahead
        advantages.append(togo.float())
    return advantages


def rewards_of_trained_tokens(rewards: Sequence[float], mask: torch.Tensor) -> list[float]:
    """The rewards of the tokens with mask 1, each with those of the untrained tokens behind it; the first one has those in
    front of it as well. Empty, and the rewards lost, where no token is trained."""
    places = mask.nonzero().flatten().tolist()
    starts = [0, *places[1:], len(rewards)] if places else []
    return [math.fsum(rewards[start:end]) for start, end in pairwise(starts)]


def gae(
    rewards: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, gamma: float, lam: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Generalized advantage estimation (arXiv 1506.02438) over the trained tokens of one sample.

    ``delta_t = r_t + gamma V_{t+1} - V_t`` and ``A_t = delta_t + gamma lam A_{t+1}``, where ``t + 1`` is the next token with
    mask 1 (a tool's result takes no time), and ``V`` and ``A`` behind the last one are 0. A reward on a token that is not
    trained counts for the trained one before it.

    Args:
        rewards: ``[T]``.
        values: ``[T]``, of the state that each token was sampled in.
        mask: bool (or 0/1) ``[T]``.

    Returns:
        Advantages and returns (``A + V``), both float64 ``[T]``, 0 where the mask is 0; not normalised.
    """
    advantages, returns = (torch.zeros(len(mask), dtype=torch.float64) for _ in range(2))
    known = values.double().tolist()
    next_value = next_advantage = 0.0
    of_trained = rewards_of_trained_tokens(rewards.double().tolist(), mask)
    for place, reward in zip(reversed(mask.nonzero().flatten().tolist()), reversed(of_trained), strict=True):
        delta = reward + gamma * next_value - known[place]
        next_advantage = delta + gamma * lam * next_advantage
        next_value = known[place]
        advantages[place], returns[place] = next_advantage, next_advantage + next_value
    return advantages, returns


def normalized_over_minibatch(advantages: Sequence[torch.Tensor], masks: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """``(A - mean) / (std + STD_EPSILON)`` over all tokens of a minibatch where the mask is True; 0 elsewhere.

    ``std`` has Bessel's correction. Equal advantages give exactly 0.

    Args:
        advantages: ``[T_i]`` each.
        masks: bool ``[T_i]`` each.
    """
    together = [a[m].double() for a, m in zip(advantages, masks, strict=True)]
    every = torch.cat(together) if together else torch.zeros(0, dtype=torch.float64)
    if len(every) == 0 or _all_equal(every):
        return [torch.zeros_like(a) for a in advantages]
    mean, deviation = every.mean(), every.std() + STD_EPSILON
    return [(((a.double() - mean) / deviation) * m).to(a.dtype) for a, m in zip(advantages, masks, strict=True)]


def _all_equal(values: torch.Tensor) -> bool:
    return bool((values == values[0]).all())
