"""Workers are there when they are needed, and not when they are not."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import psutil
import pytest

from tests.reward.test_reward_service import Client, client_of
from tests.support.waiting import until
from troupe.v1 import reward_pb2 as reward_pb


async def pool_of(client: Client) -> reward_pb.PoolStatus:
    return (await client.stub.ListFunctions(reward_pb.ListFunctionsRequest())).pool


async def until_listed(
    client: Client, says: Callable[[reward_pb.ListFunctionsResponse], bool]
) -> None:
    async def listed() -> bool:
        return says(await client.stub.ListFunctions(reward_pb.ListFunctionsRequest()))

    await until(listed)


@pytest.mark.slow
async def test_a_pool_of_workers_grows_from_zero_and_shrinks_again() -> None:
    async with client_of(reward_workers=3, reward_min_workers=0, reward_idle_seconds=0.2) as client:
        await client.register("sleeps")
        pool = await pool_of(client)
        assert (pool.workers, pool.max_workers, pool.provisioned_seconds) == (0, 3, 0.0)
        # The first has to wait for a worker, and says so; the next finds it.
        first = await client.invoke("sleeps", {"seconds": 0})
        second = await client.invoke("sleeps", {"seconds": 0})
        assert 0 < first.cold_start_seconds <= first.run_seconds
        assert second.cold_start_seconds == 0
        await client.register("sleeps", version="long")
        calls = [asyncio.create_task(client.invoke("sleeps", {"seconds": 0.4})) for _ in range(6)]
        await until_listed(client, lambda listed: listed.pool.workers == 3)
        await asyncio.gather(*calls)
        await until_listed(client, lambda listed: listed.pool.workers == 0)
        pool = await pool_of(client)
        assert 2.4 <= pool.busy_seconds <= pool.provisioned_seconds + 1
        listed = await client.stub.ListFunctions(reward_pb.ListFunctionsRequest())
        cold = {f.function.version: f.cold_starts for f in listed.functions}
        assert 2 <= cold["long"] <= 3
        assert all(
            0 < f.cold_start_p50_seconds <= f.cold_start_p99_seconds for f in listed.functions
        )


@pytest.mark.slow
async def test_min_workers_are_warm_before_the_first_call() -> None:
    async with client_of(
        reward_workers=2, reward_min_workers=0, reward_idle_seconds=0.05
    ) as client:
        await client.register("pid", min_workers=1)
        await until_listed(client, lambda listed: listed.functions[0].warm_workers == 1)
        await asyncio.sleep(0.2)  # longer than it may idle; a warm one stays, however long
        response = await client.invoke("pid")
        assert response.cold_start_seconds == 0
        # Another function, which says for itself how long its workers stay.
        await client.register("sleeps", idle_seconds=600)
        await client.invoke("sleeps", {"seconds": 0})
        await asyncio.sleep(0.2)  # longer than the service's `idle_seconds`, which do not apply
        assert (await client.invoke("sleeps", {"seconds": 0})).cold_start_seconds == 0


async def test_a_worker_that_was_lost_is_replaced_when_it_is_needed() -> None:
    async with client_of(reward_workers=1, reward_min_workers=0) as client:
        assert (await client.run("dies")).kind == reward_pb.InvocationError.KIND_WORKER_DIED
        assert (await pool_of(client)).workers == 0
        assert await client.run("pid") > 0


async def test_a_worker_that_died_while_idle_costs_no_call_an_attempt() -> None:
    async with client_of(reward_workers=1) as client:
        worker = psutil.Process(await client.run("pid"))
        worker.kill()
        await until_listed(client, lambda listed: listed.pool.workers == 0)
        assert await client.run("pid") != worker.pid
