"""JSON of what the readers return."""

from __future__ import annotations

from typing import Any

import orjson

from skyrl_train.events.log import encodable


def to_json(data: Any) -> bytes:
    """Encode plain data and NumPy arrays. NaN and infinities become null; what JSON cannot express becomes text."""
    option = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS
    try:
        return orjson.dumps(data, option=option, default=str)
    except TypeError:  # a lone surrogate, an integer above 64 bits
        return orjson.dumps(encodable(data), option=option, default=str)
