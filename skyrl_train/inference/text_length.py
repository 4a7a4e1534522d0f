"""How long text is, told without a tokenizer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# The longest tokens of vocabularies in use are runs of white space or of dashes, 128 characters long.
CHARACTERS_PER_TOKEN = 128
LONG_TEXT = 20_000  # characters; encoding them takes some milliseconds


def characters(value: Any, enough: int) -> int:
    """The characters of all texts in ``value`` (JSON), one for each other value; stops counting beyond ``enough``."""
    count, waiting = 0, [value]
    while waiting and count <= enough:
        entry = waiting.pop()
        if isinstance(entry, str):
            count += len(entry)
            continue
        count += 1
        if isinstance(entry, Mapping):
            waiting += entry.values()
        elif isinstance(entry, list | tuple):
            waiting += entry
    return count
