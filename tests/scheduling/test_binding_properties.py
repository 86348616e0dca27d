"""Holders of training devices in any situation: plans are sound and optimal, and no policy
starves."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from troupe.scheduling import binding
from troupe.scheduling.binding import (
    Bind,
    BindingRules,
    Policy,
    RankWorker,
    Release,
    Suspend,
    decide,
    too_many_ranks,
)

RULES = BindingRules(quantum=2.0, idle=10.0)
NAMES = [f"p{i}" for i in range(6)]


@st.composite
def tables(draw: st.DrawFn) -> tuple[list[Policy], list[RankWorker]]:
    """Any consistent picture."""
    workers = [
        RankWorker(
            f"w{i}",
            slots=draw(st.integers(0, 2)),
            memory=draw(st.sampled_from([0, 50, 100])),
            device=draw(st.sampled_from(["cpu", "cuda"])),
            devices=draw(st.integers(1, 2)),
            host=draw(st.sampled_from(["", "h0", "h1"])),
            lends=draw(st.sampled_from([True, True, True, False])),
        )
        for i in range(draw(st.integers(1, 4)))
    ]
    left = {one.worker_id: one.slots or 99 for one in workers}
    holds: dict[str, list[Policy]] = {one.worker_id: [] for one in workers}
    policies = []
    for name in NAMES[: draw(st.integers(1, 6))]:
        one = Policy(
            name,
            work=draw(st.integers(0, 2)),
            since=float(draw(st.integers(0, 9))),
            wanted=draw(st.booleans()),
            ranks=draw(st.integers(1, 4)),
            size=draw(st.sampled_from([0, 20, 40, 100, 400])),
            base=draw(st.sampled_from(["", "x", "y"])),
            working={one.worker_id: draw(st.sampled_from([0, 20, 60])) for one in workers},
            device=draw(st.sampled_from(["", "cpu", "cuda"])),
            bound_at=float(draw(st.integers(0, 12))),
        )
        one = replace(one, base_size=30 if one.base else 0)
        count = draw(st.sampled_from([n for n in (1, 2, 3, 4) if one.ranks % n == 0]))
        chosen: list[str] = []
        device = draw(st.sampled_from(["cpu", "cuda"]))
        for worker in workers:
            others = holds[worker.worker_id]
            suits = one.device in ("", worker.device) and left[worker.worker_id] > 0
            room = worker.has_room([*others, one]) and worker.devices * count >= one.ranks
            alone = not others if count > 1 else all(len(other.bound) == 1 for other in others)
            # Like a gang over several workers: of one class, from workers that lend.
            forms = count == 1 or (worker.lends and worker.device == device)
            if len(chosen) < count and suits and room and alone and forms:
                chosen.append(worker.worker_id)
        if len(chosen) == count and draw(st.booleans()):
            one = replace(one, bound=tuple(chosen))
            for worker_id in chosen:
                left[worker_id] -= 1
                holds[worker_id].append(one)
            one = replace(
                one,
                busy=draw(st.booleans()),
                leaving=draw(st.booleans()),
                accumulating=draw(st.booleans()),
            )
        elif draw(st.booleans()):
            there = draw(st.sets(st.sampled_from([worker.worker_id for worker in workers])))
            one = replace(one, near=frozenset({workers[0].worker_id}), prefetched=frozenset(there))
        policies.append(one)
    return policies, workers


@settings(deadline=None)
@given(tables(), st.floats(0, 20), st.randoms())
def test_every_plan_is_sound(
    table: tuple[list[Policy], list[RankWorker]], now: float, random: object
) -> None:
    policies, workers = table
    plan = decide(RULES, policies, workers, now)
    by_name = {one.policy: one for one in policies}
    # The same for every order of its input.
    shuffled, others = list(policies), list(workers)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    random.shuffle(others)  # type: ignore[attr-defined]
    assert decide(RULES, shuffled, others, now) == plan
    assert plan.again > now
    # No policy is moved twice, and each only as its state allows.
    named = [move.policy for move in plan.moves]
    assert len(named) == len(set(named))
    for move in plan.moves:
        one = by_name[move.policy]
        if isinstance(move, Suspend):
            assert one.bound
            assert not one.busy
            assert not one.leaving
            after = by_name[move.after]
            assert after.work
            assert not after.bound
            if one.work:  # it is younger, and has had its quantum
                assert (one.since, one.policy) > (after.since, after.policy)
                assert now - one.bound_at >= RULES.quantum
        elif isinstance(move, Release):
            assert not any((one.work, one.wanted, one.busy, one.accumulating))
        elif isinstance(move, Bind):
            assert not one.bound
            some = [worker for worker in workers if worker.worker_id in move.workers]
            assert len(some) == len(move.workers)
            share, rest = divmod(one.ranks, len(some))
            assert not rest
            assert all(worker.devices >= share for worker in some)
            if len(some) > 1:
                assert all(worker.lends for worker in some)
                assert len({worker.device for worker in some}) == 1
    # Memory suffices before any leaving policy has left, and so do slots, except for slots taken by
    # policies bound earlier.
    binds = {move.policy: move.workers for move in plan.moves if isinstance(move, Bind)}
    leave = {move.policy for move in plan.moves if isinstance(move, Suspend)}
    for worker in workers:
        held = [
            one
            for one in policies
            if worker.worker_id in one.bound or worker.worker_id in binds.get(one.policy, ())
        ]
        come = [one for one in held if worker.worker_id in one.prefetched and not one.bound]
        leavers = [one for one in held if one.leaving or one.policy in leave]
        handed = min(len(come), len(leavers))
        assert not worker.slots or len(held) - handed <= worker.slots
        assert worker.has_room(held)
        # One that lends its devices holds policies of that very group.
        groups = {
            binds.get(one.policy, one.bound)
            for one in held
            if one.policy not in leave and not one.leaving
        }
        assert len(groups) <= 1 or {group[0] for group in groups} == {worker.worker_id}
        assert all(
            one.device in ("", worker.device)
            for one in held
            if worker.worker_id in binds.get(one.policy, ())
        )


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 1), st.integers(0, 5), st.integers(-1, 2)), max_size=6),
    st.integers(1, 3),
)
def test_bindings_equal_the_best_that_brute_force_finds(
    drawn: list[tuple[int, int, int]], places: int
) -> None:
    """One slot each: of all ways to fill them the one with the oldest work, by fewest swaps."""
    workers = [RankWorker(f"w{i}", slots=1) for i in range(places)]
    policies, taken = [], set()
    for name, (work, since, where) in zip(NAMES, drawn, strict=False):
        here = f"w{where}" if 0 <= where < places and where not in taken else ""
        if here:
            taken.add(where)
        policies.append(Policy(name, work=work, since=float(since), bound=(here,) if here else ()))
    plan = decide(BindingRules(quantum=0.0), policies, workers, 100.0)
    leave = {move.policy for move in plan.moves if isinstance(move, Suspend)}
    stay = {one.policy for one in policies if one.bound} - leave
    come = {move.policy for move in plan.moves if isinstance(move, Bind)}
    come |= {move.after for move in plan.moves if isinstance(move, Suspend)}
    working = [one for one in policies if one.work]
    # Brute force: the lexicographically oldest set of working policies that fits.
    best = min(
        itertools.combinations(working, min(places, len(working))),
        key=lambda some: sorted((one.since, one.policy) for one in some),
    )
    served = {one.policy for one in working if one.policy in stay | come}
    assert served == {one.policy for one in best}
    unserved = [one for one in policies if one.bound and one not in best]
    free = places - sum(bool(one.bound) for one in policies)
    newcomers = sum(not one.bound for one in best)
    assert len(leave) == min(len(unserved), max(0, newcomers - free))


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 3), st.integers(0, 3)), min_size=1, max_size=7),
    st.integers(1, 12),
)
def test_a_gang_is_formed_whenever_that_is_possible_from_the_fewest_workers(
    drawn: list[tuple[int, int]], ranks: int
) -> None:
    workers = [
        RankWorker(f"w{i}", devices=devices, host=f"h{host}")
        for i, (devices, host) in enumerate(drawn)
    ]
    policy = Policy("gang", ranks=ranks)
    counts = [
        count
        for count in range(1, len(workers) + 1)
        if ranks % count == 0
        and sum(worker.devices * count >= ranks for worker in workers) >= count
    ]
    (bind,) = decide(RULES, [policy], workers, 0.0).moves or (None,)
    problem = too_many_ranks(policy, workers)
    assert (problem is None) == bool(counts) == (bind is not None)
    if problem is not None:
        # Moves that are reported as possible are possible.
        assert too_many_ranks(replace(policy, ranks=problem.most), workers) is None
        return
    assert isinstance(bind, Bind)
    assert len(bind.workers) == counts[0]
    # On as few hosts as possible, each one's workers side by side.
    host = {worker.worker_id: worker.host for worker in workers}
    enough = [one for one in workers if one.devices * counts[0] >= ranks]
    sizes = sorted(Counter(one.host for one in enough).values(), reverse=True)
    fewest = next(n for n in range(1, 9) if sum(sizes[:n]) >= counts[0])
    taken = [host[name] for name in bind.workers]
    assert len(set(taken)) == len([1 for _ in itertools.groupby(taken)]) == fewest


@dataclass
class _Model:
    """Policies whose micro-batches take one second each and arrive over time; swaps take 0.1 s."""

    workers: list[RankWorker]
    arrivals: dict[str, list[float]]
    ranks: dict[str, int]
    now: float = 0.0
    bound: dict[str, tuple[str, ...]] = field(default_factory=dict)
    since_bound: dict[str, float] = field(default_factory=dict)
    waits: list[float] = field(default_factory=list)
    swaps: int = 0

    def policies(self) -> list[Policy]:
        found = []
        for name, times in self.arrivals.items():
            ready = [time for time in times if time <= self.now]
            found.append(
                Policy(
                    name,
                    work=len(ready),
                    since=min(ready, default=0.0),
                    ranks=self.ranks[name],
                    bound=self.bound.get(name, ()),
                    bound_at=self.since_bound.get(name, 0.0),
                )
            )
        return found

    def run(self) -> None:
        while any(self.arrivals.values()):
            for _ in range(2 * len(self.arrivals)):
                plan = decide(RULES, self.policies(), self.workers, self.now)
                done = False
                for move in plan.moves:
                    if isinstance(move, Suspend):
                        del self.bound[move.policy]
                        self.swaps, done = self.swaps + 1, True
                    elif isinstance(move, Bind):
                        self.bound[move.policy] = move.workers
                        self.since_bound[move.policy] = self.now
                        done = True
                if not done:
                    break
            waiting = [one for one in self.policies() if one.work and not one.bound]
            idle = [one for one in self.policies() if not one.work and one.bound]
            held = {w for workers in self.bound.values() for w in workers}
            if waiting and all(one.ranks == 1 for one in waiting):  # work-conserving
                assert not idle
                assert len(held) == len(self.workers)
            for name in self.bound:
                ready = [time for time in self.arrivals[name] if time <= self.now]
                if ready:
                    self.arrivals[name].remove(ready[0])
                    self.waits.append(self.now - ready[0])
            self.now += 1.0
            assert self.now < 1000, "somebody starves"


@settings(deadline=None)
@given(tables(), st.lists(st.integers(0, 3), min_size=4, max_size=4), st.floats(0, 20))
def test_judging_alike_workers_together_decides_what_judging_each_does(
    table: tuple[list[Policy], list[RankWorker]], copies: list[int], now: float
) -> None:
    policies, workers = table
    more = [
        (replace(worker, worker_id=f"{worker.worker_id}-{n}"), worker.worker_id)
        for worker, count in zip(workers, copies, strict=False)
        for n in range(count)
    ]
    policies = [
        replace(
            one,
            ranks=one.ranks if one.bound else 2 * one.ranks,
            working=dict(one.working) | {new.worker_id: one.working[old] for new, old in more},
        )
        for one in policies
    ]
    workers = [*workers, *(new for new, _ in more)]
    found = decide(RULES, policies, workers, now)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            binding._Table, "_split", lambda _, __, kinds: [[one] for some in kinds for one in some]
        )
        assert decide(RULES, policies, workers, now) == found


@settings(deadline=None)
@given(
    st.dictionaries(
        st.sampled_from(NAMES),
        st.tuples(st.lists(st.integers(0, 12), min_size=1, max_size=8), st.integers(1, 2)),
        min_size=1,
    ),
    st.integers(2, 3),
)
def test_policies_do_not_starve_and_devices_do_not_idle(
    drawn: dict[str, tuple[list[int], int]], places: int
) -> None:
    model = _Model(
        [RankWorker(f"w{i}", slots=1) for i in range(places)],
        {name: sorted(map(float, times)) for name, (times, _) in drawn.items()},
        {name: ranks for name, (_, ranks) in drawn.items()},
    )
    total = sum(len(times) * ranks for times, ranks in drawn.values())
    model.run()
    # No policy waits longer than the time of all work, plus a quantum for each swap.
    assert max(model.waits) <= total + RULES.quantum * (model.swaps + 1)
