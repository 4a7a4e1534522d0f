"""What happened in a session, and in all sessions of a store."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SessionStatistics:
    """A session so far.

    ``branches`` is the number of sequences it makes. ``drifted_turns`` came with answers of this session whose tokens
    could not be used again: changed, moved, under other tools, or with a template that cannot be extended. Of answers
    whose tokens were used again, ``drifted_tokens`` are those that a fresh rendering would have cut differently.
    ``restarts`` counts requests that began again from nothing.
    """

    turns: int
    branches: int
    drifted_turns: int
    drifted_tokens: int
    sampled_tokens: int
    oldest_version: int | None
    newest_version: int | None
    restarts: int
    finished: bool


@dataclass(slots=True)
class SessionTotals:
    """What all sessions of a store did since it began, those that are gone included."""

    opened: int = 0
    finished: int = 0
    expired: int = 0
    refused: int = 0
    turns: int = 0
    branches: int = 0
    drifted_turns: int = 0
    sampled_tokens: int = 0
