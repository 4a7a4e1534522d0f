"""The same random tokens in two layouts: padded rows, as the other projects have them, and our ragged tokens.

``our_loss`` is the product's own objective: policy loss, correction, KL term, entropy bonus and reduction.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from skyrl_train.algorithms.advantages import ADVANTAGE_ESTIMATORS, GroupRewards, normalized_over_minibatch
from skyrl_train.algorithms.off_policy import OffPolicyCorrection
from skyrl_train.algorithms.reductions import SequenceCounts, reduction_scale
from skyrl_train.algorithms.tokens import PolicyTokens
from skyrl_train.config import derive
from skyrl_train.config.schema import AlgorithmConfig
from skyrl_train.training.objective import Objective, TokenFields

EXACT = 1e-9  # relative, float64: sums of a few dozen terms differ by 1e-14
# Relative, where the other side computes in float32 or adds 1e-8 to a denominator: four times the largest difference. Batches are
# the same in every run, so it is too.
CLOSE = 1e-6


@dataclass(frozen=True)
class Batch:
    """B sequences of at most T response tokens, padded on the right; tensors are [B, T], float64, 0 on padding."""

    current: torch.Tensor
    proximal: torch.Tensor
    behaviour: torch.Tensor
    reference: torch.Tensor
    entropy: torch.Tensor
    advantages: torch.Tensor
    mask: torch.Tensor  # bool: sampled tokens
    groups: tuple[int, ...]  # the prompt of each sequence

    @property
    def index(self) -> np.ndarray:
        return np.array(self.groups)

    @property
    def weight(self) -> torch.Tensor:
        """The mask as numbers."""
        return self.mask.double()

    def first_pass(self) -> Batch:
        """The proximal policy is the current one."""
        return replace(self, proximal=self.current)


@dataclass(frozen=True)
class Outcome:
    loss: torch.Tensor  # scalar
    gradient: torch.Tensor  # [B, T], with respect to the current log-probs


def random_batch(
    seed: int = 0,
    *,
    lengths: tuple[int, ...] = (1, 9, 4, 17, 6, 12),
    groups: tuple[int, ...] = (0, 0, 0, 1, 1, 2),
    tools: bool = True,
    extreme: float = 0.0,
    spread: float = 0.4,
) -> Batch:
    """Draw a batch; no sequence is empty.

    Args:
        tools: tokens in the middle of responses are not sampled.
        extreme: two tokens have current log-probs so far above and below the proximal ones.
        spread: standard deviation of log-ratios.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(scale: float) -> torch.Tensor:
        return scale * torch.randn(len(lengths), max(lengths), generator=generator, dtype=torch.float64)

    place = torch.arange(max(lengths))
    response = place < torch.tensor(lengths)[:, None]
    mask = response.clone()
    if tools:
        mask &= (place % 7 != 3) & (place % 7 != 4)
    behaviour = -2.5 + normal(0.6)
    proximal = behaviour + normal(spread)
    current = proximal + normal(spread)
    if extreme:
        current[1, 1] = proximal[1, 1] + extreme
        current[3, 1] = proximal[3, 1] - extreme
    reference = current + normal(spread)
    entropy = normal(1.0).abs()
    advantages = normal(1.0)
    fields = [tensor * response for tensor in (current, proximal, behaviour, reference, entropy, advantages)]
    return Batch(*fields, mask, groups)


def settings(**changes: Any) -> AlgorithmConfig:
    """Our settings with ``a__b=value`` set at ``a.b``, without an off-policy correction unless they say so."""
    config = AlgorithmConfig()
    for key, value in ({"off_policy_correction__tis_ratio_type": None} | changes).items():
        *path, name = key.split("__")
        node: Any = config
        for part in path:
            node = getattr(node, part)
        assert hasattr(node, name), key
        setattr(node, name, value)
    return config


def our_loss(batch: Batch, config: AlgorithmConfig) -> Outcome:
    objective = Objective(config)
    mask, current = batch.mask, batch.current.clone().requires_grad_()
    counts = [
        SequenceCounts(int(row.sum()), int(mask[batch.index == group].sum()), batch.groups.count(group))
        for row, group in zip(mask, batch.groups, strict=True)
    ]
    shares = [objective.share(count) for count in counts]
    rows = mask.nonzero()[:, 0]
    fields = TokenFields(
        advantages=batch.advantages[mask],
        behaviour_logprobs=batch.behaviour[mask],
        token_weights=torch.tensor([share.token_weight for share in shares], dtype=torch.float64)[rows],
        proximal_logprobs=batch.proximal[mask],
        sequence_index=rows,
        num_sequences=len(batch.groups),
        lags=torch.zeros_like(rows),
        reference_logprobs=batch.reference[mask],
    )
    if objective.needs_minibatch_statistics:
        fields = replace(fields, minibatch=objective.minibatch_statistics(objective.minibatch_tokens([fields])))
    loss = objective.loss(current[mask], batch.entropy[mask], fields)[0]
    loss = loss * reduction_scale([share.denominator for share in shares])
    return Outcome(loss.detach(), torch.autograd.grad(loss, current)[0])


def their_loss(batch: Batch, function: Callable[[torch.Tensor], torch.Tensor]) -> Outcome:
    """Call ``function`` with the current log-probs ``[B, T]``."""
    current = batch.current.clone().requires_grad_()
    loss = function(current)
    return Outcome(loss.detach(), torch.autograd.grad(loss, current)[0])


def our_correction(batch: Batch, config: AlgorithmConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """Return weights and which tokens are kept, ``[B, T]``; 0 and False where the mask is 0."""
    rows = batch.mask.nonzero()[:, 0]
    fields = (batch.current, batch.proximal, batch.behaviour, batch.advantages)
    tokens = PolicyTokens(*(field[batch.mask] for field in fields), rows, len(batch.groups))
    corrected = OffPolicyCorrection(config)(tokens)
    return (
        torch.zeros_like(batch.current).masked_scatter(batch.mask, corrected.weights),
        torch.zeros_like(batch.mask).masked_scatter(batch.mask, corrected.kept),
    )


def our_advantages(
    rewards: torch.Tensor,
    mask: torch.Tensor,
    groups: tuple[int, ...],
    config: AlgorithmConfig,
    values: torch.Tensor | None = None,
) -> torch.Tensor:
    """Advantages ``[B, T]`` of per-token rewards ``[B, T]``, normalised over the minibatch where the settings say so."""
    found: dict[int, torch.Tensor] = {}
    for group in dict.fromkeys(groups):
        members = [row for row, of in enumerate(groups) if of == group]
        inputs = GroupRewards(
            [rewards[row].tolist() for row in members],
            [mask[row] for row in members],
            [True] * len(members),
            None if values is None else [values[row] for row in members],
        )
        found |= dict(zip(members, ADVANTAGE_ESTIMATORS.get(config.advantage_estimator)(inputs, config), strict=True))
    rows = [found[row] for row in range(len(groups))]
    if derive.normalizes_over_minibatch(config):
        rows = normalized_over_minibatch(rows, list(mask))
    return torch.stack(rows).double()


def outcome_rewards(batch: Batch, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    """A random reward on the last sampled token of each sequence, ``[B, T]``."""
    values = scale * torch.randn(len(batch.groups), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    rewards = torch.zeros_like(batch.current)
    for row, value in enumerate(values):
        rewards[row, batch.mask[row].nonzero()[-1]] = value
    return rewards


def assert_same(ours: Outcome, theirs: Outcome, tolerance: float = EXACT) -> None:
    """Compare the gradient of every token relative to itself, and the loss relative to the sum of its terms' sizes."""
    scale = float(ours.gradient.abs().sum())
    assert scale > 0, "nothing was compared"
    torch.testing.assert_close(ours.loss, theirs.loss.double(), rtol=tolerance, atol=tolerance * scale)
    torch.testing.assert_close(ours.gradient, theirs.gradient.double(), rtol=tolerance, atol=1e-12)


def assert_equal(ours: torch.Tensor, theirs: torch.Tensor, tolerance: float = EXACT) -> None:
    """Compare numbers relative to the largest one."""
    scale = float(ours.abs().max())
    assert scale > 0, "nothing was compared"
    torch.testing.assert_close(ours.double(), theirs.double(), rtol=0.0, atol=tolerance * scale)
