"""A store on the shared Redis, and a step to play with."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from services.chassis.app import serve
from services.experience_store.database import Database
from services.experience_store.server import StoreSettings, make_service
from services.experience_store.store import Store
from tests.support.experience import Stage, make_stage
from tests.support.experience_client import Client
from troupe.rpc import ClientSettings, connect, new_id


@pytest.fixture(autouse=True, scope="module")
def _fresh(no_old_jobs: None) -> None:
    """Each module begins without the jobs of others."""


@pytest.fixture
async def store(redis_url: str) -> AsyncIterator[Store]:
    """A started store."""
    store = Store(Database(redis_url), keep_steps=2)
    await store.start()
    yield store
    await store.stop()


@pytest.fixture
async def stage(store: Store) -> Stage:
    """A job of two policies with step 0 open: queries q0 and q1, two trajectories each."""
    return await make_stage(store, new_id("job"))


@pytest.fixture
async def held(store: Store) -> Stage:
    """Queries q0, q1 and q2 of two trajectories in step 0, which is held open."""
    return await make_stage(store, new_id("job"), queries=("q0", "q1", "q2"), held_open=True)


@pytest.fixture
async def client(redis_url: str) -> AsyncIterator[Client]:
    """Calls to a served store."""
    settings = StoreSettings(redis_url=redis_url, drain_seconds=0.2, stream_drain_seconds=0)
    async with serve(make_service, settings) as server:
        channel = connect(server.address, ClientSettings())
        yield Client(channel)
        await channel.close(None)
