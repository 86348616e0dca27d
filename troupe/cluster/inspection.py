"""Looks at a running cluster from outside: asks every process how it is."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass

import psutil

from troupe.cluster.probes import Probe, ProbeKind
from troupe.cluster.state import ClusterState, ServiceRecord, is_alive


@dataclass(frozen=True)
class ServiceReport:
    """One process as it answered just now."""

    record: ServiceRecord
    # Why it is not healthy; empty when it is.
    reason: str
    # Of the process and what it started; shared pages count in each.
    rss_bytes: int

    @property
    def healthy(self) -> bool:
        """Whether it answered that it serves, or rests because nobody wants it."""
        return not self.reason


async def inspect(state: ClusterState, timeout: float = 3.0) -> list[ServiceReport]:
    """A report of every process; takes at most about `timeout` seconds."""
    return list(
        await asyncio.gather(*(_inspect_one(state, record, timeout) for record in state.services))
    )


async def _inspect_one(state: ClusterState, record: ServiceRecord, timeout: float) -> ServiceReport:
    if record.state == "parked":
        return ServiceReport(record, "", 0)
    if not is_alive(record.pid, record.created):
        # Between death and restart there is no process; the supervisor's word is all there is.
        return ServiceReport(record, record.state if record.state != "serving" else "dead", 0)
    kind = ProbeKind(record.probe)
    target = state.redis_url if kind == ProbeKind.REDIS else record.address
    reason = await Probe(kind, target).ask(timeout)
    return ServiceReport(record, reason or "", _memory(record.pid))


def _memory(pid: int | None) -> int:
    total = 0
    with suppress(psutil.Error):
        process = psutil.Process(pid)
        for one in [process, *process.children(recursive=True)]:
            with suppress(psutil.Error):
                total += one.memory_info().rss
    return total
