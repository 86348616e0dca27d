"""Begins a trajectory anew whose environment failed."""

from __future__ import annotations

import asyncio
import random
from typing import Final

import structlog

from services.rollout.clock import TrajectoryClock
from services.rollout.workflow_call import FATAL
from troupe.rpc import RetryPolicy
from troupe.rpc.errors import Unavailable
from troupe.workflow import ToolError, WorkflowError
from troupe.workflow.environments.errors import EnvironmentFault

log = structlog.get_logger(__name__)

_BACKOFF: Final = RetryPolicy(initial_backoff=0.2, max_backoff=5.0)
# Name of the trajectory's metric that counts them.
RETRIES: Final = "environment_retries"


class Attempts:
    """The attempts of one trajectory, `limits.trajectory_retries` after the first, all of them by
    one clock. Each has the trajectory's seed, so that it differs only in what the world does."""

    def __init__(self, retries: int, clock: TrajectoryClock, seed: int) -> None:
        self._left = retries
        self._clock = clock
        self._jitter = random.Random(seed)
        self.made = 0
        """Attempts that failed and were followed by another."""

    async def again(self, error: WorkflowError) -> bool:
        """Pause before the next attempt. There is none when `error` is not the environment's, and
        when attempts or time are spent; then it says how often it was tried."""
        if not is_environments(error):
            return False
        pause = _BACKOFF.backoff(self.made + 1, Unavailable(error.message), self._jitter)
        if self._left == 0 or pause >= self._clock.left:
            if self.made:
                error.message += f" (tried {self.made + 1} times)"
            return False
        self._left -= 1
        self.made += 1
        log.info("a trajectory begins anew", attempt=self.made + 1, reason=str(error))
        with self._clock.elsewhere():
            await asyncio.sleep(pause)
        return True


def is_environments(error: WorkflowError) -> bool:
    """Whether the world that a workflow acts in failed it, and not the workflow itself, nor what
    every attempt would meet again."""
    return isinstance(error, ToolError | EnvironmentFault) and error.kind not in FATAL
