"""Writes the references that are derived from code: ``python docs/generate.py``.

metrics.py ──declared()──> docs/reference/metrics.md
"""

from __future__ import annotations

from pathlib import Path

from skyrl_train.observability.metrics import MetricSpec, declared

REFERENCE = Path(__file__).parent / "reference"
OPEN = {  # groups whose names depend on the run, with the placeholder of their last part
    "policy/lr/": "<pattern>",
    "staleness/histogram/": "<lag>",
    "staleness/in_flight_histogram/": "<lag>",
    "staleness/in_queue_histogram/": "<lag>",
    "off_policy/rejected_tokens/": "<rule>",
    "off_policy/rejected_sequences/": "<rule>",
}
INTRODUCTION = """# Metrics

`metrics.jsonl` in the run folder has one JSON object per step, and `load_run(path).metrics` is a table of them. Each row has

| key | unit | meaning |
|---|---|---|
| `step` | | number of the optimizer step, counted from 1 |
| `time` | s | end of the step, in Unix time |
| `elapsed_s` | s | training up to the end of the step, over all commands of the run, without start-up and repeated steps |
| `group_indices` | | positions in the training stream of the trained groups, in their order |
| `failed_group_indices` | | groups that failed for good since the previous step |
| `filtered_group_indices` | | groups that were filtered since the previous step |
| `dropped_group_indices` | | groups that the staleness policy dropped since the previous step |

and the metrics below, as far as the run has them. A number that is not finite is `null`. *Aggregation* says how several values
of a step (of its groups, for example) become one. A unit of *share* means a number in [0, 1]. Your own code declares a metric
with `skyrl_train.observability.metrics.declare()`; names under `environment/` need no declaration.

This file is generated: change `skyrl_train/observability/metrics.py` and run `python docs/generate.py`.
"""


def metrics_reference() -> str:
    """Return the Markdown of the metrics reference: a section per declared group, in the order of the declarations."""
    specs = declared()
    lines = [INTRODUCTION]
    for prefix, section in specs.items():
        if not prefix.endswith("/") or prefix in OPEN:
            continue
        rows = [spec for name, spec in specs.items() if name.startswith(prefix) and name != prefix]
        lines.append(f"## {prefix}\n\n{section.meaning}.\n")
        if rows:
            lines += ["| metric | unit | aggregation | meaning |", "|---|---|---|---|", *map(_row, rows), ""]
    return "\n".join(lines)


def _row(spec: MetricSpec) -> str:
    meaning = spec.meaning.replace("|", "\\|")  # in a table it would end the cell
    return f"| `{spec.name}{OPEN.get(spec.name, '')}` | {spec.unit} | {spec.aggregation} | {meaning} |"


if __name__ == "__main__":
    (REFERENCE / "metrics.md").write_text(metrics_reference(), encoding="utf-8")
