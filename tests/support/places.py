"""Where calls of the reward service run, without a process behind it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence

from services.reward.call import CallOutcome, FunctionCall
from services.reward.function import RegisteredFunction
from services.reward.groups import CoreLease


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

    async def warm_up(self, function: RegisteredFunction) -> None:
        self.warm = True

    def holds(self, function: RegisteredFunction) -> bool:
        return self.warm

    def suits(self, function: RegisteredFunction) -> bool:
        return True

    def cancel(self) -> None:
        self.cancelled.set()

    def run_many(
        self,
        function: RegisteredFunction,
        calls: Sequence[FunctionCall],
        lease: CoreLease | None = None,
    ) -> AsyncGenerator[tuple[int, CallOutcome]]:
        raise NotImplementedError
