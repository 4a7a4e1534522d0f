"""Reading a run folder: the settings, metrics, samples, evaluations and events of a run, finished or not."""

from __future__ import annotations

from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from skyrl_train.config.schema import RunConfig
from skyrl_train.errors import ConfigError
from skyrl_train.events.log import EVENTS
from skyrl_train.events.reader import EventReader, Events
from skyrl_train.observability.advice import FAILURE_SEGMENTS, FAILURES, Advice, advise, edge_rows
from skyrl_train.observability.run_folder import (
    CONFIG,
    EVALUATIONS,
    FINISHED,
    METRICS,
    SAMPLES,
    read_config,
    read_jsonl,
)
from skyrl_train.observability.samples import read_samples
from skyrl_train.observability.screen import RunSummary, summarize

if TYPE_CHECKING:
    import pandas


class Run:
    """A run folder, read when it is first asked for; a new ``Run`` reads it again.

    Attributes:
        path: the run folder.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def finished(self) -> bool:
        """Whether the run has trained its last step."""
        return (self.path / FINISHED).is_file()

    @cached_property
    def config(self) -> RunConfig:
        """All settings of the run.

        Raises:
            ConfigError: the file was written by a version with other settings.
        """
        return read_config(self.path)

    @cached_property
    def summary(self) -> RunSummary:
        """Steps, rewards and training time."""
        return summarize(list(read_jsonl(self.path / METRICS)))

    @cached_property
    def advice(self) -> list[Advice]:
        """The alarms after the last step, or, without any, advice for tuning; docs/tutorials/troubleshooting.md explains each."""
        try:
            settings = asdict(self.config)
        except (ConfigError, OSError):  # advice needs few settings
            settings = {}
        failures = EventReader(self.path / EVENTS, FAILURE_SEGMENTS).poll(FAILURES)
        return advise(edge_rows(list(read_jsonl(self.path / METRICS))), failures, settings)

    @cached_property
    def metrics(self) -> pandas.DataFrame:
        """One row per step; the index is the step, the columns are the metrics' names."""
        return self._frame(METRICS, index="step")

    @cached_property
    def samples(self) -> pandas.DataFrame:
        """One row per recorded sequence of training and evaluation; ``docs/reference/samples.md`` describes the columns."""
        return read_samples(self.path / SAMPLES).to_pandas()

    @cached_property
    def evaluations(self) -> pandas.DataFrame:
        """One row per evaluated policy version; the index is the step after which it was synced."""
        return self._frame(EVALUATIONS, index="step")

    @cached_property
    def events(self) -> Events:
        """The events of the run in their order. ``events.frame("request")`` is a table of one kind.

        :class:`~skyrl_train.events.reader.EventReader` follows the events of a run that trains now.
        """
        return Events(EventReader(self.path / EVENTS).poll())

    @property
    def policy(self) -> Path | None:
        """The model folder that the finished run exported; None before."""
        folder = self.path / "policy"
        return folder if folder.is_dir() else None

    def _frame(self, name: str, index: str | None = None) -> pandas.DataFrame:
        import pandas  # 0.5 s, which a training run does not need

        frame = pandas.DataFrame(read_jsonl(self.path / name))
        return frame.set_index(index) if index is not None and index in frame else frame

    def __repr__(self) -> str:
        summary = self.summary
        reward = ""
        if summary.only_reward is not None:
            reward = f", all rewards are {summary.only_reward:.3f}"
        elif summary.first_reward is not None and summary.last_reward is not None:
            reward = f", reward {summary.first_reward:.3f} -> {summary.last_reward:.3f}"
        state = "finished" if self.finished else "unfinished"
        return f"Run({str(self.path)!r}: {state}, {summary.steps} steps{reward})"


def load_run(path: str | Path) -> Run:
    """Open a run folder for reading; it may be of a run that still trains.

    Raises:
        ConfigError: there is no run in this folder.
    """
    folder = Path(path)
    if not (folder / CONFIG).is_file():
        # The parent of run folders is a likely mistake, so the message lists them.
        near = sorted(str(file.parent) for file in folder.glob(f"*/{CONFIG}")) if folder.is_dir() else []
        hint = f" It contains these runs: {', '.join(near[:5])}." if near else ""
        raise ConfigError(f"{folder} is not a run folder (it has no {CONFIG}).{hint}")
    return Run(folder)
