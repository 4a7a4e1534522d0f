"""How long responses are: distributions with a stated tail, drawn by group index, the same in every run.

The tail is the longest response over the mean one: a synchronous step waits for the longest. Lengths are a fixed set (the
quantiles of a distribution, shuffled by a seed), so that two schedules of the same workload do the same work.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from statistics import NormalDist

import numpy as np

from skyrl_train.errors import ConfigError


@dataclass(frozen=True)
class Lengths:
    """``values[i]`` is the length in tokens of response ``i``; indices wrap around.

    Response ``i`` is sample ``i % n`` of group ``i // n``, where groups have ``n`` samples.
    """

    name: str
    values: np.ndarray  # int64

    def __getitem__(self, index: int) -> int:
        return int(self.values[index % len(self.values)])

    @cached_property
    def mean(self) -> float:
        """Tokens of the mean response."""
        return float(self.values.mean())

    @cached_property
    def tail(self) -> float:
        """The longest response over the mean one."""
        return float(self.values.max()) / self.mean


def constant(count: int, mean: float) -> Lengths:
    """Equal lengths for all responses."""
    return Lengths("constant", np.full(count, max(1, round(mean)), dtype=np.int64))


def log_normal(count: int, mean: float, tail: float, seed: int) -> Lengths:
    """Log-normal lengths; the longest is ``tail`` times the mean."""
    normal = NormalDist()
    scores = np.array([normal.inv_cdf((i + 0.5) / count) for i in range(count)])
    return _of_shape("log-normal", lambda spread: np.exp(spread * scores), (0.0, 8.0), mean, tail, seed)


def pareto(count: int, mean: float, tail: float, seed: int) -> Lengths:
    """Pareto lengths (a power law above a minimum); the longest is ``tail`` times the mean."""
    survival = np.array([1 - (i + 0.5) / count for i in range(count)])
    return _of_shape("pareto", lambda spread: survival ** (-spread), (0.0, 4.0), mean, tail, seed)  # spread: 1 / alpha


def rare_tail(count: int, mean: float, tail: float, seed: int, *, share: float = 0.01, spread: float = 0.5) -> Lengths:
    """A narrow bulk (log-normal, ``spread``) and a ``share`` of responses that are ``tail`` times the mean of all."""
    if not 0 < share * tail < 1:
        raise ConfigError(f"a share of {share} that is {tail} times the mean leaves nothing for the others")
    long_count = max(1, round(share * count))
    normal = NormalDist()
    bulk = np.array(
        [math.exp(spread * normal.inv_cdf((i + 0.5) / (count - long_count))) for i in range(count - long_count)]
    )
    bulk *= (count * mean - long_count * tail * mean) / bulk.sum()
    return _shuffled("rare tail", np.concatenate([bulk, np.full(long_count, tail * mean)]), seed)


def _of_shape(
    name: str,
    shape: Callable[[float], np.ndarray],
    spreads: tuple[float, float],
    mean: float,
    tail: float,
    seed: int,
) -> Lengths:
    """Find the spread with this tail by bisection; the tail of ``shape(spread)`` grows with the spread."""
    low, high = spreads

    def tail_of(spread: float) -> float:
        values = shape(spread)
        return float(values.max() / values.mean())

    if not 1.0 <= tail <= tail_of(high):
        raise ConfigError(f"a {name} distribution of so few lengths has no tail of {tail:g} times the mean")
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if tail_of(middle) < tail else (low, middle)
    values = shape(high)
    return _shuffled(name, values * (mean / values.mean()), seed)


def _shuffled(name: str, values: np.ndarray, seed: int) -> Lengths:
    tokens = np.maximum(1, np.rint(values)).astype(np.int64)
    return Lengths(name, np.random.default_rng(seed).permutation(tokens))
