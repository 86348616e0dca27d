"""Calls in a sandbox that outlives them: its start, and the frames to the supervisor inside.

The output of a sandbox is hostile input, which is only bounded and parsed.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, Final

import structlog

from services.reward import worker
from services.reward.cgroups import CoreLease
from services.reward.sandboxes import supervisor
from services.reward.sandboxes.profile import SandboxProfile
from services.reward.sandboxes.provider import Sandbox, SandboxProcess, SandboxProvider
from troupe.processes.frames import frame, read_frame
from troupe.rpc import TroupeError

log = structlog.get_logger("troupe.reward")

# An answer of at most 20 MiB, quoted, and what was printed.
_MAX_FRAME_BYTES: Final = 48 << 20
# How long a call may take to end after a `kill` request; then the whole sandbox is ended.
_KILL_SECONDS: Final = 5.0
_END_SECONDS: Final = 5.0
# How long a provider may take to stop a sandbox.
_STOP_SECONDS: Final = 120.0


class SandboxEnded(Exception):
    """The sandbox has ended; the text says how."""


class SandboxNotStarted(SandboxEnded):
    """The sandbox ended before it was ready for a call."""


class CallTimedOut(Exception):
    """The call took too long and was ended; `output` is what it printed last."""

    def __init__(self, output: str) -> None:
        super().__init__()
        self.output = output


class SandboxSession:
    """A sandbox and the calls in it. It starts with its first call, is frozen between calls, and
    never restarts."""

    def __init__(
        self,
        provider: SandboxProvider,
        name: str,
        profile: SandboxProfile,
        import_seconds: float,
        ended: Callable[[str], None],
    ) -> None:
        """`import_seconds`: how long it may take to start, and to import a function. `ended(why)`
        is called once, when it has ended."""
        self._provider, self._name, self._profile = provider, name, profile
        self._ended = ended
        self._import_seconds = import_seconds
        self._sandbox: Sandbox | None = None
        self._process: SandboxProcess | None = None
        self._starting: asyncio.Task[None] | None = None
        self._prepared: dict[str, asyncio.Task[worker.CallAnswer]] = {}
        self._answers: dict[int, asyncio.Future[tuple[worker.CallAnswer, str]]] = {}
        self._ids = itertools.count()
        self._reader: asyncio.Task[None] | None = None
        self._running = 0
        self._started = False
        # Held while the sandbox is thawed or frozen.
        self._gate = asyncio.Lock()
        # Why it has ended; None while it has not.
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
        """Answer, output and run seconds of one call. `key` identifies the function and its code.

        `timeout` counts only while the function runs. Raises SandboxEnded, and CallTimedOut once
        the call has been ended. Cancelling ends the call.
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

    def memory_kills(self) -> int:
        """Return the number of processes that were ended because its memory was used up; 0:
        unknown."""
        return 0 if self._sandbox is None else self._sandbox.memory_kills()

    async def end(self, why: str) -> None:
        """End the sandbox and all that runs in it. Raises OSError and TimeoutError."""
        self._fail(why)
        tasks = [self._starting, *self._prepared.values(), self._reader]
        given_up = [task for task in tasks if task is not None]
        for task in given_up:
            task.cancel()
        await asyncio.gather(*given_up, return_exceptions=True)
        if self._sandbox is not None:
            async with asyncio.timeout(_STOP_SECONDS):
                await self._sandbox.stop()

    @contextlib.asynccontextmanager
    async def _awake(self, lease: CoreLease | None) -> AsyncIterator[Sandbox]:
        self._running += 1
        sandbox: Sandbox | None = None
        try:
            async with self._gate:
                sandbox = await self._start()
                if lease is not None:
                    await self._try(sandbox.grant, lease)
                await self._try(sandbox.thaw)
            yield sandbox
        finally:
            self._running -= 1
            if sandbox is not None:
                async with self._gate:
                    if self._running == 0 and self.gone is None:
                        await self._try(sandbox.freeze)
                    if lease is not None:
                        await self._try(sandbox.withdraw, lease)

    async def _try(self, what: Callable[..., Awaitable[None]], *values: Any) -> None:
        try:
            await what(*values)
        except (OSError, TimeoutError) as error:  # the call continues; its cores are counted anyway
            log.warning("a sandbox", what=what.__name__, error=str(error))

    async def _start(self) -> Sandbox:
        if self._starting is None:
            self._starting = asyncio.create_task(self._begin())
        try:
            await asyncio.shield(self._starting)
        except asyncio.CancelledError:
            if self.gone is None:
                raise
        if self.gone is not None:
            raise (SandboxEnded if self._started else SandboxNotStarted)(self.gone)
        assert self._sandbox is not None  # it has started
        return self._sandbox

    async def _begin(self) -> None:
        late = f"it did not start within {self._import_seconds:g} s"
        try:
            async with asyncio.timeout(self._import_seconds):
                self._sandbox = await self._provider.launch(self._name, self._profile)
                files = [supervisor.__file__, worker.__file__]
                self._process = await self._sandbox.start(files, first=True)
            self._reader = asyncio.create_task(self._read(self._process))
            answer, _ = await self._ask({"call": "ready"}, self._import_seconds)
            if answer.kind != worker.OK:
                raise SandboxEnded(answer.text)
            await self._sandbox.confine()
            self._started = True
        except (CallTimedOut, TimeoutError):
            self._fail(late)
        except (OSError, SandboxEnded, TroupeError) as error:
            self._fail(str(error))

    async def _prepare(self, key: str, entrypoint: str) -> worker.CallAnswer:
        """Import a function, once for all its calls."""
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
        except CallTimedOut:
            why = f"importing {entrypoint} did not end within {self._import_seconds:g} s"
            self._fail(why)
            raise SandboxEnded(why) from None
        if answer.kind == worker.STALE:
            self._fail("modules that it had imported were edited")
            raise SandboxEnded(str(self.gone))
        return answer

    async def _ask(self, frame: dict[str, Any], timeout: float) -> tuple[worker.CallAnswer, str]:
        if self.gone is not None:
            raise SandboxEnded(self.gone)
        call_id = next(self._ids)
        answer = self._answers[call_id] = asyncio.get_running_loop().create_future()
        self._send({"id": call_id, **frame})
        try:
            async with asyncio.timeout(timeout):
                return await asyncio.shield(answer)
        except TimeoutError:
            raise CallTimedOut(await self._kill(call_id, answer)) from None
        except asyncio.CancelledError:
            # The call is ended, too, or the whole sandbox if that is what it takes.
            await asyncio.shield(asyncio.ensure_future(self._kill(call_id, answer)))
            raise
        finally:
            self._answers.pop(call_id, None)

    async def _kill(
        self, call_id: int, answer: asyncio.Future[tuple[worker.CallAnswer, str]]
    ) -> str:
        """End a call, but not the sandbox; return what it printed last."""
        self._send({"id": call_id, "call": "kill"})
        try:
            async with asyncio.timeout(_KILL_SECONDS):
                _, output = await asyncio.shield(answer)
        except TimeoutError:
            self._fail("a call in it could not be ended")
        except SandboxEnded:
            pass
        else:
            return output
        return ""

    def _send(self, request: dict[str, Any]) -> None:
        assert self._process is not None
        self._process.write(frame(json.dumps(request).encode()))

    async def _read(self, process: SandboxProcess) -> None:
        why = "its supervisor ended"
        try:
            while True:
                body = await read_frame(process, _MAX_FRAME_BYTES)
                self._receive(json.loads(body))
        except (OSError, EOFError):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_END_SECONDS):
                    how = await process.ended()
                    printed = process.output().strip()[-500:]
                    why = f"its first process {how}"
                    if printed and not how.startswith("was killed"):
                        why += f": {printed}"
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            why = f"its answer is invalid: {error}"
        self._fail(why)

    def _receive(self, found: Any) -> None:
        call_id, fields, output = found["id"], found["answer"], found["output"]
        answer = worker.CallAnswer.of_frame(fields)
        if not isinstance(output, str):
            raise ValueError("that is not an answer")
        future = self._answers.get(call_id)
        if future is not None and not future.done():
            future.set_result((answer, output))

    def _fail(self, why: str) -> None:
        """Record that it has ended, fail all calls that wait, and kill what is left."""
        first = self.gone is None
        self.gone = self.gone or why
        for future in self._answers.values():
            if not future.done():
                future.set_exception(SandboxEnded(self.gone))
                future.exception()  # marks it as seen: the caller may have left
        if self._process is not None:
            self._process.kill()
        if first:
            self._ended(why)
