"""Weights & Biases. Without a key or a network at the start, the run is written to ``<run>/logs/wandb`` for ``wandb sync``."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import wandb

from skyrl_train.config.schema import RunConfig
from skyrl_train.observability.trackers.tracker import (
    PROJECT,
    Tracker,
    flat_config,
    kept_id,
    run_name,
    with_histograms,
)


class WandbTracker(Tracker):
    """One W&B run. The x axis is the metric ``step``: W&B's own counter cannot go back after a resume."""

    def __init__(self, folder: Path, config: RunConfig, resume_step: int) -> None:
        identifier = kept_id(folder)
        mode: Any = os.environ.get("WANDB_MODE") or ("online" if _logged_in() else "offline")
        # Its signal handlers and its copy of the terminal would disturb the run's own.
        settings = wandb.Settings(console="off", silent=True, finish_timeout=30.0)
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT") or PROJECT, name=run_name(folder), id=identifier, dir=folder,
            mode=mode, resume="allow" if mode == "online" else None, config=flat_config(config), settings=settings,
        )  # fmt: skip
        self._run.define_metric("*", step_metric="step")
        # The folder of all its parts: each command that resumes the run begins another one.
        offline = f"offline; send it with: wandb sync {shlex.quote(str(Path(self._run.dir).parents[1]))}"
        self.location = offline if self._run.offline else self._run.url

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({"step": step, **with_histograms(metrics, wandb.Histogram)})

    def log_samples(self, phase: str, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        table = wandb.Table(columns=list(rows[0]), data=[list(row.values()) for row in rows])
        self._run.log({f"samples/{phase}": table, "step": step})

    def log_report(self, path: Path) -> None:
        artifact = wandb.Artifact(f"report-{self._run.id}", type="report")
        artifact.add_file(str(path))
        self._run.log_artifact(artifact)

    def close(self) -> None:
        self._run.finish()


def _logged_in() -> bool:
    try:
        return bool(wandb.login(prompt=False))
    except (wandb.Error, OSError):  # a wrong key, or no network
        return False
