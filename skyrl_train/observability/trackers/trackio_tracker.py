"""Trackio: a database on this machine (``trackio show``), or the Space of ``TRACKIO_SPACE_ID``."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas
import trackio

from skyrl_train.config.schema import RunConfig
from skyrl_train.observability.trackers.tracker import (
    PROJECT,
    Tracker,
    flat_config,
    kept_id,
    run_name,
    with_histograms,
)


class TrackioTracker(Tracker):
    """One Trackio run. Its name has an id, because Trackio resumes by name."""

    def __init__(self, folder: Path, config: RunConfig, resume_step: int) -> None:
        project = os.environ.get("TRACKIO_PROJECT") or PROJECT
        name = f"{run_name(folder)}-{kept_id(folder)[:6]}"
        self._run = trackio.init(
            project, name, config=flat_config(config), resume="allow", embed=False, auto_log_gpu=False,
            auto_log_cpu=False,
        )  # fmt: skip
        self.location = f"trackio show --project {project}"

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(with_histograms(metrics, trackio.Histogram), step)

    def log_samples(self, phase: str, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        self._run.log({f"samples/{phase}": trackio.Table(dataframe=pandas.DataFrame(rows))}, step)

    def log_report(self, path: Path) -> None:
        self._run.log_artifact(path, name=f"report-{self._run.name}", type="report")

    def close(self) -> None:
        self._run.finish()
