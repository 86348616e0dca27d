"""A task that runs beside the calls, until it is told to end."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine
from typing import Any


class Background:
    """At most one task; starting and ending belong to one event loop."""

    def __init__(self) -> None:
        self._task: asyncio.Task[None] | None = None

    def start(self, work: Coroutine[Any, Any, None], name: str) -> None:
        """Run `work`, which never ends by itself."""
        self._task = asyncio.create_task(work, name=name)

    async def stop(self) -> None:
        """End it, if it was started. Repeatable."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
            self._task = None
