"""Users' reads: metrics, versions, checkpoints, trajectories, the cluster, generation."""

import asyncio
from pathlib import Path

import pytest
import xxhash

from tests.support.cluster import Cluster, job_yaml
from tests.support.fake_trainer import weights_of
from tests.support.waiting import PATIENCE
from troupe.checkpoints.retention import choose
from troupe.client import AsyncClient
from troupe.contracts.conversations import CONVERSATIONS, ConversationLog, TrajectoryFilter
from troupe.rpc import InvalidArgument, NotFound, Unavailable, new_id
from troupe.v1 import common_pb2 as common_pb
from troupe.v1 import experience_store_pb2 as store_pb
from troupe.v1 import orchestrator_pb2 as orchestrator_pb
from troupe.v1 import rollout_pb2 as rollout_pb


@pytest.fixture
async def done(cluster: Cluster) -> str:
    """A job that has succeeded."""
    job_id = await cluster.submit(job_yaml(evaluation__queries=2))
    assert (await cluster.wait(job_id)).state == common_pb.JOB_STATE_SUCCEEDED
    return job_id


async def test_metrics_by_name_and_step(cluster: Cluster, done: str) -> None:
    request = orchestrator_pb.ListMetricsRequest(job_id=done, names=["reward/mean"])
    rows = (await cluster.api.ListMetrics(request)).rows
    assert [(row.step, dict(row.values)) for row in rows] == [
        (1, {"reward/mean": 1.0}),
        (2, {"reward/mean": 1.0}),
    ]
    rows = (
        await cluster.api.ListMetrics(orchestrator_pb.ListMetricsRequest(job_id=done, after_step=1))
    ).rows
    assert [row.step for row in rows] == [2, 2]
    assert "evaluation/team/mean" in rows[-1].values


async def test_versions_of_a_policy(cluster: Cluster, done: str) -> None:
    request = orchestrator_pb.ListVersionsRequest(job_id=done, policy="solver")
    versions = (await cluster.api.ListVersions(request)).versions
    assert [(one.weights.version, one.step, one.outcome) for one in versions] == [
        (0, 0, store_pb.STEP_OUTCOME_UNSPECIFIED),
        (1, 1, store_pb.STEP_OUTCOME_APPLIED),
        (2, 2, store_pb.STEP_OUTCOME_APPLIED),
    ]
    assert versions[1].weights == weights_of(done, "solver", 1)


async def test_a_checkpoint_is_exported_whole(cluster: Cluster, done: str) -> None:
    request = orchestrator_pb.ExportCheckpointRequest(job_id=done, policy="solver")
    files: dict[str, bytes] = {}
    async for chunk in cluster.api.ExportCheckpoint(request):
        files[chunk.path] = files.get(chunk.path, b"") + chunk.data
        if chunk.end_of_file:
            assert chunk.checksum == xxhash.xxh3_64_intdigest(files[chunk.path])
    saved = cluster.directory / done / "checkpoints" / "solver" / "v2"
    assert files == {path.name: path.read_bytes() for path in saved.iterdir()}
    assert len(files["model.safetensors"]) > 2**20  # more than one chunk


async def test_a_checkpoint_that_is_not_there(cluster: Cluster, done: str) -> None:
    request = orchestrator_pb.ExportCheckpointRequest(job_id=done, policy="solver", version=9)
    with pytest.raises(NotFound, match=r"solver@9.*checker@2, solver@2"):
        _ = [chunk async for chunk in cluster.api.ExportCheckpoint(request)]


async def test_half_a_checkpoint_is_not_listed(cluster: Cluster, done: str) -> None:
    root: Path = cluster.directory / done / "checkpoints" / "solver"
    (root / ".v3.half").mkdir()
    (root / "v4").write_text("a file")
    listed = await cluster.api.ListCheckpoints(orchestrator_pb.ListCheckpointsRequest(job_id=done))
    assert [(one.policy, one.version) for one in listed.checkpoints] == [
        ("checker", 2),
        ("solver", 2),
    ]
    assert listed.checkpoints[0].num_bytes > 2**20


async def test_trajectories_newest_first_in_pages(cluster: Cluster, done: str) -> None:
    seen: list[orchestrator_pb.TrajectorySummary] = []
    token, pages = "", 0
    while pages == 0 or token:
        request = orchestrator_pb.ListTrajectoriesRequest(
            job_id=done, page_size=5, page_token=token
        )
        page = await cluster.api.ListTrajectories(request)
        seen += page.trajectories
        token, pages = page.next_page_token, pages + 1
    assert pages == 3
    kinds = [(one.step, one.evaluation) for one in seen]
    order = [(2, True)] * 2 + [(1, False)] * 4 + [(0, False)] * 4 + [(0, True)] * 2
    assert kinds == order
    request = orchestrator_pb.ListTrajectoriesRequest(job_id=done, page_token="gone")
    with pytest.raises(InvalidArgument):
        await cluster.api.ListTrajectories(request)


async def test_a_trajectory_shows_its_conversation(cluster: Cluster, done: str) -> None:
    request = orchestrator_pb.GetTrajectoryRequest(job_id=done, trajectory_id="q1-s0-t1")
    found = await cluster.api.GetTrajectory(request)
    assert found.summary.state == common_pb.TRAJECTORY_STATE_COMPLETED
    assert dict(found.summary.rewards) == {"solver": 1.0, "team": 1.0}
    assert [turn.agent for turn in found.turns] == ["checker", "solver"]
    assert found.turns[0].messages[0].content == "2+2?"
    request = orchestrator_pb.GetTrajectoryRequest(job_id=done, trajectory_id="nobody")
    with pytest.raises(NotFound):
        await cluster.api.GetTrajectory(request)


async def test_only_the_newest_trajectories_are_kept(cluster: Cluster) -> None:
    await cluster.stop_orchestrator()
    cluster.settings = cluster.settings.model_copy(update={"conversation_bytes": 16_000})
    await cluster.start_orchestrator()
    job_id = await cluster.submit(job_yaml(pipeline__steps=20))
    await cluster.wait(job_id)
    listed = await cluster.api.ListTrajectories(
        orchestrator_pb.ListTrajectoriesRequest(job_id=job_id, evaluation=False, page_size=100)
    )
    steps = [one.step for one in listed.trajectories]
    assert 0 < len(steps) < 80
    assert steps[0] == 19
    assert 0 not in steps
    folder = cluster.directory / job_id / CONVERSATIONS
    # A file that is being written, and the evaluation before the first step, come on top.
    assert sum(path.stat().st_size for path in folder.iterdir()) < 20_000
    assert folder.stat().st_mode & 0o077 == 0, "texts are the owner's"


async def test_kept_conversations_outlive_the_job_and_its_orchestrator(
    cluster: Cluster, done: str
) -> None:
    request = orchestrator_pb.ListTrajectoriesRequest(job_id=done, page_size=100)
    before = await cluster.api.ListTrajectories(request)
    assert len(before.trajectories) == 12, "all that the job declares"
    await cluster.stop_orchestrator()
    read = ConversationLog(cluster.directory / done / CONVERSATIONS)
    wanted = TrajectoryFilter(orchestrator_pb.ListTrajectoriesRequest())
    assert read.page(100, "", wanted).summaries == list(before.trajectories)
    await cluster.start_orchestrator()
    assert await cluster.api.ListTrajectories(request) == before
    one = orchestrator_pb.GetTrajectoryRequest(job_id=done, trajectory_id="q1-s0-t1")
    found = await cluster.api.GetTrajectory(one)
    assert found.turns[0].messages[0].content == "2+2?"


async def test_a_log_that_cannot_be_written_costs_conversations_and_not_the_job(
    cluster: Cluster,
) -> None:
    (cluster.directory / "full").mkdir()
    (cluster.directory / "full" / CONVERSATIONS).write_text("a file is in the way")
    job_id = await cluster.submit(job_yaml(), job_id="full")
    assert (await cluster.wait(job_id)).state == common_pb.JOB_STATE_SUCCEEDED
    request = orchestrator_pb.ListTrajectoriesRequest(job_id=job_id)
    assert not (await cluster.api.ListTrajectories(request)).trajectories
    async with AsyncClient(cluster.settings.address) as client:
        told = [str(event) async for event in client.job(job_id).watch()]
    assert len([text for text in told if "conversations cannot be kept in" in text]) == 1


async def test_the_picture_of_the_cluster(cluster: Cluster) -> None:
    cluster.rollouts[0].script.seconds = 1000
    job_id = await cluster.submit(job_yaml())
    await cluster.until(job_id, lambda job: "trajectories" in job.activity)
    async with asyncio.timeout(PATIENCE):
        while True:
            picture = await cluster.api.GetCluster(orchestrator_pb.GetClusterRequest())
            if picture.in_flight.get(job_id) == 4 and picture.bindings and picture.engines:
                break
    kinds = {worker.kind for worker in picture.workers}
    assert kinds == {orchestrator_pb.WORKER_KIND_ROLLOUT, orchestrator_pb.WORKER_KIND_TRAINER}
    assert all(worker.alive for worker in picture.workers)
    serving = {service.name: service.serving for service in picture.services}
    assert serving == {"redis": True, "experience_store": True, "reward": False}
    reward = next(one for one in picture.services if one.name == "reward")
    assert "no service answers" in reward.message
    await cluster.cancel(job_id)
    await cluster.wait(job_id)


async def test_a_trained_policy_generates(cluster: Cluster, done: str) -> None:
    async def generate(policy: str = "solver") -> str:
        request = orchestrator_pb.GeneratePolicyRequest(
            request_id=new_id(),
            job_id=done,
            policy=policy,
            messages=[common_pb.ChatMessage(role="user", content="2+2?")],
        )
        return (await cluster.api.GeneratePolicy(request)).result.text

    assert await generate() == "solver@2"
    # The engines are gone: they are made again at the newest version.
    cluster.rollouts[0].versions.clear()
    cluster.rollouts[0].calls.clear()
    assert await generate("checker") == "checker@2"
    assert cluster.rollouts[0].calls["PrepareJob"] == 1
    assert not cluster.trainers[0].bound
    with pytest.raises(NotFound, match="no policy and no agent called 'nobody'") as caught:
        await generate("nobody")
    assert "checker, solver" in (caught.value.remedy or "")


async def test_a_trained_policy_scores(cluster: Cluster, done: str) -> None:
    request = rollout_pb.ScoreRequest(job_id=done, policy="solver")
    answer = await cluster.api.ScorePolicy(orchestrator_pb.ScorePolicyRequest(request=request))
    assert answer.result.version == 2
    request.policy = "nobody"
    with pytest.raises(NotFound, match="no policy and no agent called 'nobody'"):
        await cluster.api.ScorePolicy(orchestrator_pb.ScorePolicyRequest(request=request))


async def test_a_call_that_names_a_policy_takes_the_name_of_an_agent_that_it_plays(
    cluster: Cluster, tmp_path: Path
) -> None:
    """The policy `big` plays the agent `solver`, as in the README."""
    # The name of a policy counts, also where an agent of that name plays another policy.
    agents = {"writer": {"policy": "big"}, "big": {"policy": "small"}}
    job_id = await cluster.submit(job_yaml(policies=["big", "small"], agents=agents))
    job = await cluster.wait(job_id)
    assert job.state == common_pb.JOB_STATE_SUCCEEDED, job.problem

    for name, policy in {"writer": "big", "big": "big", "small": "small"}.items():
        score = rollout_pb.ScoreRequest(job_id=job_id, policy=name)
        await cluster.api.ScorePolicy(orchestrator_pb.ScorePolicyRequest(request=score))
        async with AsyncClient(cluster.settings.address) as client:
            handle = client.job(job_id)
            assert (await handle.generate(name, "2+2?")).text == f"{policy}@2"
            assert {one.policy for one in await handle.versions(name)} == {policy}
            exported = await handle.export(name, tmp_path / name)
            saved = cluster.directory / job_id / "checkpoints" / policy / "v2"
            assert {one.name for one in exported.iterdir()} == {one.name for one in saved.iterdir()}
        assert choose(cluster.directory, job_id, name, None) == saved

    async with AsyncClient(cluster.settings.address) as client:
        handle = client.job(job_id)
        for call in (
            handle.generate("nobody", "2+2?"),
            handle.versions("nobody"),
            handle.export("nobody", tmp_path / "nobody"),
            anext(handle.samples("nobody")),
        ):
            with pytest.raises(NotFound, match="no policy and no agent called 'nobody'") as caught:
                await call
            assert caught.value.field == "policy"
            assert "big (plays small), writer (plays big)" in (caught.value.remedy or "")
    with pytest.raises(NotFound, match="there is no checkpoint of nobody"):
        choose(cluster.directory, job_id, "nobody", None)


async def test_generation_needs_one_prompt_and_engines(cluster: Cluster) -> None:
    cluster.rollouts[0].script.seconds = 1000
    cluster.rollouts[0].script.prepare_error = Unavailable("engines start")
    job_id = await cluster.submit(job_yaml())
    request = orchestrator_pb.GeneratePolicyRequest(request_id="a", job_id=job_id, policy="solver")
    with pytest.raises(InvalidArgument):
        await cluster.api.GeneratePolicy(request)
    request = orchestrator_pb.GeneratePolicyRequest(
        request_id="b", job_id=job_id, policy="solver", input_ids=[1]
    )
    with pytest.raises(Unavailable, match="not ready"):
        await cluster.api.GeneratePolicy(request, timeout=0.5)
    await cluster.cancel(job_id)
    await cluster.wait(job_id)


async def test_the_next_job_gets_the_room_of_an_ended_one(cluster: Cluster, done: str) -> None:
    assert done in cluster.rollouts[0].versions
    job_id = await cluster.submit(job_yaml("other"))
    assert (await cluster.wait(job_id)).state == common_pb.JOB_STATE_SUCCEEDED
    assert set(cluster.rollouts[0].versions) == {job_id}


async def test_jobs_are_listed_by_state(cluster: Cluster, done: str) -> None:
    request = orchestrator_pb.ListJobsRequest(state=common_pb.JOB_STATE_SUCCEEDED)
    jobs = (await cluster.api.ListJobs(request)).jobs
    assert done in {job.job_id for job in jobs}
    assert {job.state for job in jobs} == {common_pb.JOB_STATE_SUCCEEDED}


@pytest.mark.parametrize("missing", ["worker_id", "address", "kind"])
async def test_a_heartbeat_names_what_it_lacks(cluster: Cluster, missing: str) -> None:
    beat = orchestrator_pb.HeartbeatRequest(
        worker_id="w", address="127.0.0.1:1", kind=orchestrator_pb.WORKER_KIND_ROLLOUT
    )
    beat.ClearField(missing)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument) as caught:
        await cluster.api.Heartbeat(beat)
    assert caught.value.field == missing


async def test_rows_that_are_freed_are_explained(cluster: Cluster, done: str) -> None:
    request = store_pb.DropTablesRequest(request_id=new_id(), job_id=done)
    await cluster.store.DropTables(request)
    for call, asked in (
        (cluster.api.DescribeTables, store_pb.DescribeTablesRequest(job_id=done)),
        (cluster.api.ListSamples, store_pb.ListSamplesRequest(job_id=done, policy="solver")),
    ):
        with pytest.raises(NotFound, match=r"SUCCEEDED and its rows are freed.*jobs audit"):
            await call(asked)
