"""Advantage estimators: from the rewards of one rollout group to an advantage per token.

    environment's rewards ──+ penalty for length (last token) ──- KL to the reference (each token)──> estimator ──> advantages

Each estimator sees one group, so a step may train group by group as they arrive. The exception is
:func:`normalized_over_minibatch`, which needs all groups of the step (``advantage_batch_normalize``). Filters of groups without
signal, and ``reward/*`` in the metrics, use the rewards before any penalty.

Estimators that compare the samples of a group use numpy. A minibatch is built in a thread beside the control loop. Each torch
operation releases the interpreter lock; the loop takes it, and the thread waits until the loop is idle.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from skyrl_train.algorithms.registry import Registry
from skyrl_train.config.schema import AlgorithmConfig, OverlongConfig
from skyrl_train.errors import GeneratorOutputError
from skyrl_train.runtime.lazy_torch import torch

STD_EPSILON = 1e-6  # added to the standard deviation: bounds the advantages of groups with nearly equal returns


@dataclass(frozen=True, slots=True)
class GroupRewards:
    """The rewards of a group of n samples. A sample of several sequences has the tokens of all of them in a row.

    Attributes:
        token_rewards: per sample ``[T_i]``, with penalties for length and KL.
        loss_masks: per sample bool (or 0/1) ``[T_i]``, True on sampled tokens.
        in_baseline: per sample, whether it is part of the baseline of the others.
        values: per sample ``[T_i]``, from the critic; None: there is no critic.

    Raises:
        GeneratorOutputError: (constructor) a reward is not finite.
        ValueError: (constructor) the fields have different numbers of samples.
    """

    token_rewards: Sequence[Sequence[float]]
    loss_masks: Sequence[torch.Tensor]
    in_baseline: Sequence[bool]
    values: Sequence[torch.Tensor] | None = None

    def __post_init__(self) -> None:
        counts = (len(self.token_rewards), len(self.loss_masks), len(self.in_baseline))
        if len(set(counts)) > 1:
            raise ValueError("a group of {} rewards, {} loss masks and {} samples in its baseline".format(*counts))
        for index, rewards in enumerate(self.token_rewards):
            # One NaN or infinite reward is enough to make the sum so.
            if not math.isfinite(sum(rewards)):
                raise GeneratorOutputError(
                    f"sample {index} of a group of {counts[0]} has the return {sum(rewards)}; rewards must be finite. Check "
                    "the environment or the reward function."
                )

    @property
    def returns(self) -> torch.Tensor:
        """The return of each sample, float32 ``[n]``: the undiscounted sum of its per-token rewards."""
        return torch.from_numpy(np.array([sum(rewards) for rewards in self.token_rewards], np.float32))

    def on_trained_tokens(self, of_samples: torch.Tensor | npt.NDArray[np.float64]) -> list[torch.Tensor]:
        """Spread one value per sample over its tokens: float32 ``[T_i]`` per sample, 0 where the loss mask is 0."""
        values = of_samples.float().numpy() if isinstance(of_samples, torch.Tensor) else of_samples.astype(np.float32)
        masks = [mask.numpy().astype(bool, copy=False) for mask in self.loss_masks]
        return [torch.from_numpy(value * mask) for value, mask in zip(values, masks, strict=True)]


AdvantageEstimator: TypeAlias = Callable[[GroupRewards, AlgorithmConfig], "list[torch.Tensor]"]
ADVANTAGE_ESTIMATORS: Registry[AdvantageEstimator] = Registry("trainer.algorithm.advantage_estimator")
register_advantage_estimator = ADVANTAGE_ESTIMATORS.register
"""Decorator ``@register_advantage_estimator("name")`` of a function of ``(group: GroupRewards, config: AlgorithmConfig)``.

It returns the advantages of each sample, a list of float32 ``[T_i]``, 0 where the sample's loss mask is 0. ``config.kwargs`` has
your parameters. It must depend on its arguments alone: a step's minibatch may be built ahead of it, and again if other groups
train then.
"""


@register_advantage_estimator("grpo")
def grpo(group: GroupRewards, config: AlgorithmConfig) -> list[torch.Tensor]:
    """Group relative advantages (DeepSeekMath, arXiv 2402.03300, outcome supervision).

    ``A_i = (R_i - mean(R)) / (std(R) + STD_EPSILON)``, the same for every trained token of sample ``i``; without
    ``grpo_norm_by_std`` there is no division (Dr. GRPO, arXiv 2503.20783). ``std`` has Bessel's correction; mean and std are
    over the samples in the baseline. Equal returns, and a baseline of one sample, give exactly 0.
    """
    returns, compared = _returns_and_baseline(group)
    if _all_equal(compared):  # rounding in the mean must not become a signal
        return group.on_trained_tokens(np.zeros(len(returns)))
    outcome = returns - compared.mean()
    if config.grpo_norm_by_std:
        outcome = outcome / (compared.std(ddof=1) + STD_EPSILON)
    return group.on_trained_tokens(outcome)


@register_advantage_estimator("rloo")
def rloo(group: GroupRewards, config: AlgorithmConfig) -> list[torch.Tensor]:
    """REINFORCE leave one out (arXiv 2402.14740): ``A_i = R_i - mean of the other samples' returns``.

    The others are the samples in the baseline; a sample outside of it is compared with all of them. Equal returns, and a
    baseline of one sample, give exactly 0.
    """
    returns, compared = _returns_and_baseline(group)
    if _all_equal(compared):
        return group.on_trained_tokens(np.zeros(len(returns)))
    inside = np.array(group.in_baseline) if any(group.in_baseline) else np.ones(len(returns), np.bool_)
    # A sample in the baseline is left out of its own mean; a sample outside of it is compared with the whole baseline.
    others = (compared.sum() - np.where(inside, returns, 0.0)) / (len(compared) - inside)
    return group.on_trained_tokens(returns - others)


@register_advantage_estimator("maxrl")
def maxrl(group: GroupRewards, config: AlgorithmConfig) -> list[torch.Tensor]:
    """Maximum likelihood RL (MaxRL, arXiv 2602.02710): ``A_i = (R_i - mean(R)) / mean(R)``, for rewards of 0 or 1 (at least
    not negative).

    Division by the mean return (the pass rate) instead of the deviation makes the sum over a group an estimate of the gradient
    of ``log pass rate``, to the order that n samples allow: rare successes weigh more. Equal returns, and a group without any
    success, give exactly 0.

    Raises:
        GeneratorOutputError: a return is negative.
    """
    returns, compared = _returns_and_baseline(group)
    if (returns < 0).any():
        raise GeneratorOutputError(
            f"trainer.algorithm.advantage_estimator=maxrl divides by the mean return, and one of {returns.tolist()} is "
            "negative. Use rewards of at least 0 (without penalties for length or KL), or another estimator."
        )
    # Also covers a mean of 0: without negative returns, all of them are 0 then.
    if _all_equal(compared):
        return group.on_trained_tokens(np.zeros(len(returns)))
    return group.on_trained_tokens((returns - compared.mean()) / compared.mean())


@register_advantage_estimator("gae")
def gae_of_samples(group: GroupRewards, config: AlgorithmConfig) -> list[torch.Tensor]:
    """Generalized advantage estimation with the critic's values (:func:`gae`), then normalised over the minibatch as in
    PPO (:func:`normalized_over_minibatch`). Samples are not compared with each other, so groups of one work.

    Raises:
        ValueError: the group has no values.
    """
    if group.values is None:
        raise ValueError("generalized advantages need the values of a critic")
    return [
        gae(torch.tensor(rewards, dtype=torch.float64), values, mask, config.gamma, config.lambd)[0].float()
        for rewards, values, mask in zip(group.token_rewards, group.values, group.loss_masks, strict=True)
    ]


@register_advantage_estimator("reinforce++")
def reinforce_plus_plus(group: GroupRewards, config: AlgorithmConfig) -> list[torch.Tensor]:
    """REINFORCE++ (arXiv 2501.03262): ``A_t = sum over k >= t of gamma^(k - t) r_k``, discounted per trained token, then
    normalised over the minibatch (:func:`normalized_over_minibatch`).

    The group has no baseline, so groups of one work. A reward on an untrained token counts for the trained token before it
    (:func:`rewards_of_trained_tokens`).
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
    """Return the reward of each token with mask 1, including the rewards of the untrained tokens after it; the first one also
    gets the rewards before it. Empty where no token is trained."""
    places = mask.nonzero().flatten().tolist()
    starts = [0, *places[1:], len(rewards)] if places else []
    return [math.fsum(rewards[start:end]) for start, end in pairwise(starts)]


def gae(
    rewards: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, gamma: float, lam: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Generalized advantage estimation (arXiv 1506.02438) over the trained tokens of one sample.

    ``delta_t = r_t + gamma V_{t+1} - V_t`` and ``A_t = delta_t + gamma lam A_{t+1}``, where ``t + 1`` is the next token with
    mask 1 (a tool's result takes no time), and ``V`` and ``A`` behind the last one are 0. A reward on an untrained token counts
    for the trained token before it.

    Args:
        rewards: ``[T]``.
        values: ``[T]``, of the state in which each token was sampled.
        mask: bool (or 0/1) ``[T]``.

    Returns:
        Advantages and returns (``A + V``), both float64 ``[T]``, 0 where the mask is 0; not normalised.
    """
    advantages, returns = (torch.zeros(len(mask), dtype=torch.float64) for _ in range(2))
    known = values.double().tolist()
    next_value = next_advantage = 0.0
    of_trained = rewards_of_trained_tokens(rewards.double().tolist(), mask)
    # Backwards over the trained tokens: each advantage needs the one after it.
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
    # The product with the mask: tokens that are not trained had an advantage of 0, and would get -mean / deviation.
    return [(((a.double() - mean) / deviation) * m).to(a.dtype) for a, m in zip(advantages, masks, strict=True)]


def overlong_penalty(sampled_tokens: int, config: OverlongConfig) -> float:
    """Soft overlong punishment (DAPO, arXiv 2503.14476, equation 13), times ``penalty_factor``.

    With ``L = max_response_len`` and ``c = buffer_len``: 0 up to ``L - c`` tokens, from there a straight line down to -1 at
    ``L``, and -1 beyond. No penalty where ``c`` is 0 or ``L`` is None.
    """
    if config.buffer_len == 0 or config.max_response_len is None:
        return 0.0
    over = sampled_tokens - (config.max_response_len - config.buffer_len)
    return -config.penalty_factor * min(max(over / config.buffer_len, 0.0), 1.0)


def _returns_and_baseline(group: GroupRewards) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Return the returns of all samples ``[n]``, and of the samples in the baseline ``[m]``: all, where the baseline is empty."""
    returns = group.returns.numpy().astype(np.float64)
    return returns, returns[np.array(group.in_baseline)] if any(group.in_baseline) else returns


def _all_equal(values: torch.Tensor | npt.NDArray[np.float64]) -> bool:
    return bool((values == values[0]).all())
