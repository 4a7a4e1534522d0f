"""Where metrics go besides ``metrics.jsonl``: trackers by name or import path.

trainer.trackers=[tensorboard, my_package.MyTracker]
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from skyrl_train.config.import_path import import_name, is_import_path
from skyrl_train.config.keys import did_you_mean
from skyrl_train.config.schema.run import RunConfig
from skyrl_train.errors import ConfigError


class Tracker(ABC):
    """Receives the metrics of each step. Constructed as ``Tracker(folder, config, resume_step)``."""

    @abstractmethod
    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Takes one step's metrics. Those of an evaluation come with the step that it measured, which may be an earlier one."""

    @abstractmethod
    def close(self) -> None:
        """Writes what is still held back."""


# folder: for the tracker's files, made by the tracker. resume_step: steps after it were logged before and come again.
TrackerFactory = Callable[[Path, RunConfig, int], Tracker]


class TensorBoardTracker(Tracker):
    """Event files for ``tensorboard --logdir <run>/logs``; steps that come again after a resume replace the old."""

    def __init__(self, folder: Path, config: RunConfig, resume_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter  # slow to import, and only a run needs it

        self._writer = SummaryWriter(str(folder), purge_step=resume_step + 1)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """One scalar per metric."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Flushes and closes the event file."""
        self._writer.close()


_factories: dict[str, TrackerFactory] = {"tensorboard": TensorBoardTracker}


def tracker_names() -> list[str]:
    """The names that ``trainer.trackers`` takes, beside import paths."""
    return sorted(_factories)


def register_tracker(name: str, factory: TrackerFactory) -> None:
    """Makes a tracker known as ``name``.

    Raises:
        ConfigError: the name is taken.
    """
    if name in _factories:
        raise ConfigError(f"trainer.trackers: {name!r} is registered already; choose another name.")
    _factories[name] = factory


def make_trackers(logs: Path, config: RunConfig, resume_step: int) -> Tracker:
    """All trackers of ``trainer.trackers`` as one; each keeps its files in ``logs/<name>``.

    Raises:
        ConfigError: a name is unknown, or an import path leads nowhere.
    """
    factories = [(name, _factory(name)) for name in config.trainer.trackers]
    return _All([make(logs / name.rpartition(".")[2], config, resume_step) for name, make in factories])


class _All(Tracker):
    def __init__(self, trackers: Sequence[Tracker]) -> None:
        self._trackers = trackers

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for tracker in self._trackers:
            tracker.log(step, metrics)

    def close(self) -> None:
        for tracker in self._trackers:
            tracker.close()


def _factory(name: str) -> TrackerFactory:
    if name in _factories:
        return _factories[name]
    if not is_import_path(name):
        raise ConfigError(f"trainer.trackers: {name!r} is unknown.{did_you_mean(name, _factories)}")
    factory: TrackerFactory = import_name(name, "trainer.trackers")
    return factory
