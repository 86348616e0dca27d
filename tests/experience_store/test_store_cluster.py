"""The store on a Redis Cluster of three nodes: the same life of a step, spread over slots."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

import pytest

from services.experience_store.database import Database
from services.experience_store.records import PolicyKeys
from services.experience_store.store import Store
from tests.experience_store.test_store_audit import audit, play
from tests.support.experience import Stage, ids_of, make_stage
from tests.support.redis_cluster import RedisCluster
from tests.support.waiting import PATIENCE, until
from troupe.rpc import FailedPrecondition, Unavailable, new_id
from troupe.v1 import experience_store_pb2 as store_pb

# Enough for tables in all three nodes.
POLICIES = ("a", "b", "c", "d", "e", "solver")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisCluster]:
    """Three nodes that serve all slots."""
    cluster = RedisCluster(tmp_path_factory.mktemp("cluster"))
    cluster.start()
    yield cluster
    cluster.stop()


@pytest.fixture
async def stage(cluster: RedisCluster) -> AsyncIterator[Stage]:
    """A job of six policies on the cluster."""
    store = Store(Database(cluster.url, timeout=1), keep_steps=2)
    await store.start()
    yield await make_stage(store, new_id("job"), policies=POLICIES)
    await store.stop()


async def test_a_job_lives_from_tables_to_commits_on_a_cluster(
    stage: Stage, cluster: RedisCluster
) -> None:
    await play(stage, 4)
    report = await audit(stage)
    assert list(report.violations) == []
    assert {policy.trained for policy in report.policies} == {16}
    table = (await stage.store.descriptions.describe(stage.job)).tables[-1]
    assert (table.trained, table.version, table.newest_step) == (16, 4, 4)
    assert table.oldest_pending_seconds == 0 or table.oldest_pending_sample
    page, _ = await stage.store.samples.page(stage.job, "solver", 4, None, 50, "")
    assert len(page) == 2
    homes = set()
    for policy in POLICIES:
        for number, node in enumerate(cluster.nodes):
            with node.client() as client:
                pattern = PolicyKeys(stage.job, policy).base.replace("{", "\\{") + "*"
                if client.keys(pattern):
                    homes.add((policy, number))
    assert len(homes) == len(POLICIES), "all of a table is on one node"
    assert len({number for _, number in homes}) > 1, "tables are spread over nodes"
    await stage.store.tables.drop(stage.job, purge_log=True)
    for node in cluster.nodes:
        with node.client() as client:
            assert client.keys(f"*{stage.job}*") == []


async def test_notices_cross_the_nodes(stage: Stage) -> None:
    seen: list[store_pb.TableStatus] = []

    async def watch() -> None:
        async for status in stage.store.watching.watch(stage.job):
            seen.append(status)  # noqa: PERF401 - each is looked at as it comes

    watching = asyncio.create_task(watch())
    waiting = [
        asyncio.create_task(stage.claim(claim=policy, policy=policy, wait=PATIENCE))
        for policy in POLICIES
    ]
    await asyncio.sleep(0.05)
    await stage.append_all()
    async with asyncio.timeout(PATIENCE):
        for claim in asyncio.as_completed(waiting):
            assert len((await claim).samples) == 4
        await until(lambda: seen and seen[-1].sealed)
        await stage.store.tables.drop(stage.job)
        await watching


async def test_scripts_that_a_node_forgot_are_loaded_again(
    stage: Stage, cluster: RedisCluster
) -> None:
    for node in cluster.nodes:
        with node.client() as client:
            client.script_flush()
    await stage.append_all()
    assert len((await stage.claim()).samples) == 4


async def test_a_node_that_comes_back_has_lost_nothing(stage: Stage, cluster: RedisCluster) -> None:
    first, *rest = stage.trajectories
    await stage.append(*first)
    node = cluster.nodes[1]
    node.kill()
    with pytest.raises(Unavailable) as error:
        await stage.append(*rest[0])
    assert error.value.kind == "redis_unavailable"
    assert str(cluster.nodes[0].port) in str(error.value), "where the cluster is looked for"
    node.start()
    await asyncio.to_thread(cluster.wait_until_joined)
    async with asyncio.timeout(PATIENCE):
        for trajectory in rest:
            while True:
                try:
                    await stage.append(*trajectory)
                    break
                except Unavailable:
                    await asyncio.sleep(0.1)
        for policy in POLICIES:
            claim = await stage.claim(claim=policy, policy=policy)
            assert len(ids_of(claim)) == 4
            await stage.commit([policy], policy=policy)
    assert list((await audit(stage)).violations) == []


async def test_the_wrong_kind_of_redis_is_named(cluster: RedisCluster, redis_url: str) -> None:
    single = Store(Database(redis_url.replace("redis://", "redis-cluster://")))
    with pytest.raises(FailedPrecondition, match="not a Redis Cluster") as error:
        await asyncio.wait_for(single.start(), PATIENCE)
    assert (error.value.kind, error.value.field) == ("redis_url", "redis_url")
    await single.stop()
    node = Database(cluster.url.replace("redis-cluster://", "redis://"))
    everywhere = [("GET", f"key{number}") for number in range(20)]
    with pytest.raises(FailedPrecondition, match="redis-cluster://"):
        await node.call_each(everywhere)
    await node.close()


async def test_several_nodes_may_be_named(cluster: RedisCluster) -> None:
    places = ",".join(f"127.0.0.1:{node.port}" for node in cluster.nodes)
    database = Database(f"redis-cluster://{places}")
    assert database.address == places
    assert (await database.wait_ready())["redis_version"]
    await database.close()
    with pytest.raises(FailedPrecondition):
        Database("redis-cluster://one:1,two")
