"""One worker process and its replacements: runs one call at a time, whatever the call does."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from dataclasses import dataclass
from typing import Any, Final

import structlog

from services.reward import worker
from services.reward.cpu import CoreManager, Lease
from services.reward.process import WorkerDied, WorkerProcess
from services.reward.registry import Function
from troupe.v1 import reward_pb2 as pb

log = structlog.get_logger("troupe.reward")

_KINDS: Final = {
    worker.RAISED: pb.InvocationError.KIND_RAISED,
    worker.OUT_OF_MEMORY: pb.InvocationError.KIND_OUT_OF_MEMORY,
    worker.BAD_RESULT: pb.InvocationError.KIND_BAD_RESULT,
    worker.NOT_IMPORTABLE: pb.InvocationError.KIND_NOT_IMPORTABLE,
}


@dataclass(frozen=True)
class Outcome:
    """What became of one invocation: `result_json` after `seconds` of running, or `error`."""

    result_json: str = ""
    seconds: float = 0.0
    error: pb.InvocationError | None = None


class BadArguments(ValueError):
    """`arguments_json` is not a JSON object; the caller's fault, so no outcome."""


class _Lost(Exception):
    """The worker is gone; `kind` says why, the text says it to people."""

    def __init__(self, kind: pb.InvocationError.Kind.ValueType, text: str) -> None:
        super().__init__(text)
        self.kind = kind


class Slot:
    """A place for exactly one process; when that has gone, for its successor."""

    def __init__(
        self, import_seconds: float, name: str = "worker", cores: CoreManager | None = None
    ) -> None:
        """`name` is unique among slots; `cores` hands cores out, if anybody does."""
        self.restarts = 0
        self.name = name
        self._import_seconds = import_seconds
        self._cores = cores
        # Whether `cores` knows the process that runs now.
        self._adopted = False
        self._process: WorkerProcess | None = None
        # Processes that are ending.
        self._ending: set[asyncio.Task[None]] = set()
        # Function -> its registrations when this worker last looked at its code.
        self._prepared: dict[str, int] = {}
        self._cancelled = False

    async def start(self) -> None:
        """Start the worker and wait until it answers."""
        await self._call({"call": "ready"}, self._import_seconds)

    async def stop(self) -> None:
        """Kill the worker."""
        self._drop()
        await asyncio.gather(*self._ending)
        if self._cores is not None:
            self._cores.forget(self.name)

    def holds(self, function: Function) -> bool:
        """Whether the worker has imported `function` since its last registration."""
        return self._prepared.get(function.key) == function.registrations

    def cancel(self) -> None:
        """End the call that runs now; its outcome is KIND_CANCELLED."""
        if self._process is not None:
            self._cancelled = True
            self._process.kill()

    async def run(
        self, function: Function, arguments_json: str, lease: Lease | None = None
    ) -> Outcome:
        """Run one call to its end, on the cores of `lease`.

        Raises `BadArguments`; every other end is an outcome.
        """
        self._cancelled = False
        entrypoint = function.spec.entrypoint
        try:
            if self._cores is not None and lease is not None:
                await self._move_to(lease, self._cores)
            if not self.holds(function):
                failed = await self._prepare(function)
                if failed is not None:
                    return failed
            began = time.perf_counter()
            request = {
                "call": "invoke",
                "entrypoint": entrypoint,
                "arguments_json": arguments_json,
                "memory_mib": function.spec.memory_mib,
            }
            answer = await self._call(request, function.spec.timeout_seconds)
        except _Lost as lost:
            return Outcome(error=pb.InvocationError(kind=lost.kind, message=str(lost)))
        if answer.kind == worker.BAD_ARGUMENTS:
            raise BadArguments(answer.text)
        if answer.kind == worker.OUT_OF_MEMORY:
            self._replace()  # whatever was half allocated goes with it
        return _outcome(answer, time.perf_counter() - began)

    async def _move_to(self, lease: Lease, cores: CoreManager) -> None:
        if not self._adopted:
            answer = await self._call({"call": "ready"}, self._import_seconds)
            cores.adopt(self.name, int(answer.text))
            self._adopted = True
        cores.grant(lease)

    async def _prepare(self, function: Function) -> Outcome | None:
        entrypoint, registrations = function.spec.entrypoint, function.registrations
        request = {"call": "prepare", "entrypoint": entrypoint}
        try:
            answer = await self._call(request, self._import_seconds)
            if answer.kind == worker.STALE:
                log.info("modules were edited: new worker", entrypoint=entrypoint)
                self._replace()
                answer = await self._call(request, self._import_seconds)
        except _Lost as lost:
            if lost.kind == pb.InvocationError.KIND_CANCELLED:
                raise
            message = f"importing {entrypoint}: {lost}"
            error = pb.InvocationError(kind=pb.InvocationError.KIND_NOT_IMPORTABLE, message=message)
            return Outcome(error=error)
        if answer.kind == worker.OK:
            self._prepared[function.key] = registrations
            return None
        return _outcome(answer)

    async def _call(self, request: dict[str, Any], timeout: float) -> worker.Answer:
        """The worker's answer; raises `_Lost` when there is none, and the worker is replaced."""
        kind = pb.InvocationError
        timer = asyncio.timeout(timeout)
        try:
            async with timer:
                if self._process is None:
                    self._process = await self._open()
                return await self._process.call(request)
        except TimeoutError:
            if not timer.expired():
                raise
            self._replace()
            raise _Lost(kind.KIND_TIMEOUT, f"did not end within {timeout:g} s") from None
        except (WorkerDied, OSError) as died:
            self._replace()
            if self._cancelled:
                raise _Lost(kind.KIND_CANCELLED, "cancelled while it ran") from None
            raise _Lost(kind.KIND_WORKER_DIED, str(died)) from None
        except asyncio.CancelledError:
            self._replace()
            raise

    async def _open(self) -> WorkerProcess:
        path = os.pathsep.join(entry for entry in sys.path if entry)
        # -P: its own directory is no place to import from.
        command = [sys.executable, "-P", worker.__file__, str(os.getpid())]
        return await WorkerProcess.start(command, {**os.environ, "PYTHONPATH": path})

    def _replace(self) -> None:
        """Drop the worker; the next call starts another."""
        self.restarts += 1
        self._drop()

    def _drop(self) -> None:
        self._prepared.clear()
        self._adopted = False
        process, self._process = self._process, None
        if process is not None:
            task = asyncio.create_task(process.end())
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)


def _outcome(answer: worker.Answer, seconds: float = 0.0) -> Outcome:
    if answer.kind == worker.OK:
        return Outcome(answer.text, seconds)
    return Outcome(
        error=pb.InvocationError(
            kind=_KINDS[answer.kind], message=answer.text, traceback=answer.traceback
        )
    )
