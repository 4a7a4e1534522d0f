"""What sessions may cost."""

from __future__ import annotations

from dataclasses import dataclass, fields

from skyrl_train.errors import ConfigError


@dataclass(frozen=True, slots=True)
class SessionUse:
    """What a session is made of, or would be: see the limits of the same names."""

    turns: int
    tokens: int
    exported_tokens: int


@dataclass(frozen=True, slots=True)
class SessionLimits:
    """Limits of one :class:`~skyrl_train.inference.sessions.store.SessionStore`.

    The three of a session are kept strictly: what would exceed one is refused before it is sampled where that can be
    known, and otherwise (its length shows only at its end, others of the session may end first) when it is recorded.
    Its request then fails, and nothing of it is kept.

    Args:
        max_sessions: open at once, finished ones included until they are closed. Reserved ones take no place.
        max_turns: responses per session.
        max_tokens: tokens that one session holds: prompts and responses, shared beginnings once.
        max_exported_tokens: tokens of the sequences that a session makes. Each branch repeats what comes before it, so
            that many short branches of a long prompt are few tokens held and many to train on.
        idle_expiry_s: a session without a request for so long is dropped. Longer than the longest tool call.
        retry_window_s: how long a finished response is kept for a retry that comes late.
        max_kept_responses: finished responses kept for retries, over all sessions; the oldest go first.
        retry_after_s: what a client is told to wait when ``max_sessions`` are open.
    """

    max_sessions: int = 10_000
    max_turns: int = 1_000
    max_tokens: int = 4_000_000
    max_exported_tokens: int = 4_000_000
    idle_expiry_s: float = 3600.0
    retry_window_s: float = 60.0
    max_kept_responses: int = 1_000
    retry_after_s: float = 1.0

    def __post_init__(self) -> None:
        for limit in fields(self):
            least = 0 if limit.name == "max_kept_responses" else 1e-3
            if not getattr(self, limit.name) >= least:
                raise ConfigError(f"{limit.name} must be positive, got {getattr(self, limit.name)}.")

    def exceeded(self, use: SessionUse) -> str | None:
        """What ``use`` exceeds and what to do about it; None where it fits."""
        if use.turns > self.max_turns:
            return f"would have {use.turns} of at most {self.max_turns} turns (max_turns). Finish it."
        if use.tokens > self.max_tokens:
            return f"would hold {use.tokens} of at most {self.max_tokens} tokens (max_tokens). Finish it."
        if use.exported_tokens > self.max_exported_tokens:
            return (
                f"would be trained on as {use.exported_tokens} of at most {self.max_exported_tokens} tokens "
                "(max_exported_tokens): each branch repeats the tokens before it. Finish it; let conversations go on "
                "instead of beginning them again, or raise the limit."
            )
        return None
