"""SwanLab. Without a key, the run is written to ``<run>/logs/swanlab`` for ``swanlab sync``."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import swanlab

from skyrl_train.config.schema import RunConfig
from skyrl_train.observability.trackers.tracker import PROJECT, Tracker, flat_config, kept_id, run_name


class SwanlabTracker(Tracker):
    """One SwanLab experiment."""

    def __init__(self, folder: Path, config: RunConfig, resume_step: int) -> None:
        mode = os.environ.get("SWANLAB_MODE") or ("online" if swanlab.Settings().api_key else "offline")
        self._run = swanlab.init(
            project=os.environ.get("SWANLAB_PROJECT") or PROJECT, name=run_name(folder), id=kept_id(folder),
            resume="allow", mode=mode, log_dir=str(folder), config=flat_config(config),
        )  # fmt: skip
        offline = f"offline; send it with: swanlab sync {self._run.dir}"
        self.location = self._run.url if mode == "online" else offline

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def log_samples(self, phase: str, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        texts = [f"{row['prompt']}\n──\n{row['response']}" for row in rows]
        captions = [f"group {row['group_index']}, reward {row['reward']:g}, lag {row['lag']}" for row in rows]
        self._run.log_text(key=f"samples/{phase}", data=texts, caption=captions, step=step)

    def log_report(self, path: Path) -> None:
        self._run.save(path, base_path=path.parent, policy="now")

    def close(self) -> None:
        self._run.finish()
