"""One child process with one environment in it, and its end at a deadline."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Mapping
from typing import Any, Final

import psutil

from troupe.workflow.environments import wire
from troupe.workflow.environments.counters import COUNTERS
from troupe.workflow.environments.errors import EnvironmentFault, FaultReason

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
        frame = wire.pack(request)
        what = str(request["op"])
        answered = False
        try:
            async with asyncio.timeout(seconds):
                process.stdin.write(frame)
                await process.stdin.drain()
                header = await process.stdout.readexactly(wire.HEADER_BYTES)
                length = int.from_bytes(header, "big")
                if length > wire.MAX_FRAME_BYTES:
                    raise self._fault("too_large", f"answered {what} with {length:,} bytes")
                answer = wire.unpack(await process.stdout.readexactly(length))
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
            raise wire.to_error(answer["error"], self.name)
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
