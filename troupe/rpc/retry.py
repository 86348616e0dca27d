"""Retries: the number of attempts, the pauses between them, and the errors that are retried.

Every retry loop of the product is one of two forms:

- `RetryPolicy.run(call, timeout)` (and `run_sync`) repeats one call. Channels do this for every
  unary RPC: each mutating RPC is idempotent by its request id, so it may be sent again whenever
  the client cannot tell whether it arrived.
- A custom loop, which does something between two attempts, counts them with `Attempts`:

      attempts = Attempts(policy, retryable=lambda error: isinstance(error, Unavailable))
      while True:
          try:
              return await call()
          except TroupeError as error:
              log.warning("store unreachable", error=str(error), attempt=attempts.failures + 1)
              await attempts.failed(error)  # waits for the backoff, or raises `error`
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final, TypeVar

from troupe.rpc.errors import DeadlineExceeded, ResourceExhausted, TroupeError, Unavailable

T = TypeVar("T")
# Backoff reaches its maximum long before; a larger exponent would overflow a float.
_MAX_DOUBLINGS: Final = 64
# An attempt may run out of time this much before the deadline by our clock.
_DEADLINE_SLACK: Final = 0.1


@dataclass(frozen=True)
class RetryPolicy:
    """The number of attempts, the pauses between them, and the errors that are retried.

    Backoff grows from `initial_backoff` by `multiplier` to `max_backoff` seconds; each wait is
    drawn from [1 - jitter, 1] times the backoff, so that clients do not return in step. An error's
    `retry_after_ms` overrides it. The caller's deadline covers all attempts together.
    """

    # None: no limit.
    max_attempts: int | None = 10
    initial_backoff: float = 0.1
    # A restarted service is up within a few seconds; retry soon enough to notice.
    max_backoff: float = 3.0
    multiplier: float = 2.0
    jitter: float = 0.5
    # Fixes the jitter (tests); otherwise every client draws its own.
    seed: int | None = None

    def retryable(self, error: Exception) -> bool:
        """Return whether sending the same call again can help."""
        if isinstance(error, Unavailable):
            return True
        return isinstance(error, ResourceExhausted) and error.retry_after_ms is not None

    def backoff(self, attempt: int, error: Exception, rng: random.Random) -> float:
        """Return the seconds to wait after the failed `attempt` (the first is 1)."""
        if isinstance(error, TroupeError) and error.retry_after_ms is not None:
            return error.retry_after_ms / 1000
        growth = self.multiplier ** min(attempt - 1, _MAX_DOUBLINGS)
        full = min(self.max_backoff, self.initial_backoff * growth)
        return full * (1 - self.jitter * rng.random())

    async def run(self, call: Callable[[float | None], Awaitable[T]], timeout: float | None) -> T:
        """Await `call(seconds left)` until it succeeds. `call` raises `TroupeError` to fail.

        Raises an error that is not retryable at once, otherwise the last error when attempts or
        time run out, with the number of attempts and their duration.
        """
        attempts = Attempts(self, timeout)
        while True:
            left = attempts.left()
            try:
                return await call(left)
            except TroupeError as error:
                delay = attempts.next_delay(error)
            await asyncio.sleep(delay)

    def run_sync(self, call: Callable[[float | None], T], timeout: float | None) -> T:
        """Do the same as `run` for a caller without an event loop."""
        attempts = Attempts(self, timeout)
        while True:
            left = attempts.left()
            try:
                return call(left)
            except TroupeError as error:
                delay = attempts.next_delay(error)
            time.sleep(delay)


class Attempts:
    """The attempts at one operation: counts failures, decides on retries, waits before them."""

    def __init__(
        self,
        policy: RetryPolicy,
        timeout: float | None = None,
        retryable: Callable[[Exception], bool] | None = None,
    ) -> None:
        """Allow attempts to begin for `timeout` seconds from now (None: forever). `retryable` tells
        which errors are worth another attempt; the default is the policy's."""
        self._policy = policy
        self._retryable = retryable or policy.retryable
        self._start = time.monotonic()
        self._deadline = None if timeout is None else self._start + timeout
        # Made when first needed: few calls fail, and a seed is a system call.
        self._rng: random.Random | None = None
        self.failures = 0
        """The number of failed attempts since the beginning, or since `reset`."""
        self._answer: TroupeError | None = None

    def left(self) -> float | None:
        """Seconds until the deadline, at least a millisecond; None without one."""
        if self._deadline is None:
            return None
        return max(0.001, self._deadline - time.monotonic())

    def next_delay(self, error: Exception) -> float:
        """Count a failed attempt; return the seconds until the next one.

        Raises `error` if it is not retryable, or attempts or time are used up. A `TroupeError` then
        has the number of attempts and their duration. When the deadline cuts off the last attempt,
        the error of the attempt before it is raised, because it has the reason.
        """
        self.failures += 1
        if not self._retryable(error):
            if self._answer is not None and isinstance(error, DeadlineExceeded) and self._is_over():
                raise self._counted(self._answer) from error
            raise error
        if isinstance(error, TroupeError):
            self._answer = error
        if self._rng is None:
            self._rng = random.Random(self._policy.seed)
        delay = self._policy.backoff(self.failures, error, self._rng)
        now = time.monotonic()
        late = self._deadline is not None and now + delay >= self._deadline
        most = self._policy.max_attempts
        if late or (most is not None and self.failures >= most):
            raise self._counted(error) if isinstance(error, TroupeError) else error
        return delay

    async def failed(self, error: Exception) -> None:
        """Count a failed attempt and wait until the next. Raises `error` as `next_delay` does."""
        await asyncio.sleep(self.next_delay(error))

    def reset(self) -> None:
        """Restart the count after an attempt that made progress."""
        self.failures = 0
        self._answer = None

    def _is_over(self) -> bool:
        return self._deadline is not None and (time.monotonic() + _DEADLINE_SLACK >= self._deadline)

    def _counted(self, error: TroupeError) -> TroupeError:
        if self.failures > 1:
            seconds = time.monotonic() - self._start
            error.message += f" ({self.failures} attempts in {seconds:.1f} s)"
        return error


NO_RETRY: Final = RetryPolicy(max_attempts=1)
