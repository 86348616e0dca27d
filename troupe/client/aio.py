"""The asyncio client of a Troupe cluster."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self

from pydantic import SecretStr

from troupe.client.comparison import Comparison
from troupe.client.discovery import resolve_address, settings_for
from troupe.client.functions import AsyncFunctions, with_code
from troupe.client.handle import AsyncJobHandle, Spec, given_text, paged, read_spec, refuse_one_text
from troupe.client.records.cluster import Cluster
from troupe.client.records.jobs import Job, JobState
from troupe.rpc.channel import connect
from troupe.rpc.ids import new_id
from troupe.rpc.settings import ClientSettings
from troupe.v1 import orchestrator_pb2 as orchestrator_pb
from troupe.v1 import orchestrator_pb2_grpc as orchestrator_grpc
from troupe.v1 import reward_pb2_grpc as reward_grpc


class AsyncClient:
    """An async context manager that connects to a cluster through its orchestrator.

        async with AsyncClient("127.0.0.1:50051") as troupe:
            job = await troupe.submit("job.yaml")
            async for event in job.watch():
                print(event)
            print((await job.result()).after)

    Every call has a deadline and is repeated when the service is briefly unavailable; a repeated
    call has no second effect. All errors are `troupe.rpc.TroupeError`.
    """

    def __init__(
        self,
        address: str | None = None,
        token: str | None = None,
        settings: ClientSettings | None = None,
    ) -> None:
        """Connect to the orchestrator at `address`, a "host:port".

        `address` defaults to `TROUPE_ORCHESTRATOR_ADDRESS`, else to the embedded cluster that runs
        here (`troupe up`). `token` is the cluster's bearer token; for your own embedded cluster it
        is found automatically, else it defaults to `TROUPE_TOKEN`. `settings` (TLS, deadlines,
        retries) default to `TROUPE_*`.

        Raises `InvalidArgument` for a malformed address, `NoCluster` when no cluster is found.
        """
        self.address = resolve_address(address)
        settings = settings or settings_for(self.address)
        if token is not None:
            settings = settings.model_copy(update={"token": SecretStr(token)})
        self._settings = settings
        self._channel = connect(self.address, settings)
        self._reward: reward_grpc.RewardAsyncStub = reward_grpc.RewardStub(self._channel)
        self.functions = AsyncFunctions(self._reward)
        """The cluster's rewards and tools."""
        self._stub: orchestrator_grpc.OrchestratorAsyncStub = orchestrator_grpc.OrchestratorStub(
            self._channel
        )

    async def submit(
        self,
        spec: Spec,
        job_id: str | None = None,
        overrides: Mapping[str, Any] | None = None,
        *,
        tags: Sequence[str] = (),
        notes: str = "",
        given: str | None = None,
    ) -> AsyncJobHandle:
        """Submit a job: a path, YAML or JSON text, a `JobSpec`, or the fields of a job as a dict,
        with functions and rows of this program (`troupe.train`); returns when it is durable.

        `overrides` has other values by path: `{"pipeline.steps": 20}`. You may choose the `job_id`;
        the same specification under the same id is the same job. The files that its `code` names
        are sent along. `tags` (short words) and `notes` are for people, and
        `AsyncJobHandle.annotate` changes them later. `given`: the text to show as the job's own
        file; default: the text of `spec` (`AsyncJobHandle.given_spec`). Raises
        `troupe.job.JobSpecError` for an invalid specification, and `InvalidArgument` for functions
        or rows that cannot be sent.
        """
        refuse_one_text(tags, "tags")
        read = read_spec(spec, overrides)
        job = await with_code(self._reward, read)
        request = orchestrator_pb.SubmitJobRequest(
            request_id=new_id("submit"),
            spec=job.model_dump_json(),
            job_id=job_id or "",
            given_spec=given_text(spec, read, overrides) if given is None else given,
            tags=tags,
            notes=notes,
        )
        reply = await self._stub.SubmitJob(request)
        return self.job(reply.job.job_id)

    async def jobs(self, state: JobState | None = None, limit: int | None = None) -> list[Job]:
        """Return all jobs, or the jobs in `state`, oldest first; at most the newest `limit`."""

        async def fetch(size: int, token: str) -> tuple[list[Job], str]:
            request = orchestrator_pb.ListJobsRequest(page_size=size, page_token=token)
            if state is not None:
                request.state = state.number  # type: ignore[assignment]
            reply = await self._stub.ListJobs(request)
            return [Job.of(job) for job in reply.jobs], reply.next_page_token

        return (await paged(fetch, limit))[::-1]

    def job(self, job_id: str) -> AsyncJobHandle:
        """Return a handle of an existing job. Makes no call."""
        return AsyncJobHandle(self._stub, job_id, self._settings, self._reward)

    async def compare(self, first: str, *others: str) -> Comparison:
        """Return how the jobs with these ids differ: fields, held-out scores, metrics."""
        return await self.job(first).compare(*others)

    async def cluster(self) -> Cluster:
        """Return the current state of every worker, engine and service."""
        return Cluster.of(await self._stub.GetCluster(orchestrator_pb.GetClusterRequest()))

    async def close(self) -> None:
        """Close the connection; watches in progress end with an error."""
        await self._channel.close(grace=None)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
