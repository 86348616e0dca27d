"""Ports for processes that tests start, and start again."""

from __future__ import annotations

import random
import socket
from contextlib import suppress


def free_port() -> int:
    """Return a free loopback port outside the range of outgoing connections, so that it is still
    free when its previous user restarts, or its next one has started."""
    while True:
        port = random.SystemRandom().randrange(15_000, 32_000)
        with socket.socket() as sock, suppress(OSError):
            sock.bind(("127.0.0.1", port))
            return port
