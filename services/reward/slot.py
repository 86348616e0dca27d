"""One worker process and its replacements: runs one call at a time, whatever the call does."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any, Final

import structlog

from services.reward import worker
from services.reward.answers import Lost, outcome_of
from services.reward.call import Call, Outcome
from services.reward.cpu import CoreManager, Lease
from services.reward.fence import Fence
from services.reward.function import Function
from services.reward.process import WorkerDied, WorkerProcess
from services.reward.sandbox import BUBBLEWRAP, Cage
from troupe.v1 import reward_pb2 as pb

log = structlog.get_logger("troupe.reward")

# Calls that a worker is sent before it has answered the first of them, and their bytes.
_AHEAD: Final = 16
_AHEAD_BYTES: Final = 64 * 2**10


class Slot:
    """A place for exactly one process; when that has gone, for its successor."""

    def __init__(
        self,
        import_seconds: float,
        name: str = "worker",
        cores: CoreManager | None = None,
        fence: Fence | None = None,
        *,
        spares: bool = True,
    ) -> None:
        """`name` is unique among slots; `cores` hands cores out, if anybody does; `fence` limits
        what a sandbox takes as a whole, if anything can; `spares`: a sandbox that was used up has
        its successor started at once, not by the next call."""
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
        self._spares = spares
        # Starts the next sandbox.
        self._renewing: asyncio.Task[None] | None = None
        # Processes that are ending.
        self._ending: set[asyncio.Task[None]] = set()
        # Function -> its registrations when this worker last looked at its code.
        self._prepared: dict[str, int] = {}
        self._cancelled = False
        # When the process was started, and how long its predecessors were there.
        self._since = 0.0
        self._lived = 0.0

    @property
    def warm(self) -> bool:
        """Whether there is a process that waits for calls."""
        return self._process is not None and self._process.alive

    @property
    def lived(self) -> float:
        """Seconds that there was a process, over its lifetime."""
        return self._lived + (time.perf_counter() - self._since if self.warm else 0.0)

    async def start(self) -> None:
        """Start the worker and wait until it answers; raises RuntimeError."""
        await self._renewed()
        self._cancelled = False
        try:
            await self._call({"call": "ready"}, self._import_seconds)
        except Lost as lost:
            raise RuntimeError(f"no worker process can be started: {lost}: {lost.output}") from lost

    async def warm_up(self, function: Function) -> None:
        """Have a worker that has imported `function`, if that works."""
        self._cancelled = False
        await self._renewed(function)
        await self._warm_up(function)

    async def _warm_up(self, function: Function) -> None:
        try:
            failed = await self._get_ready(function, None)
        except Lost as lost:
            log.warning("a worker was not warmed up", function=function.key, why=str(lost))
        else:
            if failed is not None and failed.error is not None:
                log.warning(
                    "a worker was not warmed up", function=function.key, why=failed.error.message
                )

    def rest(self) -> None:
        """End the process; the next call starts another."""
        if self._renewing is not None:
            self._renewing.cancel()
        self._drop()

    async def stop(self) -> None:
        """Kill the worker."""
        await self._renewed()
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

    async def run_many(
        self, function: Function, calls: Sequence[Call], lease: Lease | None = None
    ) -> AsyncGenerator[tuple[int, Outcome]]:
        """Run `calls` one after the other on the cores of `lease`: index and outcome of each.

        Stops early, after an outcome, when the worker is lost: what has no outcome did not begin.
        Those that are `dropped` before they begin are left out.
        """
        # From here on it may be cancelled, while it waits for the next sandbox too.
        self._cancelled = False
        await self._renewed(function)
        try:
            async with aclosing(self._run_many(function, calls, lease)) as outcomes:
                async for found in outcomes:
                    yield found
        finally:
            self._cancelled = False
            if self._spares and self._cage.level == BUBBLEWRAP and self._process is None:
                self._renewing = asyncio.create_task(self._warm_up(function))

    async def _renewed(self, function: Function | None = None) -> None:
        """Wait for the next sandbox, if it is one for `function`; else there is to be none."""
        renewing, self._renewing = self._renewing, None
        if renewing is None:
            return
        if function is None or not self.suits(function):
            renewing.cancel()
        try:
            await asyncio.wait([renewing])
        finally:
            renewing.cancel()

    async def _run_many(
        self, function: Function, calls: Sequence[Call], lease: Lease | None
    ) -> AsyncGenerator[tuple[int, Outcome]]:
        began = time.perf_counter()
        cold = not (self._adopted and self.suits(function) and self.holds(function))
        # The index of each call that the worker has, in their order.
        sent: deque[int] = deque()
        following = 0
        try:
            failed = await self._get_ready(function, lease)
            if failed is not None:
                yield 0, failed
                return
            cold_seconds = time.perf_counter() - began if cold else 0.0
            while True:
                following = self._send(function, calls, following, sent)
                if not sent:
                    return
                assert self._process is not None  # it was made ready, and is lost by raising only
                self._process.printed = calls[sent[0]].printed
                began = time.perf_counter()
                answer = await self._answer(function.spec.timeout_seconds)
                outcome, alone = self._judge(answer, time.perf_counter() - began, cold_seconds)
                yield sent.popleft(), outcome
                cold_seconds = 0.0
                if alone:
                    return
        except Lost as lost:
            error = pb.InvocationError(kind=lost.kind, message=str(lost), output=lost.output)
            yield (sent[0] if sent else following), Outcome(error=error)

    def _send(
        self, function: Function, calls: Sequence[Call], following: int, sent: deque[int]
    ) -> int:
        """Let the worker have what it can do next; returns the index of the first it has not.

        A function that may run twice gets calls ahead, so that it never waits for the next one.
        """
        most = _AHEAD if function.repeatable else 1
        if len(sent) > most // 2:
            return following
        assert self._process is not None
        requests = []
        size = sum(len(calls[place].arguments_json) for place in sent)
        while following < len(calls) and (not sent or (len(sent) < most and size < _AHEAD_BYTES)):
            call = calls[following]
            if not call.dropped:
                requests.append(
                    {
                        "call": "invoke",
                        "entrypoint": function.spec.entrypoint,
                        "arguments_json": call.arguments_json,
                        "memory_mib": function.spec.memory_mib,
                        "environment": dict(call.environment),
                    }
                )
                sent.append(following)
                size += len(call.arguments_json)
            following += 1
        if requests:
            self._process.send(*requests)
        return following

    def _judge(
        self, answer: worker.Answer, seconds: float, cold_seconds: float
    ) -> tuple[Outcome, bool]:
        """The outcome, and whether the worker is gone after it."""
        assert self._process is not None
        output = self._process.output()
        gone = self._cage.level == BUBBLEWRAP or answer.kind == worker.OUT_OF_MEMORY
        if self._cage.level == BUBBLEWRAP:
            # What ran may have left processes, files, or another json module behind: the next
            # call, of another trajectory, begins with nothing.
            self._drop()
        elif answer.kind == worker.OUT_OF_MEMORY:
            self._replace()  # whatever was half allocated goes with it
        return outcome_of(answer, seconds, output, cold_seconds), gone

    async def _get_ready(self, function: Function, lease: Lease | None) -> Outcome | None:
        """Have a worker that has imported `function`; the outcome where that fails.

        Raises `Lost`.
        """
        if not self.warm:
            self._drop()  # it died while it had nothing to do: no call's fault
        if not self.suits(function):
            self._drop()
            self._cage = function.cage
        await self._adopt(function, lease)
        if not self.holds(function):
            return await self._prepare(function, lease)
        return None

    async def _adopt(self, function: Function, lease: Lease | None) -> None:
        """Put a new worker where it belongs, before any of its code runs, and on its cores."""
        if not self._adopted:
            await self._settle_in(function)
        if self._cores is not None and lease is not None:
            self._cores.grant(lease)

    async def _settle_in(self, function: Function) -> None:
        await self._call({"call": "ready"}, self._import_seconds)
        assert self._process is not None  # it has answered
        pids = await asyncio.to_thread(self._process.pids)
        if self._cores is not None:
            self._cores.adopt(self.name, pids)
        if self._fence is not None and self._cage.level == BUBBLEWRAP:
            self._fence.adopt(self.name, pids, self._cage.processes, function.spec.memory_mib)
        self._adopted = True

    async def _prepare(self, function: Function, lease: Lease | None) -> Outcome | None:
        entrypoint, registrations = function.spec.entrypoint, function.registrations
        request = {"call": "prepare", "entrypoint": entrypoint}
        try:
            answer = await self._call(request, self._import_seconds)
            if why := self._why_anew(answer, function):
                log.info(f"{why}: new worker", entrypoint=entrypoint)
                self._replace()
                await self._adopt(function, None)
                answer = await self._call(request, self._import_seconds)
        except Lost as lost:
            if lost.kind == pb.InvocationError.KIND_CANCELLED:
                raise
            message = f"importing {entrypoint}: {lost}"
            error = pb.InvocationError(kind=pb.InvocationError.KIND_NOT_IMPORTABLE, message=message)
            return Outcome(error=error)
        if answer.kind == worker.OK:
            self._prepared[function.key] = registrations
            return None
        if answer.kind == worker.NOT_IMPORTABLE:
            function.unimportable = registrations
        return outcome_of(answer)

    def _why_anew(self, answer: worker.Answer, function: Function) -> str:
        """Why another worker may do what this one could not; empty: it could, or none can."""
        if answer.kind == worker.STALE:
            return "modules were edited"
        # What ran here before may have changed what is imported, and from where.
        failed = answer.kind == worker.NOT_IMPORTABLE
        if failed and self._prepared and function.unimportable != function.registrations:
            return f"{answer.text}, after others"
        return ""

    async def _call(self, request: dict[str, Any], timeout: float) -> worker.Answer:
        """The worker's answer to `request`, from a new worker where there is none.

        Raises `Lost` when there is none, and the worker is replaced.
        """
        return await self._answer(timeout, request)

    async def _answer(self, timeout: float, request: dict[str, Any] | None = None) -> worker.Answer:
        kind = pb.InvocationError
        if self._cancelled:
            raise Lost(kind.KIND_CANCELLED, "cancelled before it ran")
        timer = asyncio.timeout(timeout)
        try:
            async with timer:
                if self._process is None:
                    self._process = await WorkerProcess.start(*self._cage.launch())
                    self._since = time.perf_counter()
                if request is not None:
                    self._process.send(request)
                return await self._process.answer()
        except TimeoutError:
            if not timer.expired():
                raise
            output = self._replace()
            raise Lost(kind.KIND_TIMEOUT, f"did not end within {timeout:g} s", output) from None
        except (WorkerDied, OSError) as died:
            output = self._replace()
            if self._cancelled:
                raise Lost(kind.KIND_CANCELLED, "cancelled while it ran", output) from None
            raise Lost(kind.KIND_WORKER_DIED, str(died), output) from None
        except asyncio.CancelledError:
            self._replace()
            raise

    def _replace(self) -> str:
        """Drop the worker; the next call starts another. Returns what it printed last."""
        self.restarts += 1
        output = self._process.output() if self._process is not None else ""
        self._drop()
        return output

    def _drop(self) -> None:
        self._prepared.clear()
        self._adopted = False
        process, self._process = self._process, None
        if process is not None:
            self._lived += time.perf_counter() - self._since
            task = asyncio.create_task(process.end())
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)
