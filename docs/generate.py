"""Writes the references that are derived from code: ``python docs/generate.py``.

metrics.py ──declared()──> docs/reference/metrics.md
events/kinds.py ─────────> docs/reference/events.md
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from skyrl_train.events.kinds import COMMON, KINDS, SPANS, EventField
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


EVENTS = """# Events

`events/` in the run folder has one JSON object per line for everything that happens in a run: each group from its admission
to its training, each response with the policy version of each stretch of its tokens, each activity of the trainer. Pictures
of a run (timelines, reports, traces) read nothing else.

```python
from skyrl_train import load_run

events = load_run("runs/quickstart-1").events
events.counts  # number of events of each kind
events.frame("request")  # a table of one kind, with Unix times
events.segments()  # a row per stretch of tokens of one version
for event in events:  # all of them, as dicts, in the order in which they were recorded
    ...
```

`skyrl_train.events.reader.EventReader(folder).poll()` returns what was recorded since its last call: it follows a run that
trains now, from any machine that sees the folder.

## What holds

- **Segments.** `000001.jsonl`, `000002.jsonl`, ... are read in the order of their numbers. One is open; a segment of 4 MiB
  is closed, compressed (`000001.jsonl.zst`, plain zstd) and the next one begun. Each command begins a new one.
- **Kills.** Lines are written at least once a second. A killed process loses at most its last second, and may leave a torn
  last line, which readers skip. No event ever changes.
- **Resumes.** Steps that are lost with their weights stay in the record: after `resume` with `step` 40, the steps above 40
  come again. In frames, `attempt` counts `run` and `resume`.
- **Lines.** Each one begins with `{"kind":"<kind>",`, so that a reader can leave out kinds without parsing them.
- **Order.** Lines are in the order in which events were recorded: at the end of what they describe. A group that trains has
  `admitted` (or `restored`), `finished`, `buffered` and `trained`, in this order.
- **Times.** All times within an event are on the clock of its `m`, which never jumps; `t - m` of the same event makes Unix
  times of them. Frames have Unix times only.
- **Load.** Requests, environment calls and agents are limited to `trainer.max_events_per_s` (500). Beyond it, some groups
  have none of them, and the others have all. The life of groups is always recorded.
- **Loss.** A full disk or a full queue stops nothing. `lost` says how many events are missing, and of which groups; frames
  leave out requests, environment calls and agents of these groups.
- **Reading.** Unknown kinds and fields may come with later versions; a reader ignores them.

What is not recorded: environments and agents in rollout actors (`rollout.num_actors`), and requests on separate evaluation
engines (`trainer.eval.num_engines`). Calls of environments that take less than a millisecond are left out. An agent's tool
calls are its own code: they show as gaps between its requests. The scores, passes and optimizer of a step are one activity,
`update_policy`.

This file is generated: change `skyrl_train/events/kinds.py` and run `python docs/generate.py`.
"""


def events_reference() -> str:
    """Return the Markdown of the events reference: a section per kind, in the order of the declarations."""
    lines = [EVENTS, "## Every event\n", *_fields(COMMON)]
    for kind in KINDS.values():
        sampled = " Limited by `trainer.max_events_per_s`." if kind.sampled else ""
        meaning = kind.meaning[0].upper() + kind.meaning[1:]
        lines += [f"## {kind.name}\n", f"{meaning}.{sampled}\n", *_fields(kind.fields)]
        if kind.name == "span":
            rows = [f"| `{name}` | {meaning} |" for name, meaning in SPANS.items()]
            lines += ["Activities:\n", "| name | meaning |", "|---|---|", *rows, ""]
    return "\n".join(lines)


def _fields(fields: Sequence[EventField]) -> list[str]:
    cells = [(f"`{each.name}`", each.type, each.unit, each.meaning) for each in fields]
    rows = [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in cells]
    return ["| field | type | unit | meaning |", "|---|---|---|---|", *rows, ""]


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
    (REFERENCE / "events.md").write_text(events_reference(), encoding="utf-8")
