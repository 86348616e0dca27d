"""A sandbox that outlives its calls: its process, and the frames to the supervisor inside.

The output of a sandbox is hostile input, which is only bounded and parsed. Backends start
sandboxes: `BubblewrapBackend` on this host, `container.py` in a container.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any, Final

import structlog

from services.reward import worker
from services.reward.cgroups import (
    ControlGroups,
    CoreLease,
    CoreManager,
    family,
)
from services.reward.sandboxes import supervisor
from services.reward.sandboxes.profile import SandboxProfile
from services.reward.slot import how_it_ended, start_process
from troupe.processes.ending import kill_tree
from troupe.processes.frames import frame, read_frame
from troupe.rpc import TroupeError

log = structlog.get_logger("troupe.reward")

# An answer of at most 20 MiB, quoted, and what was printed.
_MAX_FRAME_BYTES: Final = 48 << 20
# Kept of the standard error of the first process: parts, and bytes of each.
_PRINTED_PARTS: Final = 8
_PART_BYTES: Final = 4 << 10
# How long a call may take to end after a `kill` request; then the whole sandbox is ended.
_KILL_SECONDS: Final = 5.0
_END_SECONDS: Final = 5.0


class SandboxEnded(Exception):
    """The sandbox has ended; the text says how."""


class SandboxNotStarted(SandboxEnded):
    """The sandbox ended before it was ready for a call."""


class CallTimedOut(Exception):
    """The call took too long and was ended; `output` is what it printed last."""

    def __init__(self, output: str) -> None:
        super().__init__()
        self.output = output


class SandboxBackend:
    """Backend that runs and limits sandboxes: bubblewrap on this host, or a container engine.

    All methods but `launch` may raise OSError, `freeze` TimeoutError.
    """

    def launch(self) -> tuple[Sequence[str], dict[str, str] | None, bytes]:
        """Return the command and environment (None: the service's) of the process with the
        supervisor, and its first input. Raises FailedPrecondition ("no_sandbox")."""
        raise NotImplementedError

    async def entered(self, pids: Sequence[int]) -> None:
        """Handle the first answer of the supervisor, before any other code runs. `pids`: the
        started process and its descendants, as this host counts them."""

    async def grant(self, lease: CoreLease) -> None:
        """Let the next call use these cores, besides those of calls that run."""
        raise NotImplementedError

    async def withdraw(self, lease: CoreLease) -> None:
        """Take the cores of a call that has ended."""

    def memory_kills(self) -> int:
        """Return the processes that the kernel ended because the sandbox's memory was used up; 0:
        unknown."""
        return 0

    async def freeze(self) -> None:
        """Stop all its processes until `thaw`."""
        raise NotImplementedError

    async def thaw(self) -> None:
        """Let its processes go on."""
        raise NotImplementedError

    async def ended(self) -> None:
        """Remove what is left of it once its process has ended."""
        raise NotImplementedError


class Sandbox:
    """A sandbox, which starts with its first call, is frozen between calls, and never restarts."""

    def __init__(
        self, backend: SandboxBackend, import_seconds: float, ended: Callable[[str], None]
    ) -> None:
        """`import_seconds`: how long it may take to start, and to import a function. `ended(why)`
        is called once, when it has ended."""
        self._backend = backend
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

    async def end(self, why: str) -> None:
        """End the sandbox and all that runs in it."""
        self._fail(why)
        for task in (self._starting, *self._prepared.values(), *self._readers):
            if task is not None:
                task.cancel()
        process = self._process
        if process is not None:
            with contextlib.suppress(Exception):
                await self._backend.thaw()  # a frozen process is not killed by every kernel
            kill_tree(process.pid)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_END_SECONDS):
                    await process.wait()
            if process.stdin is not None:
                process.stdin.close()
        await self._backend.ended()

    @contextlib.asynccontextmanager
    async def _awake(self, lease: CoreLease | None) -> AsyncIterator[None]:
        self._running += 1
        try:
            async with self._gate:
                await self._start()
                if lease is not None:
                    await self._try(self._backend.grant, lease)
                await self._try(self._backend.thaw)
            yield
        finally:
            self._running -= 1
            async with self._gate:
                if self._running == 0 and self.gone is None:
                    await self._try(self._backend.freeze)
                if lease is not None and self._started:
                    await self._try(self._backend.withdraw, lease)

    async def _try(self, what: Callable[..., Awaitable[None]], *values: Any) -> None:
        try:
            await what(*values)
        except (OSError, TimeoutError) as error:  # the call goes on; its cores are counted anyway
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
            raise (SandboxEnded if self._started else SandboxNotStarted)(self.gone)

    async def _begin(self) -> None:
        try:
            command, environment, feed = self._backend.launch()
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
                raise SandboxEnded(answer.text)
            pids = await asyncio.to_thread(family, process.pid)
            await self._backend.entered(pids)
            self._started = True
        except CallTimedOut:
            self._fail(f"it did not start within {self._import_seconds:g} s")
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
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # it has ended: `_read` reports that
            self._process.stdin.write(frame(json.dumps(request).encode()))

    async def _read(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        why = "its supervisor ended"
        try:
            while True:
                body = await read_frame(self._process.stdout, _MAX_FRAME_BYTES)
                self._receive(json.loads(body))
        except (OSError, EOFError):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_END_SECONDS):
                    how = how_it_ended(await self._process.wait())
                    printed = b"".join(self._printed).decode(errors="replace").strip()[-500:]
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
            kill_tree(self._process.pid)
        if first:
            self._ended(why)

    async def _keep_output(self) -> None:
        assert self._process is not None
        assert self._process.stderr is not None
        while part := await self._process.stderr.read(_PART_BYTES):
            self._printed.append(part)


class BubblewrapBackend(SandboxBackend):
    """A bubblewrap sandbox, frozen between calls where control groups can do that.

    Elsewhere nothing but the supervisor is left between calls, and it waits for the next one.
    """

    def __init__(
        self,
        name: str,
        profile: SandboxProfile,
        groups: ControlGroups | None,
        cores: CoreManager | None,
    ) -> None:
        """`groups` limit what it takes as a whole, if there are any; `cores` hands cores out."""
        self._name, self._profile = name, profile
        self._groups, self._cores = groups, cores

    def launch(self) -> tuple[Sequence[str], dict[str, str], bytes]:
        files = [supervisor.__file__, worker.__file__]
        command, environment = self._profile.wrap(files, first=True)
        return command, environment, b""

    async def entered(self, pids: Sequence[int]) -> None:
        if self._cores is not None:
            self._cores.adopt(self._name, pids)
        if self._groups is not None:
            profile = self._profile
            self._groups.confine(self._name, pids, profile.processes, profile.memory_mib)

    async def grant(self, lease: CoreLease) -> None:
        if self._cores is not None:
            self._cores.grant(lease)

    async def withdraw(self, lease: CoreLease) -> None:
        if self._cores is not None:
            self._cores.withdraw(lease)

    def memory_kills(self) -> int:
        return self._groups.memory_kills(self._name) if self._groups is not None else 0

    async def freeze(self) -> None:
        if self._groups is not None and "freezer" in self._groups.controllers:
            await asyncio.to_thread(self._groups.freeze, self._name)

    async def thaw(self) -> None:
        if self._groups is None or "freezer" not in self._groups.controllers:
            return
        if self._groups.frozen(self._name):
            self._groups.thaw(self._name)

    async def ended(self) -> None:
        for manager in (self._cores, self._groups):
            if manager is not None:
                manager.forget(self._name)
