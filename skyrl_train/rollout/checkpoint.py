"""The rollout side of a checkpoint: step, ledger, counts and finished groups, as JSON files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from skyrl_train.errors import CheckpointError

FORMAT_VERSION = 1
STATE_FILE = "rollout_state.json"
GROUPS_FILE = "groups.jsonl"


def write_rollout_state(state: Mapping[str, Any], folder: Path) -> None:
    """Writes the state into ``folder``: finished groups one per line, everything else in one small readable file."""
    with (folder / GROUPS_FILE).open("w", encoding="utf-8") as file:
        for group in state["groups"]:
            file.write(json.dumps(group) + "\n")
    small = {key: value for key, value in state.items() if key != "groups"}
    (folder / STATE_FILE).write_text(
        json.dumps({"format_version": FORMAT_VERSION, **small}, indent=1), encoding="utf-8"
    )


def read_rollout_state(folder: Path) -> dict[str, Any]:
    """Reads what :func:`write_rollout_state` wrote.

    Raises:
        CheckpointError: the files are missing or broken, or of a newer format than this version reads.
    """
    try:
        state: dict[str, Any] = json.loads((folder / STATE_FILE).read_text(encoding="utf-8"))
        with (folder / GROUPS_FILE).open(encoding="utf-8") as file:
            state["groups"] = [json.loads(line) for line in file]
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{folder} is not a usable checkpoint ({error}); remove it to resume from an older one"
        ) from error
    if state["format_version"] > FORMAT_VERSION:
        raise CheckpointError(
            f"{folder} has format {state['format_version']}, this version of skyrl_train reads up to {FORMAT_VERSION}; "
            "upgrade skyrl_train to resume from it"
        )
    return state
