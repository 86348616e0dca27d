"""The asyncio client against a real gRPC server."""

from __future__ import annotations

import asyncio
import json
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.fake_orchestrator import FakeOrchestrator, S, serve
from tests.support.waiting import PATIENCE
from troupe.client import (
    Activity,
    AsyncClient,
    JobCancelled,
    JobFailed,
    JobState,
    MetricsLogged,
    Notice,
    StateChanged,
)
from troupe.client.handle import watch
from troupe.cluster import NoCluster
from troupe.job import JobSpecError, parse_job
from troupe.rpc import (
    DataLoss,
    DeadlineExceeded,
    FailedPrecondition,
    Internal,
    InvalidArgument,
    NotFound,
    RetryPolicy,
    Unavailable,
)
from troupe.v1 import orchestrator_pb2 as orchestrator_pb

RUN = (S.JOB_STATE_STARTING, S.JOB_STATE_RUNNING)


async def test_a_closed_client_says_so(client: AsyncClient) -> None:
    await client.close()
    with pytest.raises(FailedPrecondition, match="connection is closed") as caught:
        await client.jobs()
    assert caught.value.kind == "client_closed"
    with pytest.raises(FailedPrecondition, match="connection is closed"):
        await anext(aiter(client.job("some").watch()))


async def test_a_job_may_be_a_path_a_text_or_a_specification(
    client: AsyncClient, fake: FakeOrchestrator, job_yaml: str, tmp_path: Path
) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(job_yaml)

    for spec in (path, str(path), job_yaml, parse_job(job_yaml)):
        await client.submit(spec, job_id="one")

    sent = [request.spec for request in fake.requests("SubmitJob")]
    assert [parse_job(text) for text in sent] == [parse_job(job_yaml)] * 4
    ids = {request.request_id for request in fake.requests("SubmitJob")}
    assert len(ids) == 4


async def test_a_bad_specification_never_reaches_the_server(
    client: AsyncClient, fake: FakeOrchestrator
) -> None:
    with pytest.raises(JobSpecError):
        await client.submit("name: x\nstep: 3")
    with pytest.raises(JobSpecError, match="cannot be read"):
        await client.submit("nowhere.yaml")
    assert fake.calls == []


async def test_a_repeated_call_carries_the_same_request_id(
    client: AsyncClient, fake: FakeOrchestrator, job_yaml: str
) -> None:
    fake.away = 2

    job = await client.submit(job_yaml)

    requests = fake.requests("SubmitJob")
    assert len(requests) == 3
    assert len({request.request_id for request in requests}) == 1
    assert (await job.info()).state == JobState.SUBMITTED


async def test_watch_tells_every_event_in_order_until_the_end(
    client: AsyncClient, fake: FakeOrchestrator, job_yaml: str
) -> None:
    job = await client.submit(job_yaml)
    await fake.move(job.id, *RUN)
    await fake.log(
        job.id,
        orchestrator_pb.JobEvent(
            activity=orchestrator_pb.Activity(text="rolling out", done=1, total=4)
        ),
    )
    await fake.step(job.id, 1, reward__solver__mean=0.5)
    note = orchestrator_pb.Notice(
        severity=orchestrator_pb.Notice.SEVERITY_WARNING, text="a worker was lost"
    )
    await fake.log(job.id, orchestrator_pb.JobEvent(notice=note))
    await fake.log(job.id, orchestrator_pb.JobEvent())  # a kind of a newer server
    await fake.move(job.id, S.JOB_STATE_SUCCEEDED)

    events = [event async for event in job.watch()]

    assert [type(e) for e in events] == [
        StateChanged, StateChanged, StateChanged, Activity, MetricsLogged, Notice, StateChanged,
    ]  # fmt: skip
    assert isinstance(events[4], MetricsLogged)
    assert events[4].values == {"reward/solver/mean": 0.5}
    assert isinstance(events[5], Notice)
    assert events[5].severity == "warning"
    assert isinstance(events[-1], StateChanged)
    assert events[-1].state == JobState.SUCCEEDED


async def test_a_broken_watch_goes_on_where_it_broke(
    client: AsyncClient, fake: FakeOrchestrator, job_yaml: str
) -> None:
    job = await client.submit(job_yaml)
    await fake.move(job.id, *RUN)
    for step in range(1, 4):
        await fake.step(job.id, step, loss=0.1)
    await fake.move(job.id, S.JOB_STATE_SUCCEEDED)
    fake.break_after = 4

    events = [event async for event in job.watch()]

    assert [e.step for e in events if isinstance(e, MetricsLogged)] == [1, 2, 3]
    assert [r.after for r in fake.requests("WatchJob")] == ["", "4-0"]


async def test_a_watch_survives_a_restart_of_the_orchestrator(job_yaml: str) -> None:
    fake = FakeOrchestrator()
    async with serve(fake) as address, AsyncClient(address) as first:
        job = await first.submit(job_yaml)
        await fake.move(job.id, *RUN)
    port = int(address.rpartition(":")[2])

    async with AsyncClient(address) as client:
        watching = asyncio.create_task(_collect(client, job.id))
        await asyncio.sleep(0.3)  # there is no listener yet
        async with serve(fake, port):
            await fake.move(job.id, S.JOB_STATE_SUCCEEDED)
            async with asyncio.timeout(PATIENCE):
                events = await watching

    assert len(events) == 4


@pytest.mark.slow
async def test_a_watch_of_a_quiet_job_survives_every_restart_of_the_orchestrator(
    job_yaml: str,
) -> None:
    """How long the orchestrator is away counts, not for how long nothing has happened."""
    fake, seen = FakeOrchestrator(), list[object]()
    async with serve(fake) as address, AsyncClient(address) as first:
        job = await first.submit(job_yaml)
        await fake.move(job.id, S.JOB_STATE_STARTING)
    port = int(address.rpartition(":")[2])

    async def collect(client: AsyncClient) -> None:
        quick = RetryPolicy(initial_backoff=0.05, max_backoff=0.1)
        async for event in watch(client._stub, job.id, retry=quick, away_seconds=2.0):
            seen.append(event)

    async with AsyncClient(address) as client:
        watching = asyncio.create_task(collect(client))
        for _ in range(3):
            async with serve(fake, port):
                await asyncio.sleep(2.5)
            assert not watching.done()
        async with serve(fake, port):
            await fake.move(job.id, *RUN[1:], S.JOB_STATE_SUCCEEDED)
            async with asyncio.timeout(PATIENCE):
                await watching
    assert len(seen) == 4


async def _collect(client: AsyncClient, job_id: str) -> list[object]:
    return [event async for event in client.job(job_id).watch()]


async def test_a_watch_gives_up_when_the_orchestrator_stays_away() -> None:
    async with AsyncClient("127.0.0.1:9") as client:
        stub, quick = client._stub, RetryPolicy(initial_backoff=0.01, max_backoff=0.05)
        with pytest.raises(Unavailable):
            async for _ in watch(stub, "job", retry=quick, away_seconds=0.3):
                pass


async def test_waiting_ends_with_the_job_or_at_the_deadline(
    client: AsyncClient, fake: FakeOrchestrator, job_yaml: str
) -> None:
    job = await client.submit(job_yaml)
    await fake.move(job.id, *RUN)
    fake.jobs[job.id].activity = "rolling out 3 of 8"
    with pytest.raises(DeadlineExceeded) as caught:
        await job.wait(timeout=1)  # deadline: the job does not end
    assert "is running at step 0 of 3 (rolling out 3 of 8)" in str(caught.value)

    waiting = asyncio.create_task(job.result())
    await asyncio.sleep(0.05)  # some moment of the wait; any will do
    fake.jobs[job.id].before["team_success"] = 0.1
    fake.jobs[job.id].after["team_success"] = 0.9
    await fake.move(job.id, S.JOB_STATE_SUCCEEDED)
    result = await waiting

    assert (result.before, result.after) == ({"team_success": 0.1}, {"team_success": 0.9})
    assert result.checkpoints[0].version == 3


async def test_a_failed_job_raises_its_problem(
    client: AsyncClient, fake: FakeOrchestrator, job_yaml: str
) -> None:
    job = await client.submit(job_yaml)
    problem = Internal("no such directory.", field="policies.solver.model.path", value="/models")
    await fake.move(job.id, S.JOB_STATE_FAILED, problem=problem)

    with pytest.raises(JobFailed) as caught:
        await job.result(timeout=PATIENCE)

    assert caught.value.field == "policies.solver.model.path"
    assert caught.value.job.state == JobState.FAILED


async def test_steering(client: AsyncClient, fake: FakeOrchestrator, job_yaml: str) -> None:
    job = await client.submit(job_yaml)
    await fake.move(job.id, *RUN)

    assert (await job.pause()).state == JobState.PAUSED
    assert (await job.resume()).state == JobState.SUBMITTED
    await fake.move(job.id, *RUN)
    await job.pause()
    fake.jobs[job.id].history.add(step=2).fields.add(field="pipeline.steps", old="2", new="6")
    overrides = {"pipeline.steps": 6, "policies.solver.optimizer": {"lr": 1e-6}}
    [change] = (await job.resume(overrides=overrides)).history
    assert str(change) == "after step 2: pipeline.steps: 2 -> 6"
    sent = fake.requests("ResumeJob")[1].overrides
    assert {path: json.loads(value) for path, value in sent.items()} == overrides
    assert (await job.cancel("enough")).state == JobState.CANCELLED
    assert fake.requests("CancelJob")[0].reason == "enough"
    with pytest.raises(JobCancelled, match="troupe jobs resume"):
        await job.result(timeout=PATIENCE)
    with pytest.raises(FailedPrecondition, match="the job is cancelled"):
        await job.pause()


async def test_an_unknown_job_is_named_with_the_remedy(client: AsyncClient) -> None:
    for call in (client.job("nope").info(), client.job("nope").wait(PATIENCE)):
        with pytest.raises(NotFound, match="troupe jobs list"):
            await call


async def test_listing(client: AsyncClient, fake: FakeOrchestrator, job_yaml: str) -> None:
    one = await client.submit(job_yaml, job_id="one")
    two = await client.submit(job_yaml, job_id="two")
    await fake.move(two.id, S.JOB_STATE_FAILED)

    assert [j.id for j in await client.jobs()] == ["one", "two"]
    assert [j.id for j in await client.jobs(JobState.FAILED)] == ["two"]
    info = await one.info()
    assert (info.name, info.mode, info.total_steps) == ("team", "micro_batch", 3)
    assert info.spec["policies"]["solver"]["model"]["path"] == "/models/solver"
    assert (await one.versions("solver"))[0].outcome == "applied"
    await fake.step(one.id, 1, loss=0.5)
    assert (await one.metrics())[0].values == {"loss": 0.5}
    assert len(await one.trajectories(limit=220)) == 220
    assert [r.page_size for r in fake.requests("ListTrajectories")] == [100, 100, 20]
    trajectory = await one.trajectory("t7")
    assert trajectory.conversation[0].messages == (("user", "2+2"),)
    assert trajectory.conversation[0].reward == 0.5
    cluster = await client.cluster()
    assert (cluster.engines[0].state, cluster.engines[0].version) == ("healthy", None)
    assert cluster.workers[0].kind == "rollout"


async def test_matches_between_members_have_no_before_and_after() -> None:
    """A population plays its first matches before the first step, as evaluations are."""
    ids = ("h0-e0-t0", "h0-e3-t0", "m0x0-t0", "m0x1-t0", "gsm8k-h1-e0-t0", "gsm8k-h1-e3-t0")

    class Populated(FakeOrchestrator):
        async def ListTrajectories(
            self, request: orchestrator_pb.ListTrajectoriesRequest, context: Any
        ) -> orchestrator_pb.ListTrajectoriesResponse:
            reply = orchestrator_pb.ListTrajectoriesResponse()
            for one in ids:
                name, _, _ = one.rpartition("-")
                query, _, step = name.partition("-e")
                if not request.HasField("to_step") or not int(step or 0):
                    reply.trajectories.add(
                        trajectory_id=one, query_id=query if step else one, step=int(step or 0)
                    )
            return reply

        async def GetTrajectory(
            self, request: orchestrator_pb.GetTrajectoryRequest, context: Any
        ) -> orchestrator_pb.GetTrajectoryResponse:
            summary = orchestrator_pb.TrajectorySummary(trajectory_id=request.trajectory_id)
            return orchestrator_pb.GetTrajectoryResponse(summary=summary)

    async with serve(Populated()) as address, AsyncClient(address) as other:
        pairs = await other.job("mine").before_and_after()
    assert [(before.id, after.id) for before, after in pairs] == [
        ("h0-e0-t0", "h0-e3-t0"),
        ("gsm8k-h1-e0-t0", "gsm8k-h1-e3-t0"),
    ]


async def test_generating(client: AsyncClient, fake: FakeOrchestrator, job_yaml: str) -> None:
    job = await client.submit(job_yaml)

    answer = await job.generate("solver", "2+2=", temperature=0.0, max_new_tokens=8)
    await job.generate("solver", input_ids=[1, 2])

    assert (answer.text, answer.version, answer.output_ids) == ("four", 3, (7, 8))
    by_text, by_ids = fake.requests("GeneratePolicy")
    assert [(m.role, m.content) for m in by_text.messages] == [("user", "2+2=")]
    assert by_text.sampling.HasField("temperature")
    assert by_text.sampling.temperature == 0.0
    assert not by_text.sampling.HasField("top_k")
    assert list(by_ids.input_ids) == [1, 2]
    for wrong in ({}, {"messages": "a", "input_ids": [1]}, {"messages": [{"text": "a"}]}):
        with pytest.raises(InvalidArgument, match="messages"):
            await job.generate("solver", **wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", "hot"),
        ("top_p", 0),
        ("top_k", 2**40),
        ("max_new_tokens", 1.5),
        ("seed", -1),
        ("seed", 2**63),
        ("stop_token_ids", 5),
        ("stop_token_ids", ["a"]),
        ("input_ids", [2**31]),
        ("input_ids", "ab"),
        ("messages", 5),
        ("messages.0.content", [{"role": "user", "content": ["hi"]}]),
        ("messages.0.role", [{"role": None, "content": "hi"}]),
    ],
)
async def test_a_value_that_cannot_be_generated_with_is_named(
    client: AsyncClient, job_yaml: str, field: str, value: Any
) -> None:
    job = await client.submit(job_yaml)
    name = field.partition(".")[0]
    asked = {name: value} if name in ("messages", "input_ids") else {"messages": "hi", name: value}
    with pytest.raises(InvalidArgument) as refused:
        await job.generate("solver", **asked)
    assert refused.value.field == field


async def test_what_a_prompt_may_be(
    client: AsyncClient, fake: FakeOrchestrator, job_yaml: str
) -> None:
    job = await client.submit(job_yaml)
    await job.generate("solver", input_ids=np.array([1, 2]), top_k=0)
    await job.generate("solver", "half \ud800")
    by_ids, by_text = fake.requests("GeneratePolicy")
    assert (list(by_ids.input_ids), by_ids.sampling.top_k) == ([1, 2], -1)
    assert by_text.messages[0].content == "half \ufffd"


async def test_export_is_whole_or_not_at_all(
    client: AsyncClient, fake: FakeOrchestrator, job_yaml: str, tmp_path: Path
) -> None:
    job = await client.submit(job_yaml)
    fake.files = {"config.json": b"{}", "deep/model.safetensors": bytes(range(256)) * 10}
    target = tmp_path / "out" / "solver"

    for fault, message in (("wrong_checksum", "checksum is wrong"), ("cut_export", "middle")):
        setattr(fake, fault, True)
        with pytest.raises(DataLoss, match=message):
            await job.export("solver", target)
        setattr(fake, fault, False)
        assert os.listdir(tmp_path / "out") == []

    assert await job.export("solver", target, version=2) == target
    assert (target / "deep/model.safetensors").read_bytes() == bytes(range(256)) * 10
    assert fake.requests("ExportCheckpoint")[-1].version == 2
    with pytest.raises(FailedPrecondition, match="not empty"):
        await job.export("solver", target)

    fake.files = {"../evil": b"x"}
    with pytest.raises(DataLoss, match="leads out"):
        await job.export("solver", tmp_path / "other")
    assert not (tmp_path / "evil").exists()


async def test_the_token_travels_with_every_call(fake: FakeOrchestrator) -> None:
    async with AsyncClient(fake.address, token="secret") as client:  # type: ignore[attr-defined]
        await client.jobs()
    assert fake.metadata[0]["authorization"] == "Bearer secret"


async def test_where_the_orchestrator_is(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NoCluster, match="troupe up"):
        AsyncClient()
    with pytest.raises(InvalidArgument, match="address = nonsense"):
        AsyncClient("nonsense")
    monkeypatch.setenv("TROUPE_ORCHESTRATOR_ADDRESS", "somewhere:123")
    async with AsyncClient() as client:
        assert client.address == "somewhere:123"
