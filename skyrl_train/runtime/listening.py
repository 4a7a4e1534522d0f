"""A socket for an HTTP server: the endpoint's and the page's."""

from __future__ import annotations

import socket

from skyrl_train.errors import ConfigError


def bind(host: str, port: int, setting: str) -> tuple[socket.socket, str]:
    """Return a socket that is bound to ``host`` (a name or an address) and ``port`` (0: a free one), and the URL of its server.

    Raises:
        ConfigError: the address cannot be bound; the message names ``setting``, which has the port.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # The protocol is named so that asyncio sends without delay (TCP_NODELAY): else an answer in two parts waits for
    # the client's delayed acknowledgement, 40 ms.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # detects peers that vanished
        listener.bind((host.strip("[]"), port))
        listener.setblocking(False)
    except (OSError, OverflowError) as error:
        listener.close()
        reason = error.strerror if isinstance(error, OSError) else "a port is at most 65535"
        raise ConfigError(
            f"cannot listen on {host}:{port}: {reason}. Give another port in {setting}; 0 takes a free one."
        ) from error
    bound_host, bound_port = listener.getsockname()[:2]
    return listener, f"http://{f'[{bound_host}]' if ':' in bound_host else bound_host}:{bound_port}"
