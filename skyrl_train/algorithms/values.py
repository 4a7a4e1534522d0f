"""What the critic learns: a clipped squared error, and how well it predicts."""

from __future__ import annotations

import torch

from skyrl_train.algorithms.statistics import TokenStatistics


def value_loss(
    values: torch.Tensor, old_values: torch.Tensor, returns: torch.Tensor, clip: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """``max((V - R)^2, (clamp(V, V_old - clip, V_old + clip) - R)^2) / 2`` of each token, as PPO is implemented
    (arXiv 2005.12729, section 3): a value that has moved by more than ``clip`` gains nothing by moving on.

    Args:
        values: ``[N]``, with gradient; all others without.
        old_values: those that the advantages were computed with.
        clip: None: the plain squared error.

    Returns:
        The losses ``[N]``, and which of them have no gradient for the bound (bool ``[N]``).
    """
    plain = (values - returns).square()
    if clip is None:
        return plain / 2, torch.zeros_like(plain, dtype=torch.bool)
    bounded = (torch.clamp(values, old_values - clip, old_values + clip) - returns).square()
    return torch.maximum(plain, bounded) / 2, bounded.detach() > plain.detach()


def value_statistics(
    losses: torch.Tensor, clipped: torch.Tensor, old_values: torch.Tensor, returns: torch.Tensor
) -> TokenStatistics:
    """What :func:`value_metrics` needs of N tokens; arguments as of :func:`value_loss`."""
    wide, error = returns.double(), returns.double() - old_values.double()
    return TokenStatistics.of(
        {
            "value_loss": losses,
            "clipped": clipped,
            "value": old_values,
            "return": wide,
            "return_squared": wide.square(),
            "error": error,
            "error_squared": error.square(),
        }
    )


def value_metrics(statistics: TokenStatistics, scale: float) -> dict[str, float]:
    """Scalars over all tokens of one step; without tokens only a loss of 0.

    ``critic/explained_variance`` is ``1 - Var(R - V_old) / Var(R)``: 1 where the values that the advantages were computed
    with are the returns, 0 where a constant would have done as well, and 0 where all returns are the same.

    Args:
        scale: of the loss, from all sequences of the step.
    """
    tokens, sums = statistics.tokens, statistics.values()
    if not tokens:
        return {"loss/value": 0.0}
    of_returns = _variance(sums["return"], sums["return_squared"], tokens)
    of_errors = _variance(sums["error"], sums["error_squared"], tokens)
    return {
        "loss/value": scale * sums["value_loss"],
        "critic/clip_fraction": sums["clipped"] / tokens,
        "critic/explained_variance": 1.0 - of_errors / of_returns if of_returns > 0 else 0.0,
        "critic/value_mean": sums["value"] / tokens,
        "critic/return_mean": sums["return"] / tokens,
    }


def _variance(total: float, squares: float, count: int) -> float:
    mean = total / count
    variance = squares / count - mean * mean
    rounding = 1e-12 * squares / count  # of float64 sums: what is left of equal numbers is no variance
    return variance if variance > rounding else 0.0
