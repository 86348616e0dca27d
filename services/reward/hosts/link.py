"""One host that is attached to the service: what it was sent, and what it answers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Final

import structlog

from services.reward.call import Call, Outcome
from services.reward.cpu import Lease
from services.reward.function import Function
from services.reward.gpu import Board
from services.reward.sources import Sources
from troupe.rpc import new_id
from troupe.v1 import reward_pb2 as pb

log = structlog.get_logger("troupe.reward")

_NO_LEASE: Final = Lease("", ())


@dataclass(eq=False)
class Run:
    """Calls that were sent, and their outcomes as they come; None: there will be no more."""

    run_id: str
    calls: Sequence[Call]
    outcomes: asyncio.Queue[tuple[int, Outcome] | None] = field(default_factory=asyncio.Queue)
    answered: set[int] = field(default_factory=set)
    # Of the calls that the host was told not to begin.
    dropped: set[int] = field(default_factory=set)

    @property
    def current(self) -> int | None:
        """The first call without an outcome that was not dropped."""
        open_ = (i for i, c in enumerate(self.calls) if i not in self.answered and not c.dropped)
        return next(open_, None)


class Link:
    """The stream to one host, from its offer until it is lost."""

    def __init__(self, offer: pb.HostOffer, sources: Sources) -> None:
        self.offer = offer
        self.heard = time.monotonic()
        self.draining = False
        self.processes = 0
        self.residents: Sequence[pb.ModelResidence] = ()
        self.invocations = 0
        # Of the models that it offers.
        self.board: Board | None = None
        # Functions that ran there, with their registrations: their code is imported there.
        self.functions: dict[str, int] = {}
        self._sources = sources
        self._sent: set[str] = set()
        self._commands: asyncio.Queue[pb.HostCommand | None] = asyncio.Queue()
        self._runs: dict[str, Run] = {}
        self._lost = ""

    @property
    def name(self) -> str:
        """The host's id."""
        return self.offer.host_id

    @property
    def running(self) -> int:
        """Runs that have not ended."""
        return len(self._runs)

    async def commands(self, patience: float) -> AsyncIterator[pb.HostCommand]:
        """What the host is to be told, until it is lost, or not heard of for `patience` s."""
        while not self._lost:
            left = self.heard + patience - time.monotonic()
            if left <= 0:
                self.lose(f"was not heard of for {patience:g} s")
                return
            try:
                async with asyncio.timeout(left):
                    command = await self._commands.get()
            except TimeoutError:
                continue
            if command is None:
                return
            yield command

    def begin(self, function: Function, calls: Sequence[Call], cores: int) -> Run:
        """Have `calls` run there, one after the other."""
        run = Run(new_id("run"), calls)
        self._runs[run.run_id] = run
        if self._lost:
            self._end_lost(run)
            return run
        source = function.spec.source_sha256
        if source and source not in self._sent:
            self._sent.add(source)
            files = self._sources.files(source)
            self._tell(pb.HostCommand(source=pb.HostSource(sha256=source, files=files)))
        message = pb.HostRun(
            run_id=run.run_id,
            function=function.spec,
            registrations=function.registrations,
            cores=cores,
            calls=[
                pb.HostCall(
                    arguments_json=call.arguments_json,
                    job_id=call.job_id,
                    trajectory_id=call.trajectory_id,
                )
                for call in calls
            ],
        )
        self._tell(pb.HostCommand(run=message))
        self.functions[function.key] = function.registrations
        return run

    def drop(self, run: Run) -> None:
        """Let the host know which calls need not be begun any more."""
        for index, call in enumerate(run.calls):
            if call.dropped and index not in run.dropped | run.answered:
                run.dropped.add(index)
                drop = pb.HostDrop(run_id=run.run_id, index=index)
                self._tell(pb.HostCommand(drop=drop))

    def cancel(self, run: Run) -> None:
        """End what runs now."""
        self._tell(pb.HostCommand(cancel=pb.HostCancel(run_id=run.run_id)))

    def forget(self, run: Run) -> None:
        """Nobody waits for its outcomes any more."""
        if self._runs.pop(run.run_id, None) is not None:
            self.cancel(run)

    def hear(self, message: pb.HostMessage) -> None:
        """Something came from the host."""
        self.heard = time.monotonic()
        what = message.WhichOneof("message")
        if what == "beat":
            beat = message.beat
            self.draining = self.draining or beat.draining
            self.processes, self.residents = beat.processes, list(beat.residents)
            if self.board is not None:
                self.board.see({r.name: r.first_device for r in beat.residents})
        elif what == "outcome" and (run := self._runs.get(message.outcome.run_id)):
            self._answered(run, message.outcome)
        elif what == "output" and (run := self._runs.get(message.output.run_id)):
            index = message.output.index
            if 0 <= index < len(run.calls) and (printed := run.calls[index].printed):
                printed(message.output.text)
        elif what == "end" and (run := self._runs.pop(message.end.run_id, None)):
            run.outcomes.put_nowait(None)

    def lose(self, why: str) -> None:
        """It is gone: what ran there has died, what had not begun has not begun."""
        if self._lost:
            return
        self._lost = why
        self._commands.put_nowait(None)
        if self._runs:
            log.warning("a host is lost with its calls", host=self.name, why=why, runs=self.running)
        for run in list(self._runs.values()):
            self._end_lost(run)

    def _answered(self, run: Run, outcome: pb.HostOutcome) -> None:
        index = outcome.index
        if not 0 <= index < len(run.calls) or index in run.answered:
            log.warning("an outcome of nothing that was asked for", host=self.name, index=index)
            return
        run.answered.add(index)
        self.invocations += 1
        error = outcome.error if outcome.HasField("error") else None
        found = Outcome(
            outcome.result_json,
            outcome.seconds,
            error=error,
            cold_seconds=outcome.cold_start_seconds,
        )
        run.outcomes.put_nowait((index, found))

    def _end_lost(self, run: Run) -> None:
        self._runs.pop(run.run_id, None)
        if (current := run.current) is not None:
            error = pb.InvocationError(
                kind=pb.InvocationError.KIND_WORKER_DIED,
                message=f"the host {self.name} {self._lost}",
            )
            run.outcomes.put_nowait((current, Outcome(error=error)))
        run.outcomes.put_nowait(None)

    def _tell(self, command: pb.HostCommand) -> None:
        if not self._lost:
            self._commands.put_nowait(command)


class RemotePlace:
    """A place on another host (`services.reward.call.Place`). Which of its processes a run gets
    is that host's affair, so all places of a host are alike."""

    def __init__(self, link: Link, index: int) -> None:
        self.name = f"{link.name}/{index}"
        self.restarts = 0
        self._link = link
        self._index = index
        self._since = time.monotonic()
        self._run: Run | None = None

    @property
    def warm(self) -> bool:
        """The host starts processes when it needs them: here it always looks as if it had."""
        return True

    @property
    def lived(self) -> float:
        """Seconds that the host offered it."""
        return time.monotonic() - self._since

    async def start(self) -> None:
        """The host's affair."""

    async def stop(self) -> None:
        """The host's affair."""

    def rest(self) -> None:
        """The host's affair."""

    async def warm_up(self, function: Function) -> None:
        """The host's affair."""

    def holds(self, function: Function) -> bool:
        """Whether the function ran on that host since its last registration."""
        return self._link.functions.get(function.key) == function.registrations

    def suits(self, function: Function) -> bool:
        """Any of them does."""
        return True

    def cancel(self) -> None:
        """End the call that runs now; its outcome is KIND_CANCELLED."""
        if self._run is not None:
            self._link.cancel(self._run)

    async def run_many(
        self, function: Function, calls: Sequence[Call], lease: Lease | None = None
    ) -> AsyncGenerator[tuple[int, Outcome]]:
        """Run `calls` there, one after the other: index and outcome of each as it ends.

        What may not run twice is sent when its turn has come, and not if it is dropped by then.
        """
        cores = len((lease or _NO_LEASE).cores)
        if function.repeatable:
            async with aclosing(self._send(function, calls, cores)) as outcomes:
                async for found in outcomes:
                    yield found
            return
        for index, call in enumerate(calls):
            if call.dropped:
                continue
            ended = False
            async with aclosing(self._send(function, [call], cores)) as outcomes:
                async for _, outcome in outcomes:
                    ended = outcome.error is not None and outcome.error.kind == _DIED
                    yield index, outcome
            if ended:
                return

    async def _send(
        self, function: Function, calls: Sequence[Call], cores: int
    ) -> AsyncGenerator[tuple[int, Outcome]]:
        run = self._run = self._link.begin(function, calls, cores)
        try:
            while (found := await run.outcomes.get()) is not None:
                yield found
                self._link.drop(run)
        finally:
            self._run = None
            self._link.forget(run)


_DIED: Final = pb.InvocationError.KIND_WORKER_DIED


class RemoteCores:
    """So many cores of another host, which chooses them itself (`services.reward.host.Cores`)."""

    def __init__(self, count: int) -> None:
        self.count = self.free = count

    def take(self, group: str, count: int) -> Lease:
        """`count` cores for `group`. Raises ValueError when they are not free."""
        if count > self.free:
            raise ValueError(f"{count} cores wanted, {self.free} are free")
        self.free -= count
        return Lease(group, tuple(range(count)))

    def give_back(self, lease: Lease) -> None:
        """The call has ended."""
        self.free += len(lease.cores)
