"""Engines in the twin: each engine's batch, the router of a policy, moves between policies.

`TwinRouter` calls `troupe.scheduling.routing` like `services.rollout.serving.router.PolicyRouter`,
and `TwinBalancer` calls it like the orchestrator's balancer.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import simpy

from troupe.scheduling import balancing
from troupe.scheduling.routing import (
    POLICIES,
    AdaptiveLimit,
    Fleet,
    Profiles,
    TurnQueue,
    UpdatingEngine,
    Work,
    next_wave,
)
from troupe.twin.batch import BusyClock, EngineBatch
from troupe.twin.job import EngineFleet, RoutingRules
from troupe.twin.workload import TwinTurn


class TwinClock:
    """Simulated time and simpy's event queue, with plain calls, which cost a tenth of simpy's
    events. Unlike a subclass of simpy's environment it can be compiled."""

    def __init__(self) -> None:
        self.now = 0.0
        self.queue: list[tuple[float, int, int, Any]] = []
        self.numbers = itertools.count()

    def call(self, at: float, function: Callable[[Any], None], argument: Any = None) -> None:
        """Call `function` at time `at`, in the order of simpy's events of normal priority."""
        heapq.heappush(self.queue, (at, _NORMAL, next(self.numbers), (function, argument)))

    def run_to(self, env: simpy.Environment, done: simpy.Event) -> None:
        """Run until `done` is processed. Raises RuntimeError if no events are left before."""
        queue = self.queue
        while queue:
            entry = queue[0][3]
            if type(entry) is tuple:
                self.now = heapq.heappop(queue)[0]
                entry[0](entry[1])
            else:
                env.step()
                if done.processed:
                    return
        raise RuntimeError("no events are left, but the run has not ended")


class TwinEnvironment(simpy.Environment):
    """simpy's events and processes in the time and the queue of a clock."""

    def __init__(self) -> None:
        self.clock = TwinClock()
        super().__init__(0.0)
        self._queue: Any = self.clock.queue
        self._eid = self.clock.numbers

    @property
    def _now(self) -> float:
        return self.clock.now

    @_now.setter
    def _now(self, now: float) -> None:
        self.clock.now = now


_NO_WORK: Final = Work(0, 0)
# Seconds between two decisions of a balancer, and for an engine's turns before it is moved.
_HEARTBEAT_SECONDS: Final = 1.0
_DRAIN_SECONDS: Final = 10.0
# simpy's priority of events that are not urgent.
_NORMAL: Final = 1


class RoutedTurn:
    """A turn that waits for an engine, or runs on one."""

    def __init__(
        self,
        turn: TwinTurn,
        done: Callable[[RoutedTurn], None],
        *,
        group: str,
        key: str,
        left: int,
        previous: str | None,
    ) -> None:
        """`key`: the conversation; `group`: its query, of which `left` trajectories have not ended;
        `previous`: the engine that served the conversation before."""
        self.turn = turn
        self.done = done
        self.key = key
        self.group = group
        self.left = left
        self.previous = previous
        self.since: int | None = None
        self.work = _NO_WORK
        self.cost = 0.0
        self.concurrency = 0
        self.began = 0.0
        # Its tokens drawn by lost engines.
        self.drawn = 0
        self.engine: TwinEngine | None = None


@dataclass(slots=True)
class EngineWatch:
    """Reports of a cluster's engines: busy time, tokens, and spans if requested."""

    clock: BusyClock
    changed: Callable[[float], None]
    """Called with the time just before an engine becomes busy or idle."""
    spans: list[tuple[str, str, float, float, float]] | None = None
    """(engine, policy, from, to, mean number of running turns)."""
    response_tokens: int = 0
    read_tokens: int = 0
    turns: int = 0
    exposed_seconds: float = 0.0
    """Seconds in which weight updates kept engines from drawing: loads, and prefill of kept
    turns."""


class TwinEngine:
    """One engine: its batch, one timer, and the version that it serves."""

    def __init__(
        self,
        env: TwinEnvironment,
        engine_id: str,
        fleet: EngineFleet,
        *,
        watch: EngineWatch,
        prefix_cache: bool = True,
    ) -> None:
        """`fleet`: the engine's fleet. `prefix_cache`: whether it caches the tokens that a turn
        shares with the conversation's previous turn here."""
        self._env = env
        self._clock = env.clock
        self.engine_id = engine_id
        self.fleet = fleet
        self.rates = fleet.rates
        self.limit = fleet.limit
        self.prefix_cache = prefix_cache
        self.router: TwinRouter | None = None
        self.serving = True
        self.alive = True
        self.running: dict[RoutedTurn, None] = {}
        self._batch = EngineBatch(fleet.rates)
        self._timer_at = math.inf
        self._watch = watch
        self._since = self._counted = self._turn_seconds = 0.0
        self.drained: simpy.Event | None = None

    def admit(self, turn: RoutedTurn) -> None:
        """Run a turn, continuing from its tokens."""
        now, watch = self._clock.now, self._watch
        self._tick(now)
        if not self.running:
            watch.changed(now)
            watch.clock.change(1, now)
            self._since = self._counted = now
        if watch.spans is not None:
            self._count(now)
        turn.engine, turn.began = self, now
        self.running[turn] = None
        want = turn.turn
        read = want.prompt + turn.drawn
        if self.prefix_cache and turn.previous == self.engine_id and not turn.drawn:
            read -= want.shared
        watch.read_tokens += read
        # The other turns end later now: the timer fires early and is then set again.
        if self._batch.admit(turn, read, want.response - turn.drawn, now):
            self._reschedule()

    def update(self) -> Generator[simpy.Event, Any, None]:
        """Fetch new weights while serving, then load them."""
        if self.rates.fetch_seconds:
            yield self._env.timeout(self.rates.fetch_seconds)
        yield from self.load()

    def load(self) -> Generator[simpy.Event, Any, None]:
        """Load fetched weights: decoding stops meanwhile, and kept turns are prefilled again;
        neither for adapters."""
        if self.fleet.adapters:
            yield self._env.timeout(self.rates.load_seconds)
            return
        self._tick(self._clock.now)
        self.serving = False
        self._batch.block(math.inf, self._clock.now)
        yield self._env.timeout(self.rates.load_seconds)
        now = self._clock.now
        self._batch.advance(now)
        self._batch.unblock(now)
        kept = sum(one.turn.prompt + self._batch.drawn(one) for one in self.running)
        self._batch.read(kept, now)
        reading = kept / self.rates.prefill_tokens_per_second
        self._watch.exposed_seconds += self.rates.load_seconds + reading
        if not self.alive:
            return
        self.serving = True
        self._reschedule()
        if self.router is not None:
            self.router.wake()

    def take_turns(self) -> list[RoutedTurn]:
        """Remove all running turns, with their tokens."""
        now = self._clock.now
        self._tick(now)
        taken = list(self.running)
        for turn in taken:
            turn.drawn += self._batch.drawn(turn)
            self._batch.remove(turn)
            self._left(turn, now)
        return taken

    def drop(self, turns: Iterable[RoutedTurn]) -> None:
        """Remove running turns without their end."""
        now = self._clock.now
        self._tick(now)
        for turn in turns:
            if turn in self.running:
                self._batch.remove(turn)
                self._left(turn, now)
        self._reschedule()

    def _left(self, turn: RoutedTurn, now: float) -> None:
        if self._watch.spans is not None:
            self._count(now)
        del self.running[turn]
        if not self.running:
            self._watch.changed(now)
            self._watch.clock.change(-1, now)
            if self._watch.spans is not None and self.router is not None and now > self._since:
                level = self._turn_seconds / (now - self._since)
                span = (self.engine_id, self.router.policy, self._since, now, level)
                self._watch.spans.append(span)
            self._turn_seconds = 0.0
            if self.drained is not None and not self.drained.triggered:
                self.drained.succeed()

    def _count(self, now: float) -> None:
        self._turn_seconds += len(self.running) * (now - self._counted)
        self._counted = now

    def _tick(self, now: float) -> None:
        """Advance to now and report the turns that have ended."""
        turn: RoutedTurn
        for turn in self._batch.advance(now):
            if turn not in self.running:  # its query left at the end of another turn
                continue
            self._left(turn, now)
            self._watch.response_tokens += turn.turn.response
            self._watch.turns += 1
            assert self.router is not None
            self.router.ended(turn)

    def _on_timer(self, at: float) -> None:
        if at != self._timer_at:
            return
        self._timer_at = math.inf
        end = self._batch.next_end()
        if end is not None and end <= at:
            self._tick(at)
        self._reschedule()

    def _reschedule(self) -> None:
        """Set the timer to the next end. An early timer fires and is set again: most changes of a
        batch make ends later, and simpy cannot cancel events."""
        at = self._batch.next_end()
        if at is None or at == math.inf or at >= self._timer_at:
            return
        now = self._clock.now
        # Rounding must not let a timer fire just before its turn ends.
        at = (at if at > now else now) * (1 + 1e-12)
        self._timer_at = at
        self._clock.call(at, self._on_timer, at)


# Expected tokens of a turn before any turn of its kind has ended.
_MOST_NEW: Final = 8192


class TwinRouter:
    """Queue and engines of one policy on one rollout worker, with the calls of the live router.

    A turn waits at a full engine if the routing chose it nevertheless.
    """

    def __init__(
        self,
        policy: str,
        engines: Iterable[TwinEngine],
        rules: RoutingRules,
        *,
        max_new_tokens: int = _MOST_NEW,
    ) -> None:
        self.policy = policy
        self._rules = rules
        self._most = max_new_tokens
        self.fleet = Fleet(rules.policy, sticky=rules.sticky)
        self.profiles = Profiles()
        self._queue: TurnQueue[RoutedTurn] = TurnQueue(priority=rules.priority)
        self._bound: dict[str, deque[RoutedTurn]] = {}
        self._engines: dict[str, TwinEngine] = {}
        self._limits: dict[str, AdaptiveLimit] = {}
        self._leaving = 0
        for engine in engines:
            self.add(engine)

    @property
    def engines(self) -> Sequence[TwinEngine]:
        """The engines that serve the policy."""
        return tuple(self._engines.values())

    @property
    def backlog(self) -> int:
        """Turns that wait or run, as in the worker's heartbeat."""
        running = sum(len(one.running) for one in self._engines.values())
        return len(self._queue) + sum(map(len, self._bound.values())) + running + self._leaving

    def add(self, engine: TwinEngine) -> None:
        """Let turns go to the engine."""
        engine.router = self
        self._engines[engine.engine_id] = engine
        if self._rules.adaptive_limit and POLICIES[self._rules.policy].by_load:
            self._limits[engine.engine_id] = AdaptiveLimit(engine.limit)
        self.register(engine)
        self.wake()

    def register(self, engine: TwinEngine) -> None:
        """Register an engine, and its known properties, with the routing."""
        self.fleet.add(engine.engine_id, limit=engine.limit)

    def remove(self, engine: TwinEngine) -> None:
        """Send the engine no new turns."""
        del self._engines[engine.engine_id]
        self._limits.pop(engine.engine_id, None)
        self.fleet.remove(engine.engine_id)
        self._leaving += len(engine.running)
        for turn in self._bound.pop(engine.engine_id, ()):
            self.ask(turn)
        self.wake()

    def ask(self, turn: RoutedTurn) -> None:
        """Assign a turn to an engine, now or when one has room."""
        want = turn.turn
        kind = (want.domain, want.policy)
        left = self._most - turn.drawn
        turn.work = self.profiles.expected(kind, want.prompt + turn.drawn, left)
        engine_id = None if len(self._queue) else self._choose(turn)
        if engine_id is not None:
            self._settle(turn, engine_id)
            return
        self._enqueue(turn)
        self.wake()

    def ended(self, turn: RoutedTurn) -> None:
        """Handle the last token of a turn."""
        want, engine = turn.turn, turn.engine
        assert engine is not None
        cached = want.shared if engine.prefix_cache and turn.previous == engine.engine_id else 0
        kind = (want.domain, want.policy)
        self.profiles.observe(kind, want.prompt - cached, want.response)
        self.release(turn, want.response - turn.drawn)
        turn.done(turn)

    def release(self, turn: RoutedTurn, drawn: int) -> None:
        """Free the capacity of a turn for which its engine drew `drawn` tokens."""
        engine = turn.engine
        assert engine is not None
        engine_id = engine.engine_id
        if engine_id not in self._engines:
            self._leaving -= 1
            return
        self.fleet.take_back(engine_id, turn.cost)
        limit = self._limits.get(engine_id)
        if limit is not None and drawn:
            before, concurrency = limit.now, (turn.concurrency + len(engine.running) + 1) / 2
            limit.ended(concurrency, engine._clock.now - turn.began, drawn)
            if limit.now != before:
                self.fleet.set_limit(engine_id, limit.now)
        self.wake()

    def update(
        self, env: simpy.Environment, *, overlapping: bool = True
    ) -> Generator[simpy.Event, Any, None]:
        """Bring all engines to new weights, in waves that keep the policy serving if turns run or
        may come (`overlapping`)."""
        todo = {one.engine_id: one for one in self._engines.values()}
        while todo := {name: one for name, one in todo.items() if one.alive}:
            wave = next_wave(
                [
                    UpdatingEngine(name, frozenset(), one.serving, name in todo, len(one.running))
                    for name, one in (self._engines | todo).items()
                ],
                overlapping=overlapping,
            )
            yield env.all_of([env.process(self.update_of(todo.pop(name))) for name in wave])

    def update_of(self, engine: TwinEngine) -> Generator[simpy.Event, Any, None]:
        """Return the process that brings one engine to new weights."""
        return engine.update()

    def regroup(self, group: str, left: int) -> None:
        """Raise the priority of a query's turns: only `left` of its trajectories remain."""
        self._queue.regroup(group, left)

    def withdraw(self, groups: set[str]) -> None:
        """Remove the turns of some queries, waiting and running."""
        for turn in itertools.chain(self._queue, *self._bound.values()):
            if turn.group in groups:
                turn.done = _nothing
        for engine in self._engines.values():
            leaving = [one for one in engine.running if one.group in groups]
            if leaving:
                engine.drop(leaving)
            for turn in leaving:
                self.release(turn, 0)

    def wake(self) -> None:
        """Assign waiting turns to engines with room."""
        if self._bound:
            self._wake_bound()
        queue = self._queue
        if not len(queue):
            return
        self.fleet.look_again()
        while (turn := queue.peek()) is not None:
            if turn.done is _nothing:
                queue.pop()
                continue
            engine_id = self._choose(turn)
            if engine_id is None:
                return
            # Removed before it is assigned: its engine may end other turns, which wake this queue.
            queue.pop()
            self._settle(turn, engine_id)

    def _wake_bound(self) -> None:
        for engine_id, waiting in list(self._bound.items()):
            engine = self._engines[engine_id]
            while waiting and not (engine.serving and not self.fleet.has_room(engine_id)):
                turn = waiting.popleft()
                self.fleet.leave(engine_id, turn.cost)
                if turn.done is _nothing:
                    continue
                if engine.serving:
                    self._give(engine, turn)
                else:  # another one is chosen
                    self._enqueue(turn)
            if not waiting:
                self._bound.pop(engine_id, None)

    def _choose(self, turn: RoutedTurn) -> str | None:
        return self.fleet.choose(
            turn.work,
            self._serves,
            previous=turn.previous,
            classes=self.classes(turn.turn),
            key=turn.key,
        )

    def classes(self, turn: TwinTurn) -> Sequence[str]:
        """Return the device classes that suit a turn, best first; empty: all engines are alike."""
        return ()

    def _settle(self, turn: RoutedTurn, engine_id: str) -> None:
        """Assign a turn to the chosen engine, or let it wait there."""
        if self.fleet.has_room(engine_id):
            self._give(self._engines[engine_id], turn)
        else:
            turn.cost = self.fleet.wait(engine_id, turn.work)
            self._bound.setdefault(engine_id, deque()).append(turn)

    def _give(self, engine: TwinEngine, turn: RoutedTurn) -> None:
        turn.cost = self.fleet.give(engine.engine_id, turn.work)
        turn.concurrency = len(engine.running) + 1
        engine.admit(turn)

    def _enqueue(self, turn: RoutedTurn) -> None:
        entry = self._queue.push(
            turn,
            group=turn.group,
            left=turn.left,
            places=self.fleet.places,
            since=turn.since,
        )
        turn.since = entry.since

    def _serves(self, engine_id: str) -> bool:
        return self._engines[engine_id].serving


def _nothing(turn: RoutedTurn) -> None:
    """Ignore the end of a turn without a waiter."""


class TwinBalancer:
    """The balancer of one rollout worker's engines between its policies, at every heartbeat."""

    def __init__(
        self,
        env: TwinEnvironment,
        routers: Sequence[TwinRouter],
        rules: balancing.BalancingRules,
        *,
        minimum: Mapping[str, int],
        barred: Collection[balancing.Pair] = (),
    ) -> None:
        """`minimum`: by policy, the number of engines that it keeps. `barred`: (source, target)
        pairs of policies between which no engine moves."""
        self._env = env
        self._routers = {one.policy: one for one in routers}
        self._rules = rules
        self._minimum, self._barred = minimum, barred
        self._memory = balancing.Memory()
        self._moving: dict[str, tuple[TwinEngine, str]] = {}
        self.moves = 0

    def run(self) -> Generator[simpy.Event, Any, None]:
        """Decide at every heartbeat."""
        while True:
            yield self._env.timeout(_HEARTBEAT_SECONDS)
            self.look()

    def look(self) -> None:
        """Decide once."""
        demands = [
            balancing.Demand(name, float(router.backlog), self._minimum[name])
            for name, router in self._routers.items()
        ]
        assignments = [
            balancing.EngineAssignment(
                engine.engine_id, name, serving=engine.serving, work=float(len(engine.running))
            )
            for name, router in self._routers.items()
            for engine in router.engines
        ]
        assignments += [
            balancing.EngineAssignment(
                engine.engine_id,
                target,
                serving=False,
                moving=True,
                work=float(len(engine.running)),
            )
            for engine, target in self._moving.values()
        ]
        moves, self._memory = balancing.decide(
            self._rules,
            self._memory,
            demands,
            assignments,
            self._env.now,
            barred=self._barred,
        )
        for move in moves:
            router = self._routers[move.source]
            engine = next(one for one in router.engines if one.engine_id == move.engine_id)
            self._moving[move.engine_id] = (engine, move.target)
            self._env.process(self._move(engine, router, move))

    def _move(
        self, engine: TwinEngine, source: TwinRouter, move: balancing.Move
    ) -> Generator[simpy.Event, Any, None]:
        source.remove(engine)
        if engine.running:
            engine.drained = self._env.event()
            yield engine.drained | self._env.timeout(_DRAIN_SECONDS)
            engine.drained = None
            for turn in engine.take_turns():
                source.release(turn, 0)
                turn.previous = None
                source.ask(turn)
        # The model is the same, so the engine only loads other weights.
        yield self._env.timeout(engine.rates.load_seconds)
        del self._moving[move.engine_id]
        self._memory = balancing.succeeded(self._memory, move.source, move.target)
        self.moves += 1
        if engine.alive:
            self._routers[move.target].add(engine)
