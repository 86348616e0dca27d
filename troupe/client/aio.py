"""The asyncio client of a Troupe cluster."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from pydantic import SecretStr

from troupe.client.address import resolve_address, settings_for
from troupe.client.cluster_records import Cluster
from troupe.client.functions import AsyncFunctions
from troupe.client.handle import AsyncJobHandle, paged
from troupe.client.records import Job, JobState
from troupe.client.specs import Spec, read_spec
from troupe.rpc.channel import connect
from troupe.rpc.ids import new_id
from troupe.rpc.settings import ClientSettings
from troupe.v1 import orchestrator_pb2 as pb
from troupe.v1 import orchestrator_pb2_grpc as pb_grpc
from troupe.v1 import reward_pb2_grpc


class AsyncClient:
    """Talks to one orchestrator, the only door for users. An async context manager.

        async with AsyncClient("127.0.0.1:50051") as troupe:
            job = await troupe.submit("job.yaml")
            async for event in job.watch():
                print(event)
            print((await job.result()).after)

    Every call has a deadline and is repeated when the service is away for a moment; a repeated
    call has no second effect. All errors are `troupe.rpc.TroupeError`.
    """

    def __init__(
        self,
        address: str | None = None,
        token: str | None = None,
        settings: ClientSettings | None = None,
    ) -> None:
        """`address` is "host:port"; default: `TROUPE_ORCHESTRATOR_ADDRESS`, else the embedded
        cluster that runs here (`troupe up`). `token` is the cluster's bearer token; default: that
        of your embedded cluster there, which is found by itself, else `TROUPE_TOKEN`. `settings`
        (TLS, deadlines, retries) default to `TROUPE_*`.

        Raises `InvalidArgument` for a malformed address, `NoCluster` when there is none.
        """
        self.address = resolve_address(address)
        settings = settings or settings_for(self.address)
        if token is not None:
            settings = settings.model_copy(update={"token": SecretStr(token)})
        self._settings = settings
        self._channel = connect(self.address, settings)
        self.functions = AsyncFunctions(reward_pb2_grpc.RewardStub(self._channel))
        """Rewards and tools of the cluster."""
        self._stub: pb_grpc.OrchestratorAsyncStub = pb_grpc.OrchestratorStub(self._channel)

    async def submit(self, spec: Spec, job_id: str | None = None) -> AsyncJobHandle:
        """Submit a job: a path, YAML or JSON text, or a `JobSpec`; returns when it is durable.

        `job_id` may be chosen; the same specification under the same id is the same job.
        Raises `troupe.job.JobSpecError` for a bad specification.
        """
        request = pb.SubmitJobRequest(
            request_id=new_id("submit"),
            spec=read_spec(spec).model_dump_json(),
            job_id=job_id or "",
        )
        reply = await self._stub.SubmitJob(request)
        return self.job(reply.job.job_id)

    async def jobs(self, state: JobState | None = None, limit: int | None = None) -> list[Job]:
        """All jobs, or those in `state`, oldest first; with `limit` the newest so many."""

        async def ask(size: int, token: str) -> tuple[list[Job], str]:
            request = pb.ListJobsRequest(page_size=size, page_token=token)
            if state is not None:
                request.state = state.number  # type: ignore[assignment]
            reply = await self._stub.ListJobs(request)
            return [Job.of(job) for job in reply.jobs], reply.next_page_token

        return (await paged(ask, limit))[::-1]

    def job(self, job_id: str) -> AsyncJobHandle:
        """A handle of a job that exists. Asks nobody."""
        return AsyncJobHandle(self._stub, job_id, self._settings)

    async def cluster(self) -> Cluster:
        """What every worker, engine and service does now."""
        return Cluster.of(await self._stub.GetCluster(pb.GetClusterRequest()))

    async def close(self) -> None:
        """Close the connection; watches in progress end with an error."""
        await self._channel.close(grace=None)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()
