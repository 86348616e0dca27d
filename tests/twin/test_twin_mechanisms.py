"""Mechanisms of the twin that published tables need: redundancy, whole batches, waves of weights,
gangs that lose a rank, mixed workloads."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from testbed.twin.cluster import PublishedJob, PublishedTwin
from testbed.twin.faults import NodeFaults
from testbed.twin.workload import MixedWorkload
from tests.twin.jobs import ENGINE, TRAINER, constant, disturbed_team, published, team, two_policies
from troupe.scheduling.binding import RankWorker
from troupe.twin.cluster import Twin
from troupe.twin.costs import EngineRates
from troupe.twin.job import EngineFleet, TwinPolicy


def _one_policy(rates: EngineRates = ENGINE, **more: Any) -> PublishedJob:
    policy = TwinPolicy((EngineFleet(4, rates),), TRAINER)
    defaults: dict[str, Any] = {"queries_per_step": 4, "micro_batch": 2, "mode": "async"}
    return PublishedJob(
        policies={"p": policy},
        workload=constant,
        trainers=[RankWorker("t")],
        **defaults | more,
    )


@settings(max_examples=15, deadline=None)
@given(
    redundant=st.integers(0, 3),
    mode=st.sampled_from(["sync", "micro_batch", "async"]),
    policy=st.sampled_from(["least_work", "round_robin"]),
    seed=st.integers(0, 5),
)
def test_a_group_is_as_large_as_is_wanted_whatever_is_redundant(
    redundant: int, mode: Any, policy: Any, seed: int
) -> None:
    job = two_policies(mode=mode, redundant=redundant, workload=team(seed=seed), in_flight=48)
    job = dataclasses.replace(job, routing=dataclasses.replace(job.routing, policy=policy))
    run = Twin(job).run(2)
    assert run.steps[-1].trajectories == 2 * job.queries_per_step * (4 - redundant)


def test_redundant_trajectories_shorten_a_step_with_stalls() -> None:
    few, more = (disturbed_team(stalls=0.05, stall_seconds=120.0) for _ in range(2))
    more = dataclasses.replace(more, group_size=6)
    plain = Twin(two_policies(mode="sync", workload=few, in_flight=96)).run(3).means(0)
    spare = (
        Twin(two_policies(mode="sync", workload=more, in_flight=96, redundant=2)).run(3).means(0)
    )
    assert spare.seconds < plain.seconds / 2


def test_long_swaps_lengthen_a_step_by_no_more_than_half() -> None:
    """Two policies take turns on one slot: with a quantum that ignored the cost of a swap they
    would move after every micro-batch."""
    slot = [RankWorker("t", slots=1, memory=1)]  # without room for both states
    runs = []
    for seconds in (0.0, 4.0):
        job = two_policies(mode="micro_batch", queries_per_step=48, in_flight=64)
        policies = {
            name: dataclasses.replace(
                one,
                trainer=dataclasses.replace(
                    one.trainer, swap_seconds=seconds, micro_batch_seconds=1.0
                ),
            )
            for name, one in job.policies.items()
        }
        runs.append(Twin(dataclasses.replace(job, policies=policies, trainers=slot)).run(2))
    free, costly = runs
    assert 0 < costly.swaps < free.swaps / 2
    # Swaps take at most half of the computing time, except for the first of each policy.
    spent = costly.steps[-1].at - free.steps[-1].at
    assert spent <= free.steps[-1].at / 2 + 2 * 2 * 4.0


def test_whole_batches_overlap_training_but_not_each_other() -> None:
    slow = disturbed_team(stalls=0.05, stall_seconds=30.0)
    job = published(workload=slow, in_flight=200)
    seconds = [
        PublishedTwin(dataclasses.replace(job, mode=mode, whole_batches=whole))
        .run(6)
        .means(1)
        .seconds
        for mode, whole in (("sync", False), ("async", True), ("async", False))
    ]
    assert seconds[0] > seconds[1] > seconds[2]


def test_whole_batches_expose_only_the_load_of_fetched_weights() -> None:
    """No turn runs then, so that none is read again."""
    for load, fetch in ((1.0, 3.0), (4.0, 0.0)):
        rates = dataclasses.replace(ENGINE, load_seconds=load, fetch_seconds=fetch)
        job = _one_policy(rates, mode="async", whole_batches=True, queries_per_step=200)
        assert PublishedTwin(job).run(5).means(1).exposed == pytest.approx(load)
        overlapping = dataclasses.replace(job, whole_batches=False)
        assert PublishedTwin(overlapping).run(5).means(1).exposed > 1.01 * load


def test_weights_fetched_while_serving_are_not_exposed() -> None:
    def exposed(load: float, fetch: float) -> float:
        rates = dataclasses.replace(ENGINE, load_seconds=load, fetch_seconds=fetch)
        return Twin(_one_policy(rates, mode="sync")).run(3).means(1).exposed

    # In `sync` no turn runs while weights are loaded: nothing is read again.
    assert exposed(4.0, 0.0) == pytest.approx(4.0)
    assert exposed(1.0, 3.0) == pytest.approx(1.0)


def test_some_engines_serve_while_the_others_load() -> None:
    twin = Twin(_one_policy())
    router = twin.routers[0]["p"]
    serving: list[int] = []

    def watch() -> Any:
        while True:
            yield twin.env.timeout(0.1)
            serving.append(sum(one.serving for one in router.engines))

    twin.env.process(watch())
    done = twin.env.process(router.update(twin.env))
    twin.env.run(until=done)
    assert min(serving) == 2
    assert [one.serving for one in router.engines] == [True] * 4
    # Two waves of half a second.
    assert twin.env.now == pytest.approx(1.0)


def test_a_gang_that_lost_a_rank_needs_time_to_be_built_again() -> None:
    job = published(mode="sync", trainers=3)
    quick, slow = (
        PublishedTwin(dataclasses.replace(job, faults=NodeFaults(60.0, 5.0, restart, seed=1)))
        for restart in (0.0, 40.0)
    )
    seconds = quick.run(6).steps[-1].at
    assert slow.run(6).steps[-1].at > seconds
    assert quick.failures


def test_a_mixed_workload_has_its_shares() -> None:
    def of(name: str) -> Any:
        return dataclasses.replace(team(), domain=name)

    mixed = MixedWorkload([(of("a"), 1.0), (of("b"), 2.0), (of("c"), 1.0)])
    domains = [mixed(n)[0].turns[0].domain for n in range(200)]
    counts = Counter(domains)
    assert counts["a"] == pytest.approx(50, abs=2)
    assert counts["b"] == pytest.approx(100, abs=2)
    # No kind comes in long stretches.
    assert max(len(list(run)) for _, run in itertools.groupby(domains)) <= 3


@pytest.mark.parametrize("shares", [[], [0.0], [1.0, -0.5]])
def test_shares_that_are_not_positive_are_refused(shares: list[float]) -> None:
    with pytest.raises(ValueError, match="shares must be positive"):
        MixedWorkload([(team(), share) for share in shares])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"redundant": 4}, "redundant = 4"),
        ({"redundant": -1}, "redundant = -1"),
        ({"alpha": -1}, "alpha = -1"),
        ({"spare": -2}, "spare = -2"),
        ({"faults": NodeFaults(0.0)}, "mtbf_seconds = 0.0"),
    ],
)
def test_numbers_out_of_range_are_refused_by_name(change: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        PublishedTwin(dataclasses.replace(published(), **change))
