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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Literal

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
