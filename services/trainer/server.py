"""The gRPC servicer of the trainer: validates requests and calls the worker."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc

from services.chassis.folders import read_folder
from services.chassis.heartbeat import Heartbeat
from services.chassis.telemetry import Telemetry
from services.trainer.binding import PolicyBinding
from services.trainer.settings import TrainerSettings
from services.trainer.worker import TrainerWorker
from troupe.rpc import InvalidArgument
from troupe.rpc.ids import check_name
from troupe.v1 import trainer_pb2, trainer_pb2_grpc


class TrainerService(trainer_pb2_grpc.TrainerServicer):
    """`troupe.v1.Trainer` over one worker."""

    name = "troupe.v1.Trainer"

    def __init__(self, settings: TrainerSettings, telemetry: Telemetry) -> None:
        self.worker = TrainerWorker(settings, telemetry)
        self._heartbeat = Heartbeat(settings, self.worker.heartbeat)

    def add_to(self, server: grpc.aio.Server) -> None:
        """Register the servicer."""
        trainer_pb2_grpc.add_TrainerServicer_to_server(self, server)

    async def start(self) -> None:
        """Start the worker and its heartbeat."""
        await self.worker.start()
        await self._heartbeat.start()

    async def stop(self, grace: float) -> None:
        """Stop the heartbeat and the worker, which releases claimed samples."""
        await self._heartbeat.stop()
        await self.worker.stop()

    async def Bind(
        self, request: trainer_pb2.BindRequest, context: Any
    ) -> trainer_pb2.BindResponse:
        """Load a policy and publish its weights."""
        _require(request, "job_id", "policy", "spec_json")
        if request.version < 0:
            raise InvalidArgument("is negative", field="version", value=request.version)
        binding = await self.worker.bind(
            request.job_id, request.policy, request.spec_json, request.version, request.checksum
        )
        return _bound(binding)

    async def RunStep(
        self, request: trainer_pb2.RunStepRequest, context: Any
    ) -> AsyncIterator[trainer_pb2.StepEvent]:
        """Run or join a step."""
        _require(request, "job_id", "policy")
        oldest = request.oldest_version if request.HasField("oldest_version") else None
        where = (request.job_id, request.policy)
        events = self.worker.run_step(*where, request.step, request.version, oldest)
        async for event in events:
            yield event

    async def SaveCheckpoint(
        self, request: trainer_pb2.SaveCheckpointRequest, context: Any
    ) -> trainer_pb2.SaveCheckpointResponse:
        """Write a checkpoint."""
        _require(request, "job_id", "policy")
        path, size = await self.worker.save_checkpoint(
            request.job_id, request.policy, request.version
        )
        return trainer_pb2.SaveCheckpointResponse(path=path, num_bytes=size)

    async def ReadCheckpoint(
        self, request: trainer_pb2.ReadCheckpointRequest, context: Any
    ) -> AsyncIterator[trainer_pb2.ReadCheckpointResponse]:
        """Stream the files of a checkpoint."""
        _require(request, "job_id", "policy")
        path = self.worker.checkpoint(request.job_id, request.policy, request.version)
        async for chunk in read_folder(path):
            yield trainer_pb2.ReadCheckpointResponse(
                path=chunk.path,
                data=chunk.data,
                end_of_file=chunk.end_of_file,
                checksum=chunk.checksum,
            )

    async def OfferState(
        self, request: trainer_pb2.OfferStateRequest, context: Any
    ) -> trainer_pb2.OfferStateResponse:
        """Offer a state on this host's disk to another host's trainer."""
        _require(request, "job_id", "policy")
        return await self.worker.offer_state(
            request.job_id, request.policy, request.version, request.checksum
        )

    async def KeepState(
        self, request: trainer_pb2.KeepStateRequest, context: Any
    ) -> trainer_pb2.KeepStateResponse:
        """Keep a copy of another host's state."""
        _require(request, "job_id", "policy")
        return await self.worker.keep_state(
            request.job_id, request.policy, request.version, request.offer
        )

    async def KeepMember(
        self, request: trainer_pb2.KeepMemberRequest, context: Any
    ) -> trainer_pb2.KeepMemberResponse:
        """Keep a version as a frozen member of a population."""
        _require(request, "job_id", "policy", "checksum")
        path, size = await self.worker.keep_member(
            request.job_id, request.policy, request.version, request.checksum
        )
        return trainer_pb2.KeepMemberResponse(path=path, num_bytes=size)

    async def PublishMember(
        self, request: trainer_pb2.PublishMemberRequest, context: Any
    ) -> trainer_pb2.PublishMemberResponse:
        """Publish the weights of a frozen version."""
        _require(request, "job_id", "policy", "checksum")
        weights = await self.worker.publish_member(
            request.job_id, request.policy, request.version, request.checksum
        )
        return trainer_pb2.PublishMemberResponse(weights=weights)

    async def DropMember(
        self, request: trainer_pb2.DropMemberRequest, context: Any
    ) -> trainer_pb2.DropMemberResponse:
        """Unpublish a frozen version, or delete it."""
        _require(request, "job_id", "policy")
        await self.worker.drop_member(
            request.job_id, request.policy, request.version, files=request.files
        )
        return trainer_pb2.DropMemberResponse()

    async def Suspend(
        self, request: trainer_pb2.SuspendRequest, context: Any
    ) -> trainer_pb2.SuspendResponse:
        """Suspend a policy to free its device."""
        _require(request, "job_id", "policy")
        state = await self.worker.suspend(request.job_id, request.policy)
        return trainer_pb2.SuspendResponse(state=state)

    async def Resume(
        self, request: trainer_pb2.ResumeRequest, context: Any
    ) -> trainer_pb2.BindResponse:
        """Bind a policy from its suspended state."""
        _require(request, "job_id", "policy", "spec_json")
        _require(request.state, "key", "checksum")
        binding = await self.worker.resume(
            request.job_id,
            request.policy,
            request.spec_json,
            request.version,
            request.checksum,
            request.state,
        )
        response = _bound(binding)
        response.seconds = binding.last_swap_seconds
        return response

    async def Prefetch(
        self, request: trainer_pb2.PrefetchRequest, context: Any
    ) -> trainer_pb2.PrefetchResponse:
        """Fetch a suspended state ahead of Resume."""
        _require(request, "job_id", "policy", "spec_json")
        _require(request.state, "key", "checksum")
        where = (request.job_id, request.policy, request.spec_json)
        await self.worker.prefetch(*where, request.state)
        return trainer_pb2.PrefetchResponse(num_bytes=request.state.num_bytes)

    async def Restart(
        self, request: trainer_pb2.RestartRequest, context: Any
    ) -> trainer_pb2.BindResponse:
        """Make the first version's weights the next version."""
        _require(request, "job_id", "policy", "checksum")
        return _bound(
            await self.worker.restart(
                request.job_id, request.policy, request.version, request.checksum
            )
        )

    async def Release(
        self, request: trainer_pb2.ReleaseRequest, context: Any
    ) -> trainer_pb2.ReleaseResponse:
        """Unbind a policy, delete the job's tensors in this host's memory, or both."""
        _require(request, "job_id", *(() if request.delete_states else ("policy",)))
        if request.policy:
            await self.worker.release(request.job_id, request.policy)
        if request.delete_states:
            await self.worker.delete_states(request.job_id)
        return trainer_pb2.ReleaseResponse()

    async def ListBindings(
        self, request: trainer_pb2.ListBindingsRequest, context: Any
    ) -> trainer_pb2.ListBindingsResponse:
        """List the policies of this worker."""
        return trainer_pb2.ListBindingsResponse(bindings=self.worker.statuses())


def _bound(binding: PolicyBinding) -> trainer_pb2.BindResponse:
    return trainer_pb2.BindResponse(
        weights=binding.weights,
        num_parameters=binding.learner.num_parameters,
        state_bytes=binding.state_bytes,
    )


def _require(request: Any, *fields: str) -> None:
    for field in fields:
        value = getattr(request, field)
        if not value:
            raise InvalidArgument("is empty", field=field, remedy=f"Set {field}.")
        if field in ("job_id", "policy"):
            check_name(field, value)
