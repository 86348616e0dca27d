"""Properties of `benchmarks.papers.twin`'s jobs that hold at any size."""

from __future__ import annotations

import dataclasses
from collections import Counter

import pytest

from benchmarks.papers.twin import flexmarl, mechanisms, rollart, rollart_rows
from testbed.twin.cluster import PublishedJob, PublishedTwin
from troupe.twin.cluster import Twin


def _small(features: rollart.Features, **more: bool) -> PublishedJob:
    job = rollart.job(features, fleet={"H800": 1, "H20": 1}, **more)
    return dataclasses.replace(job, queries_per_step=4, in_flight=96, micro_batch=8)


@pytest.mark.parametrize("name", flexmarl.SETUPS)
def test_rows_of_flexmarl_train_the_same_trajectories_in_the_published_order(name: str) -> None:
    runs = {
        row: Twin(dataclasses.replace(flexmarl.job(name, row), queries_per_step=32)).run(1)
        for row in flexmarl.ROWS
    }
    ends = {row: run.steps[-1] for row, run in runs.items()}
    assert len({one.trained_tokens for one in ends.values()}) == 1
    # Engines move between policies of one model, in the rows with balancing only.
    assert {row for row, run in runs.items() if run.moves} == {"sync", "flexmarl"}
    # States of all policies fit on one gang: nothing is swapped.
    assert not any(run.swaps for run in runs.values())
    told = flexmarl.PUBLISHED[name]
    assert sorted(ends, key=lambda row: ends[row].at) == sorted(told, key=lambda row: told[row])


def test_every_policy_of_the_colocated_row_has_a_gang_of_its_own() -> None:
    run = Twin(dataclasses.replace(flexmarl.job("ma", "colocated"), queries_per_step=8)).run(1)
    hosts = [host for group in run.bound.values() for host in group]
    assert len(set(hosts)) == len(hosts) == 5 * 8


def test_every_row_of_rollart_trains_the_same_trajectories() -> None:
    ends = {
        row: PublishedTwin(_small(features)).run(2).steps[-1]
        for row, features in rollart.FEATURES.items()
    }
    assert {one.trained_tokens for one in ends.values()} == {ends["sync"].trained_tokens}
    assert {one.trajectories for one in ends.values()} == {64}
    assert ends["sync"].staleness == 0


def test_weights_fetched_while_serving_expose_less() -> None:
    features = rollart.FEATURES["sync"]
    blocked, fetched = (
        PublishedTwin(_small(dataclasses.replace(features, fetched=one))).run(3).means(1)
        for one in (False, True)
    )
    assert blocked.exposed > rollart.PULL[0]
    assert fetched.exposed < rollart.PULL[0] / 10


def test_rows_of_rollart_have_the_published_devices_and_batch() -> None:
    for row, features in rollart.FEATURES.items():
        job = rollart_rows.job(features)
        devices = {
            fleet.device_class: fleet.count * fleet.devices
            for fleet in job.policies["agent"].engines
        }
        # 128 H800 for the baselines, 96 H800 and 32 H20 for RollArt; 32 H800 of both train.
        assert devices == ({"H800": 64, "H20": 32} if row == "rollart" else {"": 96})
        assert sum(one.devices for one in job.trainers) == 32
        drawn = [one for query in range(job.queries_per_step) for one in job.workload(query)]
        assert len(drawn) == 512
        turns = [turn for one in drawn for turn in one.turns]
        assert max(turn.prompt + turn.response for turn in turns) <= 32_768
        for kind in ("software", "shop", "lake", "mathematics", "game"):
            few = kind in ("mathematics", "game")
            lengths = [len(one.turns) for one in drawn if one.turns[0].domain == kind]
            assert 512 / 5 - 16 <= len(lengths) <= 512 / 5 + 16
            assert max(lengths) <= 5 if few else 10 < max(lengths) <= 100


def test_rows_of_rollart_come_in_the_published_order() -> None:
    seconds = {}
    for row, features in rollart.FEATURES.items():
        job = rollart_rows.job(features)
        seconds[row] = rollart.run(job, 2).seconds
    assert sorted(seconds, key=seconds.__getitem__) == ["rollart", "areal", "one_off", "sync"]
    for row, told in rollart_rows.PUBLISHED.items():
        assert seconds[row] / seconds["rollart"] == pytest.approx(told, rel=0.15)


def test_affinity_sends_kinds_of_tasks_to_their_classes() -> None:
    job = _small(rollart.FEATURES["rollart"])
    twin = PublishedTwin(job)
    served: Counter[tuple[str, str]] = Counter()
    for engine in twin.routers[0]["agent"].engines:
        admit = engine.admit

        def note(turn, admit=admit, engine=engine):  # type: ignore[no-untyped-def]
            served[turn.turn.domain, engine.fleet.device_class] += 1
            admit(turn)

        engine.admit = note  # type: ignore[method-assign]
    twin.run(2)
    # A class that would take too long is left (`routing.STAY_RATIO`), and one that loads weights.
    for kind, device in (("mathematics", "H20"), ("software", "H800"), ("game", "H800")):
        turns = sum(count for (domain, _), count in served.items() if domain == kind)
        assert served[kind, device] > 0.5 * turns > 0


def test_environments_of_larger_spread_cost_a_batch_more() -> None:
    gains = [rollart.environments(sigma, queries=4) for sigma in (0.0, 3.0, 10.0)]
    assert 1.0 <= gains[0] < gains[1] < gains[2]


def test_failures_cost_time_and_more_hosts_fail_more_often() -> None:
    job = dataclasses.replace(_small(rollart.FEATURES["rollart"]), rollout_workers=2)
    lost = rollart.goodput(job, 400, 3, faster=5e4)
    assert lost.failures > 0
    assert 0 < lost.share < 1
    assert lost.per_day == pytest.approx(400 * 86_400 / rollart.HOST_MTBF)
    # 419 interruptions in 54 days on 2,048 hosts.
    assert pytest.approx(419) == 2048 * 54 * 86_400 / rollart.HOST_MTBF


def test_all_mechanisms_together_are_faster_than_none_and_than_any_alone() -> None:
    one = mechanisms.worth(64, overlapping=4, apart=2, queries_per_device=0.1)
    assert one.all < min(one.alone.values()) < one.none


def test_other_sizes_and_unknown_mechanisms_are_refused() -> None:
    with pytest.raises(ValueError, match="devices = 65"):
        mechanisms.job(65, frozenset())
    with pytest.raises(ValueError, match="magic"):
        mechanisms.job(64, frozenset({"magic"}))
