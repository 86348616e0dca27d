"""Running turns of one host of engines, which the policies on it share.

A place that becomes free goes to a policy that waits, in proportion to the waiting turns: smooth
weighted round-robin (as in nginx), by which each policy gets its share of any window of places, so
that none starves.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from troupe.scheduling.routing import AdaptiveLimit


@dataclass(slots=True)
class _Claimant:
    waiting: Callable[[], int]
    offer: Callable[[], None]
    room_changed: Callable[[], None]
    credit: float = 0.0


class SharedCapacity:
    """The places of one host. Not thread-safe: all calls are made on one event loop."""

    def __init__(self) -> None:
        self._members: dict[str, _Claimant] = {}
        self._most = 1
        self._adaptive: AdaptiveLimit | None = None
        # While places are offered: the member that may take the next one, empty once it has.
        self._turn: str | None = None
        self.running = 0
        """Turns that have a place."""

    @property
    def limit(self) -> int:
        """How many turns may run at once: what was given, or less where it adapts."""
        return self._adaptive.now if self._adaptive is not None else self._most

    def join(
        self,
        member: str,
        limit: int,
        *,
        adaptive: bool,
        waiting: Callable[[], int],
        offer: Callable[[], None],
        room_changed: Callable[[], None],
    ) -> None:
        """Let `member` take places; with the first one comes the `limit`, which the others have
        in common. `adaptive`: it is lowered to what the host's speed suggests.

        `waiting()`: how many turns of the member wait. `offer()`: a place is free for it, which it
        may `take` before it returns. `room_changed()`: `has_room` may have changed.
        """
        if not self._members:
            self._most = limit
            self._adaptive = AdaptiveLimit(limit) if adaptive else None
        self._members[member] = _Claimant(waiting, offer, room_changed)

    def leave(self, member: str) -> None:
        """Offer `member` nothing more; its turns keep their places. Repeatable."""
        self._members.pop(member, None)

    def set_limit(self, limit: int) -> None:
        """Change the limit; turns beyond it run to their end. Repeatable."""
        if limit == self._most:
            return
        self._most = limit
        if self._adaptive is not None:
            self._adaptive = AdaptiveLimit(limit)
        self._offer_places()

    def has_room(self, member: str) -> bool:
        """Return whether `member` may take a place now."""
        return self.running < self.limit and self._turn in (None, member)

    def take(self, member: str) -> None:
        """Give `member`, which has room, a place."""
        self.running += 1
        if self._turn == member:
            self._turn = ""
        if self.running >= self.limit:
            self._notify()

    def give_back(self) -> None:
        """Take a place back, and offer it to members that wait."""
        full = self.running >= self.limit
        self.running -= 1
        if full:
            self._notify()
        self._offer_places()

    def ended(self, in_flight: float, seconds: float, tokens: int) -> None:
        """Record a turn that has ended (see `AdaptiveLimit.ended`)."""
        if self._adaptive is not None:
            self._adaptive.ended(in_flight, seconds, tokens)

    def _notify(self) -> None:
        for member in list(self._members.values()):
            member.room_changed()

    def _offer_places(self) -> None:
        """Offer free places, one by one, until none is left or nobody takes one."""
        if self._turn is not None:  # a member gives back a place while it is offered one
            return
        passed: set[str] = set()
        try:
            while self.running < self.limit:
                waiting = {
                    name: count
                    for name, one in self._members.items()
                    if name not in passed and (count := one.waiting()) > 0
                }
                if not waiting:
                    return
                self._turn = chosen = self._next(waiting)
                self._notify()
                self._members[chosen].offer()
                if self._turn:
                    # It cannot use the place: it waits for something else.
                    passed.add(chosen)
                    if (member := self._members.get(chosen)) is not None:
                        member.credit = 0.0
        finally:
            self._turn = None
            self._notify()

    def _next(self, waiting: dict[str, int]) -> str:
        """Return who is offered the next place; `waiting`: turns by member."""
        total = sum(waiting.values())
        for name, member in self._members.items():
            # Who does not wait has no claim from earlier.
            member.credit = member.credit + waiting[name] / total if name in waiting else 0.0
        chosen = max(waiting, key=lambda name: self._members[name].credit)
        self._members[chosen].credit -= 1.0
        return chosen
