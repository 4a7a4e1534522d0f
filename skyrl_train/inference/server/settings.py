"""How the endpoint is bound, guarded and limited."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, field

from skyrl_train.errors import ConfigError

MIN_ADMIN_KEY = 16  # characters


@dataclass(frozen=True)
class ServerSettings:
    """Settings of the endpoint. The defaults serve this machine only, and nobody without a key.

    Args:
        host: the address to listen on; anything but loopback needs ``admin_key``.
        port: 0 takes a free one.
        model_names: what the policy is called; all of them mean the same, the first is the one listed first.
        admin_key: opens sessions, and may generate without one. None: nobody can, except where ``open``.
        open: requests without a session key count as the administrator's. For loopback only.
        max_body_bytes: of a request.
        max_header_bytes: of a request's line and headers together.
        max_in_flight: generations at once; more are answered with 429.
        max_connections: open at once, idle ones included; more are answered with 503 and closed.
        head_timeout_s: how long a request's line and headers may take to arrive, and how long a new connection may be silent.
        body_timeout_s: how long a request's body may take to arrive.
        write_timeout_s: how long a reader may stand still before its connection is closed and its generation cancelled.
        keep_alive_s: how long an idle connection is kept.
        docs: serve a page about the API at /docs (it loads scripts from elsewhere).
    """

    host: str = "127.0.0.1"
    port: int = 0
    model_names: tuple[str, ...] = ("policy",)
    admin_key: str | None = field(default=None, repr=False)
    open: bool = False
    max_body_bytes: int = 32 << 20
    max_header_bytes: int = 64 << 10
    max_in_flight: int = 16_384
    max_connections: int = 32_768
    head_timeout_s: float = 30.0
    body_timeout_s: float = 60.0
    write_timeout_s: float = 60.0
    keep_alive_s: int = 75
    docs: bool = False

    def __post_init__(self) -> None:
        if not self.model_names:
            raise ConfigError("the endpoint needs at least one model name")
        if self.admin_key is not None and len(self.admin_key) < MIN_ADMIN_KEY:
            raise ConfigError(f"the endpoint's admin key must have at least {MIN_ADMIN_KEY} characters")
        if is_loopback(self.host):
            return
        if self.open:
            raise ConfigError(
                f"an endpoint without keys must not listen on {self.host}: use 127.0.0.1, or an admin key without open"
            )
        if self.admin_key is None:
            raise ConfigError(f"an endpoint that listens on {self.host} needs an admin key")


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches ``host`` (an address, or ``localhost``)."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
