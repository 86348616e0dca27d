"""Populations: best responses that begin again with the first weights (`restart: base`)."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from services.orchestrator.state.weight_versions import WeightVersions
from tests.orchestrator.playing import (
    MATCHES,
    game,
    lasting,
    newer_wins,
    population,
)
from tests.support.cluster import Cluster, job_yaml
from tests.support.waiting import PATIENCE
from troupe.v1 import common_pb2 as common_pb
from troupe.v1 import orchestrator_pb2 as orchestrator_pb

RESTART = {"iteration_steps": 1, "matches": MATCHES, "restart": "base"}


async def versions(cluster: Cluster, job_id: str) -> list[tuple[int, int, bool]]:
    """The versions: steps, number, whether it is a restart."""
    found = await cluster.api.ListVersions(
        orchestrator_pb.ListVersionsRequest(job_id=job_id, policy="player")
    )
    return [(one.step, one.weights.version, one.restarted) for one in found.versions]


async def test_best_responses_that_begin_again(cluster: Cluster) -> None:
    newer_wins(cluster)
    job_id = await cluster.submit(game(pipeline__steps=3, population=RESTART))
    job = await cluster.wait(job_id)
    assert job.state == common_pb.JOB_STATE_SUCCEEDED, job.problem
    (pool,) = (await population(cluster, job_id)).pools
    # All of them come from the first weights; nothing restarts after the last step.
    assert [(m.member_id, m.parent) for m in pool.members] == [
        ("player@0", ""),
        ("player@1", "player@0"),
        ("player@3", "player@0"),
        ("player@5", "player@0"),
    ]
    assert await versions(cluster, job_id) == [
        (0, 0, False), (1, 1, False), (1, 2, True), (2, 3, False), (2, 4, True), (3, 5, False),
    ]  # fmt: skip
    # Games of an earlier best response are never trained on.
    assert [one.oldest_version for one in cluster.trainers[0].requests] == [0, 2, 4]
    audit = await cluster.api.AuditJob(orchestrator_pb.AuditJobRequest(job_id=job_id))
    assert not audit.violations
    assert "starts from the first weights" in " ".join(await cluster.notices(job_id))


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["pipeline_psro", "league"])
async def test_a_settled_learner_restarts(cluster: Cluster, algorithm: str) -> None:
    newer_wins(cluster)
    kind = "main_exploiter" if algorithm == "league" else "main"
    section = RESTART | {
        "algorithm": algorithm,
        "symmetric": True,
        "learners": {"spy": {"kind": kind}},
        "league": {"freeze_after": 1},
    }
    text = job_yaml(
        policies=["player", "spy"],
        agents={"alice": {"policy": "player"}, "bob": {"policy": "player"}},
        pipeline__steps=3,
        pipeline__queries_per_step=4,
        population=section,
    )
    job = await cluster.wait(job_id := await cluster.submit(text))
    assert job.state == common_pb.JOB_STATE_SUCCEEDED, job.problem
    members = (await population(cluster, job_id)).pools[0].members
    found = {one.member_id: one.parent for one in members if one.iteration}
    if algorithm == "league":  # main agents continue
        assert found == {
            "player@1": "player@0", "player@2": "player@1", "player@3": "player@2",
            "spy@1": "spy@0", "spy@3": "spy@0", "spy@5": "spy@0",
        }  # fmt: skip
    else:  # in turn: player, spy, player
        assert found == {
            "player@1": "player@0", "player@3": "player@0", "player@4": "player@3",
            "spy@1": "spy@0", "spy@2": "spy@1", "spy@4": "spy@0",
        }  # fmt: skip


@pytest.mark.parametrize("moved", [False, pytest.param(True, marks=pytest.mark.slow)])
async def test_an_orchestrator_that_dies_while_a_policy_begins_again(
    cluster: Cluster, moved: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before or after the store has the restart: the versions equal an undisturbed job's."""
    newer_wins(cluster)
    quiet = await cluster.submit(game("quiet", pipeline__steps=3, population=RESTART))
    assert (await cluster.wait(quiet)).state == common_pb.JOB_STATE_SUCCEEDED
    stuck = asyncio.Event()
    restart = WeightVersions.restart

    async def stay(self: WeightVersions, *args: Any) -> Any:
        if moved:
            await restart(self, *args)
        stuck.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(WeightVersions, "restart", stay)
    troubled = await cluster.submit(game("troubled", pipeline__steps=3, population=RESTART))
    async with asyncio.timeout(PATIENCE):
        await stuck.wait()
    await cluster.stop_orchestrator()
    monkeypatch.setattr(WeightVersions, "restart", restart)
    await cluster.start_orchestrator()
    job = await cluster.wait(troubled)
    assert job.state == common_pb.JOB_STATE_SUCCEEDED, job.problem
    assert await versions(cluster, troubled) == await versions(cluster, quiet)
    found, expected = [await population(cluster, one) for one in (troubled, quiet)]
    assert lasting(found) == lasting(expected)
    assert not (
        await cluster.api.AuditJob(orchestrator_pb.AuditJobRequest(job_id=troubled))
    ).violations


async def test_first_weights_that_are_gone_are_named(cluster: Cluster) -> None:
    newer_wins(cluster)
    cluster.trainers[0].script.lose_first = True
    job = await cluster.wait(await cluster.submit(game(population=RESTART)))
    assert (job.state, job.problem.kind) == (common_pb.JOB_STATE_FAILED, "state_not_found")
