"""The rollout side of a checkpoint: step, ledger, counts and finished groups, as JSON files."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from skyrl_train.errors import CheckpointError
from skyrl_train.rollout.group import RolloutGroup, RolloutSequence, Sample

FORMAT_VERSION = 2  # 1: a sample was its only sequence
STATE_FILE = "rollout_state.json"
GROUPS_FILE = "groups.jsonl"


def write_rollout_state(state: Mapping[str, Any], groups: Iterable[RolloutGroup], folder: Path) -> None:
    """Writes into ``folder``: finished groups one per line, everything else (JSON-able) in one small readable file."""
    with (folder / GROUPS_FILE).open("w", encoding="utf-8") as file:
        for group in groups:
            file.write(json.dumps(asdict(group)) + "\n")  # floats survive JSON exactly
    text = json.dumps({"format_version": FORMAT_VERSION, **state}, indent=1)
    (folder / STATE_FILE).write_text(text, encoding="utf-8")


def read_rollout_state(folder: Path) -> tuple[dict[str, Any], list[RolloutGroup]]:
    """Reads state and groups that :func:`write_rollout_state` wrote.

    Raises:
        CheckpointError: the files are missing or broken, or of a newer format than this version reads.
    """
    try:
        state: dict[str, Any] = json.loads((folder / STATE_FILE).read_text(encoding="utf-8"))
        if state["format_version"] > FORMAT_VERSION:
            raise CheckpointError(
                f"{folder} has format {state['format_version']}, this version of skyrl_train reads up to "
                f"{FORMAT_VERSION}; upgrade skyrl_train to resume from it"
            )
        with (folder / GROUPS_FILE).open(encoding="utf-8") as file:
            groups = [_to_group(json.loads(line)) for line in file]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{folder} is not a usable checkpoint ({error}); remove it to resume from an older one"
        ) from error
    return state, groups


def _to_group(row: dict[str, Any]) -> RolloutGroup:
    return RolloutGroup(**{**row, "samples": tuple(_to_sample(sample) for sample in row["samples"])})


def _to_sample(row: dict[str, Any]) -> Sample:
    sequences = row.get("sequences", [row])
    return Sample(tuple(RolloutSequence(**sequence) for sequence in sequences))
