"""The Rollout service over gRPC: validates and translates requests, and calls the service's
parts."""

from __future__ import annotations

import asyncio
import gc
import importlib
import threading
from collections.abc import AsyncIterator
from functools import partial
from typing import Any, Final

import grpc
import structlog

from services.chassis.heartbeat import Heartbeat, given_devices
from services.chassis.model_files import ModelFiles, ModelServer
from services.chassis.telemetry import Telemetry
from services.chassis.transfer import HostTransfer
from services.rollout.engines.factory import make_host
from services.rollout.engines.requests import DeviceSpeed
from services.rollout.engines.server_process import EngineDevices
from services.rollout.garbage import collect_seldom
from services.rollout.job_setup import HostFactory, Preparation, parse_spec, share_servers
from services.rollout.jobs import JobTable
from services.rollout.metrics import RolloutMetrics
from services.rollout.prepared_job import PreparedJob
from services.rollout.scoring import score
from services.rollout.serving.policy import ServedPolicy
from services.rollout.serving.router import StickyRoute
from services.rollout.settings import RolloutSettings
from services.rollout.trajectories.records import TrajectoryLog
from services.rollout.trajectories.runner import Runner, messages
from services.rollout.trajectories.watchdog import Watchdog
from troupe.contracts import kinds
from troupe.devices import find_devices
from troupe.endpoint.server import EndpointServer
from troupe.experience import ExperienceWriter
from troupe.functions.sources import SourceStore
from troupe.functions.validation import MAX_SECONDS, is_seconds
from troupe.rpc import RetryPolicy, connect
from troupe.rpc.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    InvalidArgument,
    TroupeError,
    recast,
)
from troupe.rpc.ids import check_name, new_id
from troupe.states import TRAJECTORY, is_terminal
from troupe.v1 import common_pb2 as common_pb
from troupe.v1 import orchestrator_pb2 as orchestrator_pb
from troupe.v1 import orchestrator_pb2_grpc as orchestrator_grpc
from troupe.v1 import reward_pb2_grpc as reward_grpc
from troupe.v1 import rollout_pb2 as rollout_pb
from troupe.v1 import rollout_pb2_grpc as rollout_grpc
from troupe.v1 import transfer_pb2_grpc as transfer_grpc
from troupe.workflow import ContextOverflowError, WorkflowError
from troupe.workflow.conversation import PromptDraft
from troupe.workflow.errors import TooManyTokensError
from troupe.workflow.languages import IMPORTING
from troupe.workflow.messages import parse_messages
from troupe.workflow.token_ids import TokenIds

log = structlog.get_logger(__name__)

# Ends of trajectories must survive a restart of the store, so only the deadline ends the attempts.
_STORE_RETRY: Final = RetryPolicy(max_attempts=None)


class RolloutService(rollout_grpc.RolloutServicer):
    """The servicer, which connects the parts of the service and answers its RPCs."""

    name = "troupe.v1.Rollout"

    def __init__(
        self, settings: RolloutSettings, telemetry: Telemetry, *, make: HostFactory | None = None
    ) -> None:
        """Assemble the service. `make` makes the hosts of engines (default: as
        `services.rollout.engines` does)."""
        self._worker_id = settings.worker_id
        client = settings.client(retry=_STORE_RETRY)
        self._store = connect(settings.experience_store_address, client)
        self._reward = connect(settings.reward_address, client)
        self._orchestrator = connect(settings.orchestrator_address, settings.client())
        self._sources = SourceStore()
        self._transfer = HostTransfer(settings, telemetry)
        self._devices = EngineDevices(find_devices())
        self._preparation = Preparation(
            self._transfer,
            reward_grpc.RewardStub(self._reward),
            settings.worker_id,
            make
            or partial(
                make_host,
                threads=settings.threads,
                trace_dir=settings.simulated_trace_dir,
                devices=self._devices,
                device=settings.rollout_device,
            ),
            DeviceSpeed(
                settings.device_class,
                settings.device_prefill_tokens_per_second,
                settings.device_decode_tokens_per_second,
            ),
            settings.threads,
            ModelFiles(settings),
            self._sources,
            orchestrator_grpc.OrchestratorStub(self._orchestrator),
            gpu=min((device.memory for device in self._devices.devices), default=None),
            embedded=settings.rollout_device,
        )
        self._models = ModelServer(settings)
        self._jobs = JobTable(self._preparation, settings.worker_id)
        self._fixed_port = settings.endpoint_port
        self._endpoints = EndpointServer(
            settings.endpoint_host,
            settings.endpoint_port,
            url=settings.endpoint_url,
            max_body=settings.endpoint_body_mib << 20,
            count=lambda call, status: self._metrics.endpoint_answered(call, status),
        )
        self._runner = Runner(
            TrajectoryLog(ExperienceWriter(self._store, client.retry)), self._endpoints
        )
        self._jobs.before_release = self._runner.cancel
        self._metrics = RolloutMetrics(telemetry, self._jobs, self._runner)
        self._heartbeat = Heartbeat(settings, self._beat)
        self._watchdog = Watchdog(settings.blocked_seconds)

    def add_to(self, server: grpc.aio.Server) -> None:
        """Register with `server`."""
        rollout_grpc.add_RolloutServicer_to_server(self, server)
        transfer_grpc.add_HostModelsServicer_to_server(self._models, server)

    async def start(self) -> None:
        """Start background work and report this worker to the orchestrator."""
        self._watchdog.start()
        warm_up()
        # report an occupied port now, not with the first trajectory
        if self._fixed_port:
            self._endpoints.listen()
        await self._transfer.start()
        await self._heartbeat.start()

    async def leave(self) -> None:
        """Accept no new trajectories; those in flight may end until their streams are cut."""
        await self._heartbeat.leave()

    async def stop(self, grace: float) -> None:
        """End trajectories and engines, and report that the worker leaves."""
        self._watchdog.stop()
        await self._heartbeat.stop()
        await self._runner.stop()
        await self._endpoints.stop()
        await self._jobs.close()
        await self._transfer.stop()
        await self._store.close(None)
        await self._reward.close(None)
        await self._orchestrator.close(None)
        await asyncio.to_thread(self._sources.close)

    async def PrepareJob(
        self, request: rollout_pb.PrepareJobRequest, context: Any
    ) -> rollout_pb.PrepareJobResponse:
        """Start a job's engines at the given versions."""
        _require("job_id", request.job_id)
        asked = await parse_spec(request.spec_json)
        job = await self._jobs.prepare(request.job_id, asked, request.weights, request.servers)
        response = rollout_pb.PrepareJobResponse(
            engines=job.statuses(self._worker_id),
            resolved=self._preparation.resolved(asked, job),
        )
        demonstrations, queries = job.program.demonstrations, job.program.queries
        if demonstrations is not None:
            response.notes.extend(demonstrations.notes)
        if queries is not None:
            response.notes.extend(queries.notes)
            response.task_items.extend(await queries.sources())
            for name in job.spec.evaluation_sets:
                response.evaluation_items[name] = await queries.load("held_out", name)
        return response

    async def RunQueries(
        self, request: rollout_pb.RunQueriesRequest, context: Any
    ) -> AsyncIterator[Any]:  # TrajectoryEvents, or the bytes of them
        """Run tickets; the stream ends when all their trajectories have ended."""
        job = self._jobs.get(request.job_id)
        seen: set[str] = set()
        for index, ticket in enumerate(request.tickets):
            _check_ticket(f"tickets[{index}]", ticket, seen)
            job.casts.of(ticket.cast, f"tickets[{index}].cast")
        listener = await self._runner.listen(
            job,
            request.step,
            request.tickets,
            endings_only=request.endings_only,
            ahead=request.ahead,
        )
        # The client may disconnect while this generator is not running.
        context.add_done_callback(lambda _: listener.close())
        async for events in listener.bundles():
            for event in events:
                # A call without `ahead` reports it, too.
                if is_terminal(TRAJECTORY, event.state) and not request.ahead:
                    self._metrics.ended(request.job_id, event)
            for message in messages(events) if request.together else events:
                yield message

    async def AbortTrajectories(
        self, request: rollout_pb.AbortTrajectoriesRequest, context: Any
    ) -> rollout_pb.AbortTrajectoriesResponse:
        """End trajectories as ABORTED, and answer before the store knows."""
        _require("job_id", request.job_id)
        aborted = self._runner.abort(
            request.job_id, request.trajectory_ids, request.reason or "aborted"
        )
        return rollout_pb.AbortTrajectoriesResponse(aborted_trajectory_ids=aborted)

    async def UpdateWeights(
        self, request: rollout_pb.UpdateWeightsRequest, context: Any
    ) -> rollout_pb.UpdateWeightsResponse:
        """Bring a policy's engines to a version."""
        job = self._jobs.get(request.weights.job_id)
        policy = job.policy(request.weights.policy)
        # Not for a repeated version, to which the engines may still be on their way.
        newer = request.weights.version > policy.weights.version
        transfer = await policy.prefetch(request.weights)
        exposed = await policy.update(request.weights, max(1, request.workers))
        if newer:
            self._runner.policy_updated(job.job_id, policy.name)
        self._metrics.updated(job.job_id, policy.name, exposed, transfer)
        return rollout_pb.UpdateWeightsResponse(
            engines=policy.statuses(job.job_id, self._worker_id),
            exposed_seconds=exposed,
            transfer_seconds=transfer,
        )

    async def LoadAhead(
        self, request: rollout_pb.LoadAheadRequest, context: Any
    ) -> rollout_pb.LoadAheadResponse:
        """Have engines of a policy load a version before its commit."""
        policy = self._jobs.get(request.weights.job_id).policy(request.weights.policy)
        loaded = await policy.load_ahead(request.weights, max(1, request.workers))
        return rollout_pb.LoadAheadResponse(engines=loaded)

    async def ShareServers(
        self, request: rollout_pb.ShareServersRequest, context: Any
    ) -> rollout_pb.ShareServersResponse:
        """Keep or follow the job's attached servers."""
        job = self._jobs.get(request.job_id)
        share_servers(job.job_id, self._worker_id, job.policies, request.servers)
        shared = {server.policy for server in request.servers}
        await asyncio.gather(*(job.policy(name).follow() for name in shared))
        return rollout_pb.ShareServersResponse(engines=job.statuses(self._worker_id))

    async def SleepEngines(
        self, request: rollout_pb.SleepEnginesRequest, context: Any
    ) -> rollout_pb.SleepEnginesResponse:
        """Take engines of a job off their devices."""
        await self._jobs.get(request.job_id).sleep(request.policies)
        return rollout_pb.SleepEnginesResponse()

    async def WakeEngines(
        self, request: rollout_pb.WakeEnginesRequest, context: Any
    ) -> rollout_pb.WakeEnginesResponse:
        """Bring engines of a job back to their devices and targets."""
        await self._jobs.get(request.job_id).wake(request.policies)
        return rollout_pb.WakeEnginesResponse()

    async def Generate(
        self, request: rollout_pb.GenerateRequest, context: Any
    ) -> rollout_pb.GenerateResponse:
        """Return one response of a policy to messages or token ids."""
        job = self._jobs.get(request.job_id)
        return await generate(job, job.policy(request.policy), request)

    async def Score(
        self, request: rollout_pb.ScoreRequest, context: Any
    ) -> rollout_pb.ScoreResponse:
        """Return the log-probs of given continuations under a policy."""
        job = self._jobs.get(request.job_id)
        return await score(job, job.policy(request.policy), request)

    async def DescribeGame(
        self, request: rollout_pb.DescribeGameRequest, context: Any
    ) -> rollout_pb.DescribeGameResponse:
        """Return the questions that a job's players are asked in every information state."""
        job = self._jobs.get(request.job_id)
        return await asyncio.to_thread(job.program.describe_game, request.game)

    async def Behave(
        self, request: rollout_pb.BehaveRequest, context: Any
    ) -> rollout_pb.BehaveResponse:
        """Return the action probabilities of a policy in every information state of a game."""
        job = self._jobs.get(request.job_id)
        return await job.program.behave(job.policy(request.policy), request)

    async def ListEngines(
        self, request: rollout_pb.ListEnginesRequest, context: Any
    ) -> rollout_pb.ListEnginesResponse:
        """Return the engines of one job, or of all jobs."""
        jobs = [self._jobs.get(request.job_id)] if request.job_id else self._jobs.all()
        return rollout_pb.ListEnginesResponse(
            engines=[status for job in jobs for status in job.statuses(self._worker_id)],
            loads=[load for job in jobs for load in job.loads(self._worker_id)],
        )

    async def MoveEngine(
        self, request: rollout_pb.MoveEngineRequest, context: Any
    ) -> rollout_pb.MoveEngineResponse:
        """Move an engine from its policy to another."""
        _require("engine_id", request.engine_id)
        job = self._jobs.get(request.job_id)
        target = job.policy(request.policy)
        if not is_seconds(seconds := request.drain_seconds):
            message = f"must be a number from 0 to {MAX_SECONDS:,}"
            raise InvalidArgument(message, field="drain_seconds", value=seconds)
        moved = await job.moves.move(
            request.engine_id,
            target,
            drain_seconds=seconds if request.HasField("drain_seconds") else None,
        )
        self._metrics.moved(job.job_id, moved.source, target.name, moved.seconds)
        keeper = target.keeper(request.engine_id)
        # None if another caller has moved the engine again meanwhile.
        status = None if keeper is None else keeper.status(job.job_id, self._worker_id)
        response = rollout_pb.MoveEngineResponse(engine=status)
        response.MergeFrom(moved)
        return response

    async def ReleaseJob(
        self, request: rollout_pb.ReleaseJobRequest, context: Any
    ) -> rollout_pb.ReleaseJobResponse:
        """Stop a job's engines."""
        _require("job_id", request.job_id)
        await self._jobs.release(request.job_id)
        clear = self._transfer.clear if request.delete_states else self._transfer.forget_fetched
        await asyncio.to_thread(clear, f"{request.job_id}/")
        return rollout_pb.ReleaseJobResponse()

    def _beat(self) -> orchestrator_pb.HeartbeatRequest:
        jobs = self._jobs.all()
        return orchestrator_pb.HeartbeatRequest(
            kind=orchestrator_pb.WORKER_KIND_ROLLOUT,
            engines=[status for job in jobs for status in job.statuses(self._worker_id)],
            loads=[load for job in jobs for load in job.loads(self._worker_id)],
            doing=f"{len(self._runner)} trajectories in flight" if len(self._runner) else "idle",
            transfer_address=self._transfer.address,
            devices=given_devices(self._devices.devices, self._devices.holders()),
        )


def _require(field: str, value: str) -> None:
    if not value:
        raise InvalidArgument("must not be empty", field=field)
    if field == "job_id":
        check_name(field, value)


def _check_ticket(field: str, ticket: rollout_pb.Ticket, seen: set[str]) -> None:
    _require(f"{field}.query_id", ticket.query_id)
    _require(f"{field}.trajectory_id", ticket.trajectory_id)
    _require(f"{field}.split", ticket.split)
    if ticket.index < 0:
        raise InvalidArgument("must not be negative", field=f"{field}.index", value=ticket.index)
    if ticket.purpose == rollout_pb.Ticket.PURPOSE_UNSPECIFIED:
        raise InvalidArgument(
            "is missing", field=f"{field}.purpose", remedy="Set TRAIN, EVALUATE or MATCH."
        )
    if ticket.trajectory_id in seen:
        raise InvalidArgument(
            "occurs twice", field=f"{field}.trajectory_id", value=ticket.trajectory_id
        )
    seen.add(ticket.trajectory_id)


async def generate(
    job: PreparedJob, policy: ServedPolicy, request: rollout_pb.GenerateRequest
) -> rollout_pb.GenerateResponse:
    """Return one response of `policy` to messages or token ids, within `limits.turn_seconds`.

    Sampling fields that the request leaves open come from the policy's first agent. Raises
    `InvalidArgument`, `DeadlineExceeded`, `FailedPrecondition`.
    """
    if bool(request.messages) == bool(request.input_ids):
        raise InvalidArgument(
            "give exactly one of messages and input_ids",
            field="messages",
            remedy="Send chat messages, or token ids of the policy's tokenizer.",
        )
    chat, roles = policy.language.chat, job.program.roles.values()
    # A policy that only tickets name samples like the first agent.
    role = next((role for role in roles if role.policy == policy.name), next(iter(roles)))
    try:
        if request.messages:
            messages = parse_messages(
                [{"role": m.role, "content": m.content} for m in request.messages],
                role.system_prompt,
            )
            draft = PromptDraft(chat, messages)
            prompt_ids = (await draft.tokenised(policy.max_context)).ids
        else:
            prompt_ids = TokenIds.of(request.input_ids)
        sampling = role.sampling.override(_given(request.sampling))
        generation = await policy.router.generate(
            request.request_id or new_id("generate"),
            prompt_ids,
            sampling,
            route=StickyRoute(),
            deadline_seconds=job.spec.limits.turn_limit,
        )
    except TooManyTokensError as error:
        tokens = f"more than {error.most}"
        raise _to_rpc(ContextOverflowError.of(policy.name, tokens, error.most)) from error
    except WorkflowError as error:
        raise _to_rpc(error) from error
    stopped = generation.finish_reason == "stop"
    return rollout_pb.GenerateResponse(
        text=chat.text(generation.token_ids, stopped=stopped),
        input_ids=prompt_ids,
        output_ids=generation.token_ids,
        logprobs=generation.logprobs,
        versions=[
            common_pb.VersionSpan(version=span.version, start=span.start, end=span.end)
            for span in generation.versions
        ],
        finish_reason=generation.finish_reason,
    )


def _given(sampling: common_pb.SamplingParams) -> dict[str, object]:
    """Return the set fields, repeated ones as tuples."""
    return {
        field.name: tuple(value) if field.is_repeated else value
        for field, value in sampling.ListFields()
    }


def _to_rpc(error: WorkflowError) -> TroupeError:
    classes: dict[str, type[TroupeError]] = {
        kinds.DEADLINE: DeadlineExceeded,
        kinds.JOB_RELEASED: FailedPrecondition,
    }
    return recast(error, classes.get(error.kind, InvalidArgument))


def warm_up() -> None:
    """Import the engines' libraries in a background thread. Repeatable."""
    threading.Thread(target=_import, name="warm-up", daemon=True).start()


def _import() -> None:
    try:
        with IMPORTING:
            importlib.import_module("transformers")
        importlib.import_module("troupe.checkpoints.model_classes")
        importlib.import_module("services.rollout.engines.embedded.engine")
    except Exception as error:  # the engine that needs them reports it
        log.warning("libraries cannot be imported", error=str(error))
    finally:
        # Disabled by `__main__`, since collections take a fifth of the import time.
        if not gc.isenabled():
            collect_seldom()
