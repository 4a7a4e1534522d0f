"""Server-sent events as bytes."""

from __future__ import annotations

from collections.abc import Iterable

import orjson

from skyrl_train.inference.dialects.dialect import Frame

MEDIA_TYPE = "text/event-stream; charset=utf-8"


def encode(frames: Iterable[Frame]) -> bytes:
    """The bytes of some events."""
    return b"".join(map(_encode, frames))


def _encode(frame: Frame) -> bytes:
    data = frame.data.encode() if isinstance(frame.data, str) else orjson.dumps(frame.data)
    if frame.event is None:
        return b"data: %b\n\n" % data
    return b"event: %b\ndata: %b\n\n" % (frame.event.encode(), data)
