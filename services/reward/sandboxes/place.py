"""Where one call of a sandbox runs, as the runtime sees places."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from services.reward.answers import outcome_of, sendable
from services.reward.call import Call, Outcome
from services.reward.cpu import Lease
from services.reward.function import Function
from services.reward.sandbox import Cage
from services.reward.sandboxes.sandbox import (
    DIED,
    NO_ROOM,
    Gone,
    Home,
    NotStarted,
    Sandbox,
    TookTooLong,
)
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
class Owner:
    """Whose sandbox it is; with `call` it is that call's alone."""

    job_id: str
    trajectory_id: str
    call: str = ""


@dataclass(eq=False)
class Kept:
    """A sandbox with its owner."""

    name: str
    sandbox_id: str
    owner: Owner
    cage: Cage
    home: Home
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
        self._task: asyncio.Task[Outcome] | None = None
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

    async def warm_up(self, function: Function) -> None:
        """Its first call imports the function."""

    def holds(self, function: Function) -> bool:
        """It is not chosen, but given."""
        return True

    def suits(self, function: Function) -> bool:
        """It was opened for the function."""
        return True

    def cancel(self) -> None:
        """End the call; its outcome is KIND_CANCELLED."""
        self._cancelled = True
        if self._task is not None:
            self._task.cancel()

    async def run_many(
        self, function: Function, calls: Sequence[Call], lease: Lease | None = None
    ) -> AsyncGenerator[tuple[int, Outcome]]:
        """Run `calls` one after the other: index and outcome of each as it ends."""
        for i, call in enumerate(calls):
            if not call.dropped:
                yield i, await self.run(function, call, lease)

    async def run(self, function: Function, call: Call, lease: Lease | None = None) -> Outcome:
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

    async def _run(self, function: Function, call: Call, lease: Lease | None) -> Outcome:
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
    ) -> Outcome:
        error = pb.InvocationError(kind=kind, message=message, output=output)
        return Outcome(error=error, sandbox=self._sandbox_id)


def _gone(why: str) -> str:
    return f"the trajectory's sandbox is gone, with its files and processes: {why}"
