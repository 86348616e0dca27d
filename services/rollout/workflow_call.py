"""Calls the user's workflow: whatever it raises, however it refuses to end."""

from __future__ import annotations

import asyncio
import contextlib
import traceback
from collections.abc import Awaitable, Callable
from typing import Any, Final

import structlog

from services.rollout.clock import TrajectoryClock
from services.rollout.watchdog import IN_WORKFLOW, WorkflowBlockedError
from troupe.outcomes import described
from troupe.user_code import await_contained
from troupe.workflow import Agents, Query, ToolError, Tools, TurnError, Workflow, WorkflowError
from troupe.workflow.environments.errors import EnvironmentFault
from troupe.workflow.errors import is_own

log = structlog.get_logger(__name__)

# A workflow that does not end when it is cancelled is closed, and then left behind.
GRACE_SECONDS: Final = 2.0
# Faults of the job's own code or configuration: the next trajectory would end the same way.
FATAL: Final = frozenset(
    {
        "chat_template",
        "entrypoint",
        "reward_bad_type",
        "reward_missing",
        "reward_not_importable",
        "reward_unknown_agent",
        "seating",
        "tool_not_importable",
        "tool_unknown_tool",
        "turn_not_awaited",
        "unknown_agent",
    }
)
# The event loop keeps only weak references to tasks.
abandoned: set[asyncio.Future[Any]] = set()


async def call_workflow(
    workflow: Workflow, trajectory_id: str, query: Query, agents: Agents, tools: Tools
) -> Any:
    """Run the user's function; whatever it raises becomes a `WorkflowError`."""
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
        if _is_the_worlds(error):
            raise
        raise failure_of(error) from error


def _is_the_worlds(error: BaseException) -> bool:
    """Whether it says itself why a trajectory failed: it is Troupe's, and no fault of the
    workflow's code, or one that the next trajectory would meet, too."""
    if not is_own(error):
        return False
    assert isinstance(error, WorkflowError)
    # The workflow did not catch what the world did to it.
    if isinstance(error, ToolError):
        error.kind = f"tool_{error.kind}"
    elif isinstance(error, EnvironmentFault):
        error.kind = f"environment_{error.reason}"
    return isinstance(error, TurnError | ToolError | EnvironmentFault) or error.kind in FATAL


def failure_of(error: BaseException) -> WorkflowError:
    """Why a trajectory failed that raised `error`: any exception, also one whose class or text is
    the user's own."""
    frames = traceback.extract_tb(error.__traceback__)
    # The innermost frame outside of Troupe is where its author has to look.
    own = [f for f in frames if "/troupe/workflow/" not in f.filename][-1:]
    at = f" ({own[0].filename.rsplit('/', 1)[-1]}:{own[0].lineno} in {own[0].name})" if own else ""
    return WorkflowError(f"{described(error)}{at}", kind="workflow_raised")


async def bounded(
    work: Awaitable[Any], clock: TrajectoryClock, late: Callable[[], WorkflowError]
) -> Any:
    """Result of `work`. When `clock` has run out raises `late()`, which is asked before anything is
    cancelled; also when `work` refuses to be: then it is left behind."""
    task = asyncio.ensure_future(await_contained(work))
    error: WorkflowError | None = None
    try:
        while True:
            await asyncio.wait({task}, timeout=max(0.0, clock.left))
            if task.done():
                break
            if clock.left <= 0:  # a clock may have stood still
                error = late()
                break
    finally:
        if not task.done():
            task.cancel()
            await _let_go(task)
    try:
        if error is not None:
            raise error
        if task.cancelled():  # by itself: we have not
            message = "CancelledError: the workflow cancelled itself"
            raise WorkflowError(message, kind="workflow_raised")
        return task.result()
    finally:
        # What is raised refers to this frame; the other way round, too, and all that was said would
        # be there until the collector comes.
        del task, error


async def _let_go(task: asyncio.Future[Any]) -> None:
    """Wait for a cancelled task a little; one that does not end is closed where it stands."""
    await asyncio.wait({task}, timeout=GRACE_SECONDS)
    if not task.done():
        log.warning("a workflow does not end when cancelled")
        assert isinstance(task, asyncio.Task)
        with contextlib.suppress(Exception):  # it refuses even this; or said so
            task.get_coro().close()
        task.cancel()
        await asyncio.wait({task}, timeout=GRACE_SECONDS)
    if task.done():
        if not task.cancelled():
            task.exception()  # seen
        return
    log.error("a workflow catches everything that could end it; it is left behind")
    abandoned.add(task)
    task.add_done_callback(abandoned.discard)
