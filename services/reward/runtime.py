"""Every invocation gets one outcome, and those who watch it hear how it goes until then."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Final

import structlog

from services.chassis.idempotency import IdempotencyCache
from services.chassis.telemetry import Telemetry
from services.reward.call import CallOutcome, FunctionCall, WorkerPlace
from services.reward.dispatch import Dispatcher
from services.reward.function import REWARD, Lines, RegisteredFunction, Registry, expect, learn
from services.reward.host import FunctionHost
from services.reward.queues import CORES, Waiting, cost
from services.reward.quota import QuotaManager
from services.reward.sandboxes.keeper import Guests
from services.reward.settings import RewardSettings
from services.reward.slot import as_reward
from troupe.rpc import InvalidArgument, ResourceExhausted, TroupeError, Unavailable
from troupe.scheduling.elastic import Discipline
from troupe.v1 import reward_pb2 as pb

Watcher = Callable[[pb.InvocationEvent], None]


class InvocationListeners:
    """Tells everything but outcomes, which are for those who invoked."""

    def __init__(self) -> None:
        self._watchers: dict[str, list[Watcher]] = {}

    @contextmanager
    def watch(
        self, invocation_id: str, watcher: Watcher, waiting: Waiting | None
    ) -> Iterator[None]:
        """`watcher` is told what happens from now on, first how far `waiting` is, if it is."""
        self._watchers.setdefault(invocation_id, []).append(watcher)
        if waiting is not None:
            watcher(_started(waiting) if waiting.began else _queued(waiting))
        try:
            yield
        finally:
            self._watchers[invocation_id].remove(watcher)
            if not self._watchers[invocation_id]:
                del self._watchers[invocation_id]

    def queued(self, waiting: Waiting) -> None:
        """It waits."""
        self._tell(waiting, _queued)

    def begun(self, waiting: Waiting) -> None:
        """It runs."""
        self._tell(waiting, _started)

    def printed(self, waiting: Waiting, part: bytes) -> None:
        """Its function printed something."""
        if waiting.lines is None:
            waiting.lines = Lines(lambda line: self._line(waiting, line))
        waiting.lines.add(part)

    def ended(self, waiting: Waiting) -> None:
        """It runs no more, and may run again."""
        if waiting.lines is not None:
            waiting.lines.end()

    def log(self, waiting: Waiting, text: str) -> None:
        """A line for the logs of its function."""
        function, call = waiting.function, waiting.call
        function.logs.add(
            pb.LogLine(
                version=function.spec.version,
                job_id=call.job_id,
                trajectory_id=call.trajectory_id,
                invocation_id=waiting.invocation_id,
                text=text,
            )
        )

    def _line(self, waiting: Waiting, line: str) -> None:
        self.log(waiting, line)
        self._tell(waiting, lambda _: pb.InvocationEvent(output=line + "\n"))

    def _tell(self, waiting: Waiting, event: Callable[[Waiting], pb.InvocationEvent]) -> None:
        for watcher in self._watchers.get(waiting.invocation_id, ()):
            watcher(event(waiting))


def _queued(waiting: Waiting) -> pb.InvocationEvent:
    return pb.InvocationEvent(queued=pb.InvocationQueued(ahead=waiting.function.queued))


def _started(waiting: Waiting) -> pb.InvocationEvent:
    return pb.InvocationEvent(
        started=pb.InvocationStarted(
            attempt=waiting.attempts, cores=waiting.cores, host=waiting.host
        )
    )


class Metrics:
    """Histograms of invocations, gauges of the pool."""

    def __init__(self, telemetry: Telemetry) -> None:
        self._telemetry = telemetry
        self._run = telemetry.histogram(
            "troupe_reward_run_seconds", "Run time of an invocation.", ["function", "outcome"]
        )
        self._queue = telemetry.histogram(
            "troupe_reward_queue_seconds", "Wait of an invocation for a worker.", ["function"]
        )
        self._cold = telemetry.histogram(
            "troupe_reward_cold_start_seconds",
            "Start of a worker and import of the code, of calls that had to wait for it.",
            ["function"],
        )
        self._cores = telemetry.counter(
            "troupe_reward_core_seconds", "Cores times the seconds they were held.", ["function"]
        )
        self._retried = telemetry.counter(
            "troupe_reward_retried", "Invocations begun again after a worker died.", ["function"]
        )

    def watch(self, name: str, text: str, value: Callable[[], float]) -> None:
        """A gauge that is asked for when it is read."""
        self._telemetry.gauge(f"troupe_reward_{name}", text).set_function(value)

    def ended(self, function: RegisteredFunction, outcome: str, queued: float, ran: float) -> None:
        """An invocation has its outcome."""
        self._run.labels(function.label, outcome).observe(ran)
        self._queue.labels(function.label).observe(queued)

    def cold_start(self, function: RegisteredFunction, seconds: float) -> None:
        """A call had to wait for a worker to start, or to import the code."""
        self._cold.labels(function.label).observe(seconds)

    def held_cores(self, function: RegisteredFunction, cores: int, seconds: float) -> None:
        """Cores were handed out for so long."""
        if cores:
            self._cores.labels(function.label).inc(seconds * cores)

    def retried(self, function: RegisteredFunction) -> None:
        """An invocation is begun again."""
        self._retried.labels(function.label).inc()


class PoolCounts:
    """Counts, asked for when they are read."""

    def __init__(self, dispatcher: Dispatcher, metrics: Metrics) -> None:
        self._queues = dispatcher.queues
        self._hosts = dispatcher.hosts
        watch = metrics.watch
        watch("queued", "Invocations that wait for a worker.", lambda: len(self._queues))
        watch("running", "Workers that run invocations.", lambda: self.busy)
        watch("workers", "Worker processes.", lambda: self.workers)
        watch("cores_held", "Cores that calls hold.", lambda: self.cores_held)
        watch("worker_restarts", "Workers replaced so far.", lambda: self.restarts)

    @property
    def workers(self) -> int:
        """Processes that are there, or being started."""
        return sum(host.alive for host in self._hosts.values())

    @property
    def busy(self) -> int:
        """Calls that run at once now."""
        return sum(host.workers - host.free for host in self._hosts.values())

    @property
    def cores_held(self) -> int:
        """Cores that calls hold."""
        return sum(
            running.holds.get(CORES, 0)
            for host in self._hosts.values()
            for running in host.running.values()
        )

    @property
    def restarts(self) -> int:
        """Processes that had to be replaced so far."""
        return sum(host.restarts for host in self._hosts.values())

    def warm_for(self, function: RegisteredFunction) -> int:
        """Workers that have imported it and wait."""
        return sum(host.warm_for(function) for host in self._hosts.values())

    def status(self) -> pb.PoolStatus:
        """All of it as a message."""
        hosts = self._hosts.values()
        return pb.PoolStatus(
            workers=self.workers,
            busy=self.busy,
            max_workers=sum(host.workers for host in hosts),
            queued=len(self._queues),
            provisioned_seconds=sum(host.provisioned_seconds for host in hosts),
            busy_seconds=sum(host.busy_seconds for host in hosts),
        )


log = structlog.get_logger("troupe.reward")

Kind = pb.InvocationError

# After these a function that allows it is tried again: it may have been the worker's fault.
_WORTH_A_RETRY: Final = (Kind.KIND_WORKER_DIED, Kind.KIND_TIMEOUT)
# When to come again, at least and at most, with a queue that is full.
_SOON_MS: Final = 100
_LATE_MS: Final = 5000
# Before its caller gives up, one that waits for a quota is told why: so much earlier, at most this
# share of its time.
_EARLY_SECONDS: Final = 1.0
_EARLY_SHARE: Final = 0.1


class Runtime:
    """What was invoked and has no outcome yet."""

    def __init__(
        self,
        hosts: Iterable[FunctionHost],
        telemetry: Telemetry,
        *,
        max_queued: int = 10_000,
        quotas: QuotaManager | None = None,
        discipline: Discipline | None = None,
    ) -> None:
        self.dispatcher = Dispatcher(hosts, self, quotas)
        self._queues = self.dispatcher.queues
        self._max_queued = max_queued
        self.discipline = discipline or Discipline()
        self._open: dict[str, Waiting] = {}
        self._audience = InvocationListeners()
        self._arrivals = itertools.count()
        self._stopped = False
        self._metrics = Metrics(telemetry)
        self.pool = PoolCounts(self.dispatcher, self._metrics)

    async def start(self) -> None:
        """Start the workers that are to be there at any time."""
        await self.dispatcher.start()

    async def stop(self) -> None:
        """Kill the workers; what waited or ran ends with UNAVAILABLE."""
        self._stopped = True
        for waiting in list(self._open.values()):
            self._refuse(waiting, Unavailable("the reward service stops"))
        await self.dispatcher.stop()

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
        """Queue the call and wait for its outcome.

        Raises `ResourceExhausted` (with retry_after_ms) when a queue is full.
        """
        (waiting,) = self.submit([(invocation_id, call)], function, priority, weight, place)
        return await waiting

    def submit(
        self,
        calls: Sequence[tuple[str, FunctionCall]],
        function: RegisteredFunction,
        priority: int = 0,
        weight: float = 1.0,
        place: WorkerPlace | None = None,
    ) -> list[asyncio.Future[pb.InvokeResponse]]:
        """Queue `calls`, by invocation id, all of them or none; their outcomes to come.

        Raises `ResourceExhausted` (with retry_after_ms) when a queue is full.
        """
        if self._stopped:
            raise Unavailable("the reward service stops")
        self._admit(function, len(calls))
        loop, now = asyncio.get_running_loop(), time.perf_counter()
        found = []
        for invocation_id, call in calls:
            expect(function, call, self.discipline)
            waiting = Waiting(
                invocation_id=invocation_id,
                function=function,
                call=call,
                done=loop.create_future(),
                since=now,
                rank=(self._place(function, call, now), next(self._arrivals)),
                priority=priority,
                weight=weight,
                place=place,
            )
            call.printed = partial(self._audience.printed, waiting)
            self._open[invocation_id] = waiting
            self._audience.queued(waiting)
            if call.seconds is not None and function.spec.quota:
                early = min(_EARLY_SECONDS, _EARLY_SHARE * call.seconds)
                timer = loop.call_later(call.seconds - early, self._expire, waiting)
                waiting.done.add_done_callback(partial(_cancel, timer))
            self._queues.add(waiting)
            found.append(waiting.done)
        self.dispatcher.pump()
        return found

    def _place(self, function: RegisteredFunction, call: FunctionCall, now: float) -> float:
        """Where it stands among those of its job."""
        work, waiters = cost(function, call), max(1, call.waiters)
        last, job = function.spec.kind == REWARD, call.job_id
        return self.discipline.place(
            now, job, call.trajectory_id, work, waiters, last=last, query=call.kin.query
        )

    def watch(self, invocation_id: str, watcher: Watcher) -> AbstractContextManager[None]:
        """`watcher` is told of everything but the outcome, also of what has yet to be invoked."""
        return self._audience.watch(invocation_id, watcher, self._open.get(invocation_id))

    def cancel(self, invocation_id: str) -> bool:
        """End the invocation with KIND_CANCELLED; False when it has ended or is unknown."""
        waiting = self._open.get(invocation_id)
        if waiting is None:
            return False
        work = waiting.chunk
        if work is not None and work.current is waiting:
            work.cancel()
            return True
        self._take_out(waiting)
        error = pb.InvocationError(kind=Kind.KIND_CANCELLED, message="cancelled before it ran")
        self._finish(waiting, CallOutcome(error=error))
        return True

    def abandon(self, invocation_id: str) -> None:
        """Nobody waits for it any more: drop it unless it runs already."""
        waiting = self._open.get(invocation_id)
        if waiting is not None and not waiting.began:
            self._refuse(waiting, Unavailable("its callers left before it ran"))

    def _expire(self, waiting: Waiting) -> None:
        """Its caller's time is nearly up: say what it waits for, if that is a quota."""
        short = "" if waiting.began else self.dispatcher.short_of(waiting.function)
        if self._open.get(waiting.invocation_id) is not waiting or not short:
            return
        self._take_out(waiting)
        seconds = time.perf_counter() - waiting.since
        error = pb.InvocationError(
            kind=Kind.KIND_QUOTA_EXHAUSTED, message=f"it waited for {seconds:.1f} s: {short}"
        )
        self._finish(waiting, CallOutcome(error=error))

    def forget(self, function: RegisteredFunction) -> None:
        """The function is deleted: nothing more of it runs."""
        for invocation_id, waiting in list(self._open.items()):
            if waiting.function is function:
                self.cancel(invocation_id)
        function.logs.close()

    # What the dispatcher tells.

    def begun(self, waiting: Waiting) -> None:
        """It runs now."""
        self._audience.begun(waiting)

    def ended(self, waiting: Waiting, outcome: CallOutcome) -> None:
        """It ran; it may run again."""
        function = waiting.function
        if outcome.cold_seconds:
            waiting.cold_seconds += outcome.cold_seconds
            function.started_cold(outcome.cold_seconds)
            self._metrics.cold_start(function, outcome.cold_seconds)
        self._audience.ended(waiting)
        error = outcome.error
        if error is not None and error.retry_after_seconds and function.spec.quota:
            self.dispatcher.refused(function, error.retry_after_seconds)
            if function.repeatable and not self._stopped:
                # It was not done, and will be when the interface takes calls again.
                self.dispatcher.again([waiting])
                return
            error.kind = Kind.KIND_QUOTA_EXHAUSTED
        retry = error is not None and error.kind in _WORTH_A_RETRY
        if retry and waiting.attempts <= function.spec.retries and not self._stopped:
            function.retried += 1
            self._metrics.retried(function)
            self.dispatcher.again([waiting])
        else:
            self._finish(waiting, outcome)

    def held(self, function: RegisteredFunction, cores: int, seconds: float) -> None:
        """Calls of `function` had a place and that many cores for so long."""
        self._metrics.held_cores(function, cores, seconds)

    def _admit(self, function: RegisteredFunction, calls: int) -> None:
        limit = function.spec.max_queued
        if len(self._open) + calls > self._max_queued:
            raise ResourceExhausted(
                f"{len(self._open)} invocations wait already",
                field="TROUPE_REWARD_MAX_QUEUED",
                value=self._max_queued,
                retry_after_ms=self._when_to_come(self._queues.seconds(0.0)),
            )
        if limit and function.queued + calls > limit:
            raise ResourceExhausted(
                f"{function.queued} invocations of {function.spec.name} wait already",
                field="function.max_queued",
                value=limit,
                retry_after_ms=self._when_to_come(function.queued * function.seconds),
            )

    def _when_to_come(self, backlog_seconds: float) -> int:
        """In how many milliseconds half of what waits should be done."""
        workers = max(1, sum(host.workers for host in self.dispatcher.hosts.values()))
        return min(_LATE_MS, max(_SOON_MS, int(1000 * backlog_seconds / workers / 2)))

    def _finish(self, waiting: Waiting, outcome: CallOutcome) -> None:
        self._open.pop(waiting.invocation_id, None)
        function, now = waiting.function, time.perf_counter()
        if function.spec.kind == REWARD:
            outcome = as_reward(outcome)
        ran = now - waiting.began if waiting.began else 0.0
        queued = now - waiting.since - ran
        function.invocations += 1
        function.run_seconds += ran
        response = pb.InvokeResponse(
            queue_seconds=queued,
            run_seconds=ran,
            cores=waiting.cores,
            attempts=waiting.attempts,
            cold_start_seconds=waiting.cold_seconds,
            host=waiting.host,
            sandbox=outcome.sandbox,
        )
        label = "ok"
        if outcome.error is None:
            response.result_json = outcome.result_json
        else:
            function.errors += 1
            response.error.CopyFrom(outcome.error)
            kind = pb.InvocationError.Kind.Name(outcome.error.kind)
            label = kind.removeprefix("KIND_").lower()
            self._audience.log(waiting, f"{label}: {outcome.error.message}")
        self._metrics.ended(function, label, queued, ran)
        if not waiting.done.done():
            waiting.done.set_result(response)
        if outcome.error is None:
            self._learn(waiting, outcome.seconds)

    def _learn(self, waiting: Waiting, seconds: float) -> None:
        """What it took is for the next to know; its own caller loses nothing where that fails."""
        function, call, cores = waiting.function, waiting.call, max(1, waiting.cores)
        try:
            function.curve = learn(function, call, seconds, cores, self.discipline)
            self.discipline.ran(
                call.job_id,
                call.trajectory_id,
                seconds * cores,
                last=function.spec.kind == REWARD,
                function=function.key,
            )
        except Exception:
            log.exception("learning", function=function.key, seconds=seconds)

    def _refuse(self, waiting: Waiting, error: TroupeError) -> None:
        self._open.pop(waiting.invocation_id, None)
        if not waiting.began:
            self._take_out(waiting)
        if not waiting.done.done():
            waiting.done.set_exception(error)
            # It is no fault that nobody waits.
            waiting.done.exception()

    def _take_out(self, waiting: Waiting) -> None:
        """Out of its queue, or from behind what a worker runs."""
        if waiting.chunk is None:
            self._queues.remove(waiting)
        else:
            waiting.chunk.leave(waiting)
            waiting.chunk = None


def _cancel(timer: asyncio.TimerHandle, _: object) -> None:
    timer.cancel()


# Outcomes remembered at once; rewards are small, so the bytes are not what bounds them.
_RESULTS: Final = 100_000


class Invocations:
    """What was invoked, and what became of it."""

    def __init__(
        self, registry: Registry, runtime: Runtime, guests: Guests, settings: RewardSettings
    ) -> None:
        self._registry = registry
        self._runtime = runtime
        self._guests = guests
        self._most = settings.reward_max_queued
        self._once = IdempotencyCache(
            settings.reward_result_seconds,
            _RESULTS,
            settings.reward_result_mib << 20,
            field="invocation_id",
        )

    async def invoke(self, request: pb.InvokeRequest, seconds: float | None) -> pb.InvokeResponse:
        """The outcome of one call; its caller waits for `seconds`, if it has a deadline.

        Raises `NotFound` for the function, `InvalidArgument`, `ResourceExhausted`.
        """
        function = self._registry.find(request.name, request.version)
        _check_ids([request.invocation_id])
        weight = _weight(request.weight)
        call = FunctionCall(
            request.arguments_json,
            request.job_id,
            request.trajectory_id,
            request.query_id,
            sandboxes=request.sandboxes,
            waiters=request.waiters,
            seconds=seconds,
            expected_seconds=_expected(request.expected_seconds),
        )
        response = await self._run_once(
            function,
            request,
            lambda: self._begin(function, request.invocation_id, call, request.priority, weight),
        )
        if response.error.kind == pb.InvocationError.KIND_BAD_ARGUMENTS:
            raise InvalidArgument(response.error.message, field="arguments_json")
        return response

    async def batch(
        self, request: pb.InvokeBatchRequest, seconds: float | None
    ) -> list[pb.InvokeResponse]:
        """The outcomes of many calls of a function, in their order; all are queued, or none.

        Raises as `invoke` does.
        """
        function = self._registry.find(request.name, request.version)
        _check_ids(call.invocation_id for call in request.calls)
        weight = _weight(request.weight)
        most = min(self._most, function.spec.max_queued or self._most)
        if len(request.calls) > most:
            raise InvalidArgument(
                f"more calls than may ever wait ({most:,})",
                field="calls",
                value=len(request.calls),
                remedy="Send them in several batches.",
            )
        calls = {
            call.invocation_id: FunctionCall(
                call.arguments_json,
                request.job_id,
                call.trajectory_id,
                call.query_id,
                waiters=call.waiters,
                seconds=seconds,
                expected_seconds=_expected(call.expected_seconds),
            )
            for call in request.calls
        }
        begun: dict[str, Awaitable[pb.InvokeResponse]] = {}
        if not function.own_place:
            fresh = [(name, call) for name, call in calls.items() if name not in self._once]
            outcomes = self._runtime.submit(fresh, function, request.priority, weight)
            begun = {name: outcome for (name, _), outcome in zip(fresh, outcomes, strict=True)}

        def begin(name: str) -> Awaitable[pb.InvokeResponse]:
            return begun.get(name) or self._begin(
                function, name, calls[name], request.priority, weight
            )

        return await asyncio.gather(
            *(
                self._run_once(function, call, partial(begin, call.invocation_id))
                for call in request.calls
            )
        )

    def cancel(self, invocation_id: str) -> bool:
        """End one that waits or runs; False when it has ended or is unknown."""
        return self._guests.cancel(invocation_id) or self._runtime.cancel(invocation_id)

    async def close(self) -> None:
        """Nobody waits for anything any more."""
        await self._once.close()

    def _begin(
        self,
        function: RegisteredFunction,
        invocation_id: str,
        call: FunctionCall,
        priority: int,
        weight: float,
    ) -> Awaitable[pb.InvokeResponse]:
        run = self._guests.invoke if function.own_place else self._runtime.invoke
        return run(invocation_id, function, call, priority=priority, weight=weight)

    def _run_once(
        self,
        function: RegisteredFunction,
        call: pb.InvokeRequest | pb.BatchCall,
        begin: Callable[[], Awaitable[pb.InvokeResponse]],
    ) -> Awaitable[pb.InvokeResponse]:
        # What makes it the same call: when, how urgent and in which message may differ.
        same = "\0".join((function.key, call.arguments_json, call.trajectory_id))
        return self._once.run(
            call.invocation_id,
            same.encode(),
            begin,
            abandoned=lambda: self._abandon(call.invocation_id),
        )

    def _abandon(self, invocation_id: str) -> None:
        if not self._guests.cancel(invocation_id):
            self._runtime.abandon(invocation_id)


def _check_ids(ids: Iterable[str]) -> None:
    seen: set[str] = set()
    for invocation_id in ids:
        if not invocation_id or invocation_id in seen:
            raise InvalidArgument(
                "is there twice" if invocation_id else "is empty",
                field="invocation_id",
                value=invocation_id,
                remedy="Make an id for each invocation, so that a repeated call runs once.",
            )
        seen.add(invocation_id)


def _weight(weight: float) -> float:
    if not 0 <= weight < float("inf"):
        raise InvalidArgument(
            "is not a positive number",
            field="weight",
            value=weight,
            remedy="Say how large the job's share is beside others; 0 is one.",
        )
    return weight or 1.0


def _expected(seconds: float) -> float:
    if not 0 <= seconds < float("inf"):
        raise InvalidArgument(
            "is not a number of seconds",
            field="expected_seconds",
            value=seconds,
            remedy="Say how long the call takes with the fewest cores; 0 where nobody knows.",
        )
    return seconds
