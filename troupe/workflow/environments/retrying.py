"""Tries the beginning of an episode again, by the project's one retry policy."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, TypeVar

from troupe.rpc.errors import Unavailable
from troupe.rpc.retry import RetryPolicy
from troupe.workflow.environments.errors import EnvironmentFault

if TYPE_CHECKING:
    from troupe.workflow.environments.host import FaultLimits

T = TypeVar("T")


async def retried(attempt: Callable[[int], Awaitable[T]], limits: FaultLimits) -> T:
    """Await `attempt(number)` until it succeeds; number counts from 0.

    Raises the last `EnvironmentFault`, saying how often it was tried.
    """
    policy = RetryPolicy(
        max_attempts=limits.retries + 1,
        initial_backoff=limits.backoff_seconds,
        max_backoff=limits.max_backoff_seconds,
    )
    number = 0

    async def once(_: float | None) -> T:
        nonlocal number
        number += 1
        try:
            return await attempt(number - 1)
        except EnvironmentFault as fault:
            raise _FailedAttempt(fault) from fault

    try:
        return await policy.run(once, None)
    except _FailedAttempt as last:
        fault = last.fault
        raise EnvironmentFault(
            f"{fault.message} (tried {number} times)" if number > 1 else fault.message,
            reason=fault.reason,
            environment=fault.environment,
            remedy=fault.remedy,
            traceback=fault.traceback,
        ) from fault


class _FailedAttempt(Unavailable):
    """Carries a fault through the retry policy, which knows errors of calls only."""

    def __init__(self, fault: EnvironmentFault) -> None:
        super().__init__(fault.message)
        self.fault = fault
