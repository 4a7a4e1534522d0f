"""Reading a run folder: the settings, metrics, samples, evaluations and events of a run, finished or not."""

from __future__ import annotations

import json
import re
from functools import cached_property
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from skyrl_train.config.schema import RunConfig
from skyrl_train.errors import CheckpointError, ConfigError, NoSuchRunError
from skyrl_train.events.log import EVENTS
from skyrl_train.events.reader import EventReader, Events
from skyrl_train.observability.advice import Advice
from skyrl_train.observability.readers.folders import read_settings
from skyrl_train.observability.readers.incidents import run_advice
from skyrl_train.observability.readers.series import MetricTable
from skyrl_train.observability.readers.timeline import EventStore
from skyrl_train.observability.readers.verdict import learning
from skyrl_train.observability.report.sections import text_curve
from skyrl_train.observability.run_folder import (
    CONFIG,
    EVALUATIONS,
    FINISHED,
    METRICS,
    ORIGIN,
    SAMPLES,
    read_config,
    read_jsonl,
    read_scores,
)
from skyrl_train.observability.samples import read_samples
from skyrl_train.observability.screen import RunSummary, summarize
from skyrl_train.training.checkpoint import CheckpointStore, best_step, find_damage, is_complete

if TYPE_CHECKING:
    import pandas

Which = int | Literal["best"] | None  # a checkpoint: of a step, the best by evaluation, or the newest

_PARTS = ("checkpoints", "policies", "policy", "model")  # folders of a run that have its policies
_CHECKPOINT = re.compile(r"global_step_(\d+)")


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
        return summarize(read_jsonl(self.path / METRICS))

    @cached_property
    def learned(self) -> str:
        """A sentence that says whether the reward rose, as in the report."""
        return learning(MetricTable(self.path / METRICS).columns())

    @cached_property
    def advice(self) -> list[Advice]:
        """The alarms after the last step, or, without any, advice for tuning; docs/tutorials/troubleshooting.md explains each."""
        columns, events = MetricTable(self.path / METRICS).columns(), EventStore(self.path / EVENTS)
        return run_advice(columns, events, read_settings(self.path / CONFIG))

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
        return folder if self.finished and folder.is_dir() else None

    @property
    def origin(self) -> dict[str, Any] | None:
        """The folder (``run``) and ``step`` of the policy that the run started from; None without ``trainer.init_from``."""
        file = self.path / ORIGIN
        return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None

    def checkpoint(self, which: Which = None) -> Path:
        """Return the folder of a checkpoint on this machine: the newest intact one, the best by evaluation, or of a step.

        Raises:
            ConfigError: there is no such checkpoint, or ``trainer.eval.best_metric`` is not set.
            CheckpointError: it is damaged.
        """
        root, trainer = self.path / "checkpoints", self.config.trainer
        store = CheckpointStore(root, max_to_keep=1)
        if which is None:
            newest = store.latest()
            if newest is None:
                where = f"; copy one there from {trainer.ckpt_path}" if trainer.ckpt_path else ""
                raise ConfigError(f"{root} has no checkpoint yet{where}.")
            return newest
        folders = (_CHECKPOINT.fullmatch(folder.name) for folder in root.glob("global_step_*"))
        steps = sorted(int(found[1]) for found in folders if found is not None)
        if which == "best":
            metric = trainer.eval.best_metric
            if metric is None:
                raise ConfigError(f"{self.path} keeps no best checkpoint: trainer.eval.best_metric is not set.")
            complete = [step for step in steps if is_complete(store.folder(step))]
            which = best_step(complete, read_scores(self.path / EVALUATIONS, metric))
            if which is None:
                raise ConfigError(f"{self.path} has no checkpoint yet whose evaluation has {metric}.")
        if which not in steps:
            raise ConfigError(
                f"{self.path} has no checkpoint of step {which} here. Steps: {', '.join(map(str, steps)) or 'none'}. "
                f"A run keeps the newest ones, trainer.max_ckpts_to_keep={trainer.max_ckpts_to_keep} here."
            )
        if damage := find_damage(store.folder(which)):
            raise CheckpointError(f"{store.folder(which)} is damaged: {damage}. Name another step.")
        return store.folder(which)

    def _frame(self, name: str, index: str | None = None) -> pandas.DataFrame:
        import pandas  # 0.5 s, which a training run does not need

        rows = list(read_jsonl(self.path / name))
        try:
            frame = pandas.DataFrame(rows)
        except OverflowError:  # pandas before 3.1, of an integer that no float holds
            frame = pandas.DataFrame(rows, dtype=object)
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

    def _repr_html_(self) -> str:
        """Return the run as a notebook shows it: whether it learned, its state, the curve of its reward, and its advice."""
        rewards = [row["reward/mean"] for row in read_jsonl(self.path / METRICS) if row.get("reward/mean") is not None]
        curve = f"<pre>reward by step\n{escape(text_curve(rewards, 60, 8))}</pre>" if rewards else ""
        advice = "".join(f"<li>{escape(str(line))}</li>" for line in self.advice)
        return f"<p>{escape(self.learned)}</p><p><code>{escape(repr(self))}</code></p>{curve}{advice and f'<ul>{advice}</ul>'}"


def load_run(path: str | Path) -> Run:
    """Open a run folder for reading; it may be of a run that still trains.

    Raises:
        NoSuchRunError: there is no run in this folder.
    """
    if not isinstance(path, str | Path):
        raise NoSuchRunError(f"load_run() takes the folder of a run, got {path!r}.")
    folder = Path(path)
    if not (folder / CONFIG).is_file():
        # The parent of run folders is a likely mistake, so the message lists them.
        near = sorted(str(file.parent) for file in folder.glob(f"*/{CONFIG}")) if folder.is_dir() else []
        hint = f" It contains these runs: {', '.join(near[:5])}." if near else part_of_run(folder)
        raise NoSuchRunError(f"{folder} is not a run folder (it has no {CONFIG}).{hint}")
    return Run(folder)


def part_of_run(folder: Path) -> str:
    """Return how to name the run, or the checkpoint of it, that ``folder`` is a part of; empty if it is part of none."""
    for run in folder.parents:
        inside = folder.relative_to(run).parts
        if inside[0] in _PARTS and (run / CONFIG).is_file():
            step = next((found[1] for part in inside if (found := _CHECKPOINT.fullmatch(part))), None)
            return f" It is a part of the run {run}: name {run}{'' if step is None else f':{step}'}."
    return ""


def split_checkpoint(text: str) -> tuple[Path, Which]:
    """Split ``RUN``, ``RUN:STEP`` or ``RUN:best`` into the run folder and the checkpoint."""
    found = re.fullmatch(r"(.+):(\d+|best)", text)
    if found is None:
        return Path(text), None
    return Path(found[1]), "best" if found[2] == "best" else int(found[2])
