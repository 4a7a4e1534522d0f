"""The columns of ``metrics.jsonl``, and curves with a bounded number of points."""

from __future__ import annotations

import os
import secrets
import threading
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from skyrl_train.observability.metrics import Aggregation, known_spec
from skyrl_train.observability.run_folder import parse_row

POINTS = 1200  # of a curve; a wide screen has about as many columns
_PIECE_BYTES = 1 << 24


class MetricTable:
    """The numbers of a ``metrics.jsonl``, one column per metric; NaN where a row lacks it. Thread-safe.

    Attributes:
        epoch: changes whenever rows that were there are gone, as after a resume; never the same in two tables, so that a browser
            does not join the rows of one server to those of the next.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.epoch = secrets.randbits(32)
        self._columns: dict[str, array[float]] = {}
        self._rows = 0
        self._offset = 0
        self._inode = 0
        self._lock = threading.Lock()

    def columns(self) -> dict[str, NDArray[np.float64]]:
        """Read what was appended, and return all columns, each of shape ``[rows]``; ``step`` increases strictly."""
        with self._lock:
            try:
                self._read()
            except OSError:
                self._forget(0)
            return {name: np.array(column, dtype=np.float64) for name, column in self._columns.items()}

    def _read(self) -> None:
        with self.path.open("rb") as file:
            stat = os.fstat(file.fileno())
            if stat.st_ino != self._inode or stat.st_size < self._offset:
                self._forget(stat.st_ino)
            file.seek(self._offset)
            rest = b""
            while piece := file.read(_PIECE_BYTES):
                *lines, rest = (rest + piece).split(b"\n")
                for line in lines:
                    self._offset += len(line) + 1
                    row = parse_row(line)
                    if row is not None:
                        self._append(row)

    def _append(self, row: dict[str, Any]) -> None:
        steps = self._columns.setdefault("step", array("d"))
        if self._rows and row["step"] <= steps[-1]:  # steps that run again
            kept = int(np.searchsorted(np.array(steps), row["step"]))
            for column in self._columns.values():
                del column[kept:]
            self._rows, self.epoch = kept, self.epoch + 1
        columns, filled = self._columns, 0
        for name, value in row.items():
            # Of a long run this loop is most of the reading: most values are floats.
            if type(value) is float or type(value) is int:
                if name not in columns:
                    columns[name] = array("d", [np.nan]) * self._rows
                try:
                    columns[name].append(value)
                except OverflowError:
                    columns[name].append(np.nan)
                filled += 1
        self._rows += 1
        if filled < len(columns):
            for column in columns.values():
                if len(column) < self._rows:
                    column.append(np.nan)

    def _forget(self, inode: int) -> None:
        if self._rows:
            self.epoch += 1
        self._columns, self._rows, self._offset, self._inode = {}, 0, 0, inode


def curves(
    table: MetricTable, wanted: Sequence[str], *, since: int = 0, every: int = 0, points: int = POINTS
) -> dict[str, Any]:
    """Return the wanted metrics in at most ``points`` points, each of which stands for ``every`` rows (a power of two).

    Args:
        wanted: names of metrics, or prefixes that end in ``/``.
        since: the first point that is returned, if ``every`` is still the same.
        every: rows per point at the previous call; 0: there was none.

    Returns:
        ``epoch``, ``rows``, ``every``, ``since``; ``step``, ``time`` and ``elapsed_s`` of the last row of each point; ``mean``,
        and with more than one row per point also ``min`` and ``max``, by metric. Values that are not finite are ignored; a
        point without any is null. A sum that some rows of a point lack is 0 in them: a step without a weight sync has spent no
        time on one.
    """
    columns = table.columns()
    rows = len(columns.get("step", ()))
    new_every = 1
    while rows > new_every * points:
        new_every *= 2
    since = since if every == new_every else 0
    first = since * new_every
    names = [
        name
        for name in columns
        if name in wanted or any(prefix.endswith("/") and name.startswith(prefix) for prefix in wanted)
    ]
    starts = np.arange(first, rows, new_every)
    ends = np.minimum(starts + new_every, rows) - 1
    answer: dict[str, Any] = {"epoch": table.epoch, "rows": rows, "every": new_every, "since": since}
    for name in ("step", "time", "elapsed_s"):
        answer[name] = columns[name][ends] if name in columns else None
    answer |= {"mean": {}, "min": {}, "max": {}}
    for name in names:
        values = columns[name][first:]
        if new_every == 1:
            answer["mean"][name] = np.where(np.isfinite(values), values, np.nan)
        elif len(starts):
            finite = np.isfinite(values)
            at = starts - first
            counts = np.add.reduceat(finite, at, dtype=np.int64)
            some = counts > 0
            lacked = 0.0 if known_spec(name).aggregation is Aggregation.sum else None
            of = np.maximum(counts, 1) if lacked is None else ends - starts + 1
            sums = np.add.reduceat(np.where(finite, values, 0.0), at)
            low, high = (np.where(finite, values, end if lacked is None else lacked) for end in (np.inf, -np.inf))
            answer["mean"][name] = np.where(some, sums / of, np.nan)
            answer["min"][name] = np.where(some, np.minimum.reduceat(low, at), np.nan)
            answer["max"][name] = np.where(some, np.maximum.reduceat(high, at), np.nan)
    return answer
