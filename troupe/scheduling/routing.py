"""Routing: the engine of a policy that serves a turn, the order of waiting turns, the number of
turns that an engine runs at once, and the engines that load new weights at the same time.

`least_work` routes a conversation to the engine that served it before, because that engine holds
its prefix, and lets a long one wait there while that engine is full; otherwise to the engine with
the least outstanding work. Work is counted in tokens, because responses differ 5-9x in length, and
weighted by the engine's tokens per second where they are known. Ties rotate, because fresh engines
are all equal and the first would get everything.
`round_robin` and `random_hash` ignore load and are baselines: they assign conversations in turn, or
by a hash of their id.

`next_wave` says which engines load new weights at the same time. A load takes as long for many
engines as for one where each has its own device: an update of all of them should take two loads,
not one per engine. But the policy must never stop serving. So half of those that serve load at a
time, never two on the same device.
"""

from __future__ import annotations

import heapq
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Generic, TypeAlias, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Routing:
    """A way to choose engines for turns."""

    first: Callable[[str, int], int] | None = None
    """Of a way that ignores load: the number of the engine to look at first, from the
    conversation's key and the number after the engine that was chosen last. None: by load."""

    @property
    def by_load(self) -> bool:
        """Whether it looks at the engines' work, and so heeds device classes and limits turns."""
        return self.first is None


LEAST_WORK: Final = "least_work"
POLICIES: Final[Mapping[str, Routing]] = {
    LEAST_WORK: Routing(),
    "round_robin": Routing(lambda key, following: following),
    "random_hash": Routing(lambda key, following: zlib.crc32(key.encode())),
}
"""By `agents.X.pool.routing.policy` of a job."""

Policy: TypeAlias = str
"""A name in `POLICIES`."""

# A conversation that moves to another engine is read again from its beginning. Staying pays while
# the extra wait is shorter than that: up to half more work than the least loaded engine has, plus
# about the prompt of a long conversation. The same holds for a turn that would leave its fitting
# device class.
STAY_RATIO: Final = 1.5
STAY_SLACK_TOKENS: Final = 2048


class Work:
    """Cost of a turn: prompt tokens to read and expected response tokens."""

    __slots__ = ("prompt_tokens", "response_tokens")

    def __init__(self, prompt_tokens: float, response_tokens: float) -> None:
        self.prompt_tokens = prompt_tokens
        self.response_tokens = response_tokens


@dataclass(frozen=True, slots=True)
class Rates:
    """Tokens per second of one engine: prompt tokens, and response tokens over all its turns."""

    prefill: float
    decode: float

    def seconds(self, work: Work) -> float:
        """Return the engine time of `work` in seconds."""
        return work.prompt_tokens / self.prefill + work.response_tokens / self.decode


@dataclass(slots=True, eq=False)
class _Member:
    engine_id: str
    device_class: str
    rates: Rates | None
    limit: int
    # Whether what the engine stands on, with other policies' engines, takes another turn.
    room: Callable[[], bool]
    in_flight: int = 0
    outstanding: float = 0.0
    # Turns that wait for this engine alone, and their work.
    waiters: int = 0
    waiting: float = 0.0
    # Changes with every update of the engine; heap entries with another stamp are outdated.
    stamp: int = 0

    @property
    def has_room(self) -> bool:
        return self.in_flight < self.limit and self.room()

    @property
    def load(self) -> float:
        return self.outstanding + self.waiting


class Fleet:
    """The engines of one policy with the turns that each was given.

    `choose` costs O(device classes + log engines), amortised. Outstanding work is in tokens; where
    rates are known, in tokens that an average engine of the fleet would have drawn in the same
    time.
    """

    def __init__(self, policy: Policy = LEAST_WORK, *, sticky: bool = True) -> None:
        self._routing = POLICIES[policy]
        self._sticky = sticky
        self._members: dict[str, _Member] = {}
        self._order: list[str] = []
        self._next = 0
        self._changes = 0
        # Per device class: (work, turns, stamp, id). The oldest stamp first rotates ties.
        self._heaps: dict[str, list[tuple[float, int, int, str]]] = {}
        # Engines that did not serve when they were last looked at.
        self._aside: set[str] = set()
        self._drawn_per_second = 1.0
        self.places = 0
        """Sum of the engines' limits."""

    @property
    def rates(self) -> dict[str, Rates]:
        """Average rates of the engines of each device class; classes without known rates are
        missing."""
        known: dict[str, list[Rates]] = {}
        for member in self._members.values():
            if member.rates is not None:
                known.setdefault(member.device_class, []).append(member.rates)
        return {
            name: Rates(
                sum(r.prefill for r in rates) / len(rates),
                sum(r.decode for r in rates) / len(rates),
            )
            for name, rates in known.items()
        }

    def add(
        self,
        engine_id: str,
        *,
        limit: int,
        device_class: str = "",
        rates: Rates | None = None,
        room: Callable[[], bool] = lambda: True,
    ) -> None:
        """Add an engine that may run `limit` turns at once, while `room()`; after a change of that
        call `room_changed`. Raises `ValueError` for a known id."""
        if engine_id in self._members:
            raise ValueError(f"engine_id = {engine_id} is in the fleet already")
        member = _Member(engine_id, device_class, rates, limit, room)
        self._members[engine_id] = member
        self._order.append(engine_id)
        self.places += limit
        self._weigh()
        self._heaps.setdefault(device_class, [])
        self._changed(member)

    def remove(self, engine_id: str) -> None:
        """Forget an engine. Raises `KeyError`."""
        self.places -= self._members.pop(engine_id).limit
        self._order.remove(engine_id)
        self._aside.discard(engine_id)
        self._weigh()

    def set_limit(self, engine_id: str, limit: int) -> None:
        """Change the engine's limit; turns beyond a lower one run to their end."""
        member = self._members[engine_id]
        if member.limit != limit:
            self.places += limit - member.limit
            member.limit = limit
            self._changed(member)

    def room_changed(self, engine_id: str) -> None:
        """Consider anew whether the engine has room."""
        self._changed(self._members[engine_id])

    def has_room(self, engine_id: str) -> bool:
        """Return whether the engine may get another turn."""
        return self._members[engine_id].has_room

    def look_again(self) -> None:
        """Reconsider engines that did not serve when they were last looked at."""
        for engine_id in self._aside:
            self._changed(self._members[engine_id])
        self._aside.clear()

    def choose(
        self,
        work: Work,
        serves: Callable[[str], bool],
        *,
        previous: str | None = None,
        classes: Sequence[str] = (),
        key: str = "",
    ) -> str | None:
        """Return the engine for a turn; None if none that serves has room, so that the turn must
        wait.

        `previous` is the engine that served the conversation before, `classes` are fitting device
        classes, best first, `key` names the conversation. The chosen engine may be full:
        `previous` of a long conversation, and what a static policy chooses; the turn then waits for
        that engine (`wait`).
        """
        sticky = None
        if self._sticky and previous in self._members and serves(previous):
            sticky = self._members[previous]
        if self._routing.first is not None:
            if sticky is not None:
                return sticky.engine_id
            return self._choose_static(self._routing.first(key, self._next), serves)
        open_ = self._open(serves)
        if not open_ and self._aside:
            self.look_again()
            open_ = self._open(serves)
        if not open_:
            return None
        if len(open_) == 1:
            (best,) = open_.values()
        else:
            best = min(open_.values(), key=lambda m: self._finish(m, work))
            for name in classes:
                fitting = open_.get(name)
                if fitting is not None and not self._leaves(fitting, best, work):
                    best = fitting
                    break
        if sticky is None or sticky is best:
            return best.engine_id
        # Long conversations wait for a full engine: elsewhere they would be read from the beginning
        # and take the places of others, which would move in their turn.
        if not sticky.has_room and work.prompt_tokens < STAY_SLACK_TOKENS:
            return best.engine_id
        return (best if self._leaves(sticky, best, work) else sticky).engine_id

    def give(self, engine_id: str, work: Work) -> float:
        """Assign a turn to the engine; return the cost that it adds to the outstanding work."""
        member = self._members[engine_id]
        cost = self._cost(member, work)
        member.in_flight += 1
        member.outstanding += cost
        self._changed(member)
        return cost

    def take_back(self, engine_id: str, cost: float) -> None:
        """Remove a turn that added `cost`. Raises `KeyError`."""
        member = self._members[engine_id]
        member.in_flight -= 1
        # A sum of fractions never returns to exactly zero, so ties would be lost.
        member.outstanding = member.outstanding - cost if member.in_flight else 0.0
        self._changed(member)

    def wait(self, engine_id: str, work: Work) -> float:
        """Count a turn that waits for this engine alone; return its cost. Raises `KeyError`."""
        member = self._members[engine_id]
        cost = self._cost(member, work)
        member.waiters += 1
        member.waiting += cost
        self._changed(member)
        return cost

    def leave(self, engine_id: str, cost: float) -> None:
        """Remove a waiting turn that added `cost`; nothing if the engine was removed."""
        member = self._members.get(engine_id)
        if member is not None and member.waiters:
            member.waiters -= 1
            member.waiting = member.waiting - cost if member.waiters else 0.0
            self._changed(member)

    def _choose_static(self, start: int, serves: Callable[[str], bool]) -> str | None:
        count = len(self._order)
        for step in range(count):
            engine_id = self._order[(start + step) % count]
            if serves(engine_id):
                self._next = start + step + 1
                return engine_id
        return None

    def _open(self, serves: Callable[[str], bool]) -> dict[str, _Member]:
        """Find the engine with the least work in each device class, if one has room."""
        found = {}
        for name in self._heaps:
            if (member := self._least(name, serves)) is not None:
                found[name] = member
        return found

    def _least(self, device_class: str, serves: Callable[[str], bool]) -> _Member | None:
        heap = self._heaps[device_class]
        while heap:
            entry = heap[0]
            engine_id = entry[3]
            member = self._members.get(engine_id)
            if member is not None and member.stamp == entry[2] and member.has_room:
                if serves(engine_id):
                    return member
                self._aside.add(engine_id)
            heapq.heappop(heap)
        return None

    def _changed(self, member: _Member) -> None:
        self._changes += 1
        member.stamp = self._changes
        if not member.has_room:  # its entry is added when it has
            return
        heap = self._heaps[member.device_class]
        heapq.heappush(heap, (member.load, member.in_flight, member.stamp, member.engine_id))
        if len(heap) > 4 * len(self._members) + 64:
            known = self._members
            heap[:] = [e for e in heap if e[3] in known and known[e[3]].stamp == e[2]]
            heapq.heapify(heap)

    def _weigh(self) -> None:
        known = [m.rates.decode for m in self._members.values() if m.rates is not None]
        self._drawn_per_second = sum(known) / len(known) if known else 1.0

    def _cost(self, member: _Member, work: Work) -> float:
        if member.rates is None:
            return work.prompt_tokens + work.response_tokens
        return member.rates.seconds(work) * self._drawn_per_second

    def _finish(self, member: _Member, work: Work) -> tuple[float, int, int]:
        own = self._cost(member, work) if member.rates is not None else 0.0
        return (member.load + own, member.in_flight, member.stamp)

    def _leaves(self, here: _Member, there: _Member, work: Work) -> bool:
        return overloaded(self._finish(here, work)[0], self._finish(there, work)[0])


def overloaded(tokens: float, least_tokens: float) -> bool:
    """Return whether an engine has so much more work than the least loaded one that conversations
    move away."""
    return tokens > STAY_RATIO * least_tokens + STAY_SLACK_TOKENS


# Weight of the newest turn in the averages of its kind.
_NEWEST: Final = 0.05
# Turns of a kind that are seen before anything is inferred from them.
SEEN: Final = 8
# A class is preferred when a kind of turn gains at least this factor over the worst class.
LEAST_AFFINITY_GAIN: Final = 1.1


@dataclass(slots=True)
class _Profile:
    prompt: float = 0.0
    response: float = 0.0
    seen: int = 0

    def add(self, prompt: float, response: float) -> None:
        self.seen += 1
        part = 1 / self.seen if self.seen * _NEWEST < 1 else _NEWEST
        self.prompt += part * (prompt - self.prompt)
        self.response += part * (response - self.response)


class Profiles:
    """Average token counts of one policy's turns, by kind: (domain, agent)."""

    def __init__(self) -> None:
        self._kinds: dict[tuple[str, str], _Profile] = {}
        self._all = _Profile()

    def observe(self, kind: tuple[str, str], read_tokens: int, response_tokens: int) -> None:
        """Record a finished turn: prompt tokens that no cache held, and response tokens."""
        if (profile := self._kinds.get(kind)) is None:
            profile = self._kinds[kind] = _Profile()
        profile.add(read_tokens, response_tokens)
        self._all.add(read_tokens, response_tokens)

    def expected(self, kind: tuple[str, str], prompt_tokens: int, max_new_tokens: int) -> Work:
        """Return the expected cost of a turn: its response is as long as the average of its
        kind."""
        profile = self._kinds.get(kind)
        if profile is None or profile.seen < SEEN:
            return Work(prompt_tokens, max_new_tokens)
        return Work(prompt_tokens, min(profile.response, max_new_tokens))

    def fitting(self, kind: tuple[str, str], rates: Mapping[str, Rates]) -> str | None:
        """Return the device class on which this kind of turn gains most over the average turn; None
        when too little is known or the gain is below `LEAST_AFFINITY_GAIN`.

        Not the class on which it is fastest: if one class were faster at everything, every kind
        would want it and the other would idle (comparative advantage).
        """
        profile = self._kinds.get(kind)
        if profile is None or profile.seen < SEEN or len(rates) < 2:
            return None
        own = Work(profile.prompt, profile.response)
        usual = Work(self._all.prompt, self._all.response)
        cost = {name: r.seconds(own) / (r.seconds(usual) or 1.0) for name, r in rates.items()}
        best = min(cost, key=lambda name: (cost[name], name))
        return best if max(cost.values()) >= LEAST_AFFINITY_GAIN * cost[best] else None


def classes_for(
    domain: str,
    agent: str,
    *,
    by_domain: Mapping[str, str],
    by_agent: Mapping[str, str],
    default: str,
    inferred: str | None,
) -> tuple[str, ...]:
    """Return the device classes for a turn, best first: declared for its domain, for its agent, or
    inferred; then the default class."""
    if not (by_domain or by_agent or default or inferred):
        return ()
    declared = by_domain.get(domain) if domain else None
    fitting = declared or by_agent.get(agent) or inferred
    return tuple(dict.fromkeys(name for name in (fitting, default) if name))


# Trajectories beyond this number do not lower a turn's priority further.
MOST_LEFT: Final = 16


class WaitingTurn(Generic[T]):
    """A queued turn. `since`: number of turns that had been served when it arrived."""

    __slots__ = ("group", "item", "key", "number", "patience", "since", "waits")

    def __init__(self, item: T, group: str, since: int, number: int, patience: int) -> None:
        self.item = item
        self.group = group
        self.since = since
        self.number = number
        self.patience = patience
        self.key = 0
        self.waits = True


class TurnQueue(Generic[T]):
    """Turns by priority: the one whose group has the fewest trajectories left goes first.
    Operations cost O(log turns); `regroup` that much per turn of the group."""

    def __init__(self, *, priority: bool = True) -> None:
        """Without `priority` turns are served in order of arrival."""
        self._priority = priority
        self._heap: list[tuple[int, int, WaitingTurn[T]]] = []
        self._groups: dict[str, set[WaitingTurn[T]]] = {}
        self._count = 0
        self._waiting = 0
        self.served = 0
        """Number of turns that left by `pop`: the clock of this queue."""

    def __len__(self) -> int:
        return self._waiting

    def __iter__(self) -> Iterator[T]:
        """Return the waiting turns, in no order."""
        return (entry.item for key, _, entry in self._heap if entry.waits and key == entry.key)

    def push(
        self, item: T, *, group: str = "", left: int = 0, places: int = 1, since: int | None = None
    ) -> WaitingTurn[T]:
        """Queue `item`. `left`: trajectories of its group that have not ended; `places`: turns that
        all engines may run at once; `since`: the clock at the first arrival, for a turn that comes
        back."""
        self._count += 1
        entry = WaitingTurn(
            item, group, self.served if since is None else since, self._count, max(1, places)
        )
        entry.key = self._key(entry, left)
        self._waiting += 1
        if group and self._priority:
            self._groups.setdefault(group, set()).add(entry)
        self._put(entry)
        return entry

    def regroup(self, group: str, left: int) -> None:
        """Raise the priority of a group's turns, since only `left` of its trajectories remain.
        Priority never falls."""
        for entry in self._groups.get(group, ()):
            key = self._key(entry, left)
            if key < entry.key:
                entry.key = key
                self._put(entry)

    def peek(self) -> T | None:
        """Return the turn that is served next; None when the queue is empty."""
        while self._heap:
            key, _, entry = self._heap[0]
            if entry.waits and key == entry.key:
                return entry.item
            heapq.heappop(self._heap)
        return None

    def pop(self) -> T:
        """Remove and return the turn that is served next. Raises `IndexError`."""
        item = self.peek()
        if item is None:
            raise IndexError("nothing waits")
        self._leave(self._heap[0][2])
        heapq.heappop(self._heap)
        self.served += 1
        return item

    def remove(self, entry: WaitingTurn[T]) -> None:
        """Remove a cancelled turn. Repeatable."""
        if entry.waits:
            self._leave(entry)
            if len(self._heap) > 2 * self._waiting + 64:
                self._heap = [(k, n, e) for k, n, e in self._heap if e.waits and k == e.key]
                heapq.heapify(self._heap)

    def _leave(self, entry: WaitingTurn[T]) -> None:
        entry.waits = False
        self._waiting -= 1
        members = self._groups.get(entry.group)
        if members is not None:
            members.discard(entry)
            if not members:
                del self._groups[entry.group]

    def _key(self, entry: WaitingTurn[T], left: int) -> int:
        return entry.since + (min(left, MOST_LEFT) * entry.patience if self._priority else 0)

    def _put(self, entry: WaitingTurn[T]) -> None:
        heapq.heappush(self._heap, (entry.key, entry.number, entry))


# A further 1 % of turns must raise throughput by at least this part of 1 %.
LEAST_CONCURRENCY_GAIN: Final = 0.03
# Weight of earlier observations that remains after a window.
MEMORY: Final = 0.8
# Below this relative standard deviation of n its effect on t cannot be estimated.
LEAST_SPREAD: Final = 0.05
STEP_UP: Final = 0.125
STEP_DOWN: Final = 0.8
# Turns that must end between two changes of the limit, or as many as the limit if that is more.
WINDOW_TURNS: Final = 16


class AdaptiveLimit:
    """How many turns one engine should run at once, in [1, `most`], learned from its speed.

    Fits seconds per token t against the number n of other concurrent turns (least squares, t = base
    + slope n) and stops where a further turn hardly raises throughput n / t. Starts at `most`,
    because too few turns cost throughput at once.
    """

    def __init__(self, most: int) -> None:
        if most < 1:
            raise ValueError(f"most = {most}: an engine needs a place for one turn")
        self._most = most
        self._limit = float(most)
        self._ended = 0
        self._reached = False
        # Token-weighted sums over turns: 1, n, t, n n, n t.
        self._sums = [0.0] * 5
        self.now = most
        """The current limit."""

    def ended(self, in_flight: float, seconds: float, tokens: int) -> None:
        """Record a turn: `tokens` drawn in `seconds`, with `in_flight` turns on the engine, itself
        included. Turns without tokens are ignored."""
        if tokens < 1 or seconds <= 0 or in_flight < 1:
            return
        n, t = in_flight, seconds / tokens
        sums, now = self._sums, self.now
        sums[0] += tokens
        sums[1] += tokens * n
        sums[2] += tokens * t
        sums[3] += tokens * (n * n)
        sums[4] += tokens * (n * t)
        self._reached = self._reached or in_flight >= now - 0.5
        self._ended += 1
        if self._ended >= max(WINDOW_TURNS, now):
            self._adapt()
            self.now = max(1, min(self._most, int(self._limit)))
            self._ended, self._reached = 0, False
            self._sums = [MEMORY * value for value in self._sums]

    def best(self) -> float | None:
        """Return the number of turns beyond which throughput hardly grows; infinite when no such
        point is in sight, 0 when throughput falls already, None when too little is known."""
        weight, n, t, nn, nt = self._sums
        if not weight:
            return None
        n, t, nn, nt = n / weight, t / weight, nn / weight, nt / weight
        variance = nn - n * n
        if variance <= (LEAST_SPREAD * n) ** 2:
            return None
        slope = (nt - n * t) / variance
        base = t - slope * n
        if slope <= 0:
            return float("inf")
        return max(0.0, base * (1 - LEAST_CONCURRENCY_GAIN) / (slope * LEAST_CONCURRENCY_GAIN))

    def _adapt(self) -> None:
        best = self.best()
        if best is None or best >= self._limit:
            if self._reached:  # a limit that was not reached is not raised
                self._limit = min(self._most, self._limit + max(1.0, STEP_UP * self._limit))
        else:
            self._limit = max(1.0, best, STEP_DOWN * self._limit)


@dataclass(frozen=True, slots=True)
class UpdatingEngine:
    """One engine of a policy whose weights are being replaced.

    `devices`: what it computes on, by any names that tell them apart; empty where it is not known,
    or shared with no engine. `serves`: turns may go to it, with whatever version. `waits`: its turn
    to load has not come yet.
    """

    engine_id: str
    devices: frozenset[str]
    serves: bool
    waits: bool
    turns: int = 0
    """In flight on it."""
    together: bool = False
    """Whether it loads from the trainer's device, which sends to all such engines at once."""


def next_wave(engines: Sequence[UpdatingEngine], *, overlapping: bool = True) -> tuple[str, ...]:
    """Return the ids of the waiting engines that load next; empty when none waits. `overlapping`:
    turns may come at any time, as where a step's trajectories run while the step before is trained.

    All `engines` of the policy count, also those that have loaded: what they serve is what goes on.
    Of S serving ones at least S // 2 go on, a single one excepted; none where no turn runs and, as
    steps do not overlap, none comes before the update has ended. Engines that do not serve load
    at once, then those with the fewest turns; of engines with a device in common one is in a wave.
    Of engines that load `together` none waits for another: one load serves them all, and is short.
    """
    serving = sum(engine.serves for engine in engines)
    room = max(1, serving - max(1, serving // 2))
    if not overlapping and not any(engine.turns for engine in engines):
        room = serving
    taken: set[str] = set()
    wave: list[str] = []
    order = sorted(engines, key=lambda e: (not e.together, e.serves, e.turns, e.engine_id))
    for engine in order:
        if not engine.waits or taken & engine.devices:
            continue
        if engine.serves and not engine.together:
            if not room:
                continue
            room -= 1
        taken |= engine.devices
        wave.append(engine.engine_id)
    return tuple(wave)
