"""Reward shaping: what is added to the rewards of a sample before advantages are computed. Pure.

    environment's rewards ──+ penalty for length (last token) ──- KL to the reference (each token)──> advantages

Filters of groups without signal, and ``reward/*`` in the metrics, go by the rewards as they were given.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from skyrl_train.algorithms.kl import KL_ESTIMATORS
from skyrl_train.config.schema.algorithm import AlgorithmConfig, OverlongConfig


def overlong_penalty(sampled_tokens: int, config: OverlongConfig) -> float:
    """Soft overlong punishment (DAPO, arXiv 2503.14476, equation 13), times ``penalty_factor``.

    With ``L = max_response_len`` and ``c = buffer_len``: 0 up to ``L - c`` tokens, from there a straight line down to -1 at
    ``L``, and -1 beyond. No penalty where ``c`` is 0.
    """
    if config.buffer_len == 0 or config.max_response_len is None:
        return 0.0
    over = sampled_tokens - (config.max_response_len - config.buffer_len)
    return -config.penalty_factor * min(max(over / config.buffer_len, 0.0), 1.0)


def kl_penalties(
    behaviour_logprobs: Sequence[float],
    reference_logprobs: Sequence[float],
    mask: Sequence[int],
    config: AlgorithmConfig,
) -> list[float]:
    """For each token, the estimate of ``KL(behaviour || reference)`` by ``kl_estimator_type``; 0 where the mask is 0.

    Against the policy that sampled the token, whichever version that was: nothing else is unbiased in an asynchronous run.
    """
    estimate = KL_ESTIMATORS.get(config.kl_estimator_type)
    values = estimate(
        torch.tensor(behaviour_logprobs, dtype=torch.float64), torch.tensor(reference_logprobs, dtype=torch.float64)
    )
    return [value if trained else 0.0 for value, trained in zip(values.tolist(), mask, strict=True)]
