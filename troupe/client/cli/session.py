"""Where `troupe train` works: a cluster of its own, one that runs here, or one far away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from troupe.client.address import check_address, settings_for
from troupe.client.aio import AsyncClient
from troupe.client.cli.interrupts import Interrupts
from troupe.cluster.access import sign_in_link
from troupe.cluster.daemon import start_detached
from troupe.cluster.embedded import EmbeddedCluster
from troupe.cluster.settings import ClusterSettings
from troupe.cluster.state import ClusterState, running_state


@dataclass(frozen=True)
class Session:
    """A cluster in use."""

    client: AsyncClient
    panel: str
    # Ours: it ends with the command. None: it goes on without us.
    own: EmbeddedCluster | None


@asynccontextmanager
async def open_session(
    settings: ClusterSettings,
    *,
    address: str | None,
    keep_up: bool,
    interrupts: Interrupts,
    say: Callable[[str], None],
) -> AsyncIterator[Session]:
    """Find or start a cluster; one of our own is stopped at the end, whatever happens.

    Raises `Interrupted` when a signal comes while it starts, and what keeps it from starting.
    """
    own: EmbeddedCluster | None = None
    try:
        if address is not None:
            target, panel = check_address(address), ""
        else:
            state = running_state(settings.data_dir)
            if state is not None:
                say(f"using the cluster that runs in {settings.data_dir}")
            elif keep_up:
                say(f"starting a cluster in {settings.data_dir} (`troupe down` stops it)")
                state = await interrupts.guard(asyncio.to_thread(start_detached, settings))
            else:
                say(f"starting a cluster in {settings.data_dir}")
                own = EmbeddedCluster(settings, tell=say)
                state = await interrupts.guard(own.start())
            target, panel = state.orchestrator_address, state.panel_url
            say(_places(state))
        client_settings = settings_for(target, settings.data_dir)
        async with AsyncClient(target, settings=client_settings) as client:
            yield Session(client, panel, own)
    finally:
        if own is not None:
            say("stopping the cluster")
            await own.stop()


def _places(state: ClusterState) -> str:
    panel = f"panel {state.panel_url}, " if state.panel_url else ""
    link = sign_in_link(state)
    opened = f"\nopen the panel with {link} (good once)" if link else ""
    return f"cluster is up: {panel}logs {state.data_dir / 'logs'}{opened}"
