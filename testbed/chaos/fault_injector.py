"""Injection of a schedule of faults into a running cluster."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final

from testbed.chaos.cluster import DisturbedCluster, ServiceProcess
from testbed.chaos.faults import Fault, fault_of, kill
from testbed.chaos.schedule import KILL, PlannedFault, scaled
from troupe.rpc.errors import TroupeError

POWER_OFF: Final = "power_off"
# Time limit of a service's recovery, after which it is reported and the next fault follows
# nevertheless. Equal to the cluster's limit for a start (ClusterSettings.start_seconds).
_RECOVERY_SECONDS: Final = 120.0


@dataclass(frozen=True)
class InjectedFault:
    """A fault that was injected, and its consequences."""

    # Seconds since the job began.
    at: float
    kind: str
    victim: str
    means: str
    # Until the victim was healthy again (kills, power cuts), or the duration (other faults).
    seconds: float
    # False: it did not recover within the time limit.
    recovered: bool = True


@dataclass
class InjectionLog:
    """Faults injected so far; grows while the injector runs."""

    kills: int = 0
    power_offs: int = 0
    injected: list[InjectedFault] = field(default_factory=list)
    # Actions in which the harness itself failed.
    troubles: list[str] = field(default_factory=list)


class FaultInjector:
    """An injector of faults, one after another, until enough processes have been killed."""

    def __init__(
        self,
        cluster: DisturbedCluster,
        schedule: Iterator[PlannedFault],
        *,
        kills: int,
        power_offs: int,
        progress: Callable[[], float],
        tell: Callable[[str], None],
    ) -> None:
        """`progress()` is the share of the job that is done; `tell` gets a line per fault."""
        self.done = InjectionLog()
        self._cluster = cluster
        self._schedule = schedule
        self._kills = kills
        self._power_offs = power_offs
        self._progress = progress
        self._tell = tell
        self._started = time.monotonic()
        # Faults that last for a while, and the task that ends each.
        self._lasting: dict[Fault, asyncio.Task[None]] = {}

    async def run(self) -> None:
        """Inject until all kills and power cuts are done, then heal the faults that last."""
        try:
            for planned in self._schedule:
                if self._enough():
                    break
                await self._pause(planned.pause)
                if self._power_is_due():
                    await self._power_off()
                    continue
                await self._inject(planned)
            while not self._power_is_done():
                await self._pause(2.0)
                if self._power_is_due():
                    await self._power_off()
        finally:
            await self.heal_all()

    async def heal_all(self) -> None:
        """Heal every fault that still lasts."""
        lasting, self._lasting = self._lasting, {}
        for task in lasting.values():
            task.cancel()
        await asyncio.gather(*lasting.values(), return_exceptions=True)
        for fault in lasting:
            await fault.heal(self._cluster)

    def _enough(self) -> bool:
        return self.done.kills >= self._kills

    def _power_is_done(self) -> bool:
        return self.done.power_offs >= self._power_offs

    def _power_is_due(self) -> bool:
        # Spread over the job: the k-th of n when k/(n+1) of it is done.
        share = (self.done.power_offs + 1) / (self._power_offs + 1)
        return not self._power_is_done() and self._progress() >= share

    async def _pause(self, seconds: float) -> None:
        """Sleep for at least `seconds`, longer while faults are ahead of the job's progress."""
        started = time.monotonic()
        while True:
            done = self.done.kills / max(1, self._kills)
            wanted = scaled(seconds, done, self._progress())
            left = started + wanted - time.monotonic()
            if left <= 0:
                return
            await asyncio.sleep(min(0.2, left))

    async def _inject(self, planned: PlannedFault) -> None:
        try:
            if planned.kind == KILL:
                await self._kill(planned)
            else:
                await self._start(planned)
        except (TroupeError, OSError) as error:
            self._trouble(str(error))

    async def _kill(self, planned: PlannedFault) -> None:
        lives = {name: self._cluster.process_of(name) for name in planned.victims}
        alive = {name: life for name, life in lives.items() if life is not None}
        if not alive:
            return
        started = time.monotonic()
        await asyncio.gather(*(kill(life) for life in alive.values()))
        self.done.kills += len(alive)
        note = ""
        if planned.variant == "again":
            await asyncio.sleep(planned.seconds)
            (name,) = alive
            again = self._cluster.process_of(name)
            if again is not None and again != alive[name]:
                await kill(again)
                self.done.kills += 1
                alive[name] = again
                note = " (and again while it came back)"
        await asyncio.gather(*(self._recovery(life, started, note) for life in alive.values()))

    async def _recovery(self, dead: ServiceProcess, started: float, note: str) -> None:
        """Wait until the service of `dead` is healthy again, and record how long it took."""
        name, recovered = dead.service, True
        try:
            await self._cluster.until_healthy(name, _RECOVERY_SECONDS, but=dead)
        except TroupeError as error:
            recovered = False
            self._trouble(str(error))
        seconds = time.monotonic() - started
        means = f"SIGKILL{', twice' if note else ''}"
        self._note(InjectedFault(self._at(), KILL, name, means, seconds, recovered))
        how = f"healthy again after {seconds:.1f} s" if recovered else "not healthy again yet"
        self._tell(f"killed {name}{note}: {how}")

    async def _start(self, planned: PlannedFault) -> None:
        fault = fault_of(planned)
        if any(one.victim == fault.victim for one in self._lasting):
            return  # broken already
        await fault.inject(self._cluster)
        self._tell(f"{fault.kind} of {fault.victim} for {planned.seconds:.1f} s ({fault.means})")
        self._note(
            InjectedFault(self._at(), fault.kind, fault.victim, fault.means, planned.seconds)
        )

        async def end() -> None:
            await asyncio.sleep(planned.seconds)
            del self._lasting[fault]
            await fault.heal(self._cluster)

        self._lasting[fault] = asyncio.create_task(end(), name=f"{fault.kind} of {fault.victim}")

    async def _power_off(self) -> None:
        await self.heal_all()
        seconds = await self._cluster.power_off()
        self.done.power_offs += 1
        self._note(InjectedFault(self._at(), POWER_OFF, "everything", "SIGKILL", seconds))
        self._tell(f"power off: all services healthy again after {seconds:.1f} s")

    def _at(self) -> float:
        return time.monotonic() - self._started

    def _note(self, injected: InjectedFault) -> None:
        self.done.injected.append(injected)

    def _trouble(self, text: str) -> None:
        self.done.troubles.append(text)
        self._tell(text)
