"""Which invocation runs next, on which worker: by priority, within each function's limit."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import structlog

from services.chassis.telemetry import Telemetry
from services.reward.registry import Function
from services.reward.slot import BadArguments, Outcome, Slot
from troupe.rpc import InvalidArgument, ResourceExhausted, TroupeError, Unavailable
from troupe.v1 import reward_pb2 as pb

log = structlog.get_logger("troupe.reward")


@dataclass(order=True)
class _Waiting:
    """One invocation until its outcome; ordered by priority, then by arrival."""

    rank: tuple[int, int]
    invocation_id: str = field(compare=False)
    function: Function = field(compare=False)
    arguments_json: str = field(compare=False)
    done: asyncio.Future[pb.InvokeResponse] = field(compare=False)
    since: float = field(compare=False)
    slot: Slot | None = field(default=None, compare=False)


class Runtime:
    """A queue per function in front of the worker slots; every invocation gets one outcome."""

    def __init__(
        self, slots: Sequence[Slot], telemetry: Telemetry, *, max_queued: int = 10_000
    ) -> None:
        self._slots = slots
        self._free = list(slots)
        self._max_queued = max_queued
        self._queues: dict[str, list[_Waiting]] = {}
        self._open: dict[str, _Waiting] = {}
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
        queued.set_function(lambda: sum(map(len, self._queues.values())))
        running = telemetry.gauge("troupe_reward_running", "Invocations that run.")
        running.set_function(lambda: len(self._slots) - len(self._free))
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
        waiting = _Waiting(
            (-priority, next(self._arrivals)),
            invocation_id,
            function,
            arguments_json,
            asyncio.get_running_loop().create_future(),
            time.perf_counter(),
        )
        self._open[invocation_id] = waiting
        heapq.heappush(self._queues.setdefault(function.key, []), waiting)
        function.queued += 1
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
            self._unqueue(waiting)
            self._finish(waiting, Outcome(error=error), 0.0)
        return True

    def abandon(self, invocation_id: str) -> None:
        """Nobody waits for it any more: drop it unless it runs already."""
        waiting = self._open.get(invocation_id)
        if waiting is not None and waiting.slot is None:
            self._refuse(waiting, Unavailable("its callers left before it ran"))

    def _pump(self) -> None:
        """Give free workers to the first in rank whose function may run."""
        while self._free:
            heads = [
                queue[0] for queue in self._queues.values() if queue and not queue[0].function.full
            ]
            if not heads:
                return
            waiting = min(heads)
            self._unqueue(waiting)
            holding = [slot for slot in self._free if slot.holds(waiting.function)]
            slot = (holding or self._free)[0]
            self._free.remove(slot)
            waiting.slot = slot
            waiting.function.running += 1
            task = asyncio.create_task(self._run(waiting, slot))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _run(self, waiting: _Waiting, slot: Slot) -> None:
        function = waiting.function
        start = time.perf_counter()
        try:
            outcome = await slot.run(function, waiting.arguments_json)
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
            self._free.append(slot)
            if not self._stopped:
                self._pump()

    def _finish(self, waiting: _Waiting, outcome: Outcome, start: float) -> None:
        """Answer; `start` is when it began to run, 0 when it never did."""
        self._open.pop(waiting.invocation_id, None)
        function, now = waiting.function, time.perf_counter()
        queued = (start or now) - waiting.since
        ran = now - start if start else 0.0
        function.invocations += 1
        function.run_seconds += ran
        response = pb.InvokeResponse(queue_seconds=queued, run_seconds=ran)
        label = "ok"
        if outcome.error is None:
            response.result_json = outcome.result_json
        else:
            function.errors += 1
            response.error.CopyFrom(outcome.error)
            label = pb.InvocationError.Kind.Name(outcome.error.kind).lower()
        self._seconds.labels(function.label, label.removeprefix("kind_")).observe(ran)
        self._queue_seconds.labels(function.label).observe(queued)
        if not waiting.done.done():
            waiting.done.set_result(response)

    def _refuse(self, waiting: _Waiting, error: TroupeError) -> None:
        self._open.pop(waiting.invocation_id, None)
        if waiting.slot is None:
            self._unqueue(waiting)
        if not waiting.done.done():
            waiting.done.set_exception(error)

    def _unqueue(self, waiting: _Waiting) -> None:
        key = waiting.function.key
        queue = self._queues[key]
        if queue[0] is waiting:
            heapq.heappop(queue)
        else:
            queue.remove(waiting)
            heapq.heapify(queue)
        if not queue:
            del self._queues[key]
        waiting.function.queued -= 1
