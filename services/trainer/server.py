"""The gRPC servicer of the trainer: validates requests and calls the worker's parts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import grpc

from services.chassis.folders import read_folder
from services.chassis.heartbeat import Heartbeat
from services.chassis.model_files import ModelServer
from services.chassis.telemetry import Telemetry
from services.trainer.binding import PolicyBinding
from services.trainer.gang.gang import GangHosts
from services.trainer.settings import TrainerSettings
from services.trainer.state.checkpoint import checkpoint_path
from services.trainer.worker import Key, TrainerWorker
from troupe.rpc import InvalidArgument, NotFound
from troupe.rpc.ids import check_name
from troupe.v1 import trainer_pb2 as trainer_pb
from troupe.v1 import trainer_pb2_grpc as trainer_grpc
from troupe.v1 import transfer_pb2_grpc as transfer_grpc


class TrainerService(trainer_grpc.TrainerServicer):
    """`troupe.v1.Trainer` over one worker."""

    name = "troupe.v1.Trainer"

    def __init__(self, settings: TrainerSettings, telemetry: Telemetry) -> None:
        self.worker = TrainerWorker(settings, telemetry)
        self._data_dir = settings.data_dir
        self._models = ModelServer(settings)
        self._heartbeat = Heartbeat(settings, self.worker.heartbeat)

    def add_to(self, server: grpc.aio.Server) -> None:
        """Register the servicers."""
        trainer_grpc.add_TrainerServicer_to_server(self, server)
        transfer_grpc.add_HostModelsServicer_to_server(self._models, server)

    async def start(self) -> None:
        """Start the worker and its heartbeat."""
        await self.worker.start()
        await self._heartbeat.start()

    async def stop(self, grace: float) -> None:
        """Stop the heartbeat and the worker, which releases claimed samples."""
        await self._heartbeat.stop()
        await self.worker.stop()

    async def Bind(self, request: trainer_pb.BindRequest, context: Any) -> trainer_pb.BindResponse:
        """Load a policy and publish its weights."""
        key = _key_of(request, "spec_json")
        if request.version < 0:
            raise InvalidArgument("is negative", field="version", value=request.version)
        await self.worker.lent.take_back()
        hosts = GangHosts.of(request.hosts)
        work = self.worker.bind(key, request.spec_json, request.version, request.checksum, hosts)
        # Loading continues after the caller's deadline: a repeated call finds the policy bound.
        return _bound(await self.worker.detached(work))

    async def RunStep(
        self, request: trainer_pb.RunStepRequest, context: Any
    ) -> AsyncIterator[trainer_pb.StepEvent]:
        """Start the step, or attach to it if it is running; see `StepRun.watch`."""
        key, bindings = _key_of(request), self.worker.bindings
        oldest = request.oldest_version if request.HasField("oldest_version") else None
        async with bindings.lock(key):
            binding = bindings.find_trained(key)
            run = self.worker.steps.join(binding, request.step, request.version, oldest)
        async for event in run.watch():
            yield event

    async def SaveCheckpoint(
        self, request: trainer_pb.SaveCheckpointRequest, context: Any
    ) -> trainer_pb.SaveCheckpointResponse:
        """Write a checkpoint while training continues."""
        binding = self.worker.bindings.find(_key_of(request))
        await self.worker.make_durable(_key_of(request), request.version)
        path, size = await asyncio.to_thread(binding.checkpoints.save, request.version)
        return trainer_pb.SaveCheckpointResponse(path=path, num_bytes=size)

    async def ReadCheckpoint(
        self, request: trainer_pb.ReadCheckpointRequest, context: Any
    ) -> AsyncIterator[trainer_pb.ReadCheckpointResponse]:
        """Stream the files of a checkpoint."""
        path = checkpoint_path(self._data_dir, *_key_of(request), request.version)
        if not path.is_dir():
            raise NotFound(
                f"there is no checkpoint of {request.policy}@{request.version} here",
                kind="checkpoint_not_found",
                field="version",
                value=request.version,
                remedy="Save it first, with the same worker.",
            )
        async for chunk in read_folder(path, trainer_pb.ReadCheckpointResponse):
            yield chunk

    async def OfferState(
        self, request: trainer_pb.OfferStateRequest, context: Any
    ) -> trainer_pb.OfferStateResponse:
        """Offer a committed state on this host's disk to another host's trainer."""
        return await asyncio.to_thread(
            self.worker.remote.offer, *_key_of(request), request.version, request.checksum
        )

    async def KeepState(
        self, request: trainer_pb.KeepStateRequest, context: Any
    ) -> trainer_pb.KeepStateResponse:
        """Keep a copy of another host's state."""
        return await asyncio.to_thread(
            self.worker.remote.keep, *_key_of(request), request.version, request.offer
        )

    async def KeepMember(
        self, request: trainer_pb.KeepMemberRequest, context: Any
    ) -> trainer_pb.KeepMemberResponse:
        """Keep a version as a frozen member of a population."""
        binding = self.worker.bindings.find(_key_of(request, "checksum"))
        path, size = await asyncio.to_thread(
            self.worker.members.keep, binding, request.version, request.checksum
        )
        return trainer_pb.KeepMemberResponse(path=path, num_bytes=size)

    async def PublishMember(
        self, request: trainer_pb.PublishMemberRequest, context: Any
    ) -> trainer_pb.PublishMemberResponse:
        """Publish the weights of a frozen version."""
        key = _key_of(request, "checksum")
        weights = await asyncio.to_thread(
            self.worker.members.publish, *key, request.version, request.checksum
        )
        return trainer_pb.PublishMemberResponse(weights=weights)

    async def DropMember(
        self, request: trainer_pb.DropMemberRequest, context: Any
    ) -> trainer_pb.DropMemberResponse:
        """Unpublish a frozen version, or delete it."""
        await asyncio.to_thread(
            self.worker.members.drop, *_key_of(request), request.version, files=request.files
        )
        return trainer_pb.DropMemberResponse()

    async def Suspend(
        self, request: trainer_pb.SuspendRequest, context: Any
    ) -> trainer_pb.SuspendResponse:
        """Suspend a policy to free its device."""
        key = _key_of(request)
        work = self.worker.swaps.suspend(key, free_device=request.free_device)
        return trainer_pb.SuspendResponse(state=await self.worker.detached(work))

    async def Resume(
        self, request: trainer_pb.ResumeRequest, context: Any
    ) -> trainer_pb.BindResponse:
        """Bind a policy from its suspended state."""
        key = _key_of(request, "spec_json")
        _require(request.state, "key", "checksum")
        await self.worker.lent.take_back()
        work = self.worker.swaps.resume(
            key,
            request.spec_json,
            request.version,
            request.checksum,
            request.state,
            GangHosts.of(request.hosts),
        )
        binding = await self.worker.detached(work)
        response = _bound(binding)
        response.seconds = binding.last_swap_seconds
        return response

    async def Prefetch(
        self, request: trainer_pb.PrefetchRequest, context: Any
    ) -> trainer_pb.PrefetchResponse:
        """Fetch a suspended state ahead of Resume."""
        key = _key_of(request, "spec_json")
        _require(request.state, "key", "checksum")
        work = self.worker.swaps.prefetch(key, request.spec_json, request.state)
        await self.worker.detached(work)
        return trainer_pb.PrefetchResponse(num_bytes=request.state.num_bytes)

    async def Restart(
        self, request: trainer_pb.RestartRequest, context: Any
    ) -> trainer_pb.BindResponse:
        """Make the first version's weights the next version."""
        key = _key_of(request, "checksum")
        work = self.worker.restart(key, request.version, request.checksum)
        return _bound(await self.worker.detached(work))

    async def Release(
        self, request: trainer_pb.ReleaseRequest, context: Any
    ) -> trainer_pb.ReleaseResponse:
        """Unbind a policy, delete the job's tensors in this host's memory, or both."""
        _require(request, "job_id", *(() if request.delete_states else ("policy",)))
        if request.policy:
            await self.worker.detached(self.worker.release((request.job_id, request.policy)))
        if request.delete_states:
            await asyncio.to_thread(self.worker.transfer.clear, f"{request.job_id}/")
        return trainer_pb.ReleaseResponse()

    async def HostRanks(
        self, request: trainer_pb.HostRanksRequest, context: Any
    ) -> AsyncIterator[trainer_pb.HostRanksEvent]:
        """Run ranks of another worker's gang while the caller stays."""
        _require(request, "job_id", "policy", "leader", "endpoint")
        async for event in self.worker.host_ranks(request):
            yield event

    async def SendWeights(
        self, request_iterator: AsyncIterator[trainer_pb.SendWeightsRequest], context: Any
    ) -> AsyncIterator[trainer_pb.SendWeightsEvent]:
        """Send a policy's weights from its devices to one inference server."""
        first = await anext(request_iterator, trainer_pb.SendWeightsRequest())
        wanted = first.wanted
        named = "step_result" if wanted.step_result else "checksum"
        binding = self.worker.bindings.find(_key_of(wanted, named, "way"))
        async with aclosing(self.worker.sender.serve(binding, wanted, request_iterator)) as events:
            async for event in events:
                yield event

    async def ListBindings(
        self, request: trainer_pb.ListBindingsRequest, context: Any
    ) -> trainer_pb.ListBindingsResponse:
        """List the policies of this worker."""
        return trainer_pb.ListBindingsResponse(bindings=self.worker.bindings.statuses())


def _bound(binding: PolicyBinding) -> trainer_pb.BindResponse:
    return trainer_pb.BindResponse(
        weights=binding.versions.weights,
        num_parameters=binding.learner.num_parameters,
        state_bytes=binding.state_bytes,
        resolved=binding.resolved,
    )


def _key_of(request: Any, *fields: str) -> Key:
    """Return the job and policy of a request, which must have them and `fields`."""
    _require(request, "job_id", "policy", *fields)
    return request.job_id, request.policy


def _require(request: Any, *fields: str) -> None:
    for field in fields:
        value = getattr(request, field)
        if not value:
            raise InvalidArgument("is empty", field=field, remedy=f"Set {field}.")
        if field in ("job_id", "policy"):
            check_name(field, value)
