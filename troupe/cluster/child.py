"""`Child`: one process of the cluster, from its start through restarts to its stop.

IDLE -> STARTING -> SERVING -> STOPPING -> STOPPED
           ^           |
           +-- WAITING <+   (died: back-off, or until the disk has room; then again)
STARTING | WAITING -> FAILED (does not start, or dies too often)
SERVING -> STOPPING -> PARKED -> STARTING (not needed for a while)
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from enum import StrEnum
from pathlib import Path

from troupe.cluster import logs
from troupe.cluster.errors import ChildFailed, ChildNotReady, DiskFull
from troupe.cluster.layout import ChildSpec
from troupe.devices import pin
from troupe.disks import SLOWEST_BYTES_PER_SECOND, shortage
from troupe.processes.ending import AsyncProcess, exit_text, signal_group, stop_process_async
from troupe.processes.forked import ForkServer
from troupe.processes.tether import tethered

# Seconds before the first restart: short, so that callers' retries bridge the gap.
FIRST_BACKOFF = 0.2
# A child that dies more than `max_restarts` times within this many seconds is given up.
RESTART_WINDOW = 120.0
_PROBE_SECONDS = 2.0
GROUP_EXIT_SECONDS = 1.0
_DISK_POLL_SECONDS = 1.0


def reading_seconds(directory: Path | None) -> float:
    """Return how long a process may take to read a directory's files; 0 without a directory."""
    if directory is None:
        return 0.0
    total = 0
    for file in directory.rglob("*"):
        with suppress(FileNotFoundError):  # replaced meanwhile
            total += file.stat().st_size
    return total / SLOWEST_BYTES_PER_SECOND


class ChildState(StrEnum):
    """State of a child process."""

    IDLE = "idle"
    STARTING = "starting"
    SERVING = "serving"
    WAITING = "waiting"
    STOPPING = "stopping"
    STOPPED = "stopped"
    PARKED = "parked"
    FAILED = "failed"


class Child:
    """A child process: started from `spec` and kept alive. Use it from one event loop."""

    def __init__(
        self,
        spec: ChildSpec,
        log: Path,
        changed: Callable[[Child, str], None],
        forks: ForkServer | None = None,
    ) -> None:
        """Call `changed(child, event)` after each change; `event` is a text for people or empty.

        `forks` starts a child that has modules to preload, while it runs.
        """
        self.spec = spec
        self._forks = forks
        self.log = log
        self.state = ChildState.IDLE
        self.restarts = 0
        self.pid: int | None = None
        self._changed = changed
        self._process: AsyncProcess | None = None
        self._deaths: deque[float] = deque()
        self._launches = 0

    async def start(self) -> None:
        """Start the process and wait until it is ready.

        Raises `ChildFailed` when it ends before that and `ChildNotReady` when it takes too long.
        """
        for left in reversed(range(self.spec.start_attempts)):
            self._move(ChildState.STARTING)
            try:
                await self._launch()
                await self._until_ready()
            except (ChildFailed, ChildNotReady) as error:
                if (full := await self._shortage()) is not None:
                    self._move(ChildState.FAILED)
                    raise DiskFull(self.spec.name, self.log.parent, full) from error
                if left and isinstance(error, ChildFailed):
                    event = f"{self.spec.name} ended before it was ready; restarting it"
                    self._move(ChildState.WAITING, event)
                    continue
                self._move(ChildState.FAILED)
                raise
            break
        self._move(ChildState.SERVING)

    async def keep(self) -> None:
        """Restart the process whenever it dies; on a full or read-only disk, later. Never returns.

        Raises `ChildFailed` when it has died too often.
        """
        while True:
            assert self._process is not None  # start() has returned
            status = await self._process.wait()
            await self._back_off(f"{self.spec.name} {exit_text(status)}")
            self._sweep()
            self.restarts += 1
            self._move(ChildState.STARTING)
            try:
                await self._launch()
                await self._until_ready()
            except ChildNotReady:
                # Alive but not ready: kill it, which counts as one more death.
                self._kill()
                continue
            except ChildFailed:
                continue
            self._move(ChildState.SERVING, f"{self.spec.name} is back")

    async def stop(self) -> None:
        """Stop the process: SIGTERM, and SIGKILL after `stop_seconds`; then its whole group."""
        if self._process is None:
            return
        self._move(ChildState.STOPPING)
        if self._process.returncode is None:
            await stop_process_async(self._process, self.spec.stop_seconds)
        await self._await_group_exit()
        self._sweep()
        self.pid = None
        self._move(ChildState.STOPPED)

    async def park(self) -> None:
        """Stop the process until `start` is called again."""
        await self.stop()
        self._move(ChildState.PARKED, f"{self.spec.name} is parked: no policy needs it")

    def strike(self) -> None:
        """Kill the process and its whole group with SIGKILL; do nothing if there is no process."""
        self._sweep()
        self._kill()

    async def kill(self) -> None:
        """Call `strike` and wait until the process is gone."""
        if self._process is None:
            return
        self.strike()
        await self._process.wait()
        self.pid = None
        self._move(ChildState.STOPPED)

    async def _launch(self) -> None:
        """Start the process. Raises `ChildFailed` when the system cannot (memory, limits)."""
        self._launches += 1
        try:
            self._process = await self._spawn()
        except OSError as error:
            what = f"could not be started: {error.strerror or error}"
            raise ChildFailed(self.spec.name, what, self.log) from error
        self.pid = self._process.pid
        if self.spec.devices:
            pin(self.pid, self.spec.devices)
        self._changed(self, "")

    async def _spawn(self) -> AsyncProcess:
        with logs.open_log(self.log, f"{self.spec.name} start {self._launches}") as log:
            if self._forks is not None and self.spec.preload:
                # Without a fork server, or when it is too slow, the process starts by itself.
                with suppress(OSError):
                    async with asyncio.timeout(self.spec.start_seconds):
                        return await self._forks.fork(
                            self.spec.fork_server,
                            self.spec.module,
                            self._environment(),
                            self.log,
                            self.spec.preload,
                        )
            return await asyncio.create_subprocess_exec(
                *tethered(self.spec.command),
                env=self._environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                # A group of its own: a terminal's Ctrl-C reaches the supervisor alone, and the
                # child's own processes can be killed with it.
                start_new_session=True,
                # Files that a service writes are private to its user.
                umask=0o077,
            )

    def _environment(self) -> dict[str, str]:
        environment = self.spec.full_environment()
        if worker := environment.get("TROUPE_WORKER_ID"):
            # The orchestrator regards a restarted worker as a new one.
            environment["TROUPE_WORKER_ID"] = f"{worker}-{self._launches}"
        return environment

    async def _until_ready(self) -> None:
        assert self._process is not None
        ended = asyncio.ensure_future(self._process.wait())
        probing = asyncio.ensure_future(self._probe())
        try:
            await asyncio.wait({ended, probing}, return_when=asyncio.FIRST_COMPLETED)
            # Check first whether it ended: another program may answer on the child's port.
            if ended.done():
                self._sweep()
                raise ChildFailed(
                    self.spec.name,
                    f"{exit_text(ended.result())} before it was ready",
                    self.log,
                    logs.last_line(self.log),
                )
            if (reason := probing.result()) is not None:
                raise ChildNotReady(
                    self.spec.name, self.spec.address, self.spec.start_seconds, reason, self.log
                )
        finally:
            ended.cancel()
            probing.cancel()

    async def _probe(self) -> str | None:
        """Return None once the child is ready, or the reason when its time to start is over."""
        limit = self.spec.start_seconds + await asyncio.to_thread(reading_seconds, self.spec.reads)
        deadline = time.monotonic() + limit
        pause = 0.05
        while (reason := await self.spec.probe.ask(_PROBE_SECONDS)) is not None:
            if time.monotonic() >= deadline:
                return reason
            await asyncio.sleep(pause)
            pause = min(0.5, pause * 1.5)
        return None

    async def _back_off(self, died: str) -> None:
        if (full := await self._shortage()) is not None:
            # It would die again: Redis ends when it cannot write its append-only file.
            self._move(ChildState.WAITING, f"{died}: {full}; it restarts when files can be written")
            while await self._shortage() is not None:  # noqa: ASYNC110
                await asyncio.sleep(_DISK_POLL_SECONDS)
            self._move(
                ChildState.WAITING, f"files can be written again: restarting {self.spec.name}"
            )
            return
        now = time.monotonic()
        self._deaths.append(now)
        while self._deaths[0] < now - RESTART_WINDOW:
            self._deaths.popleft()
        if len(self._deaths) > self.spec.max_restarts:
            self._move(ChildState.FAILED)
            raise ChildFailed(
                self.spec.name,
                f"died {len(self._deaths)} times within {RESTART_WINDOW:g} s",
                self.log,
                logs.last_line(self.log),
            )
        # Bound the exponent: with a large budget of restarts it would overflow a float.
        doublings = min(30, len(self._deaths) - 1)
        pause = min(self.spec.max_backoff_seconds, FIRST_BACKOFF * 2.0**doublings)
        self._move(ChildState.WAITING, f"{died}; restarting it in {pause:.1f} s")
        await asyncio.sleep(pause)

    async def _shortage(self) -> str | None:
        """Return why the data directory's disk cannot be written to; None if it can."""
        return await asyncio.to_thread(shortage, self.log.parent)

    def _kill(self) -> None:
        if self._process is not None:
            with suppress(ProcessLookupError):
                self._process.kill()

    def _sweep(self) -> None:
        """Kill the processes that a dead process left in its group."""
        if self._process is not None:
            signal_group(self._process.pid, signal.SIGKILL)

    async def _await_group_exit(self) -> None:
        """Wait a moment for the rest of an ended process's group to exit by itself.

        Python's resource tracker removes shared memory and semaphores after its parent's end;
        killed too early, it leaves them behind.
        """
        assert self._process is not None
        with suppress(TimeoutError, ProcessLookupError, PermissionError):
            async with asyncio.timeout(GROUP_EXIT_SECONDS):
                while True:
                    os.killpg(self._process.pid, 0)
                    await asyncio.sleep(0.02)

    def _move(self, state: ChildState, event: str = "") -> None:
        self.state = state
        self._changed(self, event)
