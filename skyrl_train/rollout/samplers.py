"""The order of a data set that is in memory: which row is behind each ordinal of the endless training stream."""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping
from fractions import Fraction
from numbers import Integral
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np

from skyrl_train.config.import_path import import_name, is_import_path
from skyrl_train.config.keys import did_you_mean
from skyrl_train.config.schema.data import DataConfig
from skyrl_train.environments.base import PromptRecord
from skyrl_train.errors import ConfigError, DataError
from skyrl_train.rollout.dataset import PromptDataset
from skyrl_train.rollout.group import RolloutGroup

T = TypeVar("T")
MAX_CACHED_EPOCHS = 4  # ordinals in flight span few epochs
MAX_CYCLE = 100_000  # prompts


class Sampler(ABC):
    """Chooses rows. Constructed with the data set, the run's seed and ``data.sampler_kwargs``.

    A *pure* sampler answers from ``(seed, ordinal)`` alone, whenever and in whatever order it is asked, and has no state.
    Any other one, a curriculum say, is asked once per ordinal, in ascending order; the loader remembers its answers, in
    checkpoints too, and keeps its :meth:`state_dict`.

    Everything is called from the control loop: return within microseconds.
    """

    pure: ClassVar[bool] = False

    def __init__(self, dataset: PromptDataset, seed: int) -> None:
        self.dataset = dataset
        self.seed = seed

    @property
    def identity(self) -> str:
        """Names the order. A checkpoint of another one is refused; include settings that change the order."""
        return type(self).__qualname__

    @abstractmethod
    def row(self, ordinal: int) -> int:
        """The row of the data set, counted from 0, behind ``ordinal``."""

    def observe(self, row: int, group: RolloutGroup) -> None:  # noqa: B027 - most samplers do not learn
        """Told once of each group of this run that was trained or filtered, in the order in which that happened."""

    def state_dict(self) -> dict[str, Any]:
        """JSON-able; what :meth:`row` and :meth:`observe` have changed."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:  # noqa: B027 - most samplers have no state
        """Restores what :meth:`state_dict` returned."""


class Permutations:
    """Endless passes over ``length`` rows; pass ``e`` is a permutation that depends on ``(*key, e)`` alone."""

    def __init__(self, length: int, *key: int) -> None:
        self._length = length
        self._passes = Recent(lambda number: np.random.default_rng((*key, number)).permutation(length))

    def row(self, position: int) -> int:
        """The row at a position of the endless sequence."""
        number, place = divmod(position, self._length)
        return int(self._passes.get(number)[place])


class Recent(Generic[T]):
    """What ``make(number)`` returned for the numbers asked for lately; the lowest one is forgotten first."""

    def __init__(self, make: Callable[[int], T]) -> None:
        self._make = make
        self._made: dict[int, T] = {}

    def get(self, number: int) -> T:
        """``make(number)``."""
        if number not in self._made:
            if len(self._made) >= MAX_CACHED_EPOCHS:
                self._made.pop(min(self._made))
            self._made[number] = self._make(number)
        return self._made[number]


class ShuffleSampler(Sampler):
    """Every epoch is another permutation of all rows, a function of ``(seed, epoch)``."""

    pure = True

    def __init__(self, dataset: PromptDataset, seed: int) -> None:
        super().__init__(dataset, seed)
        self._permutations = Permutations(len(dataset), seed)

    @property
    def identity(self) -> str:
        return "shuffle"

    def row(self, ordinal: int) -> int:
        return self._permutations.row(ordinal)


class SequentialSampler(Sampler):
    """Every epoch is the order of the files."""

    pure = True

    @property
    def identity(self) -> str:
        return "sequential"

    def row(self, ordinal: int) -> int:
        return ordinal % len(self.dataset)


class WeightedSampler(Sampler):
    """Mixes sources: each source has its share of the stream, exactly, in every cycle of it.

    The shares are the whole numbers ``m_i`` with the ratio of the weights, as small as possible. The stream is cycles of
    ``M = sum(m_i)`` ordinals; in each, source ``i`` (counted from 1) has ``m_i`` places, spread by a permutation of
    ``(seed, 0, cycle)``. The ``k``-th place that it ever has is the ``k``-th of its own endless passes over its rows, each
    a permutation of ``(seed, i, pass)``. So a row of a small source with a large weight comes again before all rows of
    a large one have come, but never before all of its own source have. Pure: all of it follows from the ordinal.

    Args:
        weights: by ``data_source``; a source of weight 0 does not occur. Sources count in the order of their names.

    Raises:
        ConfigError: a source is missing or unknown, a weight is negative, or all are 0, or M would be huge.
    """

    pure = True

    def __init__(self, dataset: PromptDataset, seed: int, weights: Mapping[str, float]) -> None:
        super().__init__(dataset, seed)
        rows: dict[str, list[int]] = {}
        for row, record in enumerate(dataset):
            rows.setdefault(record.data_source, []).append(row)
        _check_weights(weights, rows)
        self._places = {source: m for source, m in sorted(_whole_ratio(weights).items()) if m}
        self._rows = [np.asarray(rows[source]) for source in self._places]
        self._passes = [Permutations(len(own), seed, index) for index, own in enumerate(self._rows, start=1)]
        self._counts = np.asarray(list(self._places.values()))
        self._cycles = Recent(self._cycle)

    @property
    def identity(self) -> str:
        return f"weighted {json.dumps(self._places)}"

    def row(self, ordinal: int) -> int:
        cycle, place = divmod(ordinal, int(self._counts.sum()))
        sources, ranks = self._cycles.get(cycle)
        source = int(sources[place])
        own_place = cycle * int(self._counts[source]) + int(ranks[place])
        return int(self._rows[source][self._passes[source].row(own_place)])

    def _cycle(self, cycle: int) -> tuple[np.ndarray, np.ndarray]:
        """Of each place of a cycle: its source, and how many places that source has before it in the cycle."""
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
                f"{setting} names {source!r}, which no prompt has as its data_source.{did_you_mean(source, known)}"
            )
    missing = sorted(set(known) - set(weights))
    if missing:
        raise ConfigError(f"{setting} lacks {', '.join(missing)}. Give each a weight; 0 leaves its prompts out.")
    numbers: list[Any] = list(weights.values())  # from a file of settings
    if not all(
        isinstance(w, int | float) and not isinstance(w, bool) and math.isfinite(w) and w >= 0 for w in numbers
    ) or not any(numbers):
        raise ConfigError(
            f"{setting}={dict(weights)}: the weights must be numbers of at least 0, and not all of them 0."
        )


def _whole_ratio(weights: Mapping[str, float]) -> dict[str, int]:
    """The smallest whole numbers in the ratio of the weights, each taken as it is written (0.1 is one tenth)."""
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
    """The sampler that ``data.sampler`` names.

    Raises:
        ConfigError: there is none, or ``data.sampler_kwargs`` does not fit it.
        DataError: its state cannot be checkpointed.
    """
    name = data.sampler or "shuffle"
    if name not in SAMPLERS and not is_import_path(name):
        raise ConfigError(f"data.sampler={name} is unknown.{did_you_mean(name, SAMPLERS)}")
    cls = SAMPLERS.get(name) or import_name(name, "data.sampler")
    try:
        sampler: Sampler = cls(dataset, seed, **data.sampler_kwargs)
    except TypeError as error:
        raise ConfigError(
            f"data.sampler={name!r} cannot be constructed: {error}. It is given the data set, the seed and "
            "data.sampler_kwargs."
        ) from error
    if not isinstance(sampler, Sampler):
        raise ConfigError(f"data.sampler={name!r} is no subclass of {Sampler.__module__}.Sampler.")
    checkpointed(sampler)  # says now what the first checkpoint would
    return sampler


def checkpointed(sampler: Sampler) -> dict[str, Any]:
    """A sampler's state as a checkpoint brings it back: a copy, which is written while the sampler goes on.

    Raises:
        DataError: JSON cannot hold it.
    """
    state = sampler.state_dict()
    try:
        copy: dict[str, Any] = json.loads(json.dumps(state))
    except (TypeError, ValueError) as error:
        raise DataError(
            f"the sampler {sampler.identity} has a state that no checkpoint can hold: {error}. Return plain lists and numbers "
            "from state_dict(); of a numpy array, its tolist()."
        ) from error
    return copy


class SampledPrompts:
    """A data set in memory in a sampler's order: a source of prompts for the loader."""

    end = None

    def __init__(self, dataset: PromptDataset, sampler: Sampler) -> None:
        self._dataset = dataset
        self._sampler = sampler
        self._drawn: dict[int, int] = {}  # rows of open ordinals, where the sampler could not tell again

    def identity(self) -> dict[str, Any]:
        return {
            "dataset_len": len(self._dataset),
            "fingerprint": self._dataset.fingerprint,
            "sampler": self._sampler.identity,
        }

    async def start(self, changed: Callable[[], None]) -> None:
        return None

    async def aclose(self) -> None:
        return None

    def ready(self, ordinal: int) -> bool:
        return True

    def prepare(self, ordinal: int) -> None:
        if not self._sampler.pure and ordinal not in self._drawn:
            self._drawn[ordinal] = self._draw(ordinal)

    def record(self, ordinal: int) -> PromptRecord:
        return self._dataset[self._row(ordinal)]

    def settled(self, ordinals: Iterable[int], frontier: int) -> None:
        for ordinal in ordinals:
            self._drawn.pop(ordinal, None)

    def observe(self, group: RolloutGroup) -> None:
        self._sampler.observe(self._row(group.ordinal), group)

    def state_dict(self) -> dict[str, Any]:
        return {"sampler": checkpointed(self._sampler), "drawn": sorted(self._drawn.items())}

    def may_change(self, state: Mapping[str, Any]) -> Collection[str]:
        return []

    def load_state_dict(self, state: Mapping[str, Any], is_open: Callable[[int], bool], issued: int) -> None:
        self._sampler.load_state_dict(state["sampler"])
        self._drawn = {int(ordinal): int(row) for ordinal, row in state["drawn"]}

    def _row(self, ordinal: int) -> int:
        return self._draw(ordinal) if self._sampler.pure else self._drawn[ordinal]

    def _draw(self, ordinal: int) -> int:
        try:
            row: object = self._sampler.row(ordinal)
        except Exception as error:
            raise DataError(f"the sampler {self._sampler.identity} failed in row({ordinal}): {error!r}") from error
        chosen = int(row) if isinstance(row, Integral) else -1  # one of numpy's would not go into a checkpoint
        if not 0 <= chosen < len(self._dataset):
            raise DataError(
                f"the sampler {self._sampler.identity} chose row {row} of a data set of {len(self._dataset)} prompts"
            )
        return chosen
