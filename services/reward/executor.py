"""Executors, in which calls run one at a time; on this host each starts and replaces a worker
process.

A call's timeout is enforced here (`ProcessExecutor._answer`), by killing the process.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import deque
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Any, Final

import structlog

from services.reward import worker
from services.reward.call import CallDeadline, CallOutcome, FunctionCall, outcome_of
from services.reward.cgroups import CoreLease
from services.reward.function import RegisteredFunction
from services.reward.sandboxes.profile import BUBBLEWRAP, SandboxProfile
from services.reward.sandboxes.provider import Sandbox, SandboxProcess, SandboxProvider
from troupe.processes.frames import frame, read_frame
from troupe.v1 import reward_pb2 as reward_pb

log = structlog.get_logger("troupe.reward")

_Kind = reward_pb.InvocationError
# An answer is a result of at most 16 MiB, or an error.
_MAX_FRAME_BYTES: Final = 20 * 2**20
_END_SECONDS: Final = 5.0
# Calls, and bytes of arguments, sent to a worker before it has answered the first of them.
_AHEAD: Final = 16
_AHEAD_BYTES: Final = 64 * 2**10


class CallExecutor:
    """An executor of calls, one at a time: in a worker process (`ProcessExecutor`), on another host
    (`RemoteExecutor`), or in a sandbox that outlives them (`SandboxExecutor`).

    The defaults are for an executor whose process is started and ended elsewhere.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        # Processes that had to be replaced.
        self.restarts = 0

    @property
    def warm(self) -> bool:
        """Whether there is a process that waits for calls."""
        return True

    @property
    def process_seconds(self) -> float:
        """Seconds for which the executor has had a process, in total."""
        return 0.0

    async def start(self) -> None:
        """Start the process, before any call."""

    async def stop(self) -> None:
        """End the process for good."""

    def rest(self) -> None:
        """End the process; the next call starts another."""

    async def warm_up(self, function: RegisteredFunction) -> None:
        """Start a process that has imported `function`, if that works."""

    def holds(self, function: RegisteredFunction) -> bool:
        """Return whether the process has imported `function` since its last registration."""
        return True

    def confined_for(self, function: RegisteredFunction) -> bool:
        """Return whether the process is confined as `function` requires."""
        return True

    def cancel(self) -> None:
        """End the call that runs now; its outcome is KIND_CANCELLED."""
        raise NotImplementedError

    def run_many(
        self,
        function: RegisteredFunction,
        calls: Sequence[FunctionCall],
        lease: CoreLease | None = None,
    ) -> AsyncGenerator[tuple[int, CallOutcome]]:
        """Run `calls` in order, on the cores of `lease`: index and outcome of each as it ends.

        Stops early, after an outcome, when the process is lost: calls without an outcome have not
        begun. Calls that are `dropped` before they begin are left out.
        """
        raise NotImplementedError


class WorkerLost(Exception):
    """The worker process ended or was ended; `error` is the outcome of its call."""

    def __init__(self, error: reward_pb.InvocationError) -> None:
        super().__init__(error.message)
        self.error = error


class ProcessExecutor(CallExecutor):
    """An executor with one worker process, or its successor after a loss."""

    def __init__(
        self,
        import_seconds: float,
        name: str,
        providers: Mapping[str, SandboxProvider],
        *,
        spares: bool = True,
    ) -> None:
        """`name`: unique among executors. `providers`: by kind of sandbox. `spares`: the successor
        of a sandbox that was used up is started at once, not by the next call."""
        super().__init__(name)
        # Of the start of a process, and of an import.
        self._import_deadline = CallDeadline(import_seconds)
        self._providers = providers
        # What the process is confined to.
        self._profile = SandboxProfile()
        # Whether the process is limited as its sandbox is.
        self._limited = False
        self._process: WorkerProcess | None = None
        self._spares = spares
        # Starts the next sandbox.
        self._renewing: asyncio.Task[None] | None = None
        # Waits for processes that were killed.
        self._ending: set[asyncio.Task[None]] = set()
        # Function key -> its registrations when the process imported it.
        self._prepared: dict[str, int] = {}
        self._cancelled = False
        # When the process was started, and for how many seconds there were others before.
        self._since = 0.0
        self._past_seconds = 0.0

    @property
    def warm(self) -> bool:
        return self._process is not None and self._process.process.alive

    @property
    def process_seconds(self) -> float:
        return self._past_seconds + (time.perf_counter() - self._since if self.warm else 0.0)

    async def start(self) -> None:
        """Start the process and wait until it answers. Raises RuntimeError."""
        await self._renewed()
        self._cancelled = False
        try:
            await self._answer(self._import_deadline, {"call": "ready"})
        except WorkerLost as lost:
            raise RuntimeError(
                f"no worker process can be started: {lost}: {lost.error.output}"
            ) from lost

    async def warm_up(self, function: RegisteredFunction) -> None:
        self._cancelled = False
        await self._renewed(function)
        await self._warm_up(function)

    async def _warm_up(self, function: RegisteredFunction) -> None:
        try:
            failed = await self._get_ready(function, None)
        except WorkerLost as lost:
            log.warning("a worker was not warmed up", function=function.key, why=str(lost))
        else:
            if failed is not None and failed.error is not None:
                log.warning(
                    "a worker was not warmed up", function=function.key, why=failed.error.message
                )

    def rest(self) -> None:
        if self._renewing is not None:
            self._renewing.cancel()
        self._drop()

    async def stop(self) -> None:
        await self._renewed()
        self._drop()
        await asyncio.gather(*self._ending)

    def holds(self, function: RegisteredFunction) -> bool:
        return self._prepared.get(function.key) == function.registrations

    def confined_for(self, function: RegisteredFunction) -> bool:
        return self._profile == function.profile

    def cancel(self) -> None:
        self._cancelled = True
        if self._process is not None:
            self._process.process.kill()

    async def run_many(
        self,
        function: RegisteredFunction,
        calls: Sequence[FunctionCall],
        lease: CoreLease | None = None,
    ) -> AsyncGenerator[tuple[int, CallOutcome]]:
        # From here on it may be cancelled, also while it waits for the next sandbox.
        self._cancelled = False
        await self._renewed(function)
        try:
            async with aclosing(self._run_many(function, calls, lease)) as outcomes:
                async for found in outcomes:
                    yield found
        finally:
            self._cancelled = False
            if self._spares and self._profile.level == BUBBLEWRAP and self._process is None:
                self._renewing = asyncio.create_task(self._warm_up(function))

    async def _renewed(self, function: RegisteredFunction | None = None) -> None:
        """Wait for the next sandbox if it suits `function`; else cancel its start."""
        renewing, self._renewing = self._renewing, None
        if renewing is None:
            return
        if function is None or not self.confined_for(function):
            renewing.cancel()
        try:
            await asyncio.wait([renewing])
        finally:
            renewing.cancel()

    async def _run_many(
        self, function: RegisteredFunction, calls: Sequence[FunctionCall], lease: CoreLease | None
    ) -> AsyncGenerator[tuple[int, CallOutcome]]:
        began = time.perf_counter()
        cold = not (self._limited and self.confined_for(function) and self.holds(function))
        # Indices of the calls that the worker has been sent, in order.
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
                assert self._process is not None  # made ready; when it is lost, `_answer` raises
                call = calls[sent[0]]
                process = self._process.process
                process.printed = call.printed
                began = time.perf_counter()
                answer = await self._answer(call.deadline)
                seconds = time.perf_counter() - began
                outcome = outcome_of(answer, seconds, process.output(), cold_seconds)
                kept = self._keep_process(function, answer)
                yield sent.popleft(), outcome
                cold_seconds = 0.0
                if not kept:
                    return
        except WorkerLost as lost:
            yield (sent[0] if sent else following), CallOutcome(error=lost.error)

    def _send(
        self,
        function: RegisteredFunction,
        calls: Sequence[FunctionCall],
        following: int,
        sent: deque[int],
    ) -> int:
        """Send the worker its next calls, of which `following` is the first; return the index of
        the first that it has not been sent.

        Several calls of a function that may run twice are sent ahead, so that the worker never
        waits for the next one.
        """
        most = _AHEAD if function.repeatable else 1
        if len(sent) > most // 2:
            return following
        assert self._process is not None
        requests = []
        size = sum(len(calls[index].arguments_json) for index in sent)
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

    def _keep_process(self, function: RegisteredFunction, answer: worker.CallAnswer) -> bool:
        """Drop the process after a call if it must not serve another; whether it was kept."""
        if self._profile.level == BUBBLEWRAP:
            # What ran may have left processes, files, or another json module behind: the next
            # call, of another trajectory, begins with nothing.
            self._drop()
        elif answer.kind == worker.OUT_OF_MEMORY:
            self._replace()  # whatever was half allocated goes with it
        elif answer.unfit:
            log.info("a call left its worker unfit", function=function.key, why=answer.unfit)
            self._replace()
        return self._process is not None

    async def _get_ready(
        self, function: RegisteredFunction, lease: CoreLease | None
    ) -> CallOutcome | None:
        """Have a process that has imported `function`; the outcome if that fails.

        Raises `WorkerLost`.
        """
        if not self.warm:
            self._drop()  # it died while it was idle: no call's fault
        if not self.confined_for(function):
            self._drop()
            self._profile = function.profile
        await self._limit(function, lease)
        if not self.holds(function):
            return await self._prepare(function, lease)
        return None

    async def _limit(self, function: RegisteredFunction, lease: CoreLease | None) -> None:
        """Limit what a new process takes as a whole, before any code of the user's runs, and grant
        it the cores of `lease`."""
        if not self._limited:
            await self._answer(self._import_deadline, {"call": "ready"})
            assert self._process is not None  # it has answered
            await self._process.sandbox.confine()
            self._limited = True
        if lease is not None:
            assert self._process is not None  # limited before
            await self._process.sandbox.grant(lease)

    async def _prepare(
        self, function: RegisteredFunction, lease: CoreLease | None
    ) -> CallOutcome | None:
        entrypoint, registrations = function.spec.entrypoint, function.registrations
        request = {"call": "prepare", "entrypoint": entrypoint}
        try:
            answer = await self._answer(self._import_deadline, request)
            if why := self._why_replace(answer, function):
                log.info(f"{why}: new worker", entrypoint=entrypoint)
                self._replace()
                await self._limit(function, None)
                answer = await self._answer(self._import_deadline, request)
        except WorkerLost as lost:
            if lost.error.kind == _Kind.KIND_CANCELLED:
                raise
            return CallOutcome.failed(_Kind.KIND_NOT_IMPORTABLE, f"importing {entrypoint}: {lost}")
        if answer.kind == worker.OK:
            self._prepared[function.key] = registrations
            return None
        if answer.kind == worker.NOT_IMPORTABLE:
            function.unimportable = registrations
        return outcome_of(answer)

    def _why_replace(self, answer: worker.CallAnswer, function: RegisteredFunction) -> str:
        """Return why a new process may import what this one did not; empty: it would not,
        either."""
        if answer.kind == worker.STALE:
            return "modules were edited"
        # What ran here before may have changed what is imported, and from where.
        failed = answer.kind == worker.NOT_IMPORTABLE
        if failed and self._prepared and function.unimportable != function.registrations:
            return f"{answer.text}, after others"
        return ""

    async def _answer(
        self, deadline: CallDeadline, request: dict[str, Any] | None = None
    ) -> worker.CallAnswer:
        """Return the next answer: to `request`, or to an earlier request. Starts a process where
        there is none.

        Raises `WorkerLost`, and drops the process, if that ends or `deadline.run_seconds` are over.
        """
        if self._cancelled:
            why = "cancelled before it ran"
            raise WorkerLost(reward_pb.InvocationError(kind=_Kind.KIND_CANCELLED, message=why))
        timer = asyncio.timeout(deadline.run_seconds)
        try:
            async with timer:
                if self._process is None:
                    provider = self._providers[self._profile.level]
                    sandbox = await provider.launch(self.name, self._profile)
                    self._process = await WorkerProcess.start(sandbox)
                    self._since = time.perf_counter()
                if request is not None:
                    self._process.send(request)
                return await self._process.answer()
        except TimeoutError:
            if not timer.expired():
                raise
            raise WorkerLost(deadline.timed_out(self._replace())) from None
        except (WorkerDied, OSError) as died:
            kind, why = _Kind.KIND_WORKER_DIED, str(died)
            if self._cancelled:
                kind, why = _Kind.KIND_CANCELLED, "cancelled while it ran"
            error = reward_pb.InvocationError(kind=kind, message=why, output=self._replace())
            raise WorkerLost(error) from None
        except asyncio.CancelledError:
            self._replace()
            raise

    def _replace(self) -> str:
        """Drop the process because of a failure; return what it printed last."""
        self.restarts += 1
        output = self._process.process.output() if self._process is not None else ""
        self._drop()
        return output

    def _drop(self) -> None:
        """Kill the process, if there is one; the next call starts another."""
        self._prepared.clear()
        self._limited = False
        process, self._process = self._process, None
        if process is not None:
            self._past_seconds += time.perf_counter() - self._since
            task = asyncio.create_task(process.sandbox.stop())
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)


class WorkerDied(Exception):
    """The worker process ended, or its answer is none; the text says how."""


class WorkerProcess:
    """The worker program (`services/reward/worker.py`) in a sandbox, and its frames."""

    def __init__(self, sandbox: Sandbox, process: SandboxProcess) -> None:
        self.sandbox, self.process = sandbox, process

    @classmethod
    async def start(cls, sandbox: Sandbox) -> WorkerProcess:
        """Start the worker in a sandbox that was just launched. Raises OSError, TimeoutError and
        FailedPrecondition ("no_sandbox")."""
        return cls(sandbox, await sandbox.start([worker.__file__]))

    def send(self, *requests: Mapping[str, Any]) -> None:
        """Send requests; the answers come in the same order."""
        frames = [frame(json.dumps(request).encode()) for request in requests]
        self.process.write(b"".join(frames))

    async def answer(self) -> worker.CallAnswer:
        """Return the next answer; what was printed before it has been read. Raises `WorkerDied`."""
        try:
            body = await read_frame(self.process, _MAX_FRAME_BYTES)
            return worker.CallAnswer.of_frame(json.loads(body))
        except (OSError, EOFError) as error:
            raise WorkerDied(await self._how_it_died()) from error
        except (ValueError, RecursionError) as error:
            self.process.kill()
            raise WorkerDied(f"the worker's answer is invalid: {error}") from error

    async def _how_it_died(self) -> str:
        try:
            async with asyncio.timeout(_END_SECONDS):
                return f"the worker process {await self.process.ended()}"
        except TimeoutError:
            self.process.kill()
            return "the worker closed its connection"
