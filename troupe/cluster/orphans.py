"""Ends what a cluster left behind whose supervisor was killed.

Its children were told to end when it died, but they may still be draining; and two Redis
servers on one append-only file must never be.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from contextlib import suppress

from troupe.cluster.errors import ChildNotReady
from troupe.cluster.state import ClusterState, ServiceRecord, is_alive


async def end_orphans(state: ClusterState | None, *, timeout: float) -> list[str]:
    """End the processes that `state` names and that still run; returns their names.

    They get SIGTERM, after `timeout` seconds SIGKILL. A process is only touched when it started
    at the recorded moment: an id alone may by now be somebody else's.
    """
    if state is None:
        return []
    orphans = [s for s in state.services if is_alive(s.pid, s.created)]
    left = await _end(orphans, signal.SIGTERM, timeout)
    left = await _end(left, signal.SIGKILL, 5.0)
    if left:
        raise ChildNotReady(
            left[0].name, left[0].address, timeout, "does not end, even when killed", left[0].log
        )
    return [s.name for s in orphans]


async def _end(
    services: list[ServiceRecord], how: signal.Signals, timeout: float
) -> list[ServiceRecord]:
    for service in services:
        assert service.pid is not None  # is_alive
        with suppress(ProcessLookupError):
            if how == signal.SIGKILL:
                os.killpg(service.pid, how)  # every child leads its own group
            else:
                os.kill(service.pid, how)
    deadline = time.monotonic() + timeout
    while services and time.monotonic() < deadline:
        await asyncio.sleep(0.05)
        services = [s for s in services if is_alive(s.pid, s.created)]
    return services
