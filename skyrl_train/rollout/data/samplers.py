"""The order of a data set in memory: which row each group index of the endless training stream stands for."""

from __future__ import annotations

import functools
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping
from fractions import Fraction
from numbers import Integral
from typing import Any, ClassVar

import numpy as np

from skyrl_train.config.import_path import import_name, is_import_path
from skyrl_train.config.keys import did_you_mean
from skyrl_train.config.schema import DataConfig
from skyrl_train.environments.base import PromptRecord
from skyrl_train.errors import ConfigError, DataError
from skyrl_train.rollout.data.dataset import PromptDataset
from skyrl_train.types import RolloutGroup

MAX_CACHED_EPOCHS = 4  # group indices in flight span few epochs
MAX_CYCLE = 100_000  # prompts


class Sampler(ABC):
    """Chooses rows. Constructed with the data set, the run's seed and ``data.sampler_kwargs``.

    A *pure* sampler computes the row from ``(seed, group_index)`` alone; it may be asked at any time, in any order, and has
    no state. Any other sampler, such as a curriculum, is asked once per group index, in ascending order. The loader stores
    its answers and its :meth:`state_dict` in checkpoints.

    All calls come from the control loop: return within microseconds.
    """

    pure: ClassVar[bool] = False

    def __init__(self, dataset: PromptDataset, seed: int) -> None:
        self.dataset = dataset
        self.seed = seed

    @property
    def identity(self) -> str:
        """Name of the order, including settings that change it. Checkpoints with another identity are rejected."""
        return type(self).__qualname__

    @abstractmethod
    def row(self, group_index: int) -> int:
        """Return the row of the data set, counted from 0, for ``group_index``."""

    def observe(self, row: int, group: RolloutGroup) -> None:  # noqa: B027 - most samplers do not learn
        """Learn from a group of this run that was trained or filtered. Called once for each, in that order.

        Not for a group that failed and takes its batch slot without samples (``on_rollout_failure=mask``).
        """

    def state_dict(self) -> dict[str, Any]:
        """Return the JSON-able state that :meth:`row` and :meth:`observe` have changed."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:  # noqa: B027 - most samplers have no state
        """Restore :meth:`state_dict`."""


def permutations(length: int, *key: int) -> Callable[[int], np.ndarray]:
    """Return a function from ``e`` to a permutation of ``length`` rows, int64 [length], that depends only on ``(*key, e)``."""
    # Neighbouring group indices share a permutation, which takes long to compute for a large data set.
    return functools.lru_cache(MAX_CACHED_EPOCHS)(
        lambda number: np.random.default_rng((*key, number)).permutation(length)
    )


class ShuffleSampler(Sampler):
    """Each epoch is another permutation of all rows, a function of ``(seed, epoch)``."""

    pure = True
    identity = "shuffle"

    def __init__(self, dataset: PromptDataset, seed: int) -> None:
        super().__init__(dataset, seed)
        self._permutation = permutations(len(dataset), seed)

    def row(self, group_index: int) -> int:
        epoch, place = divmod(group_index, len(self.dataset))
        return int(self._permutation(epoch)[place])


class SequentialSampler(Sampler):
    """Each epoch has the order of the files."""

    pure = True
    identity = "sequential"

    def row(self, group_index: int) -> int:
        return group_index % len(self.dataset)


class WeightedSampler(Sampler):
    """Mixes sources. Each source has exactly its share of each cycle of the stream.

    The shares are the smallest whole numbers ``m_i`` in the ratio of the weights. The stream consists of cycles of
    ``M = sum(m_i)`` group indices. In each cycle, source ``i`` (counted from 1, in the order of the names) has ``m_i`` places,
    distributed by a permutation of ``(seed, 0, cycle)``. Its ``k``-th place overall is the ``k``-th row of its endless passes,
    each a permutation of ``(seed, i, pass)``. So a row of a small source with a large weight may repeat before all rows of a
    large source have occurred, but never before all rows of its source have. Pure.

    Args:
        weights: by ``data_source``; a source with weight 0 does not occur.

    Raises:
        ConfigError: a source is missing or unknown, a weight is negative, all are 0, or M is above ``MAX_CYCLE``.
    """

    pure = True

    def __init__(self, dataset: PromptDataset, seed: int, weights: Mapping[str, float]) -> None:
        super().__init__(dataset, seed)
        rows: dict[str, list[int]] = {}
        for row, record in enumerate(dataset):
            rows.setdefault(record.data_source, []).append(row)
        _check_weights(weights, rows)
        # Sorted by name: the order of the settings does not change the stream.
        self._places = {source: m for source, m in sorted(_whole_ratio(weights).items()) if m}
        self._rows = [np.asarray(rows[source]) for source in self._places]
        self._passes = [permutations(len(own), seed, index) for index, own in enumerate(self._rows, start=1)]
        self._counts = np.asarray(list(self._places.values()))
        self._cycle = functools.lru_cache(MAX_CACHED_EPOCHS)(self._make_cycle)

    @property
    def identity(self) -> str:
        return f"weighted {json.dumps(self._places)}"

    def row(self, group_index: int) -> int:
        cycle, place = divmod(group_index, int(self._counts.sum()))
        sources, ranks = self._cycle(cycle)
        source = int(sources[place])
        # Places of this source in earlier cycles, and before this place in the current one.
        own_place = cycle * int(self._counts[source]) + int(ranks[place])
        number, row = divmod(own_place, len(self._rows[source]))
        return int(self._rows[source][self._passes[source](number)[row]])

    def _make_cycle(self, cycle: int) -> tuple[np.ndarray, np.ndarray]:
        """Return for each place of a cycle its source and the number of earlier places of that source, both int64 [M]."""
        sources = np.repeat(np.arange(len(self._counts)), self._counts)
        sources = np.random.default_rng((self.seed, 0, cycle)).permutation(sources)
        ranks = np.empty_like(sources)
        for source, count in enumerate(self._counts):
            ranks[sources == source] = np.arange(count)
        return sources, ranks


def _check_weights(weights: Mapping[str, float], known: Collection[str]) -> None:
    setting = "data.sampler_kwargs.weights"
    if not isinstance(weights, Mapping):
        raise ConfigError(f"{setting} must map each data_source to a number, got {weights!r}.")
    for source in weights:
        if source not in known:
            raise ConfigError(
                f"{setting} names {source!r}, which is the data_source of no prompt.{did_you_mean(source, known)}"
            )
    missing = sorted(set(known) - set(weights))
    if missing:
        raise ConfigError(f"{setting} lacks {', '.join(missing)}. Give each a weight; 0 excludes its prompts.")
    numbers: list[Any] = list(weights.values())  # from a file of settings
    if not all(
        isinstance(w, int | float) and not isinstance(w, bool) and math.isfinite(w) and w >= 0 for w in numbers
    ) or not any(numbers):
        raise ConfigError(
            f"{setting}={dict(weights)}: the weights must be numbers of at least 0, and not all of them 0."
        )


def _whole_ratio(weights: Mapping[str, float]) -> dict[str, int]:
    """Return the smallest whole numbers in the ratio of the weights. Weights count as written: 0.1 is one tenth."""
    # From the decimal text: Fraction(0.1) is the binary number next to one tenth.
    exact = {source: Fraction(str(weight)) for source, weight in weights.items()}
    common = math.lcm(*(weight.denominator for weight in exact.values()))
    numbers = {source: int(weight * common) for source, weight in exact.items()}
    divisor = math.gcd(*numbers.values())
    numbers = {source: number // divisor for source, number in numbers.items()}
    if sum(numbers.values()) > MAX_CYCLE:
        raise ConfigError(
            f"data.sampler_kwargs.weights={dict(weights)} would need cycles of {sum(numbers.values())} prompts, more than "
            f"{MAX_CYCLE}. Round the weights: the ratio of whole numbers that add up to 1000 is often enough."
        )
    return numbers


SAMPLERS: Mapping[str, type[Sampler]] = {
    "shuffle": ShuffleSampler,
    "sequential": SequentialSampler,
    "weighted": WeightedSampler,
}


def build_sampler(data: DataConfig, dataset: PromptDataset, seed: int) -> Sampler:
    """Construct the sampler that ``data.sampler`` names.

    Raises:
        ConfigError: the name is unknown, or ``data.sampler_kwargs`` does not fit it.
        DataError: its state cannot be stored in a checkpoint.
    """
    name = data.sampler or "shuffle"
    if name not in SAMPLERS and not is_import_path(name):
        raise ConfigError(f"data.sampler={name} is unknown.{did_you_mean(name, SAMPLERS)}")
    cls = SAMPLERS.get(name) or import_name(name, "data.sampler")
    try:
        sampler: Sampler = cls(dataset, seed, **data.sampler_kwargs)
    except TypeError as error:
        raise ConfigError(
            f"data.sampler={name!r} cannot be constructed: {error}. Its arguments are the data set, the seed and "
            "data.sampler_kwargs."
        ) from error
    if not isinstance(sampler, Sampler):
        raise ConfigError(f"data.sampler={name!r} is not a subclass of {Sampler.__module__}.Sampler.")
    copied_state(sampler)  # fails now rather than at the first checkpoint
    return sampler


def copied_state(sampler: Sampler) -> dict[str, Any]:
    """Return a copy of a sampler's state as a checkpoint restores it. The copy is written while the sampler continues.

    Raises:
        DataError: the state is not JSON-able.
    """
    state = sampler.state_dict()
    try:
        copy: dict[str, Any] = json.loads(json.dumps(state))
    except (TypeError, ValueError) as error:
        raise DataError(
            f"the sampler {sampler.identity} has a state that no checkpoint can hold: {error}. Return plain lists and numbers "
            "from state_dict(); for a numpy array, its tolist()."
        ) from error
    return copy


class PromptSource(ABC):
    """The prompts of the group indices: :class:`SampledPrompts`, or a stream (``streaming.py``).

    All calls come from the event loop and return at once.

    Attributes:
        end: the first group index without a prompt; None: unknown, or the data is endless.
    """

    end: int | None = None

    @abstractmethod
    def identity(self) -> dict[str, Any]:
        """Return the JSON-able facts that a run and its checkpoint must have in common."""

    async def start(self, changed: Callable[[], None]) -> None:
        """Start, once, after a checkpoint was restored. Then the prompts that were in flight at the checkpoint are loaded.

        Args:
            changed: called on the event loop when the result of :meth:`ready` or :attr:`end` may have changed.

        Raises:
            DataError: a file cannot be read.
        """
        return

    async def aclose(self) -> None:
        """Free threads and files. Idempotent."""
        return

    def ready(self, group_index: int) -> bool:
        """Return whether the row of ``group_index`` is loaded, or will never exist."""
        return True

    @abstractmethod
    def prepare(self, group_index: int) -> None:
        """Choose the row of ``group_index``, if that is not done. Called when ready, before the index is issued.

        Raises:
            DataError: the row exists but cannot be read, or the sampler failed.
        """

    @abstractmethod
    def record(self, group_index: int) -> PromptRecord:
        """Return the prompt of a group index that is in flight or buffered."""

    @abstractmethod
    def settled(self, group_indices: Iterable[int], frontier: int, groups: Iterable[RolloutGroup]) -> None:
        """Learn from the finished ``groups``, then forget the rows of ``group_indices`` and of all below ``frontier``."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return the JSON-able state from which the rows of all open group indices can be restored."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any], is_open: Callable[[int], bool], issued: int) -> None:
        """Restore the state. Of the group indices below ``issued``, only the open ones are needed."""


class SampledPrompts(PromptSource):
    """A data set in memory, in the order of a sampler."""

    def __init__(self, dataset: PromptDataset, sampler: Sampler) -> None:
        self._dataset = dataset
        self._sampler = sampler
        self._drawn: dict[int, int] = {}  # rows of open group indices, for samplers that are not pure
        self._observe_error: Exception | None = None

    def identity(self) -> dict[str, Any]:
        return {
            "dataset_len": len(self._dataset.records),
            "fingerprint": self._dataset.fingerprint,
            "sampler": self._sampler.identity,
        }

    def prepare(self, group_index: int) -> None:
        if self._observe_error is not None:
            raise DataError(f"the sampler failed in observe(): {self._observe_error!r}") from self._observe_error
        # An index that is issued again after a resume keeps the row that was drawn for it.
        if not self._sampler.pure and group_index not in self._drawn:
            self._drawn[group_index] = self._draw(group_index)

    def record(self, group_index: int) -> PromptRecord:
        return self._dataset.records[self._row(group_index)]

    def settled(self, group_indices: Iterable[int], frontier: int, groups: Iterable[RolloutGroup]) -> None:
        try:
            for group in groups:
                self._sampler.observe(self._row(group.group_index), group)
        except Exception as error:  # user code: the current step stands, the next prepare() raises
            self._observe_error = error
        for group_index in group_indices:
            self._drawn.pop(group_index, None)

    def state_dict(self) -> dict[str, Any]:
        return {"sampler": copied_state(self._sampler), "drawn": sorted(self._drawn.items())}

    def load_state_dict(self, state: Mapping[str, Any], is_open: Callable[[int], bool], issued: int) -> None:
        self._sampler.load_state_dict(state["sampler"])
        self._drawn = {int(group_index): int(row) for group_index, row in state["drawn"]}

    def _row(self, group_index: int) -> int:
        return self._draw(group_index) if self._sampler.pure else self._drawn[group_index]

    def _draw(self, group_index: int) -> int:
        try:
            row: object = self._sampler.row(group_index)
        except Exception as error:
            raise DataError(f"the sampler {self._sampler.identity} failed in row({group_index}): {error!r}") from error
        chosen = int(row) if isinstance(row, Integral) else -1  # int(): a checkpoint cannot hold numpy's integers
        if not 0 <= chosen < len(self._dataset.records):
            raise DataError(
                f"the sampler {self._sampler.identity} chose row {row} of a data set of {len(self._dataset.records)} prompts"
            )
        return chosen
