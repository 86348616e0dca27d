"""Actions of trajectories in the twin: they run in a pool, and leave nothing behind in it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
import simpy
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.papers.twin import tangram
from services.reward.dispatch import dispatcher as live
from testbed.twin import actions
from testbed.twin.actions import (
    CORES,
    REWARD,
    ActingTurn,
    ActionPool,
    ElasticPool,
    Pods,
    SimulatedAction,
)
from testbed.twin.cluster import PublishedJob, PublishedTwin
from tests.twin.jobs import constant, published
from troupe.scheduling import elastic
from troupe.twin.workload import TwinTrajectory

SHELL = SimulatedAction("shell", 1, 1, 2.0, 0.0)
TESTS = SimulatedAction(REWARD, 1, 8, 1.0, 40.0)


class _Watched:
    """Makes a pool and keeps it."""

    def __init__(self, kind: str, cores: Sequence[int], *, stateful: bool = True) -> None:
        self._capacities = [{CORES: each} for each in cores]
        self._kind, self._stateful = kind, stateful
        self.pool: Any = None

    def __call__(self, env: simpy.Environment) -> ActionPool:
        if self._kind == "pods":
            self.pool = Pods(env, self._capacities, cores=2, start_seconds=1.0, made_per_second=4.0)
        else:
            self.pool = ElasticPool(env, self._capacities, stateful=self._stateful)
        return self.pool  # type: ignore[no-any-return]

    def held(self) -> int:
        """Cores or pods that somebody has, and actions that wait."""
        if isinstance(self.pool, Pods):
            return self.pool._places.count + len(self.pool._places.queue)
        machines = self.pool._machines.values()
        busy = sum(m.capacity[CORES] - m.free[CORES] + len(m.running) + m.homes for m in machines)
        return int(busy) + len(self.pool._queue) + len(self.pool._waiting)


def _coding(index: int, size: int = 4) -> list[TwinTrajectory]:
    """Two turns: a command, then tests."""
    return [
        TwinTrajectory(
            (
                ActingTurn("big", 100, 20 + 5 * ((index + n) % 7), call=SHELL),
                ActingTurn("small", 200, 40, call=TESTS),
            ),
            before=0.5,
        )
        for n in range(size)
    ]


def _job(make: Any, **more: Any) -> PublishedJob:
    return published(**{"workload": _coding, "in_flight": 48, "actions": make} | more)


@settings(max_examples=25, deadline=None)
@given(
    kind=st.sampled_from(["elastic", "stateless", "pods"]),
    mode=st.sampled_from(["sync", "micro_batch", "async"]),
    redundant=st.integers(0, 3),
    cores=st.lists(st.integers(2, 24), min_size=1, max_size=3),
)
def test_a_step_ends_and_its_trajectories_hold_no_core_whatever_left_early(
    kind: str, mode: Any, redundant: int, cores: list[int]
) -> None:
    made = _Watched(kind, cores, stateful=kind != "stateless")
    job = _job(made, mode=mode, redundant=redundant)
    twin = PublishedTwin(job)
    run = twin.run(2)
    wanted = 2 * job.queries_per_step * (4 - redundant)
    assert run.steps[-1].trajectories == wanted
    assert twin.acts[-1][0] >= 2 * wanted
    assert made.held() == 0


def test_actions_take_their_time_and_waits_for_pods_are_part_of_it() -> None:
    elastic = PublishedTwin(_job(_Watched("elastic", [1000]), queries_per_step=1, in_flight=4))
    pods = PublishedTwin(_job(_Watched("pods", [4]), queries_per_step=1, in_flight=4))
    elastic.run(1)
    pods.run(1)
    ((count, seconds),), ((count_in_pods, seconds_in_pods),) = elastic.acts, pods.acts
    # Learned curves may give tests fewer than eight cores, never more.
    assert 2.0 + 1.0 + 40.0 / 8 <= 2 * seconds / count <= 2.0 + 41.0
    assert seconds_in_pods > 8 * (2.0 + 21.0) / 2 * 1.2
    assert count_in_pods == count == 8


def test_a_step_with_pods_takes_longer_than_with_elastic_actions_and_trains_the_same() -> None:
    law = dataclasses.replace(tangram.CODING, turns=6.0)
    twins = {
        kind: PublishedTwin(tangram.job(tangram.pool(kind, 1), 64, law)) for kind in tangram.POOLS
    }
    ends = {kind: twin.run(1).steps[-1] for kind, twin in twins.items()}
    counts, seconds = (
        {kind: twin.acts[-1][part] for kind, twin in twins.items()} for part in (0, 1)
    )
    assert len({(ends[kind].trained_tokens, counts[kind]) for kind in ends}) == 1
    assert ends["enough"].at <= ends["elastic"].at < ends["pods"].at
    assert seconds["enough"] <= seconds["elastic"] < seconds["pods"]


def test_calls_need_a_pool_and_no_barrier() -> None:
    with pytest.raises(ValueError, match="actions: turns call actions"):
        PublishedTwin(published(workload=_coding))
    with pytest.raises(ValueError, match="barrier: "):
        PublishedTwin(_job(_Watched("pods", [4]), barrier=True))


def test_a_lost_worker_takes_its_actions_along() -> None:
    made = _Watched("elastic", [8, 8])
    twin = PublishedTwin(_job(made, rollout_workers=2))
    twin.env.clock.call(6.0, lambda _: twin.lose_worker(0))
    run = twin.run(2)
    assert twin.failures == 1
    assert run.steps[-1].trajectories == 2 * 12 * 4
    assert made.held() == 0


def test_a_pool_without_calls_changes_nothing() -> None:
    plain = dataclasses.replace(
        published(), workload=constant, policies={"p": published().policies["big"]}
    )
    pooled = dataclasses.replace(plain, actions=_Watched("elastic", [1]))
    assert PublishedTwin(plain).run(2).steps[-1] == PublishedTwin(pooled).run(2).steps[-1]


def test_actions_are_decided_by_the_function_of_the_reward_service() -> None:
    assert actions.decide_over is elastic.decide_over
    assert live.decide_over is elastic.decide_over
