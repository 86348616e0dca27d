"""The orchestrator moves engines where the heartbeats say that they are needed."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest

from tests.support.cluster import Cluster, job_yaml
from tests.support.fake_rollout import FakeRollout
from tests.support.waiting import until
from troupe.rpc import Internal, NotFound
from troupe.v1 import common_pb2 as common_pb
from troupe.v1 import orchestrator_pb2 as orchestrator_pb

EAGER = {"threshold": 2, "sustain_seconds": 0, "cooldown_seconds": 0.2}


def job(**over: Any) -> str:
    """A job whose solver has three engines, its checker one."""
    return job_yaml(
        **{
            "policies.solver.engine": {"replicas": 3},
            "balancing": EAGER,
            "pipeline.steps": 1,
            **over,
        }
    )


async def running(cluster: Cluster, text: str) -> tuple[str, FakeRollout]:
    """A job that runs until the test says otherwise."""
    [worker] = cluster.rollouts
    worker.script.seconds = 1000
    job_id = await cluster.submit(text)
    await cluster.wait(job_id, [common_pb.JOB_STATE_RUNNING])
    return job_id, worker


def engines_of(worker: FakeRollout, job_id: str) -> Counter[str]:
    return Counter(worker.places[job_id].values())


async def test_engines_go_where_turns_wait_and_come_back(cluster: Cluster) -> None:
    job_id, worker = await running(cluster, job())
    await asyncio.sleep(0.5)  # no turn waits, so that no engine moves, however long this takes
    assert worker.moves == []
    worker.script.waiting = {"checker": 30}
    await until(lambda: engines_of(worker, job_id) == {"checker": 3, "solver": 1})
    worker.script.waiting = {"checker": 2, "solver": 40}
    await until(lambda: engines_of(worker, job_id) == {"checker": 1, "solver": 3})
    # Now it is as good as it gets.
    moves = len(worker.moves)
    assert moves == 4
    await asyncio.sleep(0.5)  # several looks of the balancer; more of them change nothing
    assert len(worker.moves) == moves
    picture = await cluster.api.GetCluster(orchestrator_pb.GetClusterRequest())
    assert {load.policy: load.waiting for load in picture.loads} == {"checker": 2, "solver": 40}
    await cluster.cancel(job_id)
    await cluster.wait(job_id)
    texts = [text for text in await cluster.notices(job_id) if "moved from" in text]
    assert len(texts) == 4
    assert "moved from solver to checker in 0.0 s" in texts[0]


async def test_no_engine_moves_if_balancing_is_off_or_every_policy_has_its_minimum(
    cluster: Cluster,
) -> None:
    for text in (
        job(balancing={**EAGER, "inter": False}),
        job(balancing={**EAGER, "minimum": {"solver": 3}}),
    ):
        [worker] = cluster.rollouts
        worker.script.waiting = {"checker": 100}
        job_id, worker = await running(cluster, text)
        await asyncio.sleep(0.5)  # several looks of the balancer; more of them change nothing
        assert worker.calls["MoveEngine"] == 0
        await cluster.cancel(job_id)
        await cluster.wait(job_id)


async def test_engines_that_policies_share_never_move(cluster: Cluster) -> None:
    shared = {"model": {"path": "/models/base"}, "lora": {"rank": 4}, "engine": {"replicas": 3}}
    over: dict[str, Any] = {
        f"policies.{name}.{field}": value
        for name in ("solver", "checker")
        for field, value in shared.items()
    }
    # Two further policies have engines of their own, which move.
    for name, count in (("idle", 3), ("busy", 1)):
        over[f"policies.{name}"] = {"model": {"path": "/models/own"}, "engine": {"replicas": count}}
        over[f"agents.{name}"] = {"policy": name}
    [worker] = cluster.rollouts
    worker.script.waiting = {"checker": 300, "busy": 30}
    job_id, worker = await running(cluster, job(**over))
    await until(lambda: engines_of(worker, job_id)["busy"] == 3)
    assert engines_of(worker, job_id) == {"solver": 3, "checker": 3, "idle": 1, "busy": 3}
    assert set(worker.moves) == {("idle", "busy")}
    await cluster.cancel(job_id)
    await cluster.wait(job_id)


@pytest.mark.slow
async def test_a_move_that_fails_is_told_and_not_repeated_at_once(cluster: Cluster) -> None:
    [worker] = cluster.rollouts
    worker.script.move_errors = [Internal("the link broke"), Internal("the link broke")]
    worker.script.waiting = {"checker": 6}
    job_id, worker = await running(
        cluster, job(balancing={**EAGER, "cooldown_seconds": 1.0, "minimum": {"solver": 2}})
    )
    await until(lambda: worker.moves == [("solver", "checker")])
    first, second, third = worker.asked_to_move
    assert min(second - first, third - second) >= 1.0
    await cluster.cancel(job_id)
    await cluster.wait(job_id)
    texts = [text for text in await cluster.notices(job_id) if "did not move" in text]
    assert "did not move from solver to checker: the link broke" in texts[0]


async def test_weights_that_are_gone_are_published_again_for_the_move(cluster: Cluster) -> None:
    [worker] = cluster.rollouts
    worker.script.move_errors = [NotFound("gone", kind="weights_not_found", field="checker")]
    worker.script.waiting = {"checker": 6}
    job_id, worker = await running(cluster, job(balancing={**EAGER, "minimum": {"solver": 2}}))
    [trainer] = cluster.trainers
    await until(lambda: worker.moves == [("solver", "checker")])
    # Each policy once, and the checker once more.
    assert trainer.calls["Bind"] == 3
    await cluster.cancel(job_id)
    await cluster.wait(job_id)


async def test_an_orchestrator_that_comes_back_goes_on_from_what_it_finds(
    cluster: Cluster,
) -> None:
    job_id, worker = await running(cluster, job(balancing={**EAGER, "minimum": {"solver": 2}}))
    worker.script.move_seconds = 0.5
    worker.script.waiting = {"checker": 20}
    await until(lambda: worker.calls["MoveEngine"] == 1)
    await cluster.stop_orchestrator()
    await cluster.start_orchestrator()
    # The worker has carried the move out; it is at its minimum.
    await until(lambda: worker.moves == [("solver", "checker")])
    await cluster.wait(job_id, [common_pb.JOB_STATE_RUNNING])
    await asyncio.sleep(1.0)  # several looks of the balancer; more of them change nothing
    assert worker.calls["MoveEngine"] == 1
    assert engines_of(worker, job_id) == {"checker": 2, "solver": 2}
    await cluster.cancel(job_id)
    await cluster.wait(job_id)


async def test_a_step_s_metrics_count_moved_engines(cluster: Cluster) -> None:
    [worker] = cluster.rollouts
    worker.script.waiting = {"checker": 6}
    worker.script.seconds = 1.5
    job_id = await cluster.submit(job(balancing={**EAGER, "minimum": {"solver": 2}}))
    done = await cluster.wait(job_id)
    assert done.state == common_pb.JOB_STATE_SUCCEEDED
    assert done.metrics["balancing/moves"] == 1
    assert done.metrics["balancing/disparity"] > 0


async def test_a_worker_that_dies_in_a_move_is_replaced_and_the_job_ends(
    cluster: Cluster,
) -> None:
    [worker] = cluster.rollouts
    worker.script.waiting = {"checker": 6}
    worker.script.move_seconds = 30
    job_id, worker = await running(cluster, job(balancing={**EAGER, "minimum": {"solver": 2}}))
    await until(lambda: worker.calls["MoveEngine"] == 1)
    await worker.down()
    # The next one begins where the specification says.
    other = await cluster.add_rollout()
    assert (await cluster.wait(job_id)).state == common_pb.JOB_STATE_SUCCEEDED
    assert engines_of(other, job_id) == {"solver": 3, "checker": 1}
    assert other.moves == []


async def test_workers_are_balanced_each_by_itself_and_those_that_leave_not_at_all(
    cluster: Cluster,
) -> None:
    job_id, first = await running(cluster, job(balancing={**EAGER, "minimum": {"solver": 2}}))
    second = await cluster.add_rollout()
    await until(lambda: job_id in second.places)
    second.script.waiting = {"checker": 6}
    await until(lambda: second.moves == [("solver", "checker")])
    assert first.moves == []
    # It announced that it leaves: its further actions do not matter.
    first.draining = True
    workers = cluster.orchestrator.service._at.shared.workers  # type: ignore[union-attr]
    await until(lambda: len(workers.usable(orchestrator_pb.WORKER_KIND_ROLLOUT)) == 1)
    first.script.waiting = {"checker": 30}
    await asyncio.sleep(0.5)  # several looks of the balancer; more of them change nothing
    assert first.calls["MoveEngine"] == 0
    await cluster.cancel(job_id)
    await cluster.wait(job_id)
