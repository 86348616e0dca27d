"""Rollout and trainer workers without models: real gRPC servers that do as a script says.

They speak to a real experience store and a real orchestrator. What they generate and learn is
made up; that every trajectory ends once and every sample is committed once is not.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from services.chassis.heartbeat import Heartbeat
from services.chassis.server import RunningServer
from services.chassis.settings import ServiceSettings
from tests.support.experience import make_sample
from troupe.job import JobSpec
from troupe.rpc import (
    FailedPrecondition,
    ResourceExhausted,
    TroupeError,
    Unavailable,
    connect,
    new_id,
)
from troupe.v1 import common_pb2 as pb
from troupe.v1 import experience_store_pb2 as es
from troupe.v1 import orchestrator_pb2 as orch
from troupe.v1 import rollout_pb2 as ro
from troupe.v1 import rollout_pb2_grpc, trainer_pb2_grpc
from troupe.v1 import trainer_pb2 as tr
from troupe.v1.experience_store_pb2_grpc import ExperienceStoreStub


@dataclass
class RolloutScript:
    """How a rollout worker behaves."""

    seconds: float = 0.002
    reward: Callable[[ro.Ticket], dict[str, float]] = lambda ticket: {"solver": 1.0, "team": 1.0}
    # A reason: the trajectory fails with it.
    fail: Callable[[ro.Ticket], str | None] = lambda ticket: None
    # A fault of the job, reported with the first trajectory.
    problem: pb.Problem | None = None
    prepare_error: TroupeError | None = None
    update_errors: list[TroupeError] = field(default_factory=list)
    # Break the stream, once, after so many endings; with `die` the worker goes down with it.
    break_after: int | None = None
    die: bool = False
    # End trajectories in the store but say nothing about them before the break.
    silent: bool = False


@dataclass
class TrainerScript:
    """How a trainer worker behaves."""

    seconds: float = 0.0
    bind_error: TroupeError | None = None
    # Steps whose update is skipped (a NaN).
    skip: frozenset[int] = frozenset()
    # Go down, once: "claimed", "committed" (before anyone is told) or "reported".
    die_when: str = ""
    # Break the stream, once, while the step goes on.
    break_stream: bool = False
    disk_full: bool = False


class FakeWorker:
    """A worker process: a server, a heartbeat, and a death without a word."""

    kind = orch.WORKER_KIND_UNSPECIFIED
    name = ""

    def __init__(self, settings: ServiceSettings) -> None:
        self.settings = settings
        self._server: RunningServer[ServiceSettings] | None = None
        self._beating: Heartbeat | None = None
        self._dying: asyncio.Task[None] | None = None
        self._channel = connect(settings.experience_store_address, settings.client())
        self.store = ExperienceStoreStub(self._channel)

    @property
    def worker_id(self) -> str:
        """Its id."""
        return self.settings.worker_id

    def message(self) -> orch.HeartbeatRequest:
        """The heartbeat."""
        return orch.HeartbeatRequest(kind=self.kind)

    async def start(self) -> None:
        """Called by the chassis."""

    async def stop(self, grace: float) -> None:
        """Called by the chassis."""

    def add_to(self, server: grpc.aio.Server) -> None:
        """Called by the chassis."""
        raise NotImplementedError

    async def up(self) -> None:
        """Serve and beat."""
        self._server = RunningServer(self, self.settings)  # type: ignore[arg-type]
        await self._server.open()
        await self._server.become_ready()
        self.settings = self._server.settings
        self._beating = Heartbeat(self.settings, self.message, interval=0.1)
        await self._beating.start()

    async def down(self) -> None:
        """Die: the port closes, streams break, no heartbeat says goodbye."""
        beating, self._beating = self._beating, None
        if beating is not None:
            task = beating._task
            assert task is not None
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        server, self._server = self._server, None
        if server is not None:
            await server.close()
            await self._channel.close(None)

    def die(self) -> Unavailable:
        """Go down soon; until then this is the answer."""
        self._dying = asyncio.create_task(self.down())
        return Unavailable("killed by the script", kind="killed")


class FakeRollout(FakeWorker, rollout_pb2_grpc.RolloutServicer):
    """Ends trajectories after `script.seconds` with one sample per agent."""

    kind = orch.WORKER_KIND_ROLLOUT
    name = "troupe.v1.Rollout"

    def __init__(self, settings: ServiceSettings, script: RolloutScript | None = None) -> None:
        super().__init__(settings)
        self.script = script or RolloutScript()
        self.specs: dict[str, JobSpec] = {}
        self.versions: dict[str, dict[str, int]] = {}
        self.calls: Counter[str] = Counter()
        self.ran: list[str] = []
        self.aborted = 0

    def add_to(self, server: grpc.aio.Server) -> None:
        rollout_pb2_grpc.add_RolloutServicer_to_server(self, server)

    def message(self) -> orch.HeartbeatRequest:
        engines = [
            ro.EngineStatus(
                engine_id=f"{self.worker_id}-{job}-{policy}",
                job_id=job,
                policy=policy,
                state=pb.ENGINE_STATE_HEALTHY,
                version=version,
            )
            for job, versions in self.versions.items()
            for policy, version in versions.items()
        ]
        return orch.HeartbeatRequest(kind=self.kind, engines=engines)

    async def PrepareJob(
        self, request: ro.PrepareJobRequest, context: Any
    ) -> ro.PrepareJobResponse:
        self.calls["PrepareJob"] += 1
        if self.script.prepare_error is not None:
            raise self.script.prepare_error
        self.specs[request.job_id] = JobSpec.model_validate_json(request.spec_json)
        self.versions[request.job_id] = {one.policy: one.version for one in request.weights}
        return ro.PrepareJobResponse()

    async def UpdateWeights(
        self, request: ro.UpdateWeightsRequest, context: Any
    ) -> ro.UpdateWeightsResponse:
        self.calls["UpdateWeights"] += 1
        if self.script.update_errors:
            raise self.script.update_errors.pop()
        weights = request.weights
        self._job(weights.job_id)[weights.policy] = weights.version
        return ro.UpdateWeightsResponse()

    async def ReleaseJob(
        self, request: ro.ReleaseJobRequest, context: Any
    ) -> ro.ReleaseJobResponse:
        self.calls["ReleaseJob"] += 1
        self.versions.pop(request.job_id, None)
        return ro.ReleaseJobResponse()

    async def Generate(self, request: ro.GenerateRequest, context: Any) -> ro.GenerateResponse:
        version = self._job(request.job_id)[request.policy]
        return ro.GenerateResponse(text=f"{request.policy}@{version}")

    async def ListEngines(
        self, request: ro.ListEnginesRequest, context: Any
    ) -> ro.ListEnginesResponse:
        return ro.ListEnginesResponse(engines=self.message().engines)

    async def RunQueries(
        self, request: ro.RunQueriesRequest, context: Any
    ) -> AsyncIterator[ro.TrajectoryEvent]:
        self.calls["RunQueries"] += 1
        self._job(request.job_id)
        events: asyncio.Queue[ro.TrajectoryEvent] = asyncio.Queue()
        tasks = [
            asyncio.create_task(self._run(request, ticket, events)) for ticket in request.tickets
        ]
        ended = 0
        try:
            while ended < len(tasks):
                event = await events.get()
                ended += event.state != pb.TRAJECTORY_STATE_RUNNING
                if not (self.script.silent and self.script.break_after is not None):
                    yield event
                if self.script.break_after is not None and ended >= self.script.break_after:
                    self.script.break_after = None
                    raise self.die() if self.script.die else Unavailable("the stream broke")
        finally:
            self.aborted += sum(not task.done() for task in tasks)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(
        self,
        request: ro.RunQueriesRequest,
        ticket: ro.Ticket,
        events: asyncio.Queue[ro.TrajectoryEvent],
    ) -> None:
        self.ran.append(ticket.trajectory_id)
        script, spec = self.script, self.specs[request.job_id]
        event = ro.TrajectoryEvent(query_id=ticket.query_id, trajectory_id=ticket.trajectory_id)
        event.state = pb.TRAJECTORY_STATE_RUNNING
        events.put_nowait(event)
        await asyncio.sleep(script.seconds)
        event = ro.TrajectoryEvent(
            query_id=ticket.query_id, trajectory_id=ticket.trajectory_id, seconds=script.seconds
        )
        if script.problem is not None:
            event.problem.CopyFrom(script.problem)
        reason = script.fail(ticket)
        if reason is None:
            event.state = pb.TRAJECTORY_STATE_COMPLETED
            event.rewards.update(script.reward(ticket))
        else:
            event.state, event.reason = pb.TRAJECTORY_STATE_FAILED, reason
        versions = self.versions.get(request.job_id, {})
        samples = []
        for turn, (agent, agent_spec) in enumerate(spec.agents.items()):
            policy = agent_spec.policy
            event.turns.add(
                agent=agent,
                policy=policy,
                turn=turn,
                messages=[pb.ChatMessage(role="user", content="2+2?")],
                response="4",
                prompt_tokens=4,
                response_tokens=2,
                generate_seconds=script.seconds,
                versions=[pb.VersionSpan(version=versions.get(policy, 0), start=0, end=2)],
            )
            if spec.policies[policy].trainable and reason is None:
                samples.append(
                    make_sample(
                        ticket.query_id, turn, ticket.trajectory_id, policy=policy, agent=agent
                    )
                )
        if ticket.purpose == ro.Ticket.PURPOSE_TRAIN:
            await self.store.AppendTrajectory(
                es.AppendTrajectoryRequest(
                    request_id=new_id("append"),
                    job_id=request.job_id,
                    step=request.step,
                    query_id=ticket.query_id,
                    trajectory_id=ticket.trajectory_id,
                    state=event.state,
                    reason=event.reason,
                    samples=samples,
                )
            )
        events.put_nowait(event)

    def _job(self, job_id: str) -> dict[str, int]:
        if job_id not in self.versions:
            raise FailedPrecondition(f"job {job_id} is not prepared here", kind="job_not_prepared")
        return self.versions[job_id]


class FakeTrainer(FakeWorker, trainer_pb2_grpc.TrainerServicer):
    """Claims and commits; its weights are a name and a checksum."""

    kind = orch.WORKER_KIND_TRAINER
    name = "troupe.v1.Trainer"

    def __init__(self, settings: ServiceSettings, script: TrainerScript | None = None) -> None:
        super().__init__(settings)
        self.script = script or TrainerScript()
        self.bound: dict[tuple[str, str], pb.WeightsRef] = {}
        self.calls: Counter[str] = Counter()
        self._steps: dict[tuple[str, str, int], asyncio.Task[es.StepCommit]] = {}

    def add_to(self, server: grpc.aio.Server) -> None:
        trainer_pb2_grpc.add_TrainerServicer_to_server(self, server)

    def message(self) -> orch.HeartbeatRequest:
        bindings = [
            tr.BindingStatus(
                job_id=job, policy=policy, state=pb.BINDING_STATE_IDLE, version=weights.version
            )
            for (job, policy), weights in self.bound.items()
        ]
        return orch.HeartbeatRequest(kind=self.kind, bindings=bindings)

    async def down(self) -> None:
        for task in self._steps.values():
            task.cancel()
        await super().down()

    async def Bind(self, request: tr.BindRequest, context: Any) -> tr.BindResponse:
        self.calls["Bind"] += 1
        if self.script.bind_error is not None:
            raise self.script.bind_error
        weights = weights_of(request.job_id, request.policy, request.version)
        self.bound[request.job_id, request.policy] = weights
        return tr.BindResponse(weights=weights, num_parameters=1)

    async def RunStep(
        self, request: tr.RunStepRequest, context: Any
    ) -> AsyncIterator[tr.StepEvent]:
        self.calls["RunStep"] += 1
        bound = self.bound.get((request.job_id, request.policy))
        if bound is None:
            raise FailedPrecondition(f"{request.policy} is not bound here", kind="not_bound")
        key = (request.job_id, request.policy, request.step)
        if key not in self._steps or self._steps[key].done():
            self._steps[key] = asyncio.create_task(self._step(request))
        yield tr.StepEvent(state=pb.BINDING_STATE_ACCUMULATING)
        if self.script.break_stream:
            self.script.break_stream = False
            raise Unavailable("the stream broke")
        commit = await asyncio.shield(self._steps[key])
        yield tr.StepEvent(state=pb.BINDING_STATE_IDLE, commit=commit)

    async def SaveCheckpoint(
        self, request: tr.SaveCheckpointRequest, context: Any
    ) -> tr.SaveCheckpointResponse:
        if self.script.disk_full:
            raise ResourceExhausted(
                "no space left on device",
                kind="disk_full",
                field="data_dir",
                remedy="Free some space.",
            )
        root: Path = self.settings.data_dir / request.job_id / "checkpoints" / request.policy
        path = root / f"v{request.version}"
        path.mkdir(parents=True, exist_ok=True)
        (path / "model.safetensors").write_bytes(b"weights" * 300_000)
        (path / "config.json").write_text("{}")
        return tr.SaveCheckpointResponse(path=str(path), num_bytes=1)

    async def Release(self, request: tr.ReleaseRequest, context: Any) -> tr.ReleaseResponse:
        self.calls["Release"] += 1
        self.bound.pop((request.job_id, request.policy), None)
        return tr.ReleaseResponse()

    async def ListBindings(
        self, request: tr.ListBindingsRequest, context: Any
    ) -> tr.ListBindingsResponse:
        return tr.ListBindingsResponse(bindings=self.message().bindings)

    async def _step(self, request: tr.RunStepRequest) -> es.StepCommit:
        common: dict[str, Any] = {
            "job_id": request.job_id,
            "policy": request.policy,
            "step": request.step,
        }
        claimant = f"{self.worker_id}/{new_id()}"
        await self.store.ReleaseClaims(
            es.ReleaseClaimsRequest(request_id=new_id("release"), **common)
        )
        claims: list[str] = []
        while True:
            claim = await self.store.ClaimMicroBatch(
                es.ClaimMicroBatchRequest(
                    request_id=new_id("claim"),
                    claimant=claimant,
                    max_samples=8,
                    lease_seconds=60,
                    wait_seconds=5,
                    **common,
                )
            )
            if claim.outcome == es.ClaimMicroBatchResponse.OUTCOME_EXHAUSTED:
                break
            if claim.outcome == es.ClaimMicroBatchResponse.OUTCOME_CLAIMED:
                claims.append(claim.claim_id)
            await self._maybe_die("claimed")
        await asyncio.sleep(self.script.seconds)
        outcome, version = es.STEP_OUTCOME_APPLIED, request.version + 1
        if request.step in self.script.skip:
            outcome, version = es.STEP_OUTCOME_SKIPPED, request.version
        elif not claims:
            outcome, version = es.STEP_OUTCOME_EMPTY, request.version
        weights = weights_of(request.job_id, request.policy, version)
        committed = await self.store.CommitStep(
            es.CommitStepRequest(
                request_id=new_id("commit"),
                claimant=claimant,
                claim_ids=claims,
                outcome=outcome,
                reason="the loss is NaN" if outcome == es.STEP_OUTCOME_SKIPPED else "",
                weights=weights,
                metrics={"loss/policy": 0.5, "grad_norm": float("nan")},
                **common,
            )
        )
        self.bound[request.job_id, request.policy] = committed.commit.weights
        await self._maybe_die("committed")
        return committed.commit

    async def _maybe_die(self, when: str) -> None:
        if self.script.die_when == when:
            self.script.die_when = ""
            raise self.die()


def weights_of(job_id: str, policy: str, version: int) -> pb.WeightsRef:
    """The weights of a version: equal versions have equal content, whoever makes them."""
    return pb.WeightsRef(
        job_id=job_id,
        policy=policy,
        version=version,
        key=f"{job_id}/{policy}/weights@{version}",
        checksum=hashlib.sha256(f"{policy}@{version}".encode()).hexdigest()[:32],
        num_bytes=1,
    )
