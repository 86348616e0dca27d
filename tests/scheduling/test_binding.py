"""Holders of training devices: capacity, age, work, locality, gangs."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from troupe.scheduling.binding import (
    Bind,
    BindingRules,
    Policy,
    Prefetch,
    RankWorker,
    Release,
    Suspend,
    decide,
    too_large,
    too_many_ranks,
)

RULES = BindingRules(quantum=2.0, idle=10.0)


def moves(policies: list[Policy], workers: list[RankWorker], now: float = 100.0) -> list[object]:
    return list(decide(RULES, policies, workers, now).moves)


def bound(name: str, *workers: str, **more: object) -> Policy:
    return Policy(name, bound=workers or ("w0",), **more)  # type: ignore[arg-type]


ONE = [RankWorker("w0", slots=1)]
TWO = [RankWorker("w0", slots=1), RankWorker("w1", slots=1)]


def test_any_number_of_slots_places_as_ever_the_costliest_first_to_the_least_loaded() -> None:
    workers = [RankWorker("w0"), RankWorker("w1", load=1.0)]
    policies = [Policy("c", work=1, cost=0.25), Policy("a", work=1), Policy("b", work=1)]
    assert moves(policies, workers) == [
        Bind("a", ("w0",)),
        Bind("b", ("w0",)),
        Bind("c", ("w1",)),
    ]


@given(
    st.dictionaries(st.sampled_from("pqrstu"), st.floats(0, 100), max_size=6),
    st.lists(st.sampled_from("abcdef"), min_size=1, unique=True),
    st.dictionaries(st.sampled_from("pqrstu"), st.sampled_from("abcxyz")),
)
def test_with_any_number_of_slots_policies_stay_near_and_the_rest_is_balanced(
    costs: dict[str, float], ids: list[str], near: dict[str, str]
) -> None:
    policies = [
        Policy(name, work=1, cost=cost, near=frozenset({near[name]} if name in near else ()))
        for name, cost in costs.items()
    ]
    placed = {
        move.policy: move.workers[0]
        for move in decide(RULES, policies, [RankWorker(i) for i in ids], 0.0).moves
        if isinstance(move, Bind)
    }
    assert set(placed) == set(costs)
    for policy in costs:
        if near.get(policy) in ids:
            assert placed[policy] == near[policy]
    if not any(worker in ids for worker in near.values()):
        load = dict.fromkeys(ids, 0.0)
        for policy, worker in placed.items():
            load[worker] += costs[policy]
        assert max(load.values()) - min(load.values()) <= max(costs.values(), default=0.0) + 1e-9


def test_a_priority_counts_as_waiting_and_not_for_longer() -> None:
    old, ahead = Policy("old", work=1, since=40.0), Policy("new", work=1, since=99.0, ahead=60.0)
    assert moves([old, ahead], ONE)[0] == Bind("new", ("w0",))
    assert moves([old, replace(ahead, since=100.5)], ONE)[0] == Bind("old", ("w0",))
    # What has work gives way to it after the quantum, and not the other way round.
    assert Suspend("old", "new") in moves([replace(old, bound=("w0",)), ahead], ONE)
    assert Suspend("new", "old") not in moves([old, replace(ahead, bound=("w0",))], ONE)


def test_the_oldest_work_is_bound_first_in_place_of_an_idle_policy() -> None:
    policies = [bound("idle"), Policy("new", work=3, since=9), Policy("old", work=1, since=5)]
    assert moves(policies, ONE) == [Suspend("idle", "old"), Prefetch("old", ("w0",))]
    # While it leaves, no other policy is sent away, and none comes.
    policies[0] = replace(policies[0], leaving=True, busy=True)
    assert moves(policies, ONE) == [Prefetch("old", ("w0",))]
    policies[0] = replace(policies[0], leaving=False, busy=False, bound=(), wanted=False)
    assert moves(policies, ONE) == [Bind("old", ("w0",))]


def test_younger_work_gives_way_after_its_quantum_older_work_never() -> None:
    young = bound("young", work=1, since=50, bound_at=99)
    old = Policy("old", work=1, since=40, prefetched=frozenset({"w0"}))
    plan = decide(RULES, [young, old], ONE, 100.0)
    assert plan.moves == ()
    assert plan.again == 101.0
    assert moves([young, old], ONE, 101.0)[0] == Suspend("young", "old")
    assert moves([young, replace(old, since=60)], ONE, 1000.0) == []


def test_a_quantum_is_at_least_twice_what_the_last_swap_cost() -> None:
    young = bound("young", work=1, since=50, bound_at=99, swap=10.0)
    old = Policy("old", work=1, since=40, swap=1e6)
    plan = decide(RULES, [young, old], ONE, 105.0)
    # Its state is fetched, but the other stays.
    assert plan.moves == (Prefetch("old", ("w0",)),)
    assert plan.again == 119.0
    assert moves([young, old], ONE, 119.0)[0] == Suspend("young", "old")
    # A short swap does not change the quantum, and a policy without work leaves at once.
    assert decide(RULES, [replace(young, swap=0.5), old], ONE, 100.0).again == 101.0
    assert moves([replace(young, work=0), old], ONE, 100.0)[0] == Suspend("young", "old")


def test_a_prefetched_policy_binds_while_the_idle_one_leaves() -> None:
    ready = Policy("ready", work=1, since=1, size=40, prefetched=frozenset({"w0"}))
    policies = [bound("idle", size=40), ready]
    assert moves(policies, ONE) == [Suspend("idle", "ready"), Bind("ready", ("w0",))]
    # Also when it was told to leave before the other had been brought.
    leaving = [bound("idle", size=40, leaving=True, busy=True), ready]
    assert moves(leaving, ONE) == [Bind("ready", ("w0",))]
    # A policy waits if its state is missing, or has no room next to the other's.
    far = replace(ready, prefetched=frozenset())
    assert moves([leaving[0], far], ONE) == [Prefetch("ready", ("w0",))]
    small = [replace(ONE[0], memory=79)]
    assert moves(policies, small) == [Suspend("idle", "ready")]
    assert moves(leaving, small) == []
    # So does a policy that was never bound, whose costs are unknown.
    new = replace(ready, size=0)
    assert moves([leaving[0], new], small) == []
    assert moves([leaving[0], new], ONE) == [Bind("ready", ("w0",))]
    # One comes for one that leaves, and a third is not brought where there is room for two.
    third = Policy("third", work=1, since=2, size=40)
    taken = [leaving[0], bound("ready", work=1, size=40), third]
    assert moves(taken, [replace(ONE[0], memory=100)]) == []
    assert moves([*leaving, third], [replace(ONE[0], memory=100)]) == [Bind("ready", ("w0",))]


def test_a_prefetched_policy_is_prefetched_again_where_it_can_bind_sooner() -> None:
    policies = [
        bound("busy", "w0", work=1, since=0),
        bound("idle", "w1"),
        Policy("next", work=1, since=1, prefetched=frozenset({"w0"})),
    ]
    assert moves(policies, TWO) == [Suspend("idle", "next"), Prefetch("next", ("w1",))]


def test_a_gang_comes_when_all_others_have_left_its_workers() -> None:
    gang = Policy("gang", work=1, since=1, ranks=2, prefetched=frozenset({"w0", "w1"}))
    leaving = [bound(name, place, leaving=True) for name, place in (("a", "w0"), ("b", "w1"))]
    assert moves([*leaving, gang], TWO) == []
    assert moves([leaving[0], gang], TWO) == []
    assert moves([gang], TWO) == [Bind("gang", ("w0", "w1"))]


def test_a_gang_takes_as_many_devices_of_as_few_workers_on_as_few_hosts() -> None:
    hosts = [
        RankWorker(f"{host}{i}", devices=2, host=host)
        for host, count in (("a", 1), ("b", 2), ("c", 3))
        for i in range(count)
    ]
    found = {
        ranks: [one.workers for one in moves([Policy("gang", ranks=ranks)], hosts)]
        for ranks in (1, 2, 3, 4, 6, 8, 10, 12)
    }
    assert found[1] == found[2] == [("a0",)]
    # One rank of each of three, since three are not shared out to two evenly.
    assert found[3] == [("c0", "c1", "c2")]
    assert found[4] == [("b0", "b1")]
    assert found[6] == [("c0", "c1", "c2")]
    # The host that is filled comes first, then the one that the rest fits best.
    assert found[8] == [("c0", "c1", "c2", "a0")]
    assert found[10] == [("c0", "c1", "c2", "b0", "b1")]
    assert found[12] == [("c0", "c1", "c2", "b0", "b1", "a0")]
    # A worker with all of its devices comes before several.
    whole = [*hosts, RankWorker("z", devices=4)]
    assert moves([Policy("gang", ranks=4)], whole) == [Bind("gang", ("z",))]
    # Where its state is, it is led.
    near = Policy("gang", ranks=4, near=frozenset({"c1"}))
    assert moves([near], hosts) == [Bind("gang", ("c1", "c0"))]


def test_gangs_of_any_number_of_slots_spread_over_all_workers() -> None:
    """Five gangs of two workers on six: no gang shares while workers are free, then the least
    loaded group is shared."""
    workers = [RankWorker(f"w{i}", devices=4, host=f"h{i}") for i in range(6)]
    gangs = [Policy(f"p{i}", work=1, since=i, ranks=8, size=1) for i in range(5)]
    placed = {one.policy: one.workers for one in moves(gangs, workers)}
    assert [placed[f"p{i}"] for i in range(3)] == [("w0", "w1"), ("w2", "w3"), ("w4", "w5")]
    assert placed["p3"] == placed["p0"]
    assert placed["p4"] == placed["p1"]
    # One that waits for work only comes where least is to do.
    held = [bound(f"p{i}", *placed[f"p{i}"], work=1, ranks=8) for i in range(4)]
    assert moves([*held, replace(gangs[4], work=0)], workers) == [Bind("p4", ("w2", "w3"))]
    # A policy goes where its state is, although others are there and workers are free.
    near = replace(gangs[1], near=frozenset(("w0", "w1")))
    assert moves([held[0], near], workers) == [Bind("p1", ("w0", "w1"))]
    # Without room for two states nothing is shared.
    small = [replace(one, memory=1) for one in workers]
    assert len(moves(gangs, small)) == 3


def test_a_gang_that_workers_cannot_form_reports_the_most_ranks() -> None:
    gang = Policy("gang", work=1, ranks=3)
    problem = too_many_ranks(gang, TWO)
    assert problem is not None
    assert (problem.ranks, problem.most) == (3, 2)
    assert moves([gang], TWO) == []
    assert too_many_ranks(gang, []) is None  # no policy is there yet
    assert too_many_ranks(gang, [*TWO, RankWorker("w2")]) is None
    # Neither another class of devices nor a worker that lends none is of use, nor one without room.
    for odd in ({"device": "cuda"}, {"lends": False}):
        assert too_many_ranks(gang, [*TWO, RankWorker("w2", **odd)]) is not None  # type: ignore[arg-type]
    big = replace(gang, size=10)
    assert too_many_ranks(big, [*TWO, RankWorker("w2", memory=5)]) is not None
    assert too_many_ranks(gang, [RankWorker("w", devices=3, lends=False)]) is None


def test_policies_share_a_group_or_its_leader_or_keep_away_from_it() -> None:
    first = Policy("first", work=1, since=1, ranks=2)
    second = replace(first, policy="second", since=2)
    many = [RankWorker("w0"), RankWorker("w1")]
    assert moves([first, second], many) == [
        Bind("first", ("w0", "w1")),
        Bind("second", ("w0", "w1")),
    ]
    held = replace(first, bound=("w1", "w0"), work=0)
    # The leader stays who it is.
    assert moves([held, second], many) == [Bind("second", ("w1", "w0"))]
    # A smaller policy has a place on the group's leader, but not on lent workers.
    small = Policy("small", work=1, since=3)
    assert moves([held, small], many) == [Bind("small", ("w1",))]
    busy = replace(held, busy=True)
    assert moves([busy, replace(small, barred=frozenset({"w1"}))], many) == [
        Prefetch("small", ("w0",))
    ]
    # So a gang's leader shares a worker, and the gang needs the others for itself.
    there = bound("small", "w1", work=1, since=0)
    assert moves([there, first], many) == [Bind("first", ("w1", "w0"))]
    everywhere = [there, bound("idle", "w0")]
    assert moves([*everywhere, first], many) == [Suspend("idle", "first")]
    four = replace(second, ranks=3)
    assert moves([busy, four], [*many, RankWorker("w2")]) == []
    # No policy joins a part of a lost group.
    assert moves([busy, second], [many[0], RankWorker("w2"), RankWorker("w3")]) == [
        Bind("second", ("w2", "w3"))
    ]


def test_a_policy_that_steps_or_publishes_is_not_moved() -> None:
    policies = [bound("steps", busy=True), Policy("old", work=1, prefetched=frozenset({"w0"}))]
    assert moves(policies, ONE) == []


def test_gradients_that_accumulated_stay_when_another_can_go() -> None:
    worker = [RankWorker("w0", slots=2)]
    policies = [bound("a", accumulating=True), bound("b"), Policy("c", work=1)]
    assert moves(policies, worker)[0] == Suspend("b", "c")


def test_state_stays_where_it_is_if_there_is_room() -> None:
    policies = [Policy("a", work=1, near=frozenset({"w1"})), Policy("b", work=1)]
    assert moves(policies, TWO) == [Bind("a", ("w1",)), Bind("b", ("w0",))]
    # Work is done at once rather than later where the state is.
    policies = [
        bound("x", "w1", work=1, since=0),
        Policy("a", work=1, since=1, near=frozenset({"w1"})),
    ]
    assert moves(policies, TWO) == [Bind("a", ("w0",))]


def test_workers_are_kept_free_for_a_waiting_gang() -> None:
    gang = Policy("gang", work=1, since=1, ranks=2)
    busy = bound("busy", work=1, since=2, bound_at=99.0)
    small = Policy("small", work=1, since=3)
    assert moves([busy, gang, small], TWO) == []
    assert moves([busy, gang, small], TWO, 102.0)[0] == Suspend("busy", "gang")
    free = [replace(busy, bound=(), work=0, wanted=False), gang, small]
    assert moves(free, TWO)[0] == Bind("gang", ("w0", "w1"))
    # A gang that there are too few workers for keeps nothing from anybody.
    assert moves([gang, small], ONE) == [Bind("small", ("w0",))]


def test_memory_is_counted_per_rank_and_what_never_fits_is_said_at_once() -> None:
    workers = [RankWorker("w0", memory=100), RankWorker("w1", memory=60)]
    assert moves([Policy("a", work=1, size=90), Policy("b", work=1, size=60)], workers) == [
        Bind("a", ("w0",)),
        Bind("b", ("w1",)),
    ]
    large = Policy("large", work=1, size=150, ranks=2)
    problem = too_large(large, workers)
    assert problem is not None
    assert (problem.needed, problem.largest) == (150, 100)
    assert moves([large], workers) == []
    assert too_large(replace(large, size=100), workers) is None
    assert too_large(replace(large, device="cuda"), workers) is None  # none of its class joined yet


def test_states_add_up_and_the_largest_pass_counts_once() -> None:
    """Policies of a worker take turns, and those over one base share it."""
    workers = [RankWorker("w0", memory=100)]
    held = bound("a", size=30, working={"w0": 40})
    beside = Policy("b", work=1, size=30, working={"w0": 40})
    assert moves([held, beside], workers) == [Bind("b", ("w0",))]
    assert moves([held, replace(beside, size=31)], workers) == [Suspend("a", "b")]
    alone = Policy("b", work=1, size=61, working={"w0": 40})
    problem = too_large(alone, workers)
    assert problem is not None
    assert (problem.needed, problem.largest) == (101, 100)
    assert too_large(replace(alone, working={"other": 40}), workers) is None
    adapters = [
        Policy(name, size=5, base=base, base_size=40)
        for name, base in (("a", "x"), ("b", "x"), ("c", "y"))
    ]
    assert workers[0].needed(adapters[:2]) == 50
    assert workers[0].needed(adapters) == 95


def test_a_class_of_device_that_is_asked_for_is_given() -> None:
    workers = [RankWorker("c", device="cpu", slots=1), RankWorker("g", device="cuda", slots=1)]
    assert moves([Policy("a", work=1, device="cuda")], workers) == [Bind("a", ("g",))]
    assert moves([Policy("a", work=1, device="tpu")], workers) == []


def test_prefetch_needs_room_next_to_the_computing_policy() -> None:
    policies = [
        bound("a", work=1, since=0, size=60),
        bound("x", "w1", work=1, since=0, size=20),
        Policy("b", work=1, since=1, size=60),
    ]
    # It waits, since no younger policy is there: older work is not disturbed.
    workers = [RankWorker("w0", slots=1, memory=100), RankWorker("w1", slots=1, memory=100)]
    assert moves(policies, workers) == []
    policies[0] = replace(policies[0], since=5, bound_at=99.0)
    assert moves(policies, workers) == []  # 60 + 60 > 100
    policies[0] = replace(policies[0], size=40)
    assert moves(policies, workers) == [Prefetch("b", ("w0",))]


def test_idle_trainers_scale_to_zero() -> None:
    policies = [bound("a", wanted=False, since=92.0)]
    plan = decide(RULES, policies, TWO, 100.0)
    assert (plan.moves, plan.again, plan.wanted) == ((), 102.0, 0)
    assert moves(policies, TWO, 102.0) == [Release("a")]
    suspended = Policy("b", wanted=False, since=80.0, near=frozenset({"w0"}))
    assert moves([suspended], TWO) == [Release("b")]
    assert moves([replace(suspended, accumulating=True)], TWO) == []
    assert decide(RULES, [Policy("a"), Policy("b", ranks=2)], TWO, 0.0).wanted == 3
    # A policy's own idle time is when to ask again, too: nothing else may ever happen.
    own = [replace(policies[0], idle=3.0)]
    assert decide(BindingRules(), own, TWO, 93.0).again == 95.0
    assert moves(own, TWO, 95.0) == [Release("a")]


def test_names_are_unique() -> None:
    with pytest.raises(ValueError, match="one name"):
        decide(RULES, [Policy("a"), Policy("a")], ONE, 0.0)
