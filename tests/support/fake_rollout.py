"""A rollout worker without models: a real gRPC server that follows a script."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import grpc

from services.chassis.settings import ServiceSettings
from services.rollout.games import describe
from tests.support.experience import make_sample
from tests.support.fake_worker import FakeWorker
from tests.support.waiting import until
from troupe.job import JobSpec
from troupe.job.sections.balancing import engine_count
from troupe.rpc import FailedPrecondition, TroupeError, Unavailable, new_id
from troupe.v1 import common_pb2 as common_pb
from troupe.v1 import experience_store_pb2 as store_pb
from troupe.v1 import orchestrator_pb2 as orchestrator_pb
from troupe.v1 import rollout_pb2 as rollout_pb
from troupe.v1 import rollout_pb2_grpc as rollout_grpc


@dataclass
class RolloutScript:
    """How a rollout worker behaves."""

    seconds: float = 0.002
    # Besides.
    slow: Callable[[rollout_pb.Ticket], float] = lambda ticket: 0.0
    # The id of another trajectory, whose end is reported before this one ends.
    after: Callable[[rollout_pb.Ticket], str | None] = lambda ticket: None
    reward: Callable[[rollout_pb.Ticket], dict[str, float]] = lambda ticket: {
        "solver": 1.0,
        "team": 1.0,
    }
    metrics: Callable[[rollout_pb.Ticket], dict[str, float]] = lambda ticket: {}
    # The vote of an evaluation's trajectory.
    answer: Callable[[rollout_pb.Ticket], str | None] = lambda ticket: None
    # Reports on data sets: notes, and by evaluation the number of its tasks.
    notes: tuple[str, ...] = ()
    items: dict[str, int] = field(default_factory=dict)
    # Items of each source of the training tasks, and whether a trajectory solves its task.
    task_items: tuple[int, ...] = ()
    solved: Callable[[rollout_pb.Ticket], bool] = lambda ticket: False
    # Delay between the store's record of an end and its report.
    late: Callable[[rollout_pb.Ticket], float] = lambda ticket: 0.0
    # A reason, or a fault of the job's own code: the trajectory fails with it.
    fail: Callable[[rollout_pb.Ticket], str | common_pb.Problem | None] = lambda ticket: None
    # By trajectory: the number of aborts without its fault.
    abort: dict[str, int] = field(default_factory=dict)
    # Seconds from the last trajectory to the end of a stream.
    linger_seconds: float = 0.0
    prepare_error: TroupeError | None = None
    update_errors: list[TroupeError] = field(default_factory=list)
    ahead_error: TroupeError | None = None
    sleep_error: TroupeError | None = None
    # Those of the worker, as heartbeats report them.
    devices: list[orchestrator_pb.GivenDevice] = field(default_factory=list)
    wake_errors: list[TroupeError] = field(default_factory=list)
    # Called when engines come onto their devices.
    on_devices: Callable[[], None] = lambda: None
    # Turns waiting, by policy.
    waiting: dict[str, int] = field(default_factory=dict)
    move_seconds: float = 0.0
    move_errors: list[TroupeError] = field(default_factory=list)
    # Number of endings after which the stream breaks, once; with `die` the worker dies with it.
    break_after: int | None = None
    die: bool = False
    # Go down when asked to prepare a job.
    die_preparing: bool = False
    # The game that is described, and what a prompt's continuations are likely to be by the version
    # of the member that a slot serves.
    workflow: Any = None
    score: Callable[[int, rollout_pb.ScorePrompt], list[float]] | None = None
    score_seconds: float = 0.0
    # End trajectories in the store but say nothing about them before the break.
    silent: bool = False
    # Number of refused calls that delete a job's data in the host's memory.
    keep_states: int = 0


class FakeRollout(FakeWorker, rollout_grpc.RolloutServicer):
    """Ends trajectories after `script.seconds` with one sample per agent."""

    kind = orchestrator_pb.WORKER_KIND_ROLLOUT
    name = "troupe.v1.Rollout"

    def __init__(self, settings: ServiceSettings, script: RolloutScript | None = None) -> None:
        super().__init__(settings)
        self.script = script or RolloutScript()
        self.specs: dict[str, JobSpec] = {}
        self.versions: dict[str, dict[str, int]] = {}
        # By job and engine: the policy served.
        self.places: dict[str, dict[str, str]] = {}
        self.leaving: set[str] = set()
        # Policies whose engines are off their devices, by job.
        self.asleep: dict[str, set[str]] = {}
        self.draining = False
        self.moves: list[tuple[str, str]] = []
        self.asked_to_move: list[float] = []
        """When each call of MoveEngine arrived, in seconds of `time.monotonic`."""
        self.calls: Counter[str] = Counter()
        # Of each update: how many workers are said to update the policy at the same time.
        self.updating: list[int] = []
        # Versions that it was told to load, before ("ahead") and after ("update") their commit, by
        # policy.
        self.loads: list[tuple[str, str, int]] = []
        # Jobs whose data in the host's memory was to be deleted.
        self.deleted: list[str] = []
        self.ran: list[str] = []
        # Trajectories whose end was told.
        self.told: set[str] = set()
        self.tickets: list[rollout_pb.Ticket] = []
        # By policy: the reference of its served weights.
        self.keys: dict[str, str] = {}
        # Trajectories whose streams were cancelled, and those that somebody asked to abort.
        self.aborted = 0
        # Trajectories of each call that began some ahead of their step, and those that wait now.
        self.ahead: list[set[str]] = []
        self.begun_ahead: set[str] = set()
        self.abort_calls: list[rollout_pb.AbortTrajectoriesRequest] = []
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._storing: set[asyncio.Task[Any] | None] = set()
        # Steps in which trajectories run or ran at the same time.
        self.overlaps: set[tuple[int, int]] = set()
        self._steps: Counter[int] = Counter()

    def add_to(self, server: grpc.aio.Server) -> None:
        rollout_grpc.add_RolloutServicer_to_server(self, server)

    def message(self) -> orchestrator_pb.HeartbeatRequest:
        engines = [
            rollout_pb.EngineStatus(
                engine_id=engine_id,
                job_id=job,
                policy=policy,
                state=common_pb.ENGINE_STATE_DRAINING
                if engine_id in self.leaving
                else common_pb.ENGINE_STATE_HEALTHY,
                version=versions[policy],
            )
            for job, versions in self.versions.items()
            for engine_id, policy in self.places[job].items()
        ]
        loads = [
            rollout_pb.PolicyLoad(
                job_id=job, policy=policy, waiting=self.script.waiting.get(policy, 0)
            )
            for job, versions in self.versions.items()
            for policy in versions
        ]
        return orchestrator_pb.HeartbeatRequest(
            kind=self.kind,
            engines=engines,
            loads=loads,
            draining=self.draining,
            devices=self.script.devices,
        )

    async def PrepareJob(
        self, request: rollout_pb.PrepareJobRequest, context: Any
    ) -> rollout_pb.PrepareJobResponse:
        self.calls["PrepareJob"] += 1
        if self.script.die_preparing:
            raise self.die()
        if self.script.prepare_error is not None:
            raise self.script.prepare_error
        spec = JobSpec.model_validate_json(request.spec_json)
        known = self.specs.get(request.job_id)
        self.specs[request.job_id] = spec
        if known != spec or request.job_id not in self.versions:
            self.places[request.job_id] = {
                f"{self.worker_id}-{request.job_id}-{policy}{number or ''}": policy
                for policy, one in spec.policies.items()
                for number in range(engine_count(one))
            }
        self.script.on_devices()
        self.versions[request.job_id] = {one.policy: one.version for one in request.weights}
        self.keys.update((one.policy, one.key) for one in request.weights)
        return rollout_pb.PrepareJobResponse(
            notes=self.script.notes,
            evaluation_items=self.script.items,
            task_items=self.script.task_items,
        )

    async def UpdateWeights(
        self, request: rollout_pb.UpdateWeightsRequest, context: Any
    ) -> rollout_pb.UpdateWeightsResponse:
        self.calls["UpdateWeights"] += 1
        self.updating.append(request.workers)
        self.loads.append(("update", request.weights.policy, request.weights.version))
        if self.script.update_errors:
            raise self.script.update_errors.pop()
        weights = request.weights
        self._job(weights.job_id)[weights.policy] = weights.version
        self.keys[weights.policy] = weights.key
        return rollout_pb.UpdateWeightsResponse()

    async def LoadAhead(
        self, request: rollout_pb.LoadAheadRequest, context: Any
    ) -> rollout_pb.LoadAheadResponse:
        self.calls["LoadAhead"] += 1
        assert request.weights.trained_on.step_result
        assert not request.weights.checksum
        self.loads.append(("ahead", request.weights.policy, request.weights.version))
        if self.script.ahead_error is not None:
            raise self.script.ahead_error
        return rollout_pb.LoadAheadResponse(engines=1)

    async def SleepEngines(
        self, request: rollout_pb.SleepEnginesRequest, context: Any
    ) -> rollout_pb.SleepEnginesResponse:
        self.calls["SleepEngines"] += 1
        self._job(request.job_id)
        if self.script.sleep_error is not None:
            raise self.script.sleep_error
        self.asleep.setdefault(request.job_id, set()).update(request.policies)
        return rollout_pb.SleepEnginesResponse()

    async def WakeEngines(
        self, request: rollout_pb.WakeEnginesRequest, context: Any
    ) -> rollout_pb.WakeEnginesResponse:
        self.calls["WakeEngines"] += 1
        self._job(request.job_id)
        self.script.on_devices()
        if self.script.wake_errors:
            raise self.script.wake_errors.pop()
        self.asleep.setdefault(request.job_id, set()).difference_update(request.policies)
        return rollout_pb.WakeEnginesResponse()

    async def MoveEngine(
        self, request: rollout_pb.MoveEngineRequest, context: Any
    ) -> rollout_pb.MoveEngineResponse:
        self.calls["MoveEngine"] += 1
        self.asked_to_move.append(time.monotonic())
        self.leaving.add(request.engine_id)
        await asyncio.sleep(self.script.move_seconds)
        self.leaving.discard(request.engine_id)
        if self.script.move_errors:
            raise self.script.move_errors.pop()
        places = self.places[request.job_id]
        source, places[request.engine_id] = places[request.engine_id], request.policy
        self.moves.append((source, request.policy))
        return rollout_pb.MoveEngineResponse(source=source, seconds=self.script.move_seconds)

    async def ReleaseJob(
        self, request: rollout_pb.ReleaseJobRequest, context: Any
    ) -> rollout_pb.ReleaseJobResponse:
        if request.delete_states:
            if self.script.keep_states:
                self.script.keep_states -= 1
                raise FailedPrecondition("the script says so")
            self.deleted.append(request.job_id)
        else:
            self.calls["ReleaseJob"] += 1
        self.versions.pop(request.job_id, None)
        return rollout_pb.ReleaseJobResponse()

    async def AbortTrajectories(
        self, request: rollout_pb.AbortTrajectoriesRequest, context: Any
    ) -> rollout_pb.AbortTrajectoriesResponse:
        self.abort_calls.append(request)
        found = [one for one in request.trajectory_ids if one in self._tasks]
        for trajectory_id in found:
            # Endings on their way to the store are reported as stored.
            if (task := self._tasks[trajectory_id]) not in self._storing:
                task.cancel(request.reason)
        return rollout_pb.AbortTrajectoriesResponse(aborted_trajectory_ids=found)

    async def Generate(
        self, request: rollout_pb.GenerateRequest, context: Any
    ) -> rollout_pb.GenerateResponse:
        version = self._job(request.job_id)[request.policy]
        return rollout_pb.GenerateResponse(text=f"{request.policy}@{version}")

    async def Score(
        self, request: rollout_pb.ScoreRequest, context: Any
    ) -> rollout_pb.ScoreResponse:
        self.calls["Score"] += 1
        version = self._job(request.job_id)[request.policy]
        await asyncio.sleep(self.script.score_seconds)
        answer = rollout_pb.ScoreResponse(version=version)
        if (say := self.script.score) is not None:
            # A key of members: ".../members/{version}@0".
            member = int(self.keys[request.policy].rpartition("/")[2].partition("@")[0])
            for prompt in request.prompts:
                chances = zip(prompt.continuations, say(member, prompt), strict=True)
                logs = [math.log(p) if p > 0 else -math.inf for _, p in chances]
                answer.prompts.add(
                    continuations=[rollout_pb.ScoredContinuation(logprob=one) for one in logs]
                )
        return answer

    async def DescribeGame(
        self, request: rollout_pb.DescribeGameRequest, context: Any
    ) -> rollout_pb.DescribeGameResponse:
        self.calls["DescribeGame"] += 1
        spec = self.specs[request.job_id]
        return await asyncio.to_thread(describe, self.script.workflow, spec, request.game)

    async def ListEngines(
        self, request: rollout_pb.ListEnginesRequest, context: Any
    ) -> rollout_pb.ListEnginesResponse:
        return rollout_pb.ListEnginesResponse(engines=self.message().engines)

    async def RunQueries(
        self, request: rollout_pb.RunQueriesRequest, context: Any
    ) -> AsyncIterator[rollout_pb.TrajectoryEvent]:
        self.calls["RunQueries"] += 1
        self._job(request.job_id)
        assert not self.asleep.get(request.job_id), "queries for engines that sleep"
        if request.ahead:
            await self._begin_ahead(request)
            return
        events: asyncio.Queue[rollout_pb.TrajectoryEvent] = asyncio.Queue()
        tasks = [
            asyncio.create_task(self._tracked(request, ticket, events))
            for ticket in request.tickets
        ]
        ended = 0
        try:
            while ended < len(tasks):
                event = await events.get()
                ended += event.state != common_pb.TRAJECTORY_STATE_RUNNING
                while request.together and self.script.break_after is None and not events.empty():
                    other = events.get_nowait()
                    ended += other.state != common_pb.TRAJECTORY_STATE_RUNNING
                    event.together.append(other)
                if not (self.script.silent and self.script.break_after is not None):
                    yield event
                if self.script.break_after is not None and ended >= self.script.break_after:
                    self.script.break_after = None
                    raise self.die() if self.script.die else Unavailable("the stream broke")
            await asyncio.sleep(self.script.linger_seconds)
        finally:
            self.aborted += sum(not task.done() for task in tasks)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _begin_ahead(self, request: rollout_pb.RunQueriesRequest) -> None:
        """Until the caller gives up, or until these have ended as somebody else's."""
        ids = {ticket.trajectory_id for ticket in request.tickets}
        self.ahead.append(ids)
        self.begun_ahead |= ids
        try:
            while not ids <= set(self.ran):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        finally:
            self.begun_ahead -= ids

    async def _tracked(
        self,
        request: rollout_pb.RunQueriesRequest,
        ticket: rollout_pb.Ticket,
        events: asyncio.Queue[rollout_pb.TrajectoryEvent],
    ) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks[ticket.trajectory_id] = task
        began = time.monotonic()
        self._steps[request.step] += 1
        open_steps = [step for step, count in self._steps.items() if count]
        self.overlaps.update((min(open_steps), step) for step in open_steps)
        try:
            await self._run(request, ticket, events)
        except asyncio.CancelledError as cancelled:
            if not cancelled.args or not cancelled.args[0]:
                raise
            event = rollout_pb.TrajectoryEvent(
                query_id=ticket.query_id,
                trajectory_id=ticket.trajectory_id,
                state=common_pb.TRAJECTORY_STATE_ABORTED,
                reason=cancelled.args[0],
                seconds=time.monotonic() - began,
            )
            events.put_nowait(event)
        finally:
            self._steps[request.step] -= 1
            # Another call may run it by now.
            if self._tasks.get(ticket.trajectory_id) is task:
                del self._tasks[ticket.trajectory_id]
            self._storing.discard(task)

    async def _run(
        self,
        request: rollout_pb.RunQueriesRequest,
        ticket: rollout_pb.Ticket,
        events: asyncio.Queue[rollout_pb.TrajectoryEvent],
    ) -> None:
        self.ran.append(ticket.trajectory_id)
        self.tickets.append(ticket)
        script, spec = self.script, self.specs[request.job_id]
        event = rollout_pb.TrajectoryEvent(
            query_id=ticket.query_id, trajectory_id=ticket.trajectory_id
        )
        event.state = common_pb.TRAJECTORY_STATE_RUNNING
        # Those that it starts with; engines may be brought further while it runs.
        versions = dict(self.versions.get(request.job_id, {}))
        event.start_versions.update(versions)
        events.put_nowait(event)
        if (other := script.after(ticket)) is not None:
            await until(lambda: other in self.told)
        await asyncio.sleep(script.seconds + script.slow(ticket))
        event = rollout_pb.TrajectoryEvent(
            query_id=ticket.query_id, trajectory_id=ticket.trajectory_id, seconds=script.seconds
        )
        reason = script.fail(ticket)
        if isinstance(reason, common_pb.Problem):
            event.problem.CopyFrom(reason)
            reason = f"{reason.kind}: {reason.message}"
        aborted = script.abort.get(ticket.trajectory_id, 0)
        if aborted:
            script.abort[ticket.trajectory_id] = aborted - 1
            event.state, event.reason = common_pb.TRAJECTORY_STATE_ABORTED, "the worker is drained"
        elif reason is None:
            event.state = common_pb.TRAJECTORY_STATE_COMPLETED
            event.rewards.update(script.reward(ticket))
            event.metrics.update(script.metrics(ticket))
            if (answer := script.answer(ticket)) is not None:
                event.answer = answer
        else:
            event.state, event.reason = common_pb.TRAJECTORY_STATE_FAILED, reason
        samples = []
        for turn, (agent, agent_spec) in enumerate(spec.agents.items()):
            policy = ticket.cast.get(agent, agent_spec.policy)
            event.turns.add(
                agent=agent,
                policy=policy,
                turn=turn,
                messages=[common_pb.ChatMessage(role="user", content="2+2?")],
                response="4",
                prompt_tokens=4,
                response_tokens=2,
                generate_seconds=script.seconds,
                versions=[common_pb.VersionSpan(version=versions.get(policy, 0), start=0, end=2)],
            )
            learns = not ticket.learners or policy in ticket.learners
            if spec.policies[policy].trainable and learns and reason is None:
                sample = make_sample(
                    ticket.query_id, turn, ticket.trajectory_id, policy=policy, agent=agent
                )
                sample.versions[0].version = versions.get(policy, 0)
                sample.reward = event.rewards.get(agent, 1.0)
                samples.append(sample)
        if ticket.purpose == rollout_pb.Ticket.PURPOSE_TRAIN:
            self._storing.add(asyncio.current_task())
            ended = await self.store.AppendTrajectory(
                store_pb.AppendTrajectoryRequest(
                    request_id=new_id("append"),
                    job_id=request.job_id,
                    step=request.step,
                    query_id=ticket.query_id,
                    trajectory_id=ticket.trajectory_id,
                    state=event.state,
                    reason=event.reason,
                    samples=samples,
                    solved=script.solved(ticket),
                )
            )
            event.group_complete = ended.group_complete
            if ended.drop_reason:
                event.state, event.reason = common_pb.TRAJECTORY_STATE_ABORTED, ended.drop_reason
        asyncio.get_running_loop().call_later(script.late(ticket), self._tell, event, events)

    def _tell(
        self, event: rollout_pb.TrajectoryEvent, events: asyncio.Queue[rollout_pb.TrajectoryEvent]
    ) -> None:
        events.put_nowait(event)
        self.told.add(event.trajectory_id)

    def _job(self, job_id: str) -> dict[str, int]:
        if job_id not in self.versions:
            raise FailedPrecondition(f"job {job_id} is not prepared here", kind="job_not_prepared")
        return self.versions[job_id]
