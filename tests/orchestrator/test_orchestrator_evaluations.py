"""Named evaluations: their queries, their reports, and the checkpoint that is kept."""

from __future__ import annotations

import asyncio
import json

import pytest

from tests.support.cluster import Cluster, job_yaml
from troupe.algorithms.scores import interval, mean_interval
from troupe.checkpoints.retention import prune, versions_of_all
from troupe.client import AsyncClient, Job
from troupe.client.records.jobs import Interval
from troupe.job import JobSpecError, parse_job
from troupe.v1 import common_pb2 as common_pb
from troupe.v1 import orchestrator_pb2 as orchestrator_pb
from troupe.v1 import rollout_pb2 as rollout_pb


def number_of(ticket: rollout_pb.Ticket) -> int:
    """Which sample of its query a trajectory is."""
    return int(ticket.trajectory_id.rpartition("t")[2])


async def test_named_evaluations_report_passes_majorities_and_intervals(cluster: Cluster) -> None:
    """Of four samples the first two solve the query; one of the others has their answer, too."""
    script = cluster.rollouts[0].script
    script.items, script.notes = {"gsm8k": 3}, ("rows: 3 of 4 rows",)
    script.metrics = lambda ticket: {"rewards.right": float(number_of(ticket) < 2)}
    script.answer = lambda ticket: "72" if number_of(ticket) < 3 else "7"
    sets = {
        "gsm8k": {"samples": 4, "success": "right", "tasks": {"source": "tasks:Gsm8k"}},
        "short": {"queries": 2, "every": 1, "temperature": 0},
    }
    reward = {"right": {"ready": "exact"}}
    job_id = await cluster.submit(job_yaml(evaluations=sets, rewards=reward, evaluation__queries=1))
    job = await cluster.wait(job_id)
    assert job.state == common_pb.JOB_STATE_SUCCEEDED, job.problem

    asked = [one for one in cluster.rollouts[0].tickets if one.purpose == one.PURPOSE_EVALUATE]
    ids = {one.trajectory_id for one in asked if one.evaluation == "gsm8k"}
    assert ids == {f"gsm8k-h{q}-e{s}-t{n}" for q in range(3) for s in (0, 2) for n in range(4)}
    assert {one.trajectory_id for one in asked if one.evaluation == "short"} == {
        f"short-h{q}-e{step}-t0" for q in range(2) for step in (0, 1, 2)
    }
    assert {one.trajectory_id for one in asked if not one.evaluation} == {"h0-e0-t0", "h0-e2-t0"}
    # The same queries with the same seeds each time, and different ones for each sample.
    seeds = {(one.query_id, number_of(one)): one.seed for one in asked}
    assert all(seeds[one.query_id, number_of(one)] == one.seed for one in asked)
    assert len(set(seeds.values())) == len(seeds)

    found = {name: value for name, value in job.metrics.items() if "@" in name}
    low, high = interval(0.5, 3)
    # maj@4: "72" always has the majority; two of its three samples are right.
    expected = {"pass@1": 0.5, "pass@2": 5 / 6, "pass@4": 1.0, "maj@4": 2 / 3}
    for name, value in expected.items():
        assert found[f"evaluations/gsm8k/{name}"] == pytest.approx(value)
    assert found["evaluations/gsm8k/pass@1/low"] == pytest.approx(low)
    assert found["evaluations/gsm8k/pass@1/high"] == pytest.approx(high)
    assert not [name for name in found if "short" in name]
    assert job.before["gsm8k/pass@1"] == job.after["gsm8k/pass@1"] == 0.5
    assert job.after["short/reward/solver"] == job.after["reward/solver"] == 1.0
    assert not [name for name in job.after if name.endswith(("low", "high"))]
    notices = [e.notice.text for e in await cluster.events(job_id) if e.HasField("notice")]
    assert notices.count("rows: 3 of 4 rows") == 1


async def test_samples_without_an_answer_do_not_vote(cluster: Cluster) -> None:
    """Of four samples three have an empty answer; in one evaluation none has any."""
    script = cluster.rollouts[0].script
    script.metrics = lambda ticket: {"rewards.right": float(number_of(ticket) == 3)}
    script.answer = lambda ticket: (
        "72" if ticket.evaluation == "some" and number_of(ticket) == 3 else ""
    )
    same = {"queries": 2, "samples": 4, "success": "right"}
    sets = {"some": same, "none": {**same, "answer_pattern": "#(.*)"}, "silent": same}
    reward = {"right": {"ready": "exact"}}
    job_id = await cluster.submit(job_yaml(evaluations=sets, rewards=reward))
    job = await cluster.wait(job_id)
    assert job.state == common_pb.JOB_STATE_SUCCEEDED, job.problem
    majorities = {name: job.metrics.get(f"evaluations/{name}/maj@4") for name in sets}
    assert majorities == {"some": 1.0, "none": 0.0, "silent": None}


async def test_scores_before_and_after_have_intervals_over_their_queries(cluster: Cluster) -> None:
    """Each query has two samples that earn the same, and counts once. An agent is called `low`."""
    script = cluster.rollouts[0].script
    script.reward = lambda ticket: {"low": float(ticket.index < 3), "team": 10.0 * ticket.index}
    held = {"samples": 2, "queries": 4, "success": "low"}
    job_id = await cluster.submit(
        job_yaml(policies=["low"], evaluation__queries=4, evaluations={"held": held})
    )
    job = await cluster.wait(job_id)
    assert job.state == common_pb.JOB_STATE_SUCCEEDED, job.problem

    names = {f"{of}{one}" for of in ("", "held/") for one in ("reward/low", "team_success")}
    names |= {"held/pass@1", "held/pass@2"}
    assert set(job.before) == set(job.before_intervals) == names
    assert set(job.after) == set(job.after_intervals) == names
    team = mean_interval([0.0, 10.0, 20.0, 30.0])
    assert team is not None
    for name in names:
        expected = team if "team" in name else interval(0.75, 4)
        found = job.before_intervals[name]
        assert (found.low, found.high) == pytest.approx(expected), name
        assert job.after_intervals[name] == found
    assert job.metrics["evaluation/team/mean/low"] == pytest.approx(team[0])
    assert job.metrics["evaluations/held/reward/low/mean/high"] == pytest.approx(
        interval(0.75, 4)[1]
    )
    record = Job.of(job)
    assert record.before_intervals["reward/low"] == Interval(*interval(0.75, 4))


async def test_trajectories_that_fail_solve_nothing(cluster: Cluster) -> None:
    script = cluster.rollouts[0].script
    script.fail = lambda ticket: "broken" if ticket.evaluation and number_of(ticket) else None
    sets = {"small": {"queries": 2, "samples": 2}}
    job_id = await cluster.submit(job_yaml(evaluations=sets))
    job = await cluster.wait(job_id)
    assert job.state == common_pb.JOB_STATE_SUCCEEDED, job.problem
    assert job.metrics["evaluations/small/pass@1"] == 0.5
    assert job.metrics["evaluations/small/trajectories/failed"] == 2


async def test_a_job_without_steps_only_evaluates(cluster: Cluster) -> None:
    text = job_yaml(pipeline__steps=0, evaluations={"one": {"queries": 2, "success": "solver"}})
    job_id = await cluster.submit(text)
    job = await cluster.wait(job_id)
    assert (job.state, job.step) == (common_pb.JOB_STATE_SUCCEEDED, 0), job.problem
    assert job.before["one/pass@1"] == 1.0
    assert not job.after
    assert all(one.purpose == one.PURPOSE_EVALUATE for one in cluster.rollouts[0].tickets)


@pytest.mark.parametrize(
    ("mode", "best", "pipeline"),
    [("max", 2, "micro_batch"), ("min", 3, "micro_batch"), ("max", 2, "async")],
)
async def test_the_best_checkpoint_is_kept(
    cluster: Cluster, mode: str, best: int, pipeline: str
) -> None:
    """Evaluations after steps 1 to 4 give 0.2, 0.9, 0.1, 0.3; one other checkpoint is kept.

    In mode `async` trainers have newer weights by the time that an evaluation ends.
    """
    worth = {0: 1.0, 1: 0.2, 2: 0.9, 3: 0.1, 4: 0.3}
    script = cluster.rollouts[0].script
    script.reward = lambda ticket: {
        "solver": worth[int(ticket.trajectory_id.split("-e")[1][0])] if ticket.evaluation else 1.0
    }
    script.slow = lambda ticket: 0.5 if ticket.evaluation and pipeline == "async" else 0.0
    text = job_yaml(
        pipeline__mode=pipeline,
        pipeline__steps=4,
        evaluations={"held": {"queries": 1, "every": 1}},
        checkpoint={
            "keep": 1,
            "best": {"metric": "evaluations/held/reward/mean", "mode": mode},
        },
    )
    job_id = await cluster.submit(text)
    job = await cluster.wait(job_id)
    assert job.state == common_pb.JOB_STATE_SUCCEEDED, job.problem
    directory = cluster.directory / job_id
    content = json.loads((directory / "best" / "best.json").read_text())
    assert (content["step"], content["value"]) == (best, worth[best])
    assert {p: one["version"] for p, one in content["policies"].items()} == {
        "solver": best,
        "checker": best,
    }
    for policy in ("solver", "checker"):
        kept = [path.name for path in (directory / "best" / policy).iterdir()]
        assert kept == [f"v{best}"], "nothing else is left there"
        prune(directory / "checkpoints" / policy, 1)  # as real trainers do
        assert [version for version, _ in versions_of_all(directory)[policy]] == [best, 4]
    saved = await cluster.api.ListCheckpoints(orchestrator_pb.ListCheckpointsRequest(job_id=job_id))
    assert {one.version for one in saved.checkpoints} == {best, 4}


async def test_a_missing_metric_of_the_best_checkpoint_is_named(cluster: Cluster) -> None:
    best = {"metric": "evaluations/held/reward/nobody"}
    sets = {"held": {"queries": 1}}
    job_id = await cluster.submit(job_yaml(evaluations=sets, checkpoint={"best": best}))
    job = await cluster.wait(job_id)
    assert job.state == common_pb.JOB_STATE_SUCCEEDED, job.problem
    notices = [e.notice.text for e in await cluster.events(job_id) if e.HasField("notice")]
    assert any("evaluations/held/reward/mean" in text for text in notices), notices


@pytest.mark.parametrize(
    ("over", "field", "said"),
    [
        ({"evaluations": {"A b": {}}}, "'A b'", "lower-case"),
        ({"evaluations": {"reward": {"queries": 1}}}, "evaluations.reward", "choose another"),
        (
            {"evaluations": {"x": {"samples": 4, "temperature": 0}}},
            "evaluations.x",
            "are all the same",
        ),
        ({"evaluations": {"x": {"success": "nobody"}}}, "evaluations.x.success", "neither"),
        (
            {"evaluations": {"x": {"answer_pattern": "("}}},
            "evaluations.x.answer_pattern",
            "regular",
        ),
        (
            {"evaluations": {"x": {"tasks": {"dataset": "a.csv", "held_out": 0.5}}}},
            "evaluations.x.tasks",
            "name the rows to use",
        ),
        (
            {"tasks": {"dataset": "a.csv"}, "evaluations": {"x": {}}},
            "tasks.held_out",
            "is missing",
        ),
        ({"pipeline.steps": 0}, "pipeline.steps", "there is no training"),
        (
            {"checkpoint": {"best": {"metric": "loss"}}},
            "checkpoint.best.metric",
            "not a metric of an evaluation",
        ),
        (
            {"checkpoint": {"best": {"metric": "evaluations/y/pass@1"}}},
            "checkpoint.best.metric",
            "of no evaluation",
        ),
    ],
)
def test_impossible_evaluations_are_refused_at_submit(
    over: dict[str, object], field: str, said: str
) -> None:
    with pytest.raises(JobSpecError, match=said) as refused:
        parse_job(job_yaml(**over))
    assert refused.value.problems[0].field == field


async def test_conversations_of_before_and_after_are_kept_whatever_follows(
    cluster: Cluster,
) -> None:
    """The newest evaluation fits into what is kept; training displaces all between it and the
    first."""
    await cluster.stop_orchestrator()
    cluster.settings = cluster.settings.model_copy(update={"conversation_bytes": 60_000})
    await cluster.start_orchestrator()
    sets = {"gsm8k": {"queries": 8, "samples": 2, "every": 1}, "one": {"queries": 1}}
    job_id = await cluster.submit(job_yaml(evaluations=sets, pipeline__steps=16))
    job = await cluster.wait(job_id)
    assert job.state == common_pb.JOB_STATE_SUCCEEDED, job.problem

    async with AsyncClient(cluster.settings.address) as client:
        pairs = await client.job(job_id).before_and_after()
        listed = [one.id for one in await client.job(job_id).trajectories(None)]
    assert [(before.id, after.id) for before, after in pairs] == [
        ("gsm8k-h0-e0-t0", "gsm8k-h0-e16-t0"),
        ("one-h0-e0-t0", "one-h0-e16-t0"),
        ("gsm8k-h1-e0-t0", "gsm8k-h1-e16-t0"),
        ("gsm8k-h2-e0-t0", "gsm8k-h2-e16-t0"),
    ]
    assert all(one.conversation and one.evaluation for pair in pairs for one in pair)
    assert len(listed) == len(set(listed)), "no trajectory is kept twice"
    assert not any("-e1-" in name for name in listed), "it was displaced"


async def test_async_training_goes_on_during_an_evaluation(cluster: Cluster) -> None:
    """While evaluations run, the next steps roll out and are trained, and no engine is updated:
    what is evaluated is the version that the metrics name."""
    rollout = cluster.rollouts[0]

    def slow(ticket: rollout_pb.Ticket) -> float:
        # The evaluation after two steps takes long enough for a step.
        return 2.0 if "-e2-" in ticket.trajectory_id else 0.6 * (ticket.split == "held_out")

    rollout.script.slow = slow
    text = job_yaml(
        pipeline__mode="async",
        pipeline__alpha=1,
        pipeline__steps=4,
        evaluation={"queries": 2, "every": 2},
        evaluations={"again": {"queries": 1, "tasks": {"source": "tasks:Again"}}},
    )
    job_id = await cluster.submit(text)
    seen: list[tuple[int, int]] = []
    # Versions that were committed while the evaluation after two steps ran.
    committed: set[int] = set()
    for _ in range(2000):
        names = [ticket.split for ticket in rollout.tickets]
        job = await cluster.job(job_id)
        if "held-out" in job.activity or "for an evaluation" in job.activity:
            # Evaluations before and in between: trajectories of the next step were begun.
            seen.append((names.count("held_out"), names.count("train")))
            if 3 < names.count("held_out") <= 6 and job.step == 2:
                committed.add(job.versions["solver"])
        if job.state in (common_pb.JOB_STATE_SUCCEEDED, common_pb.JOB_STATE_FAILED):
            break
        await asyncio.sleep(0.01)
    assert job.state == common_pb.JOB_STATE_SUCCEEDED, job.problem
    assert any(train for held_out, train in seen if held_out <= 3), "before the first step"
    assert max(committed) > 2, "a policy committed a step beside the evaluation"
    rows = (await cluster.api.ListMetrics(orchestrator_pb.ListMetricsRequest(job_id=job_id))).rows
    found = [row for row in rows if "evaluation/version/solver" in row.values]
    assert [row.step for row in found] == [0, 2, 4]
    for row in found:
        for policy in ("solver", "checker"):
            assert row.values[f"evaluation/version/{policy}"] == row.step
    await cluster.check_accounts(job_id, 4, ("checker", "solver"))


async def test_an_evaluation_during_training_survives_a_restart(cluster: Cluster) -> None:
    """It is made again, of the versions that its metrics name; the best checkpoint is of weights
    that were evaluated."""
    cluster.rollouts[0].script.slow = lambda ticket: 0.5 if ticket.split == "held_out" else 0.0
    text = job_yaml(
        pipeline__mode="async",
        pipeline__steps=2,
        evaluation={"queries": 2, "every": 1},
        checkpoint={"best": {"metric": "evaluation/reward/mean"}},
    )
    job_id = await cluster.submit(text)
    for pause in (0.3, 0.9):
        await asyncio.sleep(pause)
        await cluster.stop_orchestrator()
        await cluster.start_orchestrator()
    job = await cluster.wait(job_id)
    assert job.state == common_pb.JOB_STATE_SUCCEEDED, job.problem
    rows = (await cluster.api.ListMetrics(orchestrator_pb.ListMetricsRequest(job_id=job_id))).rows
    of = {r.step: r.values["evaluation/version/solver"] for r in rows if _evaluates(r)}
    assert of.keys() == {0, 1, 2}
    assert all(step <= version <= step + 1 for step, version in of.items())
    best = json.loads((cluster.directory / job_id / "best" / "best.json").read_text())
    assert of[best["step"]] == best["policies"]["solver"]["version"]
    await cluster.check_accounts(job_id, 2, ("checker", "solver"))


def _evaluates(row: orchestrator_pb.MetricsLogged) -> bool:
    return "evaluation/version/solver" in row.values
