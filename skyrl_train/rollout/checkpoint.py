"""The rollout side of a checkpoint: counts, ledger, finished groups, and the sampled tokens of unfinished groups.

rollout_state.json   everything small, readable
groups.jsonl         finished groups, one per line
recordings.jsonl     the replay cache: tokens of the sessions of unfinished groups, one session per line
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from skyrl_train.errors import READ_AGAIN, CheckpointError, may_pass
from skyrl_train.rollout.buffer import BufferedGroup, SpilledGroup, decode_group, encode_group, from_line, to_line
from skyrl_train.runtime.checksums import ChecksumWriter
from skyrl_train.types import RolloutGroup

FORMAT_VERSION = 3
STATE_FILE = "rollout_state.json"
GROUPS_FILE = "groups.jsonl"
RECORDINGS_FILE = "recordings.jsonl"


def write_rollout_state(
    state: Mapping[str, Any],
    groups: Iterable[BufferedGroup],
    folder: Path,
    replay_cache: Iterable[Mapping[str, Any]] = (),
) -> dict[str, str]:
    """Write a checkpoint's rollout side into ``folder``. Blocking: the iterables are iterated in the calling thread.

    Args:
        state: JSON-able, like each entry of ``replay_cache``.

    Returns:
        The files' checksums by name.
    """
    with ChecksumWriter(folder / GROUPS_FILE) as groups_file:
        for group in groups:
            # A spilled group is copied as it is: decoding it would hold the interpreter lock and all rollouts with it.
            line = group.path.read_bytes() if isinstance(group, SpilledGroup) else encode_group(group)
            groups_file.write(line + b"\n")
    with ChecksumWriter(folder / RECORDINGS_FILE) as recordings_file:
        for recording in replay_cache:
            recordings_file.write(to_line(recording) + b"\n")
    with ChecksumWriter(folder / STATE_FILE) as state_file:
        # Indented, because people read this file.
        state_file.write(json.dumps({"format_version": FORMAT_VERSION, **state}, indent=1).encode())
    return {
        GROUPS_FILE: groups_file.checksum,
        RECORDINGS_FILE: recordings_file.checksum,
        STATE_FILE: state_file.checksum,
    }


def read_rollout_state(folder: Path) -> tuple[dict[str, Any], Iterator[RolloutGroup]]:
    """Read the output of :func:`write_rollout_state`, also of earlier versions, without the replay cache. Blocking.

    Returns:
        The state and the finished groups, which are read one by one when they are iterated, once; that may raise the same
        errors.

    Raises:
        CheckpointError: the files are missing or broken, or have a newer format.
    """
    with _as_checkpoint_error(folder):
        state: dict[str, Any] = json.loads((folder / STATE_FILE).read_text(encoding="utf-8"))
        if state["format_version"] > FORMAT_VERSION:
            raise CheckpointError(
                f"{folder} has format {state['format_version']}, but this version of skyrl_train reads formats up to "
                f"{FORMAT_VERSION}; upgrade skyrl_train to resume from it"
            )
        # Old formats are converted here, so that all other code knows one.
        if state["format_version"] < 3:
            state = _to_format_3(state)
    return state, _read_groups(folder)


def _read_groups(folder: Path) -> Iterator[RolloutGroup]:
    with _as_checkpoint_error(folder), (folder / GROUPS_FILE).open("rb") as lines:
        for line in lines:
            yield decode_group(line)


def read_replay_cache(folder: Path) -> list[dict[str, Any]]:
    """Read the replay cache of a checkpoint; empty for checkpoints of versions without one. Blocking.

    Raises:
        CheckpointError: the file is broken.
    """
    path = folder / RECORDINGS_FILE
    with _as_checkpoint_error(folder):
        return [from_line(line) for line in path.read_bytes().splitlines()] if path.exists() else []


@contextmanager
def _as_checkpoint_error(folder: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, KeyError, TypeError) as error:
        if may_pass(error):  # its files were there and intact a moment ago
            raise CheckpointError(f"{folder} cannot be read now: {error}. {READ_AGAIN}") from error
        raise CheckpointError(
            f"{folder} is not a usable checkpoint ({error!r}); remove it to resume from an older one"
        ) from error


def _to_format_3(state: Mapping[str, Any]) -> dict[str, Any]:
    """Convert formats 1 and 2, which had one order of the data and fewer outcomes."""
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
