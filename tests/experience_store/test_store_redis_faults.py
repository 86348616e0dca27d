"""Redis is away, slow, full, restarted or the wrong one: no acknowledged write is lost, and errors
name the address and the remedy."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.chassis.app import RunningServer
from services.experience_store.database import Database
from services.experience_store.server import StoreSettings, make_service
from services.experience_store.store import Store
from tests.support.experience import Response, Stage, ids_of, make_stage
from tests.support.experience_client import Client
from tests.support.ports import free_port
from tests.support.redis_server import RedisServer
from tests.support.waiting import PATIENCE, until
from troupe.rpc import (
    NO_RETRY,
    ClientSettings,
    FailedPrecondition,
    ResourceExhausted,
    TroupeError,
    Unavailable,
    connect,
    new_id,
)
from troupe.v1 import experience_store_pb2 as store_pb
from troupe.v1 import experience_store_pb2_grpc as store_grpc


@pytest.fixture
def server(durable_redis: RedisServer) -> RedisServer:
    return durable_redis


@pytest.fixture
async def own(server: RedisServer) -> AsyncIterator[Stage]:
    """A stage on a Redis that the test may kill."""
    store = Store(Database(server.url, timeout=0.5))
    await store.start()
    yield await make_stage(store, new_id("job"))
    await store.stop()


async def test_acknowledged_writes_survive_a_sigkill_of_redis(
    own: Stage, server: RedisServer
) -> None:
    *most, last = own.trajectories
    for trajectory in most:
        await own.append(*trajectory)
    held = await own.claim(claim="c1", samples=2)
    server.kill()
    with pytest.raises(Unavailable) as error:
        await own.append(*last)
    assert f"127.0.0.1:{server.port}" in str(error.value)
    assert "TROUPE_REDIS_URL" in str(error.value)
    server.start()
    await own.append(*last)
    assert await own.claim(claim="c1", samples=2) == held
    rest = await own.claim(claim="c2")
    assert len({*ids_of(held), *ids_of(rest)}) == 4
    commit, _ = await own.commit(["c1", "c2"])
    server.kill()
    server.start()
    assert await own.commit(["c1", "c2"]) == (commit, True)


async def test_waiting_claimants_hear_of_writes_after_a_restart(
    own: Stage, server: RedisServer
) -> None:
    server.kill()
    server.start()
    waiting = asyncio.create_task(own.claim(wait=PATIENCE))
    await own.until_waiting()
    await own.append_all()
    assert len((await asyncio.wait_for(waiting, PATIENCE)).samples) == 4


async def test_a_lost_subscription_is_made_anew(own: Stage, server: RedisServer) -> None:
    waiting = asyncio.create_task(own.claim(wait=PATIENCE))
    await own.until_waiting()
    with server.client() as client:
        client.client_kill_filter(_type="pubsub")
    await own.append_all()
    assert len((await asyncio.wait_for(waiting, PATIENCE)).samples) == 4


async def test_a_redis_that_does_not_answer_is_given_up_in_time(
    own: Stage, server: RedisServer
) -> None:
    server.pause()
    try:
        async with asyncio.timeout(PATIENCE):
            with pytest.raises(Unavailable, match="does not answer"):
                await own.append_all()
    finally:
        server.resume()
    await own.append_all()
    assert (await own.claim()).outcome == Response.OUTCOME_CLAIMED


async def test_a_full_redis_pushes_back_and_keeps_what_it_has(
    own: Stage, server: RedisServer
) -> None:
    first, *rest = own.trajectories
    await own.append(*first)
    with server.client() as client:
        client.config_set("maxmemory", 1)
        with pytest.raises(ResourceExhausted) as error:
            await own.append(*rest[0])
        assert error.value.kind == "redis_full"
        assert error.value.retry_after_ms is not None
        client.config_set("maxmemory", 0)
    for trajectory in rest:
        await own.append(*trajectory)
    assert len((await own.claim()).samples) == 4


async def test_a_full_redis_accepts_the_calls_that_free_memory(
    own: Stage, server: RedisServer
) -> None:
    await own.append_all()
    await own.claim(claim="c1", samples=2)
    with server.client() as client:
        client.config_set("maxmemory", 1)
        await own.claim(claim="c2", samples=2)
        assert await own.renew("trainer") == 2
        commit, _ = await own.commit(["c1", "c2"])
        assert commit.num_samples == 4
        assert (await own.store.high_water.of_job(own.job))["solver"] == 0
        with pytest.raises(ResourceExhausted):
            await own.open(1)
        client.config_set("maxmemory", 0)
    await own.open(1)


async def test_a_replica_takes_no_writes_and_says_so(own: Stage, server: RedisServer) -> None:
    with server.client() as client:
        # Replica of a missing primary, so that it keeps its data.
        client.replicaof("127.0.0.1", str(free_port()))  # type: ignore[no-untyped-call]
        with pytest.raises(Unavailable, match="takes no writes"):
            await own.append(*own.trajectories[0])
        client.replicaof("NO", "ONE")  # type: ignore[no-untyped-call]
    await own.append_all()


async def test_scripts_that_redis_forgot_are_loaded_again(own: Stage, server: RedisServer) -> None:
    await own.append(*own.trajectories[0])
    with server.client() as client:
        client.script_flush()
    for trajectory in own.trajectories[1:]:
        await own.append(*trajectory)
    assert len((await own.claim()).samples) == 4


async def test_a_redis_that_wants_a_password_says_how_to_give_it(tmp_path: Path) -> None:
    server = RedisServer(tmp_path)
    server.start()
    with server.client() as client:
        client.config_set("requirepass", "secret")
    for url in (server.url, server.url.replace("//", "//:wrong@")):
        store = Store(Database(url))
        with pytest.raises(FailedPrecondition) as error:
            await asyncio.wait_for(store.start(), PATIENCE)
        assert error.value.kind == "redis_refuses"
        assert "wrong" not in str(error.value).replace("WRONGPASS", "")
        await store.stop()
    store = Store(Database(server.url.replace("//", "//:secret@")))
    await store.start()
    await store.stop()
    server.stop()


async def test_a_redis_that_hangs_at_the_start_is_waited_for_and_named(
    server: RedisServer,
) -> None:
    server.pause()
    store = Store(Database(server.url, timeout=0.2))
    starting = asyncio.create_task(store.start())
    try:
        await until(lambda: "does not answer" in (store.database.problem or ""))
        assert f"127.0.0.1:{server.port}" in (store.database.problem or "")
        assert not starting.done()
    finally:
        server.resume()
    await asyncio.wait_for(starting, PATIENCE)
    assert store.database.problem is None
    await store.stop()


async def test_another_program_at_the_address_is_not_taken_for_redis() -> None:
    async def answer(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as other:
        port = other.sockets[0].getsockname()[1]
        store = Store(Database(f"redis://127.0.0.1:{port}/0", timeout=0.5))
        with pytest.raises(TroupeError) as error:
            await asyncio.wait_for(store.start(), PATIENCE)
        assert f"127.0.0.1:{port}" in str(error.value)
        assert "is not Redis" in str(error.value)
        assert "another program" in error.value.remedy
        await store.stop()


def test_an_invalid_url_names_the_setting() -> None:
    with pytest.raises(FailedPrecondition) as error:
        Database("http://somewhere")
    assert error.value.field == "redis_url"


@contextlib.asynccontextmanager
async def opened(redis_server: RedisServer) -> AsyncIterator[RunningServer[StoreSettings]]:
    """Yield the service behind its port, not ready yet; close it with its Redis in any case."""
    settings = StoreSettings(redis_url=redis_server.url, drain_seconds=0.2)
    running = RunningServer(make_service, settings)
    await running.open()
    try:
        yield running
    finally:
        await running.close()
        redis_server.stop()


async def test_the_service_waits_for_redis_and_is_not_serving_meanwhile(tmp_path: Path) -> None:
    redis_server = RedisServer(tmp_path)  # not started: its port is closed
    async with opened(redis_server) as running:
        ready = asyncio.create_task(running.become_ready())
        channel = connect(running.address, ClientSettings(retry=NO_RETRY))
        health = health_pb2_grpc.HealthStub(channel)
        store = store_grpc.ExperienceStoreStub(channel)
        question = store_pb.GetStepRequest(job_id="job", step=0)
        check = health_pb2.HealthCheckRequest(service="troupe.v1.ExperienceStore")
        await until(lambda: running.service.problem)
        assert (await health.Check(check)).status == health_pb2.HealthCheckResponse.NOT_SERVING
        with pytest.raises(Unavailable) as error:
            await store.GetStep(question)
        # A client that waits for the store gets the store's reason.
        assert error.value.kind == "service_starting"
        assert f"Redis at 127.0.0.1:{redis_server.port}/0" in str(error.value)
        redis_server.start()
        await asyncio.wait_for(ready, PATIENCE)
        assert (await health.Check(check)).status == health_pb2.HealthCheckResponse.SERVING
        redis_server.kill()
        with pytest.raises(Unavailable) as error:
            await store.GetStep(question)
        assert error.value.kind == "redis_unavailable"
        assert f"127.0.0.1:{redis_server.port}" in str(error.value)
        await channel.close(None)


async def test_a_client_that_retries_does_not_notice_a_restart_of_redis(tmp_path: Path) -> None:
    redis_server = RedisServer(tmp_path, durable=True)
    redis_server.start()
    async with opened(redis_server) as running:
        await running.become_ready()
        channel = connect(running.address, ClientSettings())
        client = Client(channel)
        await client.create()
        redis_server.kill()
        opening = asyncio.ensure_future(client.stub.OpenStep(client.open_request()))
        await asyncio.sleep(0.3)  # how long Redis is away; any time will do
        redis_server.start()
        assert not (await asyncio.wait_for(opening, PATIENCE)).existed
        await channel.close(None)
