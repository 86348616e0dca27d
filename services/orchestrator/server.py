"""The orchestrator's gRPC service: validates requests, calls `Orchestrator`, builds replies."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import grpc

from services.chassis.model_files import ModelServer
from services.chassis.telemetry import Telemetry
from services.orchestrator import cluster
from services.orchestrator.jobs import checkpoints
from services.orchestrator.metrics import ClusterCollector
from services.orchestrator.orchestrator import Orchestrator
from services.orchestrator.populations import on_demand
from services.orchestrator.populations.state import no_population
from services.orchestrator.settings import OrchestratorSettings
from services.orchestrator.state.job_store import StoredJob, rows_after
from services.orchestrator.state.records import TERMINAL, JobRecord
from troupe.contracts import kinds
from troupe.rpc import FailedPrecondition, InvalidArgument, NotFound
from troupe.v1 import experience_store_pb2 as store_pb
from troupe.v1 import orchestrator_pb2 as orchestrator_pb
from troupe.v1 import orchestrator_pb2_grpc as orchestrator_grpc
from troupe.v1 import reward_pb2_grpc as reward_grpc
from troupe.v1 import transfer_pb2_grpc as transfer_grpc

_PAGE_SIZE: Final = 50
_MAX_PAGE_SIZE: Final = 500
# Rows of metrics per page: about 1.2 MB with all of a row's values.
_MAX_ROWS: Final = 1_000
# Time limit of a generation without a deadline.
_GENERATE_SECONDS: Final = 600.0


class OrchestratorService(orchestrator_grpc.OrchestratorServicer):
    """The gRPC service of an `Orchestrator`, which the chassis starts and stops with it."""

    name = "troupe.v1.Orchestrator"

    def __init__(self, orchestrator: Orchestrator, models: ModelServer) -> None:
        """`models`: serves directories of this host."""
        self._at, self._models = orchestrator, models

    def add_to(self, server: grpc.aio.Server) -> None:
        """Register the services with the chassis' server."""
        orchestrator_grpc.add_OrchestratorServicer_to_server(self, server)
        reward_grpc.add_RewardServicer_to_server(self._at.functions, server)
        transfer_grpc.add_HostModelsServicer_to_server(self._models, server)

    @property
    def problem(self) -> str | None:
        """Why Redis cannot be reached yet."""
        return self._at.problem

    async def start(self) -> None:
        """Return once Redis answers and unfinished jobs are continued."""
        await self._at.start()

    async def stop(self, grace: float) -> None:
        """Stop the runners. Jobs keep their state, to be continued."""
        await self._at.stop()

    async def SubmitJob(
        self, request: orchestrator_pb.SubmitJobRequest, context: Any
    ) -> orchestrator_pb.SubmitJobResponse:
        if not request.spec.strip():
            raise InvalidArgument("is empty", field="spec", remedy="Send the job's YAML text.")
        record = await self._at.jobs.submit(
            request.spec,
            request.request_id,
            request.job_id,
            given=request.given_spec,
            tags=request.tags,
            notes=request.notes,
        )
        return orchestrator_pb.SubmitJobResponse(job=await self._view(record))

    async def GetJob(
        self, request: orchestrator_pb.GetJobRequest, context: Any
    ) -> orchestrator_pb.GetJobResponse:
        job = await self._view(await self._record(request))
        given = await self._at.shared.store.given(request.job_id)
        return orchestrator_pb.GetJobResponse(job=job, given_spec=given)

    async def ListJobs(
        self, request: orchestrator_pb.ListJobsRequest, context: Any
    ) -> orchestrator_pb.ListJobsResponse:
        shared = self._at.shared
        state = request.state if request.HasField("state") else None
        ids, token = await shared.store.page(_page_size(request), request.page_token, state)
        views = await shared.store.views(ids)
        return orchestrator_pb.ListJobsResponse(
            jobs=[self._message(view) for view in views], next_page_token=token
        )

    async def WatchJob(
        self, request: orchestrator_pb.WatchJobRequest, context: Any
    ) -> AsyncIterator[orchestrator_pb.JobEvent]:
        await self._record(request)

        async def ended() -> bool:
            return (await self._record(request)).terminal

        recent = request.recent_metrics if request.HasField("recent_metrics") else None
        log = self._at.shared.log
        async for event in log.follow(request.job_id, request.after, ended, recent):
            yield event

    async def PauseJob(
        self, request: orchestrator_pb.PauseJobRequest, context: Any
    ) -> orchestrator_pb.PauseJobResponse:
        _check_id(request)
        record = await self._at.jobs.pause(request.job_id)
        return orchestrator_pb.PauseJobResponse(job=await self._view(record))

    async def ResumeJob(
        self, request: orchestrator_pb.ResumeJobRequest, context: Any
    ) -> orchestrator_pb.ResumeJobResponse:
        _check_id(request)
        record = await self._at.jobs.resume(
            request.job_id, request.spec, dict(request.overrides), request.given_spec
        )
        return orchestrator_pb.ResumeJobResponse(job=await self._view(record))

    async def CancelJob(
        self, request: orchestrator_pb.CancelJobRequest, context: Any
    ) -> orchestrator_pb.CancelJobResponse:
        _check_id(request)
        record = await self._at.jobs.cancel(request.job_id, request.reason)
        return orchestrator_pb.CancelJobResponse(job=await self._view(record))

    async def AnnotateJob(
        self, request: orchestrator_pb.AnnotateJobRequest, context: Any
    ) -> orchestrator_pb.AnnotateJobResponse:
        _check_id(request)
        notes = request.notes if request.HasField("notes") else None
        record = await self._at.jobs.annotate(
            request.job_id, request.add_tags, request.remove_tags, notes
        )
        return orchestrator_pb.AnnotateJobResponse(job=await self._view(record))

    async def ForgetJob(
        self, request: orchestrator_pb.ForgetJobRequest, context: Any
    ) -> orchestrator_pb.ForgetJobResponse:
        _check_id(request)
        view = await self._view(await self._at.shared.store.get(request.job_id))
        record = await self._at.jobs.forget(request.job_id)
        view.state = record.state
        return orchestrator_pb.ForgetJobResponse(job=view)

    async def ListVersions(
        self, request: orchestrator_pb.ListVersionsRequest, context: Any
    ) -> orchestrator_pb.ListVersionsResponse:
        record = await self._record(request)
        policy = record.policy_of(request.policy) if request.policy else ""
        shared, asked = self._at.shared, cluster.ASKED_SECONDS
        policies = (
            [policy]
            if policy
            else await shared.weight_versions.newest(request.job_id, timeout=asked)
        )
        versions = [
            one
            for name in policies
            for one in await shared.weight_versions.all(request.job_id, name, timeout=asked)
        ]
        return orchestrator_pb.ListVersionsResponse(versions=versions)

    async def ListCheckpoints(
        self, request: orchestrator_pb.ListCheckpointsRequest, context: Any
    ) -> orchestrator_pb.ListCheckpointsResponse:
        record = await self._record(request)
        found = await asyncio.to_thread(checkpoints.list_checkpoints, record.directory)
        return orchestrator_pb.ListCheckpointsResponse(checkpoints=found)

    async def ExportCheckpoint(
        self, request: orchestrator_pb.ExportCheckpointRequest, context: Any
    ) -> AsyncIterator[orchestrator_pb.ExportCheckpointResponse]:
        record = await self._record(request)
        version = request.version if request.HasField("version") else None
        policy = record.policy_of(request.policy)
        checkpoint = await asyncio.to_thread(
            checkpoints.find_checkpoint, record.directory, policy, version
        )
        async for chunk in checkpoints.export(checkpoint):
            yield chunk

    async def ListMetrics(
        self, request: orchestrator_pb.ListMetricsRequest, context: Any
    ) -> orchestrator_pb.ListMetricsResponse:
        await self._record(request)
        store, token = self._at.shared.store, ""
        if request.page_size:
            size = _page_size(request, _MAX_ROWS)
            page, token = await store.metrics_page(request.job_id, size, request.page_token)
            rows = rows_after(page, request.after_step)
            # Rows are logged step by step, so older pages have no rows of later steps.
            token = token if rows else ""
        else:
            rows = await store.metrics(request.job_id, request.after_step)
        if request.names:
            rows = [picked for row in rows if (picked := _picked(row, request.names)).values]
        return orchestrator_pb.ListMetricsResponse(rows=rows, next_page_token=token)

    async def ListTrajectories(
        self, request: orchestrator_pb.ListTrajectoriesRequest, context: Any
    ) -> orchestrator_pb.ListTrajectoriesResponse:
        await self._record(request)
        size = _page_size(request)
        page = await self._at.shared.trajectories.page(request, size)
        return orchestrator_pb.ListTrajectoriesResponse(
            trajectories=page.summaries, next_page_token=page.token
        )

    async def GetTrajectory(
        self, request: orchestrator_pb.GetTrajectoryRequest, context: Any
    ) -> orchestrator_pb.GetTrajectoryResponse:
        await self._record(request)
        return await self._at.shared.trajectories.get(
            request.job_id, request.trajectory_id, tokens=request.tokens
        )

    async def GetJobProfile(
        self, request: orchestrator_pb.GetJobProfileRequest, context: Any
    ) -> orchestrator_pb.GetJobProfileResponse:
        await self._record(request)
        profile = await self._at.shared.store.profile(request.job_id)
        if profile is None:
            raise FailedPrecondition(
                f"nothing is measured yet for job {request.job_id}: no step has ended",
                field="job_id",
                value=request.job_id,
                remedy="Wait for its first step, or name a job that ran.",
            )
        return orchestrator_pb.GetJobProfileResponse(profile_json=profile.to_json())

    async def GetPopulation(
        self, request: orchestrator_pb.GetPopulationRequest, context: Any
    ) -> orchestrator_pb.GetPopulationResponse:
        record = await self._record(request)
        view = await on_demand("view")
        found = await view.population(self._at.shared, record)
        return orchestrator_pb.GetPopulationResponse(population=found)

    async def ListMatches(
        self, request: orchestrator_pb.ListMatchesRequest, context: Any
    ) -> orchestrator_pb.ListMatchesResponse:
        record = await self._record(request)
        size = _page_size(request)
        if record.spec().population is None:
            raise no_population(record.job_id)
        if request.member_id:
            view = await on_demand("view")
            await view.known_member(self._at.shared, record, request.member_id)
        page, token = await self._at.shared.populations.page(
            request.job_id, size, request.page_token, request.member_id
        )
        return orchestrator_pb.ListMatchesResponse(matches=page, next_page_token=token)

    async def ExportMember(
        self, request: orchestrator_pb.ExportMemberRequest, context: Any
    ) -> AsyncIterator[orchestrator_pb.ExportCheckpointResponse]:
        record = await self._record(request)
        view = await on_demand("view")
        member = await view.member(self._at.shared, record, request.member_id)
        async for chunk in checkpoints.export(member):
            yield chunk

    async def ListSamples(
        self, request: store_pb.ListSamplesRequest, context: Any
    ) -> store_pb.ListSamplesResponse:
        record = await self._record(request)
        with _rows_of(record):
            return await self._at.shared.experience.ListSamples(
                request, timeout=cluster.ASKED_SECONDS
            )

    async def DescribeTables(
        self, request: store_pb.DescribeTablesRequest, context: Any
    ) -> store_pb.DescribeTablesResponse:
        record = await self._record(request)
        with _rows_of(record):
            return await self._at.shared.experience.DescribeTables(
                request, timeout=cluster.ASKED_SECONDS
            )

    async def AuditJob(
        self, request: orchestrator_pb.AuditJobRequest, context: Any
    ) -> orchestrator_pb.AuditJobResponse:
        await self._record(request)
        shared = self._at.shared
        tables = await shared.experience.AuditTables(
            store_pb.AuditTablesRequest(job_id=request.job_id)
        )
        versions = await shared.weight_versions.newest(request.job_id)
        return orchestrator_pb.AuditJobResponse(
            tables=tables, violations=tables.violations, versions=versions.values()
        )

    async def GetCluster(
        self, request: orchestrator_pb.GetClusterRequest, context: Any
    ) -> orchestrator_pb.GetClusterResponse:
        return await self._at.cluster.picture()

    async def ListHostUse(
        self, request: orchestrator_pb.ListHostUseRequest, context: Any
    ) -> orchestrator_pb.ListHostUseResponse:
        since, until = (_time_of(request, name) for name in ("since", "until"))
        return await self._at.shared.hosts.between(since, until, request.points)

    async def GeneratePolicy(
        self, request: orchestrator_pb.GeneratePolicyRequest, context: Any
    ) -> orchestrator_pb.GeneratePolicyResponse:
        _check_id(request)
        if bool(request.messages) == bool(request.input_ids):
            raise InvalidArgument(
                "exactly one of messages and input_ids is required",
                field="messages",
                remedy="Send a conversation, or token ids.",
            )
        left = context.time_remaining()
        result = await self._at.generation.generate(request, left or _GENERATE_SECONDS)
        return orchestrator_pb.GeneratePolicyResponse(result=result)

    async def ScorePolicy(
        self, request: orchestrator_pb.ScorePolicyRequest, context: Any
    ) -> orchestrator_pb.ScorePolicyResponse:
        left = context.time_remaining()
        result = await self._at.generation.score(request.request, left or _GENERATE_SECONDS)
        return orchestrator_pb.ScorePolicyResponse(result=result)

    async def Heartbeat(
        self, request: orchestrator_pb.HeartbeatRequest, context: Any
    ) -> orchestrator_pb.HeartbeatResponse:
        for field in ("worker_id", "address", "kind"):
            if not getattr(request, field):
                raise InvalidArgument(
                    "is missing", field=field, remedy="Send it with every heartbeat."
                )
        seconds = self._at.shared.workers.beat(request)
        if request.HasField("cpu") and request.host_id:
            self._at.shared.hosts.note(
                request.host_id,
                request.node or request.host_id.partition("/")[0],
                request.worker_id,
                request.cpu,
                request.host_use if request.HasField("host_use") else None,
            )
        return orchestrator_pb.HeartbeatResponse(next_seconds=seconds)

    async def JoinNode(
        self, request: orchestrator_pb.JoinNodeRequest, context: Any
    ) -> orchestrator_pb.JoinNodeResponse:
        return self._at.shared.nodes.join(request)

    async def LocateState(
        self, request: orchestrator_pb.LocateStateRequest, context: Any
    ) -> orchestrator_pb.LocateStateResponse:
        if not request.key:
            raise InvalidArgument("is empty", field="key", remedy="Name the state.")
        return cluster.locate(request.key, self._at.shared.workers.all())

    async def ReadCode(
        self, request: orchestrator_pb.ReadCodeRequest, context: Any
    ) -> orchestrator_pb.ReadCodeResponse:
        source = await self._at.functions.catalogue.source(request.sha256)
        return orchestrator_pb.ReadCodeResponse(files=source.files)

    async def ReportTrainedTokens(
        self, request: orchestrator_pb.ReportTrainedTokensRequest, context: Any
    ) -> orchestrator_pb.ReportTrainedTokensResponse:
        await self._record(request)
        await self._at.shared.trajectories.keep_trained(request)
        return orchestrator_pb.ReportTrainedTokensResponse()

    async def _record(self, request: Any) -> JobRecord:
        _check_id(request)
        return await self._at.shared.store.get(request.job_id)

    async def _view(self, record: JobRecord) -> orchestrator_pb.Job:
        [view] = await self._at.shared.store.views([record.job_id])
        # The record as left by the request, whatever happened to the job since.
        return self._message(StoredJob(record, view.metrics, view.resolved))

    def _message(self, view: StoredJob) -> orchestrator_pb.Job:
        return view.record.to_message(
            metrics=view.metrics,
            activity=self._at.shared.log.activity(view.record.job_id),
            resolved=view.resolved,
        )


def make_service(settings: OrchestratorSettings, telemetry: Telemetry) -> OrchestratorService:
    """Return the service with `settings`."""
    orchestrator = Orchestrator(settings, telemetry)
    wanted = telemetry.gauge("troupe_trainers_wanted", "Trainers that could be used now.")
    shared = orchestrator.shared
    wanted.set_function(lambda: shared.trainer_scheduler.wanted)
    collector = ClusterCollector(shared.store, shared.workers.all, shared.in_flight)
    telemetry.registry.register(collector)
    return OrchestratorService(orchestrator, ModelServer(settings))


@contextmanager
def _rows_of(record: JobRecord) -> Iterator[None]:
    """Replace the store's error for a job without rows by one that explains why."""
    try:
        yield
    except NotFound as error:
        if error.kind != kinds.TABLES_NOT_FOUND:
            raise
        over = record.state in TERMINAL
        raise NotFound(
            f"job {record.job_id} is {record.state_name} and "
            + ("its rows are freed" if over else "has no rows yet"),
            kind=error.kind,
            field="job_id",
            value=record.job_id,
            remedy="`troupe jobs audit` shows their fate." if over else None,
        ) from error


def _picked(
    row: orchestrator_pb.MetricsLogged, names: Iterable[str]
) -> orchestrator_pb.MetricsLogged:
    """Return the row with only these metrics."""
    values = {name: row.values[name] for name in names if name in row.values}
    return orchestrator_pb.MetricsLogged(step=row.step, values=values)


def _page_size(request: Any, most: int = _MAX_PAGE_SIZE) -> int:
    if request.page_size < 0:
        raise InvalidArgument("must not be negative", field="page_size", value=request.page_size)
    return min(request.page_size or _PAGE_SIZE, most)


def _time_of(request: Any, field: str) -> float | None:
    """Return a timestamp of a request in seconds since the epoch; None if it was not given.

    Raises `InvalidArgument` for values that are not dates in the years 1 to 9999: protobuf carries
    any number.
    """
    if not request.HasField(field):
        return None
    stamp = getattr(request, field)
    try:
        nanoseconds: int = stamp.ToNanoseconds()
    except ValueError:
        raise InvalidArgument(
            "is not a timestamp",
            field=field,
            value=f"{stamp.seconds} s and {stamp.nanos} ns",
            remedy="Give seconds between the years 1 and 9999, and 0 to 999,999,999 nanoseconds.",
        ) from None
    return nanoseconds / 1e9


def _check_id(request: Any) -> None:
    if not request.job_id:
        raise InvalidArgument(
            "is missing", field="job_id", remedy="`troupe jobs list` shows the jobs."
        )
