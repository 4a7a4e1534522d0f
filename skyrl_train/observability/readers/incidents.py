"""What went wrong in a run: alarms, failed attempts by their reason, warnings, and the ends of its logs."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable, Hashable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from skyrl_train.observability.advice import FAILURE_SEGMENTS, FAILURES, Advice, advise, edge_rows
from skyrl_train.observability.readers.timeline import MAX_SCANNED, EventStore

LOG_BYTES = 1 << 17
MAX_LOGS = 100
MAX_ROWS = 500
# Failures of one kind may differ in the name of the prompt and in numbers.
_VARYING = re.compile(r"prompt '[^']*'|\d+")
_SUFFIXES = (".log", ".txt", ".out", ".err")


def incidents(store: EventStore, segments: int = MAX_SCANNED) -> dict[str, Any] | None:
    """Return failures and warnings of the newest ``segments`` of the record. None: nothing is recorded.

    Failures that one line of the user's code raised are counted together, with the reason of the first; others, and warnings,
    if they differ only in numbers and in the prompt. A row of failures has the command that generates one of their groups
    again, with all that happens shown.
    """
    events = store.rare(segments)
    if events is None:
        return None
    failed = (event for event in events if event["kind"] in ("failed", "retried"))
    said = (event for event in events if event["kind"] == "warning")
    failures = _counted(
        failed,
        ("kind", "place", "reason"),
        lambda event: (event["kind"], event["place"] or _VARYING.sub("", event["reason"])),
        example="group",
    )
    for row in failures:
        row["again"] = shlex.join(["skyrl-train", "try", str(store.run), "--prompt", str(row["examples"][0])])
    return {
        "alarms": _alarms(events),
        "failures": failures,
        "warnings": _counted(
            said,
            ("level", "source", "text"),
            lambda event: (event["level"], event["source"], _VARYING.sub("", event["text"])),
        ),
        "processes": [event for event in events if event["kind"] in ("process", "run", "resume", "end")][-MAX_ROWS:],
        "lost": sum(event["events"] for event in events if event["kind"] == "lost"),
        "sampled_out": sum(event["sampled_out"] for event in events if event["kind"] == "lost"),
    }


def checkpoint_steps(store: EventStore, segments: int) -> list[int]:
    """Return the steps of which a checkpoint was written, in their order, as the newest ``segments`` of the record say."""
    written = (event for event in store.rare(segments) or () if event["kind"] == "checkpoint" and event["ok"])
    return sorted({event["step"] for event in written})


def run_advice(
    columns: Mapping[str, NDArray[np.float64]], store: EventStore, settings: Mapping[str, Any]
) -> list[Advice]:
    """Return the alarms or the tuning advice after the last step, see :func:`advise`.

    Args:
        columns: the metrics, each of shape ``[rows]``.
        store: the record; failures are looked for in its newest part.
        settings: of ``config.yaml``.
    """
    places = edge_rows(range(len(columns.get("step", ()))))
    rows = [{name: column[place] for name, column in columns.items()} for place in places]
    events = store.rare(FAILURE_SEGMENTS) or ()
    return advise(rows, [event for event in events if event["kind"] in FAILURES], settings)


def _alarms(events: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a row per alarm or advice that began, the newest first; ``ended`` is None if its process recorded no end."""
    rows: list[dict[str, Any]] = []
    begun: dict[Any, dict[str, Any]] = {}
    for event in events:
        of = event["process"], event.get("id")
        if event["kind"] == "alarm" and event["state"] == "begins":
            begun[of] = {name: event[name] for name in ("id", "level", "step", "at", "finding", "action")}
            begun[of]["ended"] = None
            rows.append(begun[of])
        elif event["kind"] == "alarm" and of in begun:
            begun.pop(of)["ended"] = event["step"]
    return rows[::-1][:MAX_ROWS]


def _counted(
    events: Iterable[dict[str, Any]],
    names: tuple[str, ...],
    key: Callable[[dict[str, Any]], Hashable],
    example: str = "",
) -> list[dict[str, Any]]:
    """Return a row per kind of event with count, first and last time, the one that came last first.

    Args:
        names: fields of the first event of a kind, which the row shows.
        key: the same for events of one kind.
        example: a field of which a row has up to five values.
    """
    rows: dict[Hashable, dict[str, Any]] = {}
    for event in events:
        new = {name: event[name] for name in names} | {"count": 0, "first": event["at"], "examples": []}
        row = rows.setdefault(key(event), new)
        row["count"] += 1
        row["last"] = event["at"]
        if example and len(row["examples"]) < 5:
            row["examples"].append(event[example])
    return sorted(rows.values(), key=lambda row: -row["last"])[:MAX_ROWS]


def log_files(logs: Path) -> list[dict[str, Any]]:
    """Return names (relative to ``logs``) and sizes of a run's logs, the newest first. Links are left out."""
    found: list[dict[str, Any]] = []
    for folder, _, names in os.walk(logs):
        for name in names:
            path = Path(folder) / name
            if name.endswith(_SUFFIXES) and not path.is_symlink():
                try:
                    stat = path.stat()
                except OSError:
                    continue
                found.append(
                    {"name": path.relative_to(logs).as_posix(), "bytes": stat.st_size, "written": stat.st_mtime}
                )
    return sorted(found, key=lambda file: -file["written"])[:MAX_LOGS]


def log_end(logs: Path, name: str) -> str | None:
    """Return the end of one of :func:`log_files`; None if it is none of them."""
    if name not in {file["name"] for file in log_files(logs)}:
        return None
    with (logs / name).open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - LOG_BYTES))
        content = file.read(LOG_BYTES)
    if size > LOG_BYTES:  # from the first whole line
        content = content[content.find(b"\n") + 1 :]
    return content.decode("utf-8", "replace")
