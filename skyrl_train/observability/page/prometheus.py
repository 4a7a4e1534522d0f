"""Metrics of runs for Prometheus: the newest row of each run, its state, and its engines."""

from __future__ import annotations

import math
import re
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeGuard

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from skyrl_train.errors import NoSuchRunError
from skyrl_train.events.log import encodable
from skyrl_train.observability.metrics import known_spec
from skyrl_train.observability.readers.folders import RunsFolder, last_rows, last_write, read_settings
from skyrl_train.observability.readers.settings import setting_of
from skyrl_train.observability.readers.timeline import EventStore
from skyrl_train.observability.run_folder import CONFIG, EVALUATIONS, METRICS
from skyrl_train.observability.trackers.tracker import split_histograms

PREFIX = "skyrl_train_"
EXPORTED_S = 86_400.0  # runs that have written nothing for longer are left out
MAX_RUNS = 50
MEDIAN_STEPS = 50
_NOT_METRICS = ("step", "time", "elapsed_s", "policy_version")
_ENGINE = {
    "engine_policy_version": "Policy version that an engine holds",
    "engine_running_requests": "Requests that an engine samples",
    "engine_waiting_requests": "Requests that wait in an engine",
    "engine_tokens_per_second": "Tokens that an engine samples per second",
    "engine_kv_cache_usage": "Share of an engine's KV cache that requests hold",
}


class _Families(dict[str, Metric], Collector):
    """Metrics by name. A family has a sample per run, and per engine or value."""

    def __init__(self) -> None:
        super().__init__()
        self._series: set[tuple[str, frozenset[tuple[str, str]]]] = set()

    def collect(self) -> Iterable[Metric]:
        return self.values()

    def add(self, name: str, meaning: str, number: float, labels: Mapping[str, str]) -> None:
        labels, meaning = encodable(labels), encodable(meaning)
        name = PREFIX + re.sub(r"\W", "_", name, flags=re.ASCII)
        if name not in self:
            self[name] = (CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily)(name, meaning)
        # Two names may become one here, and Prometheus refuses a page that has a series twice.
        series = name, frozenset(labels.items())
        if series not in self._series:
            self._series.add(series)
            self[name].add_sample(name, dict(labels), float(number))


def exposition(runs: RunsFolder, store_of: Callable[[str], EventStore]) -> bytes:
    """Return the metrics of all runs below a folder in Prometheus's text format.

    Args:
        store_of: returns the reader of a run's events by the run's name.
    """
    families = _Families()
    for name in runs.names()[:MAX_RUNS]:
        try:
            if time.time() - last_write(runs.path(name)) > EXPORTED_S:
                break  # the names come in the order of their last writes
            _add_run(families, runs, name, store_of(name))
        except (NoSuchRunError, OSError):  # removed meanwhile
            continue
    return generate_latest(families)


def _add_run(families: _Families, runs: RunsFolder, name: str, store: EventStore) -> None:
    row, last = runs.row(name), last_rows(runs.file(name, METRICS), MEDIAN_STEPS)
    run = {"run": row["title"]}
    families.add("run_info", "1 for a run in its state", 1, {**run, "state": row["state"], "mode": row["mode"]})
    bound = setting_of(read_settings(runs.file(name, CONFIG)), "trainer.fully_async.max_staleness_steps")
    steps_s = [value for each in last if _is_number(value := each.get("time/step"))]
    for metric, meaning, value in (
        ("step", "Optimizer steps that are finished", row["step"]),
        ("total_steps", "Optimizer steps of the whole run", row["total_steps"]),
        ("elapsed_seconds", "Training time over all commands of the run", row["elapsed_s"]),
        ("max_staleness_steps", "Bound on the lag of a group, in steps", bound),
        (
            "last_step_timestamp_seconds",
            "Unix time at which the last step ended",
            last[-1].get("time") if last else None,
        ),
        (
            "median_step_seconds",
            f"Median duration of the last {MEDIAN_STEPS} steps",
            statistics.median(steps_s) if steps_s else None,
        ),
    ):
        if _is_number(value):
            families.add(metric, meaning, value, run)

    for newest in (*last[-1:], *last_rows(runs.file(name, EVALUATIONS), 1)):
        # null stands for what is not finite.
        numbers = {
            key: math.nan if value is None else value
            for key, value in newest.items()
            if key not in _NOT_METRICS and (value is None or _is_number(value))
        }
        scalars, histograms = split_histograms(numbers)
        for key, number in scalars.items():
            families.add(key, _help(key), number, run)
        for key, (counts, _) in histograms.items():
            for value, count in enumerate(counts):
                groups = key.removesuffix("histogram") + "groups"
                families.add(groups, _help(f"{key}/"), count, {**run, "value": str(value)})

    # The engines of a command that has ended are gone.
    engines = store.engines() if row["state"] == "live" else None
    for engine, points in (engines or {}).items():
        _, state, version, running, waiting, _, speed, kv_cache = points[-1]
        of_engine = {**run, "engine": str(engine)}
        families.add("engine_info", "1 for an engine in its state", 1, {**of_engine, "state": state})
        for (metric, meaning), number in zip(
            _ENGINE.items(), (version, running, waiting, speed, kv_cache), strict=True
        ):
            if number is not None:
                families.add(metric, meaning, number, of_engine)


def _is_number(value: Any) -> TypeGuard[float]:
    """Return whether a value of a file, possibly of another version, is a number that a float can hold."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300


def _help(name: str) -> str:
    spec = known_spec(name)
    return f"{spec.meaning} ({spec.unit})" if spec.unit else spec.meaning or name
