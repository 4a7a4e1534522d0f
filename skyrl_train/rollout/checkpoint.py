"""The rollout side of a checkpoint: counts, ledger, finished groups, and what unfinished ones have sampled.

rollout_state.json   everything small, readable
groups.jsonl         finished groups, one per line
recordings.jsonl     what the sessions of unfinished groups have sampled, one session per line
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from skyrl_train.errors import CheckpointError
from skyrl_train.rollout.buffer import BufferedGroup
from skyrl_train.rollout.group import RolloutGroup
from skyrl_train.rollout.group_json import decode_group, encode_group, from_line, to_line
from skyrl_train.rollout.spill import SpilledGroup

FORMAT_VERSION = 3
STATE_FILE = "rollout_state.json"
GROUPS_FILE = "groups.jsonl"
RECORDINGS_FILE = "recordings.jsonl"


def write_rollout_state(
    state: Mapping[str, Any],
    groups: Iterable[BufferedGroup],
    folder: Path,
    recordings: Iterable[Mapping[str, Any]] = (),
) -> None:
    """Writes into ``folder``; blocking. ``state`` and each of the ``recordings`` are JSON-able.

    The iterables are iterated here, in the writing thread.
    """
    with (folder / GROUPS_FILE).open("wb") as file:
        for group in groups:
            file.write((group.encoded() if isinstance(group, SpilledGroup) else encode_group(group)) + b"\n")
    with (folder / RECORDINGS_FILE).open("wb") as file:
        for recording in recordings:
            file.write(to_line(recording) + b"\n")
    text = json.dumps({"format_version": FORMAT_VERSION, **state}, indent=1)
    (folder / STATE_FILE).write_text(text, encoding="utf-8")


def read_rollout_state(folder: Path) -> tuple[dict[str, Any], StoredGroups]:
    """Reads what :func:`write_rollout_state` wrote, this version's or an earlier one's, without the recordings; blocking.

    Returns:
        The state, and the groups: the file is read when they are iterated, which may raise the same errors.

    Raises:
        CheckpointError: the files are missing or broken, or of a newer format than this version reads.
    """
    with _usable(folder):
        state: dict[str, Any] = json.loads((folder / STATE_FILE).read_text(encoding="utf-8"))
        if state["format_version"] > FORMAT_VERSION:
            raise CheckpointError(
                f"{folder} has format {state['format_version']}, this version of skyrl_train reads up to "
                f"{FORMAT_VERSION}; upgrade skyrl_train to resume from it"
            )
        if state["format_version"] < 3:
            state = _of_format_3(state)
    return state, StoredGroups(folder)


def read_recordings(folder: Path) -> list[dict[str, Any]]:
    """The recordings of a checkpoint; none where it is from before there were any. Blocking.

    Raises:
        CheckpointError: the file is broken.
    """
    path = folder / RECORDINGS_FILE
    with _usable(folder):
        return [from_line(line) for line in path.read_bytes().splitlines()] if path.exists() else []


class StoredGroups:
    """The finished groups of a checkpoint, one after the other from its file. Blocking; CheckpointError if it is broken."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __iter__(self) -> Iterator[RolloutGroup]:
        with _usable(self._folder), (self._folder / GROUPS_FILE).open("rb") as lines:
            for line in lines:
                yield decode_group(line)


@contextmanager
def _usable(folder: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{folder} is not a usable checkpoint ({error!r}); remove it to resume from an older one"
        ) from error


def _of_format_3(state: Mapping[str, Any]) -> dict[str, Any]:
    """Formats 1 and 2 knew one order of the data and fewer outcomes; in 1, a sample was its only sequence."""
    ledger = state["ledger"]
    return {
        **{key: value for key, value in state.items() if key != "ledger"},
        "prompts": {
            "identity": {
                "dataset_len": ledger["dataset_len"],
                "fingerprint": ledger["fingerprint"],
                "sampler": "shuffle",
                "seed": ledger["seed"],
            },
            "ledger": {
                **{key: ledger[key] for key in ("next", "frontier", "settled", "failed")},
                "filtered": [],
                "dropped": [],
            },
            "source": {"sampler": {}, "drawn": []},
        },
        "workers": {"failed_and_masked": 0},
    }
