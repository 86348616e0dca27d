"""One worker process and its replacements: runs one call at a time, whatever the call does."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import struct
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any, Final

import structlog

from services.reward import worker
from services.reward.call import CallOutcome, FunctionCall
from services.reward.function import RegisteredFunction
from services.reward.groups import CgroupLimits, CoreLease, CoreManager, family, kill_with_children
from services.reward.sandbox import BUBBLEWRAP, SandboxProfile
from troupe.outcomes import finite_number, parse_json
from troupe.v1 import reward_pb2 as pb

HEADER: Final = struct.Struct(">I")
# An answer is a result of at most 16 MiB, or a short account.
_MAX_FRAME_BYTES: Final = 20 * 2**20
# Of what functions print, so much is kept: the last of it.
_OUTPUT_BYTES: Final = 16 * 2**10
# Output is read in such parts, at most so many before others of the event loop get their turn:
# together more than a pipe holds, so that after an answer all that was printed before it is here.
_PART_BYTES: Final = 32 * 2**10
_PARTS: Final = 4
_END_SECONDS: Final = 5.0


class WorkerDied(Exception):
    """There will be no answer; the text says how the process ended."""


async def start_process(*command: str, **options: Any) -> asyncio.subprocess.Process:
    """`asyncio.create_subprocess_exec` in a session of its own; who is cancelled meanwhile leaves
    nothing behind. (asyncio would kill the process, not its group: bubblewrap's second half, which
    waits for its first, would wait for ever.) Raises OSError."""
    starting = asyncio.ensure_future(
        asyncio.create_subprocess_exec(*command, start_new_session=True, **options)
    )
    try:
        return await asyncio.shield(starting)
    except asyncio.CancelledError:
        kill_with_children((await starting).pid)
        raise


class WorkerProcess:
    """A process that runs `services/reward/worker.py`, alone in its process group."""

    def __init__(self, process: asyncio.subprocess.Process, printing: int) -> None:
        """`printing`: the end of a pipe from which its output is read without waiting."""
        self._process = process
        self._printing: int | None = printing
        self._printed: deque[bytes] = deque()
        self._printed_bytes = 0
        # Told of everything that is printed, as it comes.
        self.printed: Callable[[bytes], None] | None = None
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(printing, self._pull)

    @classmethod
    async def start(cls, command: Sequence[str], environment: Mapping[str, str]) -> WorkerProcess:
        """Start `command`. Raises OSError."""
        printing, output = os.pipe()
        try:
            os.set_blocking(printing, False)
            process = await start_process(
                *command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=output,
                env=dict(environment),
            )
        except BaseException:
            os.close(printing)
            raise
        finally:
            os.close(output)
        return cls(process, printing)

    def send(self, *requests: Mapping[str, Any]) -> None:
        """Ask; the answers come in the order of the questions."""
        assert self._process.stdin is not None
        frames: list[bytes] = []
        for request in requests:
            body = json.dumps(request).encode()
            frames += (HEADER.pack(len(body)), body)
        # A worker that is gone, or does not read, is found out when its answer is waited for.
        with contextlib.suppress(OSError):
            self._process.stdin.write(b"".join(frames))

    async def answer(self) -> worker.CallAnswer:
        """The next answer; what was printed before it has been read. Raises `WorkerDied`."""
        assert self._process.stdout is not None
        try:
            (size,) = HEADER.unpack(await self._process.stdout.readexactly(HEADER.size))
            if size > _MAX_FRAME_BYTES:
                raise ValueError(f"it announced {size:,} bytes")
            fields = json.loads(await self._process.stdout.readexactly(size))
            if len(fields) != 3 or not all(isinstance(field, str) for field in fields):
                raise ValueError("that is not an answer")
        except (OSError, EOFError) as error:
            raise WorkerDied(await self._how_it_died()) from error
        except (ValueError, TypeError, RecursionError) as error:
            self.kill()
            raise WorkerDied(f"the worker's answer makes no sense: {error}") from error
        self._pull()
        return worker.CallAnswer(*fields)

    @property
    def alive(self) -> bool:
        """Whether it has not ended, as far as anybody knows."""
        return self._process.returncode is None

    def pids(self) -> list[int]:
        """The process and all that descend from it, as this host counts them."""
        return family(self._process.pid)

    def output(self) -> str:
        """The last that was printed since it was asked for last."""
        self._pull()
        text = b"".join(self._printed).decode(errors="replace")
        self._printed.clear()
        self._printed_bytes = 0
        return text[-_OUTPUT_BYTES:]

    def kill(self) -> None:
        """End it and all of its process group, at once."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    async def end(self) -> None:
        """Kill it and wait until it is gone."""
        self.kill()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_END_SECONDS):
                await self._process.wait()
        self._close_output()
        if self._process.stdin is not None:
            self._process.stdin.close()

    def _pull(self) -> None:
        """Take what has been printed."""
        for _ in range(_PARTS):
            if self._printing is None:
                return
            try:
                part = os.read(self._printing, _PART_BYTES)
            except BlockingIOError:
                return
            except OSError:
                part = b""
            if not part:
                self._close_output()
                return
            self._printed.append(part)
            self._printed_bytes += len(part)
            while self._printed_bytes - len(self._printed[0]) >= _OUTPUT_BYTES:
                self._printed_bytes -= len(self._printed.popleft())
            if self.printed is not None:
                self.printed(part)

    def _close_output(self) -> None:
        if self._printing is not None:
            self._loop.remove_reader(self._printing)
            os.close(self._printing)
            self._printing = None

    async def _how_it_died(self) -> str:
        try:
            async with asyncio.timeout(_END_SECONDS):
                status = await self._process.wait()
        except TimeoutError:
            self.kill()
            return "the worker closed its connection"
        if status < 0 or status > 128:  # a sandbox reports its child's signal like a shell
            with contextlib.suppress(ValueError):
                name = signal.Signals(-status if status < 0 else status - 128).name
                return f"the worker process was killed by {name}"
        return f"the worker process exited with status {status}"


_KINDS: Final = {
    worker.RAISED: pb.InvocationError.KIND_RAISED,
    worker.OUT_OF_MEMORY: pb.InvocationError.KIND_OUT_OF_MEMORY,
    worker.BAD_RESULT: pb.InvocationError.KIND_BAD_RESULT,
    worker.NOT_IMPORTABLE: pb.InvocationError.KIND_NOT_IMPORTABLE,
    worker.BAD_ARGUMENTS: pb.InvocationError.KIND_BAD_ARGUMENTS,
}

_MAX_REWARD_BYTES: Final = 1 << 20
# What a response costs in its batch beside its own bytes.
_FRAME_BYTES: Final = 6
# Room for the error that stands where a result did not fit.
_REFUSAL_BYTES: Final = 256


class Lost(Exception):
    """The worker is gone; `kind` says why, the text says it to people."""

    def __init__(
        self, kind: pb.InvocationError.Kind.ValueType, text: str, output: str = ""
    ) -> None:
        super().__init__(text)
        self.kind, self.output = kind, output


def outcome_of(
    answer: worker.CallAnswer, seconds: float = 0.0, output: str = "", cold_seconds: float = 0.0
) -> CallOutcome:
    """What becomes of a call that a worker answered so after `seconds`; it printed `output`."""
    if answer.kind == worker.OK:
        return CallOutcome(sendable(answer.text), seconds, cold_seconds=cold_seconds)
    text, retry_after = sendable(answer.text), 0.0
    if answer.kind == worker.REFUSED:
        said, _, text = answer.text.partition(" ")
        with contextlib.suppress(ValueError):
            # A forged one may be anything; what is not plausible was not said.
            retry_after = seconds if 0 < (seconds := float(said)) <= worker.MOST_SECONDS else -1.0
    # What a sandbox answers is only a text; it may name a kind that there is not.
    return CallOutcome(
        error=pb.InvocationError(
            kind=_KINDS.get(answer.kind, pb.InvocationError.KIND_RAISED),
            message=text,
            traceback=sendable(answer.traceback),
            output=output,
            retry_after_seconds=retry_after,
        ),
        cold_seconds=cold_seconds,
    )


def fitted(responses: Iterable[pb.InvokeResponse], most_bytes: int) -> list[pb.InvokeResponse]:
    """`responses`, for one message of at most so many bytes.

    They are taken in their order; one that does not fit beside those before it is replaced by
    KIND_RESULT_TOO_LARGE, and fails nobody else.
    """
    given = list(responses)
    left = most_bytes
    if sum(one.ByteSize() + _FRAME_BYTES for one in given) <= left:
        return given
    left -= len(given) * _REFUSAL_BYTES
    found = []
    for one in given:
        size = one.ByteSize() + _FRAME_BYTES
        if size > left and size > _REFUSAL_BYTES:
            found.append(_too_large(one, size, most_bytes))
        else:
            left -= max(0, size - _REFUSAL_BYTES)
            found.append(one)
    return found


def _too_large(response: pb.InvokeResponse, size: int, most: int) -> pb.InvokeResponse:
    error = pb.InvocationError(
        kind=pb.InvocationError.KIND_RESULT_TOO_LARGE,
        message=f"its result of {size:,} bytes does not fit into the batch's answer of at most "
        f"{most:,}: invoke with the same id alone, or send fewer together",
    )
    refused = pb.InvokeResponse()
    refused.CopyFrom(response)
    refused.error.CopyFrom(error)
    refused.host = refused.sandbox = ""
    return refused


def sendable(text: str) -> str:
    """`text` as protobuf takes it: names of files that are not UTF-8 come as halves of pairs."""
    return text if text.isascii() else text.encode(errors="replace").decode()


def as_reward(outcome: CallOutcome) -> CallOutcome:
    """`outcome`, or KIND_BAD_RESULT where it is neither a number nor numbers by agent."""
    if outcome.error is not None or _is_reward(outcome.result_json):
        return outcome
    shown = outcome.result_json
    shown = shown if len(shown) < 200 else shown[:197] + "..."
    error = pb.InvocationError(
        kind=pb.InvocationError.KIND_BAD_RESULT,
        message="a reward is a finite number, or a dict with a number for each agent that it is "
        f"for: the function returned {'nothing' if shown == 'null' else shown}",
    )
    return replace(outcome, result_json="", error=error)


def _is_reward(text: str) -> bool:
    # A sandbox may answer anything.
    if len(text) > _MAX_REWARD_BYTES:
        return False
    try:
        value = parse_json(text)
        for number in value.values() if isinstance(value, dict) else [value]:
            if isinstance(number, bool):
                return False
            finite_number(number)
    except ValueError:
        return False
    return True


log = structlog.get_logger("troupe.reward")

# Calls that a worker is sent before it has answered the first of them, and their bytes.
_AHEAD: Final = 16
_AHEAD_BYTES: Final = 64 * 2**10


class ProcessSlot:
    """A place for exactly one process; when that has gone, for its successor."""

    def __init__(
        self,
        import_seconds: float,
        name: str = "worker",
        cores: CoreManager | None = None,
        fence: CgroupLimits | None = None,
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
        self._cage = SandboxProfile()
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

    async def warm_up(self, function: RegisteredFunction) -> None:
        """Have a worker that has imported `function`, if that works."""
        self._cancelled = False
        await self._renewed(function)
        await self._warm_up(function)

    async def _warm_up(self, function: RegisteredFunction) -> None:
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

    def holds(self, function: RegisteredFunction) -> bool:
        """Whether the worker has imported `function` since its last registration."""
        return self._prepared.get(function.key) == function.registrations

    def suits(self, function: RegisteredFunction) -> bool:
        """Whether the worker is confined as `function` wants it."""
        return self._cage == function.cage

    def cancel(self) -> None:
        """End the call that runs now; its outcome is KIND_CANCELLED."""
        self._cancelled = True
        if self._process is not None:
            self._process.kill()

    async def run_many(
        self,
        function: RegisteredFunction,
        calls: Sequence[FunctionCall],
        lease: CoreLease | None = None,
    ) -> AsyncGenerator[tuple[int, CallOutcome]]:
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

    async def _renewed(self, function: RegisteredFunction | None = None) -> None:
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
        self, function: RegisteredFunction, calls: Sequence[FunctionCall], lease: CoreLease | None
    ) -> AsyncGenerator[tuple[int, CallOutcome]]:
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
            yield (sent[0] if sent else following), CallOutcome(error=error)

    def _send(
        self,
        function: RegisteredFunction,
        calls: Sequence[FunctionCall],
        following: int,
        sent: deque[int],
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
        self, answer: worker.CallAnswer, seconds: float, cold_seconds: float
    ) -> tuple[CallOutcome, bool]:
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

    async def _get_ready(
        self, function: RegisteredFunction, lease: CoreLease | None
    ) -> CallOutcome | None:
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

    async def _adopt(self, function: RegisteredFunction, lease: CoreLease | None) -> None:
        """Put a new worker where it belongs, before any of its code runs, and on its cores."""
        if not self._adopted:
            await self._settle_in(function)
        if self._cores is not None and lease is not None:
            self._cores.grant(lease)

    async def _settle_in(self, function: RegisteredFunction) -> None:
        await self._call({"call": "ready"}, self._import_seconds)
        assert self._process is not None  # it has answered
        pids = await asyncio.to_thread(self._process.pids)
        if self._cores is not None:
            self._cores.adopt(self.name, pids)
        if self._fence is not None and self._cage.level == BUBBLEWRAP:
            self._fence.adopt(self.name, pids, self._cage.processes, function.spec.memory_mib)
        self._adopted = True

    async def _prepare(
        self, function: RegisteredFunction, lease: CoreLease | None
    ) -> CallOutcome | None:
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
            return CallOutcome(error=error)
        if answer.kind == worker.OK:
            self._prepared[function.key] = registrations
            return None
        if answer.kind == worker.NOT_IMPORTABLE:
            function.unimportable = registrations
        return outcome_of(answer)

    def _why_anew(self, answer: worker.CallAnswer, function: RegisteredFunction) -> str:
        """Why another worker may do what this one could not; empty: it could, or none can."""
        if answer.kind == worker.STALE:
            return "modules were edited"
        # What ran here before may have changed what is imported, and from where.
        failed = answer.kind == worker.NOT_IMPORTABLE
        if failed and self._prepared and function.unimportable != function.registrations:
            return f"{answer.text}, after others"
        return ""

    async def _call(self, request: dict[str, Any], timeout: float) -> worker.CallAnswer:
        """The worker's answer to `request`, from a new worker where there is none.

        Raises `Lost` when there is none, and the worker is replaced.
        """
        return await self._answer(timeout, request)

    async def _answer(
        self, timeout: float, request: dict[str, Any] | None = None
    ) -> worker.CallAnswer:
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
