"""Every invocation gets one outcome, and those who watch it hear how it goes until then."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Final

import structlog

from services.chassis.telemetry import Telemetry
from services.reward.answers import as_reward
from services.reward.audience import Audience, Watcher
from services.reward.call import Call, Outcome, Place
from services.reward.dispatch import Dispatcher
from services.reward.expectation import expect, learn
from services.reward.function import REWARD, Function
from services.reward.host import Host
from services.reward.metrics import Metrics
from services.reward.pool import Pool
from services.reward.queues import Waiting, cost
from services.reward.quota import QuotaManager
from troupe.rpc import ResourceExhausted, TroupeError, Unavailable
from troupe.scheduling.elastic import Discipline
from troupe.v1 import reward_pb2 as pb

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
        hosts: Iterable[Host],
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
        self._audience = Audience()
        self._arrivals = itertools.count()
        self._stopped = False
        self._metrics = Metrics(telemetry)
        self.pool = Pool(self.dispatcher, self._metrics)

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
        function: Function,
        call: Call,
        *,
        priority: int = 0,
        weight: float = 1.0,
        place: Place | None = None,
    ) -> pb.InvokeResponse:
        """Queue the call and wait for its outcome.

        Raises `ResourceExhausted` (with retry_after_ms) when a queue is full.
        """
        (waiting,) = self.submit([(invocation_id, call)], function, priority, weight, place)
        return await waiting

    def submit(
        self,
        calls: Sequence[tuple[str, Call]],
        function: Function,
        priority: int = 0,
        weight: float = 1.0,
        place: Place | None = None,
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

    def _place(self, function: Function, call: Call, now: float) -> float:
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
        self._finish(waiting, Outcome(error=error))
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
        self._finish(waiting, Outcome(error=error))

    def forget(self, function: Function) -> None:
        """The function is deleted: nothing more of it runs."""
        for invocation_id, waiting in list(self._open.items()):
            if waiting.function is function:
                self.cancel(invocation_id)
        function.logs.close()

    # What the dispatcher tells.

    def begun(self, waiting: Waiting) -> None:
        """It runs now."""
        self._audience.begun(waiting)

    def ended(self, waiting: Waiting, outcome: Outcome) -> None:
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

    def held(self, function: Function, cores: int, seconds: float) -> None:
        """Calls of `function` had a place and that many cores for so long."""
        self._metrics.held_cores(function, cores, seconds)

    def _admit(self, function: Function, calls: int) -> None:
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

    def _finish(self, waiting: Waiting, outcome: Outcome) -> None:
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
