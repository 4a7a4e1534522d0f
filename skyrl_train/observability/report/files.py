"""The files of a report: ``report.html`` and ``report.md``.

run folder ──read_facts──> facts ──sections──> sections ──to_html, to_markdown──> files
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np

from skyrl_train.events.log import EVENTS
from skyrl_train.observability.metrics import known_spec
from skyrl_train.observability.readers.encoding import to_json
from skyrl_train.observability.readers.incidents import checkpoint_steps
from skyrl_train.observability.readers.series import MetricTable, curves
from skyrl_train.observability.readers.timeline import EventStore
from skyrl_train.observability.readers.verdict import RECORD_SEGMENTS
from skyrl_train.observability.report.facts import RunFacts, read_facts, typical_steps
from skyrl_train.observability.report.html import to_html
from skyrl_train.observability.report.markdown import to_markdown
from skyrl_train.observability.report.sections import sections
from skyrl_train.observability.run_folder import METRICS, REPORT_HTML, REPORT_MD, replace_file

logger = logging.getLogger(__name__)

# The metrics that the page's overview draws (WANTED in overview.js).
OVERVIEW = (
    "inference/generated_tokens_total", "reward/mean", "reward/p10", "reward/p90", "reward/min", "reward/max",
    "reward/zero_variance_groups", "time/", "async/idle_fraction", "staleness/histogram/",
    "staleness/in_flight_histogram/", "staleness/in_queue_histogram/", "staleness/mean", "staleness/max",
    "inference/tokens_per_second", "policy/tokens_per_second", "generate/response_tokens", "generate/response_tokens_p50",
    "generate/response_tokens_p90", "generate/response_tokens_max", "generate/truncated", "generate/latency_s_p50",
    "generate/latency_s_p99", "loss/entropy", "policy/grad_norm", "policy/kl_to_reference", "off_policy/ess", "off_policy/kl_k3",
    "policy/ratio_mean", "policy/clip_fraction", "off_policy/clipped_fraction", "loss/policy", "loss/value",
    "critic/explained_variance", "inference/running_requests", "inference/waiting_requests", "perf/mfu",
    "inference/busy_share", "inference/down_share",
    "system/gpu_utilization", "system/gpu_memory_share",
)  # fmt: skip
POINTS = 1024  # of a curve; fewer if the curves would be larger than
CURVE_BYTES = 300_000
TIMELINE_BYTES = 250_000


def write_report(run: Path, folder: Path | None = None) -> Path:
    """Write the report of ``run`` into ``folder`` (None: the run folder itself), and return the path of the HTML file.

    Raises:
        SkyRLError: the files cannot be written.
    """
    table, store = MetricTable(run / METRICS), EventStore(run / EVENTS)
    facts = read_facts(run, table.columns(), store)
    found = sections(facts)
    title = f"Report of {facts.row['title']}"
    path = (folder or run) / REPORT_HTML
    answers = {
        "metrics .": decimated(table, OVERVIEW, CURVE_BYTES),
        # All that the overview draws of them.
        "evaluations .": [{name: row.get(name) for name in ("step", "eval/reward")} for row in facts.evaluations],
        "checkpoints .": checkpoint_steps(store, RECORD_SEGMENTS),
        "timeline .": _timeline(facts, store),
    }
    metrics = [{"name": name, "unit": known_spec(name).unit, "meaning": ""} for name in OVERVIEW]
    info = {"mode": facts.row["mode"], "state": facts.row["state"], "bound": facts.bound, "metrics": metrics}
    pictures: dict[str, dict[str, Any]] = {"overview": {"run": ".", "info": info}, "timeline": {"run": "."}}
    replace_file(path.with_name(REPORT_MD), to_markdown(title, found))
    replace_file(path, to_html(title, found, pictures, answers))
    return path


def try_to_write_report(run: Path) -> None:
    """Write the report at the end of a run. A failure, or Ctrl-C, is logged; it never fails the run."""
    try:
        write_report(run)
    except KeyboardInterrupt:
        logger.warning("interrupted while the report was written; `skyrl-train report` writes it")
    except Exception:  # the report is a help; the run folder has all that it says
        logger.exception("the report of %s cannot be written", run)


def decimated(table: MetricTable, wanted: tuple[str, ...], limit: int) -> dict[str, Any]:
    """Return :func:`curves` with five digits per number, in as many points as fit into ``limit`` bytes of JSON."""
    points = POINTS
    while True:
        answer = curves(table, wanted, points=points)
        for part in ("mean", "min", "max"):
            answer[part] = {name: _rounded(values) for name, values in answer[part].items()}
        answer |= {"time": None, "elapsed_s": None if answer["elapsed_s"] is None else _rounded(answer["elapsed_s"])}
        if points <= 32 or len(to_json(answer)) <= limit:
            return answer
        points //= 2


def _rounded(values: np.ndarray) -> list[float]:
    return [float(f"{value:.5g}") for value in values.tolist()]


def _timeline(facts: RunFacts, store: EventStore) -> dict[str, Any] | None:
    """Return the window of the three typical steps; of many groups, as many of the first ones as fit. None: nothing to draw."""
    times = typical_steps(facts.columns)
    window = None if times is None else store.window(*times)
    if window is None or not (window["spans"] or window["groups"]):
        return None
    window = {name: _to_tenths_of_ms(value) for name, value in window.items()}
    while len(to_json(window)) > TIMELINE_BYTES and window["groups"]:
        window["groups"] = window["groups"][: len(window["groups"]) // 2]
    return window


def _to_tenths_of_ms(value: Any) -> Any:
    """Return a window with its times rounded: their digits are most of its size."""
    match value:
        case dict():
            return {key: _to_tenths_of_ms(inner) for key, inner in value.items()}
        case list():
            return [_to_tenths_of_ms(inner) for inner in value]
        case float():
            return round(value, 4)
        case _:
            return value
