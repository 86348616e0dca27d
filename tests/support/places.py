"""Where calls of the reward service run, without a process behind it."""

from __future__ import annotations

import asyncio

from services.reward.executor import CallExecutor
from services.reward.function import RegisteredFunction


class BarePlace(CallExecutor):
    """An executor for hosts, whose subclasses define its calls."""

    warm = False

    def __init__(self, name: str = "place") -> None:
        super().__init__(name)
        # Set by `cancel`, cleared by who begins to run calls.
        self.cancelled = asyncio.Event()

    async def start(self) -> None:
        self.warm = True

    async def stop(self) -> None:
        self.warm = False

    def rest(self) -> None:
        self.warm = False

    async def warm_up(self, function: RegisteredFunction) -> None:
        self.warm = True

    def holds(self, function: RegisteredFunction) -> bool:
        return self.warm

    def cancel(self) -> None:
        self.cancelled.set()
