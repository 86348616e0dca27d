"""One trajectory: one run of the workflow on one query, with its own task and deadline."""

from __future__ import annotations

import asyncio
import contextlib
import time
import traceback
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import structlog

from services.rollout import records, scoring
from services.rollout.jobs import PreparedJob
from services.rollout.rewards import TrajectoryTools
from services.rollout.store import TrajectoryLog
from services.rollout.turns import TurnBackend
from services.rollout.watchdog import IN_WORKFLOW, WorkflowBlockedError
from troupe.rpc.errors import Internal, InvalidArgument, TroupeError
from troupe.states import TRAJECTORY, check
from troupe.v1 import common_pb2 as pb
from troupe.v1 import rollout_pb2 as rollout
from troupe.workflow import Agents, Query, ToolError, Tools, Turn, TurnError, WorkflowError

log = structlog.get_logger(__name__)

Emit = Callable[[rollout.TrajectoryEvent], None]

# A workflow that does not end when it is cancelled is left behind after this long.
_GRACE_SECONDS = 2.0
_REASON_LIMIT = 1000
# Faults of the job's own code or configuration: the next trajectory would end the same way.
_FATAL = frozenset(
    {
        "chat_template",
        "entrypoint",
        "reward_bad_type",
        "reward_missing",
        "reward_not_importable",
        "reward_unknown_agent",
        "tool_not_importable",
        "tool_unknown_tool",
        "unknown_agent",
    }
)
# The event loop keeps only weak references to tasks.
_abandoned: set[asyncio.Future[Any]] = set()


class Trajectory:
    """Runs once. Whatever the workflow does, it ends: completed, failed with a reason, or
    cancelled from outside, in which case nothing of it is stored and it may be run again."""

    def __init__(
        self,
        job: PreparedJob,
        ticket: rollout.Ticket,
        step: int,
        store: TrajectoryLog,
        emit: Emit,
    ) -> None:
        self._job = job
        self._ticket = ticket
        self._step = step
        self._store = store
        self._emit = emit
        self.state: pb.TrajectoryState.ValueType = pb.TRAJECTORY_STATE_PENDING
        self._turns: Sequence[Turn] = ()
        self._rewards: dict[str, float] = {}
        self._metrics: dict[str, float] = {}

    async def run(self) -> None:
        """Play, score, store, report. Raises `TroupeError` when the store cannot be reached."""
        ticket = self._ticket
        structlog.contextvars.bind_contextvars(
            job_id=self._job.job_id, trajectory_id=ticket.trajectory_id
        )
        async with self._job.gate.enter(ticket.query_id):
            began = time.monotonic()
            self._move(pb.TRAJECTORY_STATE_RUNNING)
            self._emit(self._event(began))
            problem = None
            try:
                samples = await self._play()
            except WorkflowError as error:
                reason = f"{error.kind}: {error.message}"[:_REASON_LIMIT]
                problem = _problem(error) if error.kind in _FATAL else None
                log.info("a trajectory failed", reason=reason)
                if ticket.purpose == rollout.Ticket.PURPOSE_TRAIN:
                    await self._store.fail(
                        self._job.job_id, self._step, ticket.query_id, ticket.trajectory_id, reason
                    )
            else:
                reason = ""
                if ticket.purpose == rollout.Ticket.PURPOSE_TRAIN:
                    reason = await self._store.complete(
                        self._job.job_id,
                        self._step,
                        ticket.query_id,
                        ticket.trajectory_id,
                        samples,
                    )
            failed = pb.TRAJECTORY_STATE_FAILED
            self._move(failed if reason else pb.TRAJECTORY_STATE_COMPLETED)
            self._emit(self._event(began, reason=reason, problem=problem))

    async def _play(self) -> list[Any]:
        """Rows of the trajectory. Raises `WorkflowError`: it failed, `kind` and message say why."""
        job, ticket = self._job, self._ticket
        limits = job.spec.limits
        deadline = asyncio.get_running_loop().time() + limits.trajectory_seconds
        evaluating = ticket.purpose == rollout.Ticket.PURPOSE_EVALUATE
        backend = TurnBackend(
            ticket.trajectory_id,
            job.policy_of,
            turn_seconds=limits.turn_seconds,
            deadline=deadline,
        )
        roles = job.evaluation_roles if evaluating else job.roles
        agents = Agents(roles, backend, seed=ticket.seed)
        tools = TrajectoryTools(job.functions, ticket.trajectory_id, deadline)
        waits_for = "its query"

        async def play() -> Any:
            nonlocal waits_for
            data = await job.queries.get(ticket.split, ticket.index)
            query = Query(ticket.query_id, ticket.split, ticket.index, data)
            waits_for = "the workflow"
            toolbox = Tools(job.spec.tools, tools)
            given = await _call_workflow(job, ticket.trajectory_id, query, agents, toolbox)
            return query, given

        try:
            query, given = await _bounded(play(), deadline)
            self._turns = agents.close()
            self._metrics = query.metrics
            self._move(pb.TRAJECTORY_STATE_SCORING)
            self._emit(self._event(None))
            waits_for = "its reward functions"
            rewards = scoring.check_rewards(given, roles.keys(), "the workflow")
            parts = await _bounded(
                scoring.call_functions(
                    list(job.spec.rewards), tools, query, self._turns, rewards, roles.keys()
                ),
                deadline,
            )
        except TimeoutError as error:
            pending = backend.pending
            raise WorkflowError(
                f"not done within limits.trajectory_seconds = {limits.trajectory_seconds:g} s; "
                f"after {len(agents.turns)} turns it was waiting for {waits_for}"
                + (f", which was waiting for {', '.join(pending)}" if pending else ""),
                kind="deadline",
            ) from error
        finally:
            self._turns = agents.close()
            backend.close()
        total = scoring.add_up([rewards, *parts])
        scoring.check_complete(total, self._turns, job.trained)
        self._rewards = scoring.with_turn_rewards(total, self._turns)
        if evaluating:
            return []
        return records.samples_of(
            self._turns,
            ticket=ticket,
            trained=job.trained,
            rewards=total,
            group_by=job.spec.algorithm.group_by,
        )

    def _move(self, target: pb.TrajectoryState.ValueType) -> None:
        check(TRAJECTORY, self.state, target)
        self.state = target

    def _event(
        self, began: float | None, *, reason: str = "", problem: pb.Problem | None = None
    ) -> rollout.TrajectoryEvent:
        event = rollout.TrajectoryEvent(
            query_id=self._ticket.query_id,
            trajectory_id=self._ticket.trajectory_id,
            state=self.state,
            reason=reason,
            problem=problem,
        )
        if self.state in (pb.TRAJECTORY_STATE_COMPLETED, pb.TRAJECTORY_STATE_FAILED):
            assert began is not None
            event.seconds = time.monotonic() - began
            event.rewards.update(self._rewards)
            event.metrics.update(records.metrics_of(self._turns))
            event.metrics.update(self._metrics)
            event.turns.extend(records.transcript_of(self._turns))
        return event


async def _call_workflow(
    job: PreparedJob, trajectory_id: str, query: Query, agents: Agents, tools: Tools
) -> Any:
    """Run the user's function; whatever it raises becomes a `WorkflowError`."""
    IN_WORKFLOW.set(trajectory_id)
    try:
        return await job.workflow(query, agents, tools)
    except WorkflowBlockedError as error:
        raise WorkflowError(
            f"it {error}",
            kind="workflow_blocked",
            field="workflow",
            remedy="Await instead of blocking; put heavy work into a tool or asyncio.to_thread.",
        ) from error
    except (TurnError, ToolError) as error:
        # Not a fault of the workflow: it did not catch what the world did to it.
        if isinstance(error, ToolError):
            error.kind = f"tool_{error.kind}"
        raise
    except WorkflowError as error:
        if error.kind in _FATAL:
            raise
        raise _raised(error) from error
    except (Exception, SystemExit, KeyboardInterrupt, GeneratorExit) as error:
        raise _raised(error) from error


def _raised(error: BaseException) -> WorkflowError:
    frames = traceback.extract_tb(error.__traceback__)
    # The innermost frame outside of Troupe is where its author has to look.
    own = [f for f in frames if "/troupe/workflow/" not in f.filename][-1:]
    at = f" ({own[0].filename.rsplit('/', 1)[-1]}:{own[0].lineno} in {own[0].name})" if own else ""
    return WorkflowError(f"{type(error).__name__}: {error}{at}", kind="workflow_raised")


async def _bounded(work: Awaitable[Any], deadline: float) -> Any:
    """Result of `work`, or `TimeoutError` at `deadline` (event loop's time), even if it refuses
    to be cancelled: then it is left behind."""
    task = asyncio.ensure_future(work)
    try:
        left = deadline - asyncio.get_running_loop().time()
        await asyncio.wait({task}, timeout=max(0.0, left))
    finally:
        ended = task.done()
        if not ended:
            task.cancel()
            await _let_go(task)
    if not ended:
        raise TimeoutError
    if task.cancelled():  # by itself: we have not
        raise WorkflowError("CancelledError: the workflow cancelled itself", kind="workflow_raised")
    return task.result()


async def _let_go(task: asyncio.Future[Any]) -> None:
    """Wait for a cancelled task a little; one that does not end is closed where it stands."""
    await asyncio.wait({task}, timeout=_GRACE_SECONDS)
    if not task.done():
        log.warning("a workflow does not end when cancelled")
        assert isinstance(task, asyncio.Task)
        with contextlib.suppress(RuntimeError, WorkflowError):  # it refuses even this; or said so
            task.get_coro().close()
        task.cancel()
        await asyncio.wait({task}, timeout=_GRACE_SECONDS)
    if task.done():
        if not task.cancelled():
            task.exception()  # seen
        return
    log.error("a workflow catches everything that could end it; it is left behind")
    _abandoned.add(task)
    task.add_done_callback(_abandoned.discard)


def _problem(error: WorkflowError) -> pb.Problem:
    cls: type[TroupeError] = Internal if error.field is None else InvalidArgument
    return cls(
        error.message,
        kind=error.kind,
        field=error.field,
        value=error.value,
        remedy=error.remedy,
    ).to_problem()
