"""Recorded samples of a run: the rows of one step, one sequence with its tokens, and one prompt over the whole run."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from skyrl_train.observability.run_folder import SAMPLES, parse_row
from skyrl_train.observability.samples import read_columns, sample_files, schema

EXCERPT = 240  # characters of a text in the list
MAX_ROWS = 2000
MAX_FILES = 400  # in which a prompt is looked for, the newest ones
_OLD_FILE = "samples.jsonl"  # of versions before samples had tokens
_OLD_BYTES = 1 << 23
_FACTS = (
    "step", "phase", "group_index", "uid", "data_source", "chosen", "sample", "sequence", "reward", "stop_reason", "lag",
    "oldest_version", "newest_version", "generation_s",
)  # fmt: skip


def recorded_files(run: Path) -> dict[tuple[str, int], Path]:
    """Return the files of samples by phase ("train" or "eval") and step, in the order of the steps. Links are left out."""
    found = {}
    for path in sample_files(run / SAMPLES):
        phase, _, step = path.stem.partition("_")
        if not path.is_symlink():
            found["train" if phase == "step" else "eval", int(step)] = path
    return found


def step_rows(run: Path, phase: str, step: int) -> dict[str, Any]:
    """Return which steps have samples, and the rows of one of them (0: the newest one), without tokens and long texts."""
    files = recorded_files(run)
    of_phase = [number for kind, number in files if kind == phase]
    if not files:
        return _old_rows(run, step)
    chosen = step if step in of_phase else (of_phase[-1] if of_phase and not step else step)
    rows = _rows(files[phase, chosen]) if (phase, chosen) in files else []
    return {
        "phases": sorted({kind for kind, _ in files}, reverse=True),
        "steps": of_phase,
        "step": chosen,
        "rows": rows,
    }


def prompt_rows(run: Path, uid: str) -> list[dict[str, Any]]:
    """Return the rows of the prompt ``uid`` in all steps that recorded it."""
    rows: list[dict[str, Any]] = []
    for path in list(recorded_files(run).values())[-MAX_FILES:]:
        rows += _rows(path, uid)
    return rows[-MAX_ROWS:]


def whole_sequence(run: Path, phase: str, step: int, row: int) -> dict[str, Any] | None:
    """Return all of row number ``row`` of a file: its texts, and per token its id, text and numbers. None: there is none."""
    path = recorded_files(run).get((phase, step))
    table = None if path is None else _table(path, schema().names)
    if table is None or not row < table.num_rows:
        return None
    (found,) = table.slice(row, 1).to_pylist()
    return dict(found)


def sample_rows(path: Path, columns: Sequence[str]) -> list[dict[str, Any]]:
    """Return these columns of all rows of a file; none if the file cannot be read."""
    table = _table(path, columns)
    return [] if table is None else list(table.to_pylist())


def _rows(path: Path, uid: str | None = None) -> list[dict[str, Any]]:
    """Return the rows of a file, or only one prompt's rows, each with its number; none if the file cannot be read."""
    import pyarrow.compute as pc

    if uid is not None:
        known = _table(path, ["uid"])
        if known is None or uid not in known["uid"].to_pylist():
            return []
    table = _table(path, [*_FACTS, "prompt", "response", "response_token_ids", "loss_mask", "advantages", "messages"])
    if table is None:
        return []
    rows = []
    lengths = pc.list_value_length(table["response_token_ids"]).to_pylist()
    facts = table.select([*_FACTS, "prompt", "response"]).slice(0, MAX_ROWS).to_pylist()
    for number, row in enumerate(facts):
        if uid is not None and row["uid"] != uid:
            continue
        for name in ("prompt", "response"):
            row[name] = excerpt(row[name] or "")
        mask, advantages = (table[name][number].values for name in ("loss_mask", "advantages"))
        trained = (
            None if mask is None or advantages is None else advantages.to_numpy()[mask.to_numpy(zero_copy_only=False)]
        )
        roles = [message["role"] for message in table["messages"][number].as_py() or ()]
        row |= {
            "row": number,
            "tokens": lengths[number],
            "advantage": None if trained is None or not len(trained) else float(np.mean(trained)),
            "turns": sum(role == "assistant" for role in roles),
        }
        rows.append(row)
    return rows


def _table(path: Path, columns: Sequence[str]) -> Any:
    """Return the columns of a file; one that it lacks, as a file of another version may, is empty. None: it cannot be read."""
    import pyarrow as pa

    try:
        return read_columns(path, columns)
    except (OSError, ValueError, KeyError, pa.ArrowException):
        return None


def excerpt(text: str, length: int = EXCERPT) -> str:
    """Return the beginning and the end of a long text, together about ``length`` characters."""
    half = length // 2
    return text if len(text) <= length else f"{text[:half]} … {text[-half:]}"


def _old_rows(run: Path, step: int) -> dict[str, Any]:
    """Return the rows of a run that recorded texts only. Of a large file, only the end is read."""
    try:
        with (run / _OLD_FILE).open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _OLD_BYTES))
            rows = [row for line in file.read().split(b"\n") if (row := parse_row(line)) is not None]
    except OSError:
        rows = []
    steps = sorted({row["step"] for row in rows})
    chosen = step if step in steps else (steps[-1] if steps and not step else step)
    return {
        "phases": ["train"],
        "steps": steps,
        "step": chosen,
        "rows": [row for row in rows if row["step"] == chosen][:MAX_ROWS],
    }
