"""Properties of the choice of engines that move between policies."""

from __future__ import annotations

import itertools
import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from troupe.scheduling.balancing import (
    BalancingRules,
    Demand,
    EngineAssignment,
    Memory,
    Move,
    decide,
    disparity,
    failed,
    pressure,
    succeeded,
)

POLICIES = ("a", "b", "c", "d")
EAGER = BalancingRules(threshold=5, hysteresis=1, sustain_seconds=0, cooldown_seconds=0)

rules = st.builds(
    lambda threshold, share, sustain, cooldown: BalancingRules(
        threshold, threshold * share, sustain, cooldown
    ),
    st.floats(0.5, 20),
    st.floats(0, 1),
    st.floats(0, 3),
    st.floats(0, 20),
)
demands = st.lists(st.tuples(st.integers(0, 200), st.integers(1, 3)), min_size=2, max_size=4).map(
    lambda rows: [Demand(POLICIES[i], float(b), m) for i, (b, m) in enumerate(rows)]
)
seats = st.lists(
    st.tuples(
        st.sampled_from(POLICIES),
        st.booleans(),
        st.sampled_from([False, False, False, True]),
        st.integers(0, 30),
    ),
    max_size=12,
).map(
    lambda rows: [
        EngineAssignment(f"e{i:02}", policy, serving, moving, float(work))
        for i, (policy, serving, moving, work) in enumerate(rows)
    ]
)
barred = st.sets(st.tuples(st.sampled_from(POLICIES), st.sampled_from(POLICIES)), max_size=4)


def house(**engines: int) -> list[EngineAssignment]:
    """Return this number of serving engines of each policy."""
    return [EngineAssignment(f"{p}{i}", p) for p, count in engines.items() for i in range(count)]


def carry_out(fleet: list[EngineAssignment], moves: list[Move]) -> list[EngineAssignment]:
    """The fleet when the engines have arrived."""
    targets = {move.engine_id: move.target for move in moves}
    return [
        EngineAssignment(
            s.engine_id, targets.get(s.engine_id, s.policy), s.serving, s.moving, s.work
        )
        for s in fleet
    ]


def serving(fleet: list[EngineAssignment], policy: str) -> int:
    return sum(s.policy == policy and s.serving and not s.moving for s in fleet)


@given(rules, demands, seats, barred)
def test_property_one_decision(
    given_rules: BalancingRules,
    wants: list[Demand],
    fleet: list[EngineAssignment],
    no: set[tuple[str, str]],
) -> None:
    """Minimum, conservation, engines on their way, barred pairs, and that it helps."""
    _, memory = decide(given_rules, Memory(), wants, fleet, 0.0, barred=no)
    moves, _ = decide(given_rules, memory, wants, fleet, 3.0, barred=no)
    moved = [move.engine_id for move in moves]
    assert len(moved) == len(set(moved))
    by_id = {seat.engine_id: seat for seat in fleet}
    known = {want.policy for want in wants}
    for move in moves:
        seat = by_id[move.engine_id]
        assert seat.policy == move.source
        assert seat.serving
        assert not seat.moving
        assert move.target in known
        assert move.target != move.source
        assert (move.source, move.target) not in no
        assert move.before > given_rules.threshold
        assert abs(move.after) < move.before
    for want in wants:
        gone = sum(move.source == want.policy for move in moves)
        if gone:
            assert serving(fleet, want.policy) - gone >= max(1, want.minimum)
    assert not {m.source for m in moves} & {m.target for m in moves}
    after = carry_out(fleet, moves)
    assert {s.engine_id for s in after} == set(by_id)
    assert worst(wants, after) <= worst(wants, fleet)


def worst(wants: list[Demand], fleet: list[EngineAssignment]) -> float:
    counts = Counter(s.policy for s in fleet if s.serving or s.moving)
    return max(pressure(want.backlog, counts[want.policy]) for want in wants)


@settings(max_examples=60)
@given(rules, demands, seats, st.floats(0.1, 5))
def test_property_constant_load_settles(
    given_rules: BalancingRules, wants: list[Demand], fleet: list[EngineAssignment], tick: float
) -> None:
    memory, now, moves = Memory(), 0.0, 0
    known = {want.policy for want in wants}
    movable = sum(s.policy in known for s in fleet)
    # In this time every pair has been ripe, and out of its cool-down, once per engine.
    quiet = 2 * (given_rules.sustain_seconds + given_rules.cooldown_seconds) + 2 * tick
    last = 0.0
    while now - last <= quiet:
        found, memory = decide(given_rules, memory, wants, fleet, now)
        moves += len(found)
        assert moves <= movable * len(wants), "it goes round in circles"
        if found:
            last = now
        fleet = carry_out(fleet, found)
        now += tick


@settings(max_examples=60)
@given(st.integers(0, 2**32), st.lists(st.integers(0, 60), min_size=2, max_size=2))
def test_property_noise_below_the_hysteresis_brings_no_engine_back(
    seed: int, backlogs: list[int]
) -> None:
    rng = random.Random(seed)
    noisy = BalancingRules(threshold=5, hysteresis=2, sustain_seconds=0, cooldown_seconds=0)
    fleet, memory = house(a=3, b=3), Memory()
    directions = set()
    for now in range(40):
        wants = [
            Demand(policy, max(0.0, backlog + rng.uniform(-0.99, 0.99)))
            for policy, backlog in zip("ab", backlogs, strict=True)
        ]
        found, memory = decide(noisy, memory, wants, fleet, float(now))
        directions |= {(move.source, move.target) for move in found}
        fleet = carry_out(fleet, found)
    assert len(directions) <= 1


@settings(max_examples=40)
@given(
    st.lists(st.tuples(st.integers(0, 100), st.integers(0, 100)), min_size=5, max_size=40),
    st.floats(2, 10),
)
def test_property_the_cool_down_bounds_changes_of_direction_under_any_load(
    loads: list[tuple[int, int]], cooldown: float
) -> None:
    restless = BalancingRules(
        threshold=1, hysteresis=0, sustain_seconds=0, cooldown_seconds=cooldown
    )
    fleet, memory = house(a=4, b=4), Memory()
    history: list[tuple[float, tuple[str, str]]] = []
    for now, (a, b) in enumerate(loads):
        wants = [Demand("a", float(a)), Demand("b", float(b))]
        found, memory = decide(restless, memory, wants, fleet, float(now))
        history += [(float(now), (move.source, move.target)) for move in found]
        fleet = carry_out(fleet, found)
    for (earlier, one), (later, other) in itertools.pairwise(history):
        assert one == other or later >= earlier + cooldown


def test_idle_policies_help_a_busy_one_as_far_as_it_pays() -> None:
    fleet = house(a=1, b=4, c=4)
    wants = [Demand("a", 60), Demand("b", 8), Demand("c", 0)]
    memory = Memory()
    for now in range(10):
        found, memory = decide(EAGER, memory, wants, fleet, float(now))
        fleet = carry_out(fleet, found)
    assert Counter(s.policy for s in fleet) == {"a": 7, "b": 1, "c": 1}
    # No policy has an engine to spare any more.
    assert disparity(wants, fleet) == pytest.approx(60 / 7)


def test_a_difference_must_last() -> None:
    patient = BalancingRules(sustain_seconds=2, cooldown_seconds=0)
    busy, calm = [Demand("a", 30), Demand("b", 0)], [Demand("a", 3), Demand("b", 0)]
    fleet, memory = house(a=1, b=2), Memory()
    for now, wants in enumerate([busy, calm, busy, busy]):
        found, memory = decide(patient, memory, wants, fleet, float(now))
        assert found == []
    found, memory = decide(patient, memory, busy, fleet, 4.0)
    assert [(move.engine_id, move.target) for move in found] == [("b0", "a")]


def test_the_engine_with_least_work_goes() -> None:
    fleet = [
        EngineAssignment("x", "b", work=3),
        EngineAssignment("y", "b", work=1),
        EngineAssignment("z", "b", work=2),
        EngineAssignment("a", "a"),
    ]
    found, _ = decide(EAGER, Memory(), [Demand("a", 14), Demand("b", 6)], fleet, 0.0)
    assert [move.engine_id for move in found] == ["y"]


def test_a_policy_that_lost_all_its_engines_is_helped() -> None:
    fleet = [EngineAssignment("a0", "a", serving=False), *house(b=2)]
    found, _ = decide(EAGER, Memory(), [Demand("a", 2), Demand("b", 2)], fleet, 0.0)
    assert [move.target for move in found] == ["a"]


def test_an_arriving_engine_counts_for_its_target() -> None:
    fleet = [
        EngineAssignment("a0", "a"),
        EngineAssignment("b0", "a", serving=False, moving=True),
        *house(b=2),
    ]
    found, _ = decide(EAGER, Memory(), [Demand("a", 10), Demand("b", 0)], fleet, 0.0)
    assert found == []


def test_a_pair_whose_moves_fail_rests_longer_each_time() -> None:
    limits = BalancingRules(sustain_seconds=0, cooldown_seconds=4)
    wants, fleet = [Demand("a", 30), Demand("b", 0)], house(a=1, b=2)
    memory, tries = Memory(), []
    for now in range(40):
        found, memory = decide(limits, memory, wants, fleet, float(now))
        for move in found:
            tries.append(now)
            memory = failed(memory, move.source, move.target, float(now))
    assert tries == [0, 4, 12, 28]
    assert succeeded(memory, "b", "a").failures == {}


def test_a_hysteresis_above_the_threshold_is_refused() -> None:
    with pytest.raises(ValueError, match="hysteresis = 6"):
        BalancingRules(threshold=5, hysteresis=6)
