"""Files that jobs ship: kept while a job needs them, by their hash."""

from __future__ import annotations

import pytest

from tests.support.cluster import Cluster, job_yaml
from troupe.functions.sources import digest
from troupe.rpc import InvalidArgument, NotFound, new_id
from troupe.v1 import common_pb2 as common_pb
from troupe.v1 import orchestrator_pb2 as orchestrator_pb
from troupe.v1 import reward_pb2 as reward_pb
from troupe.v1.reward_pb2_grpc import RewardStub


async def upload(cluster: Cluster, text: str) -> str:
    """Ship a package of one file; its hash."""
    files = [reward_pb.SourceFile(path="team/flow.py", content=text.encode())]
    request = reward_pb.UploadSourceRequest(request_id=new_id(), files=files)
    found = (await RewardStub(cluster._channel).UploadSource(request)).sha256
    assert found == digest(files)
    return found


def shipping(sha256: str | None, **over: object) -> str:
    code = {"include": ["team"], **({"sha256": sha256} if sha256 else {})}
    return job_yaml(code=code, **over)


async def read(cluster: Cluster, sha256: str) -> str:
    reply = await cluster.api.ReadCode(orchestrator_pb.ReadCodeRequest(sha256=sha256))
    return reply.files[0].content.decode()


async def test_files_are_kept_until_the_last_job_is_forgotten(cluster: Cluster) -> None:
    one, two = await upload(cluster, "one"), await upload(cluster, "two")
    shipped = {"a": one, "b": one, "c": two}
    jobs = [await cluster.submit(shipping(sha, name=name)) for name, sha in shipped.items()]
    for job_id in jobs:
        assert (await cluster.wait(job_id)).state == common_pb.JOB_STATE_SUCCEEDED
    for number, left in enumerate(([one, two], [two], [])):
        forget = orchestrator_pb.ForgetJobRequest(request_id=new_id(), job_id=jobs[number])
        await cluster.api.ForgetJob(forget)
        for sha, text in ((one, "one"), (two, "two")):
            if sha in left:
                assert await read(cluster, sha) == text
            else:
                with pytest.raises(NotFound):
                    await read(cluster, sha)


async def test_a_job_whose_files_were_not_sent_is_refused(cluster: Cluster) -> None:
    with pytest.raises(InvalidArgument) as bare:
        await cluster.submit(shipping(None))
    assert bare.value.field == "code.sha256"
    assert "SDK" in (bare.value.remedy or "")
    with pytest.raises(NotFound) as unknown:
        await cluster.submit(shipping("0" * 64))
    assert unknown.value.field == "code.sha256"
    assert not (await cluster.api.ListJobs(orchestrator_pb.ListJobsRequest())).jobs
    files = [reward_pb.SourceFile(path="../flow.py")]
    request = reward_pb.UploadSourceRequest(request_id=new_id(), files=files)
    with pytest.raises(InvalidArgument, match="leads out"):
        await RewardStub(cluster._channel).UploadSource(request)


async def test_a_job_goes_on_with_mended_files(cluster: Cluster) -> None:
    worker = cluster.rollouts[0]
    worker.script.seconds = 0.2
    first, second = await upload(cluster, "first"), await upload(cluster, "second")
    job_id = await cluster.submit(shipping(first, pipeline__steps=50))
    await cluster.until(job_id, lambda job: job.step >= 1)
    await cluster.cancel(job_id)
    assert (await cluster.wait(job_id)).state == common_pb.JOB_STATE_CANCELLED
    text = shipping(second, pipeline__steps=2)
    resume = orchestrator_pb.ResumeJobRequest(request_id=new_id(), job_id=job_id, spec=text)
    await cluster.api.ResumeJob(resume)
    job = await cluster.wait(job_id)
    assert second in job.spec_json
    # Both are the job's: it may be resumed with either.
    assert [await read(cluster, sha) for sha in (first, second)] == ["first", "second"]
    await cluster.api.ForgetJob(
        orchestrator_pb.ForgetJobRequest(request_id=new_id(), job_id=job_id)
    )
    for sha in (first, second):
        with pytest.raises(NotFound):
            await read(cluster, sha)
