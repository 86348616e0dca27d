"""Trajectories that begin before their step is open (`pipeline.early_start`)."""

from __future__ import annotations

import asyncio
import time
from contextlib import nullcontext

from services.rollout.trajectories.clock import TrajectoryClock


class EarlyStartGate:
    """Holds an early trajectory back until its step is open: before its end, and before each turn
    whose policy does not have its new weights yet.

    The trajectory may load its query, reset environments and call tools, because none of that
    depends on weights. Its clock stops while it waits.
    """

    def __init__(self, early: bool) -> None:
        self._step_open = not early
        # By policy; the empty name is for the end of the trajectory.
        self._open: dict[str, asyncio.Event] = {}
        self._since: float | None = None
        # Seconds from the first wait until the step was open.
        self.seconds = 0.0

    @property
    def waits(self) -> bool:
        """Whether the trajectory's step is not open yet."""
        return not self._step_open

    def policy_updated(self, policy: str) -> None:
        """Allow turns of a policy: its engines have the weights of the previous step."""
        self._event(policy).set()

    def open_step(self) -> None:
        """Allow everything: the step is open. Repeatable."""
        if self._since is not None and self.waits:
            self.seconds = time.monotonic() - self._since
        self._step_open = True
        for event in self._open.values():
            event.set()

    async def wait(self, policy: str = "", clock: TrajectoryClock | None = None) -> None:
        """Wait until the step is open or, for a turn, until `policy` is updated."""
        if self._step_open:
            return
        self._since = self._since or time.monotonic()
        with clock.paused() if clock is not None else nullcontext():
            await self._event(policy).wait()

    def _event(self, policy: str) -> asyncio.Event:
        return self._open.setdefault(policy, asyncio.Event())
