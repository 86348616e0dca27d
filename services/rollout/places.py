"""The places that a policy's engines have for turns, and the turns that wait for one.

What is decided is decided in `troupe.scheduling`: which engine (`routing`), who goes first
(`queueing`), how many turns an engine gets (`concurrency`), which devices fit (`affinity`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from services.rollout.engines.base import Engine, Generation, SamplingParams
from troupe.job import RoutingSpec
from troupe.rpc.errors import AlreadyExists, NotFound
from troupe.scheduling.affinity import Profiles, classes_for
from troupe.scheduling.concurrency import AdaptiveLimit
from troupe.scheduling.queueing import Entry, TurnQueue
from troupe.scheduling.routing import Fleet, Rates, Work

NOTHING: Final = Work(0, 0)


@dataclass(frozen=True, slots=True)
class Backlog:
    """What a policy has to do. `outstanding_tokens`: prompt tokens and the response tokens that are
    expected, over the turns that wait and those in flight."""

    waiting: int
    in_flight: int
    outstanding_tokens: int


@dataclass(slots=True, eq=False)
class Slot:
    """An engine with what was given to it."""

    engine: Engine
    limit: AdaptiveLimit | None
    in_flight: int = 0
    outstanding: float = 0.0
    removed: bool = False


@dataclass(slots=True)
class Home:
    """Where a trajectory's turns of one policy went last: its prefix is cached there."""

    slot: Slot | None = None

    @property
    def engine_id(self) -> str | None:
        """The engine, unless it has been removed since: coming back, it has another cache."""
        return None if self.slot is None or self.slot.removed else self.slot.engine.engine_id


@dataclass(slots=True, eq=False)
class Place:
    """One turn's place on an engine. `beside`: turns that the engine then had, itself included."""

    slot: Slot
    work: Work
    cost: float
    beside: int


@dataclass(slots=True, eq=False)
class Asker:
    """A turn as the places see it.

    `group` and `left`: its query, and how many trajectories of that have not ended; `key` names the
    conversation; `bound`: the one engine that it waits for; `since`: its place in the order of
    those that wait, kept when it comes back.
    """

    home: Home
    domain: str = ""
    agent: str = ""
    group: str = ""
    left: int = 0
    key: str = ""
    work: Work = NOTHING
    bound: str | None = None
    since: int | None = None
    granted: asyncio.Future[Place] | None = None
    queue: TurnQueue[Asker] | None = None
    entry: Entry[Asker] | None = None

    @property
    def waits(self) -> bool:
        """Whether somebody still wants the place: a cancelled turn does not."""
        return self.granted is not None and not self.granted.done()

    def grant(self, place: Place) -> None:
        """Here it is."""
        assert self.granted is not None
        self.granted.set_result(place)

    def refuse(self, error: Exception) -> None:
        """There will be none."""
        if self.granted is not None and not self.granted.done():
            self.granted.set_exception(error)

    def leave(self) -> None:
        """Wait no more."""
        if self.queue is not None and self.entry is not None:
            self.queue.remove(self.entry)
        self.granted = self.queue = self.entry = None


class Places:
    """Engines and queue of one policy. Lives on one event loop."""

    def __init__(
        self, policy: str, spec: RoutingSpec, *, limit: int, may_serve: Callable[[Engine], bool]
    ) -> None:
        self._policy = policy
        self._spec = spec
        self._limit = limit
        self._may_serve = may_serve
        self._slots: dict[str, Slot] = {}
        # Removed engines that still have turns.
        self._leaving: set[Slot] = set()
        self._fleet = Fleet(spec.policy, sticky=spec.sticky)
        self._rates: dict[str, Rates] = {}
        self._profiles = Profiles()
        self._queue = self._new_queue()
        # Turns that wait for one engine, whatever the others do (static policies).
        self._bound: dict[str, TurnQueue[Asker]] = {}

    def __iter__(self) -> Iterator[Engine]:
        return (slot.engine for slot in self._slots.values())

    @property
    def waiting(self) -> int:
        """Turns that no engine has yet."""
        return len(self._queue) + sum(map(len, self._bound.values()))

    @property
    def in_flight(self) -> int:
        """Turns that an engine has, engines that were removed included."""
        return sum(slot.in_flight for slot in (*self._slots.values(), *self._leaving))

    @property
    def backlog(self) -> Backlog:
        """What there is to do. O(engines + turns waiting)."""
        tokens = sum(slot.outstanding for slot in (*self._slots.values(), *self._leaving))
        for queue in (self._queue, *self._bound.values()):
            tokens += sum(a.work.prompt_tokens + a.work.response_tokens for a in queue)
        return Backlog(self.waiting, self.in_flight, round(tokens))

    def limit_of(self, engine_id: str) -> int:
        """Turns that the engine may have at once now."""
        limit = self._slots[engine_id].limit
        return self._limit if limit is None else limit.now

    def add(self, engine: Engine) -> None:
        """From now on turns may go to `engine`. Raises `AlreadyExists`."""
        if engine.engine_id in self._slots:
            raise AlreadyExists(
                f"policy '{self._policy}' has this engine already",
                field="engine_id",
                value=engine.engine_id,
            )
        adaptive = self._spec.adaptive_limit and self._spec.policy == "least_work"
        slot = Slot(engine, AdaptiveLimit(self._limit) if adaptive else None)
        self._slots[engine.engine_id] = slot
        device = engine.device
        rates = None
        if device.prefill_tokens_per_second and device.decode_tokens_per_second:
            rates = Rates(device.prefill_tokens_per_second, device.decode_tokens_per_second)
        self._fleet.add(
            engine.engine_id, limit=self._limit, device_class=device.device_class, rates=rates
        )
        self._rates = self._fleet.rates
        self.wake()

    def remove(self, engine_id: str) -> None:
        """No new turn goes to the engine; those that it has go on. Raises `NotFound`."""
        slot = self._slots.pop(engine_id, None)
        if slot is None:
            raise NotFound(
                f"policy '{self._policy}' has no such engine",
                field="engine_id",
                value=engine_id,
                remedy=f"Known: {', '.join(self._slots) or 'none'}.",
            )
        self._fleet.remove(engine_id)
        self._rates = self._fleet.rates
        slot.removed = True
        if slot.in_flight:
            self._leaving.add(slot)
        self.wake()

    def expect(self, asker: Asker, prompt_tokens: int, sampling: SamplingParams) -> None:
        """Say what the turn will cost, before it is taken in."""
        kind = (asker.domain, asker.agent)
        asker.work = self._profiles.expected(kind, prompt_tokens, sampling.max_new_tokens)

    async def take(self, asker: Asker, seconds: float) -> Place:
        """A place on an engine that serves. Raises `TimeoutError` after `seconds`."""
        if not self._queue:
            place = self._offer(asker)
            if place is not None:
                return place
        granted: asyncio.Future[Place] = asyncio.get_running_loop().create_future()
        asker.granted = granted
        self._line_up(asker)
        self.wake()
        try:
            async with asyncio.timeout(seconds):
                return await granted
        except BaseException:
            if granted.done() and not granted.cancelled() and granted.exception() is None:
                self.give_back(granted.result())  # it was granted as we gave up
            raise
        finally:
            asker.leave()

    def give_back(self, place: Place, drawn: Generation | None = None) -> None:
        """The turn has left its engine, which drew `drawn`."""
        slot = place.slot
        beside = (place.beside + slot.in_flight) / 2
        slot.in_flight -= 1
        slot.outstanding -= place.work.prompt_tokens + place.work.response_tokens
        if slot.removed:
            if not slot.in_flight:
                self._leaving.discard(slot)
            return
        engine_id = slot.engine.engine_id
        self._fleet.take_back(engine_id, place.cost)
        if drawn is not None and slot.limit is not None:
            slot.limit.ended(beside, drawn.generate_seconds, len(drawn.token_ids))
            self._fleet.set_limit(engine_id, slot.limit.now)
        self.wake()

    def learn(self, asker: Asker, prompt_tokens: int, generation: Generation) -> None:
        """What such turns are like."""
        read = prompt_tokens - generation.cached_tokens
        self._profiles.observe((asker.domain, asker.agent), read, len(generation.token_ids))

    def regroup(self, group: str, left: int) -> None:
        """Of `group` only `left` trajectories are left."""
        for queue in (self._queue, *self._bound.values()):
            queue.regroup(group, left)

    def wake(self) -> None:
        """Give places to turns that wait; call when an engine may serve again."""
        self._fleet.look_again()
        for engine_id in list(self._bound):
            self._wake_bound(engine_id)
        while (asker := self._queue.peek()) is not None:
            place = None
            if asker.waits:
                place = self._offer(asker)
                if place is None and asker.bound is None:
                    return
            self._queue.pop()
            if place is not None:
                asker.grant(place)
            elif asker.waits:  # for one engine that is full
                self._line_up(asker)

    def refuse(self, error: Callable[[], Exception]) -> None:
        """Everybody who waits is told."""
        for queue in (self._queue, *self._bound.values()):
            while queue:
                queue.pop().refuse(error())

    def _offer(self, asker: Asker) -> Place | None:
        """A place now. Under a static policy the asker is bound to its engine if that is full."""
        engine_id, asker.bound = asker.bound, None
        if engine_id is None or not self._serves(engine_id):
            engine_id = self._choose(asker)
        if engine_id is None:
            return None
        slot = asker.home.slot = self._slots[engine_id]
        if not self._fleet.has_room(engine_id):
            asker.bound = engine_id
            return None
        slot.in_flight += 1
        slot.outstanding += asker.work.prompt_tokens + asker.work.response_tokens
        cost = self._fleet.give(engine_id, asker.work)
        return Place(slot, asker.work, cost, slot.in_flight)

    def _choose(self, asker: Asker) -> str | None:
        affinity, kind = self._spec.affinity, (asker.domain, asker.agent)
        return self._fleet.choose(
            asker.work,
            self._serves,
            home=asker.home.engine_id,
            classes=classes_for(
                *kind,
                by_domain=affinity.domains,
                by_agent=affinity.agents,
                default=affinity.default,
                inferred=self._profiles.fitting(kind, self._rates) if affinity.infer else None,
            ),
            key=asker.key,
        )

    def _line_up(self, asker: Asker) -> None:
        queue = self._queue
        if asker.bound is not None:
            queue = self._bound.setdefault(asker.bound, self._new_queue())
        asker.queue = queue
        asker.entry = queue.push(
            asker,
            group=asker.group,
            left=asker.left,
            places=self._fleet.places,
            since=asker.since,
        )
        asker.since = asker.entry.since

    def _wake_bound(self, engine_id: str) -> None:
        queue = self._bound[engine_id]
        serves = self._serves(engine_id)
        while queue and not (serves and not self._fleet.has_room(engine_id)):
            asker = queue.pop()
            if asker.waits:
                # Its engine has room; or serves no more, and it finds another.
                place = self._offer(asker)
                if place is None:
                    self._line_up(asker)
                else:
                    asker.grant(place)
        if not queue:
            del self._bound[engine_id]

    def _serves(self, engine_id: str) -> bool:
        slot = self._slots.get(engine_id)
        return slot is not None and self._may_serve(slot.engine)

    def _new_queue(self) -> TurnQueue[Asker]:
        return TurnQueue(priority=self._spec.priority)
