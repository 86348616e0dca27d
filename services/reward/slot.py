"""One worker process and its replacements: runs one call at a time, whatever the call does."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Any, Final

import structlog

from services.reward import worker
from services.reward.cpu import CoreManager, Lease
from services.reward.fence import Fence
from services.reward.process import WorkerDied, WorkerProcess
from services.reward.registry import Function
from services.reward.sandbox import BUBBLEWRAP, Cage
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

    def __init__(
        self, kind: pb.InvocationError.Kind.ValueType, text: str, output: str = ""
    ) -> None:
        super().__init__(text)
        self.kind, self.output = kind, output


class Slot:
    """A place for exactly one process; when that has gone, for its successor."""

    def __init__(
        self,
        import_seconds: float,
        name: str = "worker",
        cores: CoreManager | None = None,
        fence: Fence | None = None,
    ) -> None:
        """`name` is unique among slots; `cores` hands cores out, if anybody does; `fence` limits
        what a sandbox takes as a whole, if anything can."""
        self.restarts = 0
        self.name = name
        self._import_seconds = import_seconds
        self._cores = cores
        self._fence = fence
        # What the process that runs now is confined to.
        self._cage = Cage()
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
        for manager in (self._cores, self._fence):
            if manager is not None:
                manager.forget(self.name)

    def holds(self, function: Function) -> bool:
        """Whether the worker has imported `function` since its last registration."""
        return self._prepared.get(function.key) == function.registrations

    def suits(self, function: Function) -> bool:
        """Whether the worker is confined as `function` wants it."""
        return self._cage == function.cage

    def cancel(self) -> None:
        """End the call that runs now; its outcome is KIND_CANCELLED."""
        self._cancelled = True
        if self._process is not None:
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
            if not self.suits(function):
                self._drop()
                self._cage = function.cage
            if not self._adopted:
                await self._adopt(function)
            if self._cores is not None and lease is not None:
                self._cores.grant(lease)
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
            error = pb.InvocationError(kind=lost.kind, message=str(lost), output=lost.output)
            return Outcome(error=error)
        output = self._process.output() if self._process is not None else ""
        if self._cage.level == BUBBLEWRAP:
            # What ran may have left processes, files, or another json module behind: the next
            # call, of another trajectory, begins with nothing.
            self._drop()
        if answer.kind == worker.BAD_ARGUMENTS:
            raise BadArguments(answer.text)
        if answer.kind == worker.OUT_OF_MEMORY:
            self._replace()  # whatever was half allocated goes with it
        return _outcome(answer, time.perf_counter() - began, output)

    async def _adopt(self, function: Function) -> None:
        """Put a new worker where it belongs, before any of its code runs."""
        await self._call({"call": "ready"}, self._import_seconds)
        assert self._process is not None  # it has answered
        pids = await asyncio.to_thread(self._process.pids)
        if self._cores is not None:
            self._cores.adopt(self.name, pids)
        if self._fence is not None and self._cage.level == BUBBLEWRAP:
            self._fence.adopt(self.name, pids, self._cage.processes, function.spec.memory_mib)
        self._adopted = True

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
        if self._cancelled:
            raise _Lost(kind.KIND_CANCELLED, "cancelled before it ran")
        timer = asyncio.timeout(timeout)
        try:
            async with timer:
                if self._process is None:
                    self._process = await WorkerProcess.start(*self._cage.launch())
                return await self._process.call(request)
        except TimeoutError:
            if not timer.expired():
                raise
            output = self._replace()
            raise _Lost(kind.KIND_TIMEOUT, f"did not end within {timeout:g} s", output) from None
        except (WorkerDied, OSError) as died:
            output = self._replace()
            if self._cancelled:
                raise _Lost(kind.KIND_CANCELLED, "cancelled while it ran", output) from None
            raise _Lost(kind.KIND_WORKER_DIED, str(died), output) from None
        except asyncio.CancelledError:
            self._replace()
            raise

    def _replace(self) -> str:
        """Drop the worker; the next call starts another. Returns what it printed last."""
        self.restarts += 1
        output = self._process.output() if self._process is not None else ""
        if self._cage.level == BUBBLEWRAP:
            # What ran may have left processes, files, or another json module behind: the next
            # call, of another trajectory, begins with nothing.
            self._drop()
        self._drop()
        return output

    def _drop(self) -> None:
        self._prepared.clear()
        self._adopted = False
        process, self._process = self._process, None
        if process is not None:
            task = asyncio.create_task(process.end())
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)


def _outcome(answer: worker.Answer, seconds: float = 0.0, output: str = "") -> Outcome:
    if answer.kind == worker.OK:
        return Outcome(answer.text, seconds)
    # What a sandbox answers is only a text; it may name a kind that there is not.
    return Outcome(
        error=pb.InvocationError(
            kind=_KINDS.get(answer.kind, pb.InvocationError.KIND_RAISED),
            message=answer.text,
            traceback=answer.traceback,
            output=output,
        )
    )
