"""Results of jobs in a program: tables of metrics, conversations, comparisons, events as text."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from tests.support.fake_orchestrator import FakeOrchestrator, serve
from troupe.client import (
    Activity,
    AsyncClient,
    Event,
    JobState,
    MetricsLogged,
    Notice,
    StateChanged,
)
from troupe.client.handle import read_spec
from troupe.job import JobSpec, JobSpecError, parse_job
from troupe.rpc.errors import NotFound, TroupeError
from troupe.v1 import orchestrator_pb2 as orchestrator_pb

AT = datetime(2026, 11, 1, 12, 30, 5, tzinfo=UTC).astimezone()


async def log(fake: FakeOrchestrator, step: int, **values: float) -> None:
    event = orchestrator_pb.JobEvent()
    event.metrics.step = step
    event.metrics.values.update(values)
    await fake.log("mine", event)


async def test_a_frame_has_a_row_per_step_with_its_evaluation(
    fake: FakeOrchestrator, client: AsyncClient, job_yaml: str
) -> None:
    job = await client.submit(job_yaml, job_id="mine")
    await log(fake, 0, **{"evaluation/team/mean": 0.1})
    await log(fake, 1, loss=0.5)
    await log(fake, 2, loss=0.4)
    await log(fake, 2, **{"evaluation/team/mean": 0.3})
    assert await job.metrics_frame() == [
        {"step": 0, "evaluation/team/mean": 0.1, "loss": None},
        {"step": 1, "evaluation/team/mean": None, "loss": 0.5},
        {"step": 2, "evaluation/team/mean": 0.3, "loss": 0.4},
    ]
    assert await job.metrics_frame(["loss"], after_step=1) == [{"step": 2, "loss": 0.4}]


async def test_conversations_have_their_turns_and_are_selected_by_the_server(
    fake: FakeOrchestrator, client: AsyncClient, job_yaml: str
) -> None:
    job = await client.submit(job_yaml, job_id="mine")
    found = [one async for one in job.conversations(limit=120)]
    assert len(found) == 120  # more than a page
    assert found[0].conversation[0].messages == (("user", "2+2"),)

    assert [one async for one in job.conversations(failed=True)] == []
    assert [one async for one in job.conversations(evaluation=True)] == []
    found = [one async for one in job.conversations(text="sum 7", agent="solver", max_reward=0.5)]
    assert [one.id for one in found] == ["t7"]
    asked = [r for name, r in fake.calls if name == "ListTrajectories"][-1]
    assert (asked.agent, asked.max_reward) == ("solver", 0.5)
    assert not asked.HasField("min_reward")


async def test_a_conversation_that_is_displaced_while_others_are_read_is_left_out(
    job_yaml: str,
) -> None:
    class Displacing(FakeOrchestrator):
        async def GetTrajectory(
            self, request: orchestrator_pb.GetTrajectoryRequest, context: Any
        ) -> orchestrator_pb.GetTrajectoryResponse:
            if request.trajectory_id == "t3":
                error = NotFound("is not kept", field="trajectory_id", value="t3")
                await self._fail(context, error)
            return await super().GetTrajectory(request, context)

    async with serve(Displacing()) as address, AsyncClient(address) as client:
        job = await client.submit(job_yaml, job_id="mine")
        found = [one.id async for one in job.conversations(limit=6)]
        assert found == ["t0", "t1", "t2", "t4", "t5"]
        with pytest.raises(NotFound, match="is not kept"):
            await job.trajectory("t3")


async def test_a_comparison_names_what_differs(
    fake: FakeOrchestrator, client: AsyncClient, job_yaml: str
) -> None:
    await client.submit(job_yaml, job_id="one")
    await client.submit(job_yaml, job_id="two", overrides={"pipeline.group_size": 4})
    for name, score in (("one", 0.25), ("two", 0.5)):
        fake.jobs[name].after["team_success"] = score
    fake.jobs["two"].after["reward/solver"] = 1.0
    found = await client.compare("one", "two")
    assert found.fields == {"pipeline.group_size": (8, 4)}
    assert found.scores == {"reward/solver": (None, 1.0), "team_success": (0.25, 0.5)}
    assert [line.split() for line in str(found).splitlines()] == [
        ["one", "two"],
        ["pipeline.group_size", "8", "4"],
        ["step", "0", "0"],
        ["reward/solver", "-", "1.000"],
        ["team_success", "0.250", "0.500"],
    ]
    same = await client.job("one").compare(client.job("one"))
    assert same.fields == {}


async def test_a_comparison_shows_all_that_differs_in_a_field(
    client: AsyncClient, job_yaml: str
) -> None:
    for job_id, rate, prompt in (("one", 0.0015, "Be brief.\nAdd."), ("two", 0.00152, None)):
        changes = {
            "policies.solver.optimizer.lr": rate,
            "agents.solver.system_prompt": prompt,
            "agents.solver.sampling.temperature": 0.75 if prompt else 0.7501,
        }
        await client.submit(job_yaml, job_id=job_id, overrides=changes)
    lines = str(await client.compare("one", "two")).splitlines()
    shown = {line.split()[0]: " ".join(line.split()[1:]) for line in lines[1:]}
    assert shown["policies.solver.optimizer.lr"] == "0.0015 0.00152"
    assert shown["agents.solver.sampling.temperature"] == "0.75 0.7501"
    assert shown["agents.solver.system_prompt"] == "Be brief.\\nAdd. -"
    assert len(lines) == 5


def test_overrides_apply_to_files_texts_dicts_and_jobs(tmp_path: Path, job_yaml: str) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(job_yaml)
    given = {"name": "x", "pipeline": {"steps": 3, "queries_per_step": 4}}
    whole = {**parse_job(job_yaml).model_dump(mode="json"), **given}
    changes = {"pipeline.steps": 7, "policies.solver.optimizer.lr": 0.5}
    for spec in (path, str(path), job_yaml, whole, parse_job(job_yaml)):
        found = read_spec(spec, changes)
        assert isinstance(found, JobSpec)
        assert found.pipeline.steps == 7
        assert found.policies["solver"].optimizer.lr == 0.5
    assert given["pipeline"] == {"steps": 3, "queries_per_step": 4}  # the caller's own


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("pipeline.stepz", "there is no such field"),
        ("name.first", "`name` is a value, not a section"),
        ("pipeline..steps", "a name in the path is empty"),
    ],
)
def test_a_wrong_override_is_refused_with_its_path(path: str, message: str, job_yaml: str) -> None:
    with pytest.raises(JobSpecError) as caught:
        read_spec(job_yaml, {path: 1})
    assert caught.value.problems[0].field == path
    assert caught.value.problems[0].message == message


def test_names_of_jobs_may_have_dots(job_yaml: str) -> None:
    assert parse_job(job_yaml.replace("name: team", "name: qwen3-0.6b.v2")).name == "qwen3-0.6b.v2"
    with pytest.raises(JobSpecError):
        parse_job(job_yaml.replace("name: team", "name: .hidden"))


METRICS = MetricsLogged(AT, 3, {"loss": 0.5, "reward/mean": 0.25, **{f"m{i}": i for i in range(9)}})


@pytest.mark.parametrize(
    ("event", "text"),
    [
        (StateChanged(AT, JobState.RUNNING), "the job is running"),
        (
            StateChanged(AT, JobState.FAILED, TroupeError("no\nmemory", remedy="Add some.")),
            "the job has failed: no memory. Add some.",
        ),
        (METRICS, "step 3: reward/mean=0.25 m0=0 m1=1 m2=2 m3=3 m4=4 and 5 more"),
        (Notice(AT, "warning", "a worker\nis lost"), "warning: a worker is lost"),
        (Activity(AT, "rollout", 3, 20, 8, 32), "step 3 of 20: rollout (8 of 32)"),
        (Activity(AT, "start", 0, 20, 0, 0), "step 0 of 20: start"),
        (
            Activity(AT, "evaluating: 3 of 8 questions", 0, 20, 3, 8),
            "step 0 of 20: evaluating: 3 of 8 questions",
        ),
        (
            Activity(AT, "step 3/20: 8 of 32 trajectories", 3, 20, 8, 32),
            "step 3/20: 8 of 32 trajectories",
        ),
    ],
)
def test_an_event_prints_as_one_line(event: Event, text: str) -> None:
    assert str(event) == f"{AT:%H:%M:%S} {text}"
    assert repr(replace(event)).startswith(type(event).__name__)
