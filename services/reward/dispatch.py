"""Brings what waits to where it runs.

`troupe.scheduling.elastic` decides, whenever something comes or ends.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import Any, Final, Protocol

import structlog

from services.reward.call import CallOutcome, WorkerPlace
from services.reward.function import RegisteredFunction, quantile
from services.reward.groups import CoreLease
from services.reward.host import FunctionHost
from services.reward.queues import CORES, Queues, Waiting
from services.reward.quota import Budget, QuotaManager
from troupe.scheduling.elastic import DecisionBounds, Placed, Running, decide_over
from troupe.scheduling.elastic.order import workers_to_start
from troupe.v1 import reward_pb2 as pb

# Until a worker has started: what that is expected to take. Of so many it is the median.
_COLD_SECONDS: Final = 0.15
_COLD_STARTS: Final = 100
# Timers are not exact: looking a little later finds what is due.
_LATE_SECONDS: Final = 0.005


class WorkerAutoscaler:
    """The processes of all hosts."""

    def __init__(self, hosts: Mapping[str, FunctionHost]) -> None:
        """`hosts` by name, as they come and go."""
        self._hosts = hosts
        self._cold: deque[float] = deque(maxlen=_COLD_STARTS)
        self._timer: asyncio.TimerHandle | None = None

    @property
    def alive(self) -> int:
        """Those that are there, or being started."""
        return sum(host.alive for host in self._hosts.values())

    @property
    def cold(self) -> int:
        """Those that could be started."""
        return sum(host.cold for host in self._hosts.values())

    @property
    def cold_seconds(self) -> float:
        """How long one is expected to take to start."""
        return quantile(self._cold, 0.5) or _COLD_SECONDS

    def started(self, seconds: float) -> None:
        """One took so long to start."""
        self._cold.append(seconds)

    def startable(self, queues: Queues, head: Waiting, now: float) -> int:
        """How many may be started for what waits; `head` is the first."""
        cold = self.cold
        if not cold:
            return 0
        seconds = self.cold_seconds
        backlog = queues.seconds(seconds)
        for host in self._hosts.values():
            # What takes longer than was expected is expected to take as long again.
            backlog += sum(
                r.ends - now if r.ends > now else now - r.ends for r in host.running.values()
            )
        return workers_to_start(backlog, now - head.since, self.alive, cold, seconds)

    def idle(self, host: FunctionHost, function: RegisteredFunction) -> None:
        """A worker of `host` has nothing to do since now; `function` was its last."""
        self._look(host.idle_seconds(function))

    def close(self) -> None:
        """No more of it."""
        if self._timer is not None:
            self._timer.cancel()

    def _reap(self) -> None:
        """End those that were idle for too long, and look again when the next one is."""
        self._timer = None
        looks = [look for host in self._hosts.values() if (look := host.reap()) is not None]
        if looks:
            self._look(min(looks))

    def _look(self, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time() + seconds + _LATE_SECONDS
        if self._timer is not None:
            if self._timer.when() <= due:
                return
            self._timer.cancel()
        self._timer = loop.call_at(due, self._reap)


# A worker is given as many calls as it is expected to do in this time, at most so many.
SECONDS: Final = 0.05
MOST: Final = 64
# Of arguments: they go to another host in one message, and no call should wait for the others'.
MOST_BYTES: Final = 4 << 20
# A call that takes longer than this keeps nobody behind it: they go elsewhere.
PATIENCE_SECONDS: Final = 0.2


def fitting(first: Waiting, others: list[Waiting]) -> list[Waiting]:
    """Those of `others`, in their order, that one message can hold along with `first`."""
    left = MOST_BYTES - len(first.call.arguments_json)
    for place, one in enumerate(others):
        left -= len(one.call.arguments_json)
        if left < 0:
            return others[:place]
    return others


class InvocationChunk:
    """Invocations in the order in which a place runs them, until each has ended or left."""

    def __init__(
        self,
        waiting: Sequence[Waiting],
        place: WorkerPlace,
        cancel: Callable[[], None],
        recall: Callable[[list[Waiting]], None],
    ) -> None:
        """`cancel` ends the one that runs; `recall` is told of those that waited for too long
        behind another."""
        self.place, self.cancel = place, cancel
        self.calls = [one.call for one in waiting]
        self._waiting: list[Waiting | None] = list(waiting)
        self._left = len(waiting)
        # Nothing before it is left.
        self._first = 0
        self._recall = recall
        self._timer: asyncio.TimerHandle | None = None
        self._watch()

    @property
    def behind(self) -> int:
        """How many have not begun."""
        return max(0, self._left - 1)

    @property
    def current(self) -> Waiting | None:
        """The one that runs, or is the next to."""
        while self._first < len(self._waiting):
            if (found := self._waiting[self._first]) is not None:
                return found
            self._first += 1
        return None

    def ended(self, index: int) -> Waiting | None:
        """The one whose outcome came, unless it left before."""
        found = self._remove(index)
        self._watch()
        return found

    def leave(self, waiting: Waiting) -> None:
        """Let go of one that has not begun, as far as anybody knows; if it runs after all, its
        outcome is nobody's."""
        self._remove(self._waiting.index(waiting))
        waiting.call.dropped = True

    def leave_all(self) -> list[Waiting]:
        """All that have no outcome, in their order; they leave."""
        found = [one for one in self._waiting if one is not None]
        self._waiting, self._left = [], 0
        self._unwatch()
        return found

    def _remove(self, index: int) -> Waiting | None:
        found, self._waiting[index] = self._waiting[index], None
        self._left -= found is not None
        return found

    def _watch(self) -> None:
        self._unwatch()
        if self.behind:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(PATIENCE_SECONDS, self._give_up)

    def _unwatch(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _give_up(self) -> None:
        current = self.current
        behind = [one for one in self._waiting if one is not None and one is not current]
        for one in behind:
            self.leave(one)
        self._recall(behind)


log = structlog.get_logger("troupe.reward")

_RULES: Final = DecisionBounds()


class DispatchListener(Protocol):
    """Who hears of what was dispatched."""

    def begun(self, waiting: Waiting) -> None:
        """It runs now."""

    def ended(self, waiting: Waiting, outcome: CallOutcome) -> None:
        """It ran."""

    def held(self, function: RegisteredFunction, cores: int, seconds: float) -> None:
        """Calls of `function` had a place and that many cores for so long."""


class Dispatcher:
    """The queues, the hosts, and what runs."""

    def __init__(
        self,
        hosts: Iterable[FunctionHost],
        listener: DispatchListener,
        quotas: QuotaManager | None = None,
    ) -> None:
        self.queues = Queues()
        self._quotas = quotas
        self.hosts = {host.name: host for host in hosts}
        self._listener = listener
        self._tasks: set[asyncio.Task[None]] = set()
        self.workforce = WorkerAutoscaler(self.hosts)
        self._pump_timer: asyncio.TimerHandle | None = None
        self._stopped = False

    async def start(self) -> None:
        """Start the workers that are to be there at any time."""
        await asyncio.gather(*(host.start() for host in self.hosts.values()))

    async def stop(self) -> None:
        """End everything that runs, without outcomes."""
        self._stopped = True
        self.workforce.close()
        if self._pump_timer is not None:
            self._pump_timer.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(host.stop() for host in self.hosts.values()))

    def attach(self, host: FunctionHost) -> None:
        """One more host that runs calls."""
        self.hosts[host.name] = host
        self.pump()

    def detach(self, name: str) -> None:
        """Nothing begins there any more; the outcomes of what runs there come from its places."""
        self.hosts.pop(name, None)

    def warm_up(self, function: RegisteredFunction) -> None:
        """Start what a function wants to have ready ahead of any call."""
        if function.spec.min_workers and not self._stopped:
            for host in self.hosts.values():
                self._spawn(self._warm_up(host, function))

    async def _warm_up(self, host: FunctionHost, function: RegisteredFunction) -> None:
        await host.warm_up(function)
        # What came meanwhile found its places taken.
        self.pump()

    def pump(self) -> None:
        """Start what the scheduler says."""
        if self._stopped:
            return
        while self._decide():
            pass
        if len(self.queues) and self.workforce.cold:
            self._look_again(self.workforce.cold_seconds)

    def _decide(self) -> bool:
        """One decision; whether there may be another, since what it granted was taken along."""
        hosts = [host for host in self.hosts.values() if host.free]
        if not hosts or not len(self.queues):
            return False
        now = time.perf_counter()
        handing = any(host.cores is not None for host in hosts)
        # How much the first get depends on how many are behind them, where there is more to get.
        beyond = _RULES.horizon if handing else 0
        places = sum(host.free for host in hosts)
        units = self._quotas.free() if self._quotas is not None else {}
        budget = Budget(units, places)
        first = {w.invocation_id: w for w in self.queues.first(places + beyond, budget)}
        if not first:
            self._wish([], budget)
            return False
        functions = {w.function.key: w.function for w in first.values()}.values()
        startable = self.workforce.startable(self.queues, next(iter(first.values())), now)
        # Those with a place of their own need no process of the host's.
        guests = sum(w.place is not None for w in first.values())
        views = []
        for host in hosts:
            cold = min(host.cold, startable)
            startable -= cold
            views.append(host.view(cold + guests, functions, plenty=handing))
        queue = [w.action(with_cores=handing) for w in first.values()]
        grants = decide_over(views, queue, now, _RULES, shared=units, quotas=units)
        begun = 0
        for grant in grants:
            waiting = first[grant.action.action_id]
            if waiting.chunk is None:  # else a worker that was given one before it has it, too
                self._begin(waiting, grant)
                begun += 1
        self._wish([w for w in first.values() if w.chunk is None], budget)
        return begun < len(grants)

    def refused(self, function: RegisteredFunction, seconds: float) -> None:
        """The interface behind the function's quota wants no calls for so long."""
        if self._quotas is not None:
            self._quotas.shut(function.needs, seconds)

    def short_of(self, function: RegisteredFunction) -> str:
        """What quota a call of `function` waits for, and why; empty: for none."""
        if self._quotas is None:
            return ""
        units = self._quotas.free()
        short = any(units[r] < need for r, need in function.needs.items() if r in units)
        return self._quotas.why(function.needs) if short else ""

    def _wish(self, waiting: Iterable[Waiting], budget: Budget) -> None:
        """Let the quotas know what could begin if it had units: `waiting`, and who had none."""
        if self._quotas is None:
            return
        wishes: dict[str, list[int]] = {}
        for one in waiting:
            for resource, units in one.function.needs.items():
                wishes.setdefault(resource, []).append(units)
        for resource, units_of in budget.lacking.items():
            wishes.setdefault(resource, []).extend(units_of)
        self._quotas.wish(wishes)

    def _begin(self, waiting: Waiting, grant: Placed) -> None:
        host, function = self.hosts[grant.host], waiting.function
        cores = grant.holds.get(CORES, 0) if host.cores is not None else 0
        # First of all, so that no place is taken for what is not to be had.
        self.queues.remove(waiting)
        try:
            place, lease = host.take(function, cores, waiting.place)
        except BaseException:
            self.queues.add(waiting)
            raise
        several = [waiting, *self._behind(waiting)]
        for one in several:
            if one is not waiting:
                self.queues.remove(one)
            one.cores, one.host = cores, host.name
            one.charged = one.cost
            self.queues.shares.charge(one.job, one.charged)
        work = InvocationChunk(several, place, partial(host.cancel, place), self.again)
        for one in several:
            one.chunk = work
        function.chunks.add(work)
        function.cores_held += grant.holds.get(CORES, 0)
        ends = time.perf_counter() + grant.seconds * len(several)
        host.running[waiting.invocation_id] = Running(grant.holds, ends)
        if self._quotas is not None:
            self._quotas.take(grant.holds)
        self._spawn(self._run(waiting.invocation_id, function, work, host, lease))

    def _behind(self, waiting: Waiting) -> list[Waiting]:
        """What the same worker gets along with it: short calls, no more than its share of them."""
        function = waiting.function
        # What is handed out by the call cannot be shared.
        alone = waiting.place is not None or function.elastic
        alone = alone or bool(function.spec.model_service or function.spec.quota)
        if alone or not function.stays_warm or not function.invocations:
            return []
        fit = min(MOST, int(SECONDS / function.seconds))
        # As many workers as there are and its limit allows.
        alive = self.workforce.alive
        takers = min(alive, function.spec.max_concurrency or alive)
        share = math.ceil((1 + function.queued) / max(1, takers))
        return fitting(waiting, self.queues.following(waiting, min(fit, share) - 1))

    async def _run(
        self,
        key: str,
        function: RegisteredFunction,
        work: InvocationChunk,
        host: FunctionHost,
        lease: CoreLease | None,
    ) -> None:
        try:
            await self._run_all(function, work, host, lease)
        finally:
            # Those that never began are as if nothing had happened to them.
            left = work.leave_all()
            function.chunks.discard(work)
            held = host.running.pop(key)
            function.cores_held -= held.holds.get(CORES, 0)
            if self._quotas is not None:
                self._quotas.give_back(held.holds)
            seconds = host.give_back(work.place, lease)
            self._listener.held(function, 0 if lease is None else len(lease.cores), seconds)
            if not self._stopped:
                self.workforce.idle(host, function)
                self.again(left)

    async def _run_all(
        self,
        function: RegisteredFunction,
        work: InvocationChunk,
        host: FunctionHost,
        lease: CoreLease | None,
    ) -> None:
        self._next(work)
        try:
            running = host.run_many(work.place, function, work.calls, lease)
            async with aclosing(running) as outcomes:
                async for index, outcome in outcomes:
                    if outcome.cold_seconds:
                        self.workforce.started(outcome.cold_seconds)
                    waiting = work.ended(index)
                    if waiting is not None:
                        self._end(waiting, outcome)
                    self._next(work)
        except Exception as error:
            log.exception("invocation", function=function.key)
            if (waiting := work.current) is not None:
                work.leave(waiting)
                self._end(waiting, _failed(error))

    def _next(self, work: InvocationChunk) -> None:
        waiting = work.current
        if waiting is not None and not waiting.began:
            waiting.began = time.perf_counter()
            waiting.attempts += 1
            self._listener.begun(waiting)

    def _end(self, waiting: Waiting, outcome: CallOutcome) -> None:
        if waiting.began:  # else its worker was lost before anybody knew that it had begun
            spent = (time.perf_counter() - waiting.began) * max(1, waiting.cores)
            self.queues.shares.correct(waiting.job, spent - waiting.charged)
        waiting.chunk = None
        try:
            self._listener.ended(waiting, outcome)
        except Exception as error:
            # What is wrong with the outcome is one, too: nobody may wait for ever.
            log.exception("invocation", function=waiting.function.key)
            # No retry: the worker goes on with what was sent along.
            bad = _failed(error, pb.InvocationError.KIND_BAD_RESULT)
            self._listener.ended(waiting, bad)

    def again(self, several: Iterable[Waiting]) -> None:
        """Queue what was given to a worker and has no outcome, at its old place."""
        for waiting in several:
            if not waiting.began:
                self.queues.shares.correct(waiting.job, -waiting.charged)
            waiting.call = replace(waiting.call, dropped=False)
            waiting.chunk, waiting.began = None, 0.0
            self.queues.add(waiting)
        self.pump()

    def _look_again(self, seconds: float) -> None:
        """Pump later: what waits for a worker that is busy may be worth another by then."""
        if self._pump_timer is None:
            loop = asyncio.get_running_loop()
            self._pump_timer = loop.call_later(seconds, self._pump_late)

    def _pump_late(self) -> None:
        self._pump_timer = None
        self.pump()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _failed(
    error: Exception,
    kind: pb.InvocationError.Kind.ValueType = pb.InvocationError.KIND_WORKER_DIED,
) -> CallOutcome:
    message = f"the runtime failed: {type(error).__name__}: {error}"
    return CallOutcome(error=pb.InvocationError(kind=kind, message=message))
