"""Repeating calls: which, how often, how long."""

from __future__ import annotations

import asyncio
import random
import time

import pytest

from tests.support.waiting import PATIENCE
from troupe.rpc import (
    NO_RETRY,
    Attempts,
    DeadlineExceeded,
    InvalidArgument,
    ResourceExhausted,
    RetryPolicy,
    Unavailable,
    new_id,
)

QUICK = RetryPolicy(max_attempts=4, initial_backoff=0.001, max_backoff=0.002, seed=0)


class Flaky:
    """Fails with the given errors, then answers."""

    def __init__(self, *failures: Exception) -> None:
        self.failures = list(failures)
        self.left: list[float | None] = []

    def sync(self, left: float | None) -> str:
        self.left.append(left)
        if self.failures:
            raise self.failures.pop(0)
        return "answer"

    async def __call__(self, left: float | None) -> str:
        return self.sync(left)


async def test_unavailable_is_repeated_until_it_answers() -> None:
    call = Flaky(Unavailable("a"), Unavailable("b"))
    assert await QUICK.run(call, 10) == "answer"
    assert len(call.left) == 3
    first, _, last = call.left
    assert first is not None
    assert last is not None
    assert last < first  # all attempts share one deadline


async def test_attempts_end() -> None:
    call = Flaky(*[Unavailable(str(n)) for n in range(9)])
    with pytest.raises(Unavailable, match=r"3 \(4 attempts in"):
        await QUICK.run(call, None)


@pytest.mark.parametrize(
    "reason",
    [ResourceExhausted("the disk is full", retry_after_ms=1), Unavailable("it starts")],
)
async def test_a_deadline_that_cuts_off_the_last_attempt_keeps_the_reason(
    reason: ResourceExhausted | Unavailable,
) -> None:
    async def call(left: float | None) -> str:
        assert left is not None
        if not seen:
            seen.append(left)
            raise reason
        await asyncio.sleep(left)
        raise DeadlineExceeded("no answer within 0.3 s")

    seen: list[float] = []
    with pytest.raises(type(reason), match=rf"{reason.message} \(2 attempts in"):
        await QUICK.run(call, 0.3)


async def test_a_deadline_of_the_server_is_its_own_reason() -> None:
    call = Flaky(Unavailable("it starts"), DeadlineExceeded("the query took too long"))
    with pytest.raises(DeadlineExceeded, match="the query took too long"):
        await QUICK.run(call, 600)


async def test_a_wrong_request_is_not_repeated() -> None:
    call = Flaky(InvalidArgument("wrong"))
    with pytest.raises(InvalidArgument):
        await QUICK.run(call, None)
    assert len(call.left) == 1


async def test_full_is_repeated_only_when_the_server_says_when() -> None:
    with pytest.raises(ResourceExhausted):
        await QUICK.run(Flaky(ResourceExhausted("full")), 5)
    start = time.monotonic()
    assert await QUICK.run(Flaky(ResourceExhausted("full", retry_after_ms=50)), 5) == "answer"
    assert time.monotonic() - start >= 0.05


async def test_no_attempt_starts_that_the_deadline_forbids() -> None:
    call = Flaky(Unavailable("later", retry_after_ms=6_000_000))
    async with asyncio.timeout(PATIENCE):
        with pytest.raises(Unavailable):
            await QUICK.run(call, 4000)


def test_sync_and_no_retry() -> None:
    assert QUICK.run_sync(Flaky(Unavailable("a")).sync, 5) == "answer"
    with pytest.raises(Unavailable):
        NO_RETRY.run_sync(Flaky(Unavailable("a")).sync, 5)


def test_backoff_grows_to_its_bound() -> None:
    policy = RetryPolicy(initial_backoff=1, multiplier=2, max_backoff=5, jitter=0)
    waits = [policy.backoff(n, Unavailable(""), random.Random(0)) for n in range(1, 6)]
    assert waits == [1, 2, 4, 5, 5]
    assert new_id("a") != new_id("a")
    assert new_id("a").startswith("a-")


async def test_a_loop_counts_its_attempts_and_begins_anew_after_progress() -> None:
    attempts = Attempts(QUICK, retryable=lambda error: isinstance(error, OSError))
    for _ in range(2):
        for count in range(1, 4):
            await attempts.failed(OSError())
            assert attempts.failures == count
        attempts.reset()
    with pytest.raises(ValueError, match="worth none"):
        await attempts.failed(ValueError("worth none"))


async def test_a_loop_without_a_limit_waits_its_longest_pause_for_ever() -> None:
    policy = RetryPolicy(max_attempts=None, initial_backoff=1, max_backoff=5, jitter=0)
    attempts = Attempts(policy)
    assert [attempts.next_delay(Unavailable("")) for _ in range(2000)][-1] == 5
    late = Attempts(policy, timeout=0.5)
    with pytest.raises(Unavailable):
        await late.failed(Unavailable("no attempt may begin after the deadline"))
