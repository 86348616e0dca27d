"""Invocations from acceptance to outcome: each id runs once, and listeners learn of its
progress."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, AsyncExitStack, contextmanager
from functools import partial
from typing import Final

import structlog

from services.chassis.idempotency import IdempotencyCache
from services.chassis.telemetry import Telemetry
from services.reward.call import CallDeadline, CallOutcome, FunctionCall, as_reward
from services.reward.dispatch.dispatcher import Dispatcher
from services.reward.dispatch.invocation import PendingInvocation, cost
from services.reward.executor import CallExecutor
from services.reward.function import (
    REWARD,
    FunctionRegistry,
    LineSplitter,
    RegisteredFunction,
    expect,
    learn,
)
from services.reward.host import FunctionHost
from services.reward.quota import QuotaManager
from services.reward.resources import CORES
from services.reward.sandboxes.manager import SandboxExecutor, SandboxGone, SandboxManager
from services.reward.settings import RewardSettings
from troupe.functions.validation import MAX_SECONDS, is_seconds
from troupe.rpc import InvalidArgument, ResourceExhausted, TroupeError, Unavailable
from troupe.scheduling.elastic import Discipline
from troupe.v1 import reward_pb2 as reward_pb

log = structlog.get_logger("troupe.reward")

Kind = reward_pb.InvocationError
Listener = Callable[[reward_pb.InvocationEvent], None]

# After these errors a function with `retries` runs again: the worker may have been at fault.
_RETRIED: Final = (Kind.KIND_WORKER_DIED, Kind.KIND_TIMEOUT)
# The least and the largest `retry_after_ms` where a queue is full.
_MIN_RETRY_MS: Final = 100
_MAX_RETRY_MS: Final = 5000
# Outcomes remembered at once. Rewards are small, so bytes alone would not bound them.
_RESULTS: Final = 100_000
# Of a job's share; the shares of two jobs may differ by its square.
_MAX_WEIGHT: Final = 1e6
_CANCELLED: Final = "cancelled before it ran"


class Invocations:
    """The invocations by id: each id runs once, however often it is requested, and its outcome is
    remembered.

    Calls of functions with their own sandboxes first wait for a sandbox, without holding a worker;
    then they are queued like the others.
    """

    def __init__(
        self,
        registry: FunctionRegistry,
        runtime: Runtime,
        sandboxes: SandboxManager,
        settings: RewardSettings,
    ) -> None:
        self._registry = registry
        self._runtime = runtime
        self._sandboxes = sandboxes
        self._max_queued = settings.reward_max_queued
        self._once = IdempotencyCache(
            settings.reward_result_seconds,
            _RESULTS,
            settings.reward_result_mib << 20,
            field="invocation_id",
        )
        # By invocation id: calls that wait for their sandbox, and the cancelled ones among them.
        self._opening: dict[str, asyncio.Task[SandboxExecutor]] = {}
        self._cancelled: set[str] = set()

    async def invoke(
        self, request: reward_pb.InvokeRequest, seconds: float | None
    ) -> reward_pb.InvokeResponse:
        """Return the outcome of one call, whose caller waits for `seconds` (None: without a
        deadline).

        Raises `NotFound` for the function, `InvalidArgument`, `ResourceExhausted`.
        """
        function = self._registry.find(request.name, request.version)
        _check_ids([request.invocation_id])
        call = FunctionCall(
            request.arguments_json,
            request.job_id,
            request.trajectory_id,
            request.query_id,
            sandboxes=request.sandboxes,
            waiters=request.waiters,
            priority=request.priority,
            weight=_weight(request.weight),
            deadline=CallDeadline(function.spec.timeout_seconds, seconds),
            expected_seconds=_expected(request.expected_seconds),
        )
        begin = partial(self._begin, function, request.invocation_id, call)
        response = await self._run_once(function, request, begin)
        if response.error.kind == Kind.KIND_BAD_ARGUMENTS:
            raise InvalidArgument(response.error.message, field="arguments_json")
        return response

    async def batch(
        self, request: reward_pb.InvokeBatchRequest, seconds: float | None
    ) -> list[reward_pb.InvokeResponse]:
        """Return the outcomes of several calls of a function, in order; all are queued, or none.

        Raises like `invoke`.
        """
        function = self._registry.find(request.name, request.version)
        _check_ids(call.invocation_id for call in request.calls)
        weight = _weight(request.weight)
        most = min(self._max_queued, function.spec.max_queued or self._max_queued)
        if len(request.calls) > most:
            raise InvalidArgument(
                f"more calls than may ever wait ({most:,})",
                field="calls",
                value=len(request.calls),
                remedy="Send them in several batches.",
            )
        deadline = CallDeadline(function.spec.timeout_seconds, seconds)
        calls = {
            call.invocation_id: FunctionCall(
                call.arguments_json,
                request.job_id,
                call.trajectory_id,
                call.query_id,
                waiters=call.waiters,
                priority=request.priority,
                weight=weight,
                deadline=deadline,
                expected_seconds=_expected(call.expected_seconds),
            )
            for call in request.calls
        }
        begun: dict[str, Awaitable[reward_pb.InvokeResponse]] = {}
        if not function.own_sandbox:
            fresh = [(name, call) for name, call in calls.items() if name not in self._once]
            outcomes = self._runtime.submit(fresh, function)
            begun = {name: outcome for (name, _), outcome in zip(fresh, outcomes, strict=True)}

        def begin(name: str) -> Awaitable[reward_pb.InvokeResponse]:
            return begun.get(name) or self._begin(function, name, calls[name])

        return await asyncio.gather(
            *(
                self._run_once(function, call, partial(begin, call.invocation_id))
                for call in request.calls
            )
        )

    def cancel(self, invocation_id: str) -> bool:
        """End an invocation that waits or runs; False when it has ended or is unknown."""
        return self._cancel_opening(invocation_id) or self._runtime.cancel(invocation_id)

    async def close(self) -> None:
        """Cancel all that has no outcome yet."""
        await self._once.close()

    def _run_once(
        self,
        function: RegisteredFunction,
        call: reward_pb.InvokeRequest | reward_pb.BatchCall,
        begin: Callable[[], Awaitable[reward_pb.InvokeResponse]],
    ) -> Awaitable[reward_pb.InvokeResponse]:
        # The same id must mean the same call; time, priority and message may differ.
        same = "\0".join((function.key, call.arguments_json, call.trajectory_id))
        return self._once.run(
            call.invocation_id,
            same.encode(),
            begin,
            abandoned=lambda: self._abandon(call.invocation_id),
        )

    def _begin(
        self, function: RegisteredFunction, invocation_id: str, call: FunctionCall
    ) -> Awaitable[reward_pb.InvokeResponse]:
        if function.own_sandbox:
            return self._invoke_in_sandbox(function, invocation_id, call)
        (done,) = self._runtime.submit([(invocation_id, call)], function)
        return done

    async def _invoke_in_sandbox(
        self, function: RegisteredFunction, invocation_id: str, call: FunctionCall
    ) -> reward_pb.InvokeResponse:
        """Submit the call to its sandbox. Raises like `SandboxManager.executor` and
        `Runtime.submit`, except SandboxGone, which is an outcome."""
        async with AsyncExitStack() as stack:
            entering = stack.enter_async_context(self._sandboxes.executor(function, call))
            opening = self._opening[invocation_id] = asyncio.create_task(entering)
            try:
                executor = await opening
            except SandboxGone as gone:
                return reward_pb.InvokeResponse(error=gone.error(), sandbox=gone.sandbox_id)
            except asyncio.CancelledError:
                if invocation_id not in self._cancelled:
                    raise
                error = reward_pb.InvocationError(kind=Kind.KIND_CANCELLED, message=_CANCELLED)
                return reward_pb.InvokeResponse(error=error)
            finally:
                del self._opening[invocation_id]
                self._cancelled.discard(invocation_id)
            (done,) = self._runtime.submit([(invocation_id, call)], function, executor)
            return await done

    def _cancel_opening(self, invocation_id: str) -> bool:
        opening = self._opening.get(invocation_id)
        if opening is None or opening.done():
            return False
        self._cancelled.add(invocation_id)
        return opening.cancel()

    def _abandon(self, invocation_id: str) -> None:
        if not self._cancel_opening(invocation_id):
            self._runtime.abandon(invocation_id)


def _check_ids(ids: Iterable[str]) -> None:
    seen: set[str] = set()
    for invocation_id in ids:
        if not invocation_id or invocation_id in seen:
            raise InvalidArgument(
                "occurs twice" if invocation_id else "is empty",
                field="invocation_id",
                value=invocation_id,
                remedy="Make an id for each invocation, so that a repeated call runs once.",
            )
        seen.add(invocation_id)


def _weight(weight: float) -> float:
    if weight and not 1 / _MAX_WEIGHT <= weight <= _MAX_WEIGHT:
        raise InvalidArgument(
            f"is not a number from {1 / _MAX_WEIGHT:g} to {_MAX_WEIGHT:g}",
            field="weight",
            value=weight,
            remedy="Give the job's share relative to other jobs; 0 means 1.",
        )
    return weight or 1.0


def _expected(seconds: float) -> float:
    if not is_seconds(seconds):
        raise InvalidArgument(
            f"is not a number of seconds from 0 to {MAX_SECONDS:,}",
            field="expected_seconds",
            value=seconds,
            remedy="Give the duration of the call with the fewest cores; 0 if unknown.",
        )
    return seconds


class Runtime:
    """All invocations without an outcome, from queueing through retries to their end."""

    def __init__(
        self,
        hosts: Iterable[FunctionHost],
        telemetry: Telemetry,
        *,
        max_queued: int = 10_000,
        quotas: QuotaManager | None = None,
        discipline: Discipline | None = None,
    ) -> None:
        self.dispatcher = Dispatcher(
            hosts,
            quotas,
            began=self.attempt_began,
            ended=self.attempt_ended,
            held_cores=self.held_cores,
        )
        self._queues = self.dispatcher.queues
        self._max_queued = max_queued
        self.discipline = discipline or Discipline()
        self._open: dict[str, PendingInvocation] = {}
        self._listeners = InvocationListeners()
        self._arrivals = itertools.count()
        self._stopped = False
        self._metrics = Metrics(telemetry)
        self.pool = PoolCounts(self.dispatcher, telemetry)

    async def stop(self) -> None:
        """Kill the workers. Queued and running calls end with UNAVAILABLE."""
        self._stopped = True
        for invocation in list(self._open.values()):
            self._refuse(invocation, Unavailable("the reward service stops"))
        await self.dispatcher.stop()

    def submit(
        self,
        calls: Sequence[tuple[str, FunctionCall]],
        function: RegisteredFunction,
        sandbox_executor: CallExecutor | None = None,
    ) -> list[asyncio.Future[reward_pb.InvokeResponse]]:
        """Queue `calls` with their invocation ids, all of them or none; a future for each outcome.

        Raises `ResourceExhausted` (with retry_after_ms) when a queue is full.
        """
        if self._stopped:
            raise Unavailable("the reward service stops")
        self._admit(function, len(calls))
        loop, now = asyncio.get_running_loop(), time.perf_counter()
        found = []
        for invocation_id, call in calls:
            expect(function, call, self.discipline)
            invocation = PendingInvocation(
                invocation_id=invocation_id,
                function=function,
                call=call,
                done=loop.create_future(),
                since=now,
                rank=(self._rank(function, call, now), next(self._arrivals)),
                sandbox_executor=sandbox_executor,
            )
            call.printed = partial(self._listeners.printed, invocation)
            self._open[invocation_id] = invocation
            self._listeners.notify(invocation, _queued)
            notice = call.deadline.notice_seconds
            if notice is not None and function.spec.quota:
                timer = loop.call_later(notice, self._fail_for_quota, invocation)
                invocation.done.add_done_callback(partial(_cancel_timer, timer))
            self._queues.add(invocation)
            found.append(invocation.done)
        self.dispatcher.dispatch()
        return found

    def _rank(self, function: RegisteredFunction, call: FunctionCall, now: float) -> float:
        """Return the call's rank within its job; the lowest runs first."""
        work, waiters = cost(function, call), max(1, call.waiters)
        last, job = function.spec.kind == REWARD, call.job_id
        return self.discipline.place(
            now, job, call.trajectory_id, work, waiters, last=last, query=call.kin.query
        )

    def watch(self, invocation_id: str, listener: Listener) -> AbstractContextManager[None]:
        """Tell `listener` about everything but the outcome, including a future invocation."""
        return self._listeners.watch(invocation_id, listener, self._open.get(invocation_id))

    def cancel(self, invocation_id: str) -> bool:
        """End the invocation with KIND_CANCELLED; False when it has ended or is unknown."""
        invocation = self._open.get(invocation_id)
        if invocation is None:
            return False
        chunk = invocation.chunk
        if chunk is not None and chunk.current is invocation:
            chunk.cancel()
            return True
        self._take_out(invocation)
        self._finish(invocation, CallOutcome.failed(Kind.KIND_CANCELLED, _CANCELLED))
        return True

    def abandon(self, invocation_id: str) -> None:
        """Drop an invocation whose last caller has left, unless it already runs."""
        invocation = self._open.get(invocation_id)
        if invocation is not None and not invocation.began:
            self._refuse(invocation, Unavailable("its callers left before it ran"))

    def _fail_for_quota(self, invocation: PendingInvocation) -> None:
        """Fail an invocation that still waits for a quota shortly before its caller gives up."""
        short = "" if invocation.began else self.dispatcher.missing_quota(invocation.function)
        if self._open.get(invocation.invocation_id) is not invocation or not short:
            return
        self._take_out(invocation)
        seconds = time.perf_counter() - invocation.since
        message = f"it waited for {seconds:.1f} s: {short}"
        self._finish(invocation, CallOutcome.failed(Kind.KIND_QUOTA_EXHAUSTED, message))

    def forget(self, function: RegisteredFunction) -> None:
        """Cancel all invocations of a deleted function."""
        for invocation_id, invocation in list(self._open.items()):
            if invocation.function is function:
                self.cancel(invocation_id)
        function.logs.close()

    # The dispatcher's callbacks.

    def attempt_began(self, invocation: PendingInvocation) -> None:
        """Note that the invocation runs now."""
        self._listeners.notify(invocation, _started)

    def attempt_ended(self, invocation: PendingInvocation, outcome: CallOutcome) -> None:
        """End an attempt: finish the invocation, or queue it for another attempt."""
        function = invocation.function
        if outcome.cold_seconds:
            invocation.cold_seconds += outcome.cold_seconds
            function.started_cold(outcome.cold_seconds)
            self._metrics.cold.labels(function.label).observe(outcome.cold_seconds)
        self._listeners.ended(invocation)
        error = outcome.error
        if error is not None and error.retry_after_seconds and function.spec.quota:
            self.dispatcher.refused(function, error.retry_after_seconds)
            if function.repeatable and not self._stopped:
                # The interface did nothing; try again when it takes calls.
                self.dispatcher.requeue([invocation])
                return
            error.kind = Kind.KIND_QUOTA_EXHAUSTED
        retry = error is not None and error.kind in _RETRIED
        if retry and invocation.attempts <= function.spec.retries and not self._stopped:
            function.retried += 1
            self._metrics.retried.labels(function.label).inc()
            self.dispatcher.requeue([invocation])
        else:
            self._finish(invocation, outcome)

    def held_cores(self, function: RegisteredFunction, cores: int, seconds: float) -> None:
        """Calls of `function` had so many cores for so long."""
        self._metrics.cores.labels(function.label).inc(seconds * cores)

    def _admit(self, function: RegisteredFunction, calls: int) -> None:
        limit = function.spec.max_queued
        if len(self._open) + calls > self._max_queued:
            raise ResourceExhausted(
                f"{len(self._open)} invocations are already waiting",
                field="TROUPE_REWARD_MAX_QUEUED",
                value=self._max_queued,
                retry_after_ms=self._retry_after_ms(self._queues.seconds(0.0)),
            )
        if limit and function.queued + calls > limit:
            raise ResourceExhausted(
                f"{function.queued} invocations of {function.spec.name} are already waiting",
                field="function.max_queued",
                value=limit,
                retry_after_ms=self._retry_after_ms(function.queued * function.seconds),
            )

    def _retry_after_ms(self, backlog_seconds: float) -> int:
        """Return the milliseconds after which half of the queue should be done."""
        workers = max(1, sum(host.workers for host in self.dispatcher.hosts.values()))
        return min(_MAX_RETRY_MS, max(_MIN_RETRY_MS, int(1000 * backlog_seconds / workers / 2)))

    def _finish(self, invocation: PendingInvocation, outcome: CallOutcome) -> None:
        self._open.pop(invocation.invocation_id, None)
        function, now = invocation.function, time.perf_counter()
        if function.spec.kind == REWARD:
            outcome = as_reward(outcome)
        ran = now - invocation.began if invocation.began else 0.0
        queued = now - invocation.since - ran
        function.invocations += 1
        function.run_seconds += ran
        response = reward_pb.InvokeResponse(
            queue_seconds=queued,
            run_seconds=ran,
            cores=invocation.cores,
            attempts=invocation.attempts,
            cold_start_seconds=invocation.cold_seconds,
            host=invocation.host,
            sandbox=outcome.sandbox,
        )
        label = "ok"
        if outcome.error is None:
            response.result_json = outcome.result_json
        else:
            function.errors += 1
            response.error.CopyFrom(outcome.error)
            kind = reward_pb.InvocationError.Kind.Name(outcome.error.kind)
            label = kind.removeprefix("KIND_").lower()
            self._listeners.log(invocation, f"{label}: {outcome.error.message}")
        self._metrics.run.labels(function.label, label).observe(ran)
        self._metrics.queue.labels(function.label).observe(queued)
        if not invocation.done.done():
            invocation.done.set_result(response)
        if outcome.error is None:
            self._learn(invocation, outcome.seconds)

    def _learn(self, invocation: PendingInvocation, seconds: float) -> None:
        """Use the run time for estimates of later calls. A failure here does not cost the
        outcome."""
        function, call, cores = invocation.function, invocation.call, max(1, invocation.cores)
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

    def _refuse(self, invocation: PendingInvocation, error: TroupeError) -> None:
        self._open.pop(invocation.invocation_id, None)
        if not invocation.began:
            self._take_out(invocation)
        if not invocation.done.done():
            invocation.done.set_exception(error)
            # Reading it marks the exception as seen, since there may be no caller left.
            invocation.done.exception()

    def _take_out(self, invocation: PendingInvocation) -> None:
        """Remove it from its queue, or from the chunk of a worker."""
        if invocation.chunk is None:
            self._queues.remove(invocation)
        else:
            invocation.chunk.leave(invocation)
            invocation.chunk = None


def _cancel_timer(timer: asyncio.TimerHandle, _: object) -> None:
    timer.cancel()


class InvocationListeners:
    """Listeners to an invocation's events other than the outcome, and its logs."""

    def __init__(self) -> None:
        self._listeners: dict[str, list[Listener]] = {}

    @contextmanager
    def watch(
        self, invocation_id: str, listener: Listener, invocation: PendingInvocation | None
    ) -> Iterator[None]:
        """Tell `listener` about all events from now on, first the state of an open `invocation`."""
        self._listeners.setdefault(invocation_id, []).append(listener)
        if invocation is not None:
            listener(_started(invocation) if invocation.began else _queued(invocation))
        try:
            yield
        finally:
            self._listeners[invocation_id].remove(listener)
            if not self._listeners[invocation_id]:
                del self._listeners[invocation_id]

    def notify(
        self,
        invocation: PendingInvocation,
        event: Callable[[PendingInvocation], reward_pb.InvocationEvent],
    ) -> None:
        """Tell the invocation's listeners about `event`."""
        for listener in self._listeners.get(invocation.invocation_id, ()):
            listener(event(invocation))

    def printed(self, invocation: PendingInvocation, part: bytes) -> None:
        """Handle the printed `part` of the function's output."""
        if invocation.lines is None:
            invocation.lines = LineSplitter(lambda line: self._line(invocation, line))
        invocation.lines.add(part)

    def ended(self, invocation: PendingInvocation) -> None:
        """End an attempt: its last output counts as a line."""
        if invocation.lines is not None:
            invocation.lines.end()

    def log(self, invocation: PendingInvocation, text: str) -> None:
        """Add a line to the logs of the function."""
        function, call = invocation.function, invocation.call
        function.logs.add(
            reward_pb.LogLine(
                version=function.spec.version,
                job_id=call.job_id,
                trajectory_id=call.trajectory_id,
                invocation_id=invocation.invocation_id,
                text=text,
            )
        )

    def _line(self, invocation: PendingInvocation, line: str) -> None:
        self.log(invocation, line)
        self.notify(invocation, lambda _: reward_pb.InvocationEvent(output=line + "\n"))


def _queued(invocation: PendingInvocation) -> reward_pb.InvocationEvent:
    return reward_pb.InvocationEvent(
        queued=reward_pb.InvocationQueued(ahead=invocation.function.queued)
    )


def _started(invocation: PendingInvocation) -> reward_pb.InvocationEvent:
    return reward_pb.InvocationEvent(
        started=reward_pb.InvocationStarted(
            attempt=invocation.attempts, cores=invocation.cores, host=invocation.host
        )
    )


class Metrics:
    """Prometheus histograms and counters of invocations, by function; `run` also by outcome: "ok",
    or the kind of the error."""

    def __init__(self, telemetry: Telemetry) -> None:
        self.run = telemetry.histogram(
            "troupe_reward_run_seconds", "Run time of an invocation.", ["function", "outcome"]
        )
        self.queue = telemetry.histogram(
            "troupe_reward_queue_seconds", "Wait of an invocation for a worker.", ["function"]
        )
        self.cold = telemetry.histogram(
            "troupe_reward_cold_start_seconds",
            "Start of a worker and import of the code, for calls that had to wait for it.",
            ["function"],
        )
        self.cores = telemetry.counter(
            "troupe_reward_core_seconds", "Cores times the seconds they were held.", ["function"]
        )
        self.retried = telemetry.counter(
            "troupe_reward_retried", "Invocations begun again after a worker died.", ["function"]
        )


class PoolCounts:
    """Counts of workers and invocations, computed when they are read; also gauges."""

    def __init__(self, dispatcher: Dispatcher, telemetry: Telemetry) -> None:
        self._dispatcher = dispatcher
        self._queues = dispatcher.queues
        self._hosts = dispatcher.hosts

        def gauge(name: str, text: str, value: Callable[[], float]) -> None:
            telemetry.gauge(f"troupe_reward_{name}", text).set_function(value)

        gauge("queued", "Invocations that wait for a worker.", lambda: len(self._queues))
        gauge("running", "Workers that run invocations.", lambda: self.busy)
        gauge("workers", "Worker processes.", lambda: self.workers)
        gauge("cores_held", "Cores that calls hold.", self._cores_held)
        gauge(
            "worker_restarts",
            "Workers replaced so far.",
            lambda: sum(host.restarts for host in self._hosts.values()),
        )

    @property
    def workers(self) -> int:
        """Worker processes that exist or are being started."""
        return sum(host.alive for host in self._hosts.values())

    @property
    def busy(self) -> int:
        """Calls that run now."""
        return sum(host.workers - host.free for host in self._hosts.values())

    def function_status(
        self, function: RegisteredFunction, confinement: Sequence[str]
    ) -> reward_pb.FunctionStatus:
        """Return the counts and estimates of `function` as a message."""
        return function.status(
            running=self._dispatcher.running(function),
            behind=self._dispatcher.behind(function),
            warm_workers=sum(host.warm_for(function) for host in self._hosts.values()),
            confinement=confinement,
        )

    def status(self) -> reward_pb.PoolStatus:
        """Return the counts as a message."""
        hosts = self._hosts.values()
        return reward_pb.PoolStatus(
            workers=self.workers,
            busy=self.busy,
            max_workers=sum(host.workers for host in hosts),
            queued=len(self._queues),
            provisioned_seconds=sum(host.provisioned_seconds for host in hosts),
            busy_seconds=sum(host.busy_seconds for host in hosts),
        )

    def _cores_held(self) -> int:
        return sum(
            running.holds.get(CORES, 0)
            for host in self._hosts.values()
            for running in host.running.values()
        )
