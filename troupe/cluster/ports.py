"""Picks loopback ports that stay free between two lives of the same child.

A child that is restarted must come back at the address that everybody else was told. Ports
are therefore taken from below the kernel's ephemeral range: an outgoing connection of some
other program can then not be given one of ours while its owner is down.
"""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterable
from random import Random

from troupe.cluster.errors import PortInUse

# Below 32768, where Linux's ephemeral range starts, and above the well-known services.
FIRST_PORT, LAST_PORT = 20_000, 32_000


def is_free(port: int, host: str = "127.0.0.1") -> bool:
    """Whether a server could listen on `host:port` now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # As servers do: a connection in TIME_WAIT is no reason to call a port used.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            probe.listen(1)
        except OSError as error:
            if error.errno in (errno.EADDRINUSE, errno.EACCES, errno.EADDRNOTAVAIL):
                return False
            raise
        return True


def require_free(port: int, *, field: str, option: str, host: str = "127.0.0.1") -> int:
    """Return `port`, or raise `PortInUse` naming the setting and the option that changes it."""
    if not is_free(port, host):
        raise PortInUse(field=field, port=port, host=host, option=option)
    return port


def pick_ports(
    names: Iterable[str],
    *,
    fixed: dict[str, int] | None = None,
    host: str = "127.0.0.1",
    seed: int | None = None,
) -> dict[str, int]:
    """A free port for every name, all different; `fixed` ones are taken as they are.

    Two clusters that start at the same moment must not try the same ports: the search
    begins at a random place unless `seed` says otherwise.
    """
    chosen = dict(fixed or {})
    random = Random(seed if seed is not None else int.from_bytes(os.urandom(8), "big"))
    candidate = random.randrange(FIRST_PORT, LAST_PORT)
    tried = 0
    for name in names:
        if name in chosen:
            continue
        while candidate in chosen.values() or not is_free(candidate, host):
            candidate = _next(candidate)
            tried += 1
            if tried > LAST_PORT - FIRST_PORT:
                raise PortInUse(field="ports", port=candidate, host=host, option="")
        chosen[name] = candidate
        candidate = _next(candidate)
    return chosen


def _next(port: int) -> int:
    return port + 1 if port + 1 < LAST_PORT else FIRST_PORT
