"""Where calls of the reward service run, without a process behind it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence

from services.reward.call import Call, Outcome
from services.reward.cpu import Lease
from services.reward.function import Function


class BarePlace:
    """A place as hosts know it; what its calls do is said by who derives from it."""

    def __init__(self, name: str = "place") -> None:
        self.name, self.restarts, self.lived = name, 0, 0.0
        self.warm = False
        # Set by `cancel`, cleared by who begins to run calls.
        self.cancelled = asyncio.Event()

    async def start(self) -> None:
        self.warm = True

    async def stop(self) -> None:
        self.warm = False

    def rest(self) -> None:
        self.warm = False

    async def warm_up(self, function: Function) -> None:
        self.warm = True

    def holds(self, function: Function) -> bool:
        return self.warm

    def suits(self, function: Function) -> bool:
        return True

    def cancel(self) -> None:
        self.cancelled.set()

    def run_many(
        self, function: Function, calls: Sequence[Call], lease: Lease | None = None
    ) -> AsyncGenerator[tuple[int, Outcome]]:
        raise NotImplementedError
