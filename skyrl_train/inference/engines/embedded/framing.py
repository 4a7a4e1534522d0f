"""Messages on a socket between this program and its own child: an 8-byte big-endian length and a pickle."""

from __future__ import annotations

import pickle
from typing import Any

HEADER_BYTES = 8


def encode(message: Any) -> bytes:
    """One frame."""
    payload = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return len(payload).to_bytes(HEADER_BYTES, "big") + payload


def payload_bytes(header: bytes) -> int:
    """The size of the payload that follows ``header``."""
    return int.from_bytes(header, "big")


def decode(payload: bytes) -> Any:
    """The message in a payload. Only for sockets whose other end is this program: a pickle can run code."""
    return pickle.loads(payload)
