"""Environments in processes of their own: the process, the pool that lends it, and `Hosted`."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Mapping
from typing import Any, Final

import psutil

from troupe.workflow.environments.child import (
    HEADER_BYTES,
    MAX_FRAME_BYTES,
    pack,
    to_error,
    to_properties,
    to_reset,
    to_step,
    unpack,
)
from troupe.workflow.environments.errors import EnvironmentFault, FaultReason
from troupe.workflow.environments.host import COUNTERS, BaseEnvironmentHost, FaultLimits
from troupe.workflow.environments.interface import Action, Properties, Reset, Step

# What an environment wrote last to stderr says why it died.
_TAIL_BYTES: Final = 2048
# The kernel ends a killed group at once, unless the machine is in a bad state.
_REAP_SECONDS: Final = 10.0

_THREADS: Final = dict.fromkeys(
    (
        "OMP_NUM_THREADS",
        "MKL_NUM_THREADS",
        "OPENBLAS_NUM_THREADS",
        "NUMEXPR_NUM_THREADS",
        "TROUPE_THREADS",
    ),
    "1",
)


class EnvironmentProcess:
    """Answers one request at a time. After any fault it is dead."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._process: asyncio.subprocess.Process | None = None
        self._tail = b""
        self._draining: asyncio.Task[None] | None = None
        self._reaping: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start the process. Raises `EnvironmentFault` when the system refuses."""
        environment = {
            **os.environ,
            **_THREADS,
            # What this process can import, the child can.
            "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
        }
        try:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "troupe.workflow.environments.child",
                str(os.getpid()),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env=environment,
                start_new_session=True,
            )
        except OSError as error:
            raise self._fault("not_started", f"did not start: {error}") from error
        COUNTERS.count("starts", self.name)
        self._draining = asyncio.create_task(self._drain())

    @property
    def pid(self) -> int | None:
        """Process id, also of its group; None before the start."""
        return self._process.pid if self._process is not None else None

    @property
    def alive(self) -> bool:
        """Whether it can be asked."""
        process = self._process
        return process is not None and process.returncode is None and self._reaping is None

    @property
    def gone(self) -> bool:
        """Whether a killed process has been reaped."""
        return self._reaping is not None and self._reaping.done()

    async def ask(self, request: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        """The answer to a request, within `seconds`; then the process is killed.

        Raises `EnvironmentFault`, or the typed error that the environment raised. A caller that is
        cancelled leaves a dead process behind: its answer would be taken for the next one's.
        """
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        frame = pack(request)
        what = str(request["op"])
        answered = False
        try:
            async with asyncio.timeout(seconds):
                process.stdin.write(frame)
                await process.stdin.drain()
                header = await process.stdout.readexactly(HEADER_BYTES)
                length = int.from_bytes(header, "big")
                if length > MAX_FRAME_BYTES:
                    raise self._fault("too_large", f"answered {what} with {length:,} bytes")
                answer = unpack(await process.stdout.readexactly(length))
            answered = True
        except TimeoutError:
            COUNTERS.count("kills", self.name)
            raise self._fault(
                "deadline",
                f"did not end its {what} within {seconds:g} s and was killed",
                f"Allow more `{_LIMITS[what]}`, or mend what it waits for.",
            ) from None
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise await self._died(what) from error
        except ValueError as error:
            raise self._fault("too_large", f"answered {what} with no JSON: {error}") from error
        finally:
            if not answered:
                self.kill()
        if "error" in answer:
            raise to_error(answer["error"], self.name)
        ok: dict[str, Any] = answer["ok"]
        return ok

    def kill(self) -> None:
        """End the process and all that it started, at once. Repeatable."""
        process = self._process
        if process is None or self._reaping is not None:
            return
        _kill_group(process.pid)
        self._reaping = asyncio.create_task(self._reap(process))

    def abandon(self) -> None:
        """End the process from outside of the event loop that it was started in, and which is
        over: nobody else would take note of its end."""
        process, self._process = self._process, None
        if process is not None:
            _kill_group(process.pid)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(process.pid, 0)

    async def ended(self) -> None:
        """Wait until a killed process is gone."""
        if self._reaping is not None:
            await asyncio.wait({self._reaping})

    async def _reap(self, process: asyncio.subprocess.Process) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), _REAP_SECONDS)
        if self._draining is not None:
            self._draining.cancel()
        # Its transport holds pipes; uvloop closes them only when it is told to.
        transport = getattr(process, "_transport", None)
        if transport is not None:
            transport.close()

    async def _died(self, what: str) -> EnvironmentFault:
        process = self._process
        assert process is not None
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), 1.0)
        if self._draining is not None:  # its last words come before the end of the pipe
            await asyncio.wait({self._draining}, timeout=1.0)
        how = _how_it_died(process.returncode)
        last = self._tail.decode(errors="replace").strip().splitlines()[-1:]
        return self._fault("died", f"died during {what}: {how}" + "".join(f"; {s}" for s in last))

    async def _drain(self) -> None:
        """Keep the end of stderr, and the pipe empty."""
        assert self._process is not None
        assert self._process.stderr is not None
        while chunk := await self._process.stderr.read(65536):
            self._tail = (self._tail + chunk)[-_TAIL_BYTES:]

    def _fault(
        self, reason: FaultReason, message: str, remedy: str | None = None
    ) -> EnvironmentFault:
        return EnvironmentFault(
            f"environment {self.name} (process {self.pid}) {message}",
            reason=reason,
            environment=self.name,
            remedy=remedy,
            traceback=self._tail.decode(errors="replace") if reason == "died" else "",
        )


_LIMITS: Final = {"open": "start_seconds", "reset": "reset_seconds", "step": "step_seconds"}


def _kill_group(pid: int) -> None:
    """Kill a process with all that it started, those in sessions of their own included."""
    started: list[psutil.Process] = []
    with contextlib.suppress(psutil.Error):
        started = psutil.Process(pid).children(recursive=True)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    for process in started:
        with contextlib.suppress(psutil.Error):
            process.kill()


def _how_it_died(status: int | None) -> str:
    if status is not None and status < 0:
        with contextlib.suppress(ValueError):
            return f"killed by {signal.Signals(-status).name}"
    return f"exit status {status}"


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
        return process, to_properties(opened)

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


class Hosted(BaseEnvironmentHost):
    """Plays in a process borrowed from a pool from its first `reset` on until `close`.

    A process that passes the deadline of a reset or step is killed with all that it started; nobody
    else waits for it. `close` gives the process back.
    """

    def __init__(self, pool: EnvironmentPool, *, owns_pool: bool = False) -> None:
        super().__init__(pool.entrypoint, pool.limits)
        self._pool = pool
        self._owns_pool = owns_pool
        self._process: EnvironmentProcess | None = None
        self._opened: Properties | None = None

    @property
    def pid(self) -> int | None:
        """The process that it plays in now."""
        return self._process.pid if self._process is not None else None

    async def close(self) -> None:
        """Give the process back. Repeatable."""
        await super().close()
        process, self._process = self._process, None
        if process is not None:
            assert self._opened is not None
            self._pool.give_back(process, self._opened)
        if self._owns_pool:
            await self._pool.close()

    async def _open(self) -> Properties:
        if self._process is None or not self._process.alive:
            await self._discard()
            self._process, self._opened = await self._pool.borrow()
        assert self._opened is not None
        return self._opened

    async def _reset(self, seed: int) -> Reset:
        assert self._process is not None
        request = {"op": "reset", "seed": seed}
        return to_reset(await self._process.ask(request, self._limits.reset_seconds))

    async def _step(self, actions: Mapping[str, Action]) -> Step:
        if self._process is None:
            raise EnvironmentFault(
                f"{self._name} failed before or was closed",
                reason="died",
                environment=self._name,
                remedy="Call `reset(seed)`.",
            )
        request = {"op": "step", "actions": dict(actions)}
        return to_step(await self._process.ask(request, self._limits.step_seconds))

    async def _discard(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            self._pool.drop(process)


def hosted(
    entrypoint: str,
    args: Mapping[str, Any] | None = None,
    *,
    limits: FaultLimits | None = None,
) -> Hosted:
    """An environment `package.module:attribute`, called with `args` (JSON values), in a process of
    its own, which ends with `close` or with this process.

    Many trajectories share an `EnvironmentPool` instead, as `GameWorkflow` does.
    """
    pool = EnvironmentPool(entrypoint, args, processes=1, limits=limits)
    return Hosted(pool, owns_pool=True)
