"""Actions of users on jobs: submit, watch, pause, resume, cancel."""

import pytest

from services.orchestrator.cluster import release_ended_jobs
from services.orchestrator.state.job_store import JobStore
from services.orchestrator.state.records import JobRecord
from services.orchestrator.state.redis import StateUnavailable
from tests.support.cluster import Cluster, job_yaml
from tests.support.waiting import until
from troupe.rpc import AlreadyExists, FailedPrecondition, InvalidArgument, NotFound, new_id
from troupe.v1 import common_pb2 as common_pb
from troupe.v1 import orchestrator_pb2 as orchestrator_pb
from troupe.v1 import trainer_pb2 as trainer_pb

POLICIES = ("checker", "solver")
RUNNING = (common_pb.JOB_STATE_RUNNING,)


async def test_submitting_again_finds_the_same_job(cluster: Cluster) -> None:
    request = orchestrator_pb.SubmitJobRequest(request_id=new_id("submit"), spec=job_yaml("twice"))
    first = (await cluster.api.SubmitJob(request)).job
    assert first.job_id.startswith("twice-")
    # After a restart nothing is in the idempotency cache: the id itself is derived.
    await cluster.stop_orchestrator()
    await cluster.start_orchestrator()
    again = (await cluster.api.SubmitJob(request)).job
    assert again.job_id == first.job_id
    assert len((await cluster.api.ListJobs(orchestrator_pb.ListJobsRequest())).jobs) >= 1
    await cluster.wait(first.job_id)


async def test_a_submission_that_was_cut_off_is_carried_out_when_it_is_repeated(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    create = JobStore.create

    async def cut_off(self: JobStore, record: JobRecord, given: str = "") -> bool:
        if await create(self, record, given):
            raise StateUnavailable("gone for a moment")
        return False

    monkeypatch.setattr(JobStore, "create", cut_off)
    job_id = await cluster.submit(job_yaml())  # clients repeat unavailable calls
    assert (await cluster.wait(job_id)).state == common_pb.JOB_STATE_SUCCEEDED


async def test_an_id_of_another_job_is_refused(cluster: Cluster) -> None:
    job_id = new_id("mine")
    await cluster.submit(job_yaml(), job_id)
    with pytest.raises(AlreadyExists, match="another specification"):
        await cluster.submit(job_yaml(seed=7), job_id)
    await cluster.wait(job_id)


async def test_every_fault_of_a_specification_is_named(cluster: Cluster) -> None:
    text = job_yaml(pipeline__stps=3, limits__turn_seconds=-1)
    with pytest.raises(InvalidArgument) as caught:
        await cluster.submit(text)
    error = caught.value
    assert error.kind == "invalid_job"
    assert error.field in ("pipeline.stps", "limits.turn_seconds")
    for field in ("pipeline.stps", "limits.turn_seconds"):
        assert field in str(error)
    assert "Did you mean `steps`?" in str(error)
    assert error.remedy


@pytest.mark.parametrize(
    ("field", "request_"),
    [
        ("spec", orchestrator_pb.SubmitJobRequest(spec=" ")),
        ("job_id", orchestrator_pb.SubmitJobRequest(spec=job_yaml(), job_id="../etc")),
        ("job_id", orchestrator_pb.SubmitJobRequest(spec=job_yaml(), job_id="mine\n")),
        ("job_id", orchestrator_pb.SubmitJobRequest(spec=job_yaml(), job_id="x" * 129)),
        ("job_id", orchestrator_pb.SubmitJobRequest(spec=job_yaml(), job_id="logs")),
    ],
)
async def test_a_bad_submission_names_its_field(
    cluster: Cluster, field: str, request_: orchestrator_pb.SubmitJobRequest
) -> None:
    with pytest.raises(InvalidArgument) as caught:
        await cluster.api.SubmitJob(request_)
    assert caught.value.field == field


async def test_a_paused_job_resumes_where_it_was(cluster: Cluster) -> None:
    cluster.rollouts[0].script.seconds = 0.05
    job_id = await cluster.submit(job_yaml(pipeline__steps=4, evaluation__queries=2))
    await cluster.until(job_id, lambda job: job.step >= 1)
    assert (await cluster.pause(job_id)).state == common_pb.JOB_STATE_PAUSING
    job = await cluster.wait(job_id, (common_pb.JOB_STATE_PAUSED,))
    assert 1 <= job.step < 4
    # The step in flight was finished, workers are free.
    found = await cluster.step(job_id, job.step - 1)
    assert len(found.commits) == 2
    assert not cluster.trainers[0].bound
    assert not cluster.rollouts[0].versions
    assert (await cluster.pause(job_id)).state == common_pb.JOB_STATE_PAUSED
    assert (await cluster.resume(job_id)).state == common_pb.JOB_STATE_SUBMITTED
    job = await cluster.wait(job_id)
    assert job.state == common_pb.JOB_STATE_SUCCEEDED
    await cluster.check_accounts(job_id, 4, POLICIES)
    ran = cluster.rollouts[0].ran
    assert len(ran) == len(set(ran)), "nothing was rolled out twice"


async def test_a_cancelled_job_stops_now_and_can_be_resumed(cluster: Cluster) -> None:
    worker = cluster.rollouts[0]
    worker.script.seconds = 1000
    job_id = await cluster.submit(job_yaml())
    await cluster.until(job_id, lambda job: "trajectories" in job.activity)
    await until(lambda: len(worker.ran) >= 4)
    await cluster.cancel(job_id, "enough")
    job = await cluster.wait(job_id)
    assert job.state == common_pb.JOB_STATE_CANCELLED
    assert worker.aborted == 4
    assert worker.calls["ReleaseJob"]
    assert not cluster.trainers[0].bound
    assert (await cluster.cancel(job_id)).state == common_pb.JOB_STATE_CANCELLED
    assert "cancelled: enough" in await cluster.notices(job_id)
    worker.script.seconds = 0.01
    await cluster.resume(job_id)
    job = await cluster.wait(job_id)
    assert job.state == common_pb.JOB_STATE_SUCCEEDED, job.problem
    await cluster.check_accounts(job_id, 2, POLICIES)


async def test_a_failed_job_resumes_once_its_cause_is_mended(cluster: Cluster) -> None:
    script = cluster.rollouts[0].script
    job_id = await cluster.submit(job_yaml(pipeline__steps=3))
    script.fail = lambda ticket: "broken" if ticket.index >= 2 else None
    job = await cluster.wait(job_id)
    assert (job.state, job.step) == (common_pb.JOB_STATE_FAILED, 1)
    assert job.HasField("ended_at")
    script.fail = lambda ticket: None
    await cluster.resume(job_id)
    job = await cluster.wait(job_id)
    assert job.state == common_pb.JOB_STATE_SUCCEEDED
    assert not job.HasField("problem")
    await cluster.check_accounts(job_id, 3, POLICIES)


async def test_calls_that_the_job_s_state_forbids_are_refused(cluster: Cluster) -> None:
    job_id = await cluster.submit(job_yaml())
    await cluster.wait(job_id)
    for call in (cluster.pause, cluster.resume, cluster.cancel):
        with pytest.raises(FailedPrecondition, match=r"SUCCEEDED.* (Only a|nothing to)|done all"):
            await call(job_id)
        with pytest.raises(NotFound) as caught:
            await call("nobody")
        assert caught.value.field == "job_id"


async def test_a_watcher_sees_everything_and_ends_with_the_job(cluster: Cluster) -> None:
    cluster.rollouts[0].script.seconds = 0.1
    job_id = await cluster.submit(job_yaml())
    seen = [e async for e in cluster.api.WatchJob(orchestrator_pb.WatchJobRequest(job_id=job_id))]
    logged = [e for e in seen if e.event_id]
    live = [e.activity for e in seen if e.HasField("activity")]
    assert logged == await cluster.events(job_id)
    assert [e.metrics.step for e in logged if e.HasField("metrics")] == [1, 2]
    assert any(a.text.startswith("step 1/2: ") and a.total == 4 for a in live)
    # Going on from the middle.
    request = orchestrator_pb.WatchJobRequest(job_id=job_id, after=logged[2].event_id)
    rest = [e async for e in cluster.api.WatchJob(request)]
    assert rest == logged[3:]
    request = orchestrator_pb.WatchJobRequest(job_id=job_id, after=logged[-1].event_id)
    assert [e async for e in cluster.api.WatchJob(request)] == []


async def test_a_watcher_follows_a_resumed_job(cluster: Cluster) -> None:
    cluster.rollouts[0].script.fail = lambda ticket: "broken"
    job_id = await cluster.submit(job_yaml())
    await cluster.wait(job_id)
    cluster.rollouts[0].script.fail = lambda ticket: None
    await cluster.resume(job_id)
    states = [e.state.state for e in await cluster.events(job_id) if e.HasField("state")]
    assert states[-1] == common_pb.JOB_STATE_SUCCEEDED
    assert common_pb.JOB_STATE_FAILED in states


async def test_watching_needs_a_job_and_an_event_id(cluster: Cluster) -> None:
    with pytest.raises(NotFound):
        await cluster.events("nobody")
    job_id = await cluster.submit(job_yaml())
    request = orchestrator_pb.WatchJobRequest(job_id=job_id, after="yesterday")
    with pytest.raises(InvalidArgument) as caught:
        _ = [e async for e in cluster.api.WatchJob(request)]
    assert caught.value.field == "after"
    await cluster.wait(job_id)


async def test_a_client_that_vanishes_leaves_nothing_behind(cluster: Cluster) -> None:
    cluster.rollouts[0].script.seconds = 0.1
    job_id = await cluster.submit(job_yaml())
    async for _ in cluster.api.WatchJob(orchestrator_pb.WatchJobRequest(job_id=job_id)):
        break
    assert (await cluster.wait(job_id)).state == common_pb.JOB_STATE_SUCCEEDED
    log = cluster.orchestrator.service._at.shared.log  # type: ignore[union-attr]
    await until(lambda: not log._waiting)


async def test_several_jobs_run_at_once(cluster: Cluster) -> None:
    cluster.rollouts[0].script.seconds = 0.05
    await cluster.add_trainer()
    ids = [await cluster.submit(job_yaml(f"job{n}", seed=n)) for n in range(3)]
    for job_id in ids:
        job = await cluster.wait(job_id)
        assert job.state == common_pb.JOB_STATE_SUCCEEDED, job.problem
        await cluster.check_accounts(job_id, 2, POLICIES)


async def test_bindings_of_an_ended_job_do_not_count_as_load(cluster: Cluster) -> None:
    """A heartbeat may still tell of it when the next job is placed."""
    job_id = await cluster.submit(job_yaml())
    assert (await cluster.wait(job_id)).state == common_pb.JOB_STATE_SUCCEEDED
    assert cluster.orchestrator is not None
    shared = cluster.orchestrator.service._at.shared
    (worker,) = shared.workers.usable(orchestrator_pb.WORKER_KIND_TRAINER)
    stale = trainer_pb.BindingStatus(
        job_id=job_id, policy="solver", state=common_pb.BINDING_STATE_IDLE, version=2
    )
    worker.beat = orchestrator_pb.HeartbeatRequest(bindings=[stale])
    await release_ended_jobs(shared, "next")
    # A beat that came meanwhile took its place; it does not tell of it either.
    assert stale not in worker.beat.bindings


async def test_a_job_keeps_its_file_as_it_was_given_over_a_restart(
    cluster: Cluster,
) -> None:
    text = f"# The baseline.\n{job_yaml()}"
    request = orchestrator_pb.SubmitJobRequest(
        request_id=new_id("submit"), spec=job_yaml(), given_spec=text
    )
    job_id = (await cluster.api.SubmitJob(request)).job.job_id
    await cluster.stop_orchestrator()
    await cluster.start_orchestrator()
    # A repeated submission does not change it.
    request.given_spec = "# another"
    await cluster.api.SubmitJob(request)
    found = await cluster.api.GetJob(orchestrator_pb.GetJobRequest(job_id=job_id))
    assert found.given_spec == text
    await cluster.wait(job_id)
    # Without the author's text, `given` is the specification itself.
    plain = await cluster.submit(text.replace("baseline", "second"))
    found = await cluster.api.GetJob(orchestrator_pb.GetJobRequest(job_id=plain))
    assert found.given_spec.startswith("# The second.")
    await cluster.wait(plain)


async def test_a_resume_with_another_specification_replaces_the_given_one(cluster: Cluster) -> None:
    job_id = await cluster.submit_paused()
    text = f"# More steps.\n{job_yaml(pipeline__steps=3)}"
    await cluster.resume(job_id, text)
    found = await cluster.api.GetJob(orchestrator_pb.GetJobRequest(job_id=job_id))
    assert found.given_spec == text
    await cluster.wait(job_id)


async def test_tags_and_notes_are_set_at_submit_and_changed_in_any_state(cluster: Cluster) -> None:
    request = orchestrator_pb.SubmitJobRequest(
        request_id=new_id("submit"), spec=job_yaml(), tags=["b", "a", "b"], notes="first"
    )
    job = (await cluster.api.SubmitJob(request)).job
    assert (list(job.tags), job.notes) == (["a", "b"], "first")
    await cluster.wait(job.job_id)
    change = orchestrator_pb.AnnotateJobRequest(
        request_id=new_id("annotate"), job_id=job.job_id, add_tags=["kept"], remove_tags=["a"]
    )
    await cluster.api.AnnotateJob(change)
    await cluster.stop_orchestrator()
    await cluster.start_orchestrator()
    job = await cluster.job(job.job_id)
    assert (list(job.tags), job.notes) == (["b", "kept"], "first")
    assert job.state == common_pb.JOB_STATE_SUCCEEDED
    change = orchestrator_pb.AnnotateJobRequest(
        request_id=new_id("annotate"), job_id=job.job_id, notes=""
    )
    assert (await cluster.api.AnnotateJob(change)).job.notes == ""


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("add_tags", {"add_tags": ["a\nb"]}),
        ("add_tags", {"add_tags": [" a"]}),
        ("add_tags", {"add_tags": ["x" * 65]}),
        ("add_tags", {"add_tags": [str(i) for i in range(33)]}),
        ("notes", {"notes": "x" * 4_001}),
    ],
)
async def test_a_bad_annotation_names_its_field(
    cluster: Cluster, field: str, change: dict[str, object]
) -> None:
    job_id = await cluster.submit(job_yaml())
    request = orchestrator_pb.AnnotateJobRequest(
        request_id=new_id("annotate"),
        job_id=job_id,
        **change,  # type: ignore[arg-type]
    )
    with pytest.raises(InvalidArgument) as caught:
        await cluster.api.AnnotateJob(request)
    assert caught.value.field == field
    assert not (await cluster.job(job_id)).tags
    await cluster.wait(job_id)


async def test_the_cluster_names_the_jobs_of_every_worker_idle_trainers_too(
    cluster: Cluster,
) -> None:
    cluster.rollouts[0].script.seconds = 0.1
    job_id = await cluster.submit(job_yaml(pipeline__steps=500))

    async def named() -> bool:
        found = await cluster.api.GetCluster(orchestrator_pb.GetClusterRequest())
        kinds = {worker.kind for worker in found.workers if list(worker.jobs) == [job_id]}
        return len(kinds) == 2

    await until(named)
    await cluster.cancel(job_id)
    await cluster.wait(job_id)

    async def free() -> bool:
        found = await cluster.api.GetCluster(orchestrator_pb.GetClusterRequest())
        return not any(worker.jobs for worker in found.workers)

    await until(free)
