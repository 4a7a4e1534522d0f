"""The interface of a tracker, and functions that several built-in trackers use.

    TrackerFeed (a thread per tracker) ──log, log_samples, log_report──> Tracker ──> TensorBoard, W&B, MLflow, ...

trainer.trackers=[tensorboard, wandb, my_package.MyTracker]
"""

from __future__ import annotations

import re
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from skyrl_train.config.schema import RunConfig
from skyrl_train.events.log import encodable
from skyrl_train.observability.readers.samples import excerpt
from skyrl_train.observability.readers.settings import settings_table

PROJECT = "skyrl-train"  # where the environment names no other
MAX_TEXT = 10_000  # characters of a prompt or a response; samples/ has all of them
Histogram = tuple[NDArray[np.floating[Any]], NDArray[np.floating[Any]]]  # counts, and the edges of their bins
_BIN = re.compile(r"(.*histogram)/(\d{1,4})")
SAMPLE_COLUMNS = ("group_index", "sample", "reward", "lag", "stop_reason", "chosen", "prompt", "response")


class Tracker(ABC):
    """Shows a run in another program. Constructed as ``Tracker(folder, config, resume_step)``.

    All calls, the constructor's included, come from one thread that has no other task. An exception costs what was to be
    logged, and never the run.

    Args:
        folder: ``<run>/logs/<name>``, for the tracker's files; created by the tracker.
        config: settings of the run.
        resume_step: later steps were logged before, and are repeated.

    Attributes:
        location: where to look at the run; shown on the screen. Empty: nowhere.
    """

    location = ""

    @abstractmethod
    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log metrics of a step. Metrics of an evaluation come with the step whose policy was measured, which may be earlier."""

    def log_samples(self, phase: str, step: int, rows: Sequence[Mapping[str, Any]]) -> None:  # noqa: B027 (optional)
        """Log samples of a step, or of an evaluated version.

        Args:
            phase: "train" or "eval".
            rows: at least one; one per sequence, with some columns of ``docs/reference/samples.md`` (``sample_table``). Long
                texts lack their middle.
        """

    def log_report(self, path: Path) -> None:  # noqa: B027 (optional)
        """Log the report of the ended run, an HTML file."""

    @abstractmethod
    def close(self) -> None:
        """Write buffered data."""


def run_name(folder: Path) -> str:
    """Return the name of the run that a tracker's folder belongs to."""
    return folder.resolve().parents[1].name


def kept_id(folder: Path, create: Callable[[], str] = lambda: uuid.uuid4().hex[:16]) -> str:
    """Return the id of the tracked run: the one that ``folder`` keeps, so that a resumed run continues it, or a new one."""
    path = folder / "run_id"
    identifier = path.read_text(encoding="utf-8").strip() if path.is_file() else ""
    if not identifier:
        folder.mkdir(parents=True, exist_ok=True)
        identifier = create()
        path.write_text(identifier, encoding="utf-8")
    return identifier


def flat_config(config: RunConfig) -> dict[str, Any]:
    """Return all settings by their dotted names."""
    return {row["key"]: row["value"] for row in settings_table(asdict(config))}


def split_histograms(metrics: Mapping[str, float]) -> tuple[dict[str, float], dict[str, Histogram]]:
    """Return the metrics that are single numbers, and the histograms of small integers, which are one metric per value."""
    scalars: dict[str, float] = {}
    counts: dict[str, dict[int, float]] = {}
    for name, value in metrics.items():
        if found := _BIN.fullmatch(name):
            counts.setdefault(found[1], {})[int(found[2])] = value
        else:
            scalars[name] = value
    return scalars, {
        name: (np.array([of.get(value, 0.0) for value in range(max(of) + 1)]), np.arange(max(of) + 2) - 0.5)
        for name, of in counts.items()
    }


def with_histograms(metrics: Mapping[str, float], histogram: Callable[..., Any]) -> dict[str, Any]:
    """Return the metrics, with each histogram as ``histogram(np_histogram=(counts, edges))``, an object of a package."""
    scalars, histograms = split_histograms(metrics)
    return {**scalars, **{name: histogram(np_histogram=found) for name, found in histograms.items()}}


def sample_table(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the columns of samples that a person reads; of long texts, the beginning and the end."""
    table = [{name: encodable(row[name]) for name in SAMPLE_COLUMNS} for row in rows]
    return [row | {name: excerpt(row[name], MAX_TEXT) for name in ("prompt", "response")} for row in table]
