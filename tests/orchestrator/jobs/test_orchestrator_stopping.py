"""Jobs that end before their last step: by a metric, or by their time."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from services.orchestrator.jobs.stopping import RunClock, Watched
from tests.support.cluster import ENDED, Cluster, job_yaml
from tests.support.waiting import PATIENCE, until
from troupe.checkpoints.retention import choose
from troupe.client import AsyncClient, Job
from troupe.job import JobSpecError, parse_job
from troupe.job.sections.run import EarlyStopSpec
from troupe.rpc import FailedPrecondition
from troupe.v1 import common_pb2 as common_pb
from troupe.v1 import rollout_pb2 as rollout_pb

POLICIES = ("checker", "solver")
EVALUATED = {"held": {"queries": 1, "every": 1}, "other": {"queries": 1}}


def worth(values: list[float], otherwise: float = 1.0) -> Callable[[rollout_pb.Ticket], Any]:
    """The reward of trajectories of the evaluation `held` by the steps before it."""

    def reward(ticket: rollout_pb.Ticket) -> dict[str, float]:
        if ticket.evaluation != "held":
            return {"solver": otherwise}
        return {"solver": values[int(ticket.trajectory_id.split("-e")[1][0])]}

    return reward


def stopped_text(**stop: Any) -> str:
    return job_yaml(
        pipeline__steps=6,
        evaluations=EVALUATED,
        stop={"metric": "evaluations/held/reward/mean", **stop},
    )


async def logged_steps(cluster: Cluster, job_id: str, of: str) -> list[int]:
    events = await cluster.events(job_id)
    return [e.metrics.step for e in events if e.HasField("metrics") and of in e.metrics.values]


async def test_a_job_stops_when_an_evaluation_reaches_the_threshold(cluster: Cluster) -> None:
    """The value before training, 1.0, does not count; the final evaluation has all sets."""
    cluster.rollouts[0].script.reward = worth([1.0, 0.2, 0.9, 0.1, 0.1, 0.1, 0.1])
    job_id = await cluster.submit(stopped_text(at=0.9))
    job = await cluster.wait(job_id)
    assert (job.state, job.step) == (common_pb.JOB_STATE_SUCCEEDED, 2), job.problem
    assert (job.early_end.field, job.early_end.step) == ("stop", 2)
    assert "evaluations/held/reward/mean = 0.9 after step 2" in job.early_end.text
    assert "stop.at" in job.early_end.text
    await cluster.check_accounts(job_id, 2, POLICIES)
    assert job.after["held/reward/solver"] == 0.9
    assert job.after["other/reward/solver"] == 1.0
    assert await logged_steps(cluster, job_id, "evaluations/held/reward/mean") == [0, 1, 2]
    assert await logged_steps(cluster, job_id, "evaluations/other/reward/mean") == [0, 2]
    assert choose(cluster.directory, job_id, "solver", None).name == "v2"
    assert any("ends early" in text for text in await cluster.notices(job_id))
    record = Job.of(job)
    assert record.early_end is not None
    assert record.early_end.field == "stop"


async def test_a_job_stops_when_a_metric_of_its_steps_does_not_improve(cluster: Cluster) -> None:
    """The third step's 0.35 improves on 0.3 by less than `min_delta`."""
    rewards = [0.1, 0.3, 0.35, 0.2, 0.9, 0.9]
    script = cluster.rollouts[0].script
    script.reward = lambda ticket: {"solver": rewards[ticket.index // 2], "checker": 0.0}
    stop = {"metric": "reward/solver/mean", "patience": 2, "min_delta": 0.1}
    job_id = await cluster.submit(job_yaml(pipeline__steps=6, stop=stop))
    job = await cluster.wait(job_id)
    assert (job.state, job.step, job.early_end.step) == (common_pb.JOB_STATE_SUCCEEDED, 4, 4)
    assert "did not improve on 0.3 of step 2 in 2 values" in job.early_end.text
    await cluster.check_accounts(job_id, 4, POLICIES)


async def test_the_best_checkpoint_of_a_metric_of_steps_is_kept_and_exported(
    cluster: Cluster,
) -> None:
    rewards = [0.1, 0.3, 0.2, 0.2, 0.9, 0.9]
    script = cluster.rollouts[0].script
    script.reward = lambda ticket: {"solver": rewards[ticket.index // 2]}
    stop = {"metric": "reward/solver/mean", "patience": 2, "best": "exported"}
    job_id = await cluster.submit(job_yaml(pipeline__steps=6, stop=stop, checkpoint={"keep": 1}))
    job = await cluster.wait(job_id)
    assert (job.state, job.step) == (common_pb.JOB_STATE_SUCCEEDED, 4), job.problem
    assert (job.best.metric, job.best.value, job.best.step) == ("reward/solver/mean", 0.3, 2)
    assert dict(job.best.versions) == {"solver": 2, "checker": 2}
    assert choose(cluster.directory, job_id, "solver", None).name == "v2", "not the newest, v4"
    assert choose(cluster.directory, job_id, "solver", 4).name == "v4"
    async with AsyncClient(cluster.settings.address) as client:
        handle = client.job(job_id)
        exported = await handle.export("solver", cluster.directory / "exported")
        saved = {
            one.version: one.path for one in await handle.checkpoints() if one.policy == "solver"
        }
        best = (await handle.info()).best
    assert best is not None
    assert best.versions["solver"] == 2
    copied = {path.name: path.read_bytes() for path in exported.iterdir()}
    assert copied == files_of(saved[2])


def files_of(folder: str) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


@pytest.mark.parametrize(("best", "exported"), [("kept", "v3"), ("exported", "v1")])
async def test_a_best_checkpoint_of_an_evaluation_is_exported_if_the_job_says_so(
    cluster: Cluster, best: str, exported: str
) -> None:
    """The section `checkpoint` names the same metric, which changes nothing."""
    cluster.rollouts[0].script.reward = worth([0.0, 0.9, 0.3, 0.3])
    metric = "evaluations/held/reward/mean"
    text = job_yaml(
        pipeline__steps=6,
        evaluations=EVALUATED,
        stop={"metric": metric, "patience": 2, "best": best},
        checkpoint={"best": {"metric": metric}},
    )
    job_id = await cluster.submit(text)
    job = await cluster.wait(job_id)
    assert (job.step, job.best.step) == (3, 1), job.problem
    assert choose(cluster.directory, job_id, "solver", None).name == exported
    assert choose(cluster.directory, job_id, "solver", 1).name == "v1"
    content = json.loads((cluster.directory / job_id / "best" / "best.json").read_text())
    assert (content["step"], content["value"]) == (1, 0.9)


@pytest.mark.parametrize(
    ("first", "then", "exported"), [("exported", None, "v4"), (None, "exported", "v1")]
)
async def test_exports_take_the_checkpoint_that_the_resumed_job_says(
    cluster: Cluster, first: str | None, then: str | None, exported: str
) -> None:
    """The best version after step 1 was kept before the job got another `stop`."""
    cluster.rollouts[0].script.reward = worth([0.0, 0.9, 0.3, 0.3, 0.3])
    metric = "evaluations/held/reward/mean"

    def text(best: str | None, steps: int) -> str:
        stop = {"metric": metric, "patience": 50, "best": best} if best else None
        return job_yaml(
            pipeline__steps=steps,
            evaluations=EVALUATED,
            stop=stop,
            checkpoint={"best": {"metric": metric}},
        )

    job_id = await cluster.submit(text(first, 3))
    await cluster.wait(job_id, [common_pb.JOB_STATE_SUCCEEDED])
    assert choose(cluster.directory, job_id, "solver", None).name == ("v1" if first else "v3")
    await cluster.resume(job_id, text(then, 4))
    await cluster.wait(job_id, [common_pb.JOB_STATE_SUCCEEDED])
    assert choose(cluster.directory, job_id, "solver", None).name == exported


@pytest.mark.parametrize("when", ["before", "after"])
async def test_an_orchestrator_that_restarts_stops_at_the_same_step(
    cluster: Cluster, when: str
) -> None:
    """It goes away during the evaluation that decides, before or after the decision is written."""
    script = cluster.rollouts[0].script
    script.reward = worth([0.0, 0.4, 0.3, 0.2, 0.9, 0.9, 0.9])
    last = "held-h0-e3" if when == "before" else "other-h0-e3"
    script.slow = lambda ticket: 0.7 if ticket.trajectory_id.startswith(last) else 0.0
    job_id = await cluster.submit(stopped_text(patience=2))
    rollout = cluster.rollouts[0]
    await until(lambda: any(t.trajectory_id.startswith(last) for t in rollout.tickets))
    await cluster.stop_orchestrator()
    await cluster.start_orchestrator()
    job = await cluster.wait(job_id)
    assert (job.state, job.step, job.early_end.step) == (common_pb.JOB_STATE_SUCCEEDED, 3, 3)
    await cluster.check_accounts(job_id, 3, POLICIES)
    assert await logged_steps(cluster, job_id, "evaluations/held/reward/mean") == [0, 1, 2, 3]
    assert await logged_steps(cluster, job_id, "evaluations/other/reward/mean") == [0, 3]
    assert job.after["other/reward/solver"] == 1.0


async def test_patience_counts_on_over_a_restart(cluster: Cluster) -> None:
    script = cluster.rollouts[0].script
    script.seconds = 0.05
    script.reward = lambda ticket: {"solver": 0.5 if ticket.index < 2 else 0.25}
    stop = {"metric": "reward/solver/mean", "patience": 4}
    job_id = await cluster.submit(job_yaml(pipeline__steps=9, stop=stop))
    for done in (2, 4):
        await cluster.until(job_id, lambda job, done=done: job.step >= done)
        await cluster.stop_orchestrator()
        await cluster.start_orchestrator()
    job = await cluster.wait(job_id)
    assert (job.step, job.early_end.step) == (5, 5), job.problem


async def test_open_steps_of_mode_async_are_finished_before_the_end(cluster: Cluster) -> None:
    script = cluster.rollouts[0].script
    script.slow = lambda ticket: 0.2
    script.reward = lambda ticket: {"solver": 1.0 if ticket.index >= 2 else 0.0}
    stop = {"metric": "reward/solver/mean", "at": 1.0}
    job_id = await cluster.submit(
        job_yaml(pipeline__steps=12, pipeline__mode="async", pipeline__alpha=2, stop=stop)
    )
    job = await cluster.wait(job_id)
    assert job.state == common_pb.JOB_STATE_SUCCEEDED, job.problem
    assert job.early_end.step == 2
    assert 2 <= job.step <= 5, "as many as were open"
    await cluster.check_accounts(job_id, job.step, POLICIES)
    assert not (await cluster.step(job_id, job.step)).open


async def test_a_job_that_stopped_goes_on_only_with_another_rule(cluster: Cluster) -> None:
    cluster.rollouts[0].script.reward = worth([0.0, 0.2, 0.9, 0.1, 0.95, 0.1, 0.1])
    job_id = await cluster.submit(stopped_text(at=0.9))
    assert (await cluster.wait(job_id)).step == 2
    with pytest.raises(FailedPrecondition, match="would end again") as refused:
        await cluster.resume(job_id)
    assert (refused.value.kind, refused.value.field) == ("job_ended_early", "stop")
    assert "another `stop`" in (refused.value.remedy or "")
    with pytest.raises(FailedPrecondition, match="would end again"):
        await cluster.resume(job_id, stopped_text(at=0.9, best="kept"))
    await cluster.resume(job_id, stopped_text(at=0.95))
    job = await cluster.until(job_id, lambda job: job.state in ENDED and job.step > 2)
    assert (job.state, job.step, job.early_end.step) == (common_pb.JOB_STATE_SUCCEEDED, 4, 4)
    await cluster.check_accounts(job_id, 4, POLICIES)
    await cluster.resume(job_id, job_yaml(pipeline__steps=6, evaluations=EVALUATED))
    job = await cluster.until(job_id, lambda job: job.state in ENDED and job.step > 4)
    assert (job.state, job.step) == (common_pb.JOB_STATE_SUCCEEDED, 6)
    assert not job.HasField("early_end")


async def test_a_job_ends_when_its_time_is_over_and_goes_on_with_more(cluster: Cluster) -> None:
    script = cluster.rollouts[0].script
    script.seconds = 0.1
    sets = {"held": {"queries": 1}}

    def text(seconds: float) -> str:
        limits = {"job_seconds": seconds, "step_seconds": PATIENCE}
        return job_yaml(pipeline__steps=200, limits=limits, evaluations=sets)

    job_id = await cluster.submit(text(1.5))
    job = await cluster.wait(job_id)
    assert job.state == common_pb.JOB_STATE_SUCCEEDED, job.problem
    assert 0 < job.step < 200
    assert (job.early_end.field, job.early_end.step) == ("limits.job_seconds", job.step)
    assert "it has run for 1.5 s" in job.early_end.text
    assert job.ran_seconds >= 1.5
    assert job.after["held/reward/solver"] == 1.0
    assert choose(cluster.directory, job_id, "solver", None).name == f"v{job.step}"
    await cluster.check_accounts(job_id, job.step, POLICIES)
    with pytest.raises(FailedPrecondition, match="would end again") as refused:
        await cluster.resume(job_id)
    assert (refused.value.kind, refused.value.field) == ("job_ended_early", "limits.job_seconds")
    done, ran = job.step, job.ran_seconds
    await cluster.resume(job_id, text(ran + 1))
    job = await cluster.until(job_id, lambda job: job.state in ENDED and job.step > done)
    assert job.state == common_pb.JOB_STATE_SUCCEEDED, job.problem
    assert job.ran_seconds >= ran + 1


async def test_the_time_of_a_job_survives_the_orchestrator_and_stands_while_it_is_paused(
    cluster: Cluster,
) -> None:
    script = cluster.rollouts[0].script
    script.seconds = 0.05
    limits = {"job_seconds": 1e6, "step_seconds": PATIENCE}
    job_id = await cluster.submit(job_yaml(pipeline__steps=4000, limits=limits))
    ran = (await cluster.until(job_id, lambda job: job.ran_seconds > 0.5)).ran_seconds
    await cluster.stop_orchestrator()
    await cluster.start_orchestrator()
    assert (await cluster.job(job_id)).ran_seconds >= ran
    await cluster.until(job_id, lambda job: job.ran_seconds > ran + 0.2)
    await cluster.pause(job_id)
    paused = await cluster.wait(job_id, (common_pb.JOB_STATE_PAUSED,))
    await asyncio.sleep(0.5)  # time that must not count, however long this takes
    assert (await cluster.job(job_id)).ran_seconds == paused.ran_seconds
    await cluster.resume(job_id)
    job = await cluster.until(job_id, lambda job: job.step > paused.step)
    # deadline: the pause lasted 0.5 s; the step after it takes 0.1 s of an idle machine.
    assert job.ran_seconds >= paused.ran_seconds
    await cluster.cancel(job_id)
    await cluster.wait(job_id)


async def test_a_metric_that_no_step_has_is_named_once(cluster: Cluster) -> None:
    stop = {"metric": "trajectory/solvd", "at": 1.0}
    cluster.rollouts[0].script.metrics = lambda ticket: {"solved": 0.5}
    job_id = await cluster.submit(job_yaml(stop=stop))
    assert (await cluster.wait(job_id)).state == common_pb.JOB_STATE_SUCCEEDED
    told = [text for text in await cluster.notices(job_id) if "stop.metric" in text]
    assert len(told) == 1
    assert "has no `trajectory/solvd`" in told[0]
    assert "`trajectory/solved`" in told[0]


@pytest.mark.parametrize(
    ("over", "field", "said"),
    [
        ({"stop": {"metric": "reward/mean"}}, "stop", "neither `at` nor `patience`"),
        (
            {"stop": {"metric": "reward/mean", "at": 1, "min_delta": 0.1}},
            "stop",
            "only `patience` heeds it",
        ),
        (
            {"stop": {"metric": "reward/solvr/mean", "at": 1}},
            "stop.metric",
            "did you mean `reward/solver/mean`",
        ),
        ({"stop": {"metric": "entropy", "at": 1}}, "stop.metric", "`solver/entropy`"),
        ({"stop": {"metric": "evaluation/team/mean", "at": 1}}, "stop.metric", "no metric of"),
        (  # which plays no trajectories
            {
                "supervised": {"tasks": {"source": "examples.nowhere:Tasks"}, "steps": 2},
                "stop": {"metric": "reward/mean", "at": 1},
            },
            "stop.metric",
            "`reward/mean` is no metric of this job",
        ),
        (
            {
                "evaluations": {"gsm8k": {"queries": 1, "samples": 4, "every": 1}},
                "stop": {"metric": "evaluations/gsm8k/pass@3", "at": 1},
            },
            "stop.metric",
            "evaluations/gsm8k/pass@4",
        ),
        (
            {
                "evaluations": {"gsm8k": {"queries": 1}},
                "stop": {"metric": "evaluations/gsm8k/team/mean", "at": 1},
            },
            "evaluations.gsm8k.every",
            "would see no value before the last step",
        ),
        (
            {
                "pipeline.mode": "async",
                "stop": {"metric": "reward/mean", "at": 1, "best": "kept"},
            },
            "stop.best",
            "steps overlap",
        ),
        (
            {
                "evaluation": {"queries": 1, "every": 1},
                "checkpoint": {"best": {"metric": "evaluation/team/mean"}},
                "stop": {"metric": "reward/mean", "at": 1, "best": "kept"},
            },
            "stop.best",
            "keeps one best checkpoint",
        ),
        ({"limits.job_seconds": 0}, "limits.job_seconds", "greater than 0"),
    ],
)
def test_impossible_rules_are_refused_at_submit(
    over: dict[str, object], field: str, said: str
) -> None:
    with pytest.raises(JobSpecError, match=re.escape(said)) as refused:
        parse_job(job_yaml(**over))
    assert refused.value.problems[0].field == field


@pytest.mark.parametrize(
    "metric",
    [
        "reward/mean",
        "team/mean",
        "solver/entropy",
        "checker/own/loss",
        "trajectory/rewards.right",
        "response_length/solver",
        "evaluations/gsm8k/pass@4",
        "evaluations/gsm8k/maj@4",
        "evaluations/gsm8k/team/mean/low",
        "evaluations/gsm8k/trajectory/rewards.right",
    ],
)
def test_names_that_may_exist_are_accepted(metric: str) -> None:
    sets = {"gsm8k": {"queries": 1, "samples": 4, "every": 1}}
    spec = parse_job(job_yaml(evaluations=sets, stop={"metric": metric, "at": 1}))
    assert spec.stop is not None
    assert spec.stop.metric == metric


def test_lower_values_are_better_in_mode_min() -> None:
    stop = EarlyStopSpec(metric="solver/kl", mode="min", at=0.1, patience=2)
    seen, why = Watched.of(stop, {}).after(stop, 0.5, 1)
    assert (seen.best, why) == (0.5, "")
    seen, why = seen.after(stop, 0.4, 2)
    assert (seen.best, seen.step, seen.waited, why) == (0.4, 2, 0, "")
    seen, why = seen.after(stop, 0.4, 3)
    assert (seen.waited, why) == (1, "")
    assert "is at most 0.1" in seen.after(stop, 0.1, 4)[1]
    assert "in 2 values" in seen.after(stop, 0.6, 4)[1]
    other = stop.model_copy(update={"patience": 3})
    assert Watched.of(stop, asdict(seen)) == seen
    assert Watched.of(other, asdict(seen)).best is None, "another rule begins anew"


def test_time_in_which_a_job_waits_for_others_does_not_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, waits = [100.0], [False]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    clock = RunClock(5.0, 20.0, lambda: waits[0])
    now[0] = 110.0
    assert clock.seconds == 5.0, "it has not begun"
    clock.start()
    now[0] = 114.0
    assert clock.seconds == 9.0
    waits[0], now[0] = True, 200.0
    assert clock.seconds == 9.0
    waits[0], now[0] = False, 211.0
    assert clock.over
    assert clock.seconds == 20.0
