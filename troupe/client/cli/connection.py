"""Runs one call of the asyncio client for a command."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

from troupe.client.address import data_directory, resolve_address
from troupe.client.aio import AsyncClient
from troupe.client.cli.session import embedded_client_settings
from troupe.cluster.state import running_state
from troupe.rpc.retry import RetryPolicy
from troupe.rpc.settings import ClientSettings

T = TypeVar("T")
# A person waits: enough for a restart of the orchestrator, not for a mistyped address.
_PATIENCE = RetryPolicy(max_attempts=7)


def call(
    use: Callable[[AsyncClient], Awaitable[T]], *, address: str | None, data_dir: Path | None
) -> T:
    """`use(client)` on the cluster at `address`, else on the one that runs in `data_dir`."""

    async def run() -> T:
        target = resolve_address(address, data_dir)
        state = running_state(data_directory(data_dir))
        embedded = state is not None and state.orchestrator_address == target
        settings = embedded_client_settings() if embedded else ClientSettings.of_environment()
        settings = settings.model_copy(update={"retry": _PATIENCE})
        async with AsyncClient(target, settings=settings) as client:
            return await use(client)

    return asyncio.run(run())
