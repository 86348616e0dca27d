"""The store on a newer Redis than the embedded cluster's, if there is one.

`TROUPE_TEST_REDIS_7` names a redis-server; by default the one on the PATH is taken.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from services.experience_store.database import Database
from services.experience_store.store import Store
from tests.experience_store.test_store_audit import audit, play
from tests.experience_store.test_store_high_water import counted, held
from tests.support.experience import make_stage
from tests.support.redis_server import RedisServer
from troupe.rpc import ResourceExhausted, Unavailable, new_id


def newer_redis() -> str:
    """Return the path of a redis-server of version 7 or newer; skip the test if there is none."""
    path = os.environ.get("TROUPE_TEST_REDIS_7") or shutil.which("redis-server")
    if not path:
        pytest.skip("no redis-server on the PATH")
    said = subprocess.run([path, "--version"], capture_output=True, text=True, check=True).stdout
    found = re.search(r"v=(\d+)\.", said)
    if found is None or int(found.group(1)) < 7:
        pytest.skip(f"{path} is older than 7: {said.strip()}")
    return path


async def test_the_life_of_a_job_on_redis_7(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TROUPE_TEST_REDIS_SERVER", newer_redis())
    server = RedisServer(tmp_path, durable=True)
    server.start()
    store = Store(Database(server.url, timeout=0.5), keep_steps=2)
    await store.start()
    assert int((await store.database.info())["redis_version"].split(".")[0]) >= 7
    stage = await make_stage(store, new_id("job"), max_uses=2)
    await play(stage, 3)
    server.kill()
    with pytest.raises(Unavailable):
        await stage.append(*stage.trajectories[2])
    server.start()
    # Errors inside scripts have other codes than in Redis 6.
    with server.client() as client:
        client.config_set("maxmemory", 1)
        with pytest.raises(ResourceExhausted, match="memory limit"):
            await stage.append(*stage.trajectories[2])
        client.config_set("maxmemory", 0)
        client.replicaof("127.0.0.1", "1")  # type: ignore[no-untyped-call]
        with pytest.raises(Unavailable, match="takes no writes"):
            await stage.append(*stage.trajectories[2])
        client.replicaof("NO", "ONE")  # type: ignore[no-untyped-call]
        client.script_flush()
    for place in stage.trajectories[2:]:
        await stage.append(*place)
    assert list((await audit(stage)).violations) == []
    assert await counted(stage) == await held(stage)
    await store.stop()
    server.stop()
