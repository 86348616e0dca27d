"""Faults of workers: which ones repetition can cure, how long to be patient, what to say."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Final, TypeVar

from troupe.rpc import (
    Aborted,
    DeadlineExceeded,
    FailedPrecondition,
    Internal,
    ResourceExhausted,
    RetryPolicy,
    TroupeError,
    Unavailable,
)
from troupe.v1 import common_pb2 as pb

T = TypeVar("T")

# The state of the worker, not of the job, is at fault: prepare or bind it again.
RENEWABLE: Final = frozenset({"job_not_prepared", "not_bound", "step_in_progress"})
_TRANSIENT: Final = (Unavailable, DeadlineExceeded, Aborted)
# A fault inside a worker may pass; one that keeps coming back is a bug.
_MAX_INTERNAL: Final = 3
_BACKOFF: Final = RetryPolicy(initial_backoff=0.1, max_backoff=3.0, multiplier=2.0)


def is_transient(error: TroupeError) -> bool:
    """Whether the same request can succeed later or elsewhere."""
    if isinstance(error, _TRANSIENT) or error.kind in RENEWABLE:
        return True
    return isinstance(error, ResourceExhausted) and error.retry_after_ms is not None


def job_fault(problem: pb.Problem) -> FailedPrecondition:
    """The error of a fault of the job's own code or configuration, which nothing cures."""
    return FailedPrecondition(
        problem.message,
        kind=problem.kind or "job_fault",
        field=problem.field if problem.HasField("field") else None,
        value=problem.value if problem.HasField("value") else None,
        remedy=problem.remedy if problem.HasField("remedy") else None,
    )


async def together(*parts: Coroutine[Any, Any, object]) -> None:
    """Run all parts at once; the first that fails cancels the others and its error is raised."""
    tasks = [asyncio.create_task(part) for part in parts]
    if not tasks:
        return
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    finally:
        # Cancelling what is done has no effect.
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in done:
        task.result()


async def either(*waits: Coroutine[Any, Any, object]) -> None:
    """Return when the first of these is over; the others are cancelled."""
    tasks = [asyncio.create_task(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def alongside(main: Coroutine[Any, Any, T], background: Coroutine[Any, Any, None]) -> T:
    """The result of `main`, while `background` runs; its failure cancels `main` and is raised."""
    body, aside = asyncio.create_task(main), asyncio.create_task(background)
    try:
        await asyncio.wait({body, aside}, return_when=asyncio.FIRST_COMPLETED)
        if not body.done():
            aside.result()
        return await body
    finally:
        body.cancel()
        aside.cancel()
        await asyncio.gather(body, aside, return_exceptions=True)


def cancelled_from_outside() -> bool:
    """Whether the running task was told to stop, rather than one that it awaits."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


class Deadline:
    """A deadline that knows what is being waited for, so that it can say so when it ends.

    `total` seconds in all; `what` names the whole undertaking ("step 3"), `say` its present state.
    `field` is the setting that bounds it.
    """

    def __init__(
        self,
        what: str,
        total: float,
        field: str,
        on_say: Callable[[str], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._what = what
        self._total = total
        self._field = field
        self._on_say = on_say
        self._clock = clock
        self._end = clock() + total
        self.state = what

    @property
    def left(self) -> float:
        """Seconds left; raises `DeadlineExceeded` when there are none."""
        left = self._end - self._clock()
        if left <= 0:
            raise self.exhausted()
        return left

    def say(self, state: str) -> None:
        """What is being waited for now."""
        self.state = state
        if self._on_say is not None:
            self._on_say(state)

    async def wait(self, awaitable: Awaitable[T], at_most: float | None = None) -> T:
        """Await, at most until the end: then `DeadlineExceeded` names what was waited for.

        `at_most` seconds pass: TimeoutError.
        """
        try:
            left = self.left
        except DeadlineExceeded:
            if asyncio.iscoroutine(awaitable):
                awaitable.close()
            raise
        timer = asyncio.timeout(left if at_most is None else min(left, at_most))
        try:
            async with timer:
                return await awaitable
        except TimeoutError:
            if timer.expired() and (at_most is None or left <= at_most):
                raise self.exhausted() from None
            raise

    def exhausted(self) -> DeadlineExceeded:
        """The error that says what was waited for, and how long."""
        doing = "" if self.state == self._what else f": {self.state}"
        return DeadlineExceeded(
            f"{self._what} did not end within {self._total:g} s{doing}",
            field=self._field,
            value=f"{self._total:g}",
            remedy="See the notices above for what failed; raise the limit if it needs longer.",
        )


class RetryBackoff:
    """Counts attempts at one thing; decides whether to go on, waits longer each time."""

    def __init__(self, patience: Deadline) -> None:
        self._patience = patience
        self._rng = random.Random()
        self._internal = 0
        self.count = 0

    @property
    def worth_a_notice(self) -> bool:
        """True before and at the attempts 1, 2, 4, ...: what lasts must not flood the log."""
        return self.count & (self.count - 1) == 0

    async def failed(self, error: TroupeError) -> None:
        """Wait before the next attempt; raises `error` when there should be none."""
        self.count += 1
        if isinstance(error, Internal):
            self._internal += 1
            if self._internal > _MAX_INTERNAL:
                raise error
        elif not is_transient(error):
            raise error
        pause = _BACKOFF.backoff(self.count, error, self._rng)
        await self._patience.wait(asyncio.sleep(pause))

    def reset(self) -> None:
        """There was progress: the next fault is a new one."""
        self.count = 0
        self._internal = 0
