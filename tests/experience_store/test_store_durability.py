"""Redis is SIGKILLed while rows arrive: with an append-only file, no acknowledged row is lost."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from services.experience_store.database import Database
from services.experience_store.store import Store
from tests.experience_store.test_store_audit import audit, train
from tests.support.experience import Stage, ids_of, make_sample, make_stage
from tests.support.redis_server import RedisServer
from troupe.rpc import TroupeError, new_id

WRITERS = 8
QUERIES = tuple(f"q{number}" for number in range(100))


async def append(stage: Stage, query: str, trajectory: str) -> None:
    rows = [
        make_sample(query, turn, trajectory, policy=policy, tokens=1000)
        for turn, policy in enumerate(stage.policies)
    ]
    # A repeated call names the same attempt.
    await stage.append(query, trajectory, rows, attempt=f"a-{trajectory}")


async def append_until_killed(stage: Stage, some: asyncio.Event) -> set[str]:
    """Append concurrently until Redis is gone; return the acknowledged trajectories."""
    left = stage.trajectories
    acknowledged: set[str] = set()

    async def write() -> None:
        while left:
            query, trajectory = left.pop()
            try:
                await append(stage, query, trajectory)
            except TroupeError:
                return
            acknowledged.add(trajectory)
            if len(acknowledged) == len(stage.trajectories) // 4:
                some.set()

    await asyncio.gather(*(write() for _ in range(WRITERS)))
    return acknowledged


@pytest.mark.parametrize("fsync", ["always", "everysec"])
async def test_acknowledged_writes_survive_a_sigkill_under_load(tmp_path: Path, fsync: str) -> None:
    extra = ("--appendonly", "yes", "--appendfsync", fsync)
    server = RedisServer(tmp_path, extra=extra)
    server.start()
    store = Store(Database(server.url, timeout=0.5))
    await store.start()
    stage = await make_stage(store, new_id("job"), queries=QUERIES, group_size=2)
    some = asyncio.Event()
    writing = asyncio.create_task(append_until_killed(stage, some))
    await some.wait()
    # In a thread: this loop continues to send while Redis dies.
    await asyncio.to_thread(server.kill)
    acknowledged = await writing
    assert 0 < len(acknowledged) < len(stage.trajectories), "killed in the midst of it"
    server.start()
    status = await stage.status()
    lost = acknowledged - status.endings.keys()
    if fsync == "always":
        assert not lost
    # `everysec` may lose the writes during a flush, but never half of one.
    assert list((await audit(stage)).violations) == []
    for place in stage.trajectories:
        await append(stage, *place)
    for policy in stage.policies:
        claim = await stage.claim(policy=policy, samples=4096)
        assert len(ids_of(claim)) == len(set(ids_of(claim))) == len(stage.trajectories)
        await stage.release("trainer", policy=policy)
    await train(stage)
    await asyncio.to_thread(server.kill)
    server.start()
    report = await audit(stage)
    assert list(report.violations) == []
    if fsync == "always":
        assert {policy.trained for policy in report.policies} == {len(stage.trajectories)}
    await store.stop()
    server.stop()
