"""Elastic scheduling over several hosts: one host per action, no starvation, no idle cores."""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.scheduling.test_elastic import DIMENSIONS, amdahl, frees, queues, taken
from troupe.scheduling.elastic import (
    Action,
    Amounts,
    DecisionBounds,
    Elastic,
    Host,
    Placed,
    Running,
    decide_over,
    nowhere,
)


def on(grants: Sequence[Placed]) -> dict[str, str]:
    return {grant.action.action_id: grant.host for grant in grants}


def cores(name: str, free: int, *running: Running, functions: Sequence[str] = ()) -> Host:
    return Host(name, {"cores": free}, running, functions)


def test_actions_spread_so_that_each_gets_more() -> None:
    queue = [Action(n, 0.0, elastic=amdahl(8.0, 1.0)) for n in "ab"]
    grants = decide_over([cores("x", 4), cores("y", 4)], queue, 0.0)
    assert on(grants) == {"a": "x", "b": "y"}
    assert [grant.holds for grant in grants] == [{"cores": 4}, {"cores": 4}]


def test_a_warm_host_is_worth_as_much_as_a_cold_start_takes() -> None:
    hosts = [cores("cold", 8), cores("warm", 4, functions=["test"])]
    action = Action("a", 0.0, elastic=amdahl(8.0, 1.0), function="test")  # 1 s there, 2 s here
    assert on(decide_over(hosts, [action], 0.0, DecisionBounds(cold_seconds=2.0))) == {"a": "warm"}
    assert on(decide_over(hosts, [action], 0.0, DecisionBounds(cold_seconds=0.5))) == {"a": "cold"}


def test_a_pinned_action_runs_on_its_host_or_waits() -> None:
    full = cores("full", 0, Running({"cores": 4}, 9.0))
    pinned = Action("pinned", 0.0, needs={"cores": 1}, host="full")
    other = Action("other", 1.0, needs={"cores": 1})
    lost = Action("lost", 0.0, needs={"cores": 1}, host="gone")
    assert on(decide_over([full, cores("free", 4)], [lost, pinned, other], 0.0)) == {
        "other": "free"
    }


def test_an_action_that_fits_nowhere_reserves_one_host_only() -> None:
    hosts = [
        cores("far", 1, Running({"cores": 3}, 1.0)),
        cores("near", 3, Running({"cores": 1}, 9.0)),
    ]
    big = Action("big", 0.0, needs={"cores": 4})
    small = [Action(f"s{i}", 1.0 + i, needs={"cores": 1}) for i in range(4)]
    assert on(decide_over(hosts, [big, *small], 0.0)) == {"s0": "far"}


def test_an_action_kept_back_on_one_host_starts_on_an_idle_host() -> None:
    greedy = Elastic("cores", (1, 2, 3, 5), (4.0, 4.0, 4.0, 1.0))
    one = Elastic("cores", (1,), (1.0,))
    queue = [Action(n, 0.0, {"licence": 1}, e) for n, e in (("a", greedy), ("b", one), ("c", one))]
    # `c` waits for a licence, and for a core; but `b` is before it.
    hosts, shared = [cores("x", 5), cores("y", 1)], {"licence": 2}
    grants = decide_over(hosts, queue, 0.0, DecisionBounds(depth=1), shared=shared)
    assert [(g.action.action_id, g.host, g.holds["cores"]) for g in grants] == [
        ("a", "x", 5),
        ("b", "y", 1),
    ]


def test_an_action_kept_back_is_not_overtaken_on_its_host() -> None:
    greedy, one = Elastic("cores", (1, 4), (4.0, 1.0)), Elastic("cores", (1,), (1.0,))
    options = {"a": greedy, "b": Elastic("cores", (2,), (1.0,)), "c": one}
    queue, rules = [Action(n, 0.0, elastic=e) for n, e in options.items()], DecisionBounds(depth=2)
    # One core next to `a` is idle. It is not enough for `b`, and `c` is behind `b`.
    assert on(decide_over([cores("x", 5)], queue, 0.0, rules)) == {"a": "x"}
    # Elsewhere it takes nothing of what `b` waits for.
    hosts = [cores("x", 5), cores("y", 1, Running({"cores": 9}, 99.0))]
    assert on(decide_over(hosts, queue, 0.0, rules)) == {"a": "x", "c": "y"}
    # Nor is it overtaken where somebody behind them all found no core.
    options = {
        "a": one,
        "b": Elastic("cores", (1, 3), (4.0, 1.0)),
        "c": Elastic("cores", (3,), (1.0,)),
        "d": one,
        "e": one,
    }
    queue = [Action(n, 0.0, elastic=e) for n, e in options.items()]
    assert on(decide_over([cores("x", 6)], queue, 0.0, rules)) == {"a": "x", "b": "x"}


def test_a_quota_belongs_to_no_host() -> None:
    hosts = [cores("x", 4), cores("y", 4)]
    judge = [Action(f"j{i}", float(i), needs={"cores": 1, "judge": 1}) for i in range(3)]
    test = Action("test", 9.0, needs={"cores": 1})
    grants = decide_over(hosts, [*judge, test], 9.0, shared={"judge": 2}, quotas={"judge"})
    assert set(on(grants)) == {"j0", "j1", "test"}
    assert taken(grants, "judge") == 2


def test_the_resource_of_an_impossible_action_is_named() -> None:
    hosts: dict[str, Amounts] = {"x": {"cores": 4}, "y": {"cores": 8, "gpu": 1}}
    assert nowhere(Action("a", 0.0, needs={"cores": 8, "gpu": 1}), hosts) is None
    assert nowhere(Action("a", 0.0, needs={"cores": 9}), hosts) == "cores"
    assert nowhere(Action("a", 0.0, needs={"gpu": 1}, host="x"), hosts) == "gpu"
    assert nowhere(Action("a", 0.0, needs={"cores": 1}, host="z"), hosts) == "host"
    assert nowhere(Action("a", 0.0, needs={"judge": 1}), hosts) == "judge"
    assert nowhere(Action("a", 0.0, needs={"judge": 1}), hosts, {"judge": 1}) is None


hosts_of = st.lists(frees, min_size=1, max_size=4).map(
    lambda free: [Host(str(i), amounts) for i, amounts in enumerate(free)]
)
pinned_queues = st.tuples(queues, st.lists(st.none() | st.integers(0, 3), min_size=8)).map(
    lambda both: [
        dataclasses.replace(action, host=None if place is None else str(place))
        for action, place in zip(both[0], both[1], strict=False)
    ]
)


@given(pinned_queues, hosts_of, st.integers(0, 4), st.integers(0, 6))
def test_property_no_host_is_exceeded_and_nothing_lies_idle(
    queue: list[Action], hosts: list[Host], depth: int, licences: int
) -> None:
    queue = [
        dataclasses.replace(a, needs={**a.needs, "licence": 1}) if int(a.action_id) % 2 else a
        for a in queue
    ]
    grants = decide_over(
        hosts, queue, 0.0, DecisionBounds(depth=depth), shared={"licence": licences}
    )
    assert taken(grants, "licence") <= licences
    left: dict[str, dict[str, int]] = {}
    for host in hosts:
        here = [grant for grant in grants if grant.host == host.name]
        left[host.name] = {r: n - taken(here, r) for r, n in host.free.items()}
        assert min(left[host.name].values()) >= 0
    started = set(on(grants))
    assert [g.action for g in grants] == [a for a in queue if a.action_id in started]
    assert all(g.action.host in (None, g.host) for g in grants)
    # The first waiter fits nowhere, and neither does a later one whose needs no earlier one shares.
    ahead: set[str] = set()
    for action in queue:
        if action.action_id in started:
            continue
        if ahead.isdisjoint(action.least):
            for host in hosts:
                room = {**left[host.name], "licence": licences - taken(grants, "licence")}
                fits = all(room.get(r, 0) >= need for r, need in action.least.items())
                assert not fits or action.host not in (None, host.name)
        ahead.update(action.least)


@given(
    st.lists(st.tuples(st.integers(1, 4), st.integers(1, 9)), min_size=1, max_size=6),
    st.integers(1, 3),
    st.integers(1, 4),
)
def test_property_the_first_starts_however_many_come_after_it(
    first: list[tuple[int, int]], count: int, width: int
) -> None:
    """A stream of small actions never ends; the wide one starts nevertheless."""
    width = min(4, width)
    names = [str(i) for i in range(count)]
    # The running actions when the wide one comes, with possibly wrong estimates of their ends.
    running: list[tuple[float, str, int]] = []
    for i, (units, end) in enumerate(first):
        name = names[i % count]
        if sum(u for _, n, u in running if n == name) + units <= 4:
            running.append((float(end), name, units))
    heapq.heapify(running)
    wide = Action("wide", 0.0, needs={"cores": width})
    now, arrived = 0.0, 0
    while True:
        small = [Action(f"s{arrived + i}", 1.0, needs={"cores": 1}) for i in range(12)]
        arrived += 12
        hosts = [
            cores(
                name,
                4 - sum(u for _, n, u in running if n == name),
                *(Running({"cores": u}, 0.0) for _, n, u in running if n == name),
            )
            for name in names
        ]
        grants = decide_over(hosts, [wide, *small], now)
        if "wide" in on(grants):
            return
        for grant in grants:
            heapq.heappush(running, (now + 1.5, grant.host, grant.holds["cores"]))
        assert running, "it always advances"
        now, _, _ = heapq.heappop(running)
        assert now < 60.0, "it waits for ever"


def test_rules_and_dimensions_are_checked() -> None:
    assert DIMENSIONS[0] == "cores"
    with pytest.raises(ValueError, match="cold_seconds"):
        DecisionBounds(cold_seconds=-1.0)
    with pytest.raises(ValueError, match="a is elastic in cores"):
        decide_over([], [Action("a", 0.0, elastic=amdahl(1.0, 1.0))], 0.0, shared={"cores": 4})
