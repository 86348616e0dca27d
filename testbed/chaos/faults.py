"""Kinds of faults, a class each: `inject` causes the fault, `heal` ends it."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import time
from contextlib import suppress
from typing import Final, Protocol

import psutil

from testbed.chaos.cluster import DisturbedCluster, ServiceProcess
from testbed.chaos.proxy import Link, Pair, wire
from testbed.chaos.schedule import (
    DELAY,
    FREEZE,
    FULL_QUEUE,
    PARTITION,
    SLOW_DISK,
    STALL,
    PlannedFault,
)
from troupe.rpc.errors import DeadlineExceeded

_DEATH_SECONDS: Final = 10.0
# System calls that make data durable. `write` is left out, since sockets use it too.
_DISK_CALLS: Final = "fsync,fdatasync,sync_file_range,rename,renameat,renameat2,unlink"
_DISK_DELAY_SECONDS: Final = 0.5
_LATE_SECONDS: Final = 0.15


class Fault(Protocol):
    """A fault that can be injected and healed."""

    kind: str
    victim: str
    # The means, if it differs between machines.
    means: str

    async def inject(self, cluster: DisturbedCluster) -> None:
        """Cause the fault."""

    async def heal(self, cluster: DisturbedCluster) -> None:
        """End the fault. Do nothing if it was not injected or its victim is gone."""


async def kill(life: ServiceProcess) -> None:
    """Send SIGKILL and wait until the process has ended.

    Raises `DeadlineExceeded` if it does not end within seconds.
    """
    process = life.process()
    if process is not None:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + _DEATH_SECONDS
    while life.process() is not None:
        if time.monotonic() > deadline:
            raise DeadlineExceeded(
                f"does not end within {_DEATH_SECONDS:g} s.", field="service", value=life.service
            )
        await asyncio.sleep(0.005)


class Stall:
    """A process that is stopped for a while (SIGSTOP): connections stay open, without answers."""

    kind = STALL
    means = "SIGSTOP"

    def __init__(self, victim: str) -> None:
        """`victim` is a process."""
        self.victim = victim
        self._life: ServiceProcess | None = None

    async def inject(self, cluster: DisturbedCluster) -> None:
        """Stop the process."""
        self._life = cluster.process_of(self.victim)
        self._send(signal.SIGSTOP)

    async def heal(self, cluster: DisturbedCluster) -> None:
        """Continue the process."""
        self._send(signal.SIGCONT)

    def _send(self, number: signal.Signals) -> None:
        if self._life is not None and (process := self._life.process()) is not None:
            for one in self._those_of(process):
                with suppress(psutil.NoSuchProcess):
                    one.send_signal(number)

    def _those_of(self, process: psutil.Process) -> list[psutil.Process]:
        return [process]


class Freeze(Stall):
    """A service that is taken for dead and then continues as if nothing had happened: it and all
    its processes are stopped, as on a paused machine."""

    kind = FREEZE

    def _those_of(self, process: psutil.Process) -> list[psutil.Process]:
        with suppress(psutil.NoSuchProcess):
            return [process, *process.children(recursive=True)]
        return []


class SlowDisk:
    """A disk on which every fsync of a process takes half a second.

    With `strace` the system calls themselves are late; without it the process is stopped instead.
    """

    kind = SLOW_DISK

    def __init__(self, victim: str) -> None:
        """`victim` is a process that writes."""
        self.victim = victim
        self._strace = shutil.which("strace")
        self.means = "strace" if self._strace else "SIGSTOP"
        self._stall = Stall(victim)
        self._tracer: asyncio.subprocess.Process | None = None

    async def inject(self, cluster: DisturbedCluster) -> None:
        """Slow the process's fsync down."""
        life = cluster.process_of(self.victim)
        if life is None:
            return
        if self._strace is None:
            await self._stall.inject(cluster)
            return
        micros = round(_DISK_DELAY_SECONDS * 1e6)
        self._tracer = await asyncio.create_subprocess_exec(
            self._strace,
            *("-f", "-qqq", "-o", os.devnull, "-p", str(life.pid)),
            *("-e", f"trace={_DISK_CALLS}", "-e", f"inject={_DISK_CALLS}:delay_enter={micros}"),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    async def heal(self, cluster: DisturbedCluster) -> None:
        """End the slowdown."""
        await self._stall.heal(cluster)
        if self._tracer is None:
            return
        tracer, self._tracer = self._tracer, None
        with suppress(ProcessLookupError):
            tracer.send_signal(signal.SIGINT)  # detaches
        try:
            async with asyncio.timeout(5):
                await tracer.wait()
        except TimeoutError:
            with suppress(ProcessLookupError):
                tracer.kill()
            await tracer.wait()


class _WireFault:
    """A fault of the connection between two services."""

    kind = ""
    means = "proxy"

    def __init__(self, pair: Pair) -> None:
        """`pair` is (caller, callee)."""
        self.victim = wire(pair)
        self._pair = pair

    async def inject(self, cluster: DisturbedCluster) -> None:
        """Disturb the connection."""
        self._break(cluster.network.link(self._pair))

    async def heal(self, cluster: DisturbedCluster) -> None:
        """Restore the connection."""
        cluster.network.link(self._pair).heal()

    def _break(self, link: Link) -> None:
        raise NotImplementedError


class Partition(_WireFault):
    """Two services that cannot reach each other."""

    kind = PARTITION

    def __init__(self, pair: Pair, *, severed: bool) -> None:
        """`severed`: connections break and are refused; otherwise they stay open and nothing
        passes."""
        super().__init__(pair)
        self.means = "proxy, refusing" if severed else "proxy, silent"
        self._severed = severed

    def _break(self, link: Link) -> None:
        if self._severed:
            link.sever()
        else:
            link.hold()


class Delay(_WireFault):
    """Messages between two services that arrive late."""

    kind = DELAY

    def _break(self, link: Link) -> None:
        link.delay = _LATE_SECONDS


class FullQueue(_WireFault):
    """A receiver that reads nothing, so that the sender's buffers fill."""

    kind = FULL_QUEUE

    def _break(self, link: Link) -> None:
        link.hold(forth=True, back=False)


def fault_of(planned: PlannedFault) -> Fault:
    """Return the fault of a plan's entry. Not a kill: the supervisor restarts a killed process."""
    if planned.kind == STALL:
        return Stall(planned.victims[0])
    if planned.kind == FREEZE:
        return Freeze(planned.victims[0])
    if planned.kind == SLOW_DISK:
        return SlowDisk(planned.victims[0])
    assert planned.pair is not None, planned
    if planned.kind == PARTITION:
        return Partition(planned.pair, severed=planned.variant == "severed")
    if planned.kind == DELAY:
        return Delay(planned.pair)
    assert planned.kind == FULL_QUEUE, planned
    return FullQueue(planned.pair)
