"""Attached hosts as the service sees them: the stream to each, its executors, and its offer.

`HostFleet` decides whether a function can run on any of the hosts.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Final

import grpc
import structlog

from services.reward.call import CallOutcome, FunctionCall
from services.reward.cgroups import CoreCount, CoreLease
from services.reward.dispatch.dispatcher import Dispatcher
from services.reward.executor import CallExecutor
from services.reward.function import RegisteredFunction
from services.reward.gpu.manager import MODEL, ModelPlacement
from services.reward.host import FunctionHost
from services.reward.quota import QUOTA, QuotaManager
from services.reward.resources import (
    CORES,
    MEMORY,
    PLENTY,
    SANDBOX,
    WORKERS,
    HostResources,
    needs_of,
)
from services.reward.sandboxes.profile import OF_WORKERS, PROCESS
from troupe.contracts import kinds
from troupe.functions.sources import SourceStore
from troupe.rpc import InvalidArgument, Unavailable, new_id
from troupe.scheduling.elastic import Action, Amounts
from troupe.scheduling.elastic.cells import Model
from troupe.scheduling.elastic.hosts import nowhere
from troupe.v1 import reward_pb2 as reward_pb

log = structlog.get_logger("troupe.reward")

_DIED: Final = reward_pb.InvocationError.KIND_WORKER_DIED
# A host that attaches must send its offer within this time.
_OFFER_SECONDS: Final = 10.0
# A host that misses so many heartbeats in a row is given up.
_BEATS_MISSED: Final = 5
_HOST_ID: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}")
_MOST_WORKERS: Final = 4096
# A host whose service restarts attaches again within this time: it tries at least three times.
_COMING_SECONDS: Final = 15.0
# Resource -> the field of a function that asks for it, the setting of a host that offers it.
_FIELDS: Final = {
    CORES: ("cores", "TROUPE_REWARD_CORES"),
    WORKERS: ("max_concurrency", "TROUPE_REWARD_WORKERS"),
    MEMORY: ("memory_mib", "TROUPE_REWARD_MEMORY_MIB"),
}


@dataclass(eq=False)
class RemoteRun:
    """A chunk of calls that was sent to a host, and their outcomes as they come; None: the end."""

    run_id: str
    calls: Sequence[FunctionCall]
    outcomes: asyncio.Queue[tuple[int, CallOutcome] | None] = field(default_factory=asyncio.Queue)
    answered: set[int] = field(default_factory=set)
    # Indices of the calls that the host has been sent a HostDrop for.
    dropped: set[int] = field(default_factory=set)

    @property
    def current(self) -> int | None:
        """The first call without an outcome that was not dropped."""
        open_ = (i for i, c in enumerate(self.calls) if i not in self.answered and not c.dropped)
        return next(open_, None)


class HostLink:
    """The stream to one host, from its offer until it is lost."""

    def __init__(self, offer: reward_pb.HostOffer, sources: SourceStore) -> None:
        self.offer = offer
        # When the last message came.
        self.last_message = time.monotonic()
        self.draining = False
        self.processes = 0
        self.residents: Sequence[reward_pb.ModelResidence] = ()
        self.invocations = 0
        # Of the models that it offers on its devices.
        self.placement: ModelPlacement | None = None
        # Function key -> registrations, of functions that ran there: their code is imported.
        self.functions: dict[str, int] = {}
        self._sources = sources
        self._sent: set[str] = set()
        self._commands: asyncio.Queue[reward_pb.HostCommand | None] = asyncio.Queue()
        self._runs: dict[str, RemoteRun] = {}
        self._lost = ""

    @property
    def name(self) -> str:
        """The host's id."""
        return self.offer.host_id

    @property
    def running(self) -> int:
        """Chunks that run there."""
        return len(self._runs)

    async def commands(self, patience: float) -> AsyncIterator[reward_pb.HostCommand]:
        """Yield the commands to send to the host, until it is lost or was silent for `patience`
        seconds."""
        while not self._lost:
            left = self.last_message + patience - time.monotonic()
            if left <= 0:
                self.lose(f"was silent for {patience:g} s")
                return
            try:
                async with asyncio.timeout(left):
                    command = await self._commands.get()
            except TimeoutError:
                continue
            if command is None:
                return
            yield command

    def begin(
        self, function: RegisteredFunction, calls: Sequence[FunctionCall], cores: int
    ) -> RemoteRun:
        """Have the host run `calls` in order."""
        run = RemoteRun(new_id("run"), calls)
        self._runs[run.run_id] = run
        if self._lost:
            self._end_lost(run)
            return run
        source = function.spec.source_sha256
        if source and source not in self._sent:
            self._sent.add(source)
            files = self._sources.files(source)
            self._send(
                reward_pb.HostCommand(source=reward_pb.HostSource(sha256=source, files=files))
            )
        message = reward_pb.HostRun(
            run_id=run.run_id,
            function=function.spec,
            registrations=function.registrations,
            cores=cores,
            calls=[
                reward_pb.HostCall(
                    arguments_json=call.arguments_json,
                    job_id=call.job_id,
                    trajectory_id=call.trajectory_id,
                )
                for call in calls
            ],
        )
        self._send(reward_pb.HostCommand(run=message))
        self.functions[function.key] = function.registrations
        return run

    def drop(self, run: RemoteRun) -> None:
        """Tell the host which calls were dropped since."""
        for index, call in enumerate(run.calls):
            if call.dropped and index not in run.dropped | run.answered:
                run.dropped.add(index)
                drop = reward_pb.HostDrop(run_id=run.run_id, index=index)
                self._send(reward_pb.HostCommand(drop=drop))

    def cancel(self, run: RemoteRun) -> None:
        """End the call that runs now."""
        self._send(reward_pb.HostCommand(cancel=reward_pb.HostCancel(run_id=run.run_id)))

    def forget(self, run: RemoteRun) -> None:
        """Cancel a run whose outcomes are not read any more."""
        if self._runs.pop(run.run_id, None) is not None:
            self.cancel(run)

    def receive(self, message: reward_pb.HostMessage) -> None:
        """Handle a message from the host."""
        self.last_message = time.monotonic()
        what = message.WhichOneof("message")
        if what == "beat":
            beat = message.beat
            self.draining = self.draining or beat.draining
            self.processes, self.residents = beat.processes, list(beat.residents)
            if self.placement is not None:
                self.placement.see({r.name: r.first_device for r in beat.residents})
        elif what == "outcome" and (run := self._runs.get(message.outcome.run_id)):
            self._answered(run, message.outcome)
        elif what == "output" and (run := self._runs.get(message.output.run_id)):
            index = message.output.index
            if 0 <= index < len(run.calls) and (printed := run.calls[index].printed):
                printed(message.output.text)
        elif what == "end" and (run := self._runs.pop(message.end.run_id, None)):
            run.outcomes.put_nowait(None)

    def lose(self, why: str) -> None:
        """Give the host up: the call that runs fails with KIND_WORKER_DIED; the calls behind it
        have not begun."""
        if self._lost:
            return
        self._lost = why
        self._commands.put_nowait(None)
        if self._runs:
            log.warning("a host is lost with its calls", host=self.name, why=why, runs=self.running)
        for run in list(self._runs.values()):
            self._end_lost(run)

    def _answered(self, run: RemoteRun, outcome: reward_pb.HostOutcome) -> None:
        index = outcome.index
        if not 0 <= index < len(run.calls) or index in run.answered:
            log.warning("an outcome without a request", host=self.name, index=index)
            return
        run.answered.add(index)
        self.invocations += 1
        error = outcome.error if outcome.HasField("error") else None
        found = CallOutcome(
            outcome.result_json,
            outcome.seconds,
            error=error,
            cold_seconds=outcome.cold_start_seconds,
        )
        run.outcomes.put_nowait((index, found))

    def _end_lost(self, run: RemoteRun) -> None:
        self._runs.pop(run.run_id, None)
        if (current := run.current) is not None:
            error = reward_pb.InvocationError(
                kind=reward_pb.InvocationError.KIND_WORKER_DIED,
                message=f"the host {self.name} {self._lost}",
            )
            run.outcomes.put_nowait((current, CallOutcome(error=error)))
        run.outcomes.put_nowait(None)

    def _send(self, command: reward_pb.HostCommand) -> None:
        if not self._lost:
            self._commands.put_nowait(command)


class RemoteExecutor(CallExecutor):
    """An executor on another host. That host starts its processes and assigns them to runs, so that
    all its executors are alike and always count as warm."""

    def __init__(self, link: HostLink, index: int) -> None:
        super().__init__(f"{link.name}/{index}")
        self._link = link
        self._since = time.monotonic()
        self._run: RemoteRun | None = None

    @property
    def process_seconds(self) -> float:
        """Seconds for which the host has offered it."""
        return time.monotonic() - self._since

    def holds(self, function: RegisteredFunction) -> bool:
        """Return whether the function ran on that host since its last registration."""
        return self._link.functions.get(function.key) == function.registrations

    def cancel(self) -> None:
        if self._run is not None:
            self._link.cancel(self._run)

    async def run_many(
        self,
        function: RegisteredFunction,
        calls: Sequence[FunctionCall],
        lease: CoreLease | None = None,
    ) -> AsyncGenerator[tuple[int, CallOutcome]]:
        """Run `calls` there in order: index and outcome of each as it ends.

        Calls of a function that may not run twice are sent one by one, unless dropped by then.
        """
        cores = 0 if lease is None else len(lease.cores)
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
        self, function: RegisteredFunction, calls: Sequence[FunctionCall], cores: int
    ) -> AsyncGenerator[tuple[int, CallOutcome]]:
        run = self._run = self._link.begin(function, calls, cores)
        try:
            while (found := await run.outcomes.get()) is not None:
                yield found
                self._link.drop(run)
        finally:
            self._run = None
            self._link.forget(run)


class AttachedHosts:
    """The streams of all attached hosts, by host id."""

    def __init__(
        self,
        sources: SourceStore,
        attach: Callable[[HostLink], None],
        detach: Callable[[str], None],
        *,
        beat_seconds: float = 1.0,
    ) -> None:
        """`attach` is called for each host that takes calls from now on, `detach` with the id of
        one that takes no more."""
        self._sources = sources
        self._attach, self._detach = attach, detach
        self._beat_seconds = beat_seconds
        self._links: dict[str, HostLink] = {}

    async def serve(
        self, messages: AsyncIterator[reward_pb.HostMessage]
    ) -> AsyncGenerator[reward_pb.HostCommand]:
        """Yield the commands for one host, which sends `messages`, for as long as it is attached.

        Raises `InvalidArgument` for an offer that makes no sense, and `Unavailable` when the host
        falls silent.
        """
        link = HostLink(await self._offer(messages), self._sources)
        name = link.name
        if (former := self._links.get(name)) is not None:
            former.lose("attached anew")
            self._gone(former)
        self._links[name] = link
        log.info("a host is attached", host=name, workers=link.offer.workers)
        reader = asyncio.create_task(self._read(link, messages), name=f"host {name}")
        self._attach(link)
        try:
            yield reward_pb.HostCommand(
                welcome=reward_pb.HostWelcome(beat_seconds=self._beat_seconds)
            )
            patience = self._beat_seconds * _BEATS_MISSED
            async for command in link.commands(patience):
                yield command
            if time.monotonic() - link.last_message >= patience:
                raise Unavailable(f"host {name} was silent for {patience:g} s")
        finally:
            reader.cancel()
            self._gone(link)

    def list(self) -> list[reward_pb.HostStatus]:
        """Return the status of each host."""
        now = time.monotonic()
        return [
            reward_pb.HostStatus(
                offer=link.offer,
                running=link.running,
                invocations=link.invocations,
                draining=link.draining,
                residents=link.residents,
                seconds_since_heard=now - link.last_message,
            )
            for link in self._links.values()
        ]

    async def _read(self, link: HostLink, messages: AsyncIterator[reward_pb.HostMessage]) -> None:
        left = False
        try:
            async for message in messages:
                link.receive(message)
                if link.draining and not left:
                    left = True
                    self._detach(link.name)
        except grpc.RpcError as error:
            log.debug("a host's stream broke", host=link.name, error=str(error))
        finally:
            self._gone(link)

    def _gone(self, link: HostLink) -> None:
        link.lose("went away")
        if self._links.get(link.name) is link:
            del self._links[link.name]
            self._detach(link.name)
            log.info("a host is gone", host=link.name)

    async def _offer(self, messages: AsyncIterator[reward_pb.HostMessage]) -> reward_pb.HostOffer:
        try:
            async with asyncio.timeout(_OFFER_SECONDS):
                first = await anext(messages)
        except (TimeoutError, StopAsyncIteration) as error:
            raise InvalidArgument(
                "the first message of a host must be its offer",
                field="offer",
                remedy=f"Send HostMessage.offer within {_OFFER_SECONDS:g} s.",
            ) from error
        offer = first.offer
        if not _HOST_ID.fullmatch(offer.host_id):
            raise InvalidArgument(
                "is not an id",
                field="offer.host_id",
                value=offer.host_id,
                remedy="Letters and digits.",
            )
        if not 1 <= offer.workers <= _MOST_WORKERS:
            raise InvalidArgument(
                f"is not within 1 .. {_MOST_WORKERS}",
                field="offer.workers",
                value=offer.workers,
                remedy="Set TROUPE_REWARD_WORKERS of the host.",
            )
        for name in ("cores", "memory_mib", "gpus"):
            if getattr(offer, name) < 0:
                raise InvalidArgument(
                    "is negative", field=f"offer.{name}", value=getattr(offer, name)
                )
        return offer


class HostFleet:
    """The resources of the service's own host and of those that are attached."""

    def __init__(
        self,
        own: FunctionHost,
        dispatcher: Dispatcher,
        quotas: QuotaManager | None = None,
        *,
        expected_seconds: float = 120.0,
    ) -> None:
        """A host that left less than `expected_seconds` ago still counts: it may come back."""
        self._expected_seconds = expected_seconds
        self._started = time.monotonic()
        self._own, self._dispatcher, self._quotas = own, dispatcher, quotas
        self._resources: dict[str, tuple[int, int, HostResources]] = {}
        self._left: dict[str, float] = {}

    def attach(self, link: HostLink) -> None:
        """Let calls run on a host that has attached."""
        offer = link.offer
        resources = resources_of(offer, link)
        executors = [RemoteExecutor(link, index) for index in range(offer.workers)]
        cores = CoreCount(offer.cores) if offer.cores else None
        self._resources[link.name] = (offer.workers, offer.cores, resources)
        self._left.pop(link.name, None)
        self._dispatcher.attach(FunctionHost(link.name, executors, cores, resources=resources))

    def detach(self, name: str) -> None:
        """Begin no more calls on a host."""
        self._left[name] = time.monotonic()
        self._dispatcher.detach(name)

    def check(self, spec: reward_pb.FunctionSpec) -> None:
        """Raise `InvalidArgument` for a function whose calls no host could ever run, and
        `Unavailable` where a host that could may not have attached yet.

        Without any host every function is accepted: one that attaches later may be able to.
        """
        if spec.quota:
            if self._quotas is None:
                raise InvalidArgument(
                    "no quotas are declared here",
                    field="function.quota",
                    value=spec.quota,
                    remedy="Declare it in TROUPE_REWARD_QUOTAS of the reward service.",
                )
            self._quotas.check(spec.quota, spec.quota_units or 1)
        if spec.gpus and not spec.model_service:
            raise InvalidArgument(
                "only models get devices, and calls use the models",
                field="function.gpus",
                value=spec.gpus,
                remedy="Name the model that it calls as `model_service`, declared in "
                "TROUPE_REWARD_MODELS of a host.",
            )
        level = spec.sandbox or PROCESS
        if spec.model_service and level != PROCESS:
            raise InvalidArgument(
                "a sandbox has no network and cannot reach a model",
                field="function.model_service",
                value=spec.model_service,
                remedy="Call the model from a function of `sandbox: process`.",
            )
        least = spec.cores if spec.HasField("cores") else 1
        needs = {WORKERS: 1, CORES: least, **needs_of(spec, level)}
        needs = {r: amount for r, amount in needs.items() if not r.startswith(QUOTA)}
        hosts = self._capacities(needs)
        if spec.stateful or level not in OF_WORKERS:
            # Sandboxes that outlive a call are on the service's own host.
            if not self._own.workers:
                raise InvalidArgument(
                    "such sandboxes are on the service's own host, which does not run calls",
                    kind="no_host",
                    field="function.stateful" if spec.stateful else "function.sandbox",
                    value=spec.stateful or spec.sandbox,
                    remedy="Start the reward service with TROUPE_REWARD_WORKERS of one or more.",
                )
            hosts = {name: host for name, host in hosts.items() if name == self._own.name}
        missing = nowhere(Action("", 0.0, needs), hosts) if hosts else None
        if missing is None:
            return
        age = time.monotonic() - self._started
        if not self._own.workers and age < min(_COMING_SECONDS, self._expected_seconds):
            raise Unavailable(
                f"no host that is attached has {needs[missing]} of {missing}; this service started "
                f"{age:.0f} s ago, and others may come",
                kind=kinds.HOSTS_EXPECTED,
                retry_after_ms=1000,
            )
        most = max((host[missing] for host in hosts.values()), default=0)
        field, setting = _FIELDS.get(missing, ("", ""))
        if missing.startswith(MODEL):
            field, setting = "model_service", "TROUPE_REWARD_MODELS"
        elif missing.startswith(SANDBOX):
            field, setting = "sandbox", f"a host where {level} works"
        raise InvalidArgument(
            f"takes {needs[missing]} of {missing}, and of {len(hosts)} hosts none has more than "
            f"{most} with its other needs: no call could ever run",
            kind="no_host",
            field=f"function.{field}",
            value=getattr(spec, field, None),
            remedy=f"Declare less, or start a reward host with more ({setting}).",
        )

    def _capacities(self, needs: Amounts) -> dict[str, Amounts]:
        """Host -> its amounts of the resources of `needs`, free or not."""
        now = time.monotonic()
        for name, left in list(self._left.items()):
            if now - left >= self._expected_seconds:
                del self._left[name]
                # One that drained for so long is gone from here already when it leaves.
                self._resources.pop(name, None)
        own = self._own
        cores = own.total_cores
        every = {own.name: (own.workers, cores, own.resources)} if own.workers else {}
        found: dict[str, Amounts] = {}
        for name, (workers, handed, resources) in (every | self._resources).items():
            counted = {WORKERS: workers, CORES: handed or PLENTY}
            found[name] = {r: counted.get(r) or resources.capacity(r) for r in needs}
        return found


def resources_of(offer: reward_pb.HostOffer, link: HostLink | None = None) -> HostResources:
    """Return the resources that a host offers in addition to workers and cores."""
    amounts = {SANDBOX + level: PLENTY for level in offer.sandboxes}
    if offer.memory_mib:
        amounts[MEMORY] = offer.memory_mib
    placement = None
    if offer.models:
        models = [Model(m.name, m.gpus, concurrency=m.concurrency) for m in offer.models]
        placement = ModelPlacement(offer.gpus, models)
        if link is not None:
            link.placement = placement
    return HostResources(amounts, placement, plenty=() if offer.memory_mib else (MEMORY,))
