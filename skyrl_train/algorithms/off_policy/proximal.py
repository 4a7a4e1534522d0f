"""Which policy stands between behaviour and current policy."""

from __future__ import annotations

import torch


def interpolated_logprobs(
    behaviour_logprobs: torch.Tensor, step_logprobs: torch.Tensor, lags: torch.Tensor
) -> torch.Tensor:
    """A-3PO (arXiv 2512.06547): ``log pi_prox = log pi_b + a (log pi_theta - log pi_b)``, without a pass of its own.

    ``a = clamp((v_prox - v_b) / (v_theta - v_b), 0, 1)``, where ``v_b`` is the version that sampled the token, ``v_theta`` the
    one that the step begins with, and ``v_prox = v_theta - 1`` the one before it. So ``a = (lag - 1) / lag``: 0 (the
    behaviour policy) up to a lag of 1, and from there closer and closer to the current policy. That is the paper's weight of
    the behaviour policy, ``1 / lag``, and 1 at a lag of 0. Nothing carries a gradient.

    Args:
        behaviour_logprobs: ``[N]``.
        step_logprobs: ``[N]``, under the policy that the step begins with.
        lags: int64 ``[N]``, ``v_theta - v_b``.
    """
    behaviour, of_step = behaviour_logprobs, step_logprobs.detach()
    share = ((lags - 1) / lags.clamp(min=1)).clamp(0, 1).to(of_step.dtype)
    return behaviour + share * (of_step - behaviour)
