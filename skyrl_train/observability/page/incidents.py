"""What went wrong in a run: failed attempts by their reason, warnings, and the ends of its logs."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from skyrl_train.observability.page.timeline import MAX_SCANNED, EventStore

LOG_BYTES = 1 << 17
MAX_LOGS = 100
MAX_ROWS = 500
_SUFFIXES = (".log", ".txt", ".out", ".err")


def incidents(store: EventStore, segments: int = MAX_SCANNED) -> dict[str, Any] | None:
    """Return failures and warnings of the newest ``segments`` of the record, equal ones counted. None: nothing is recorded."""
    events = store.rare(segments)
    if events is None:
        return None
    failed = (event for event in events if event["kind"] in ("failed", "retried"))
    said = (event for event in events if event["kind"] == "warning")
    return {
        "failures": _counted(failed, lambda event: (event["kind"], event["reason"]), ("kind", "reason"), "group"),
        "warnings": _counted(
            said, lambda event: (event["level"], event["source"], event["text"]), ("level", "source", "text"), ""
        ),
        "processes": [event for event in events if event["kind"] in ("process", "run", "resume", "end")][-MAX_ROWS:],
        "lost": sum(event["events"] for event in events if event["kind"] == "lost"),
        "sampled_out": sum(event["sampled_out"] for event in events if event["kind"] == "lost"),
    }


def _counted(events: Iterable[dict[str, Any]], key: Any, names: tuple[str, ...], example: str) -> list[dict[str, Any]]:
    """Return a row per key with count, first and last time, the one that came last first."""
    rows: dict[Any, dict[str, Any]] = {}
    for event in events:
        row = rows.setdefault(
            key(event), {name: event[name] for name in names} | {"count": 0, "first": event["at"], "examples": []}
        )
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
