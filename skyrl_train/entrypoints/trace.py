"""``skyrl-train trace``: some steps of a run as a trace for Perfetto. It only reads the run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from skyrl_train.errors import ConfigError

LAST_STEPS = 10


def trace(
    run: Annotated[Path, typer.Argument(help="A run, or a folder of runs: the one written last.")] = Path("runs"),
    steps: Annotated[str, typer.Option(help="From and to, as 100:110, 100: or :10; by default the last 10.")] = "",
    output: Annotated[Path, typer.Option(help="The file.")] = Path("trace.json.gz"),
) -> int:
    """Write a trace of trainer, groups, engines and actors, which https://ui.perfetto.dev opens."""
    import gzip
    import math

    import numpy as np
    from rich.console import Console

    from skyrl_train.events.log import EVENTS
    from skyrl_train.observability.readers.encoding import to_json
    from skyrl_train.observability.readers.folders import RunsFolder
    from skyrl_train.observability.readers.series import MetricTable
    from skyrl_train.observability.readers.timeline import EventStore
    from skyrl_train.observability.run_folder import METRICS
    from skyrl_train.observability.trace import trace_events

    runs = RunsFolder(run)
    path = runs.path(runs.newest())
    columns = MetricTable(path / METRICS).columns()
    numbers = columns.get("step", np.empty(0))
    match = re.fullmatch(r"(\d*):(\d*)", steps) if steps else None
    if steps and match is None:
        raise ConfigError(f"--steps {steps!r} is no range of steps, as 100:110.")
    if match is not None:
        inside = (numbers >= int(match[1] or 0)) & (numbers <= int(match[2] or 10**9))
    else:
        inside = np.arange(len(numbers)) >= len(numbers) - LAST_STEPS
    t0, t1 = -math.inf, math.inf  # of a run without a finished step, the whole record
    if len(numbers):
        if not inside.any():
            raise ConfigError(f"The run has steps {numbers[0]:.0f} to {numbers[-1]:.0f}, none of {steps}.")
        unknown = np.full(len(numbers), np.nan)
        ends, seconds = (columns.get(name, unknown)[inside] for name in ("time", "time/step"))
        if not np.isfinite(ends - seconds).any():
            raise ConfigError("The metrics of these steps have no times; a version without a record wrote them.")
        t0, t1 = float(np.nanmin(ends - seconds)), float(np.nanmax(ends))
    events = trace_events(EventStore(path / EVENTS).segments(t0, t1), t0, t1)
    if not events:
        raise ConfigError(f"{path / EVENTS} has no events of these steps.")
    try:
        output.write_bytes(gzip.compress(to_json({"traceEvents": events, "displayTimeUnit": "ms"}), 6))
    except OSError as error:
        raise ConfigError(f"{output} cannot be written: {error.strerror}. Name another file with --output.") from error
    text = f"{output}: {len(events)} events. Open it in https://ui.perfetto.dev (it stays on this machine)."
    Console().print(text, markup=False, highlight=False, soft_wrap=True)
    return 0
