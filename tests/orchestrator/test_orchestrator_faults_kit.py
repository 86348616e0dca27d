"""Deadlines, attempts, and running coroutines at the same time."""

import asyncio
import math
from collections.abc import Callable

import pytest

from services.orchestrator.errors import (
    Deadline,
    RetryBackoff,
    is_transient,
    job_fault,
    run_all,
    run_with_background,
)
from troupe.rpc import (
    DeadlineExceeded,
    FailedPrecondition,
    Internal,
    InvalidArgument,
    ResourceExhausted,
    TroupeError,
    Unavailable,
)
from troupe.v1 import common_pb2 as common_pb


@pytest.mark.parametrize(
    ("error", "transient"),
    [
        (Unavailable("away"), True),
        (DeadlineExceeded("slow"), True),
        (FailedPrecondition("?", kind="job_not_prepared"), True),
        (ResourceExhausted("full", retry_after_ms=5), True),
        (ResourceExhausted("full"), False),
        (FailedPrecondition("?"), False),
        (InvalidArgument("wrong"), False),
        (job_fault(common_pb.Problem(kind="deadline_exceeded", message="the job's own")), False),
    ],
)
def test_transient_errors_are_those_that_repetition_can_cure(
    error: TroupeError, transient: bool
) -> None:
    assert is_transient(error) is transient


async def test_a_deadline_says_what_it_waited_for() -> None:
    said: list[str] = []
    deadline = Deadline("step 3", 0.05, "limits.step_seconds", said.append)
    deadline.report("waiting for 2 trajectories")
    with pytest.raises(DeadlineExceeded) as caught:
        await deadline.wait(asyncio.sleep(10))
    error = caught.value
    assert str(error).startswith(
        "limits.step_seconds = 0.05: step 3 did not end within 0.05 s: waiting for 2 trajectories"
    )
    assert said == ["waiting for 2 trajectories"]
    with pytest.raises(DeadlineExceeded):
        await deadline.wait(asyncio.sleep(10))  # no warning of a coroutine never awaited


async def test_a_deadline_passes_on_the_awaited_call_s_own_timeout() -> None:
    deadline = Deadline("step 3", 10, "limits.step_seconds")
    assert await deadline.wait(asyncio.sleep(0, "done")) == "done"

    async def own_timeout() -> None:
        raise TimeoutError("its own")

    with pytest.raises(TimeoutError, match="its own"):
        await deadline.wait(own_timeout())


async def test_a_permanent_error_ends_attempts_at_once() -> None:
    attempts = RetryBackoff(Deadline("x", 10, "f"))
    with pytest.raises(InvalidArgument):
        await attempts.failed(InvalidArgument("wrong"))
    await attempts.failed(Unavailable("away", retry_after_ms=1))


async def test_attempts_give_an_internal_fault_three_chances() -> None:
    attempts = RetryBackoff(Deadline("x", math.inf, "f"))
    for _ in range(3):
        await attempts.failed(Internal("bug", retry_after_ms=1))
    with pytest.raises(Internal):
        await attempts.failed(Internal("bug", retry_after_ms=1))


async def test_attempts_are_noticed_ever_more_seldom() -> None:
    attempts = RetryBackoff(Deadline("x", 10, "f"))
    noticed = []
    for _ in range(9):
        await attempts.failed(Unavailable("away", retry_after_ms=0))
        noticed.append(attempts.worth_a_notice)
    assert [n + 1 for n, yes in enumerate(noticed) if yes] == [1, 2, 4, 8]


async def test_together_the_first_failure_ends_all() -> None:
    ended: list[str] = []

    async def long() -> None:
        try:
            await asyncio.sleep(10)
        finally:
            ended.append("long")

    async def broken() -> None:
        await asyncio.sleep(0.01)
        raise Unavailable("broken")

    with pytest.raises(Unavailable):
        await run_all(long(), broken())
    assert ended == ["long"]
    await run_all()
    await run_all(asyncio.sleep(0), asyncio.sleep(0.01))


async def test_together_is_cancelled_together() -> None:
    running = set()

    async def part(n: int) -> None:
        running.add(n)
        try:
            await asyncio.sleep(10)
        finally:
            running.discard(n)

    task = asyncio.create_task(run_all(part(1), part(2)))
    await asyncio.sleep(0.01)
    assert running == {1, 2}
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not running


@pytest.mark.parametrize("fails", [False, True])
async def test_alongside(fails: bool) -> None:
    async def background() -> None:
        await asyncio.sleep(0.01 if fails else 10)
        raise Unavailable("the background broke")

    async def main(wait: Callable[[], float]) -> str:
        await asyncio.sleep(wait())
        return "done"

    if fails:
        with pytest.raises(Unavailable):
            await run_with_background(main(lambda: 10), background())
    else:
        assert await run_with_background(main(lambda: 0.01), background()) == "done"
