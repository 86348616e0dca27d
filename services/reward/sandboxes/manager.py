"""Opening, limiting and ending of sandboxes that outlive a call.

A function with `stateful: true` runs in the sandbox of the call's trajectory; functions that
declare the same sandbox, image and limits share it. Containers are opened for a single call, too.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Final

import structlog

from services.reward.call import CallOutcome, FunctionCall, outcome_of, sendable
from services.reward.cgroups import BASE_MIB, CoreLease
from services.reward.executor import CallExecutor
from services.reward.function import RegisteredFunction
from services.reward.sandboxes.profile import OF_WORKERS, PROCESS, SandboxProfile
from services.reward.sandboxes.provider import SandboxProvider
from services.reward.sandboxes.session import (
    CallTimedOut,
    SandboxEnded,
    SandboxNotStarted,
    SandboxSession,
)
from services.reward.sandboxes.supervisor import DIED, NO_ROOM
from troupe.devices import host_memory
from troupe.rpc import InvalidArgument, ResourceExhausted, new_id
from troupe.v1 import reward_pb2 as reward_pb

log = structlog.get_logger("troupe.reward")

_Kind = reward_pb.InvocationError
# How long a call waits for room before it is refused, with this `retry_after_ms`.
_WAIT_SECONDS: Final = 30.0
_RETRY_MS: Final = 500
# Ended sandboxes whose reason is remembered.
_REMEMBERED: Final = 1000


class SandboxGone(Exception):
    """The trajectory's sandbox has ended; the text says why."""

    def __init__(self, sandbox_id: str, why: str) -> None:
        super().__init__(why)
        self.sandbox_id = sandbox_id

    def error(self) -> reward_pb.InvocationError:
        """Return the invocation's error."""
        return reward_pb.InvocationError(kind=_Kind.KIND_SANDBOX_GONE, message=_gone(str(self)))


@dataclass(frozen=True)
class SandboxLimits:
    """Bounds on all open sandboxes together."""

    count: int = 64
    # Declared memory; 0: three quarters of the machine's.
    memory_mib: int = 0
    idle_seconds: float = 600.0

    @cached_property
    def memory(self) -> int:
        """In MiB."""
        return self.memory_mib or int(host_memory()[0] * 3 / 4) >> 20


@dataclass(frozen=True)
class SandboxOwner:
    """The trajectory that a sandbox belongs to; with `call`, the single call."""

    job_id: str
    trajectory_id: str
    call: str = ""


@dataclass(eq=False)
class OpenSandbox:
    """A sandbox with its owner and the calls that use it."""

    name: str
    sandbox_id: str
    owner: SandboxOwner
    profile: SandboxProfile
    session: SandboxSession
    idle_seconds: float
    # Calls that wait for it or run in it.
    users: int = 0
    # Held by the call that runs.
    turn: asyncio.Lock = field(default_factory=asyncio.Lock, repr=False)
    timer: asyncio.TimerHandle | None = field(default=None, repr=False)


@dataclass(eq=False)
class _Opening:
    """A sandbox that waits for room, and how many calls wait for it."""

    task: asyncio.Task[OpenSandbox]
    callers: int = 0


class SandboxManager:
    """All sandboxes of this host that outlive a call."""

    def __init__(
        self,
        limits: SandboxLimits,
        import_seconds: float,
        providers: Mapping[str, SandboxProvider],
    ) -> None:
        """`import_seconds`: how long one may take to start, and to import a function. `providers`:
        by kind of sandbox."""
        self._limits = limits
        self._import_seconds = import_seconds
        self._providers = providers
        self._sandboxes: dict[tuple[SandboxOwner, SandboxProfile], OpenSandbox] = {}
        self._opening: dict[tuple[SandboxOwner, SandboxProfile], _Opening] = {}
        # Sandbox id -> why it ended, of the last that did.
        self._ended: dict[str, str] = {}
        self._numbers = itertools.count()
        # MiB, and a future that is set when they are granted; first come, first served.
        self._line: list[tuple[int, asyncio.Future[None]]] = []
        self._ending: set[asyncio.Task[None]] = set()
        # Of open sandboxes and of ending ones, which take room until their processes have ended.
        self._count = 0
        self._memory = 0

    def check(self, spec: reward_pb.FunctionSpec) -> None:
        """Raise InvalidArgument for a function whose sandbox is larger than the limit."""
        if not spec.stateful and (spec.sandbox or PROCESS) in OF_WORKERS:
            return
        profile = SandboxProfile.of(spec)
        if _memory_of(profile) > self._limits.memory:
            raise InvalidArgument(
                f"with {BASE_MIB} MiB of its own exceeds the {self._limits.memory} MiB that all "
                "sandboxes may take: no call could ever run",
                field="function.memory_mib",
                value=profile.memory_mib,
                remedy="Declare less, or raise TROUPE_REWARD_SANDBOX_MEMORY_MIB.",
            )

    @contextlib.asynccontextmanager
    async def executor(
        self, function: RegisteredFunction, call: FunctionCall
    ) -> AsyncIterator[SandboxExecutor]:
        """Hold the executor that runs a call in its sandbox, from before queueing until the call
        has ended.

        The calls of one sandbox run one after another; a waiting call holds no worker. Raises
        InvalidArgument where no trajectory is named, SandboxGone when the call names a sandbox that
        has ended, ResourceExhausted (with retry_after_ms) when there is no room for another sandbox
        for too long.
        """
        stateful = function.spec.stateful
        if stateful and not call.trajectory_id:
            raise InvalidArgument(
                "is empty",
                field="trajectory_id",
                remedy="A stateful function is called for a trajectory, which has its sandbox.",
            )
        owner = SandboxOwner(call.job_id, call.trajectory_id, "" if stateful else new_id())
        found = await self._find(function, owner, call.sandboxes)
        found.users += 1
        if found.timer is not None:
            found.timer.cancel()
            found.timer = None
        try:
            async with found.turn:
                yield SandboxExecutor(found)
        finally:
            found.users -= 1
            if found.users == 0 and found.session.gone is None:
                if owner.call:
                    self._end(found, "its call has ended")
                else:
                    self._end_when_idle(found)

    def close(self, job_id: str, trajectory_id: str) -> int:
        """End the sandboxes of a trajectory that has ended; how many there were."""
        owner = SandboxOwner(job_id, trajectory_id)
        theirs = [one for one in self._sandboxes.values() if one.owner == owner]
        for one in theirs:
            self._end(one, "its trajectory was closed")
        return len(theirs)

    async def stop(self) -> None:
        """End all sandboxes."""
        opening = [one.task for one in self._opening.values()]
        for task in opening:
            task.cancel()
        for one in list(self._sandboxes.values()):
            self._end(one, "the reward service stops")
        await asyncio.gather(*opening, *self._ending, return_exceptions=True)

    async def _find(
        self, function: RegisteredFunction, owner: SandboxOwner, had: Sequence[str]
    ) -> OpenSandbox:
        """Return the owner's sandbox of the function's profile, opened if need be; `had` are the
        ids of those that the trajectory has had."""
        key = owner, function.profile
        found = self._sandboxes.get(key)
        prefix = f"{_profile_hash(function.profile)}-"
        for sandbox_id in had:
            if sandbox_id.startswith(prefix) and (found is None or found.sandbox_id != sandbox_id):
                why = self._ended.get(sandbox_id, "this service does not know it (any more)")
                raise SandboxGone(sandbox_id, why)
        if found is not None:
            return found
        opening = self._opening.get(key)
        if opening is None:
            opening = self._opening[key] = _Opening(
                asyncio.create_task(self._open(function, owner))
            )
            opening.task.add_done_callback(lambda _: self._opening.pop(key, None))
        opening.callers += 1
        try:
            return await asyncio.shield(opening.task)
        finally:
            opening.callers -= 1
            if not opening.callers:
                opening.task.cancel()  # its last caller has left, if it is not open yet

    async def _open(self, function: RegisteredFunction, owner: SandboxOwner) -> OpenSandbox:
        profile, spec = function.profile, function.spec
        await self._wait_for_room(_memory_of(profile))
        name = f"sandbox-{next(self._numbers)}"
        provider = self._providers[profile.level]
        session = SandboxSession(
            provider, name, profile, self._import_seconds, lambda why: self._end(found, why)
        )
        idle = spec.sandbox_idle_seconds or self._limits.idle_seconds
        sandbox_id = f"{_profile_hash(profile)}-{new_id()}"
        found = OpenSandbox(name, sandbox_id, owner, profile, session, idle)
        self._sandboxes[owner, profile] = found
        # Its callers may have left by now.
        self._end_when_idle(found)
        log.info("sandbox", sandbox=sandbox_id, level=profile.level, trajectory=owner.trajectory_id)
        return found

    def _end_when_idle(self, found: OpenSandbox) -> None:
        loop, why = asyncio.get_running_loop(), f"it was idle for {found.idle_seconds:g} s"
        found.timer = loop.call_later(found.idle_seconds, self._end, found, why)

    def _end(self, found: OpenSandbox, why: str) -> None:
        if self._sandboxes.get((found.owner, found.profile)) is not found:
            return
        del self._sandboxes[found.owner, found.profile]
        if found.timer is not None:
            found.timer.cancel()
        if not found.owner.call:
            self._ended[found.sandbox_id] = why
            while len(self._ended) > _REMEMBERED:
                del self._ended[next(iter(self._ended))]
        log.info("sandbox ends", sandbox=found.sandbox_id, why=why)
        task = asyncio.create_task(self._end_process(found, why))
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    async def _end_process(self, found: OpenSandbox, why: str) -> None:
        try:
            await found.session.end(why)
        except Exception:
            log.exception("a sandbox did not end", sandbox=found.sandbox_id)
        self._release(_memory_of(found.profile))

    async def _wait_for_room(self, memory: int) -> None:
        """Take room for one sandbox, in the order of arrival. Raises ResourceExhausted."""
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._line.append((memory, granted))
        self._grant_room()
        try:
            async with asyncio.timeout(_WAIT_SECONDS):
                await asyncio.shield(granted)
        except BaseException as error:
            if granted.done():  # just now
                self._release(memory)
            else:
                self._line.remove((memory, granted))
                self._grant_room()
            if isinstance(error, TimeoutError):
                raise ResourceExhausted(
                    f"{self._count} sandboxes of {self._memory} MiB are open, of at most "
                    f"{self._limits.count} of {self._limits.memory} MiB; {len(self._line)} wait",
                    retry_after_ms=_RETRY_MS,
                ) from None
            raise

    def _release(self, memory: int) -> None:
        self._count -= 1
        self._memory -= memory
        self._grant_room()

    def _grant_room(self) -> None:
        while self._line:
            memory, granted = self._line[0]
            fits = self._memory + memory <= self._limits.memory
            if not fits or self._count >= self._limits.count:
                return
            self._line.pop(0)
            self._count += 1
            self._memory += memory
            granted.set_result(None)


class SandboxExecutor(CallExecutor):
    """An executor for one call, which has the sandbox to itself."""

    def __init__(self, found: OpenSandbox) -> None:
        super().__init__(found.name)
        self._found = found
        self._task: asyncio.Task[CallOutcome] | None = None
        self._cancelled = False

    def cancel(self) -> None:
        """End the call; its outcome is KIND_CANCELLED."""
        self._cancelled = True
        if self._task is not None:
            self._task.cancel()

    async def run_many(
        self,
        function: RegisteredFunction,
        calls: Sequence[FunctionCall],
        lease: CoreLease | None = None,
    ) -> AsyncGenerator[tuple[int, CallOutcome]]:
        """Run `calls` in order: index and outcome of each as it ends."""
        for i, call in enumerate(calls):
            if not call.dropped:
                yield i, await self.run(function, call, lease)

    async def run(
        self, function: RegisteredFunction, call: FunctionCall, lease: CoreLease | None = None
    ) -> CallOutcome:
        """Return the outcome of one call."""
        self._task = asyncio.create_task(self._run(function, call, lease))
        if self._cancelled:
            self._task.cancel()
        try:
            return await self._task
        except asyncio.CancelledError:
            if not self._cancelled:
                raise
            return self._failed(_Kind.KIND_CANCELLED, "cancelled")
        finally:
            self._task.cancel()

    async def _run(
        self, function: RegisteredFunction, call: FunctionCall, lease: CoreLease | None
    ) -> CallOutcome:
        spec, session = function.spec, self._found.session
        kills = session.memory_kills()
        try:
            answer, output, seconds = await session.run(
                f"{function.key}#{function.registrations}",
                spec.entrypoint,
                call.arguments_json,
                memory_mib=spec.memory_mib,
                environment=call.environment,
                timeout=call.deadline.run_seconds,
                # The lease is of the host's group; the cores are this sandbox's while it runs.
                lease=None if lease is None else replace(lease, group=self.name),
            )
        except CallTimedOut as late:
            return CallOutcome(error=call.deadline.timed_out(late.output), sandbox=self._sandbox_id)
        except SandboxNotStarted as error:
            return self._failed(_Kind.KIND_WORKER_DIED, f"its sandbox did not start: {error}")
        except SandboxEnded as error:
            if spec.stateful:
                return self._failed(_Kind.KIND_SANDBOX_GONE, _gone(str(error)))
            return self._failed(_Kind.KIND_WORKER_DIED, f"its sandbox ended: {error}")
        if call.printed is not None and output:
            call.printed(output.encode())
        if answer.kind not in (DIED, NO_ROOM):
            return replace(outcome_of(answer, seconds, output), sandbox=self._sandbox_id)
        kind, text = _Kind.KIND_WORKER_DIED, sendable(answer.text)
        if answer.kind == DIED and session.memory_kills() > kills:
            kind, text = _Kind.KIND_OUT_OF_MEMORY, f"{text}: the sandbox's memory was used up"
        return self._failed(kind, text, output=output)

    @property
    def _sandbox_id(self) -> str:
        return "" if self._found.owner.call else self._found.sandbox_id

    def _failed(
        self,
        kind: reward_pb.InvocationError.Kind.ValueType,
        message: str,
        output: str = "",
    ) -> CallOutcome:
        error = reward_pb.InvocationError(kind=kind, message=message, output=output)
        return CallOutcome(error=error, sandbox=self._sandbox_id)


def _gone(why: str) -> str:
    return f"the trajectory's sandbox is gone, with its files and processes: {why}"


def _memory_of(profile: SandboxProfile) -> int:
    return BASE_MIB + profile.memory_mib


def _profile_hash(profile: SandboxProfile) -> str:
    """Return the first part of a sandbox's id: tells a trajectory's sandboxes apart."""
    return hashlib.sha256(repr(profile).encode()).hexdigest()[:8]
