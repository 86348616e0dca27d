"""Brings what waits to where it runs.

`troupe.scheduling.elastic` decides, whenever something comes or ends.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Coroutine, Iterable
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import Any, Final, Protocol

import structlog

from services.reward import chunk
from services.reward.call import Outcome
from services.reward.chunk import Chunk
from services.reward.cpu import Lease
from services.reward.function import Function
from services.reward.host import Host
from services.reward.queues import CORES, Queues, Waiting
from services.reward.quota import Budget, QuotaManager
from services.reward.workforce import Workforce
from troupe.scheduling.elastic import Placed, Rules, Running, decide_over
from troupe.v1 import reward_pb2 as pb

log = structlog.get_logger("troupe.reward")

_RULES: Final = Rules()


class Listener(Protocol):
    """Who hears of what was dispatched."""

    def begun(self, waiting: Waiting) -> None:
        """It runs now."""

    def ended(self, waiting: Waiting, outcome: Outcome) -> None:
        """It ran."""

    def held(self, function: Function, cores: int, seconds: float) -> None:
        """Calls of `function` had a place and that many cores for so long."""


class Dispatcher:
    """The queues, the hosts, and what runs."""

    def __init__(
        self, hosts: Iterable[Host], listener: Listener, quotas: QuotaManager | None = None
    ) -> None:
        self.queues = Queues()
        self._quotas = quotas
        self.hosts = {host.name: host for host in hosts}
        self._listener = listener
        self._tasks: set[asyncio.Task[None]] = set()
        self.workforce = Workforce(self.hosts)
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

    def attach(self, host: Host) -> None:
        """One more host that runs calls."""
        self.hosts[host.name] = host
        self.pump()

    def detach(self, name: str) -> None:
        """Nothing begins there any more; the outcomes of what runs there come from its places."""
        self.hosts.pop(name, None)

    def warm_up(self, function: Function) -> None:
        """Start what a function wants to have ready ahead of any call."""
        if function.spec.min_workers and not self._stopped:
            for host in self.hosts.values():
                self._spawn(self._warm_up(host, function))

    async def _warm_up(self, host: Host, function: Function) -> None:
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

    def refused(self, function: Function, seconds: float) -> None:
        """The interface behind the function's quota wants no calls for so long."""
        if self._quotas is not None:
            self._quotas.shut(function.needs, seconds)

    def short_of(self, function: Function) -> str:
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
        work = Chunk(several, place, partial(host.cancel, place), self.again)
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
        fit = min(chunk.MOST, int(chunk.SECONDS / function.seconds))
        # As many workers as there are and its limit allows.
        alive = self.workforce.alive
        takers = min(alive, function.spec.max_concurrency or alive)
        share = math.ceil((1 + function.queued) / max(1, takers))
        return chunk.fitting(waiting, self.queues.following(waiting, min(fit, share) - 1))

    async def _run(
        self, key: str, function: Function, work: Chunk, host: Host, lease: Lease | None
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
        self, function: Function, work: Chunk, host: Host, lease: Lease | None
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

    def _next(self, work: Chunk) -> None:
        waiting = work.current
        if waiting is not None and not waiting.began:
            waiting.began = time.perf_counter()
            waiting.attempts += 1
            self._listener.begun(waiting)

    def _end(self, waiting: Waiting, outcome: Outcome) -> None:
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
) -> Outcome:
    message = f"the runtime failed: {type(error).__name__}: {error}"
    return Outcome(error=pb.InvocationError(kind=kind, message=message))
