"""The servicer: validates, translates, calls."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, Final

import grpc

from services.chassis.settings import ServiceSettings
from services.chassis.telemetry import Telemetry
from services.experience_store import requests
from services.experience_store.claims import ClaimRequest
from services.experience_store.database import Database
from services.experience_store.meters import Meters
from services.experience_store.records import Ending
from services.experience_store.store import Store
from troupe.rpc import InvalidArgument
from troupe.v1 import common_pb2 as pb
from troupe.v1 import experience_store_pb2 as store_pb
from troupe.v1 import experience_store_pb2_grpc as store_grpc

# Left of a call's deadline for reading payloads and for the way back.
_DEADLINE_MARGIN: Final = 0.5


class ExperienceStoreService(store_grpc.ExperienceStoreServicer):
    """The gRPC face of a `Store`; also what the chassis starts and stops."""

    name = "troupe.v1.ExperienceStore"

    def __init__(self, store: Store, meters: Meters) -> None:
        self.store = store
        self._meters = meters

    def add_to(self, server: grpc.aio.Server) -> None:
        """Register with the chassis' server."""
        store_grpc.add_ExperienceStoreServicer_to_server(self, server)

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
        _check_common(request)
        requests.check_create(request)
        await self.store.tables.create(request.job_id, request.policies, request.required_columns)
        return store_pb.CreateTablesResponse()

    async def OpenStep(
        self, request: store_pb.OpenStepRequest, context: Any
    ) -> store_pb.OpenStepResponse:
        _check_common(request)
        requests.check_step(request.step)
        table = await self.store.tables.get(request.job_id)
        requests.check_open(request, table.policies)
        existed, ended = await self.store.steps.open(
            request.job_id, request.step, request.versions, request.query_ids, request.group_size
        )
        return store_pb.OpenStepResponse(existed=existed, ended_trajectory_ids=ended)

    async def AppendTrajectory(
        self, request: store_pb.AppendTrajectoryRequest, context: Any
    ) -> store_pb.AppendTrajectoryResponse:
        _check_common(request)
        requests.check_step(request.step)
        requests.check_id("query_id", request.query_id)
        requests.check_id("trajectory_id", request.trajectory_id)
        requests.check_append(request)
        state = pb.TrajectoryState.Name(request.state).removeprefix("TRAJECTORY_STATE_")
        ending = Ending(
            state, request.request_id, request.query_id, requests.clean_reason(request.reason)
        )
        accepted = await self.store.trajectories.append(
            request.job_id, request.step, request.trajectory_id, ending, request.samples
        )
        self._meters.appended(state, accepted, request)
        return store_pb.AppendTrajectoryResponse(accepted=accepted)

    async def FillColumns(
        self, request: store_pb.FillColumnsRequest, context: Any
    ) -> store_pb.FillColumnsResponse:
        _check_step_call(request)
        requests.check_id("sample_id", request.sample_id)
        requests.check_columns("columns", request.columns)
        reward = None
        if request.HasField("reward"):
            reward = requests.check_reward("reward", request.reward)
        if bool(request.drop_reason) == (reward is not None or bool(request.columns)):
            raise InvalidArgument(
                "fill the reward or columns, or give a reason to drop the sample; not both",
                field="drop_reason",
                value=request.drop_reason,
            )
        state, accepted = await self.store.samples.fill(
            request.job_id,
            request.policy,
            request.step,
            request.sample_id,
            reward,
            request.columns,
            requests.clean_reason(request.drop_reason),
        )
        return store_pb.FillColumnsResponse(state=state, accepted=accepted)

    async def ClaimMicroBatch(
        self, request: store_pb.ClaimMicroBatchRequest, context: Any
    ) -> store_pb.ClaimMicroBatchResponse:
        _check_step_call(request)
        requests.check_id("claimant", request.claimant)
        requests.check_positive("max_samples", request.max_samples, requests.LARGEST_CLAIM)
        requests.check_positive("lease_seconds", request.lease_seconds, requests.LONGEST_LEASE)
        requests.check_not_negative("max_tokens", request.max_tokens)
        requests.check_not_negative("wait_seconds", request.wait_seconds)
        wait = min(request.wait_seconds, requests.LONGEST_WAIT)
        remaining = context.time_remaining()
        if remaining is not None:
            wait = max(0.0, min(wait, remaining - _DEADLINE_MARGIN))
        response = await self.store.claims.claim(
            ClaimRequest(
                job=request.job_id,
                policy=request.policy,
                step=request.step,
                claim=request.request_id,
                claimant=request.claimant,
                max_samples=request.max_samples,
                max_tokens=request.max_tokens,
                lease_seconds=request.lease_seconds,
            ),
            wait,
        )
        self._meters.claimed(request.policy, response)
        return response

    async def RenewClaims(
        self, request: store_pb.RenewClaimsRequest, context: Any
    ) -> store_pb.RenewClaimsResponse:
        _check_step_call(request)
        requests.check_id("claimant", request.claimant)
        requests.check_positive("lease_seconds", request.lease_seconds, requests.LONGEST_LEASE)
        renewed = await self.store.claims.renew(
            request.job_id, request.policy, request.step, request.claimant, request.lease_seconds
        )
        return store_pb.RenewClaimsResponse(renewed=renewed)

    async def ReleaseClaims(
        self, request: store_pb.ReleaseClaimsRequest, context: Any
    ) -> store_pb.ReleaseClaimsResponse:
        _check_step_call(request)
        if request.claimant:
            requests.check_id("claimant", request.claimant)
        released = await self.store.claims.release(
            request.job_id, request.policy, request.step, request.claimant
        )
        return store_pb.ReleaseClaimsResponse(released=released)

    async def CommitStep(
        self, request: store_pb.CommitStepRequest, context: Any
    ) -> store_pb.CommitStepResponse:
        _check_step_call(request)
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
            ),
        )
        if not existed:
            self._meters.committed(commit)
        return store_pb.CommitStepResponse(commit=commit, existed=existed)

    async def GetStep(
        self, request: store_pb.GetStepRequest, context: Any
    ) -> store_pb.GetStepResponse:
        requests.check_name("job_id", request.job_id)
        requests.check_step(request.step)
        status = await self.store.steps.status(request.job_id, request.step)
        return store_pb.GetStepResponse(
            open=status.open,
            sealed=status.sealed,
            query_ids=status.query_ids,
            versions=status.versions,
            ended_trajectory_ids=sorted(status.endings),
            commits=status.commits,
            counts=status.counts,
        )

    async def WatchTables(
        self, request: store_pb.WatchTablesRequest, context: Any
    ) -> AsyncIterator[store_pb.TableStatus]:
        requests.check_name("job_id", request.job_id)
        async for status in self.store.watching.watch(request.job_id):
            yield status

    async def ListSamples(
        self, request: store_pb.ListSamplesRequest, context: Any
    ) -> store_pb.ListSamplesResponse:
        requests.check_name("job_id", request.job_id)
        requests.check_name("policy", request.policy)
        samples, token = await self.store.samples.page(
            request.job_id,
            request.policy,
            requests.check_step(request.step) if request.HasField("step") else None,
            request.state if request.HasField("state") else None,
            requests.page_size(request.page_size),
            request.page_token,
        )
        return store_pb.ListSamplesResponse(samples=samples, next_page_token=token)

    async def DropTables(
        self, request: store_pb.DropTablesRequest, context: Any
    ) -> store_pb.DropTablesResponse:
        _check_common(request)
        await self.store.tables.drop(request.job_id)
        return store_pb.DropTablesResponse()


def make_service(settings: ServiceSettings, telemetry: Telemetry) -> ExperienceStoreService:
    """The service as `TROUPE_*` describes it."""
    store = Store(Database(settings.redis_url))
    return ExperienceStoreService(store, Meters(telemetry, store.database))


def _check_common(request: Any) -> None:
    requests.check_id("request_id", request.request_id)
    requests.check_name("job_id", request.job_id)


def _check_step_call(request: Any) -> None:
    _check_common(request)
    requests.check_name("policy", request.policy)
    requests.check_step(request.step)
