"""What an evaluation says of its team: contributions by repetition, and the errors of judges."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.cluster import Cluster, job_yaml
from troupe.algorithms.scores import interval
from troupe.v1 import common_pb2 as common_pb
from troupe.v1 import orchestrator_pb2 as orchestrator_pb
from troupe.v1 import rollout_pb2 as rollout_pb

FROZEN = {
    "model": {"config": {"model_type": "qwen3"}, "tokenizer": "somewhere"},
    "trainable": False,
}


def replaced(ticket: rollout_pb.Ticket) -> set[str]:
    return {*ticket.left_out, *ticket.cast}


async def succeed(cluster: Cluster, text: str) -> orchestrator_pb.Job:
    job = await cluster.wait(await cluster.submit(text))
    assert job.state == common_pb.JOB_STATE_SUCCEEDED, job.problem
    return job


@pytest.mark.parametrize("by", [None, "base"])
async def test_contributions_are_differences_to_the_same_queries_without_an_agent(
    cluster: Cluster, by: str | None
) -> None:
    """Without the solver nothing is solved; without the checker, the first query is not."""

    def success(ticket: rollout_pb.Ticket) -> dict[str, float]:
        lost = "solver" in replaced(ticket) or ("checker" in replaced(ticket) and not ticket.index)
        return {"team": float(not lost)}

    script = cluster.rollouts[0].script
    script.reward = success
    over = {"contributions": {"queries": 2} | ({} if by is None else {"by": by}), "samples": 3}
    changes = {} if by is None else {"policies__base": FROZEN}
    text = job_yaml(pipeline__steps=0, evaluations={"one": {"queries": 4, **over}}, **changes)
    job = await succeed(cluster, text)

    tickets = {one.trajectory_id: one for one in cluster.rollouts[0].tickets}
    repeated = {name: one for name, one in tickets.items() if replaced(one)}
    assert set(repeated) == {
        f"one-h{query}-e0-t{number}.without.{agent}"
        for query in range(2)
        for number in range(3)
        for agent in ("solver", "checker")
    }
    for name, one in repeated.items():
        original = tickets[name.partition(".")[0]]
        assert (one.query_id, one.index, one.seed) == (
            original.query_id,
            original.index,
            original.seed,
        )
        [agent] = replaced(one)
        assert name.endswith(agent)
        assert dict(one.cast) == ({} if by is None else {agent: by})
    prefix = "evaluations/one/contribution/"
    found = {n: v for n, v in job.metrics.items() if n.startswith(prefix)}
    assert found[f"{prefix}solver"] == found[f"{prefix}solver/low"] == 1
    assert found[f"{prefix}checker"] == 0.5
    assert found[f"{prefix}checker/high"] == pytest.approx(0.5 + 1.959963984540054 * 0.5)
    # Everything else is of the evaluation as played.
    assert job.metrics["evaluations/one/pass@1"] == job.metrics["evaluations/one/team/mean"] == 1
    assert job.metrics["evaluations/one/trajectories/completed"] == 12


async def test_repetitions_respect_the_limit_of_trajectories_in_flight(cluster: Cluster) -> None:
    """A query has three trajectories as played, and three without each agent."""
    rollout = cluster.rollouts[0]
    running, most = set[str](), 0

    def reward(ticket: rollout_pb.Ticket) -> dict[str, float]:
        running.discard(ticket.trajectory_id)
        return {"team": 1.0}

    def begun(ticket: rollout_pb.Ticket) -> float:
        nonlocal most
        running.add(ticket.trajectory_id)
        most = max(most, len(running))
        return 0.01

    rollout.script.reward, rollout.script.slow = reward, begun
    evaluation = {"queries": 3, "samples": 3, "contributions": {"queries": 3}}
    limits: dict[str, Any] = {"limits__max_concurrent_trajectories": 3}
    job = await succeed(cluster, job_yaml(pipeline__steps=0, evaluation=evaluation, **limits))
    assert job.metrics["evaluation/contribution/solver"] == 0
    assert len(rollout.tickets) == 27
    assert most == 3


async def test_repetitions_that_fail_neither_count_nor_end_the_job(cluster: Cluster) -> None:
    script = cluster.rollouts[0].script
    script.fail = lambda ticket: "cannot go on" if "checker" in replaced(ticket) else None
    evaluation = {"queries": 2, "contributions": {"queries": 9}}
    text = job_yaml(pipeline__steps=0, evaluation=evaluation, limits__max_failed_fraction=0)
    job_id = await cluster.submit(text)
    job = await cluster.wait(job_id)
    assert job.state == common_pb.JOB_STATE_SUCCEEDED, job.problem
    assert job.metrics["evaluation/contribution/solver"] == 0
    assert "evaluation/contribution/checker" not in job.metrics
    assert job.metrics["evaluation/trajectories/failed"] == 0
    notices = [e.notice.text for e in await cluster.events(job_id) if e.HasField("notice")]
    [told] = [one for one in notices if "with an agent replaced" in one]
    assert "2 of 4 trajectories failed" in told
    assert "cannot go on" in told


async def test_the_errors_of_judges_are_shares_of_unsolved_and_of_solved_queries(
    cluster: Cluster,
) -> None:
    """The checker accepts everything, the solver nothing; of four queries the first is solved, and
    half of the second."""

    def success(ticket: rollout_pb.Ticket) -> dict[str, float]:
        first = ticket.trajectory_id.endswith("t0")
        return {"team": float(not ticket.index or (ticket.index == 1 and first))}

    script = cluster.rollouts[0].script
    script.reward = success
    script.metrics = lambda ticket: {"accepts/checker": 1.0, "accepts/solver": 0.0}
    evaluation = {
        "queries": 4,
        "samples": 2,
        "judges": {"checker": "(?i)accept", "solver": "yes"},
    }
    job = await succeed(cluster, job_yaml(pipeline__steps=0, evaluation=evaluation))
    found = {
        n.partition("/")[2]: v for n, v in job.metrics.items() if "_wrong" in n or "_right" in n
    }
    for judge, wrong, right in (("checker", 1, 0), ("solver", 0, 1)):
        # Three queries have an unsolved trajectory, two a solved one.
        for name, share, queries in (("accepts_wrong", wrong, 3), ("rejects_right", right, 2)):
            low, high = interval(share, queries)
            assert found[f"{name}/{judge}"] == share
            assert found[f"{name}/{judge}/low"] == pytest.approx(low)
            assert found[f"{name}/{judge}/high"] == pytest.approx(high)
    assert job.metrics["evaluation/trajectory/accepts/checker"] == 1


async def test_a_judge_without_verdicts_has_no_errors(cluster: Cluster) -> None:
    evaluation = {"queries": 2, "judges": {"checker": "accept"}}
    job = await succeed(cluster, job_yaml(pipeline__steps=0, evaluation=evaluation))
    assert not [name for name in job.metrics if "accepts" in name or "rejects" in name]
