"""The places of one host, shared by policies."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from troupe.scheduling.capacity import SharedCapacity


@dataclass
class Policy:
    """Turns that wait for a place, and those that have one, as a router has them."""

    name: str
    capacity: SharedCapacity
    waiting: int = 0
    running: int = 0
    serves: bool = True

    def enter(self, limit: int, *, adaptive: bool = False) -> None:
        self.capacity.join(
            self.name,
            limit,
            adaptive=adaptive,
            waiting=lambda: self.waiting,
            offer=self.place,
            room_changed=lambda: None,
        )

    def ask(self) -> None:
        self.waiting += 1
        self.place()

    def place(self) -> None:
        while self.serves and self.waiting and self.capacity.has_room(self.name):
            self.waiting -= 1
            self.capacity.take(self.name)
            self.running += 1

    def end(self) -> None:
        self.running -= 1
        self.capacity.give_back()


def policies(count: int, limit: int) -> list[Policy]:
    capacity = SharedCapacity()
    made = [Policy(f"p{number}", capacity) for number in range(count)]
    for one in made:
        one.enter(limit)
    return made


@given(
    limit=st.integers(1, 6),
    moves=st.lists(
        st.tuples(st.integers(0, 3), st.sampled_from(["ask", "end", "stop", "serve"])),
        max_size=200,
    ),
)
def test_places_are_neither_exceeded_nor_idle_while_a_turn_could_run(
    limit: int, moves: list[tuple[int, str]]
) -> None:
    members = policies(4, limit)
    capacity = members[0].capacity
    for who, what in moves:
        one = members[who]
        if what == "ask":
            one.ask()
        elif what == "end" and one.running:
            one.end()
        elif what == "stop":
            one.serves = False
        elif what == "serve":
            one.serves = True
            one.place()
        assert capacity.running == sum(m.running for m in members) <= limit
        if capacity.running < limit:
            assert not any(m.waiting for m in members if m.serves)


@given(
    limit=st.integers(1, 4),
    backlogs=st.lists(st.integers(1, 40), min_size=2, max_size=6),
    ends=st.lists(st.integers(0, 1000), min_size=300, max_size=300),
)
def test_freed_places_go_to_waiting_policies_in_proportion_and_none_starves(
    limit: int, backlogs: list[int], ends: list[int]
) -> None:
    members = policies(len(backlogs), limit)
    for one, backlog in zip(members, backlogs, strict=True):
        for _ in range(backlog + limit):
            one.ask()
    given_to = dict.fromkeys((one.name for one in members), 0)
    share = dict.fromkeys(given_to, 0.0)
    for pick in ends:
        # As many wait at each moment as in the beginning.
        for one, backlog in zip(members, backlogs, strict=True):
            one.waiting = max(one.waiting, backlog)
        total = sum(one.waiting for one in members)
        before = {one.name: one.running for one in members}
        claims = {one.name: one.waiting / total for one in members}
        running = [one for one in members for _ in range(one.running)]
        ending = running[pick % len(running)]
        ending.end()
        before[ending.name] -= 1
        for one in members:
            given_to[one.name] += one.running - before[one.name]
            share[one.name] += claims[one.name]
            # Never further from its share than a place for each policy: none starves.
            assert abs(given_to[one.name] - share[one.name]) <= len(members)


def test_a_policy_that_cannot_use_a_place_leaves_it_to_others_and_gains_no_claim() -> None:
    one, other = policies(2, 1)
    one.ask()
    for _ in range(20):
        other.ask()
    one.serves = False
    for _ in range(5):
        one.ask()
    one.end()
    for _ in range(9):
        assert (one.running, other.running) == (0, 1)
        other.end()
    one.serves = True
    for _ in range(4):
        (one if one.running else other).end()
    assert 5 - one.waiting <= 3  # not all four


def test_the_limit_follows_what_the_host_is_told_and_what_its_speed_suggests() -> None:
    capacity = SharedCapacity()
    one = Policy("p", capacity)
    one.enter(2)
    for _ in range(5):
        one.ask()
    assert one.running == 2
    capacity.set_limit(4)
    assert one.running == 4
    capacity.set_limit(1)
    one.end()
    assert one.running == 3
    capacity.leave("p")
    adaptive = Policy("q", SharedCapacity())
    adaptive.enter(32, adaptive=True)
    for number in range(400):  # each further turn slows all down in full
        beside = 1 + number % 32
        adaptive.capacity.ended(beside, beside * 1.0, 10)
    assert adaptive.capacity.limit < 32
