"""Ports for processes that tests start, and start again."""

from __future__ import annotations

import random
import socket
from contextlib import suppress


def free_port() -> int:
    """One of loopback that nobody listens on, outside the range of outgoing connections: it is
    still free when who had it comes back, or when who gets it has started."""
    while True:
        port = random.SystemRandom().randrange(15_000, 32_000)
        with socket.socket() as sock, suppress(OSError):
            sock.bind(("127.0.0.1", port))
            return port
