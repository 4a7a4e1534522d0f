"""What many tokens add up to, in a form that micro-batches, parts of a step and ranks can be combined in, in any order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch


@dataclass(slots=True)
class TokenStatistics:
    """Sums and maxima over ``tokens`` tokens, by name; float64 scalars, wherever the tokens were."""

    tokens: int = 0
    sums: dict[str, torch.Tensor] = field(default_factory=dict)
    maxima: dict[str, torch.Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, sums: Mapping[str, torch.Tensor], maxima: Mapping[str, torch.Tensor] | None = None) -> TokenStatistics:
        """Of N tokens: each value is ``[N]``; nothing of the result carries a gradient."""
        tokens = next((len(values) for values in sums.values()), 0)
        return cls(
            tokens,
            {name: values.detach().double().sum() for name, values in sums.items()},
            {name: values.detach().double().max() for name, values in (maxima or {}).items()} if tokens else {},
        )

    def add(self, other: TokenStatistics) -> None:
        """Makes these the statistics of both sets of tokens."""
        self.tokens += other.tokens
        for name, value in other.sums.items():
            self.sums[name] = self.sums[name] + value if name in self.sums else value
        for name, value in other.maxima.items():
            self.maxima[name] = torch.maximum(self.maxima[name], value) if name in self.maxima else value

    def join(self, other: TokenStatistics) -> TokenStatistics:
        """These and further statistics, of other names, of the same tokens."""
        if self.tokens != other.tokens:
            raise ValueError(f"statistics of {self.tokens} and of {other.tokens} tokens cannot be joined")
        return TokenStatistics(self.tokens, {**self.sums, **other.sums}, {**self.maxima, **other.maxima})

    def with_sums(self, sums: Mapping[str, torch.Tensor]) -> TokenStatistics:
        """These and sums over something else than tokens (over sequences, say); each value has one dimension."""
        further = {name: values.detach().double().sum() for name, values in sums.items()}
        return TokenStatistics(self.tokens, {**self.sums, **further}, self.maxima)

    def values(self) -> dict[str, float]:
        """The sums and maxima as numbers, in one transfer from the device."""
        named = {**self.sums, **self.maxima}
        return dict(zip(named, torch.stack(list(named.values())).tolist(), strict=True)) if named else {}
