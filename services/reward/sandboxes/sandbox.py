"""One sandbox that outlives its calls, as the service sees it: frames to the supervisor inside.

What comes out of it is a hostile party's: it is measured, parsed, and nothing more.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import signal
import struct
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any, Final, Protocol

import structlog

from services.reward import worker
from services.reward.groups import CoreLease, family, kill_with_children
from services.reward.sandboxes import supervisor
from services.reward.slot import start_process
from troupe.rpc import TroupeError

log = structlog.get_logger("troupe.reward")

_HEADER: Final = struct.Struct(">I")
# An answer of at most 20 MiB, quoted, and what was printed.
_MAX_FRAME_BYTES: Final = 48 << 20
_PRINTED_PARTS: Final = 8
_PART_BYTES: Final = 4 << 10
# How long a call that was told to end may take to; then the whole sandbox is ended.
_KILL_SECONDS: Final = 5.0
_END_SECONDS: Final = 5.0


class Gone(Exception):
    """The sandbox has ended; the text says how."""


class NotStarted(Gone):
    """There never was one."""


class TookTooLong(Exception):
    """The call was ended; `output` is what it printed last."""

    def __init__(self, output: str) -> None:
        super().__init__()
        self.output = output


class SandboxBackend(Protocol):
    """Where a sandbox lives: bubblewrap on this host, or a container."""

    def launch(self) -> tuple[Sequence[str], dict[str, str] | None, bytes]:
        """Command and environment (None: ours) of the supervisor's process, and what it is fed
        first. Raises FailedPrecondition."""

    async def entered(self, pids: Sequence[int]) -> None:
        """It answers; no code but ours has run. `pids`: what was started, as this host sees it."""

    async def grant(self, lease: CoreLease) -> None:
        """The cores that the next call has, besides those of calls that run."""

    async def withdraw(self, lease: CoreLease) -> None:
        """That call has ended."""

    def memory_kills(self) -> int:
        """Processes in it that were ended because its memory was used up, as far as known."""

    async def freeze(self) -> None:
        """Nothing in it runs until it thaws."""

    async def thaw(self) -> None:
        """It goes on where it stopped."""

    async def ended(self) -> None:
        """Its process is gone, and nothing of it may stay."""


class Sandbox:
    """Starts with its first call, frozen whenever none runs, gone for good once it has ended."""

    def __init__(
        self, home: SandboxBackend, import_seconds: float, ended: Callable[[str], None]
    ) -> None:
        """`import_seconds`: how long it may take to start, and to import a function; `ended(why)`
        is told once it is gone."""
        self._home = home
        self._ended = ended
        self._import_seconds = import_seconds
        self._process: asyncio.subprocess.Process | None = None
        self._starting: asyncio.Task[None] | None = None
        self._prepared: dict[str, asyncio.Task[worker.CallAnswer]] = {}
        self._answers: dict[int, asyncio.Future[tuple[worker.CallAnswer, str]]] = {}
        self._ids = itertools.count()
        self._readers: list[asyncio.Task[None]] = []
        self._printed: deque[bytes] = deque(maxlen=_PRINTED_PARTS)
        self._running = 0
        self._started = False
        # Freezing and thawing, one after another.
        self._gate = asyncio.Lock()
        # Why it ended; None: it has not.
        self.gone: str | None = None

    async def run(
        self,
        key: str,
        entrypoint: str,
        arguments_json: str,
        *,
        memory_mib: int,
        environment: Mapping[str, str],
        timeout: float,
        lease: CoreLease | None = None,
    ) -> tuple[worker.CallAnswer, str, float]:
        """Answer, output and seconds of one call. `key` names the function and its code.

        Raises Gone, and TookTooLong once the call has been ended. Cancelling ends the call.
        """
        async with self._awake(lease):
            prepared = await self._prepare(key, entrypoint)
            if prepared.kind != worker.OK:
                return prepared, "", 0.0
            began = time.perf_counter()
            frame = {
                "call": "invoke",
                "entrypoint": entrypoint,
                "arguments_json": arguments_json,
                "memory_mib": memory_mib,
                "environment": dict(environment),
            }
            answer, output = await self._ask(frame, timeout)
            return answer, output, time.perf_counter() - began

    async def end(self, why: str) -> None:
        """End it and all that runs in it."""
        self._fail(why)
        for task in (self._starting, *self._prepared.values(), *self._readers):
            if task is not None:
                task.cancel()
        process = self._process
        if process is not None:
            with contextlib.suppress(Exception):
                await self._home.thaw()  # what is frozen is not ended everywhere
            kill_with_children(process.pid)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_END_SECONDS):
                    await process.wait()
            if process.stdin is not None:
                process.stdin.close()
        await self._home.ended()

    @contextlib.asynccontextmanager
    async def _awake(self, lease: CoreLease | None) -> AsyncIterator[None]:
        self._running += 1
        try:
            async with self._gate:
                await self._start()
                if lease is not None:
                    await self._tell(self._home.grant, lease)
                await self._tell(self._home.thaw)
            yield
        finally:
            self._running -= 1
            async with self._gate:
                if self._running == 0 and self.gone is None:
                    await self._tell(self._home.freeze)
                if lease is not None and self._started:
                    await self._tell(self._home.withdraw, lease)

    async def _tell(self, what: Callable[..., Awaitable[None]], *values: Any) -> None:
        try:
            await what(*values)
        except (OSError, TimeoutError) as error:  # its cores are taken away all the same
            log.warning("a sandbox", what=what.__name__, error=str(error))

    async def _start(self) -> None:
        if self._starting is None:
            self._starting = asyncio.create_task(self._begin())
        try:
            await asyncio.shield(self._starting)
        except asyncio.CancelledError:
            if self.gone is None:
                raise
        if self.gone is not None:
            raise (Gone if self._started else NotStarted)(self.gone)

    async def _begin(self) -> None:
        try:
            command, environment, feed = self._home.launch()
            self._process = process = await start_process(
                *command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env=environment,
            )
            assert process.stdin is not None
            process.stdin.write(feed)
            self._readers = [
                asyncio.create_task(self._read()),
                asyncio.create_task(self._keep_output()),
            ]
            answer, _ = await self._ask({"call": "ready"}, self._import_seconds)
            if answer.kind != worker.OK:
                raise Gone(answer.text)
            pids = await asyncio.to_thread(family, process.pid)
            await self._home.entered(pids)
            self._started = True
        except TookTooLong:
            self._fail(f"it did not start within {self._import_seconds:g} s")
        except (OSError, Gone, TroupeError) as error:
            self._fail(str(error))

    async def _prepare(self, key: str, entrypoint: str) -> worker.CallAnswer:
        """Have a function imported, once."""
        if key not in self._prepared:
            self._prepared[key] = asyncio.create_task(self._import(entrypoint))
        answer = await asyncio.shield(self._prepared[key])
        if answer.kind != worker.OK:
            self._prepared.pop(key, None)
        return answer

    async def _import(self, entrypoint: str) -> worker.CallAnswer:
        frame = {"call": "prepare", "entrypoint": entrypoint}
        try:
            answer, _ = await self._ask(frame, self._import_seconds)
        except TookTooLong:
            why = f"importing {entrypoint} did not end within {self._import_seconds:g} s"
            self._fail(why)
            raise Gone(why) from None
        if answer.kind == worker.STALE:
            self._fail("modules that it had imported were edited")
            raise Gone(str(self.gone))
        return answer

    async def _ask(self, frame: dict[str, Any], timeout: float) -> tuple[worker.CallAnswer, str]:
        if self.gone is not None:
            raise Gone(self.gone)
        call_id = next(self._ids)
        answer = self._answers[call_id] = asyncio.get_running_loop().create_future()
        self._send({"id": call_id, **frame})
        try:
            async with asyncio.timeout(timeout):
                return await asyncio.shield(answer)
        except TimeoutError:
            raise TookTooLong(await self._kill(call_id, answer)) from None
        except asyncio.CancelledError:
            # Whoever cancels has the call ended, too, and the sandbox if that is what it takes.
            await asyncio.shield(asyncio.ensure_future(self._kill(call_id, answer)))
            raise
        finally:
            self._answers.pop(call_id, None)

    async def _kill(
        self, call_id: int, answer: asyncio.Future[tuple[worker.CallAnswer, str]]
    ) -> str:
        """End a call, not the sandbox; what it printed last."""
        self._send({"id": call_id, "call": "kill"})
        try:
            async with asyncio.timeout(_KILL_SECONDS):
                _, output = await asyncio.shield(answer)
        except TimeoutError:
            self._fail("a call in it could not be ended")
        except Gone:
            pass
        else:
            return output
        return ""

    def _send(self, frame: dict[str, Any]) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        body = json.dumps(frame).encode()
        with contextlib.suppress(OSError):  # it is gone: the reader sees that
            self._process.stdin.write(_HEADER.pack(len(body)) + body)

    async def _read(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        why = "its supervisor ended"
        try:
            while True:
                (size,) = _HEADER.unpack(await self._process.stdout.readexactly(_HEADER.size))
                if size > _MAX_FRAME_BYTES:
                    raise ValueError(f"it announced {size:,} bytes")
                self._hear(json.loads(await self._process.stdout.readexactly(size)))
        except (OSError, EOFError):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_END_SECONDS):
                    why = _how_it_died(await self._process.wait(), self._printed)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            why = f"its answer makes no sense: {error}"
        self._fail(why)

    def _hear(self, frame: Any) -> None:
        call_id, fields, output = frame["id"], frame["answer"], frame["output"]
        if len(fields) != 3 or not all(isinstance(field, str) for field in (*fields, output)):
            raise ValueError("that is not an answer")
        future = self._answers.get(call_id)
        if future is not None and not future.done():
            future.set_result((worker.CallAnswer(*fields), output))

    def _fail(self, why: str) -> None:
        """From now on it is gone, for all that wait and all that come."""
        first = self.gone is None
        self.gone = self.gone or why
        for future in self._answers.values():
            if not future.done():
                future.set_exception(Gone(self.gone))
                future.exception()  # whoever waited may have left
        if self._process is not None:
            kill_with_children(self._process.pid)
        if first:
            self._ended(why)

    async def _keep_output(self) -> None:
        assert self._process is not None
        assert self._process.stderr is not None
        while part := await self._process.stderr.read(_PART_BYTES):
            self._printed.append(part)


def _how_it_died(status: int, printed: Sequence[bytes]) -> str:
    said = b"".join(printed).decode(errors="replace").strip()[-500:]
    if status < 0 or status > 128:  # bubblewrap reports its child's signal like a shell
        with contextlib.suppress(ValueError):
            name = signal.Signals(-status if status < 0 else status - 128).name
            return f"its first process was killed by {name}"
    return f"its first process exited with status {status}{': ' if said else ''}{said}"


# What the supervisor answers beside a worker's kinds.
DIED: Final = supervisor.DIED
NO_ROOM: Final = supervisor.NO_ROOM
