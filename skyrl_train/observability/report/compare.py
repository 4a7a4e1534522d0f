"""Runs side by side: figures at equal steps, time and tokens, and the settings that differ, as data and as one HTML file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skyrl_train.observability.readers.comparison import AXES, best_run, compared
from skyrl_train.observability.readers.folders import RunsFolder, read_settings
from skyrl_train.observability.readers.series import MetricTable
from skyrl_train.observability.readers.settings import differing_settings
from skyrl_train.observability.report.files import decimated
from skyrl_train.observability.report.html import to_html
from skyrl_train.observability.report.sections import Picture, Section
from skyrl_train.observability.run_folder import CONFIG, METRICS

# The metrics that the page's comparison draws (NAMES in compare.js).
CURVES = (
    "inference/generated_tokens_total", "reward/mean", "loss/entropy", "time/step", "async/idle_fraction", "staleness/mean",
    "generate/response_tokens", "policy/grad_norm", "generate/truncated",
)  # fmt: skip
CURVE_BYTES = 600_000  # of all runs


@dataclass(frozen=True)
class RunComparison:
    """Runs at equal budgets.

    Attributes:
        names: of the folders; paths where two folders have the same name.
        at: by axis ("step", "elapsed", "tokens"), see :func:`compared`.
        settings: see :func:`differing_settings`.
        tables: the metrics of each run.
    """

    names: list[str]
    at: dict[str, dict[str, Any]]
    settings: list[dict[str, Any]]
    tables: list[MetricTable]


def compare_runs(paths: Sequence[Path]) -> RunComparison:
    """Compare the runs in these folders, which may be unfinished, damaged, or of other versions."""
    titles = [RunsFolder(path).root.name for path in paths]
    count = Counter(titles)
    tables = [MetricTable(path / METRICS) for path in paths]
    columns = [table.columns() for table in tables]
    return RunComparison(
        names=[title if count[title] == 1 else str(path) for title, path in zip(titles, paths, strict=True)],
        at={axis: compared(columns, axis) for axis in AXES},
        settings=differing_settings([read_settings(path / CONFIG) for path in paths]),
        tables=tables,
    )


def comparison_html(comparison: RunComparison, axis: str = "step") -> str:
    """Return one HTML file with what the page shows of these runs. It opens on ``axis``: "step", "elapsed" or "tokens"."""
    rows = [{"title": name} for name in comparison.names]
    limit = CURVE_BYTES // max(1, len(rows))
    answers = {
        f"compare {name}": {
            "runs": rows,
            "at": at,
            "said": best_run(comparison.names, at, name),
            "settings": comparison.settings,
        }
        for name, at in comparison.at.items()
    } | {f"metrics {index}": decimated(table, CURVES, limit) for index, table in enumerate(comparison.tables)}
    properties = {"runs": [str(index) for index in range(len(rows))], "opens": axis}
    sections = [Section("", [Picture("comparison")])]
    return to_html(f"Comparison of {len(rows)} runs", sections, {"comparison": properties}, answers)
