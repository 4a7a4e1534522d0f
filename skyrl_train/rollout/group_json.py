"""Lines of JSON, and a finished group as one: for checkpoints and for groups that wait on the disk.

Floats survive exactly. With orjson, because encoding holds the interpreter lock, and with it every rollout.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import numpy as np
import orjson

from skyrl_train.rollout.group import RolloutGroup, RolloutSequence, Sample


def to_line(value: Mapping[str, Any]) -> bytes:
    """A JSON-able value, in which lists may be arrays, on one line, without the line break."""
    try:
        return orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY)
    except TypeError:  # text that is no Unicode (half a surrogate pair, in somebody's uid), which json can write
        return json.dumps(value, default=np.ndarray.tolist).encode("ascii")


def from_line(line: bytes) -> Any:
    """What :func:`to_line` wrote.

    Raises:
        ValueError: it is not JSON.
    """
    try:
        return orjson.loads(line)
    except ValueError:
        return json.loads(line)


def encode_group(group: RolloutGroup) -> bytes:
    """The group without a line break."""
    row: dict[str, Any] = {
        **{each.name: getattr(group, each.name) for each in fields(group)},
        "samples": [{"sequences": [sequence.row() for sequence in sample.sequences]} for sample in group.samples],
    }
    return to_line(row)


def decode_group(line: bytes) -> RolloutGroup:
    """What :func:`encode_group` encoded, or an earlier version of this library.

    Raises:
        ValueError, KeyError, TypeError: it is none of that.
    """
    row: dict[str, Any] = from_line(line)
    return RolloutGroup(**{**row, "samples": tuple(_to_sample(sample) for sample in row["samples"])})


def _to_sample(row: dict[str, Any]) -> Sample:
    sequences = row.get("sequences", [row])  # format 1: a sample was its only sequence
    return Sample(tuple(RolloutSequence.of_lists(**sequence) for sequence in sequences))
