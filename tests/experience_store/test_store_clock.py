"""Leases while the wall clock of a real Redis jumps."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from services.experience_store.database import Database
from services.experience_store.store import Store
from tests.support.experience import Stage, make_stage
from tests.support.needs import FAKETIME, FAKETIME_LIBRARY
from tests.support.redis_server import RedisServer
from troupe.rpc import new_id

pytestmark = [FAKETIME, pytest.mark.slow]


@pytest.fixture
async def jumping(tmp_path: Path) -> AsyncIterator[tuple[Stage, Callable[[int], None]]]:
    """A job in a separate Redis, and a function that sets that Redis's wall clock, in hours."""
    offset = tmp_path / "offset"
    offset.write_text("+0h")
    environment = {
        "LD_PRELOAD": str(FAKETIME_LIBRARY),
        "FAKETIME_TIMESTAMP_FILE": str(offset),
        "FAKETIME_NO_CACHE": "1",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
    }
    server = RedisServer(tmp_path, environment=environment)
    server.start()
    store = Store(Database(server.url))
    await store.start()
    yield await make_stage(store, new_id("job")), lambda hours: offset.write_text(f"{hours:+d}h")
    await store.stop()
    server.kill()


@pytest.mark.parametrize("hours", [1, -1])
async def test_a_wall_clock_jump_keeps_leases_of_living_claimants_and_frees_those_of_dead_ones(
    jumping: tuple[Stage, Callable[[int], None]], hours: int
) -> None:
    stage, set_clock = jumping
    await stage.append_all()
    before = stage.store.database
    (began, _) = await before.call("EVAL", "return redis.call('TIME')", 1, "x")
    await stage.claim("living", claim="c1", samples=2, lease=120)
    await stage.claim("dead", claim="c2", samples=2, lease=2)
    set_clock(hours)
    (jumped, _) = await before.call("EVAL", "return redis.call('TIME')", 1, "x")
    assert abs(int(jumped) - int(began)) > 1800
    assert await stage.renew("living", lease=120) == 1
    await stage.until({"ready": 2, "claimed": 2})
    assert len((await stage.claim("living", claim="c3")).samples) == 2
    assert not (await stage.commit(["c1", "c3"], "living"))[1]
