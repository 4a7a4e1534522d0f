"""Random trained tokens of ragged sequences, as tensors in float64 and as plain numbers for loops over formulas."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from hypothesis import settings
from hypothesis import strategies as st

from skyrl_train.algorithms.tokens import PolicyTokens

few = settings(max_examples=25)  # each of many tokens: enough for formulas


class Token(NamedTuple):
    current: float
    proximal: float
    behaviour: float
    advantage: float


@dataclass
class Batch:
    """Trained tokens, sequence after sequence; none is empty."""

    sequences: list[list[Token]]

    @property
    def flat(self) -> list[Token]:
        return [token for sequence in self.sequences for token in sequence]

    def tokens(self, **facts: float) -> PolicyTokens:
        current, proximal, behaviour, advantages = torch.tensor(self.flat, dtype=torch.float64).T
        return PolicyTokens(
            current.clone().requires_grad_(),
            proximal,
            behaviour,
            advantages,
            torch.tensor([i for i, sequence in enumerate(self.sequences) for _ in sequence]),
            len(self.sequences),
            facts,
        )


logprobs = st.floats(-6, 0, allow_nan=False)
advantages = st.floats(-3, 3, allow_nan=False)
tokens = st.builds(Token, logprobs, logprobs, logprobs, advantages)
batches = st.builds(Batch, st.lists(st.lists(tokens, min_size=1, max_size=5), min_size=1, max_size=4))


def gradient(loss: torch.Tensor, tokens_: PolicyTokens) -> list[float]:
    """Of the sum of the losses, with respect to the current log-probs."""
    (result,) = torch.autograd.grad(loss.sum(), tokens_.logprobs)
    return result.tolist()
