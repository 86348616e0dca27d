"""An orchestrator without a cluster: a real gRPC server whose jobs a test moves by hand.

Methods that are not written here answer UNIMPLEMENTED, so a client that calls what it should not
is found out. Errors cross the wire as the real service sends them.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import xxhash
from google.rpc import code_pb2
from grpc_status import rpc_status

from tests.support.fake_population import FakePopulation
from tests.support.fake_tables import FakeTables
from troupe import states
from troupe.job import parse_job
from troupe.rpc.addresses import join_address
from troupe.rpc.errors import FailedPrecondition, NotFound, TroupeError, to_status
from troupe.v1 import common_pb2 as common_pb
from troupe.v1 import experience_store_pb2 as store_pb
from troupe.v1 import orchestrator_pb2 as orchestrator_pb
from troupe.v1 import orchestrator_pb2_grpc as orchestrator_grpc
from troupe.v1 import reward_pb2 as reward_pb
from troupe.v1 import reward_pb2_grpc as reward_grpc
from troupe.v1 import rollout_pb2 as rollout_pb

S = common_pb.JobState


def shared_engines(job_id: str) -> list[rollout_pb.EngineStatus]:
    """Two policies' engines on one host; turns of the first still use an older version."""
    host = f"{job_id}.solver.0@r0"
    return [
        rollout_pb.EngineStatus(
            engine_id=f"{job_id}.{policy}.0@r0",
            job_id=job_id,
            policy=policy,
            kind="sglang",
            state=common_pb.ENGINE_STATE_HEALTHY,
            version=version,
            live_versions=live,
            running=running,
            worker_id="r0",
            host=host,
        )
        for policy, version, live, running in (("solver", 5, [4, 5], 2), ("critic", 7, [7], 1))
    ]


class FakeOrchestrator(FakeTables, FakePopulation, orchestrator_grpc.OrchestratorServicer):
    """Keeps jobs and their event logs in memory; `calls` lists (method, request)."""

    def __init__(self) -> None:
        super().__init__()
        self.jobs: dict[str, orchestrator_pb.Job] = {}
        self.logs: dict[str, list[orchestrator_pb.JobEvent]] = {}
        self.calls: list[tuple[str, Any]] = []
        self.metadata: list[dict[str, Any]] = []
        self.files: dict[str, bytes] = {}
        self.profiles: dict[str, str] = {}
        # Specifications as they were given, by job.
        self.given: dict[str, str] = {}
        # Hosts, each with its CPU, memory, GPU and GPU memory.
        self.hosts: dict[str, tuple[float, float, float, float]] = {
            "node-a": (0.5, 0.25, math.nan, math.nan)
        }
        self.wrong_checksum = False
        self.cut_export = False
        # Tokens of the reply of trajectory t1; 0: none are kept.
        self.reply_tokens = 0
        # Unary calls to refuse with UNAVAILABLE before answering one.
        self.away = 0
        # The next resume is refused with it.
        self.refusal: TroupeError | None = None
        # Number of events after which a watch breaks, once.
        self.break_after: int | None = None
        # Engines in addition to the one that `GetCluster` always shows.
        self.engines: list[rollout_pb.EngineStatus] = []
        self.generated: orchestrator_pb.GeneratePolicyResponse | None = None
        self._grown = asyncio.Condition()

    # --- the test's side --------------------------------------------------------------------

    async def move(self, job_id: str, *targets: int, problem: TroupeError | None = None) -> None:
        """Move a job through states, logging each."""
        for target in targets:
            job = self.jobs[job_id]
            states.check(states.JOB, job.state, target)
            job.state = target  # type: ignore[assignment]
            event = orchestrator_pb.JobEvent()
            event.state.state = target  # type: ignore[assignment]
            if problem is not None:
                job.problem.CopyFrom(problem.to_problem())
                event.state.problem.CopyFrom(problem.to_problem())
            await self.log(job_id, event)

    async def step(self, job_id: str, step: int, **values: float) -> None:
        """Log metrics of a step; `__` in a name stands for `/`."""
        named = {name.replace("__", "/"): value for name, value in values.items()}
        self.jobs[job_id].step = step
        self.jobs[job_id].metrics.update(named)
        await self.log(
            job_id,
            orchestrator_pb.JobEvent(
                metrics=orchestrator_pb.MetricsLogged(step=step, values=named)
            ),
        )

    async def log(self, job_id: str, event: orchestrator_pb.JobEvent) -> None:
        """Append an event; activities get no id and are not kept by a real one."""
        event.at.GetCurrentTime()
        async with self._grown:
            log = self.logs[job_id]
            if event.WhichOneof("event") != "activity":
                event.event_id = f"{len(log) + 1}-0"
            log.append(event)
            self._grown.notify_all()

    def requests(self, method: str) -> list[Any]:
        """The requests of one method, in order."""
        return [request for name, request in self.calls if name == method]

    # --- the service ------------------------------------------------------------------------

    async def SubmitJob(
        self, request: orchestrator_pb.SubmitJobRequest, context: Any
    ) -> orchestrator_pb.SubmitJobResponse:
        await self._note("SubmitJob", request, context)
        spec = parse_job(request.spec)
        job_id = request.job_id or f"{spec.name}-{request.request_id[-4:]}"
        if job_id not in self.jobs:
            job = orchestrator_pb.Job(
                job_id=job_id,
                name=spec.name,
                mode=common_pb.PIPELINE_MODE_MICRO_BATCH,
                total_steps=spec.pipeline.steps,
                spec_json=spec.model_dump_json(),
                directory=f"/data/{job_id}",
                state=S.JOB_STATE_SUBMITTED,
                tags=request.tags,
                notes=request.notes,
            )
            self.given[job_id] = request.given_spec or request.spec
            job.created_at.GetCurrentTime()
            self.jobs[job_id] = job
            self.logs[job_id] = []
            event = orchestrator_pb.JobEvent()
            event.state.state = S.JOB_STATE_SUBMITTED
            await self.log(job_id, event)
        return orchestrator_pb.SubmitJobResponse(job=self.jobs[job_id])

    async def GetJob(
        self, request: orchestrator_pb.GetJobRequest, context: Any
    ) -> orchestrator_pb.GetJobResponse:
        await self._note("GetJob", request, context)
        job = await self._job(request.job_id, context)
        return orchestrator_pb.GetJobResponse(job=job, given_spec=self.given.get(job.job_id, ""))

    async def GetJobProfile(
        self, request: orchestrator_pb.GetJobProfileRequest, context: Any
    ) -> orchestrator_pb.GetJobProfileResponse:
        await self._note("GetJobProfile", request, context)
        await self._job(request.job_id, context)
        if request.job_id not in self.profiles:
            await self._fail(context, FailedPrecondition("nothing is measured yet"))
        return orchestrator_pb.GetJobProfileResponse(profile_json=self.profiles[request.job_id])

    async def ListJobs(
        self, request: orchestrator_pb.ListJobsRequest, context: Any
    ) -> orchestrator_pb.ListJobsResponse:
        await self._note("ListJobs", request, context)
        wanted = request.state if request.HasField("state") else None
        jobs = [job for job in self.jobs.values() if wanted in (None, job.state)][::-1]
        start = int(request.page_token or 0)
        end = start + (request.page_size or 50)
        token = str(end) if end < len(jobs) else ""
        return orchestrator_pb.ListJobsResponse(jobs=jobs[start:end], next_page_token=token)

    async def WatchJob(
        self, request: orchestrator_pb.WatchJobRequest, context: Any
    ) -> AsyncIterator[orchestrator_pb.JobEvent]:
        await self._note("WatchJob", request, context)
        job = await self._job(request.job_id, context)
        log = self.logs[request.job_id]
        at = next((i + 1 for i, e in enumerate(log) if e.event_id == request.after), 0)
        if not request.after:
            at = 0
        sent = 0
        recent = request.HasField("recent_metrics") and not request.after
        first = max(0, len(log) - request.recent_metrics) if recent else 0
        while True:
            while at < len(log):
                if at < first and log[at].HasField("metrics"):
                    at += 1
                    continue
                if self.break_after is not None and sent >= self.break_after:
                    self.break_after = None
                    await context.abort(grpc.StatusCode.UNAVAILABLE, "the test broke the stream")
                yield log[at]
                at, sent = at + 1, sent + 1
            if job.state in (
                S.JOB_STATE_SUCCEEDED,
                S.JOB_STATE_FAILED,
                S.JOB_STATE_CANCELLED,
            ):
                return
            async with self._grown:
                if at >= len(log):
                    await self._grown.wait()

    async def PauseJob(
        self, request: orchestrator_pb.PauseJobRequest, context: Any
    ) -> orchestrator_pb.PauseJobResponse:
        await self._note("PauseJob", request, context)
        await self._move(request.job_id, context, S.JOB_STATE_PAUSING, S.JOB_STATE_PAUSED)
        return orchestrator_pb.PauseJobResponse(job=self.jobs[request.job_id])

    async def ResumeJob(
        self, request: orchestrator_pb.ResumeJobRequest, context: Any
    ) -> orchestrator_pb.ResumeJobResponse:
        await self._note("ResumeJob", request, context)
        if (refusal := self.refusal) is not None:
            self.refusal = None
            await self._fail(context, refusal)
        await self._move(request.job_id, context, S.JOB_STATE_SUBMITTED)
        if steps := request.overrides.get("pipeline.steps"):
            self.jobs[request.job_id].total_steps = int(steps)
        return orchestrator_pb.ResumeJobResponse(job=self.jobs[request.job_id])

    async def CancelJob(
        self, request: orchestrator_pb.CancelJobRequest, context: Any
    ) -> orchestrator_pb.CancelJobResponse:
        await self._note("CancelJob", request, context)
        await self._move(request.job_id, context, S.JOB_STATE_CANCELLING, S.JOB_STATE_CANCELLED)
        return orchestrator_pb.CancelJobResponse(job=self.jobs[request.job_id])

    async def AnnotateJob(
        self, request: orchestrator_pb.AnnotateJobRequest, context: Any
    ) -> orchestrator_pb.AnnotateJobResponse:
        await self._note("AnnotateJob", request, context)
        job = await self._job(request.job_id, context)
        tags = sorted(set(job.tags) - set(request.remove_tags) | set(request.add_tags))
        job.tags[:] = tags
        job.notes = request.notes if request.HasField("notes") else job.notes
        return orchestrator_pb.AnnotateJobResponse(job=job)

    async def ListHostUse(
        self, request: orchestrator_pb.ListHostUseRequest, context: Any
    ) -> orchestrator_pb.ListHostUseResponse:
        await self._note("ListHostUse", request, context)
        since = request.since.ToNanoseconds() / 1e9 if request.HasField("since") else time.time()
        reply = orchestrator_pb.ListHostUseResponse(times=[since + 10 * i for i in range(60)])
        for host, values in self.hosts.items():
            cpu, memory, gpu, gpu_memory = ([value] * 60 for value in values)
            cpu[30] = math.nan
            reply.hosts.add(host=host, cpu=cpu, memory=memory, gpu=gpu, gpu_memory=gpu_memory)
        return reply

    async def ForgetJob(
        self, request: orchestrator_pb.ForgetJobRequest, context: Any
    ) -> orchestrator_pb.ForgetJobResponse:
        await self._note("ForgetJob", request, context)
        await self._job(request.job_id, context)
        return orchestrator_pb.ForgetJobResponse(job=self.jobs.pop(request.job_id))

    async def ListVersions(
        self, request: orchestrator_pb.ListVersionsRequest, context: Any
    ) -> orchestrator_pb.ListVersionsResponse:
        await self._note("ListVersions", request, context)
        weights = common_pb.WeightsRef(policy=request.policy, version=3, checksum="abc")
        return orchestrator_pb.ListVersionsResponse(
            versions=[store_pb.PolicyVersion(weights=weights, step=2, outcome=1)]  # type: ignore[arg-type]
        )

    async def ListCheckpoints(
        self, request: orchestrator_pb.ListCheckpointsRequest, context: Any
    ) -> orchestrator_pb.ListCheckpointsResponse:
        await self._note("ListCheckpoints", request, context)
        await self._job(request.job_id, context)
        path = f"/data/{request.job_id}/checkpoints/solver/v3"
        return orchestrator_pb.ListCheckpointsResponse(
            checkpoints=[
                orchestrator_pb.Checkpoint(policy="solver", version=3, path=path, num_bytes=7)
            ]
        )

    async def ExportCheckpoint(
        self, request: orchestrator_pb.ExportCheckpointRequest, context: Any
    ) -> AsyncIterator[orchestrator_pb.ExportCheckpointResponse]:
        await self._note("ExportCheckpoint", request, context)
        for path, content in self.files.items():
            half = len(content) // 2
            yield orchestrator_pb.ExportCheckpointResponse(path=path, data=content[:half])
            if self.cut_export:
                return
            checksum = xxhash.xxh3_64_intdigest(content) ^ self.wrong_checksum
            yield orchestrator_pb.ExportCheckpointResponse(
                path=path, data=content[half:], end_of_file=True, checksum=checksum
            )

    async def ListMetrics(
        self, request: orchestrator_pb.ListMetricsRequest, context: Any
    ) -> orchestrator_pb.ListMetricsResponse:
        await self._note("ListMetrics", request, context)
        rows = [e.metrics for e in self.logs[request.job_id] if e.HasField("metrics")]
        end = int(request.page_token or len(rows))
        start = max(0, end - request.page_size) if request.page_size else 0
        names = set(request.names)
        reply = orchestrator_pb.ListMetricsResponse(next_page_token=str(start) if start else "")
        for row in rows[start:end]:
            values = {k: v for k, v in row.values.items() if not names or k in names}
            if row.step > request.after_step and values:
                reply.rows.add(step=row.step, values=values)
        return reply

    async def ListTrajectories(
        self, request: orchestrator_pb.ListTrajectoriesRequest, context: Any
    ) -> orchestrator_pb.ListTrajectoriesResponse:
        await self._note("ListTrajectories", request, context)
        fits = [i for i in range(250) if not request.text or request.text == f"sum {i}"]
        # All complete, in training, with the reward 1.
        if request.failed or request.evaluation or request.max_reward < 0:
            fits = []
        first = int(request.page_token or 0)
        found = fits[first : first + request.page_size]
        end = first + len(found)
        return orchestrator_pb.ListTrajectoriesResponse(
            trajectories=[_trajectory(i) for i in found],
            next_page_token=str(end) if end < len(fits) else "",
        )

    async def GetTrajectory(
        self, request: orchestrator_pb.GetTrajectoryRequest, context: Any
    ) -> orchestrator_pb.GetTrajectoryResponse:
        await self._note("GetTrajectory", request, context)
        number = int(request.trajectory_id.rpartition("t")[2])
        reply = orchestrator_pb.GetTrajectoryResponse(summary=_trajectory(number))
        turn = reply.turns.add(agent="solver", policy="solver", turn=0, response="4", reward=0.5)
        turn.messages.add(role="user", content="2+2")
        if request.tokens and self.reply_tokens and number == 1:
            count = self.reply_tokens
            turn.response = "word " * count
            turn.versions.add(version=3, start=0, end=count // 2)
            turn.versions.add(version=4, start=count // 2, end=count)
            turn.response_tokens = count
            turn.tokens.ids.extend(range(count))
            turn.tokens.texts.extend(["word "] * count)
            turn.tokens.logprobs.extend([-0.5] * count)
            turn.tokens.advantages.extend([0.25 if i % 2 else -1.0 for i in range(count)])
            turn.tokens.ratios.extend([1.5] * count)
        return reply

    async def JoinNode(
        self, request: orchestrator_pb.JoinNodeRequest, context: Any
    ) -> orchestrator_pb.JoinNodeResponse:
        return orchestrator_pb.JoinNodeResponse(next_seconds=1)

    async def GetCluster(
        self, request: orchestrator_pb.GetClusterRequest, context: Any
    ) -> orchestrator_pb.GetClusterResponse:
        await self._note("GetCluster", request, context)
        reply = orchestrator_pb.GetClusterResponse(in_flight={"job": 5})
        reply.workers.add(
            worker_id="r0",
            kind=orchestrator_pb.WORKER_KIND_ROLLOUT,
            alive=True,
            doing="rolls",
            jobs=["job"],
        )
        reply.workers.add(
            worker_id="t0", kind=orchestrator_pb.WORKER_KIND_TRAINER, alive=True, jobs=["job", "x"]
        )
        engine = reply.engines.add(engine_id="e0", policy="solver", worker_id="r0", job_id="job")
        engine.state = common_pb.ENGINE_STATE_HEALTHY
        reply.engines.extend(self.engines)
        reply.bindings.add(policy="solver", state=common_pb.BINDING_STATE_IDLE)
        reply.services.add(name="reward", serving=True)
        return reply

    async def GeneratePolicy(
        self, request: orchestrator_pb.GeneratePolicyRequest, context: Any
    ) -> orchestrator_pb.GeneratePolicyResponse:
        await self._note("GeneratePolicy", request, context)
        reply = orchestrator_pb.GeneratePolicyResponse()
        reply.result.text = "four"
        reply.result.output_ids.extend([7, 8])
        reply.result.logprobs.extend([-0.5, -0.25])
        reply.result.versions.add(version=3, start=0, end=2)
        reply.result.finish_reason = "stop"
        return reply

    # --- inside -----------------------------------------------------------------------------

    async def _note(self, method: str, request: Any, context: Any) -> None:
        self.calls.append((method, request))
        self.metadata.append(dict(context.invocation_metadata()))
        if self.away > 0 and method != "WatchJob":
            self.away -= 1
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the test is away")

    async def _job(self, job_id: str, context: Any) -> orchestrator_pb.Job:
        if job_id not in self.jobs:
            await self._fail(
                context,
                NotFound(
                    "no such job.",
                    field="job_id",
                    value=job_id,
                    remedy="`troupe jobs list` shows those there are.",
                ),
            )
        return self.jobs[job_id]

    async def _move(self, job_id: str, context: Any, *targets: int) -> None:
        job = await self._job(job_id, context)
        try:
            await self.move(job_id, *targets)
        except states.IllegalTransition:
            name = S.Name(job.state).removeprefix("JOB_STATE_").lower()
            await self._fail(
                context, FailedPrecondition(f"the job is {name}.", field="job_id", value=job_id)
            )

    async def _fail(self, context: Any, error: TroupeError) -> None:
        status = to_status(error)
        assert status.code != code_pb2.OK
        await context.abort_with_status(rpc_status.to_status(status))


def _trajectory(index: int) -> orchestrator_pb.TrajectorySummary:
    return orchestrator_pb.TrajectorySummary(
        trajectory_id=f"t{index}",
        query_id="q0",
        state=common_pb.TRAJECTORY_STATE_COMPLETED,
        rewards={"solver": 1.0},
    )


class FakeFunctions(reward_grpc.RewardServicer):
    """The door to functions: there is one, which gains from cores."""

    async def UploadSource(
        self, request: reward_pb.UploadSourceRequest, context: Any
    ) -> reward_pb.UploadSourceResponse:
        contents = b"".join(sorted(one.SerializeToString() for one in request.files))
        return reward_pb.UploadSourceResponse(sha256=hashlib.sha256(contents).hexdigest())

    async def ListFunctions(
        self, request: reward_pb.ListFunctionsRequest, context: Any
    ) -> reward_pb.ListFunctionsResponse:
        spec = reward_pb.FunctionSpec(name="mine/tools/run_tests", version="1", max_cores=4)
        spec.kind = "tool"
        one = reward_pb.FunctionStatus(
            function=spec,
            invocations=7,
            errors=1,
            running=1,
            mean_seconds=0.25,
            parallel_seconds=1.0,
            cold_starts=1,
            cold_start_p50_seconds=0.02,
            cold_start_p99_seconds=0.02,
            cores_held=3,
        )
        pool = reward_pb.PoolStatus(workers=2, busy=1, max_workers=4)
        return reward_pb.ListFunctionsResponse(functions=[one], pool=pool)


@asynccontextmanager
async def serve(
    servicer: FakeOrchestrator, port: int = 0, host: str = "127.0.0.1"
) -> AsyncIterator[str]:
    """Serve on loopback; yields the address."""
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    orchestrator_grpc.add_OrchestratorServicer_to_server(servicer, server)
    reward_grpc.add_RewardServicer_to_server(FakeFunctions(), server)  # type: ignore[no-untyped-call]
    bound = server.add_insecure_port(join_address(host, port))
    await server.start()
    try:
        yield join_address(host, bound)
    finally:
        await server.stop(grace=0.1)
