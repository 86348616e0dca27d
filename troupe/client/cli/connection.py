"""Runs one call of the asyncio client for a command."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

from troupe.client.aio import AsyncClient, resolve_address, settings_for
from troupe.rpc.retry import RetryPolicy

T = TypeVar("T")
# A person waits: enough for a restart of the orchestrator, not for a mistyped address.
_PATIENCE = RetryPolicy(max_attempts=7)


def call(
    use: Callable[[AsyncClient], Awaitable[T]], *, address: str | None, data_dir: Path | None
) -> T:
    """`use(client)` on the cluster at `address`, else on the one that runs in `data_dir`."""

    async def run() -> T:
        target = resolve_address(address, data_dir)
        settings = settings_for(target, data_dir).model_copy(update={"retry": _PATIENCE})
        async with AsyncClient(target, settings=settings) as client:
            return await use(client)

    return asyncio.run(run())
