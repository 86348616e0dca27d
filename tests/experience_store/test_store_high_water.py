"""Payload bytes are counted exactly, freed by commits, and bounded by refusing rows."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from services.chassis.app import RunningServer, serve
from services.experience_store.database import Database
from services.experience_store.records import JOBS, NEEDED, JobTableKeys, PolicyKeys
from services.experience_store.server import ExperienceStoreService, StoreSettings, make_service
from services.experience_store.store import MIB, HighWater, Store
from tests.support.experience import Stage, make_sample, make_stage
from tests.support.experience_client import Client
from tests.support.redis_server import RedisServer
from tests.support.waiting import until
from troupe.rpc import NO_RETRY, ClientSettings, ResourceExhausted, connect, new_id
from troupe.v1 import experience_store_pb2 as store_pb


async def counted(stage: Stage) -> dict[str, int]:
    """Return the tables' bytes according to the store."""
    return await stage.store.high_water.of_job(stage.job)


async def held(stage: Stage) -> dict[str, int]:
    """Return the bytes in Redis, value by value."""
    found = {}
    for policy in stage.policies:
        pattern = f"{PolicyKeys(stage.job, policy).base}:*:rows:*"
        total = 0
        for key in await stage.store.database.call("KEYS", pattern.replace("{", "\\{")):
            rows = await stage.store.database.call("HGETALL", key)
            # Without the counts of users of a payload.
            total += sum(len(v) for name, v in rows.items() if name != NEEDED.encode())
        found[policy] = total
    return found


async def test_the_bytes_of_a_table_are_those_of_its_rows(stage: Stage) -> None:
    async def check() -> None:
        assert await counted(stage) == await held(stage)

    await check()
    rows = [make_sample("q0", n, "q0-s0-t0", reward=None, tokens=100 * n + 2) for n in range(4)]
    await stage.append("q0", "q0-s0-t0", rows, attempt="a")
    await stage.append("q0", "q0-s0-t0", rows, attempt="a")
    await stage.append("q0", "q0-s0-t0", rows, attempt="b")
    await check()
    assert (await counted(stage))["solver"] > 1000
    await stage.fill(
        "q0_0_q0-s0-t0", columns={"judge": store_pb.Column(json='"' + "x" * 500 + '"')}
    )
    await stage.fill("q0_0_q0-s0-t0", columns={"judge": store_pb.Column(json='"other"')})
    await check()
    await stage.fill("q0_0_q0-s0-t0", drop_reason="reward_failed")
    await check()
    for number in (1, 2, 3):
        await stage.fill(f"q0_{number}_q0-s0-t0", reward=float(number))
    await stage.append("q0", "q0-s0-t1")
    await stage.fail("q1", "q1-s0-t0")
    await check()
    await stage.append("q1", "q1-s0-t1")
    await stage.claim(claim="c1")
    await stage.release("trainer")
    await stage.claim(claim="c2")
    await check()
    await stage.open(1)
    await stage.append("q0", "q0-s1-t0")
    await check()
    stage.step = 0
    await stage.commit(["c2"])
    await check()
    assert 0 < (await counted(stage))["solver"] < 1000, "the row of step 1 is left"
    await stage.store.tables.drop(stage.job)
    await stage.store.high_water.look()
    assert await held(stage) == dict.fromkeys(stage.policies, 0)


async def test_a_job_with_damaged_tables_does_not_block_others(stage: Stage) -> None:
    store, broken = stage.store, f"broken-{stage.job}"
    await stage.append("q0", "q0-s0-t0")
    await store.database.call("SADD", JOBS, broken)
    await store.database.call("SET", JobTableKeys(broken).tables, "no table")
    full = HighWater(store.database, store.tables, store.notices, mark_bytes=MIB)
    await full.admit(stage.job, 0, 100)
    assert full.payload_bytes >= sum((await counted(stage)).values()) + 100
    await store.database.call("SREM", JOBS, broken)
    await store.database.call("DEL", JobTableKeys(broken).tables)


async def test_memory_comes_back_with_the_commit(tmp_path: Path) -> None:
    server = RedisServer(tmp_path)
    server.start()
    store = Store(Database(server.url))
    await store.start()

    async def used() -> int:
        return int((await store.database.info())["used_memory"])

    stage = await make_stage(store, new_id("job"), policies=("solver",))
    before = await used()
    for query, trajectory in stage.trajectories:
        await stage.append(query, trajectory, [make_sample(query, 0, trajectory, tokens=200_000)])
    full = await used()
    assert full - before > 3 * MIB
    await stage.claim(claim="c1")
    await stage.commit(["c1"])

    async def is_back() -> bool:
        """Wait until a thread of Redis has freed the payloads."""
        return await used() - before < 0.1 * (full - before)

    await until(is_back)
    await store.stop()
    server.stop()


@pytest.fixture
async def small(tmp_path: Path) -> AsyncIterator[RunningServer[StoreSettings]]:
    """A store with a mark of 1 MiB."""
    server = RedisServer(tmp_path)
    server.start()
    settings = StoreSettings(
        store_redis_url=server.url, redis_url="redis://127.0.0.1:1/0", store_high_water_mib=1
    )
    async with serve(make_service, settings.model_copy(update={"drain_seconds": 0.2})) as running:
        yield running
    server.stop()


async def test_only_the_oldest_uncommitted_step_goes_on_above_the_mark(
    small: RunningServer[StoreSettings],
) -> None:
    channel = connect(small.address, ClientSettings(retry=NO_RETRY))
    client = Client(channel)
    await client.create()
    await client.stub.OpenStep(client.open_request())
    await client.stub.OpenStep(client.open_request(step=1, query_ids=["q0", "q1"]))

    async def append(step: int, trajectory: str, tokens: int = 100_000) -> None:
        row = make_sample("q0", 0, trajectory, tokens=tokens)
        request = client.append_request("q0", trajectory, step=step, samples=[row])
        assert (await client.stub.AppendTrajectory(request)).accepted

    await append(1, "b0")
    await append(0, "a0")
    with pytest.raises(ResourceExhausted) as error:
        await append(1, "b1")
    assert error.value.kind == "store_full"
    assert error.value.field == "TROUPE_STORE_HIGH_WATER_MIB"
    assert error.value.value == "1"
    assert error.value.retry_after_ms
    assert error.value.remedy
    # A call without rows needs no room, and the oldest step may always continue.
    failed = client.append_request("q1", "b2", step=1, samples=[], reason="deadline", state=5)
    assert (await client.stub.AppendTrajectory(failed)).accepted
    await append(0, "a1")

    about = store_pb.DescribeTablesRequest(job_id=client.job)
    described = await client.stub.DescribeTables(about)
    assert described.over_high_water
    assert described.high_water_bytes == MIB
    assert described.payload_bytes == described.tables[0].payload_bytes > MIB
    assert described.redis_bytes > described.payload_bytes
    watch = client.stub.WatchTables(store_pb.WatchTablesRequest(job_id=client.job))
    async for status in watch:
        assert status.over_high_water
        assert status.payload_bytes > MIB
        break
    service = small.service
    assert isinstance(service, ExperienceStoreService)
    # A damaged job has no metrics, but others keep theirs.
    database = service._meters._store.database
    await database.call("SADD", JOBS, "broken")
    await database.call("ZADD", JobTableKeys("broken").live, 0, 0)
    await database.call("SET", JobTableKeys("broken").tables, "no table")
    await service._meters.observe()
    registry = small.telemetry.registry
    labels = {"job_id": client.job, "policy": "solver"}
    assert registry.get_sample_value("troupe_store_over_high_water") == 1
    assert registry.get_sample_value("troupe_store_pushed_back_total") == 1
    assert registry.get_sample_value("troupe_store_lag_steps", labels) == 2
    ready = registry.get_sample_value("troupe_store_samples", labels | {"state": "ready"})
    assert ready == 2

    claim = await client.stub.ClaimMicroBatch(client.claim_request())
    await client.stub.CommitStep(client.commit_request(claim.claim_id))
    # Step 1 is now the oldest, at once and not only after the next sweep.
    await append(1, "b1")
    await channel.close(None)
