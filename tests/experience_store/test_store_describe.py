"""DescribeTables: the contents of a job's tables, their lag, and the totals so far."""

from __future__ import annotations

import asyncio

import pytest

from services.experience_store.records import Ending, JobTableKeys
from tests.experience_store.test_store_steps import finish
from tests.support.experience import Stage, make_sample
from troupe.rpc import NotFound
from troupe.v1 import experience_store_pb2 as store_pb


async def described(stage: Stage, policy: str = "solver") -> store_pb.TableSummary:
    response = await stage.store.descriptions.describe(stage.job)
    return next(table for table in response.tables if table.policy == policy)


async def test_a_table_without_rows_says_so(stage: Stage) -> None:
    table = await described(stage)
    assert (table.version, table.committed_step, table.newest_step) == (0, -1, 0)
    assert table.oldest_pending_seconds == 0
    assert table.oldest_pending_sample == ""
    assert table.payload_bytes == 0


async def test_totals_reach_back_to_steps_that_are_forgotten(stage: Stage) -> None:
    for step in range(5):
        if step:
            await stage.open(step)
        if step == 1:
            await stage.fail("q0", "q0-s1-t0", "deadline: 9 s")
        await finish(stage)
    await stage.open(5)
    await stage.append("q1", "q1-s5-t0")
    assert await stage.store.steps.all(stage.job) == [4, 5]
    table = await described(stage)
    assert (table.version, table.committed_step, table.newest_step) == (5, 4, 5)
    assert (table.trained, table.pending, table.ready) == (19, 1, 0)
    assert table.drop_reasons == {"deadline": 1}
    assert table.payload_bytes > 0


async def test_the_oldest_pending_sample_is_named_with_its_age(stage: Stage) -> None:
    late = [make_sample("q0", 0, "q0-s0-t0", reward=None)]
    await stage.append("q0", "q0-s0-t0", late)
    await asyncio.sleep(0.3)
    await stage.append("q1", "q1-s0-t0")
    table = await described(stage)
    assert table.pending == 2
    assert table.oldest_pending_sample == "q0_0_q0-s0-t0"
    assert 0.3 <= table.oldest_pending_seconds < 30
    await stage.append("q0", "q0-s0-t1", [])
    await stage.fill("q0_0_q0-s0-t0", reward=1.0)
    table = await described(stage)
    assert (table.pending, table.ready) == (1, 1)
    assert table.oldest_pending_sample == "q1_1_q1-s0-t0"


async def test_reads_of_a_description_do_not_grow_with_ended_trajectories(stage: Stage) -> None:
    async def read() -> int:
        before = (await stage.store.database.info())["total_net_output_bytes"]
        await described(stage)
        return int((await stage.store.database.info())["total_net_output_bytes"]) - int(before)

    few = await read()
    ending = Ending("COMPLETED", "attempt", "q0", "").format()
    fields = [text for nth in range(5000) for text in (f"q0-s0-t{nth}", ending)]
    await stage.store.database.call("HSET", JobTableKeys(stage.job).ended(0), *fields)
    assert await read() < 2 * few


async def test_a_job_without_tables_is_not_described(stage: Stage) -> None:
    with pytest.raises(NotFound):
        await stage.store.descriptions.describe("nobody")
