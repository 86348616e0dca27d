"""Which invocations run next, on which workers and how many cores.

`troupe.scheduling.elastic` decides, whenever something comes or ends: by priority, then first come,
first served, within each function's limit.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Sequence
from typing import Final

import structlog

from services.chassis.telemetry import Telemetry
from services.reward.cpu import CoreManager, Lease
from services.reward.queues import CORES, WORKERS, Queues, Waiting
from services.reward.registry import Function
from services.reward.slot import BadArguments, Outcome, Slot
from troupe.rpc import InvalidArgument, ResourceExhausted, TroupeError, Unavailable
from troupe.scheduling.elastic import Grant, Rules, Running, decide
from troupe.v1 import reward_pb2 as pb

log = structlog.get_logger("troupe.reward")


_RULES: Final = Rules()


class Runtime:
    """A queue per function in front of the worker slots; every invocation gets one outcome."""

    def __init__(
        self,
        slots: Sequence[Slot],
        telemetry: Telemetry,
        *,
        max_queued: int = 10_000,
        cores: CoreManager | None = None,
    ) -> None:
        """`cores` hands them out to calls; None: a call takes a worker and nothing else."""
        self._slots = slots
        self._free = list(slots)
        self._max_queued = max_queued
        self._cores = cores
        self._queues = Queues()
        self._open: dict[str, Waiting] = {}
        # What runs, as the scheduler knows it.
        self._running: dict[str, Running] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._arrivals = itertools.count()
        self._stopped = False
        self._seconds = telemetry.histogram(
            "troupe_reward_run_seconds", "Run time of an invocation.", ["function", "outcome"]
        )
        self._queue_seconds = telemetry.histogram(
            "troupe_reward_queue_seconds", "Wait of an invocation for a worker.", ["function"]
        )
        queued = telemetry.gauge("troupe_reward_queued", "Invocations that wait for a worker.")
        queued.set_function(lambda: len(self._queues))
        running = telemetry.gauge("troupe_reward_running", "Invocations that run.")
        running.set_function(lambda: len(self._slots) - len(self._free))
        held = telemetry.gauge("troupe_reward_cores_held", "Cores that calls hold.")
        held.set_function(lambda: sum(r.holds.get(CORES, 0) for r in self._running.values()))
        self._core_seconds = telemetry.counter(
            "troupe_reward_core_seconds", "Cores times the seconds they were held.", ["function"]
        )
        restarts = telemetry.gauge("troupe_reward_worker_restarts", "Workers replaced so far.")
        restarts.set_function(lambda: sum(slot.restarts for slot in self._slots))

    async def start(self) -> None:
        """Start the workers."""
        await asyncio.gather(*(slot.start() for slot in self._slots))

    async def stop(self) -> None:
        """Kill the workers; what waited or ran ends with UNAVAILABLE."""
        self._stopped = True
        for waiting in list(self._open.values()):
            self._refuse(waiting, Unavailable("the reward service stops"))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(slot.stop() for slot in self._slots))
        if self._cores is not None:
            self._cores.close()

    async def invoke(
        self, invocation_id: str, function: Function, arguments_json: str, priority: int = 0
    ) -> pb.InvokeResponse:
        """Queue the call and wait for its outcome.

        Raises `InvalidArgument` for arguments that are not a JSON object and `ResourceExhausted`
        (with retry_after_ms) when the queue is full.
        """
        if self._stopped:
            raise Unavailable("the reward service stops")
        if len(self._open) >= self._max_queued:
            raise ResourceExhausted(
                f"{len(self._open)} invocations wait already", retry_after_ms=500
            )
        waiting = Waiting(
            (-priority, next(self._arrivals)),
            invocation_id,
            function,
            arguments_json,
            asyncio.get_running_loop().create_future(),
            time.perf_counter(),
        )
        self._open[invocation_id] = waiting
        self._queues.add(waiting)
        self._pump()
        return await waiting.done

    def cancel(self, invocation_id: str) -> bool:
        """End the invocation with KIND_CANCELLED; False when it has ended or is unknown."""
        waiting = self._open.get(invocation_id)
        if waiting is None:
            return False
        if waiting.slot is not None:
            waiting.slot.cancel()
        else:
            error = pb.InvocationError(
                kind=pb.InvocationError.KIND_CANCELLED, message="cancelled before it ran"
            )
            self._queues.remove(waiting)
            self._finish(waiting, Outcome(error=error), 0.0)
        return True

    def abandon(self, invocation_id: str) -> None:
        """Nobody waits for it any more: drop it unless it runs already."""
        waiting = self._open.get(invocation_id)
        if waiting is not None and waiting.slot is None:
            self._refuse(waiting, Unavailable("its callers left before it ran"))

    def _pump(self) -> None:
        """Start what the scheduler says."""
        if not self._free or not len(self._queues):
            return
        free = {WORKERS: len(self._free)}
        # How much the first get depends on how many are behind them, where there is more to get.
        beyond = 0
        if self._cores is not None:
            free[CORES], beyond = self._cores.free, _RULES.horizon
        first = {w.invocation_id: w for w in self._queues.first(len(self._free) + beyond)}
        queue = [w.action(with_cores=self._cores is not None) for w in first.values()]
        for grant in decide(queue, free, self._running.values(), time.perf_counter(), _RULES):
            self._start(first[grant.action.action_id], grant)

    def _start(self, waiting: Waiting, grant: Grant) -> None:
        self._queues.remove(waiting)
        function = waiting.function
        holding = [slot for slot in self._free if slot.holds(function)]
        suiting = [slot for slot in self._free if slot.suits(function)]
        slot = (holding or suiting or self._free)[0]
        self._free.remove(slot)
        waiting.slot, waiting.cores = slot, grant.holds.get(CORES, 0)
        function.running += 1
        ends = time.perf_counter() + grant.seconds
        self._running[waiting.invocation_id] = Running(grant.holds, ends)
        lease = None if self._cores is None else self._cores.take(slot.name, waiting.cores)
        task = asyncio.create_task(self._run(waiting, slot, lease))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, waiting: Waiting, slot: Slot, lease: Lease | None) -> None:
        function = waiting.function
        start = time.perf_counter()
        try:
            outcome = await slot.run(function, waiting.arguments_json, lease)
        except BadArguments as error:
            self._refuse(waiting, InvalidArgument(str(error), field="arguments_json"))
        except Exception as error:
            log.exception("invocation", function=function.key)
            outcome = Outcome(
                error=pb.InvocationError(
                    kind=pb.InvocationError.KIND_WORKER_DIED,
                    message=f"the runtime failed: {type(error).__name__}: {error}",
                )
            )
            self._finish(waiting, outcome, start)
        else:
            self._finish(waiting, outcome, start)
        finally:
            function.running -= 1
            del self._running[waiting.invocation_id]
            if lease is not None and self._cores is not None:
                self._cores.give_back(lease)
                seconds = time.perf_counter() - start
                self._core_seconds.labels(function.label).inc(seconds * len(lease.cores))
            self._free.append(slot)
            if not self._stopped:
                self._pump()

    def _finish(self, waiting: Waiting, outcome: Outcome, start: float) -> None:
        """Answer; `start` is when it began to run, 0 when it never did."""
        self._open.pop(waiting.invocation_id, None)
        function, now = waiting.function, time.perf_counter()
        queued = (start or now) - waiting.since
        ran = now - start if start else 0.0
        function.invocations += 1
        function.run_seconds += ran
        response = pb.InvokeResponse(queue_seconds=queued, run_seconds=ran, cores=waiting.cores)
        label = "ok"
        if outcome.error is None:
            response.result_json = outcome.result_json
            function.curve = function.curve.observed(max(1, waiting.cores), outcome.seconds)
        else:
            function.errors += 1
            response.error.CopyFrom(outcome.error)
            label = pb.InvocationError.Kind.Name(outcome.error.kind).lower()
        self._seconds.labels(function.label, label.removeprefix("kind_")).observe(ran)
        self._queue_seconds.labels(function.label).observe(queued)
        if not waiting.done.done():
            waiting.done.set_result(response)

    def _refuse(self, waiting: Waiting, error: TroupeError) -> None:
        self._open.pop(waiting.invocation_id, None)
        if waiting.slot is None:
            self._queues.remove(waiting)
        if not waiting.done.done():
            waiting.done.set_exception(error)
