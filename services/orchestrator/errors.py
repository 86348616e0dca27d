"""Treatment of worker errors (transient or final), deadlines, pauses between attempts, and helpers
that run coroutines concurrently."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any, Final, TypeVar

from troupe.contracts import kinds
from troupe.rpc import (
    Aborted,
    Attempts,
    DeadlineExceeded,
    FailedPrecondition,
    Internal,
    ResourceExhausted,
    RetryPolicy,
    TroupeError,
    Unavailable,
)
from troupe.v1 import common_pb2 as common_pb

T = TypeVar("T")

# Kinds of errors of a worker that has lost its state of the job: prepare or bind it again.
RENEWABLE: Final = frozenset({kinds.JOB_NOT_PREPARED, kinds.NOT_BOUND, kinds.STEP_IN_PROGRESS})
_TRANSIENT: Final = (Unavailable, DeadlineExceeded, Aborted)
# An `Internal` error may be transient; one that keeps returning is a bug.
_MAX_INTERNAL: Final = 3
_BACKOFF: Final = RetryPolicy(max_attempts=None)


def is_transient(error: TroupeError) -> bool:
    """Return whether the same request may succeed later or at another worker."""
    if isinstance(error, _TRANSIENT) or error.kind in RENEWABLE:
        return True
    return isinstance(error, ResourceExhausted) and error.retry_after_ms is not None


def job_fault(problem: common_pb.Problem) -> FailedPrecondition:
    """Return the final error for a problem in the job's own code or configuration."""
    return FailedPrecondition(
        problem.message,
        kind=problem.kind or "job_fault",
        field=problem.field if problem.HasField("field") else None,
        value=problem.value if problem.HasField("value") else None,
        remedy=problem.remedy if problem.HasField("remedy") else None,
    )


async def cancel_all(tasks: Iterable[asyncio.Future[Any]]) -> None:
    """Cancel tasks and wait until they have ended, ignoring their errors."""
    tasks = list(tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def run_all(*parts: Coroutine[Any, Any, object]) -> None:
    """Run coroutines concurrently. The first failure cancels the others and is raised.

    `asyncio.TaskGroup` would raise an `ExceptionGroup` instead.
    """
    tasks = [asyncio.create_task(part) for part in parts]
    if not tasks:
        return
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    finally:
        await cancel_all(tasks)
    for task in done:
        task.result()


async def wait_for_first(*waits: Coroutine[Any, Any, object]) -> None:
    """Wait until the first of these is over, then cancel the others."""
    tasks = [asyncio.create_task(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        await cancel_all(tasks)


async def run_with_background(
    main: Coroutine[Any, Any, T], background: Coroutine[Any, Any, None]
) -> T:
    """Return the result of `main`. A failure of `background` cancels `main` and is raised."""
    body, other = asyncio.create_task(main), asyncio.create_task(background)
    try:
        await asyncio.wait({body, other}, return_when=asyncio.FIRST_COMPLETED)
        if not body.done():
            other.result()
        return await body
    finally:
        await cancel_all((body, other))


def cancelled_from_outside() -> bool:
    """Return whether the running task itself was cancelled, rather than one that it awaits."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


class Deadline:
    """A time limit of `total` seconds whose error names the awaited condition.

    `what` names the whole operation ("step 3"), and `report` describes its present state. `field`
    is the job field or setting that sets the limit.
    """

    def __init__(
        self,
        what: str,
        total: float,
        field: str,
        on_report: Callable[[str], None] | None = None,
    ) -> None:
        self._what = what
        self._total = total
        self._field = field
        self._on_report = on_report
        self._end = time.monotonic() + total
        self.state = what

    @property
    def left(self) -> float:
        """Seconds left; raise `DeadlineExceeded` when there are none."""
        left = self._end - time.monotonic()
        if left <= 0:
            raise self.exhausted()
        return left

    def report(self, state: str) -> None:
        """Set the awaited condition."""
        self.state = state
        if self._on_report is not None:
            self._on_report(state)

    async def wait(self, awaitable: Awaitable[T]) -> T:
        """Return the result of `awaitable`. Raises `DeadlineExceeded` naming the awaited
        condition."""
        try:
            left = self.left
        except DeadlineExceeded:
            if asyncio.iscoroutine(awaitable):
                awaitable.close()
            raise
        timer = asyncio.timeout(left)
        try:
            async with timer:
                return await awaitable
        except TimeoutError:
            if timer.expired():
                raise self.exhausted() from None
            raise

    def exhausted(self) -> DeadlineExceeded:
        """Return the error that names the awaited condition and the waiting time."""
        doing = "" if self.state == self._what else f": {self.state}"
        return DeadlineExceeded(
            f"{self._what} did not end within {self._total:g} s{doing}",
            field=self._field,
            value=f"{self._total:g}",
            remedy="See the notices above for the failure; raise the limit if this needs longer.",
        )


class RetryBackoff:
    """Pauses between attempts at work that moves from worker to worker, until a deadline.

    This is not the retry of a call, which every stub does (`troupe.rpc.RetryPolicy.run`). Here a
    worker was lost or has lost its state, so other work follows, such as binding elsewhere.
    `troupe.rpc.Attempts` counts the attempts and sets the pauses.
    """

    def __init__(self, deadline: Deadline) -> None:
        self._deadline = deadline
        self._attempts = Attempts(_BACKOFF, retryable=self._is_transient)
        self._internal = 0

    @property
    def count(self) -> int:
        """Failed attempts since the last progress."""
        return self._attempts.failures

    @property
    def worth_a_notice(self) -> bool:
        """Whether to log this attempt: true at 1, 2, 4, ..., so that the log is not flooded."""
        return self.count & (self.count - 1) == 0

    async def failed(self, error: TroupeError) -> None:
        """Wait before the next attempt; raise `error` if it is final."""
        await self._deadline.wait(asyncio.sleep(self._attempts.next_delay(error)))

    def reset(self) -> None:
        """Forget the attempts so far after progress."""
        self._attempts.reset()
        self._internal = 0

    def _is_transient(self, error: Exception) -> bool:
        if isinstance(error, Internal):
            self._internal += 1
            return self._internal <= _MAX_INTERNAL
        return isinstance(error, TroupeError) and is_transient(error)
