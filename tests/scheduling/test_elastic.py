"""Elastic scheduling of actions: admission, waiting, and shares."""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections.abc import Callable, Collection, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from troupe.scheduling.elastic import (
    Action,
    Amounts,
    DecisionBounds,
    Elastic,
    Grant,
    Host,
    Running,
    SpeedUp,
    decide_over,
    lacking,
)
from troupe.scheduling.elastic.decision import AllocationTable, Gains, best_split, waiting_seconds


def decide(
    queue: Sequence[Action],
    free: Amounts,
    running: Sequence[Running],
    now: float,
    rules: DecisionBounds = DecisionBounds(),  # noqa: B008 (frozen)
    *,
    quotas: Collection[str] = (),
) -> Sequence[Grant]:
    """The decision where there is one host."""
    return decide_over([Host("only", free, running)], queue, now, rules, quotas=quotas)


def amdahl(seconds: float, fraction: float, levels: Sequence[int] = (1, 2, 4, 8)) -> Elastic:
    return Elastic("cores", tuple(levels), SpeedUp(fraction, seconds).seconds(levels))


def test_alone_an_action_gets_all_that_makes_it_faster() -> None:
    only = Action("a", 0.0, elastic=amdahl(8.0, 1.0))
    (grant,) = decide([only], {"cores": 6}, [], 0.0)
    assert (grant.holds, grant.seconds) == ({"cores": 4}, 2.0)


def test_equal_actions_share_when_more_would_be_wasted() -> None:
    poor = amdahl(8.0, 0.3)
    grants = decide([Action(n, 0.0, elastic=poor) for n in "abcd"], {"cores": 4}, [], 0.0)
    assert [grant.holds["cores"] for grant in grants] == [1, 1, 1, 1]


def test_actions_that_scale_perfectly_run_one_after_another() -> None:
    # Together 2 x 4 s; one after another 2 s, then 4 s.
    perfect = amdahl(8.0, 1.0, (1, 2, 4))
    grants = decide([Action(n, 0.0, elastic=perfect) for n in "ab"], {"cores": 4}, [], 0.0)
    assert [(grant.action.action_id, grant.holds) for grant in grants] == [("a", {"cores": 4})]


def test_a_crowd_behind_makes_shares_small() -> None:
    good = amdahl(8.0, 0.9, range(1, 9))
    few = decide([Action("0", 0.0, elastic=good)], {"cores": 8}, [], 0.0)
    queue = [Action(f"{i:02}", 0.0, elastic=good) for i in range(64)]
    many = decide(queue, {"cores": 8}, [], 0.0)
    assert few[0].holds["cores"] == 8
    assert len(many) >= 4


def test_an_action_that_fits_no_host_holds_up_nothing() -> None:
    big = Action("big", 0.0, needs={"cores": 4, "quota": 1})
    small = Action("small", 1.0, needs={"cores": 1, "quota": 1})
    grants = decide([big, small], {"cores": 2, "quota": 1}, [Running({"cores": 1}, 5.0)], 0.0)
    assert [grant.action.action_id for grant in grants] == ["small"]


def test_a_waiting_action_is_not_overtaken_on_its_resources() -> None:
    big = Action("big", 0.0, needs={"cores": 4, "memory": 2})
    small = Action("small", 1.0, needs={"cores": 1})
    other = Action("other", 2.0, needs={"memory": 1})
    apart = Action("apart", 3.0, needs={"quota": 1})
    free = {"cores": 2, "memory": 8, "quota": 1}
    grants = decide([big, small, other, apart], free, [Running({"cores": 2}, 5.0)], 0.0)
    assert [grant.action.action_id for grant in grants] == ["apart"]


def test_a_quota_that_is_used_up_blocks_nothing_else() -> None:
    judge = Action("judge", 0.0, needs={"quota": 1, "cores": 1})
    again = Action("again", 1.0, needs={"quota": 1})
    test = Action("test", 2.0, needs={"cores": 1})

    def started(cores: int, quota: int) -> list[str]:
        free, running = {"cores": cores, "quota": quota}, [Running({"cores": 1 - cores}, 5.0)]
        grants = decide([judge, again, test], free, running, 0.0, quotas={"quota"})
        return [grant.action.action_id for grant in grants]

    assert started(1, 0) == ["test"]
    assert started(0, 1) == []
    assert started(1, 1) == ["judge"]


def test_a_resource_that_nobody_has_is_named() -> None:
    action = Action("a", 0.0, needs={"gpu": 2}, elastic=amdahl(1.0, 1.0, (4, 8)))
    assert lacking(action, {"cores": 8, "gpu": 1}) == "gpu"
    assert lacking(action, {"gpu": 2}) == "cores"
    assert lacking(action, {"cores": 4, "gpu": 2}) is None
    assert decide([action], {"cores": 8}, [], 0.0) == []


@pytest.mark.parametrize(
    "make",
    [
        lambda: Elastic("cores", (), ()),
        lambda: Elastic("cores", (1, 2), (1.0,)),
        lambda: Elastic("cores", (2, 1), (1.0, 2.0)),
        lambda: Elastic("cores", (0, 1), (1.0, 2.0)),
        lambda: Elastic("cores", (1,), (math.nan,)),
        lambda: Action("a", 0.0, needs={"cores": 1}, elastic=amdahl(1.0, 0.5)),
        lambda: Action("a", 0.0, needs={"cores": -1}),
        lambda: DecisionBounds(horizon=0),
        lambda: SpeedUp(1.5),
        lambda: SpeedUp(0.5, 0.0),
        lambda: SpeedUp(memory=0.0),
        lambda: SpeedUp().observed(0, 1.0),
        lambda: SpeedUp().observed(1, math.nan),
        lambda: best_split([amdahl(1.0, 0.5)], -1),
    ],
)
def test_invalid_levels_and_needs_are_refused(make: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        make()


# Speed-up curves.


@given(serial=st.floats(0.0, 10.0), parallel=st.floats(0.1, 100.0))
def test_property_a_curve_is_learned_from_runs_at_two_levels(
    serial: float, parallel: float
) -> None:
    curve = SpeedUp(0.5, 1.0)
    for level in (1, 2, 4, 1, 8):
        curve = curve.observed(level, serial + parallel / level)
    assert curve.line == pytest.approx((serial, parallel), rel=1e-4, abs=1e-4)


def test_runs_at_one_level_scale_the_declared_shape() -> None:
    curve = SpeedUp(0.8, 1.0).observed(2, 6.0).observed(2, 6.0)
    assert curve.seconds((1, 2, 4)) == pytest.approx((10.0, 6.0, 4.0))


def test_a_level_that_never_ran_is_tried_by_one_in_a_few() -> None:
    curve, levels = SpeedUp(1.0, 1.0), tuple(range(1, 65))
    assert curve.offered(levels) == levels
    curve = curve.observed(64, 10.0)
    offers = [curve.offered(levels, nth) for nth in range(64)]
    # Others are not blocked behind it, and it does not get the level at which it takes forever.
    tries = [offer for offer in offers if offer != levels]
    assert set(tries) == {(16,)}
    assert 4 <= len(tries) <= 12
    # Also of a function with every eighth call.
    assert {curve.offered(levels, nth) for nth in range(3, 300, 8)} == {levels, (16,)}
    curve = curve.observed(16, 10.0)
    assert curve.offered(levels) == levels
    for _ in range(500):  # old observations may be outdated
        curve = curve.observed(1, 10.0)
    assert curve.offered(levels) == (4,)
    assert curve.offered((1, 2)) == (2,)
    # A level that no host has is not explored.
    assert curve.offered((1, 2), most=1) == (1, 2)


def test_noise_is_not_taken_for_a_shape() -> None:
    """Runs differ by a factor of e: estimates for 16 and 64 cores equal the declaration."""
    rng = random.Random(1)
    for _ in range(200):
        curve = SpeedUp(0.95, 1.0)
        for nth in range(20):
            level = 16 if nth % 8 == 0 else 64
            seconds = 60.0 * (0.05 + 0.95 / level) * rng.lognormvariate(0.0, 1.0)
            curve = curve.observed(level, seconds)
        one, many = curve.seconds((1, 64))
        assert one > 3 * many


def test_a_curve_follows_a_function_that_changes() -> None:
    curve = SpeedUp(0.9, 4.0)
    for _ in range(100):
        for level in (1, 4):
            curve = curve.observed(level, 10.0)
    assert curve.seconds((1, 4)) == pytest.approx((10.0, 10.0), rel=1e-3)


@given(st.lists(st.tuples(st.integers(1, 64), st.floats(0.0, 100.0)), max_size=20))
def test_property_efficiency_is_between_zero_and_one(runs: list[tuple[int, float]]) -> None:
    curve = SpeedUp(0.5, 2.0)
    for level, seconds in runs:
        curve = curve.observed(level, seconds)
    times = curve.seconds(range(1, 65))
    for level, seconds in enumerate(times, 1):
        assert 0 < times[0] / (level * seconds) <= 1 + 1e-9


# The inner table.


options = st.builds(
    lambda levels, seconds: Elastic("cores", tuple(sorted(levels)), tuple(seconds[: len(levels)])),
    st.sets(st.integers(1, 5), min_size=1, max_size=4),
    st.lists(st.integers(1, 20).map(float), min_size=4, max_size=4),
)


@given(st.lists(options, min_size=1, max_size=4), st.integers(0, 8))
def test_property_the_split_is_optimal(members: list[Elastic], spare: int) -> None:
    split = best_split(members, spare)
    for count in range(len(members) + 1):
        budget = sum(option.levels[0] for option in members[:count]) + spare
        best = min(
            sum(o.seconds[o.levels.index(level)] for o, level in zip(members, pick, strict=False))
            for pick in itertools.product(*(option.levels for option in members[:count]))
            if sum(pick) <= budget
        )
        levels = split.levels(count, spare)
        chosen = zip(members, levels, strict=False)
        assert split.seconds(count, spare) == best
        assert sum(o.seconds[o.levels.index(level)] for o, level in chosen) == best
        assert sum(levels) <= budget


curves = st.builds(
    lambda serial, parallel, levels: Elastic(
        "cores", tuple(levels), tuple(max(1e-6, serial + parallel / m) for m in levels)
    ),
    st.floats(0.0, 10.0),
    st.floats(0.0, 10.0),
    st.tuples(st.integers(1, 4), st.integers(1, 9)).map(lambda lw: range(lw[0], sum(lw))),
)


@given(st.lists(curves, min_size=1, max_size=6), st.integers(0, 40))
def test_property_gains_and_table_agree(members: list[Elastic], spare: int) -> None:
    by_gains, by_table = best_split(members, spare), AllocationTable(members, spare)
    assert isinstance(by_gains, Gains)
    for count in range(len(members) + 1):
        seconds, levels = by_gains.seconds(count, spare), by_gains.levels(count, spare)
        assert seconds == pytest.approx(by_table.seconds(count, spare), abs=1e-6)
        chosen = zip(members, levels, strict=False)
        assert sum(o.seconds[o.levels.index(m)] for o, m in chosen) == pytest.approx(
            seconds, abs=1e-6
        )
        assert sum(levels) <= spare + sum(option.levels[0] for option in members[:count])


def test_levels_with_gaps_or_late_gains_take_the_table() -> None:
    assert isinstance(best_split([amdahl(1.0, 0.5)], 8), AllocationTable)
    late = Elastic("cores", (1, 2, 3), (8.0, 7.0, 1.0))
    assert isinstance(best_split([late], 2), AllocationTable)
    assert isinstance(best_split([late], 1), Gains)


def test_the_tail_is_played_in_its_order() -> None:
    one = Elastic("cores", (1,), (2.0,))
    # Two at once, and then two more when those have ended: 2 + 2 + 4 + 4.
    assert waiting_seconds([one] * 4, 2, []) == 12.0
    assert waiting_seconds([one], 0, [(3.0, 1)]) == 5.0
    # Beyond the horizon at the same pace: 1 s apart.
    assert waiting_seconds([one] * 4, 2, [], beyond=2) == 12.0 + 5.0 + 6.0


# The decision.


DIMENSIONS = ("cores", "memory", "gpu")
needs = st.dictionaries(st.sampled_from(DIMENSIONS[1:]), st.integers(0, 4))
actions = st.builds(
    lambda needs, elastic, seconds: (needs, elastic, seconds),
    needs,
    st.none() | options,
    st.integers(1, 9).map(float),
)
queues = st.lists(actions, max_size=8).map(
    lambda parts: [
        Action(str(i), float(i), n, e, s)
        for i, (n, e, s) in enumerate(parts)
        if e is not None or any(n.values())
    ]
)
frees = st.fixed_dictionaries({name: st.integers(0, 10) for name in DIMENSIONS})


def taken(grants: Sequence[Grant], resource: str) -> int:
    return sum(grant.holds.get(resource, 0) for grant in grants)


@given(queues, frees, st.integers(0, 4), st.sampled_from([(), ("gpu",)]))
def test_property_nothing_is_exceeded_and_nothing_lies_idle(
    queue: list[Action], free: dict[str, int], depth: int, quotas: tuple[str, ...]
) -> None:
    grants = decide(queue, free, [], 0.0, DecisionBounds(depth=depth), quotas=quotas)
    for resource, amount in free.items():
        assert taken(grants, resource) <= amount
    started = {grant.action.action_id for grant in grants}
    assert [g.action for g in grants] == [a for a in queue if a.action_id in started]
    left = {resource: amount - taken(grants, resource) for resource, amount in free.items()}
    blocked: set[str] = set()
    for action in queue:
        if action.action_id in started:
            continue
        fits = all(left.get(r, 0) >= need for r, need in action.least.items())
        assert not fits or not blocked.isdisjoint(action.least)
        blocked.update(action.least)


@given(queues, frees)
def test_property_the_first_that_fits_starts(queue: list[Action], free: dict[str, int]) -> None:
    fitting = queue and all(free.get(r, 0) >= need for r, need in queue[0].least.items())
    grants = decide(queue, free, [], 0.0)
    if fitting:
        assert grants[0].action is queue[0]


def played(queue: Sequence[Action], cores: int, choose: Callable[..., list[Grant]]) -> float:
    """Sum of completion times when `choose` decides at every event."""
    waiting, running, now, total = list(queue), [], 0.0, 0.0
    while waiting or running:
        held = sum(units for _, units in running)
        grants = choose(
            waiting, {"cores": cores - held}, [Running({"cores": u}, e) for e, u in running], now
        )
        for grant in grants:
            waiting.remove(grant.action)
            heapq.heappush(running, (now + grant.seconds, grant.holds["cores"]))
        assert running, "it always advances"
        now, _ = heapq.heappop(running)
        total += now
    return total


def best_sum(queue: Sequence[Action], cores: int) -> float:
    """Least sum of completion times of any schedule that starts actions in the order of the queue:
    all ways to start some now, with any levels, or to wait for an end."""

    def after(place: int, running: tuple[tuple[float, int], ...], now: float) -> float:
        if place == len(queue):
            return sum(end for end, _ in running)
        free = cores - sum(units for _, units in running)
        found = math.inf
        elastic = queue[place].elastic
        assert elastic is not None
        for level, seconds in zip(elastic.levels, elastic.seconds, strict=True):
            if level <= free:
                started = tuple(sorted((*running, (now + seconds, level))))
                found = min(found, after(place + 1, started, now))
        if running:
            (end, _), *others = running
            found = min(found, end + after(place, tuple(others), end))
        return found

    return after(0, (), 0.0)


def test_decisions_are_close_to_the_best_of_all_schedules() -> None:
    """No action is held back while units are idle, which costs up to a factor once in a while, and
    one in a hundred on average."""
    rng = random.Random(1)
    ratios = []
    for _ in range(200):
        parts = [(rng.uniform(1.0, 20.0), rng.random()) for _ in range(rng.randint(1, 4))]
        queue = [Action(str(i), 0.0, elastic=amdahl(*p, (1, 2, 4))) for i, p in enumerate(parts)]
        cores = rng.randint(1, 4)
        ratios.append(played(queue, cores, decide) / best_sum(queue, cores))
    assert min(ratios) > 1 - 1e-9
    assert sum(ratios) / len(ratios) < 1.03


elastic_queues = st.lists(
    st.tuples(st.floats(1.0, 20.0), st.floats(0.0, 1.0)), min_size=1, max_size=12
).map(lambda parts: [Action(f"{i:02}", 0.0, elastic=amdahl(*p)) for i, p in enumerate(parts)])


@given(elastic_queues, st.integers(1, 16))
def test_property_all_end(queue: list[Action], cores: int) -> None:
    assert played(queue, cores, decide) > 0


def test_elastic_beats_fixed_shares_on_a_mixture() -> None:
    queue = [
        Action(f"{i:02}", 0.0, elastic=amdahl(1.0 + i % 5 * 3.0, 0.95 if i % 2 else 0.2))
        for i in range(40)
    ]

    def fixed(level: int) -> Callable[..., list[Grant]]:
        def choose(
            queue: Sequence[Action], free: dict[str, int], running: object, now: float
        ) -> list[Grant]:
            count = free["cores"] // level
            return [
                Grant(a, {"cores": level}, a.elastic.seconds[a.elastic.levels.index(level)])
                for a in queue[:count]
                if a.elastic is not None
            ]

        return choose

    elastic = played(queue, 16, decide)
    assert elastic < min(played(queue, 16, fixed(level)) for level in (1, 2, 4, 8))
