"""The one place where calls are repeated.

Every mutating RPC is idempotent by its request id, so a call may be sent again whenever nobody
can tell whether it arrived.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final, TypeVar

from troupe.rpc.errors import ResourceExhausted, TroupeError, Unavailable

T = TypeVar("T")


@dataclass(frozen=True)
class RetryPolicy:
    """How often, how long apart, and for which errors a call is repeated.

    Backoff grows from `initial_backoff` by `multiplier` to `max_backoff` seconds; each wait is
    drawn from [1 - jitter, 1] times that, so that clients do not come back in step. A server that
    says `retry_after_ms` is believed. The caller's deadline covers all attempts together.
    """

    max_attempts: int = 10
    initial_backoff: float = 0.1
    # A restarted service is up in a few seconds: look again soon enough to notice.
    max_backoff: float = 3.0
    multiplier: float = 2.0
    jitter: float = 0.5
    # Fixes the jitter (tests); otherwise every client draws its own.
    seed: int | None = None

    def retryable(self, error: TroupeError) -> bool:
        """Whether sending the same call again can help."""
        if isinstance(error, Unavailable):
            return True
        return isinstance(error, ResourceExhausted) and error.retry_after_ms is not None

    def backoff(self, attempt: int, error: TroupeError, rng: random.Random) -> float:
        """Seconds to wait after the failed `attempt` (the first is 1)."""
        if error.retry_after_ms is not None:
            return error.retry_after_ms / 1000
        full = min(self.max_backoff, self.initial_backoff * self.multiplier ** (attempt - 1))
        return full * (1 - self.jitter * rng.random())

    async def run(self, call: Callable[[float | None], Awaitable[T]], timeout: float | None) -> T:
        """Await `call(seconds left)` until it succeeds. `call` raises `TroupeError` to fail.

        Raises an error that is not retryable at once, and otherwise the last one when attempts or
        time run out, saying how often and how long it was tried.
        """
        attempts = _Attempts(self, timeout)
        while True:
            left = attempts.left()
            try:
                return await call(left)
            except TroupeError as error:
                delay = attempts.next_delay(error)
            await asyncio.sleep(delay)

    def run_sync(self, call: Callable[[float | None], T], timeout: float | None) -> T:
        """`run` for a caller without an event loop."""
        attempts = _Attempts(self, timeout)
        while True:
            left = attempts.left()
            try:
                return call(left)
            except TroupeError as error:
                delay = attempts.next_delay(error)
            time.sleep(delay)


class _Attempts:
    """Counts the attempts of one call and the time that is left for them."""

    def __init__(self, policy: RetryPolicy, timeout: float | None) -> None:
        self._policy = policy
        self._start = time.monotonic()
        self._deadline = None if timeout is None else self._start + timeout
        self._count = 0
        # Made when first needed: few calls fail, and a seed is a system call.
        self._rng: random.Random | None = None

    def left(self) -> float | None:
        if self._deadline is None:
            return None
        return max(0.001, self._deadline - time.monotonic())

    def next_delay(self, error: TroupeError) -> float:
        """Seconds until the next attempt; raises `error` when there is none."""
        self._count += 1
        if not self._policy.retryable(error):
            raise error
        if self._rng is None:
            self._rng = random.Random(self._policy.seed)
        delay = self._policy.backoff(self._count, error, self._rng)
        now = time.monotonic()
        late = self._deadline is not None and now + delay >= self._deadline
        if late or self._count >= self._policy.max_attempts:
            if self._count > 1:
                error.message += f" ({self._count} attempts in {now - self._start:.1f} s)"
            raise error
        return delay


NO_RETRY: Final = RetryPolicy(max_attempts=1)
