"""The processes of one environment: as many as are needed, up to a bound, and used again."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, Final

from troupe.workflow.environments import wire
from troupe.workflow.environments.errors import EnvironmentFault
from troupe.workflow.environments.host import FaultLimits
from troupe.workflow.environments.interface import Properties
from troupe.workflow.environments.process import EnvironmentProcess

# An idle process costs memory only; starting one costs an import of the user's libraries.
IDLE_SECONDS: Final = 60.0


class EnvironmentPool:
    """Lends processes that hold an opened environment, one to each borrower at a time.

    A process that failed is not taken back. An idle one ends after `idle_seconds`. Bound to the
    event loop of its first use; in another loop it begins empty.
    """

    def __init__(
        self,
        entrypoint: str,
        args: Mapping[str, Any] | None = None,
        *,
        processes: int = 16,
        limits: FaultLimits | None = None,
        idle_seconds: float = IDLE_SECONDS,
    ) -> None:
        self.entrypoint = entrypoint
        self.limits = limits or FaultLimits()
        self._args = dict(args or {})
        self._processes = max(1, processes)
        self._idle_seconds = idle_seconds
        self._loop: asyncio.AbstractEventLoop | None = None
        self._slots = asyncio.Semaphore(self._processes)
        self._idle: list[_Idle] = []
        self._lent: set[EnvironmentProcess] = set()
        # Killed, and perhaps not gone yet.
        self._ending: list[EnvironmentProcess] = []

    @property
    def idle(self) -> int:
        """Processes that wait for a borrower."""
        return len(self._idle)

    @property
    def lent(self) -> int:
        """Processes in use."""
        return len(self._lent)

    async def borrow(self) -> tuple[EnvironmentProcess, Properties]:
        """A process with an opened environment. Raises `EnvironmentFault`, and `EntrypointError`
        when the environment cannot be made at all."""
        self._bind()
        try:
            async with asyncio.timeout(self.limits.wait_seconds):
                await self._slots.acquire()
        except TimeoutError:
            raise EnvironmentFault(
                f"none of the {self._processes} processes of {self.entrypoint} was free within "
                f"{self.limits.wait_seconds:g} s",
                reason="no_process",
                environment=self.entrypoint,
                remedy="Allow more `processes`, or fewer concurrent trajectories.",
            ) from None
        try:
            while self._idle:
                idle = self._idle.pop()
                idle.timer.cancel()
                if idle.process.alive:
                    self._lent.add(idle.process)
                    return idle.process, idle.properties
            return await self._start()
        except BaseException:
            self._slots.release()
            raise

    def give_back(self, process: EnvironmentProcess, properties: Properties) -> None:
        """The borrower is done; its environment is not in the middle of a request."""
        if process not in self._lent:
            return  # of a loop that has ended
        self._lent.discard(process)
        self._slots.release()
        if process.alive:
            timer = asyncio.get_running_loop().call_later(self._idle_seconds, self._retire, process)
            self._idle.append(_Idle(process, properties, timer))
        else:
            self._end(process)

    def drop(self, process: EnvironmentProcess) -> None:
        """The borrower's process failed."""
        self._end(process)
        if process in self._lent:
            self._lent.discard(process)
            self._slots.release()

    async def close(self) -> None:
        """Kill all processes, lent ones included. Repeatable."""
        for idle in self._idle:
            idle.timer.cancel()
            self._end(idle.process)
        self._idle.clear()
        for process in list(self._lent):
            self.drop(process)
        while self._ending:
            await self._ending.pop().ended()

    async def _start(self) -> tuple[EnvironmentProcess, Properties]:
        process = EnvironmentProcess(self.entrypoint)
        self._lent.add(process)
        try:
            await process.start()
            request = {"op": "open", "entrypoint": self.entrypoint, "args": self._args}
            opened = await process.ask(request, self.limits.start_seconds)
        except BaseException:
            self._end(process)
            self._lent.discard(process)
            raise
        return process, wire.to_properties(opened)

    def _retire(self, process: EnvironmentProcess) -> None:
        self._idle = [idle for idle in self._idle if idle.process is not process]
        self._end(process)

    def _end(self, process: EnvironmentProcess) -> None:
        process.kill()
        self._ending = [other for other in self._ending if not other.gone] + [process]

    def _bind(self) -> None:
        loop = asyncio.get_running_loop()
        if self._loop is loop:
            return
        # The former loop's processes cannot be asked from here; they are no longer ours to use.
        for process in [*(idle.process for idle in self._idle), *self._lent]:
            process.abandon()
        self._loop = loop
        self._slots = asyncio.Semaphore(self._processes)
        self._idle, self._lent, self._ending = [], set(), []


class _Idle:
    def __init__(
        self, process: EnvironmentProcess, properties: Properties, timer: asyncio.TimerHandle
    ) -> None:
        self.process = process
        self.properties = properties
        self.timer = timer
