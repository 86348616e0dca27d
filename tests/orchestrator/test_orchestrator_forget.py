"""Rows that an ended job keeps for a resume, and their end."""

from __future__ import annotations

import pytest
from redis.asyncio import Redis

from services.orchestrator.state.redis import INDEX, JobKeys, RedisAccess
from tests.support.cluster import Cluster, job_yaml
from tests.support.waiting import until
from troupe.contracts.conversations import CONVERSATIONS
from troupe.rpc import AlreadyExists, FailedPrecondition, InvalidArgument, NotFound, new_id
from troupe.v1 import common_pb2 as common_pb
from troupe.v1 import experience_store_pb2 as store_pb
from troupe.v1 import orchestrator_pb2 as orchestrator_pb


async def test_a_cancelled_job_is_forgotten(cluster: Cluster) -> None:
    worker = cluster.rollouts[0]
    job_id = await cluster.submit(job_yaml(pipeline__steps=50))
    await cluster.until(job_id, lambda job: job.step >= 1)
    worker.script.seconds = 1000
    running = len(worker.ran)
    await until(lambda: len(worker.ran) > running)

    forget = orchestrator_pb.ForgetJobRequest(request_id=new_id(), job_id=job_id)
    with pytest.raises(FailedPrecondition, match="Cancel it first"):
        await cluster.api.ForgetJob(forget)
    await cluster.cancel(job_id)
    assert (await cluster.wait(job_id)).state == common_pb.JOB_STATE_CANCELLED
    tables = await cluster.api.DescribeTables(store_pb.DescribeTablesRequest(job_id=job_id))
    assert {table.policy for table in tables.tables} == {"checker", "solver"}

    assert await keys_of(cluster, job_id)
    assert list((cluster.directory / job_id / CONVERSATIONS).iterdir())
    forget = orchestrator_pb.ForgetJobRequest(request_id=new_id(), job_id=job_id)
    was = (await cluster.api.ForgetJob(forget)).job
    assert (was.state, was.step > 0) == (common_pb.JOB_STATE_CANCELLED, True)
    assert was.versions
    assert (await cluster.api.ForgetJob(forget)).job == was, "repeated with its id"
    assert await keys_of(cluster, job_id) == []
    assert worker.deleted[-1] == job_id
    assert cluster.trainers[0].deleted[-1] == job_id
    assert (cluster.directory / job_id).is_dir(), "checkpoints stay"
    assert not (cluster.directory / job_id / CONVERSATIONS).exists()
    for call in (
        cluster.api.GetJob(orchestrator_pb.GetJobRequest(job_id=job_id)),
        cluster.api.ForgetJob(orchestrator_pb.ForgetJobRequest(request_id=new_id(), job_id=job_id)),
        cluster.api.DescribeTables(store_pb.DescribeTablesRequest(job_id=job_id)),
        cluster.api.ResumeJob(orchestrator_pb.ResumeJobRequest(request_id=new_id(), job_id=job_id)),
    ):
        with pytest.raises(NotFound):
            await call
    assert not (await cluster.api.ListJobs(orchestrator_pb.ListJobsRequest())).jobs


async def keys_of(cluster: Cluster, job_id: str) -> list[bytes]:
    """Return a job's keys in Redis, the orchestrator's and the store's."""
    async with Redis.from_url(cluster.settings.redis_url) as redis:
        found = [key async for key in redis.scan_iter(f"*{job_id}*")]
        for index in ("troupe:orchestrator:jobs", "troupe:orchestrator:jobs:states", "troupe:jobs"):
            kind = await redis.type(index)
            members = await (
                redis.smembers(index) if kind == b"set" else redis.zrange(index, 0, -1)
            )
            found += [index.encode() for one in members if one.decode() == job_id]
        return found


async def test_a_job_that_has_ended_leaves_no_weights_unless_it_serves(cluster: Cluster) -> None:
    """A job's published weights stay while its engines do, and are deleted when another needs the
    room."""
    worker, trainer = cluster.rollouts[0], cluster.trainers[0]
    good = await cluster.submit(job_yaml("good"))
    assert (await cluster.wait(good)).state == common_pb.JOB_STATE_SUCCEEDED
    assert good not in worker.deleted
    bad = await cluster.submit(job_yaml("bad", pipeline__steps=50))
    await cluster.until(bad, lambda job: job.step >= 1)
    assert worker.deleted == [good]
    assert trainer.deleted == [good]
    await cluster.cancel(bad)
    assert (await cluster.wait(bad)).state == common_pb.JOB_STATE_CANCELLED
    assert worker.deleted == [good, bad]
    assert trainer.deleted == [good, bad]


async def test_a_worker_that_was_away_is_told_later(cluster: Cluster) -> None:
    worker = cluster.rollouts[0]
    first = await cluster.submit(job_yaml("first"))
    assert (await cluster.wait(first)).state == common_pb.JOB_STATE_SUCCEEDED
    worker.script.keep_states = 1
    second = await cluster.submit(job_yaml("second"))
    assert (await cluster.wait(second)).state == common_pb.JOB_STATE_SUCCEEDED
    assert worker.deleted == []
    third = await cluster.submit(job_yaml("third"))
    assert (await cluster.wait(third)).state == common_pb.JOB_STATE_SUCCEEDED
    assert worker.deleted == [first, second]


async def test_jobs_are_listed_in_pages_newest_first(cluster: Cluster) -> None:
    await cluster.trainers[0].down()
    ids = [await cluster.submit(job_yaml(f"job-{number}")) for number in range(7)]
    for job_id in ids[::2]:
        await cluster.cancel(job_id)
        await cluster.wait(job_id)
    for state, expected in ((None, ids), (common_pb.JOB_STATE_CANCELLED, ids[::2])):
        for size in (1, 2, 3, 7, 50):
            found, token = [], ""
            while True:
                request = orchestrator_pb.ListJobsRequest(
                    state=state, page_size=size, page_token=token
                )
                reply = await cluster.api.ListJobs(request)
                assert len(reply.jobs) <= size
                found += [job.job_id for job in reply.jobs]
                token = reply.next_page_token
                if not token:
                    break
            assert found == expected[::-1]
    page = await cluster.api.ListJobs(orchestrator_pb.ListJobsRequest(page_size=2))
    last = page.jobs[-1].job_id
    await cluster.cancel(last)
    await cluster.wait(last)
    await cluster.api.ForgetJob(orchestrator_pb.ForgetJobRequest(request_id=new_id(), job_id=last))
    rest = orchestrator_pb.ListJobsRequest(page_token=page.next_page_token)
    found = [job.job_id for job in (await cluster.api.ListJobs(rest)).jobs]
    assert found == ids[:5][::-1], "a page goes on where the one before ended"
    for token in ("x", "1:", ":a", "nan:a", "1.0:" + "x" * 500, "1e5:a", "1.0"):
        with pytest.raises(InvalidArgument) as caught:
            await cluster.api.ListJobs(orchestrator_pb.ListJobsRequest(page_token=token))
        assert caught.value.field == "page_token"


async def test_a_job_that_never_had_rows_is_forgotten_too(cluster: Cluster) -> None:
    await cluster.trainers[0].down()
    job_id = await cluster.submit(job_yaml())
    await cluster.cancel(job_id)
    await cluster.wait(job_id)
    await cluster.api.ForgetJob(
        orchestrator_pb.ForgetJobRequest(request_id=new_id(), job_id=job_id)
    )


async def test_a_new_job_does_not_get_the_id_of_one_whose_files_are_there(
    cluster: Cluster,
) -> None:
    """Its first state and its checkpoints would be taken for the new job's."""
    job_id = await cluster.submit(job_yaml(), "mine")
    await cluster.wait(job_id)
    forget = orchestrator_pb.ForgetJobRequest(request_id=new_id(), job_id=job_id)
    await cluster.api.ForgetJob(forget)
    with pytest.raises(AlreadyExists, match="files of an earlier job") as refused:
        await cluster.submit(job_yaml(seed=7), "mine")
    assert (refused.value.field, refused.value.value) == ("job_id", "mine")
    assert "Choose another job_id" in (refused.value.remedy or "")
    (cluster.directory / "mine").rename(cluster.directory / "elsewhere")
    assert await cluster.submit(job_yaml(seed=7), "mine") == "mine"
    assert (await cluster.wait("mine")).state == common_pb.JOB_STATE_SUCCEEDED


BROKEN = {
    "steps beyond 64 bits": (
        "spec_json",
        '{"name": "x", "pipeline": {"steps": 9223372036854775808}}',
    ),
    "steps that are no number": ("spec_json", '{"name": "x", "pipeline": {"steps": "many"}}'),
    "a name that is no text": ("spec_json", '{"name": 7}'),
    "a section that is none": ("spec_json", '{"pipeline": []}'),
    "no specification": ("spec_json", "null"),
    "no JSON": ("spec_json", "{"),
    "deep JSON": ("spec_json", "[" * 100_000),
    "half a surrogate pair": ("spec_json", '{"name": "\\ud800"}'),
    "no UTF-8": ("spec_json", b"\xff"),
    "no state": ("state", "99"),
    "no step": ("step", ""),
    "a step beyond 64 bits": ("step", str(1 << 63)),
    "no time": ("created_at", "inf"),
    "no version": ("version:solver", "x"),
    "no problem": ("problem", b"\xff\xff"),
    "scores that are none": ("before", '{"a": "b"}'),
    "scores that are a list": ("after", "[1]"),
}


async def test_a_record_that_cannot_be_read_is_shown_and_can_be_forgotten(cluster: Cluster) -> None:
    good = await cluster.submit(job_yaml())
    await cluster.wait(good)
    redis = RedisAccess(cluster.settings.redis_url)
    ended = await redis.call("HGETALL", JobKeys(good).record)
    names = {f"broken-{number}": case for number, case in enumerate(BROKEN)}
    for job_id, case in names.items():
        field, value = BROKEN[case]
        fields = ended | {b"job_id": job_id.encode(), field.encode(): value}
        pairs = [part for pair in fields.items() for part in pair]
        await redis.call("HSET", JobKeys(job_id).record, *pairs)
    await redis.call("HSET", JobKeys("part").record, "state", "3")
    await redis.call("SET", JobKeys("text").record, "x")
    await redis.call("HSET", JobKeys("numbers").record, *(p for one in ended.items() for p in one))
    await redis.call("HSET", JobKeys("numbers").latest, "loss", "x")
    broken = [*names, "part", "text", "gone", "numbers"]
    for job_id in broken:
        await redis.call("ZADD", INDEX, 1, job_id)

    for _ in range(2):
        jobs = {
            job.job_id: job
            for job in (await cluster.api.ListJobs(orchestrator_pb.ListJobsRequest())).jobs
        }
        assert set(jobs) == {good, *broken}
        assert jobs[good].state == common_pb.JOB_STATE_SUCCEEDED
        for job_id in broken:
            assert jobs[job_id].problem.kind == "record_broken", names.get(job_id, job_id)
            assert "forget" in jobs[job_id].problem.remedy
        await cluster.stop_orchestrator()
        await cluster.start_orchestrator()
    resume = orchestrator_pb.ResumeJobRequest(request_id=new_id(), job_id="part")
    with pytest.raises(FailedPrecondition, match="the stored record of this job is unreadable"):
        await cluster.api.ResumeJob(resume)
    for job_id in broken:
        await cluster.api.ForgetJob(
            orchestrator_pb.ForgetJobRequest(request_id=new_id(), job_id=job_id)
        )
    await redis.close()
    left = (await cluster.api.ListJobs(orchestrator_pb.ListJobsRequest())).jobs
    assert good in [job.job_id for job in left]
    assert not {"part", "text", "gone"} & {job.job_id for job in left}
