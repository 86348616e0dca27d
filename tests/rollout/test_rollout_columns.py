"""User-defined columns: from a workflow's reply to the store and the transfer layer."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from services.rollout.trajectories.records import INLINE_BYTES
from tests.rollout import plays
from tests.rollout.house import House, evaluation, training
from tests.rollout.test_rollout_aborting import abort, amend, hold_open
from tests.support.waiting import PATIENCE, until
from troupe import tensors
from troupe.rpc import new_id
from troupe.v1 import common_pb2 as common_pb
from troupe.v1 import experience_store_pb2 as store_pb

COMPLETED = common_pb.TRAJECTORY_STATE_COMPLETED


async def test_small_columns_travel_inline_and_large_ones_by_reference(house: House) -> None:
    await house.prepare("annotates")
    await house.open_step(queries=1, group_size=2)
    ended = await house.run(training(1, 2))
    assert {e.state for e in ended.values()} == {COMPLETED}, ended
    rows = await house.samples("big")
    assert len(rows) == 2
    for row in rows:
        assert row.columns["note"].json == '{"index": 0}'
        small = tensors.from_proto(row.columns["small"].tensor)
        assert (small.dtype, small.tolist()) == (np.dtype("int32"), [1, 2, 3])
        assert row.columns["large"].ref == f"{house.job_id}/columns/{row.sample_id}/large"
        value = house.transfer.get(row.columns["large"].ref)[0]["value"].numpy()
        assert value.nbytes > INLINE_BYTES
        np.testing.assert_array_equal(value, plays.LARGE)
    assert rows[0].ByteSize() < INLINE_BYTES


async def test_a_sample_waits_for_the_columns_that_its_job_requires(house: House) -> None:
    await house.prepare("annotates")
    required = ["note", "large", "late"]
    await house.open_step(queries=1, group_size=1, required_columns=required)
    await house.run(training(1, 1))
    [row] = await house.samples("big")
    assert row.state == common_pb.SAMPLE_STATE_PENDING
    answer = await house.store.FillColumns(
        store_pb.FillColumnsRequest(
            request_id=new_id("fill"),
            job_id=house.job_id,
            step=0,
            policy="big",
            sample_id=row.sample_id,
            columns={"late": store_pb.Column(json="1")},
        )
    )
    assert answer.state == common_pb.SAMPLE_STATE_READY


async def test_values_of_a_dropped_trajectory_are_not_left_behind(house: House) -> None:
    await house.prepare("annotates_late")
    await hold_open(house, 0, "q0", "q1", group_size=1)
    running = asyncio.create_task(house.run(training(2, 1)))
    await until(lambda: len(house.service._runner) == 2)
    await amend(house, step=0, drop_query_ids=["q1"], drop_reason="surplus", close=True)
    plays.go_on()
    await running
    [row] = await house.samples("big")
    assert row.query_id == "q0"
    kept = house.transfer.roots[0] / house.job_id / "columns"
    assert [path.name for path in kept.iterdir()] == [row.sample_id]


async def test_values_of_an_aborted_trajectory_are_not_left_behind(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is aborted while its rows are on their way, like a group's redundant ones."""
    await house.prepare("annotates")
    await house.open_step(queries=1, group_size=1)
    on_its_way = asyncio.Event()

    async def slow(*_: object, **__: object) -> None:
        on_its_way.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(house.service._runner._store, "complete", slow)
    running = asyncio.create_task(house.run(training(1, 1)))
    await asyncio.wait_for(on_its_way.wait(), PATIENCE)
    kept = house.transfer.roots[0] / house.job_id / "columns"
    assert list(kept.iterdir())
    await abort(house, "q0-s0-t0")
    [event] = (await running).values()
    assert event.state == common_pb.TRAJECTORY_STATE_ABORTED
    assert not kept.exists()


async def test_an_evaluation_stores_no_columns(house: House) -> None:
    await house.prepare("annotates")
    ended = await house.run(evaluation(1))
    assert {e.state for e in ended.values()} == {COMPLETED}
    assert not (house.transfer.roots[0] / house.job_id / "columns").exists()


async def test_a_bad_column_fails_the_trajectory_and_says_why(house: House) -> None:
    await house.prepare("annotates_badly")
    event = await house.run_one()
    assert event.state == common_pb.TRAJECTORY_STATE_FAILED
    assert event.reason.startswith("workflow_raised: InvalidColumnError: arrays of complex64")
