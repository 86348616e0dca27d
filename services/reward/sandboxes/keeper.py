"""All sandboxes of this host that outlive a call: whose they are, how many, for how long."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass, field, replace
from typing import Final, Protocol

import psutil
import structlog

from services.reward.call import CallOutcome, FunctionCall, WorkerPlace
from services.reward.function import RegisteredFunction
from services.reward.groups import BASE_MIB, ControlGroups, CoreLease, CoreManager
from services.reward.sandbox import CONTAINER, SandboxProfile
from services.reward.sandboxes.bubblewrap import BubblewrapHome
from services.reward.sandboxes.container import ContainerHome
from services.reward.sandboxes.sandbox import (
    DIED,
    NO_ROOM,
    Gone,
    NotStarted,
    Sandbox,
    SandboxBackend,
    TookTooLong,
)
from services.reward.slot import outcome_of, sendable
from troupe.rpc import InvalidArgument, ResourceExhausted, new_id
from troupe.v1 import reward_pb2 as pb

_Kind = pb.InvocationError
# What a supervisor answers beside a worker.
_SUPERVISORS: Final = (DIED, NO_ROOM)


class SandboxGone(Exception):
    """A trajectory had this sandbox, and it is no more; the text says why."""

    def __init__(self, sandbox_id: str, why: str) -> None:
        super().__init__(why)
        self.sandbox_id = sandbox_id

    def error(self) -> pb.InvocationError:
        """It as a caller gets it."""
        return pb.InvocationError(kind=_Kind.KIND_SANDBOX_GONE, message=_gone(str(self)))


@dataclass(frozen=True)
class SandboxOwner:
    """Whose sandbox it is; with `call` it is that call's alone."""

    job_id: str
    trajectory_id: str
    call: str = ""


@dataclass(eq=False)
class Kept:
    """A sandbox with its owner."""

    name: str
    sandbox_id: str
    owner: SandboxOwner
    cage: SandboxProfile
    home: SandboxBackend
    sandbox: Sandbox
    idle_seconds: float
    # Calls that wait for it or run in it.
    users: int = 0
    # Held by the one that runs.
    turn: asyncio.Lock = field(default_factory=asyncio.Lock, repr=False)
    timer: asyncio.TimerHandle | None = field(default=None, repr=False)


class SandboxPlace:
    """For one call, which has the sandbox to itself."""

    def __init__(self, kept: Kept) -> None:
        self.name = kept.name
        self.restarts = 0
        self._kept = kept
        self._task: asyncio.Task[CallOutcome] | None = None
        self._cancelled = False

    @property
    def warm(self) -> bool:
        """There is none to be started for it."""
        return True

    @property
    def lived(self) -> float:
        """Its seconds are its trajectory's, not the pool's."""
        return 0.0

    async def start(self) -> None:
        """Its first call starts it."""

    async def stop(self) -> None:
        """Its trajectory's end stops it."""

    def rest(self) -> None:
        """It rests by itself."""

    async def warm_up(self, function: RegisteredFunction) -> None:
        """Its first call imports the function."""

    def holds(self, function: RegisteredFunction) -> bool:
        """It is not chosen, but given."""
        return True

    def suits(self, function: RegisteredFunction) -> bool:
        """It was opened for the function."""
        return True

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
        """Run `calls` one after the other: index and outcome of each as it ends."""
        for i, call in enumerate(calls):
            if not call.dropped:
                yield i, await self.run(function, call, lease)

    async def run(
        self, function: RegisteredFunction, call: FunctionCall, lease: CoreLease | None = None
    ) -> CallOutcome:
        """The outcome of one call."""
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
        spec, sandbox, home = function.spec, self._kept.sandbox, self._kept.home
        kills = home.memory_kills()
        try:
            answer, output, seconds = await sandbox.run(
                f"{function.key}#{function.registrations}",
                spec.entrypoint,
                call.arguments_json,
                memory_mib=spec.memory_mib,
                environment=call.environment,
                timeout=spec.timeout_seconds,
                # The cores are the runtime's; for so long they are this sandbox's.
                lease=None if lease is None else replace(lease, group=self.name),
            )
        except TookTooLong as late:
            message = f"did not end within {spec.timeout_seconds:g} s"
            return self._failed(_Kind.KIND_TIMEOUT, message, output=late.output)
        except NotStarted as error:
            message = f"its sandbox did not start: {error}"
            return self._failed(_Kind.KIND_WORKER_DIED, message)
        except Gone as error:
            if spec.stateful:
                return self._failed(_Kind.KIND_SANDBOX_GONE, _gone(str(error)))
            return self._failed(_Kind.KIND_WORKER_DIED, f"its sandbox ended: {error}")
        if call.printed is not None and output:
            call.printed(output.encode())
        if answer.kind not in _SUPERVISORS:
            return replace(outcome_of(answer, seconds, output), sandbox=self._sandbox_id)
        kind, text = _Kind.KIND_WORKER_DIED, sendable(answer.text)
        if answer.kind == DIED and home.memory_kills() > kills:
            kind, text = _Kind.KIND_OUT_OF_MEMORY, f"{text}: the sandbox's memory was used up"
        return self._failed(kind, text, output=output)

    @property
    def _sandbox_id(self) -> str:
        return "" if self._kept.owner.call else self._kept.sandbox_id

    def _failed(
        self,
        kind: pb.InvocationError.Kind.ValueType,
        message: str,
        output: str = "",
    ) -> CallOutcome:
        error = pb.InvocationError(kind=kind, message=message, output=output)
        return CallOutcome(error=error, sandbox=self._sandbox_id)


def _gone(why: str) -> str:
    return f"the trajectory's sandbox is gone, with its files and processes: {why}"


log = structlog.get_logger("troupe.reward")

# How long a call waits for room before its caller is asked to come again.
_WAIT_SECONDS: Final = 30.0
_RETRY_MS: Final = 500
# Sandboxes that ended, of which it is still known why.
_REMEMBERED: Final = 1000


@dataclass(frozen=True)
class SandboxLimits:
    """What all sandboxes together may be."""

    count: int = 64
    # Declared memory; 0: three quarters of the machine's.
    memory_mib: int = 0
    idle_seconds: float = 600.0

    @property
    def memory(self) -> int:
        """In MiB."""
        return self.memory_mib or int(psutil.virtual_memory().total * 3 / 4) >> 20


@dataclass(eq=False)
class _Opening:
    """A sandbox that waits for room, and how many calls wait for it."""

    task: asyncio.Task[Kept]
    callers: int = 0


class SandboxKeeper:
    """Opens them for calls, and ends them with their trajectory or when they are idle."""

    def __init__(
        self,
        limits: SandboxLimits,
        import_seconds: float,
        *,
        groups: ControlGroups | None = None,
        cores: CoreManager | None = None,
    ) -> None:
        """`cores` hands cores out to calls; `groups` is what the kernel lets us limit with."""
        self._limits = limits
        self._import_seconds = import_seconds
        self._groups, self._cores = groups, cores
        self._kept: dict[tuple[SandboxOwner, SandboxProfile], Kept] = {}
        self._opening: dict[tuple[SandboxOwner, SandboxProfile], _Opening] = {}
        # Why those ended that ended last.
        self._ended: dict[str, str] = {}
        self._numbers = itertools.count()
        # Who waits for room, first come, first served.
        self._line: list[tuple[int, asyncio.Future[None]]] = []
        self._ending: set[asyncio.Task[None]] = set()
        # Of those that end, too: they still take what they take.
        self._count = 0
        self._memory = 0

    def __len__(self) -> int:
        return self._count

    def check(self, spec: pb.FunctionSpec) -> None:
        """Raises InvalidArgument for a function that there is never room for."""
        if not spec.stateful and spec.sandbox != CONTAINER:
            return
        cage = SandboxProfile.of(spec)
        if _memory_of(cage) > self._limits.memory:
            raise InvalidArgument(
                f"with {BASE_MIB} MiB of its own more than the {self._limits.memory} MiB that all "
                "sandboxes may take: no call could ever run",
                field="function.memory_mib",
                value=cage.memory_mib,
                remedy="Declare less, or raise TROUPE_REWARD_SANDBOX_MEMORY_MIB.",
            )

    @contextlib.asynccontextmanager
    async def room(
        self, function: RegisteredFunction, call: FunctionCall
    ) -> AsyncIterator[SandboxPlace]:
        """Where a call runs, from before it is queued until it has ended.

        The calls of one sandbox run one after another; who waits holds no worker. Raises
        InvalidArgument where no trajectory is named, SandboxGone when it names a sandbox
        that there is no more, ResourceExhausted (with retry_after_ms) when there is no room for
        another for too long.
        """
        stateful = function.spec.stateful
        if stateful and not call.trajectory_id:
            raise InvalidArgument(
                "is empty",
                field="trajectory_id",
                remedy="A stateful function is called for a trajectory, which has its sandbox.",
            )
        owner = SandboxOwner(call.job_id, call.trajectory_id, "" if stateful else new_id())
        kept = await self._find(function, owner, call.sandboxes)
        self._busy(kept)
        try:
            async with kept.turn:
                yield SandboxPlace(kept)
        finally:
            kept.users -= 1
            if kept.users == 0 and kept.sandbox.gone is None:
                self._rest(kept)

    def close(self, job_id: str, trajectory_id: str) -> int:
        """The trajectory has ended, and its sandboxes with it: how many that were."""
        owner = SandboxOwner(job_id, trajectory_id)
        theirs = [kept for kept in self._kept.values() if kept.owner == owner]
        for kept in theirs:
            self._end(kept, "its trajectory was closed")
        return len(theirs)

    async def stop(self) -> None:
        """End all."""
        opening = [one.task for one in self._opening.values()]
        for task in opening:
            task.cancel()
        for kept in list(self._kept.values()):
            self._end(kept, "the reward service stops")
        await asyncio.gather(*opening, *self._ending, return_exceptions=True)

    async def _find(
        self, function: RegisteredFunction, owner: SandboxOwner, had: Sequence[str]
    ) -> Kept:
        key = owner, function.cage
        kept = self._kept.get(key)
        mark = _mark(function.cage)
        for sandbox_id in had:
            if sandbox_id.startswith(f"{mark}-") and (
                kept is None or kept.sandbox_id != sandbox_id
            ):
                why = self._ended.get(sandbox_id, "this service does not know it (any more)")
                raise SandboxGone(sandbox_id, why)
        if kept is not None:
            return kept
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
                opening.task.cancel()  # nobody wants it any more, if it is not open yet

    async def _open(self, function: RegisteredFunction, owner: SandboxOwner) -> Kept:
        cage, spec = function.cage, function.spec
        memory = _memory_of(cage)
        await self._wait_for_room(memory)
        name = f"sandbox-{next(self._numbers)}"
        home: SandboxBackend
        if cage.level == CONTAINER:
            home = ContainerHome(f"troupe-{new_id()}", cage)
        else:
            home = BubblewrapHome(name, cage, self._groups, self._cores)
        sandbox = Sandbox(home, self._import_seconds, lambda why: self._end(kept, why))
        idle = spec.sandbox_idle_seconds or self._limits.idle_seconds
        sandbox_id = f"{_mark(cage)}-{new_id()}"
        kept = Kept(name, sandbox_id, owner, cage, home, sandbox, idle)
        self._kept[owner, cage] = kept
        # Whoever wanted it may be gone by now.
        self._idle(kept)
        log.info("sandbox", sandbox=sandbox_id, level=cage.level, trajectory=owner.trajectory_id)
        return kept

    def _busy(self, kept: Kept) -> None:
        kept.users += 1
        if kept.timer is not None:
            kept.timer.cancel()
            kept.timer = None

    def _rest(self, kept: Kept) -> None:
        if kept.owner.call:
            self._end(kept, "its call has ended")
        else:
            self._idle(kept)

    def _idle(self, kept: Kept) -> None:
        why = f"it was idle for {kept.idle_seconds:g} s"
        kept.timer = asyncio.get_running_loop().call_later(kept.idle_seconds, self._end, kept, why)

    def _end(self, kept: Kept, why: str) -> None:
        if self._kept.get((kept.owner, kept.cage)) is not kept:
            return
        del self._kept[kept.owner, kept.cage]
        if kept.timer is not None:
            kept.timer.cancel()
        if not kept.owner.call:
            self._ended[kept.sandbox_id] = why
            while len(self._ended) > _REMEMBERED:
                del self._ended[next(iter(self._ended))]
        log.info("sandbox ends", sandbox=kept.sandbox_id, why=why)
        task = asyncio.create_task(self._give_back(kept, why))
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    async def _give_back(self, kept: Kept, why: str) -> None:
        try:
            await kept.sandbox.end(why)
        except Exception:
            log.exception("a sandbox did not end", sandbox=kept.sandbox_id)
        self._count -= 1
        self._memory -= _memory_of(kept.cage)
        self._admit()

    async def _wait_for_room(self, memory: int) -> None:
        """Take room, behind those who wait already."""
        waits: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._line.append((memory, waits))
        self._admit()
        try:
            async with asyncio.timeout(_WAIT_SECONDS):
                await asyncio.shield(waits)
        except BaseException as error:
            if waits.done():  # it was given room just now
                self._count -= 1
                self._memory -= memory
            else:
                self._line.remove((memory, waits))
            self._admit()
            if isinstance(error, TimeoutError):
                raise ResourceExhausted(
                    f"{self._count} sandboxes of {self._memory} MiB are open, of at most "
                    f"{self._limits.count} of {self._limits.memory} MiB; {len(self._line)} wait",
                    retry_after_ms=_RETRY_MS,
                ) from None
            raise

    def _admit(self) -> None:
        while self._line:
            memory, waits = self._line[0]
            fits = self._memory + memory <= self._limits.memory
            if not fits or self._count >= self._limits.count:
                return
            self._line.pop(0)
            self._count += 1
            self._memory += memory
            waits.set_result(None)


def _memory_of(cage: SandboxProfile) -> int:
    return BASE_MIB + cage.memory_mib


def _mark(cage: SandboxProfile) -> str:
    """The part of a sandbox's id that tells which of a trajectory's sandboxes it is."""
    return hashlib.sha256(repr(cage).encode()).hexdigest()[:8]


class CallTurns(Protocol):
    """Who gives calls their turn: `services.reward.runtime.Runtime`."""

    async def invoke(
        self,
        invocation_id: str,
        function: RegisteredFunction,
        call: FunctionCall,
        *,
        priority: int = 0,
        weight: float = 1.0,
        place: WorkerPlace | None = None,
    ) -> pb.InvokeResponse:
        """Queue the call and wait for its outcome."""


class Guests:
    """Brings calls to their sandboxes. A call that waits for room holds no worker."""

    def __init__(self, sandboxes: SandboxKeeper, turns: CallTurns) -> None:
        self._sandboxes = sandboxes
        self._turns = turns
        # Calls that wait for room.
        self._waiting: dict[str, asyncio.Task[WorkerPlace]] = {}
        self._cancelled: set[str] = set()

    async def invoke(
        self,
        invocation_id: str,
        function: RegisteredFunction,
        call: FunctionCall,
        *,
        priority: int,
        weight: float,
    ) -> pb.InvokeResponse:
        """The outcome of a call.

        Raises what `SandboxKeeper.room` and `Runtime.invoke` raise, but for SandboxGone, which is
        an outcome.
        """
        async with AsyncExitStack() as stack:
            room = self._sandboxes.room(function, call)
            waiting = asyncio.create_task(_enter(stack, room))
            self._waiting[invocation_id] = waiting
            try:
                place = await waiting
            except SandboxGone as gone:
                return pb.InvokeResponse(error=gone.error(), sandbox=gone.sandbox_id)
            except asyncio.CancelledError:
                if invocation_id not in self._cancelled:
                    raise
                kind = pb.InvocationError.KIND_CANCELLED
                error = pb.InvocationError(kind=kind, message="cancelled before it ran")
                return pb.InvokeResponse(error=error)
            finally:
                del self._waiting[invocation_id]
                self._cancelled.discard(invocation_id)
            return await self._turns.invoke(
                invocation_id, function, call, priority=priority, weight=weight, place=place
            )

    def cancel(self, invocation_id: str) -> bool:
        """End a call that waits for room; False when it does not."""
        waiting = self._waiting.get(invocation_id)
        if waiting is None or waiting.done():
            return False
        self._cancelled.add(invocation_id)
        return waiting.cancel()


async def _enter(
    stack: AsyncExitStack, room: AbstractAsyncContextManager[WorkerPlace]
) -> WorkerPlace:
    return await stack.enter_async_context(room)
