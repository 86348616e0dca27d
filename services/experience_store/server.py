"""The servicer: validates, translates, calls."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, Final, TypeVar

import grpc

from services.chassis.idempotency import compares, forgets
from services.chassis.telemetry import Telemetry
from services.experience_store import requests
from services.experience_store.amendments import Amendment
from services.experience_store.claims import ClaimRequest
from services.experience_store.database import Database
from services.experience_store.high_water import MIB
from services.experience_store.meters import Meters
from services.experience_store.settings import StoreSettings
from services.experience_store.store import Store
from services.experience_store.writes import Batch, Writes
from troupe.rpc import TroupeError, to_status
from troupe.rpc.ids import check_name
from troupe.v1 import experience_store_pb2 as store_pb
from troupe.v1 import experience_store_pb2_grpc as store_grpc

# Left of a call's deadline for reading payloads and for the way back.
_DEADLINE_MARGIN: Final = 0.5


T = TypeVar("T")


def _ending_of(request: store_pb.AppendTrajectoryRequest) -> bytes:
    """Everything of the request but its rows, of which it tells the ids."""
    ending = (request.job_id, request.step, request.query_id, request.trajectory_id)
    samples = [sample.sample_id for sample in request.samples]
    return repr((*ending, request.state, request.reason, samples)).encode()


class ExperienceStoreService(store_grpc.ExperienceStoreServicer):
    """The gRPC face of a `Store`; also what the chassis starts and stops."""

    name = "troupe.v1.ExperienceStore"

    def __init__(self, store: Store, meters: Meters) -> None:
        self.store = store
        self._meters = meters
        self._writes = Writes(store, meters)

    def add_to(self, server: grpc.aio.Server) -> None:
        """Register with the chassis' server."""
        store_grpc.add_ExperienceStoreServicer_to_server(self, server)
        # It takes what comes as it is. Of two handlers for a method the last one stays.
        write = grpc.unary_unary_rpc_method_handler(
            self.Write, Batch.parse, store_pb.WriteResponse.SerializeToString
        )
        server.add_registered_method_handlers(self.name, {"Write": write})  # type: ignore[attr-defined]

    @property
    def problem(self) -> str | None:
        """Why Redis cannot be had yet."""
        return self.store.database.problem

    async def start(self) -> None:
        """Returns once Redis answers."""
        await self.store.start()
        self._meters.start()

    async def stop(self, grace: float) -> None:
        """Let go of Redis."""
        await self._meters.stop()
        await self.store.stop()

    async def CreateTables(
        self, request: store_pb.CreateTablesRequest, context: Any
    ) -> store_pb.CreateTablesResponse:
        requests.check_common(request)
        requests.check_create(request)
        await self.store.tables.create(
            request.job_id,
            request.policies,
            request.required_columns,
            max_uses=request.max_uses or 1,
            drop_without_signal=request.drop_without_signal,
        )
        return store_pb.CreateTablesResponse()

    async def OpenStep(
        self, request: store_pb.OpenStepRequest, context: Any
    ) -> store_pb.OpenStepResponse:
        requests.check_common(request)
        requests.check_step(request.step)
        table = await self.store.tables.get(request.job_id)
        requests.check_open(request, table.policies)
        existed, ended = await self.store.steps.open(
            request.job_id,
            request.step,
            request.versions,
            request.query_ids,
            request.group_size,
            held_open=request.held_open,
            cursor=request.cursor,
            redundant=request.redundant,
        )
        return store_pb.OpenStepResponse(existed=existed, ended_trajectory_ids=ended)

    # Its id names one ending of one trajectory (records.Ending.attempt): who sends it again gets
    # the first answer. The rows are long, and need not be compared for that.
    @compares(_ending_of)
    async def AppendTrajectory(
        self, request: store_pb.AppendTrajectoryRequest, context: Any
    ) -> store_pb.AppendTrajectoryResponse:
        return _given(*await self._writes.end_each([request]))

    async def FillColumns(
        self, request: store_pb.FillColumnsRequest, context: Any
    ) -> store_pb.FillColumnsResponse:
        return _given(*await self._writes.fill_each([request]))

    @compares(Batch.parts)
    async def Write(self, request: Batch, context: Any) -> store_pb.WriteResponse:  # type: ignore[override]
        requests.check_id("request_id", request.request_id)
        # Neither needs the other: who fills columns has heard that the rows are here.
        async with asyncio.TaskGroup() as group:
            # Columns are little work, and somebody may wait for rows to be complete.
            filled = group.create_task(self._writes.fill_each(request.fills))
            ended = group.create_task(self._writes.end_each(request.endings, request.payloads))
        return store_pb.WriteResponse(
            endings=[
                store_pb.EndingWritten(error=to_status(one).SerializeToString())
                if isinstance(one, TroupeError)
                else store_pb.EndingWritten(response=one)
                for one in ended.result()
            ],
            fills=[
                store_pb.FillWritten(error=to_status(one).SerializeToString())
                if isinstance(one, TroupeError)
                else store_pb.FillWritten(response=one)
                for one in filled.result()
            ],
        )

    # A repeated claim finds its samples in Redis; its response is too large to be kept here too.
    @forgets(lambda _: True)
    async def ClaimMicroBatch(
        self, request: store_pb.ClaimMicroBatchRequest, context: Any
    ) -> Any:  # the bytes of a ClaimMicroBatchResponse
        requests.check_step_call(request)
        requests.check_id("claimant", request.claimant)
        requests.check_positive("max_samples", request.max_samples, requests.LARGEST_CLAIM)
        requests.check_positive("lease_seconds", request.lease_seconds, requests.LONGEST_LEASE)
        requests.check_not_negative("max_tokens", request.max_tokens)
        requests.check_not_negative("oldest_version", request.oldest_version)
        requests.check_not_negative("wait_seconds", request.wait_seconds)
        wait = min(request.wait_seconds, requests.LONGEST_WAIT)
        remaining = context.time_remaining()
        if remaining is not None:
            wait = max(0.0, min(wait, remaining - _DEADLINE_MARGIN))
        # The call goes on without its caller (idempotency); a claim must not: who would renew it?
        gone = asyncio.Event()
        context.add_done_callback(lambda _: gone.set())
        delivery = await self.store.claims.claim(
            ClaimRequest(
                job=request.job_id,
                policy=request.policy,
                step=request.step,
                claim=request.request_id,
                claimant=request.claimant,
                max_samples=request.max_samples,
                max_tokens=request.max_tokens,
                lease_seconds=request.lease_seconds,
                oldest_version=(
                    request.oldest_version if request.HasField("oldest_version") else None
                ),
                whole_groups=request.whole_groups,
                balance_tokens=request.balance_tokens,
            ),
            wait,
            gone.is_set,
        )
        self._meters.claimed(request.policy, delivery)
        return delivery.message

    async def RenewClaims(
        self, request: store_pb.RenewClaimsRequest, context: Any
    ) -> store_pb.RenewClaimsResponse:
        requests.check_step_call(request)
        requests.check_id("claimant", request.claimant)
        requests.check_positive("lease_seconds", request.lease_seconds, requests.LONGEST_LEASE)
        renewed = await self.store.claims.renew(
            request.job_id, request.policy, request.step, request.claimant, request.lease_seconds
        )
        return store_pb.RenewClaimsResponse(renewed=renewed)

    async def ReleaseClaims(
        self, request: store_pb.ReleaseClaimsRequest, context: Any
    ) -> store_pb.ReleaseClaimsResponse:
        requests.check_step_call(request)
        if request.claimant:
            requests.check_id("claimant", request.claimant)
        released = await self.store.claims.release(
            request.job_id, request.policy, request.step, request.claimant
        )
        return store_pb.ReleaseClaimsResponse(released=released)

    async def DropGone(
        self, request: store_pb.DropGoneRequest, context: Any
    ) -> store_pb.DropGoneResponse:
        requests.check_step_call(request)
        requests.check_id("claimant", request.claimant)
        requests.check_id("claim_id", request.claim_id)
        requests.check_drop_gone(request)
        dropped = await self.store.claims.drop_gone(
            request.job_id,
            request.policy,
            request.step,
            request.claimant,
            request.claim_id,
            request.sample_ids,
        )
        return store_pb.DropGoneResponse(dropped=dropped)

    async def CommitStep(
        self, request: store_pb.CommitStepRequest, context: Any
    ) -> store_pb.CommitStepResponse:
        requests.check_step_call(request)
        requests.check_id("claimant", request.claimant)
        requests.check_commit(request)
        commit, existed = await self.store.commits.commit(
            request.job_id,
            request.claimant,
            request.claim_ids,
            store_pb.StepCommit(
                policy=request.policy,
                step=request.step,
                outcome=request.outcome,
                reason=request.reason,
                weights=request.weights if request.HasField("weights") else None,
                metrics=request.metrics,
                samples_digest=(
                    request.samples_digest if request.HasField("samples_digest") else None
                ),
            ),
        )
        if not existed:
            self._meters.committed(commit)
        return store_pb.CommitStepResponse(commit=commit, existed=existed)

    async def GetStep(
        self, request: store_pb.GetStepRequest, context: Any
    ) -> store_pb.GetStepResponse:
        check_name("job_id", request.job_id)
        requests.check_step(request.step)
        status = await self.store.steps.status(
            request.job_id,
            request.step,
            endings=not request.counts_only,
            queries=request.with_queries,
        )
        return store_pb.GetStepResponse(
            open=status.open,
            sealed=status.sealed,
            query_ids=status.query_ids,
            versions=status.versions,
            ended_trajectory_ids=status.ended_trajectories,
            commits=status.commits,
            counts=status.counts,
            group_size=status.group_size,
            redundant=status.redundant,
            closed=status.open and status.closed,
            cursor=status.cursor,
            queries=status.queries,
            trajectories_ended=status.ended,
        )

    async def WatchTables(
        self, request: store_pb.WatchTablesRequest, context: Any
    ) -> AsyncIterator[store_pb.TableStatus]:
        check_name("job_id", request.job_id)
        async for status in self.store.watching.watch(request.job_id):
            yield status

    async def ListSamples(
        self, request: store_pb.ListSamplesRequest, context: Any
    ) -> store_pb.ListSamplesResponse:
        check_name("job_id", request.job_id)
        check_name("policy", request.policy)
        samples, token = await self.store.samples.page(
            request.job_id,
            request.policy,
            requests.check_step(request.step) if request.HasField("step") else None,
            request.state if request.HasField("state") else None,
            requests.page_size(request.page_size),
            request.page_token,
        )
        return store_pb.ListSamplesResponse(samples=samples, next_page_token=token)

    async def AmendStep(
        self, request: store_pb.AmendStepRequest, context: Any
    ) -> store_pb.AmendStepResponse:
        requests.check_common(request)
        requests.check_step(request.step)
        requests.check_amend(request)
        complete = await self.store.amendments.amend(
            Amendment(
                request.job_id,
                request.step,
                add=request.add_query_ids,
                drop=request.drop_query_ids,
                reason=requests.clean_reason(request.drop_reason),
                carry=request.carry_query_ids,
                carry_to=request.carry_to,
                close=request.close,
                cursor=request.cursor,
            )
        )
        return store_pb.AmendStepResponse(complete_query_ids=complete)

    async def DescribeTables(
        self, request: store_pb.DescribeTablesRequest, context: Any
    ) -> store_pb.DescribeTablesResponse:
        check_name("job_id", request.job_id)
        return await self.store.descriptions.describe(request.job_id)

    async def AuditTables(
        self, request: store_pb.AuditTablesRequest, context: Any
    ) -> store_pb.AuditTablesResponse:
        check_name("job_id", request.job_id)
        return await self.store.audit.check(request.job_id)

    async def ReadLog(
        self, request: store_pb.ReadLogRequest, context: Any
    ) -> AsyncIterator[store_pb.LoggedStep]:
        check_name("job_id", request.job_id)
        check_name("policy", request.policy)
        requests.check_not_negative("from_step", request.from_step)
        logged = self.store.audit.read(request.job_id, request.policy, request.from_step)
        async for step in logged:
            yield step

    async def DropTables(
        self, request: store_pb.DropTablesRequest, context: Any
    ) -> store_pb.DropTablesResponse:
        requests.check_common(request)
        await self.store.tables.drop(request.job_id, purge_log=request.purge_log)
        self.store.recent.forget(request.job_id)
        return store_pb.DropTablesResponse()


def make_service(settings: StoreSettings, telemetry: Telemetry) -> ExperienceStoreService:
    """The service as `TROUPE_*` describes it."""
    mark = settings.store_high_water_mib * MIB
    recent = settings.store_recent_mib * MIB
    store = Store(Database(settings.samples_url), high_water_bytes=mark, recent_bytes=recent)
    return ExperienceStoreService(store, Meters(telemetry, store))


def _given(answer: T | TroupeError) -> T:
    if isinstance(answer, TroupeError):
        raise answer
    return answer
