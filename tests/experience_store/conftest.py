"""A store on the shared Redis, and a step to play with."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from services.experience_store.database import Database
from services.experience_store.store import Store
from tests.support.experience import Stage, make_stage
from troupe.rpc import new_id


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
