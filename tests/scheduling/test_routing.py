"""Properties of the choice of an engine."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from troupe.scheduling.routing import (
    STICKY_SLACK_TOKENS,
    Candidate,
    choose_engine,
    overloaded,
)

fleets = st.lists(
    st.tuples(st.integers(0, 8), st.integers(0, 20_000), st.integers(0, 8)), max_size=6
).map(lambda rows: [Candidate(f"e{i}", *row) for i, row in enumerate(rows)])
anyone = st.none() | st.sampled_from([f"e{i}" for i in range(7)])


@given(fleets, anyone, st.integers(0, 100))
def test_a_turn_waits_exactly_when_no_engine_has_room(
    fleet: list[Candidate], sticky: str | None, rotation: int
) -> None:
    chosen = choose_engine(fleet, sticky=sticky, rotation=rotation)
    room = {c.engine_id for c in fleet if c.in_flight < c.limit}
    assert (chosen is None) == (not room)
    assert chosen is None or chosen in room


@given(fleets, anyone, st.integers(0, 100))
def test_it_stays_where_it_was_unless_that_engine_is_full_or_overloaded(
    fleet: list[Candidate], sticky: str | None, rotation: int
) -> None:
    chosen = choose_engine(fleet, sticky=sticky, rotation=rotation)
    open_ = {c.engine_id: c for c in fleet if c.in_flight < c.limit}
    if not open_:
        return
    least = min(c.outstanding_tokens for c in open_.values())
    if sticky in open_ and not overloaded(open_[sticky], least):
        assert chosen == sticky
    else:
        assert chosen is not None
        assert open_[chosen].outstanding_tokens == least


@given(st.integers(1, 6), st.integers(0, 100))
def test_equal_engines_take_turns(engines: int, start: int) -> None:
    fleet = [Candidate(f"e{i}", 0, 0, 4) for i in range(engines)]
    chosen = Counter(choose_engine(fleet, rotation=start + n) for n in range(3 * engines))
    assert set(chosen.values()) == {3}


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 3000)), max_size=120))
def test_property_of_a_whole_run_no_engine_gets_far_ahead(turns: list[tuple[int, int]]) -> None:
    """Turns arrive and stay: the spread never exceeds what stickiness allows plus one turn."""
    outstanding = {f"e{i}": 0 for i in range(4)}
    home: dict[int, str] = {}
    for rotation, (trajectory, tokens) in enumerate(turns):
        fleet = [Candidate(e, 0, n, 1) for e, n in outstanding.items()]
        chosen = choose_engine(fleet, sticky=home.get(trajectory), rotation=rotation)
        assert chosen is not None
        home[trajectory] = chosen
        outstanding[chosen] += tokens
        low, high = min(outstanding.values()), max(outstanding.values())
        assert high <= 1.5 * low + STICKY_SLACK_TOKENS + 3000


def test_a_conversation_leaves_an_overloaded_engine() -> None:
    busy = Candidate("busy", 3, 10_000, 8)
    idle = Candidate("idle", 0, 100, 8)
    assert choose_engine([busy, idle], sticky="busy") == "idle"
    assert choose_engine([idle, busy], sticky="idle") == "idle"
