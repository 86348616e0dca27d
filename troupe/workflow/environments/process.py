"""Environments in separate processes: the process, the pool that lends it, and `Hosted`."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from troupe.functions import shipped
from troupe.processes.ending import close_output, exit_text, kill_tree
from troupe.processes.frames import FrameTooLarge, frame, read_frame
from troupe.workflow.environments.child import (
    MAX_FRAME_BYTES,
    pack,
    to_error,
    to_properties,
    to_reset,
    to_step,
    unpack,
)
from troupe.workflow.environments.host import COUNTERS, AsyncEnvironment, FaultLimits
from troupe.workflow.environments.interface import Action, Properties, Reset, Step
from troupe.workflow.errors import EnvironmentFault, FaultReason

# Bytes of stderr that are kept for the error message of a dead process.
_TAIL_BYTES: Final = 2048
# Time limit for a killed process group to end.
_REAP_SECONDS: Final = 10.0

THREADS: Final = dict.fromkeys(
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
    """A child process with one environment, which answers one request at a time and ends at any
    fault."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._process: asyncio.subprocess.Process | None = None
        self._tail = b""
        self._draining: asyncio.Task[None] | None = None
        self._reaping: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start the process. Raises `EnvironmentFault` when the system refuses."""
        code = shipped.current()
        environment = {
            **os.environ,
            **THREADS,
            # The child can import the same modules as this process, the job's shipped ones first.
            "PYTHONPATH": os.pathsep.join(
                path or os.getcwd() for path in (*([str(code.folder)] if code else []), *sys.path)
            ),
        }
        try:
            self._process = await asyncio.create_subprocess_exec(
                # -P: the working directory does not come first on the path.
                *(sys.executable, "-P", "-m"),
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
        """Whether the process runs and has not been killed."""
        process = self._process
        return process is not None and process.returncode is None and self._reaping is None

    @property
    def gone(self) -> bool:
        """Whether a killed process has been reaped."""
        return self._reaping is not None and self._reaping.done()

    async def call(self, request: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        """Send a request and return the answer; kill the process after `seconds`.

        Raises `EnvironmentFault`, or the typed error that the environment raised. Cancellation also
        kills the process: a late answer would be mistaken for the answer to the next request.
        """
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        packed = pack(request)
        what = str(request["op"])
        answered = False
        try:
            async with asyncio.timeout(seconds):
                process.stdin.write(frame(packed))
                await process.stdin.drain()
                answer = unpack(await read_frame(process.stdout, MAX_FRAME_BYTES))
            answered = True
        except TimeoutError:
            COUNTERS.count("kills", self.name)
            raise self._fault(
                "deadline",
                f"did not end its {what} within {seconds:g} s and was killed",
                f"Allow more `{_LIMITS[what]}`, or fix the cause of the delay.",
            ) from None
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise await self._died(what) from error
        except FrameTooLarge as error:
            message = f"answered {what} with {error.size:,} bytes"
            raise self._fault("too_large", message) from error
        except ValueError as error:
            raise self._fault("too_large", f"answered {what} with invalid JSON: {error}") from error
        finally:
            if not answered:
                self.kill()
        if "error" in answer:
            raise to_error(answer["error"], self.name)
        ok: dict[str, Any] = answer["ok"]
        return ok

    def kill(self) -> None:
        """Kill the process and all processes that it started. Repeatable."""
        process = self._process
        if process is None or self._reaping is not None:
            return
        kill_tree(process.pid)
        self._reaping = asyncio.create_task(self._reap(process))

    def abandon(self) -> None:
        """Kill and reap the process after the end of the event loop in which it was started."""
        process, self._process = self._process, None
        if process is not None:
            kill_tree(process.pid)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(process.pid, 0)

    async def ended(self) -> None:
        """Wait until a killed process has been reaped."""
        if self._reaping is not None:
            await asyncio.wait({self._reaping})

    async def _reap(self, process: asyncio.subprocess.Process) -> None:
        close_output(process)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), _REAP_SECONDS)
        if self._draining is not None:
            self._draining.cancel()
        # The transport holds pipes, which uvloop does not close by itself.
        transport = getattr(process, "_transport", None)
        if transport is not None:
            transport.close()

    async def _died(self, what: str) -> EnvironmentFault:
        process = self._process
        assert process is not None
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), 1.0)
        if self._draining is not None:  # to get the end of stderr
            await asyncio.wait({self._draining}, timeout=1.0)
        how = "it hangs" if process.returncode is None else exit_text(process.returncode)
        last = self._tail.decode(errors="replace").strip().splitlines()[-1:]
        return self._fault("died", f"died during {what}: {how}" + "".join(f"; {s}" for s in last))

    async def _drain(self) -> None:
        """Read stderr until it ends, and keep its last bytes."""
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


# An idle process costs memory; starting one costs an import of the user's libraries.
IDLE_SECONDS: Final = 60.0


class EnvironmentPool:
    """A pool of processes with an opened environment, each lent to one borrower at a time.

    A failed process is not returned to the pool. An idle one ends after `idle_seconds`. The pool is
    bound to the event loop of its first use; in another loop it begins empty.
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
        # Killed processes, perhaps not reaped yet.
        self._ending: list[EnvironmentProcess] = []

    @property
    def idle(self) -> int:
        """Number of idle processes."""
        return len(self._idle)

    @property
    def lent(self) -> int:
        """Number of processes in use."""
        return len(self._lent)

    async def borrow(self) -> tuple[EnvironmentProcess, Properties]:
        """Return a process with an opened environment. Raises `EnvironmentFault`, and
        `EntrypointError` if the environment cannot be constructed."""
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
        """Return a process to the pool; no request may be under way."""
        if process not in self._lent:
            return  # lent in an event loop that has ended
        self._lent.discard(process)
        self._slots.release()
        if process.alive:
            timer = asyncio.get_running_loop().call_later(self._idle_seconds, self._retire, process)
            self._idle.append(_Idle(process, properties, timer))
        else:
            self._end(process)

    def drop(self, process: EnvironmentProcess) -> None:
        """Kill a lent process that failed."""
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
            opened = await process.call(request, self.limits.start_seconds)
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
        # Processes of the former loop cannot be used from this one.
        for process in [*(idle.process for idle in self._idle), *self._lent]:
            process.abandon()
        self._loop = loop
        self._slots = asyncio.Semaphore(self._processes)
        self._idle, self._lent, self._ending = [], set(), []


class _Idle(NamedTuple):
    """An idle process, and the timer that ends it."""

    process: EnvironmentProcess
    properties: Properties
    timer: asyncio.TimerHandle


class Hosted(AsyncEnvironment):
    """An environment in a process that is borrowed from a pool, from the first `reset` to `close`.

    A process that exceeds the time limit of a reset or step is killed with its descendants; other
    environments are not delayed.
    """

    def __init__(self, pool: EnvironmentPool, *, owns_pool: bool = False) -> None:
        super().__init__(pool.entrypoint, pool.limits)
        self._pool = pool
        self._owns_pool = owns_pool
        self._process: EnvironmentProcess | None = None
        self._opened: Properties | None = None

    @property
    def pid(self) -> int | None:
        """Id of the borrowed process; None: there is none."""
        return self._process.pid if self._process is not None else None

    async def close(self) -> None:
        """Return the process to the pool. Repeatable."""
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
        return to_reset(await self._process.call(request, self._limits.reset_seconds))

    async def _step(self, actions: Mapping[str, Action]) -> Step:
        if self._process is None:
            raise EnvironmentFault(
                f"{self.name} failed before or was closed",
                reason="died",
                environment=self.name,
                remedy="Call `reset(seed)`.",
            )
        request = {"op": "step", "actions": dict(actions)}
        return to_step(await self._process.call(request, self._limits.step_seconds))

    async def _discard(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            self._pool.drop(process)


def hosted(
    entrypoint: str, args: Mapping[str, Any] | None = None, *, limits: FaultLimits | None = None
) -> Hosted:
    """Return an environment `package.module:attribute`, called with `args` (JSON values), in a
    separate process that ends with `close` or with this process.

    For many trajectories, share an `EnvironmentPool`, as `GameWorkflow` does.
    """
    pool = EnvironmentPool(entrypoint, args, processes=1, limits=limits)
    return Hosted(pool, owns_pool=True)
