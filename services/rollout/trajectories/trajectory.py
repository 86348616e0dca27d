"""One trajectory: one run of the workflow on one query, as a task with a deadline."""

from __future__ import annotations

import asyncio
import contextlib
import time
import traceback
from collections.abc import Awaitable, Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, Final

import structlog

from services.rollout.prepared_job import PreparedJob
from services.rollout.rewards import TrajectoryTools
from services.rollout.scoring import add_teacher_logprobs
from services.rollout.trajectories import records
from services.rollout.trajectories.clock import TrajectoryClock
from services.rollout.trajectories.concurrency import EarlyStartGate
from services.rollout.trajectories.monitors import monitored
from services.rollout.trajectories.records import End, LargeColumns, RowDestination, TrajectoryLog
from services.rollout.trajectories.turn_backend import TurnBackend
from services.rollout.trajectories.watchdog import IN_WORKFLOW, WorkflowBlockedError, blocked_note
from troupe.algorithms.scores import success_of
from troupe.contracts import kinds, metric_names
from troupe.endpoint.server import EndpointServer
from troupe.outcomes import described, safe_text
from troupe.rpc import Attempts, RetryPolicy
from troupe.rpc.errors import Internal, InvalidArgument, TroupeError, recast
from troupe.states import TRAJECTORY, check, is_terminal
from troupe.user_code import BreakpointReached, await_contained, is_closing
from troupe.v1 import common_pb2 as common_pb
from troupe.v1 import rollout_pb2 as rollout_pb
from troupe.workflow import (
    Agents,
    Query,
    ToolError,
    Tools,
    TurnError,
    TurnRecord,
    Workflow,
    WorkflowError,
    scoring,
)
from troupe.workflow.environments.episode import SeatingError
from troupe.workflow.errors import (
    ChatTemplateError,
    EntrypointError,
    EnvironmentFault,
    UnknownAgentError,
    is_own,
)
from troupe.workflow.samples import metrics_of, rows_of

log = structlog.get_logger(__name__)

Emit = Callable[[rollout_pb.TrajectoryEvent], None]

# The metric of a trajectory that says whether it solved its task, for a curriculum.
SOLVED: Final = "solved"
_REASON_LIMIT: Final = 1000
_DOMAIN_LIMIT: Final = 200
# Seconds after its cancellation until a workflow that does not end is closed, and then abandoned.
GRACE_SECONDS: Final = 2.0
# Faults of the job's own code or configuration. The trajectory is not retried; its end carries the
# problem with field and remedy, since all trajectories of a step may fail the same way.
JOB_FAULTS: Final = frozenset(
    {
        kinds.BREAKPOINT,
        ChatTemplateError.kind,
        EntrypointError.kind,
        kinds.ENVIRONMENT_KEY_MISSING,
        kinds.ENVIRONMENT_NOT_INSTALLED,
        kinds.ENVIRONMENT_REFUSED,
        kinds.ENVIRONMENT_ROLE,
        kinds.ENVIRONMENT_UNSUPPORTED,
        kinds.REWARD_BAD_TYPE,
        kinds.REWARD_MISSING,
        f"reward_{kinds.NOT_IMPORTABLE}",
        kinds.REWARD_UNKNOWN_AGENT,
        SeatingError.kind,
        kinds.TEACHER,
        kinds.TOOL_PREFIX + kinds.NOT_IMPORTABLE,
        kinds.TOOL_PREFIX + kinds.UNKNOWN_TOOL,
        kinds.TURN_NOT_AWAITED,
        UnknownAgentError.kind,
    }
)
# The event loop keeps only weak references to tasks.
abandoned: set[asyncio.Future[Any]] = set()


class RunningTrajectory:
    """One run of a trajectory. It ends as completed, failed or aborted with a reason; if it is
    cancelled from outside instead, nothing of it is stored and it may run again."""

    def __init__(
        self,
        job: PreparedJob,
        ticket: rollout_pb.Ticket,
        step: int,
        store: TrajectoryLog,
        emit: Emit,
        endpoints: EndpointServer,
        early_start: EarlyStartGate,
    ) -> None:
        """`early_start`: the gate at which its turns and its end wait."""
        self._job = job
        self._early_start = early_start
        self._ticket = ticket
        self._store = store
        self._destination = RowDestination(
            job.job_id, step, ticket.query_id, ticket.trajectory_id, job.spec.limits.step_seconds
        )
        self._emit = emit
        self._endpoints = endpoints
        self.state: common_pb.TrajectoryState.ValueType = common_pb.TRAJECTORY_STATE_PENDING
        self._turns: Sequence[TurnRecord] = ()
        self._rewards: dict[str, float] = {}
        self._metrics: dict[str, float] = {}
        # Monitors of the team.
        self._monitored: dict[str, float] = {}
        self._answer: str | None = None
        self._shelf = LargeColumns(job.transfer, job.job_id)
        # Reason of a trajectory that completes.
        self._note = ""
        self._began: float | None = None
        self._start_versions: dict[str, int] = {}
        # The end sent to the store; whether it was stored is known when the store answers.
        self._sent: tuple[common_pb.TrajectoryState.ValueType, str] | None = None
        self._group_complete = False

    async def run(self) -> None:
        """Play, score, store, report. Raises `TroupeError` when the store cannot be reached."""
        ticket = self._ticket
        structlog.contextvars.bind_contextvars(
            job_id=self._job.job_id, trajectory_id=ticket.trajectory_id
        )
        async with self._job.gate.enter(ticket.query_id):
            self._began = time.monotonic()
            self._move(common_pb.TRAJECTORY_STATE_RUNNING)
            self._emit(self._event())
            problem = None
            try:
                samples = await self._play()
                await self._early_start.wait()
            except WorkflowError as error:
                await self._early_start.wait()
                state: common_pb.TrajectoryState.ValueType = common_pb.TRAJECTORY_STATE_FAILED
                reason = f"{safe_text(error.kind, 60)}: {safe_text(error.message, _REASON_LIMIT)}"
                problem = _problem(error) if error.kind in JOB_FAULTS else None
                log.info("a trajectory failed", reason=reason)
                if self._stored:
                    self._sent = state, reason
                    state, reason = self._ended(await self._store.fail(self._destination, reason))
            else:
                state, reason = common_pb.TRAJECTORY_STATE_COMPLETED, self._note
                if self._stored:
                    await self._shelf.put()
                    self._sent = state, reason
                    state, reason = self._ended(
                        await self._store.complete(
                            self._destination, samples, solved=bool(self._metrics.get(SOLVED))
                        )
                    )
                    if state == common_pb.TRAJECTORY_STATE_ABORTED:
                        await self._shelf.discard()
                    elif state == common_pb.TRAJECTORY_STATE_COMPLETED:
                        reason = self._note
            self._move(state)
            self._emit(self._event(reason=reason, problem=problem))

    async def abort(self, reason: str) -> None:
        """Store and report an abort, after `run` was cancelled. Raises `TroupeError`."""
        log.info("a trajectory was aborted", reason=reason)
        state: common_pb.TrajectoryState.ValueType = common_pb.TRAJECTORY_STATE_ABORTED
        if self._stored and not await self._store.abort(self._destination, reason) and self._sent:
            # It was cancelled while waiting for the store's answer about its end.
            state, reason = self._sent
        if state == common_pb.TRAJECTORY_STATE_ABORTED:
            await self._shelf.discard()
        self._move(state)
        self._emit(self._event(reason=reason))

    def _ended(self, end: End) -> tuple[common_pb.TrajectoryState.ValueType, str]:
        self._group_complete = end.group_complete
        return end.state, end.reason

    @property
    def _stored(self) -> bool:
        return self._ticket.purpose == rollout_pb.Ticket.PURPOSE_TRAIN

    async def _play(self) -> list[Any]:
        """Return the trajectory's rows. Raises `WorkflowError` with the failure's kind and
        message."""
        limits = self._job.spec.limits
        clock = TrajectoryClock(
            limits.trajectory_seconds,
            longest=limits.step_seconds,
            patient=self._job.spec.pipeline.deterministic,
        )
        attempts = TrajectoryAttempts(limits.trajectory_retries, clock, self._ticket.seed)
        while True:
            try:
                return await self._attempt(clock, attempts.made)
            except WorkflowError as error:
                if not await attempts.again(error):
                    raise
            except TroupeError:
                raise
            # the data of this trajectory made Troupe's code fail: a fault of this trajectory only
            except Exception as error:
                log.exception("a trajectory failed outside of its workflow")
                raise failure_of(error) from error
            finally:
                if limits.trajectory_retries:
                    self._metrics = self._metrics | {
                        metric_names.ENVIRONMENT_RETRIES: float(attempts.made)
                    }

    async def _attempt(self, clock: TrajectoryClock, number: int) -> list[Any]:
        """Return the rows of attempt `number`, counted from 0."""
        job, ticket = self._job, self._ticket
        limits = job.spec.limits
        evaluating = ticket.purpose == rollout_pb.Ticket.PURPOSE_EVALUATE
        # Named separately: engines may still be ending turns of the previous attempt, and the
        # reward service its sandboxes.
        name = f"{ticket.trajectory_id}~{number}" if number else ticket.trajectory_id
        cast = job.casts.of(ticket.cast)
        backend = TurnBackend(
            name,
            cast.policy_of,
            turn_seconds=limits.turn_limit,
            clock=clock,
            turn_began=self._turn_began,
            endpoints=self._endpoints,
            query_id=ticket.query_id,
            left=job.groups.left,
            early_start=self._early_start,
            turnstile=job.turnstile,
            left_out=ticket.left_out,
        )
        roles = (
            cast.evaluation_roles.get(ticket.evaluation, cast.roles) if evaluating else cast.roles
        )
        waiters = partial(job.groups.waiters, ticket.query_id)
        tools = TrajectoryTools(job.functions, name, clock, waiters, ticket.query_id)
        barrier = None if job.lockstep is None or not self._stored else job.lockstep.member(clock)
        agents = Agents(roles, barrier.backend(backend) if barrier else backend, seed=ticket.seed)
        waits_for = "its query"

        async def play() -> Any:
            nonlocal waits_for
            queries, workflow = job.program.queries, job.program.workflow
            assert queries is not None, "language models play"
            assert workflow is not None, "language models play"
            task = ticket.task if ticket.HasField("task") else None
            data = await queries.get(ticket.split, ticket.index, ticket.evaluation, task)
            query = Query(ticket.query_id, ticket.split, ticket.index, data)
            backend.domain = safe_text(data.get("domain", ""), _DOMAIN_LIMIT)
            waits_for = "the workflow"
            await job.functions.list_servers()
            toolbox = Tools(
                job.functions.tool_names,
                barrier.tools(tools) if barrier else tools,
                job.functions.definitions,
            )
            given = await call_workflow(workflow, ticket.trajectory_id, query, agents, toolbox)
            return query, given

        def late() -> WorkflowError:
            message = (
                f"not done within limits.trajectory_seconds = {limits.trajectory_seconds:g} s; "
                f"after {len(agents.turns)} turns it was waiting for {waits_for}"
            )
            if pending := backend.pending:
                message += f", which was waiting for {', '.join(pending)}"
            elif barrier and barrier.waiting:
                message += ", which was waiting for other trajectories (pipeline.rollout: batch)"
            return WorkflowError(message + blocked_note(clock.began), kind=kinds.DEADLINE)

        try:
            with barrier or nullcontext():
                query, given = await bounded(play(), clock, late)
            self._turns = agents.close()
            self._metrics = query.logged()
            self._note_unawaited(agents)
            self._move(common_pb.TRAJECTORY_STATE_SCORING)
            self._emit(self._event())
            waits_for = "its reward functions"
            total = await bounded(
                scoring.rewards_of(
                    given, list(job.spec.rewards), tools, query, self._turns, roles.keys()
                ),
                clock,
                late,
            )
        finally:
            self._turns = agents.close()
            backend.close()
            tools.close()
        if query.scores:
            self._metrics = {**query.logged(), **self._metrics}
        evaluation = job.spec.evaluation_of(ticket.evaluation) if evaluating else None
        if evaluation is not None:
            self._answer = scoring.answer_of(query, self._turns, evaluation.answer_pattern)
        if len(roles) > 1:
            self._monitored = await monitored(self._turns, evaluation)
        scoring.check_complete(total, self._turns, job.trained)
        self._rewards = scoring.with_turn_rewards(total, self._turns)
        if backend.opened_endpoint and total and not self._turns:
            # A cache or another model answered: there is nothing to train on.
            self._metrics = self._metrics | {metric_names.UNUSED_ENDPOINT: 1.0}
        if not self._stored:
            return []
        if (curriculum := job.spec.curriculum) is not None:
            success = success_of(self._rewards, self._metrics, curriculum.success)
            self._metrics = self._metrics | {SOLVED: float(success >= curriculum.threshold)}
        rows = rows_of(
            self._turns,
            query_id=ticket.query_id,
            trajectory_id=ticket.trajectory_id,
            trained=job.trained.intersection(ticket.learners or job.trained),
            rewards=total,
            group_by=job.spec.algorithm.grouping,
            own_groups=job.spec.algorithm.grouped_by_workflow,
            team_tokens=job.spec.algorithm.team_tokens,
        )
        samples = records.samples_of(rows, ticket=ticket, shelf=self._shelf)
        await add_teacher_logprobs(job, samples, [row.turn.prompt_ids for row in rows])
        return samples

    def _note_unawaited(self, agents: Agents) -> None:
        """Report turns that the workflow never awaited: it is random whether they end in time to
        count. Raises `WorkflowError` in a deterministic job."""
        self._note = ""
        if not (left := agents.unawaited):
            return
        whose = ", ".join(f"{count} of {name}" for name, count in sorted(left.items()))
        text = f"{left.total()} turns were requested and never awaited ({whose})"
        self._metrics = self._metrics | agents.unawaited_metric
        if self._job.spec.pipeline.deterministic:
            raise WorkflowError(
                f"{text}, and the content of a step would depend on timing "
                "(pipeline.deterministic)",
                kind=kinds.TURN_NOT_AWAITED,
                field="workflow",
                remedy="Await every `chat` and `generate`, and every task that calls one.",
            )
        log.warning("a workflow does not await its turns", turns=text)
        self._note = f"turn_not_awaited: {text}"

    def _move(self, target: common_pb.TrajectoryState.ValueType) -> None:
        check(TRAJECTORY, self.state, target)
        self.state = target

    def _turn_began(self, policy: str, version: int) -> None:
        """Record the oldest version of each policy; report it at once if staleness is bounded."""
        known = self._start_versions.get(policy)
        if known is not None and known <= version:
            return
        self._start_versions[policy] = version
        if (
            self._job.spec.pipeline.mode == "async"
            and self.state == common_pb.TRAJECTORY_STATE_RUNNING
        ):
            self._emit(self._event())

    def _event(
        self, *, reason: str = "", problem: common_pb.Problem | None = None
    ) -> rollout_pb.TrajectoryEvent:
        event = rollout_pb.TrajectoryEvent(
            query_id=self._ticket.query_id,
            trajectory_id=self._ticket.trajectory_id,
            state=self.state,
            reason=reason,
            problem=problem,
            start_versions=self._start_versions,
            group_complete=self._group_complete,
        )
        if is_terminal(TRAJECTORY, self.state):
            began = self._began
            event.seconds = 0.0
            if began is not None:
                event.seconds = time.monotonic() - began - self._early_start.seconds
            event.rewards.update(self._rewards)
            event.metrics.update(metrics_of(self._turns))
            event.metrics.update(self._monitored)
            event.metrics.update(self._metrics)
            if self._answer is not None:
                event.answer = self._answer
            evaluates = self._ticket.purpose == rollout_pb.Ticket.PURPOSE_EVALUATE
            self._job.transcripts.add_turns(
                event,
                self._turns,
                evaluation=self._ticket.evaluation if evaluates else None,
                step=self._destination.step,
            )
        return event


def _problem(error: WorkflowError) -> common_pb.Problem:
    cls: type[TroupeError] = Internal if error.field is None else InvalidArgument
    return recast(error, cls).to_problem()


class TrajectoryAttempts:
    """The attempts at one trajectory, which restarts after a fault of its environment.

    `limits.trajectory_retries` restarts, all within one clock. Each attempt has the trajectory's
    seed, so that it differs only in the environment's behaviour.
    """

    def __init__(self, retries: int, clock: TrajectoryClock, seed: int) -> None:
        self._retries = retries
        self._clock = clock
        backoff = RetryPolicy(None, initial_backoff=0.2, max_backoff=5.0, seed=seed)
        self._failed = Attempts(backoff, retryable=lambda error: True)
        self.made = 0
        """Number of restarts."""

    async def again(self, error: WorkflowError) -> bool:
        """Wait before the next attempt, and return True; return False if `error` is not the
        environment's, or if no restarts or time are left; its message then says how often it was
        tried."""
        if not is_environments(error):
            return False
        pause = self._failed.next_delay(error)
        if self.made == self._retries or pause >= self._clock.left:
            if self.made:
                error.message += f" (tried {self.made + 1} times)"
            return False
        self.made += 1
        log.info("a trajectory restarts", attempt=self.made + 1, reason=str(error))
        with self._clock.outside():
            await asyncio.sleep(pause)
        return True


def is_environments(error: WorkflowError) -> bool:
    """Return whether an environment or tool failed the workflow, which another attempt may
    avoid."""
    return isinstance(error, ToolError | EnvironmentFault) and error.kind not in JOB_FAULTS


async def call_workflow(
    workflow: Workflow, trajectory_id: str, query: Query, agents: Agents, tools: Tools
) -> Any:
    """Run the workflow function; convert all its exceptions to `WorkflowError`."""
    IN_WORKFLOW.set(trajectory_id)
    agents.enter()
    try:
        return await workflow(query, agents, tools)
    except WorkflowBlockedError as error:
        raise WorkflowError(
            f"it {error}",
            kind="workflow_blocked",
            field="workflow",
            remedy="Await instead of blocking; put heavy work into a tool or asyncio.to_thread.",
        ) from error
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise failure_of(error) from error
    except BaseException as error:
        if _explains_itself(error) or is_closing(error):
            raise
        raise failure_of(error) from error


def _explains_itself(error: BaseException) -> bool:
    """Return whether `error` is raised by Troupe and names the reason of the failure itself: an
    engine's, tool's or environment's fault, or one of `JOB_FAULTS`."""
    if not is_own(error):
        return False
    assert isinstance(error, WorkflowError)
    # The workflow did not catch the fault of its tool or environment.
    if isinstance(error, ToolError):
        error.kind = kinds.TOOL_PREFIX + error.kind
    elif isinstance(error, EnvironmentFault):
        error.kind = kinds.ENVIRONMENT_PREFIX + error.reason
    return isinstance(error, TurnError | ToolError | EnvironmentFault) or error.kind in JOB_FAULTS


def failure_of(error: BaseException) -> WorkflowError:
    """Return the `WorkflowError` for any exception of user code, whatever its class or text."""
    if type(error) is BreakpointReached:
        return WorkflowError(
            str(error), kind=kinds.BREAKPOINT, field="workflow", remedy="Remove the breakpoint."
        )
    frames = traceback.extract_tb(error.__traceback__)
    # The author has to look at the innermost frame outside of Troupe.
    own = [f for f in frames if "/troupe/workflow/" not in f.filename][-1:]
    at = f" ({own[0].filename.rsplit('/', 1)[-1]}:{own[0].lineno} in {own[0].name})" if own else ""
    return WorkflowError(f"{described(error)}{at}", kind="workflow_raised")


async def bounded(
    work: Awaitable[Any], clock: TrajectoryClock, late: Callable[[], WorkflowError]
) -> Any:
    """Return the result of `work`. When `clock` runs out, raise `late()`, which is called before
    `work` is cancelled. Work that ignores the cancellation is abandoned."""
    task = asyncio.ensure_future(await_contained(work))
    error: WorkflowError | None = None
    try:
        while True:
            await asyncio.wait({task}, timeout=max(0.0, clock.left))
            if task.done():
                break
            if clock.left <= 0:  # the clock may have been paused
                error = late()
                break
    finally:
        if not task.done():
            task.cancel()
            await _end_cancelled(task)
    try:
        if error is not None:
            raise error
        if task.cancelled():  # by itself, not by us
            message = "CancelledError: the workflow cancelled itself"
            raise WorkflowError(message, kind="workflow_raised")
        return task.result()
    finally:
        # The raised error refers to this frame: without this deletion they would form a cycle that
        # keeps the trajectory's data until the next garbage collection.
        del task, error


async def _end_cancelled(task: asyncio.Future[Any]) -> None:
    """Wait briefly for a cancelled task; close the coroutine of one that does not end."""
    await asyncio.wait({task}, timeout=GRACE_SECONDS)
    if not task.done():
        log.warning("a workflow does not end when cancelled")
        assert isinstance(task, asyncio.Task)
        with contextlib.suppress(Exception):  # its code may raise here as well
            task.get_coro().close()
        task.cancel()
        await asyncio.wait({task}, timeout=GRACE_SECONDS)
    if task.done():
        if not task.cancelled():
            task.exception()  # seen
        return
    log.error("a workflow catches everything that could end it; it is abandoned")
    abandoned.add(task)
    task.add_done_callback(abandoned.discard)
