"""What sessions may cost."""

from __future__ import annotations

from dataclasses import dataclass, fields

from skyrl_train.errors import ConfigError


@dataclass(frozen=True, slots=True)
class SessionLimits:
    """Limits of one :class:`~skyrl_train.inference.sessions.store.SessionStore`.

    Args:
        max_sessions: open at once, finished ones included until they are closed.
        max_turns: responses per session. Requests already running when it is reached still count.
        max_tokens: tokens that one session holds: prompts and responses, shared beginnings once. As above.
        idle_expiry_s: a session without a request for so long is dropped. Longer than the longest tool call.
        retry_window_s: how long a finished response is kept for a retry that comes late.
        max_kept_responses: finished responses kept for retries, over all sessions; the oldest go first.
        retry_after_s: what a client is told to wait when ``max_sessions`` are open.
    """

    max_sessions: int = 10_000
    max_turns: int = 1_000
    max_tokens: int = 4_000_000
    idle_expiry_s: float = 3600.0
    retry_window_s: float = 60.0
    max_kept_responses: int = 1_000
    retry_after_s: float = 1.0

    def __post_init__(self) -> None:
        for limit in fields(self):
            least = 0 if limit.name == "max_kept_responses" else 1e-3
            if not getattr(self, limit.name) >= least:
                raise ConfigError(f"{limit.name} must be positive, got {getattr(self, limit.name)}.")
