"""What a trajectory that was begun ahead of its step may not do yet."""

from __future__ import annotations

import asyncio
import time
from contextlib import nullcontext

from services.rollout.trajectories.clock import TrajectoryClock


class Ahead:
    """Where a trajectory waits until its step is open: before it ends, and before a turn whose
    policy has not got its new weights.

    It may load its query, reset environments and call tools: nothing of that depends on weights.
    Its clock stands still while it waits.
    """

    def __init__(self, ahead: bool) -> None:
        self._over = not ahead
        # By policy; with an empty name that of the end.
        self._open: dict[str, asyncio.Event] = {}
        self._since: float | None = None
        # Seconds that it waited, from the first time until its step was open.
        self.seconds = 0.0

    @property
    def waits(self) -> bool:
        """Whether its step is not open yet."""
        return not self._over

    def release(self, policy: str) -> None:
        """The policy has the weights that the step before made."""
        self._of(policy).set()

    def end(self) -> None:
        """Its step is open. Repeatable."""
        if self._since is not None and self.waits:
            self.seconds = time.monotonic() - self._since
        self._over = True
        for event in self._open.values():
            event.set()

    async def wait(self, policy: str = "", clock: TrajectoryClock | None = None) -> None:
        """Return once its step is open, or a turn of `policy` may be drawn before."""
        if self._over:
            return
        self._since = self._since or time.monotonic()
        with clock.still() if clock is not None else nullcontext():
            await self._of(policy).wait()

    def _of(self, policy: str) -> asyncio.Event:
        return self._open.setdefault(policy, asyncio.Event())
