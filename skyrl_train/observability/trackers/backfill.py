"""Sends what the folder of a run has to a tracker, as the run itself would have done.

metrics.jsonl, eval.jsonl, samples/, report.html ──in the order of the steps──> Tracker
"""

from __future__ import annotations

from contextlib import ExitStack, suppress
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO, Self

from skyrl_train.observability.readers.samples import recorded_files, sample_rows
from skyrl_train.observability.run_folder import EVALUATIONS, METRICS, REPORT_HTML, parse_row
from skyrl_train.observability.trackers.tracker import SAMPLE_COLUMNS, Tracker, sample_table


def send_run(run: Path, tracker: Tracker) -> str:
    """Send all steps of the run to ``tracker``, and close it; return where to look.

    Lines that are torn and files that cannot be read are left out. Of a step that was repeated after a resume, the last line
    counts.
    """
    samples = recorded_files(run)
    with ExitStack() as stack:
        stack.callback(tracker.close)
        metrics, evaluations = (stack.enter_context(_Rows(run / name)) for name in (METRICS, EVALUATIONS))
        steps = {*metrics.places, *evaluations.places, *(step for _, step in samples)}
        for step in sorted(steps):
            # The policy of a version is evaluated before the step of this number is trained, and after the one before.
            for phase, rows in (("eval", evaluations), ("train", metrics)):
                if numbers := _numbers(rows.of(step)):
                    tracker.log(step, numbers)
                path = samples.get((phase, step))
                if path is not None and (shown := sample_rows(path, SAMPLE_COLUMNS)):
                    tracker.log_samples(phase, step, sample_table(shown))
        if (run / REPORT_HTML).is_file():
            tracker.log_report(run / REPORT_HTML)
    return tracker.location


class _Rows:
    """The rows of a file by their steps. A long run has gigabytes of them, so each is read when it is asked for.

    Attributes:
        places: of the last line of each step, in bytes.
    """

    def __init__(self, path: Path) -> None:
        self.places: dict[int, int] = {}
        self._file: BinaryIO = BytesIO()
        with suppress(OSError):
            self._file = path.open("rb")

    def __enter__(self) -> Self:
        place = 0
        for line in self._file:
            row = parse_row(line)
            if row is not None:
                self.places[row["step"]] = place
            place += len(line)
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def of(self, step: int) -> dict[str, Any]:
        """Return the row of a step; empty if there is none."""
        if step not in self.places:
            return {}
        self._file.seek(self.places[step])
        return parse_row(self._file.readline()) or {}


def _numbers(row: dict[str, Any]) -> dict[str, float]:
    """Return the metrics of a row: neither its step, version and times, nor lists and missing values."""
    other = ("step", "policy_version", "time", "elapsed_s")
    return {
        name: value
        for name, value in row.items()
        if name not in other and isinstance(value, int | float) and not isinstance(value, bool)
    }
