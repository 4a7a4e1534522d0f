"""Off-policy corrections: weights for tokens that another policy sampled, and how far apart the two policies are.

``r = pi_prox / pi_behave`` per token: the policy as the step begins over the engine's distribution when it sampled.
It covers staleness and the numerical mismatch between engine and trainer alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch

from skyrl_train.algorithms import kl
from skyrl_train.algorithms.losses import bounded_ratio
from skyrl_train.algorithms.registry import Registry
from skyrl_train.algorithms.statistics import TokenStatistics


class Correction(Protocol):
    """Proximal and behaviour log-probs of N tokens to the weight of each token's loss."""

    def __call__(
        self, proximal_logprobs: torch.Tensor, behaviour_logprobs: torch.Tensor, *, clip_high: float
    ) -> torch.Tensor:
        """All ``[N]``. The weights carry no gradient."""
        ...


CORRECTIONS: Registry[Correction] = Registry("trainer.algorithm.off_policy_correction.tis_ratio_type")


@CORRECTIONS.register("token")
def truncated_token_weights(
    proximal_logprobs: torch.Tensor, behaviour_logprobs: torch.Tensor, *, clip_high: float
) -> torch.Tensor:
    """Token-level truncated importance sampling, ``w = stopgrad(min(r, C))`` (Ionides 2008; arXiv 2505.24298)."""
    return bounded_ratio(proximal_logprobs.detach(), behaviour_logprobs).clamp(max=clip_high)


def mismatch_statistics(
    proximal_logprobs: torch.Tensor, behaviour_logprobs: torch.Tensor, *, clip_high: float
) -> TokenStatistics:
    """What :func:`mismatch_metrics` needs of N trained tokens (``[N]`` each)."""
    proximal_logprobs, behaviour_logprobs = proximal_logprobs.detach().double(), behaviour_logprobs.double()
    ratio = bounded_ratio(proximal_logprobs, behaviour_logprobs)
    return TokenStatistics.of(
        sums={
            "ratio_to_behaviour": ratio,
            "squared_ratio_to_behaviour": ratio.square(),
            "truncated": ratio > clip_high,
            "kl_k1": kl.k1(behaviour_logprobs, proximal_logprobs),
            "kl_k3": kl.k3(behaviour_logprobs, proximal_logprobs),
        },
        maxima={"ratio_to_behaviour_max": ratio},
    )


def mismatch_metrics(tokens: int, values: Mapping[str, float]) -> dict[str, float]:
    """How far the policy that trains is from the one that sampled, over the ``tokens`` >= 1 trained tokens of a minibatch.

    ``ratio_mean`` / ``ratio_max`` of ``r``; ``clipped_fraction``: share with ``r > C``; ``ess``: normalised effective
    sample size ``(sum r)^2 / (N sum r^2)`` in (0, 1] (Kong 1992), before truncation; ``kl_k1`` / ``kl_k3``: estimates
    of ``KL(behave || prox)``, the means of :func:`kl.k1` and :func:`kl.k3`.
    """
    total, squares = values["ratio_to_behaviour"], values["squared_ratio_to_behaviour"]
    return {
        "off_policy/ratio_mean": total / tokens,
        "off_policy/ratio_max": values["ratio_to_behaviour_max"],
        "off_policy/clipped_fraction": values["truncated"] / tokens,
        "off_policy/ess": total * total / (tokens * squares),
        "off_policy/kl_k1": values["kl_k1"] / tokens,
        "off_policy/kl_k3": values["kl_k3"] / tokens,
    }
