"""The sections of a report, in their order, as blocks that HTML and Markdown both can show."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from skyrl_train.observability.metrics import is_finite_number, known_spec
from skyrl_train.observability.readers.samples import excerpt
from skyrl_train.observability.report.facts import RunFacts, repeat_command, typical_steps
from skyrl_train.observability.screen import BLOCKS, averaged, duration, sparkline

CURVE_WIDTH, CURVE_HEIGHT = 72, 8  # characters of the text curve of the reward
SPARK_WIDTH, BAR_WIDTH = 24, 30
TEXT_LENGTH = 1200  # characters of a sample's prompt and of its response
MAX_ROWS = 40  # of a table
MAX_TEXT = 400  # characters of a reason, a warning or a setting


@dataclass(frozen=True)
class Paragraph:
    """A paragraph. ``strong``: it carries the section."""

    text: str
    strong: bool = False


@dataclass(frozen=True)
class TextTable:
    """A table. ``numbers``: columns that are aligned to the right; ``code``: columns in a fixed-width font."""

    headers: Sequence[str]
    rows: Sequence[Sequence[str]]
    numbers: frozenset[int] = frozenset()
    code: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Preformatted:
    """A text whose line breaks count."""

    text: str


@dataclass(frozen=True)
class Picture:
    """A picture that the page's scripts draw; ``text`` stands for it where there are none (empty: nothing does)."""

    name: str
    text: str = ""


Block = Paragraph | TextTable | Preformatted | Picture


@dataclass(frozen=True)
class Section:
    """A heading with what follows it."""

    title: str
    blocks: list[Block] = field(default_factory=list)


def sections(facts: RunFacts) -> list[Section]:
    """Return the sections of the report."""
    row, columns = facts.row, facts.columns
    summary = [
        row["state"],
        row["mode"],
        f"step {row['step']}" + (f" of {row['total_steps']}" if row["total_steps"] else ""),
        f"trained for {duration(float(columns['elapsed_s'][-1]))}" if "elapsed_s" in columns else "",
        f"{number(row['tokens'])} tokens sampled" if row["tokens"] is not None else "",
        f"began {moment(float(columns['time'][0]))}" if "time" in columns else "",
    ]
    found = [
        Section(
            "",
            [
                *(Paragraph(sentence, strong=True) for sentence in facts.verdict),
                Paragraph(" · ".join(part for part in summary if part)),
            ],
        )
    ]
    if facts.advice:
        advice = [[each.level, each.finding, each.action, each.docs] for each in facts.advice]
        table = TextTable(("", "found in the last steps", "what to do", "more"), advice, code=frozenset({3}))
        found.append(Section("Advice", [table]))
    if not facts.figures:
        found.append(Section("Curves", [Paragraph("No step has ended.")]))
    else:
        found += [_curves(facts), *_waits(facts)]
    return [*found, *_evaluations(facts), *_samples(facts), _failures(facts), *_steps(facts), *_run(facts)]


def _curves(facts: RunFacts) -> Section:
    rewards = next((figure.values for figure in facts.figures if figure.name == "reward/mean"), np.empty(0))
    rows = [
        [
            figure.name,
            *(
                shown(value, known_spec(figure.name).unit)
                for value in (figure.first, figure.last, figure.low, figure.high)
            ),
            sparkline(figure.values.tolist(), SPARK_WIDTH),
        ]
        for figure in facts.figures
    ]
    table = TextTable(
        ("metric", "first tenth", "last tenth", "min", "max", "curve"), rows, frozenset(range(1, 5)), frozenset({0, 5})
    )
    curve = text_curve(rewards.tolist(), CURVE_WIDTH, CURVE_HEIGHT)
    return Section("Curves", [Picture("overview", f"reward by step\n{curve}" if curve else ""), table])


def _waits(facts: RunFacts) -> list[Section]:
    found = []
    if facts.shares:
        rest = max(0.0, 1.0 - sum(facts.shares.values()))
        shares = {f"trainer: {part}": share for part, share in (facts.shares | {"everything else": rest}).items()}
        if facts.idle is not None:
            shares["generation slots: idle"] = facts.idle
        found.append(Section("Who waited", [_bars("part", "share of the time", shares)]))
    if facts.lags:
        text = "Trained groups by lag, the optimizer steps since the policy that sampled their oldest token."
        bound = "" if facts.bound is None else f" The bound is {facts.bound}."
        lags = {str(lag): share for lag, share in facts.lags.items()}
        found.append(Section("Lag", [Paragraph(text + bound), _bars("lag", "share of the groups", lags)]))
    names = {
        "generate/response_tokens": "tokens of a response, mean",
        "generate/response_tokens_p90": "tokens of a response, 90th percentile",
        "generate/response_tokens_max": "tokens of the longest response",
        "generate/truncated": "responses that a length limit ended",
    }
    rows = [
        [names[figure.name], *(shown(value, known_spec(figure.name).unit) for value in (figure.first, figure.last))]
        for figure in facts.figures
        if figure.name in names
    ]
    if rows:
        found.append(Section("Lengths", [TextTable(("", "first tenth", "last tenth"), rows, frozenset({1, 2}))]))
    return found


def _bars(name: str, share: str, values: dict[str, float]) -> TextTable:
    rows = [[label, f"{value:.1%}", "█" * round(value * BAR_WIDTH)] for label, value in values.items()]
    return TextTable((name, share, ""), rows, frozenset({1}), frozenset({2}))


def _evaluations(facts: RunFacts) -> list[Section]:
    if not facts.evaluations:
        return []
    scores = list(
        dict.fromkeys(
            name
            for row in facts.evaluations
            for name in row
            if name.startswith(("eval/pass@", "eval/avg@")) or name in ("eval/reward", "eval/truncated", "eval/prompts")
        )
    )
    rows = []
    for row in facts.evaluations[-MAX_ROWS:]:
        cells = [str(row["step"])]
        for name in scores:
            low_high = row["intervals"].get(name)
            cells.append(
                f"{row[name]:.3f} ({low_high[0]:.3f} to {low_high[1]:.3f})" if low_high else number(row.get(name))
            )
        rows.append(cells)
    note = "Intervals: 95 %, Wilson's, one observation per prompt."
    headers = ("step", *(name.removeprefix("eval/") for name in scores))
    return [Section("Evaluations", [TextTable(headers, rows, frozenset(range(len(headers)))), Paragraph(note)])]


def _samples(facts: RunFacts) -> list[Section]:
    if not facts.samples:
        return []
    blocks: list[Block] = []
    for row in facts.samples:
        said = [
            f"{row['why'].capitalize()}: step {row['step']}",
            f"reward {number(row.get('reward'))}",
            f"lag {row['lag']}" if row.get("lag") is not None else "",
            f"{row['tokens']} tokens" if row.get("tokens") is not None else "",
            str(row.get("stop_reason") or ""),
        ]
        texts = (excerpt(str(row.get(part) or ""), TEXT_LENGTH) for part in ("prompt", "response"))
        blocks += [Paragraph(", ".join(part for part in said if part)), Preformatted("\n──▸ ".join(texts))]
    return [Section("Samples", blocks)]


def _failures(facts: RunFacts) -> Section:
    if facts.incidents is None:
        return Section("Failures", [Paragraph("The run has recorded no events.")])
    found, blocks = facts.incidents, list[Block]()
    failures = [
        [
            str(row["count"]),
            "failed for good" if row["kind"] == "failed" else "attempt failed",
            row["reason"][:MAX_TEXT],
            row["again"],
        ]
        for row in found["failures"][:MAX_ROWS]
    ]
    warnings = [
        [str(row["count"]), row["level"].lower(), row["text"][:MAX_TEXT]] for row in found["warnings"][:MAX_ROWS]
    ]
    alarms = [
        [
            str(row["step"]),
            "" if row["ended"] is None else str(row["ended"]),
            f"{row['level']} {row['id']}: {row['finding']}",
        ]
        for row in found["alarms"][:MAX_ROWS]
    ]
    if not failures and not warnings and not alarms:
        blocks.append(Paragraph("None."))
    if failures:
        headers = ("times", "groups", "why", "one of them again")
        blocks.append(TextTable(headers, failures, frozenset({0}), frozenset({2, 3})))
    if warnings:
        blocks.append(TextTable(("times", "level", "in the log"), warnings, frozenset({0}), frozenset({2})))
    if alarms:
        blocks.append(TextTable(("from step", "to step", "alarms and advice"), alarms, frozenset({0, 1})))
    if found["lost"] or found["sampled_out"]:
        lost, left_out = found["lost"], found["sampled_out"]
        text = f"The record lacks {lost} events that could not be written, and {left_out} that trainer.max_events_per_s left out."
        blocks.append(Paragraph(text))
    return Section("Failures", blocks)


def _steps(facts: RunFacts) -> list[Section]:
    times = typical_steps(facts.columns)
    if times is None:
        return []
    columns = facts.columns
    inside = (columns["time"] > times[0]) & (columns["time"] <= times[1])
    names = (
        "time/step",
        "time/train",
        "time/prepare_update",
        "time/wait_for_batch",
        "time/gather",
        "time/pause",
        "staleness/mean",
        "reward/mean",
    )
    there = [name for name in names if name in columns]
    rows = [
        [
            str(int(columns["step"][index])),
            *(shown(float(columns[name][index]), known_spec(name).unit) for name in there),
        ]
        for index in np.flatnonzero(inside)
    ]
    table = TextTable(("step", *there), rows, frozenset(range(len(there) + 1)))
    return [Section("Typical steps", [Picture("timeline"), table])]


def _run(facts: RunFacts) -> list[Section]:
    rows = [
        [row["key"], setting_text(row["value"]), setting_text(row["default"]) if row["known"] else "?"]
        for row in facts.settings
    ]
    settings: Block = Paragraph("None, or config.yaml cannot be read.")
    if rows:
        settings = TextTable(("setting", "value", "default"), rows, code=frozenset({0, 1, 2}))
    found = [Section("Settings that differ from their defaults", [settings])]
    if facts.process:
        process = facts.process
        commands = sum(event["kind"] == "process" for event in facts.incidents["processes"]) if facts.incidents else 1
        environment = [
            ["host", process["host"]],
            ["version of skyrl_train", process["version"]],
            ["Python", process["python"]],
            ["git commit of the working folder", process["git"] or "none"],
            ["SHA-256 of config.yaml", process["config"]],
            ["commands that trained in this folder", str(commands)],
        ]
        found.append(Section("Environment", [TextTable(("", ""), environment, code=frozenset({1}))]))
        found.append(Section("The command", [Preformatted(repeat_command(process["command"]))]))
    return found


# Numbers and text --------------------------------------------------------------------------------------------------


def setting_text(value: Any) -> str:
    """Return the value of a setting; of a long one its beginning and its end."""
    return excerpt(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str), MAX_TEXT)


def shown(value: Any, unit: str) -> str:
    """Return a number with its unit; a dash for anything else."""
    if not is_finite_number(value) or unit not in ("share", "s"):
        return number(value)
    if unit == "share":
        return f"{value:.1%}"
    return f"{number(value * 1000)} ms" if abs(value) < 1 else f"{number(value)} s"


def number(value: Any) -> str:
    """Return a number in three digits, with k, M, G or T from 10,000 on; a dash for anything else."""
    if not is_finite_number(value):
        return "–"
    size = abs(float(f"{value:.3g}"))  # 999.7 is shown as 1000
    if size < 1e4:
        return f"{value:.3g}" if size < 1000 else f"{value:.0f}"
    power = int(min(4.0, math.log10(size) // 3))
    return f"{value / 1000**power:.3g}{' kMGT'[power]}"


def moment(unix: float) -> str:
    """Return a Unix time as a date with the time of day, in UTC."""
    try:
        return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(unix))
    except (ValueError, OverflowError, OSError):
        return "–"


def text_curve(values: Sequence[float], width: int, height: int) -> str:
    """Draw a curve in ``height`` lines of text of at most ``width`` columns, with its extremes at the left; empty without values.

    More values than columns are averaged in equal parts; values that are not finite are left out.
    """
    means = averaged(values, width)
    if not means:
        return ""
    low, high = min(means), max(means)
    # In eighths of a line; the lowest value is still visible.
    heights = [1 + round((value - low) / (high - low or 1.0) * (8 * height - 1)) for value in means]
    labels = {height - 1: number(high), 0: number(low)}
    margin = max(map(len, labels.values()))
    lines = []
    for line in range(height - 1, -1, -1):
        drawn = "".join(" " if eighths <= 8 * line else BLOCKS[min(8, eighths - 8 * line) - 1] for eighths in heights)
        lines.append(f"{labels.get(line, ''):>{margin}} ┤{drawn.rstrip()}")
    return "\n".join(lines)
