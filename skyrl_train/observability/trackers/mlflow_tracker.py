"""MLflow. Without ``MLFLOW_TRACKING_URI``, the run is written to ``<run>/logs/mlflow``."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mlflow import MlflowClient
from mlflow.entities import Metric, Param

from skyrl_train.config.schema import RunConfig
from skyrl_train.observability.trackers.tracker import PROJECT, Tracker, flat_config, kept_id, run_name

_CALL = 100  # parameters in one call, which is MLflow's limit
_MAX_NAME, _MAX_VALUE = 250, 6000  # characters


class MlflowTracker(Tracker):
    """One MLflow run, without MLflow's global state. A step that is repeated after a resume has two values."""

    def __init__(self, folder: Path, config: RunConfig, resume_step: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        uri = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{folder.resolve() / 'mlflow.db'}"
        self._client = MlflowClient(uri)
        self._run_id = kept_id(folder, lambda: self._create(folder, config))
        self._client.update_run(self._run_id, status="RUNNING")
        self.location = uri

    def _create(self, folder: Path, config: RunConfig) -> str:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or PROJECT
        artifacts = None if os.environ.get("MLFLOW_TRACKING_URI") else (folder.resolve() / "artifacts").as_uri()
        known = self._client.get_experiment_by_name(name)
        experiment = known.experiment_id if known else self._client.create_experiment(name, artifacts)
        run_id = str(self._client.create_run(experiment, run_name=run_name(folder)).info.run_id)
        params = [Param(_name(key), str(value)[:_MAX_VALUE]) for key, value in flat_config(config).items()]
        for first in range(0, len(params), _CALL):
            self._client.log_batch(run_id, params=params[first : first + _CALL])
        return run_id

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        self._client.log_batch(self._run_id, [Metric(_name(name), value, now, step) for name, value in metrics.items()])

    def log_samples(self, phase: str, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        self._client.log_dict(self._run_id, {"rows": list(rows)}, f"samples/{phase}_{step:06}.json")

    def log_report(self, path: Path) -> None:
        self._client.log_artifact(self._run_id, str(path))

    def close(self) -> None:
        self._client.set_terminated(self._run_id)


def _name(name: str) -> str:
    """Return a name that MLflow takes: of certain characters, not too long, and a path that is no other path's name."""
    parts = re.sub(r"[^\w\-. :/]", "_", name.replace("@", "_at_")).split("/")
    return "/".join(part for part in parts if part not in ("", ".", ".."))[:_MAX_NAME].rstrip("/") or "_"
