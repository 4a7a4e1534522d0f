"""Lines of JSON on a TCP connection, by which a trainer and its engines agree on broadcasts; nothing is pickled."""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping
from typing import Any

MAX_LINE_BYTES = 65_536


def address_towards(host: str) -> str | None:
    """Return this machine's address on the interface that leads to ``host``; None if there is none. Sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 9))
        except OSError:
            return None
        return str(probe.getsockname()[0])


class ControlConnection:
    """Messages between a trainer and an engine. Every method raises ``OSError`` when the peer is gone or too slow."""

    def __init__(self, connection: socket.socket, timeout_s: float | None) -> None:
        connection.settimeout(timeout_s)
        self._connection = connection
        self._reader = connection.makefile("rb")

    @classmethod
    def open(cls, location: Mapping[str, Any]) -> ControlConnection:
        """Connect to a trainer."""
        address, timeout_s = (location["host"], location["port"]), location["stall_s"]
        return cls(socket.create_connection(address, timeout=timeout_s), timeout_s)

    def keep_alive(self) -> None:
        """Wait for messages without a limit, as long as the peer's machine is there."""
        self._connection.settimeout(None)
        self._connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)

    def send(self, message: Mapping[str, Any]) -> None:
        """Send one message."""
        self._connection.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> dict[str, Any]:
        """Wait for one message."""
        # Bounded, so that a stranger's endless line does not fill the memory.
        line = self._reader.readline(MAX_LINE_BYTES)
        if not line.endswith(b"\n"):
            raise ConnectionError("the other side has closed the connection")
        try:
            message = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ConnectionError("the other side does not speak this protocol") from error
        if not isinstance(message, dict):
            raise ConnectionError("the other side does not speak this protocol")
        return message

    def close(self) -> None:
        """Close the connection, which wakes threads that wait on either side of it."""
        try:
            self._connection.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # the peer had closed it already
        finally:
            self._reader.close()
            self._connection.close()
