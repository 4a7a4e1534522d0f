"""What the panel of a run shows, read from the folder of the run."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from skyrl_train.events.log import EVENTS
from skyrl_train.observability.metrics import is_finite_number
from skyrl_train.observability.readers.folders import RunsFolder, fingerprint, read_settings, spread_rows
from skyrl_train.observability.readers.incidents import run_advice
from skyrl_train.observability.readers.series import MetricTable
from skyrl_train.observability.readers.timeline import EventStore
from skyrl_train.observability.reporter import step_report
from skyrl_train.observability.run_folder import CONFIG, EVALUATIONS, METRICS
from skyrl_train.observability.screen import Failures, StepReport, age, visible

START_UP_SEGMENTS = 1  # newest ones of the record; a command begins a new one
CURVE_STEPS = 200  # of the past, spread over it, that are read for the curve of rewards


class WatchedRun:
    """A run that trains, has ended, or was copied. It is only read.

    Args:
        root: a run, or a folder of runs: the one written last.

    Attributes:
        path: the folder of the run.
        title: the run and its mode.
        settings: of its ``config.yaml``.
        store: its record.
        rewards: the mean rewards of earlier steps by step, some of them if there are many.
        in_flight, oldest_s: groups in generation after the newest step, and the age of the oldest one then (NaN: unknown).
        failures: up to the newest step.
        start_up: lines about the start of the last command, while it has not finished a step.
        parts: the fingerprints of its files at the last look.
    """

    def __init__(self, root: Path) -> None:
        self._runs = RunsFolder(root)
        self._name = self._runs.newest()
        self.path = self._runs.path(self._name)
        self.header = self._runs.row(self._name)
        self.settings = read_settings(self._runs.file(self._name, CONFIG))
        self.store = EventStore(self._runs.file(self._name, EVENTS))
        self._table = MetricTable(self._runs.file(self._name, METRICS))
        match self.settings:
            case {"trainer": {"failures": {"max_failed_rollouts": int(allowed)}}}:
                self._allowed = allowed
            case _:
                self._allowed = 0
        rows = spread_rows(self._runs.file(self._name, METRICS), CURVE_STEPS)
        self.rewards = {
            row["step"]: reward for row in rows[:-1] if (reward := _finite(row).get("reward/mean")) is not None
        }
        self.title = visible(f"{root if self._name == '.' else root / self._name} ({self.header['mode']})")
        self.in_flight, self.oldest_s, self.failures = 0, math.nan, Failures()
        self.start_up: list[str] = []
        self._starting = True  # or nobody has looked whether the last command has finished a step
        self._step, self._elapsed_s, self._read_at = 0, 0.0, time.monotonic()
        self.parts: dict[str, str] = {}

    @property
    def total_steps(self) -> int:
        """The steps of the whole run; those until now if the run does not say."""
        total = self.header["total_steps"]
        return total if isinstance(total, int) else int(self.header["step"])

    @property
    def has_ended(self) -> bool:
        """Whether nothing is to be expected any more."""
        return self.header["state"] not in ("live", "silent")

    def elapsed_s(self) -> float:
        """Return the seconds of training up to the newest step, and those since this object read of it."""
        return self._elapsed_s + (time.monotonic() - self._read_at if self.header["state"] == "live" else 0.0)

    def poll(self) -> StepReport | None:
        """Read what is new. Returns the newest step if it was not there at the last call."""
        self._starting |= self.header["state"] != "live"  # another command may have begun since
        self.header = self._runs.row(self._name)
        if self.parts == (parts := fingerprint(self.path)):
            return None
        self.parts = parts
        newest = spread_rows(self._runs.file(self._name, METRICS), 1)
        if self._starting:
            self._read_start_up(newest[-1].get("time") if newest else None)
        if not newest or newest[-1]["step"] == self._step:
            return None
        # A figure that this step lacks, or that its version of the library did not write, is 0.
        numbers = defaultdict(float, _finite(newest[-1]))
        self._step, self._read_at, self._elapsed_s = newest[-1]["step"], time.monotonic(), numbers["elapsed_s"]
        self.in_flight, self.oldest_s = (
            int(numbers["async/in_flight"]),
            numbers.get("generate/latency_s_oldest", math.nan),
        )
        self.failures = Failures(int(numbers["async/failed"]), self._allowed, int(numbers["async/retries"]))
        saved = None
        with suppress(OSError, ValueError):
            latest = self._runs.file(self._name, "checkpoints", "latest").read_text(encoding="utf-8")
            saved = int(latest.strip().removeprefix("global_step_"))
        evaluated = [
            f"version {row.get('policy_version')}: "
            + ", ".join(
                f"{key.removeprefix('eval/')} {value:.3f}" for key, value in _finite(row).items() if "pass@" in key
            )
            for row in spread_rows(self._runs.file(self._name, EVALUATIONS), 1)[-1:]
        ]
        report = step_report(self._step, numbers, saved, self.failures)
        advice = run_advice(self._table.columns(), self.store, self.settings)
        return replace(report, evaluation=visible("".join(evaluated)), advice=advice)

    def _read_start_up(self, newest_at: Any) -> None:
        """Read the parts of the start of the last command, unless it has finished a step since.

        Args:
            newest_at: Unix time of the newest step; None: there is none.
        """
        events = self.store.rare(START_UP_SEGMENTS) or []
        begins = [place for place, event in enumerate(events) if event["kind"] == "process"]
        own = events[begins[-1] :] if begins else []
        self._starting = not is_finite_number(newest_at) or (bool(own) and newest_at < own[0]["at"])
        parts = {event["name"]: event for event in own if event["kind"] == "start_up" and self._starting}
        self.start_up = [
            visible(f"  {name}: {'...' if event['t1'] is None else age(event['t1'] - event['t0'])}")
            for name, event in parts.items()
        ]


def _finite(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the finite numbers of a row."""
    return {key: value for key, value in row.items() if is_finite_number(value)}
