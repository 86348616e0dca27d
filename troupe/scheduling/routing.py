"""Which engine of a policy serves a turn.

`least_work`: sticky by conversation, because the engine that served it holds its prefix; else least
outstanding work, counted in tokens because answers differ 5-9x in length and weighed by what an
engine reads and draws per second where that is known; ties rotated, because fresh engines all look
alike and the first of them would get everything. The other two know no load and are there to be
compared with: `round_robin` gives conversations out in turn, `random_hash` by their id.
"""

from __future__ import annotations

import heapq
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Generic, Literal, TypeVar

Policy = Literal["least_work", "round_robin", "random_hash"]

# A conversation that moves is read again from its beginning. Staying pays while the wait that it
# costs is shorter than that: up to half more work than the least loaded engine has, and for short
# queues up to about the prompt of a long conversation. The same holds for a turn that would leave
# the device class that fits it.
STAY_RATIO: Final = 1.5
STAY_SLACK_TOKENS: Final = 2048


@dataclass(frozen=True, slots=True)
class Work:
    """What a turn costs: prompt tokens to read, response tokens that are expected."""

    prompt_tokens: float
    response_tokens: float


@dataclass(frozen=True, slots=True)
class Rates:
    """Tokens per second that an engine reads, and draws for all its turns together."""

    prefill: float
    decode: float

    def seconds(self, work: Work) -> float:
        """Time of the engine that `work` takes."""
        return work.prompt_tokens / self.prefill + work.response_tokens / self.decode


@dataclass(slots=True, eq=False)
class _Member:
    engine_id: str
    device_class: str
    rates: Rates | None
    limit: int
    in_flight: int = 0
    outstanding: float = 0.0
    # Grows with every change: older entries of the heap are out of date.
    stamp: int = 0

    @property
    def has_room(self) -> bool:
        return self.in_flight < self.limit


class Fleet:
    """The engines of one policy and what was given to each.

    A choice costs O(device classes + log engines), amortised. Outstanding work is in tokens: where
    rates are known, in tokens that an average engine of the fleet would have drawn meanwhile.
    """

    def __init__(self, policy: Policy = "least_work", *, sticky: bool = True) -> None:
        self._policy = policy
        self._sticky = sticky
        self._members: dict[str, _Member] = {}
        self._order: list[str] = []
        self._next = 0
        self._changes = 0
        # Per device class: (work, turns, change, id). The oldest change first rotates ties.
        self._heaps: dict[str, list[tuple[float, int, int, str]]] = {}
        # Members that did not serve when they were looked at.
        self._aside: set[str] = set()
        self._drawn_per_second = 1.0
        self._places = 0

    def __len__(self) -> int:
        return len(self._members)

    @property
    def places(self) -> int:
        """Turns that all engines may have at once."""
        return self._places

    @property
    def rates(self) -> dict[str, Rates]:
        """What engines of each device class do per second on average; classes of unknown rates are
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
    ) -> None:
        """An engine that may have `limit` turns at once. Raises `ValueError` for a known id."""
        if engine_id in self._members:
            raise ValueError(f"engine_id = {engine_id} is in the fleet already")
        member = _Member(engine_id, device_class, rates, limit)
        self._members[engine_id] = member
        self._order.append(engine_id)
        self._places += limit
        self._weigh()
        self._changed(member)

    def remove(self, engine_id: str) -> None:
        """Forget an engine. Raises `KeyError`."""
        self._places -= self._members.pop(engine_id).limit
        self._order.remove(engine_id)
        self._aside.discard(engine_id)
        self._weigh()

    def set_limit(self, engine_id: str, limit: int) -> None:
        """From now on the engine may have `limit` turns; it may have more until they end."""
        member = self._members[engine_id]
        if member.limit != limit:
            self._places += limit - member.limit
            member.limit = limit
            self._changed(member)

    def has_room(self, engine_id: str) -> bool:
        """Whether the engine may get another turn."""
        return self._members[engine_id].has_room

    def look_again(self) -> None:
        """Engines that did not serve may serve now."""
        for engine_id in self._aside:
            self._changed(self._members[engine_id])
        self._aside.clear()

    def choose(
        self,
        work: Work,
        serves: Callable[[str], bool],
        *,
        home: str | None = None,
        classes: Sequence[str] = (),
        key: str = "",
    ) -> str | None:
        """The engine for a turn, or None: the turn waits for the first that has room.

        `home` is the engine that served the conversation before, `classes` are device classes that
        fit it, the best first, `key` names the conversation. Under `least_work` the engine has
        room; the others choose without looking, and the turn waits for the engine if it has none.
        """
        if self._sticky and home in self._members and serves(home):
            at_home = self._members[home]
        else:
            at_home = None
        if self._policy != "least_work":
            return at_home.engine_id if at_home else self._blindly(key, serves)
        tops = {name: self._least(name, serves) for name in self._heaps}
        if not any(tops.values()) and self._aside:
            self.look_again()
            tops = {name: self._least(name, serves) for name in self._heaps}
        open_ = {name: member for name, member in tops.items() if member is not None}
        if not open_:
            return None
        best = min(open_.values(), key=lambda m: self._finish(m, work))
        for name in classes:
            fitting = open_.get(name)
            if fitting is not None and not self._leaves(fitting, best, work):
                best = fitting
                break
        if at_home and at_home.has_room and not self._leaves(at_home, best, work):
            best = at_home
        return best.engine_id

    def give(self, engine_id: str, work: Work) -> float:
        """A turn goes to the engine; returns what it adds to its outstanding work."""
        member = self._members[engine_id]
        cost = self._cost(member, work)
        member.in_flight += 1
        member.outstanding += cost
        self._changed(member)
        return cost

    def take_back(self, engine_id: str, cost: float) -> None:
        """A turn that added `cost` has left the engine. Raises `KeyError`."""
        member = self._members[engine_id]
        member.in_flight -= 1
        # Sums of fractions never come back to zero exactly, and ties would be none.
        member.outstanding = member.outstanding - cost if member.in_flight else 0.0
        self._changed(member)

    def outstanding(self, engine_id: str) -> float:
        """Work that the engine has, in tokens."""
        return self._members[engine_id].outstanding

    def _blindly(self, key: str, serves: Callable[[str], bool]) -> str | None:
        count = len(self._order)
        start = self._next if self._policy == "round_robin" else zlib.crc32(key.encode())
        for step in range(count):
            engine_id = self._order[(start + step) % count]
            if serves(engine_id):
                self._next = start + step + 1
                return engine_id
        return None

    def _least(self, device_class: str, serves: Callable[[str], bool]) -> _Member | None:
        heap = self._heaps[device_class]
        while heap:
            *_, stamp, engine_id = heap[0]
            member = self._members.get(engine_id)
            if member is not None and member.stamp == stamp and member.has_room:
                if serves(engine_id):
                    return member
                self._aside.add(engine_id)
            heapq.heappop(heap)
        return None

    def _changed(self, member: _Member) -> None:
        self._changes += 1
        member.stamp = self._changes
        if not member.has_room:  # its entry comes when it has
            return
        heap = self._heaps.setdefault(member.device_class, [])
        heapq.heappush(heap, (member.outstanding, member.in_flight, member.stamp, member.engine_id))
        if len(heap) > 4 * len(self._members) + 64:
            heap[:] = [e for e in heap if e[3] in self._members and self._is_new(e)]
            heapq.heapify(heap)

    def _is_new(self, entry: tuple[float, int, int, str]) -> bool:
        return self._members[entry[3]].stamp == entry[2]

    def _weigh(self) -> None:
        known = [m.rates.decode for m in self._members.values() if m.rates is not None]
        self._drawn_per_second = sum(known) / len(known) if known else 1.0

    def _cost(self, member: _Member, work: Work) -> float:
        if member.rates is None:
            return work.prompt_tokens + work.response_tokens
        return member.rates.seconds(work) * self._drawn_per_second

    def _finish(self, member: _Member, work: Work) -> tuple[float, int, int]:
        own = self._cost(member, work) if member.rates is not None else 0.0
        return (member.outstanding + own, member.in_flight, member.stamp)

    def _leaves(self, here: _Member, there: _Member, work: Work) -> bool:
        return overloaded(self._finish(here, work)[0], self._finish(there, work)[0])


def overloaded(tokens: float, least_tokens: float) -> bool:
    """Whether an engine has so much more to do than the least loaded that turns move away."""
    return tokens > STAY_RATIO * least_tokens + STAY_SLACK_TOKENS


# Weight of the newest turn in what a kind of turn is like.
_NEWEST: Final = 0.05
# Turns of a kind that are seen before anything is inferred from them.
SEEN: Final = 8
# A class is preferred when a kind of turn gains at least this much there over the worst class.
LEAST_AFFINITY_GAIN: Final = 1.1


@dataclass(slots=True)
class _Profile:
    prompt: float = 0.0
    response: float = 0.0
    seen: int = 0

    def add(self, prompt: float, response: float) -> None:
        self.seen += 1
        part = max(_NEWEST, 1 / self.seen)
        self.prompt += part * (prompt - self.prompt)
        self.response += part * (response - self.response)


class Profiles:
    """What turns of one policy are like, by kind: (domain, agent)."""

    def __init__(self) -> None:
        self._kinds: dict[tuple[str, str], _Profile] = {}
        self._all = _Profile()

    def observe(self, kind: tuple[str, str], read_tokens: int, response_tokens: int) -> None:
        """A turn ended: prompt tokens that were not in a cache, and response tokens."""
        self._kinds.setdefault(kind, _Profile()).add(read_tokens, response_tokens)
        self._all.add(read_tokens, response_tokens)

    def expected(self, kind: tuple[str, str], prompt_tokens: int, max_new_tokens: int) -> Work:
        """What a turn will cost: its response is as long as those of its kind were."""
        profile = self._kinds.get(kind)
        if profile is None or profile.seen < SEEN:
            return Work(prompt_tokens, max_new_tokens)
        return Work(prompt_tokens, min(profile.response, max_new_tokens))

    def fitting(self, kind: tuple[str, str], rates: Mapping[str, Rates]) -> str | None:
        """The class where turns of this kind gain most over the average turn; None when too little
        is known, or it makes no difference.

        Not the class where they are fastest: where one class is faster at everything, every kind
        would want it, and the other would idle (comparative advantage).
        """
        profile = self._kinds.get(kind)
        if profile is None or profile.seen < SEEN or len(rates) < 2:
            return None
        own, usual = _work(profile), _work(self._all)
        cost = {name: r.seconds(own) / (r.seconds(usual) or 1.0) for name, r in rates.items()}
        best = min(cost, key=lambda name: (cost[name], name))
        return best if max(cost.values()) >= LEAST_AFFINITY_GAIN * cost[best] else None


def _work(profile: _Profile) -> Work:
    return Work(profile.prompt, profile.response)


def classes_for(
    domain: str,
    agent: str,
    *,
    by_domain: Mapping[str, str],
    by_agent: Mapping[str, str],
    default: str,
    inferred: str | None,
) -> tuple[str, ...]:
    """Device classes for a turn, the best first: declared by domain, by agent, inferred; then the
    default pool."""
    declared = by_domain.get(domain) if domain else None
    fitting = declared or by_agent.get(agent) or inferred
    return tuple(dict.fromkeys(name for name in (fitting, default) if name))


T = TypeVar("T")

# Further trajectories do not make a turn wait longer.
MOST_LEFT: Final = 16


@dataclass(eq=False, slots=True)
class WaitingTurn(Generic[T]):
    """A turn that waits. `since`: turns that had been served when it came."""

    item: T
    group: str
    since: int
    number: int
    patience: int
    key: int = 0
    waits: bool = True


class TurnQueue(Generic[T]):
    """Turns by urgency. All operations cost O(log turns), `regroup` that per turn of the group."""

    def __init__(self, *, priority: bool = True) -> None:
        """Without `priority`: first come, first served."""
        self._priority = priority
        self._heap: list[tuple[int, int, WaitingTurn[T]]] = []
        self._groups: dict[str, set[WaitingTurn[T]]] = {}
        self._count = 0
        self._waiting = 0
        self.served = 0
        """Turns that left by `pop`: the clock of this queue."""

    def __len__(self) -> int:
        return self._waiting

    def __iter__(self) -> Iterator[T]:
        """Those that wait, in no order."""
        return (entry.item for key, _, entry in self._heap if entry.waits and key == entry.key)

    def push(
        self,
        item: T,
        *,
        group: str = "",
        left: int = 0,
        places: int = 1,
        since: int | None = None,
    ) -> WaitingTurn[T]:
        """`item` waits. `left`: trajectories of its group that have not ended; `places`: turns that
        all engines may have at once; `since`: the clock when the turn first came, if it was served
        already and comes back."""
        self._count += 1
        entry = WaitingTurn(
            item,
            group,
            self.served if since is None else since,
            self._count,
            max(1, places),
        )
        entry.key = self._key(entry, left)
        self._waiting += 1
        if group and self._priority:
            self._groups.setdefault(group, set()).add(entry)
        self._put(entry)
        return entry

    def regroup(self, group: str, left: int) -> None:
        """Of `group` only `left` trajectories are left: its turns become more urgent, never
        less."""
        for entry in self._groups.get(group, ()):
            key = self._key(entry, left)
            if key < entry.key:
                entry.key = key
                self._put(entry)

    def peek(self) -> T | None:
        """The most urgent turn; None when nothing waits."""
        while self._heap:
            key, _, entry = self._heap[0]
            if entry.waits and key == entry.key:
                return entry.item
            heapq.heappop(self._heap)
        return None

    def pop(self) -> T:
        """Take the most urgent turn away: it is served. Raises `IndexError`."""
        item = self.peek()
        if item is None:
            raise IndexError("nothing waits")
        self._leave(self._heap[0][2])
        heapq.heappop(self._heap)
        self.served += 1
        return item

    def remove(self, entry: WaitingTurn[T]) -> None:
        """Somebody waits no more. Repeatable."""
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


# A further 1 % of turns must raise throughput by this part of a percent.
LEAST_CONCURRENCY_GAIN: Final = 0.03
# Of the weight of earlier observations, what is left after a window.
MEMORY: Final = 0.8
# Below this spread of n (its standard deviation over its mean) its effect on t is unknown.
LEAST_SPREAD: Final = 0.05
STEP_UP: Final = 0.125
STEP_DOWN: Final = 0.8
# Turns that must end before the limit changes, besides as many as the limit.
WINDOW_TURNS: Final = 16


class AdaptiveLimit:
    """The limit of one engine, in [1, `most`]. It begins at the top: too few turns cost at once."""

    def __init__(self, most: int) -> None:
        if most < 1:
            raise ValueError(f"most = {most}: an engine needs a place for one turn")
        self._most = most
        self._limit = float(most)
        self._ended = 0
        self._reached = False
        # Sums over turns, weighted by their tokens: 1, n, t, n n, n t.
        self._sums = [0.0] * 5

    @property
    def now(self) -> int:
        """Turns that the engine may have."""
        return max(1, min(self._most, int(self._limit)))

    def ended(self, in_flight: float, seconds: float, tokens: int) -> None:
        """A turn was drawn: `tokens` in `seconds`, beside `in_flight` turns, itself included.

        Turns that drew nothing say nothing.
        """
        if tokens < 1 or seconds <= 0 or in_flight < 1:
            return
        n, t = in_flight, seconds / tokens
        for i, value in enumerate((1.0, n, t, n * n, n * t)):
            self._sums[i] += tokens * value
        self._reached = self._reached or in_flight >= self.now - 0.5
        self._ended += 1
        if self._ended >= max(WINDOW_TURNS, self.now):
            self._adapt()
            self._ended, self._reached = 0, False
            self._sums = [MEMORY * value for value in self._sums]

    def best(self) -> float | None:
        """Turns beyond which throughput hardly grows; infinite when no end is in sight, 0 when it
        falls already, None when too little is known."""
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
            if self._reached:  # unless more are wanted, more are not tried
                self._limit = min(self._most, self._limit + max(1.0, STEP_UP * self._limit))
        else:
            self._limit = max(1.0, best, STEP_DOWN * self._limit)
