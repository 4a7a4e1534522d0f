"""Sends what the folder of a run has to a tracker, as the run itself would have done.

metrics.jsonl, eval.jsonl, samples/, report.html ──in the order of the steps──> Tracker
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from skyrl_train.observability.readers.samples import recorded_files, sample_rows
from skyrl_train.observability.run_folder import EVALUATIONS, METRICS, REPORT_HTML, parse_row
from skyrl_train.observability.trackers.tracker import SAMPLE_COLUMNS, Tracker, sample_table


def send_run(run: Path, tracker: Tracker) -> str:
    """Send all steps of the run to ``tracker``, and close it; return where to look.

    Lines that are torn and files that cannot be read are left out. Of a step that was repeated after a resume, the last line
    counts.
    """
    samples = recorded_files(run)
    metrics, evaluations = _rows(run / METRICS), _rows(run / EVALUATIONS)
    steps = {*metrics, *evaluations, *(step for _, step in samples)}
    try:
        for step in sorted(steps):
            # The policy of a version is evaluated before the step of this number is trained, and after the one before.
            for phase, rows in (("eval", evaluations), ("train", metrics)):
                if numbers := _numbers(rows.get(step, {})):
                    tracker.log(step, numbers)
                path = samples.get((phase, step))
                if path is not None and (shown := sample_rows(path, SAMPLE_COLUMNS)):
                    tracker.log_samples(phase, step, sample_table(shown))
        if (run / REPORT_HTML).is_file():
            tracker.log_report(run / REPORT_HTML)
    finally:
        tracker.close()
    return tracker.location


def _rows(path: Path) -> dict[int, dict[str, Any]]:
    try:
        with path.open("rb") as file:
            return {row["step"]: row for line in file if (row := parse_row(line)) is not None}
    except OSError:
        return {}


def _numbers(row: dict[str, Any]) -> dict[str, float]:
    """Return the metrics of a row: neither its step and times, nor lists and missing values."""
    other = ("step", "time", "elapsed_s")
    return {
        name: value
        for name, value in row.items()
        if name not in other and isinstance(value, int | float) and not isinstance(value, bool)
    }
