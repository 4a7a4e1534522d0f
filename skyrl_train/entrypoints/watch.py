"""``skyrl-train watch``: the terminal panel of any run. It only reads; runs that train, have ended, or were copied look alike."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

POLL_S = 0.5
CURVE_STEPS = 200  # of the past, spread over it, that are read for the curve of rewards


def watch(
    run: Annotated[Path, typer.Argument(help="A run, or a folder of runs: the one written last.")] = Path("runs"),
    once: Annotated[bool, typer.Option("--once", help="Show the present state and leave.")] = False,
) -> int:
    """Show the panel of a run until the run ends, or Ctrl-C, which does not disturb the run."""
    from rich.console import Console

    from skyrl_train.events.log import EVENTS
    from skyrl_train.observability.readers.folders import RunsFolder, fingerprint, read_settings, spread_rows
    from skyrl_train.observability.readers.incidents import run_advice
    from skyrl_train.observability.readers.series import MetricTable
    from skyrl_train.observability.readers.timeline import EventStore
    from skyrl_train.observability.reporter import step_report
    from skyrl_train.observability.run_folder import CONFIG, EVALUATIONS, METRICS
    from skyrl_train.observability.screen import Failures, make_view, visible

    runs = RunsFolder(run)
    name = runs.newest()
    header = runs.row(name)
    settings = read_settings(runs.file(name, CONFIG))
    table, store = MetricTable(runs.file(name, METRICS)), EventStore(runs.file(name, EVENTS))
    match settings:
        case {"trainer": {"failures": {"max_failed_rollouts": int(allowed)}}}:
            pass
        case _:
            allowed = 0
    rows = spread_rows(runs.file(name, METRICS), CURVE_STEPS)
    console, title = Console(), visible(f"{run if name == '.' else run / name} ({header['mode']})")
    elapsed_s, read_at = 0.0, time.monotonic()
    view = make_view(
        console,
        header["total_steps"] if isinstance(header["total_steps"], int) else header["step"],
        title,
        # The seconds of training up to the newest step, and those since this command read of it.
        clock=lambda: elapsed_s + (time.monotonic() - read_at) * (header["state"] == "live"),
        rewards=[reward for row in rows[:-1] if (reward := finite(row).get("reward/mean")) is not None],
    )
    step, in_flight, failures = 0, 0, Failures()
    seen: dict[str, str] = {}
    with closing(view), suppress(KeyboardInterrupt):
        while True:
            if seen != (parts := fingerprint(runs.path(name))):
                seen = parts
                newest = spread_rows(runs.file(name, METRICS), 1)
                if newest and newest[-1]["step"] != step:
                    # A figure that this step lacks, or that its version of the library did not write, is 0.
                    numbers = defaultdict(float, finite(newest[-1]))
                    step, read_at, elapsed_s = newest[-1]["step"], time.monotonic(), numbers["elapsed_s"]
                    in_flight = int(numbers["async/in_flight"])
                    failures = Failures(int(numbers["async/failed"]), allowed, int(numbers["async/retries"]))
                    saved = None
                    with suppress(OSError, ValueError):
                        latest = runs.file(name, "checkpoints", "latest").read_text(encoding="utf-8")
                        saved = int(latest.strip().removeprefix("global_step_"))
                    evaluated = [
                        f"version {row.get('policy_version')}: "
                        + ", ".join(
                            f"{key.removeprefix('eval/')} {value:.3f}"
                            for key, value in finite(row).items()
                            if "pass@" in key
                        )
                        for row in spread_rows(runs.file(name, EVALUATIONS), 1)[-1:]
                    ]
                    report = step_report(step, numbers, saved, failures)
                    advice = run_advice(table.columns(), store, settings)
                    view.update(replace(report, evaluation="".join(evaluated), advice=advice))
            view.waiting(in_flight, failures)
            header = runs.row(name)
            if once or header["state"] not in ("live", "silent"):
                break
            time.sleep(POLL_S)
    console.print(f"{title}: {header['state']}, step {header['step']}", markup=False, highlight=False, soft_wrap=True)
    return 0


def finite(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the finite numbers of a row."""
    from skyrl_train.observability.metrics import is_finite_number

    return {key: value for key, value in row.items() if is_finite_number(value)}
