"""Settings of the endpoint: address, keys and limits."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from skyrl_train.errors import ConfigError

MIN_ADMIN_KEY = 16  # characters


@dataclass(frozen=True)
class ServerSettings:
    """Settings of the endpoint. By default only this machine reaches it, and every request needs a key.

    Args:
        host: address to listen on. Anything but loopback requires ``admin_key``.
        port: 0 takes a free port.
        public_url: the endpoint's URL for agents that reach it by another address than ``host`` and ``port``: in containers, on
            other machines, behind a proxy. Without ``/v1``; ``{port}`` stands for the port that it listens on. None: the
            address that it listens on.
        model_names: names of the policy in requests. All are equivalent; GET /v1/models lists them in this order.
        admin_key: key of the administrator, who opens sessions and may generate without one. None: no administrator,
            unless ``open``.
        open: requests without a session key have the administrator's rights. For loopback only.
        max_body_bytes: size limit of a request body.
        max_header_bytes: size limit of the request line and headers together.
        max_in_flight: concurrent generations; further ones get 429.
        max_connections: open connections, idle ones included; further ones get 503 and are closed.
        head_timeout_s: time limit for a request's line and headers to arrive, and for the silence of a new connection.
        body_timeout_s: time limit for a request's body to arrive.
        write_timeout_s: a client that reads nothing for this long is disconnected and its generation is cancelled.
        keep_alive_s: how long an idle connection stays open.
        docs: serve an API page at /docs. The page loads scripts from the internet.
    """

    host: str = "127.0.0.1"
    port: int = 0
    public_url: str | None = None
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
        if self.public_url is not None:
            _check_public_url(self.public_url, self.port)
        # Other machines can reach every other address, so an endpoint there needs a key.
        if is_loopback(self.host):
            return
        if self.open:
            raise ConfigError(
                f"an endpoint without keys must not listen on {self.host}: use 127.0.0.1, or an admin key without open"
            )
        if self.admin_key is None:
            raise ConfigError(f"an endpoint that listens on {self.host} needs an admin key")


def _check_public_url(url: str, port: int) -> None:
    try:
        parts = urlsplit(url.replace("{port}", "1"))
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        usable &= parts.username is None and not parts.query and not parts.fragment
        usable &= not re.search(r"[{}\s]", parts.geturl())
        path = parts.path
    except ValueError:  # not a port, or not an address in brackets
        usable, path = False, ""
    if not usable:
        raise ConfigError(
            f"the endpoint's public_url must be a URL such as http://10.0.0.7:8000 or http://host.docker.internal:{{port}}, got "
            f"{url!r}"
        )
    if path.rstrip("/").endswith("/v1"):
        raise ConfigError(f"the endpoint's public_url must not end in /v1, which agents are given with it; got {url!r}")
    if port == 0 and "{port}" not in url:
        raise ConfigError(
            f"the endpoint's public_url is {url!r}, and its port a free one: set the port, or write {{port}} in the URL where it "
            "belongs"
        )


def is_loopback(host: str) -> bool:
    """Return whether ``host`` (an address or ``localhost``) is reachable from this machine only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
