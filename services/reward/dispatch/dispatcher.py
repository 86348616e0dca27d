"""Dispatch of queued invocations to the executors of hosts.

`troupe.scheduling.elastic` decides what runs where, whenever an invocation arrives or ends.
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
from typing import Any, Final
from weakref import WeakValueDictionary

import structlog

from services.reward.call import CallOutcome
from services.reward.cgroups import CoreLease
from services.reward.dispatch.invocation import InvocationChunk, PendingInvocation
from services.reward.dispatch.queues import Queues
from services.reward.function import RegisteredFunction, quantile
from services.reward.gpu.manager import MODEL
from services.reward.host import OWN_HOST, FunctionHost
from services.reward.quota import QUOTA, Budget, QuotaManager
from services.reward.resources import CORES, PLENTY
from troupe.scheduling.elastic import Action, DecisionBounds, Placed, Running, decide_over
from troupe.scheduling.elastic.order import workers_to_start
from troupe.v1 import reward_pb2 as reward_pb

log = structlog.get_logger("troupe.reward")

_BOUNDS: Final = DecisionBounds()
# Expected time of a worker's first starts; later, the median of the last ones.
_COLD_SECONDS: Final = 0.15
_COLD_STARTS: Final = 100
# Timers are not exact: a look a little later finds what is due.
_LATE_SECONDS: Final = 0.005
# A chunk is what a worker is expected to do in this time, at most so many calls and bytes of
# arguments: a chunk goes to another host in one message.
_CHUNK_SECONDS: Final = 0.05
_CHUNK_CALLS: Final = 64
_CHUNK_BYTES: Final = 4 << 20


class Dispatcher:
    """The dispatcher of invocations from the queues to the hosts, which reports their progress."""

    def __init__(
        self,
        hosts: Iterable[FunctionHost],
        quotas: QuotaManager | None = None,
        *,
        began: Callable[[PendingInvocation], None],
        ended: Callable[[PendingInvocation, CallOutcome], None],
        held_cores: Callable[[RegisteredFunction, int, float], None],
    ) -> None:
        """`began` and `ended` are called for each attempt of an invocation. `held_cores` is called
        with the cores that calls of a function have had, and for how many seconds."""
        self.queues = Queues()
        self._quotas = quotas
        self.hosts = {host.name: host for host in hosts}
        self._began, self._ended, self._held_cores = began, ended, held_cores
        self._chunks: dict[RegisteredFunction, set[InvocationChunk]] = {}
        # Invocation of each function that explores a new number of cores. The entry disappears with
        # the invocation.
        self._exploring: WeakValueDictionary[RegisteredFunction, PendingInvocation]
        self._exploring = WeakValueDictionary()
        self._tasks: set[asyncio.Task[None]] = set()
        self.autoscaler = WorkerAutoscaler(self.hosts)
        self._timer: asyncio.TimerHandle | None = None
        self._stopped = False

    async def start(self) -> None:
        """Start the worker processes that every host always has."""
        await asyncio.gather(*(host.start() for host in self.hosts.values()))

    async def stop(self) -> None:
        """End everything that runs, without outcomes."""
        self._stopped = True
        self.autoscaler.close()
        if self._timer is not None:
            self._timer.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(host.stop() for host in self.hosts.values()))

    def attach(self, host: FunctionHost) -> None:
        """Run calls on one more host."""
        self.hosts[host.name] = host
        self.dispatch()

    def detach(self, name: str) -> None:
        """Begin no more calls on a host; its executors still report the outcomes of running
        calls."""
        self.hosts.pop(name, None)

    def warm_up(self, function: RegisteredFunction) -> None:
        """Start the workers that a function wants to have ready ahead of any call."""
        if function.spec.min_workers and not self._stopped:
            for host in self.hosts.values():
                self._spawn(self._warm_up(host, function))

    async def _warm_up(self, host: FunctionHost, function: RegisteredFunction) -> None:
        await host.warm_up(function)
        # Invocations that arrived meanwhile found the executors taken.
        self.dispatch()

    def dispatch(self) -> None:
        """Begin every queued invocation that the scheduler grants resources now."""
        if self._stopped:
            return
        while self._decide():
            pass
        if len(self.queues) and self.autoscaler.cold and self._timer is None:
            # Invocations that wait for a busy worker may justify another worker by then.
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self.autoscaler.cold_seconds, self._dispatch_late)

    def running(self, function: RegisteredFunction) -> int:
        """Return the number of executors that run calls of `function`."""
        return len(self._chunks.get(function, ()))

    def behind(self, function: RegisteredFunction) -> int:
        """Return the number of calls of `function` that executors have received and not begun."""
        return sum(chunk.behind for chunk in self._chunks.get(function, ()))

    def action(self, invocation: PendingInvocation, most_cores: int) -> Action:
        """Return `PendingInvocation.action`; one invocation of each function explores at a time."""
        function = invocation.function
        first = self._exploring.get(function)
        explore = first is None or first is invocation or first.done.done()
        action = invocation.action(most_cores, explore=explore)
        if action.elastic is not None and len(action.elastic.levels) < len(function.levels):
            self._exploring[function] = invocation
        return action

    def _room(self, hosts: Sequence[FunctionHost], function: RegisteredFunction) -> int:
        """Return how many more calls of `function` may begin on `hosts`."""
        room = sum(host.room(function) for host in hosts)
        limit = function.spec.max_concurrency
        return min(room, max(0, limit - self.running(function))) if limit > 0 else room

    def _dispatch_late(self) -> None:
        self._timer = None
        self.dispatch()

    def _decide(self) -> bool:
        """Make one decision and begin what it grants; True if some grants went to invocations that
        had become part of an earlier chunk, so that there may be room for others."""
        hosts = [host for host in self.hosts.values() if host.free]
        if not hosts or not len(self.queues):
            return False
        now = time.perf_counter()
        with_cores = any(host.cores is not None for host in hosts)
        # How many cores the first get depends on how many invocations are behind them.
        beyond = _BOUNDS.horizon if with_cores else 0
        free = sum(host.free for host in hosts)
        units = self._quotas.free() if self._quotas is not None else {}
        budget = Budget(units, free)
        queued = self.queues.first(free + beyond, budget, partial(self._room, hosts))
        first = {one.invocation_id: one for one in queued}
        if not first:
            self._request_quotas([], budget)
            return False
        functions = {one.function.key: one.function for one in first.values()}.values()
        startable = self.autoscaler.startable(self.queues, next(iter(first.values())), now)
        # Invocations that have a sandbox need no process of the host's.
        in_sandboxes = sum(one.sandbox_executor is not None for one in first.values())
        views = []
        for host in hosts:
            cold = min(host.cold, startable)
            startable -= cold
            views.append(host.view(cold + in_sandboxes, functions, plenty=with_cores))
        largest = self._most_cores(self.hosts) if with_cores else 0
        own = self._most_cores([OWN_HOST]) if with_cores else 0
        queue = [
            self.action(one, largest if one.sandbox_executor is None else own)
            for one in first.values()
        ]
        # A worker that is kept idle brings no unit of a quota back, and no call of a model.
        limits = {r for f in functions for r in f.needs if r.startswith((QUOTA, MODEL))}
        grants = decide_over(views, queue, now, _BOUNDS, shared=units, quotas=limits)
        begun = 0
        for grant in grants:
            invocation = first[grant.action.action_id]
            if invocation.chunk is None:
                self._begin(invocation, grant)
                begun += 1
        self._request_quotas([one for one in first.values() if one.chunk is None], budget)
        return begun < len(grants)

    def _most_cores(self, names: Iterable[str]) -> int:
        """Return the cores of the largest of these hosts."""
        hosts = (self.hosts[name] for name in names if name in self.hosts)
        return max((PLENTY if one.cores is None else one.total_cores for one in hosts), default=1)

    def refused(self, function: RegisteredFunction, seconds: float) -> None:
        """Pause the function's quota: the interface behind it takes no calls for so long."""
        if self._quotas is not None:
            self._quotas.shut(function.needs, seconds)

    def missing_quota(self, function: RegisteredFunction) -> str:
        """Explain which quota lacks units for a call of `function`; empty: none."""
        if self._quotas is None:
            return ""
        units = self._quotas.free()
        short = any(units[r] < need for r, need in function.needs.items() if r in units)
        return self._quotas.why(function.needs) if short else ""

    def _request_quotas(self, queued: Iterable[PendingInvocation], budget: Budget) -> None:
        """Have units fetched for `queued`, and for requests that `budget` had no units for."""
        if self._quotas is None:
            return
        wishes: dict[str, list[int]] = {}
        for one in queued:
            for resource, units in one.function.needs.items():
                wishes.setdefault(resource, []).append(units)
        for resource, units_of in budget.lacking.items():
            wishes.setdefault(resource, []).extend(units_of)
        self._quotas.wish(wishes)

    def _begin(self, invocation: PendingInvocation, grant: Placed) -> None:
        host, function = self.hosts[grant.host], invocation.function
        cores = grant.holds.get(CORES, 0) if host.cores is not None else 0
        # Out of the queue first: if that fails, no executor was taken.
        self.queues.remove(invocation)
        try:
            executor, lease = host.take(function, cores, invocation.sandbox_executor)
        except BaseException:
            self.queues.add(invocation)
            raise
        several = [invocation, *self._followers(invocation)]
        for one in several:
            if one is not invocation:
                self.queues.remove(one)
            one.cores, one.host = cores, host.name
            one.charged = one.cost
            self.queues.shares.charge(one.job, one.charged)
        chunk = InvocationChunk(several, executor, partial(host.cancel, executor), self.requeue)
        for one in several:
            one.chunk = chunk
        self._chunks.setdefault(function, set()).add(chunk)
        function.cores_held += grant.holds.get(CORES, 0)
        ends = time.perf_counter() + grant.seconds * len(several)
        host.running[invocation.invocation_id] = Running(grant.holds, ends)
        if self._quotas is not None:
            self._quotas.take(grant.holds)
        self._spawn(self._run(invocation.invocation_id, function, chunk, host, lease))

    def _followers(self, invocation: PendingInvocation) -> list[PendingInvocation]:
        """Return the queued invocations that go to the same worker in one chunk: short calls of the
        function, no more than the worker's share of them."""
        function = invocation.function
        # Cores, devices and quota units are handed out call by call.
        alone = invocation.sandbox_executor is not None or function.elastic
        alone = alone or bool(function.spec.model_service or function.spec.quota)
        if alone or not function.stays_warm or not function.invocations:
            return []
        fit = min(_CHUNK_CALLS, int(_CHUNK_SECONDS / function.seconds))
        alive = self.autoscaler.alive
        workers = min(alive, function.spec.max_concurrency or alive)
        share = math.ceil((1 + function.queued) / max(1, workers))
        followers = self.queues.following(invocation, min(fit, share) - 1)
        left = _CHUNK_BYTES - len(invocation.call.arguments_json)
        for index, one in enumerate(followers):
            left -= len(one.call.arguments_json)
            if left < 0:
                return followers[:index]
        return followers

    async def _run(
        self,
        key: str,
        function: RegisteredFunction,
        chunk: InvocationChunk,
        host: FunctionHost,
        lease: CoreLease | None,
    ) -> None:
        try:
            await self._run_all(function, chunk, host, lease)
        finally:
            # Invocations that never began go back to the queue unchanged.
            left = chunk.leave_all()
            self._forget(function, chunk)
            held = host.running.pop(key)
            function.cores_held -= held.holds.get(CORES, 0)
            if self._quotas is not None:
                self._quotas.give_back(held.holds)
            seconds = host.give_back(chunk.executor, lease)
            if lease is not None and lease.cores:
                self._held_cores(function, len(lease.cores), seconds)
            if not self._stopped:
                self.autoscaler.idle(host, function)
                self.requeue(left)

    def _forget(self, function: RegisteredFunction, chunk: InvocationChunk) -> None:
        chunks = self._chunks[function]
        chunks.discard(chunk)
        if not chunks:
            del self._chunks[function]

    async def _run_all(
        self,
        function: RegisteredFunction,
        chunk: InvocationChunk,
        host: FunctionHost,
        lease: CoreLease | None,
    ) -> None:
        self._begin_current(chunk)
        try:
            running = host.run_many(chunk.executor, function, chunk.calls, lease)
            async with aclosing(running) as outcomes:
                async for index, outcome in outcomes:
                    if outcome.cold_seconds:
                        self.autoscaler.started(outcome.cold_seconds)
                    invocation = chunk.ended(index)
                    if invocation is not None:
                        self._end(invocation, outcome)
                    self._begin_current(chunk)
        except Exception as error:
            log.exception("invocation", function=function.key)
            if (current := chunk.current) is not None:
                chunk.leave(current)
                self._end(current, _failed(error))

    def _begin_current(self, chunk: InvocationChunk) -> None:
        invocation = chunk.current
        if invocation is not None and not invocation.began:
            invocation.began = time.perf_counter()
            invocation.attempts += 1
            self._began(invocation)

    def _end(self, invocation: PendingInvocation, outcome: CallOutcome) -> None:
        if invocation.began:  # else the worker was lost before the call was known to have begun
            spent = (time.perf_counter() - invocation.began) * max(1, invocation.cores)
            self.queues.shares.correct(invocation.job, spent - invocation.charged)
        invocation.chunk = None
        try:
            self._ended(invocation, outcome)
        except Exception as error:
            # An outcome that cannot be handled still counts as one, since its caller must not wait
            # forever.
            log.exception("invocation", function=invocation.function.key)
            # A kind without a retry: the worker continues with the rest of the chunk.
            bad = _failed(error, reward_pb.InvocationError.KIND_BAD_RESULT)
            self._ended(invocation, bad)

    def requeue(self, several: Iterable[PendingInvocation]) -> None:
        """Queue invocations that were given to a worker and have no outcome, at their old rank."""
        for invocation in several:
            if not invocation.began:
                self.queues.shares.correct(invocation.job, -invocation.charged)
            invocation.call = replace(invocation.call, dropped=False)
            invocation.chunk, invocation.began = None, 0.0
            self.queues.add(invocation)
        self.dispatch()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _failed(
    error: Exception,
    kind: reward_pb.InvocationError.Kind.ValueType = reward_pb.InvocationError.KIND_WORKER_DIED,
) -> CallOutcome:
    return CallOutcome.failed(kind, f"the runtime failed: {type(error).__name__}: {error}")


class WorkerAutoscaler:
    """The autoscaler of worker processes, which also ends processes that were idle for too long."""

    def __init__(self, hosts: Mapping[str, FunctionHost]) -> None:
        """`hosts`: by name; the mapping changes as hosts attach and detach."""
        self._hosts = hosts
        self._cold_starts: deque[float] = deque(maxlen=_COLD_STARTS)
        self._timer: asyncio.TimerHandle | None = None

    @property
    def alive(self) -> int:
        """Worker processes that exist or are being started."""
        return sum(host.alive for host in self._hosts.values())

    @property
    def cold(self) -> int:
        """Worker processes that could be started."""
        return sum(host.cold for host in self._hosts.values())

    @property
    def cold_seconds(self) -> float:
        """How long a worker process is expected to take to start."""
        return quantile(self._cold_starts, 0.5) or _COLD_SECONDS

    def started(self, seconds: float) -> None:
        """Record how long a cold start took."""
        self._cold_starts.append(seconds)

    def startable(self, queues: Queues, head: PendingInvocation, now: float) -> int:
        """Return how many processes may be started for queued invocations; `head` is the first of
        it."""
        cold = self.cold
        if not cold:
            return 0
        seconds = self.cold_seconds
        backlog = queues.seconds(seconds)
        for host in self._hosts.values():
            # A call that takes longer than expected is expected to take as long again.
            backlog += sum(
                r.ends - now if r.ends > now else now - r.ends for r in host.running.values()
            )
        return workers_to_start(backlog, now - head.since, self.alive, cold, seconds)

    def idle(self, host: FunctionHost, function: RegisteredFunction) -> None:
        """Note that a worker of `host`, which ran `function` last, is idle from now on."""
        self._reap_in(host.idle_seconds(function))

    def close(self) -> None:
        """Stop looking for idle workers."""
        if self._timer is not None:
            self._timer.cancel()

    def _reap(self) -> None:
        self._timer = None
        looks = [look for host in self._hosts.values() if (look := host.reap()) is not None]
        if looks:
            self._reap_in(min(looks))

    def _reap_in(self, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time() + seconds + _LATE_SECONDS
        if self._timer is not None:
            if self._timer.when() <= due:
                return
            self._timer.cancel()
        self._timer = loop.call_at(due, self._reap)
