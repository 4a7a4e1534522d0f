"""The recorded samples of a run, without what depends on the clock."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from skyrl_train.observability.samples import read_samples


def samples_of(run: Path) -> list[dict[str, Any]]:
    """A row per recorded sequence."""
    rows: list[dict[str, Any]] = read_samples(run / "samples").drop_columns(["time", "generation_s"]).to_pylist()
    return rows
