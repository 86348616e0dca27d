"""The compute thread's clock, and the time that arriving and leaving policies cost."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import pytest
import torch

from services.trainer.compute import Compute, SwapClock
from tests.support.waiting import until


@pytest.fixture
async def compute() -> AsyncIterator[Compute]:
    made = Compute(1, torch.device("cpu"))
    yield made
    made.close()


async def test_running_work_counts_as_busy_and_a_held_thread_does_not(compute: Compute) -> None:
    began = time.perf_counter()
    running = asyncio.create_task(compute.run(time.sleep, 0.4))
    await until(lambda: compute.busy_seconds > 0.1)
    assert not running.done()
    assert compute.busy_seconds <= time.perf_counter() - began
    await running
    busy = compute.busy_seconds
    assert 0.4 <= busy <= time.perf_counter() - began
    await compute.hold(time.sleep, 0.2)
    assert compute.busy_seconds == busy


async def test_a_device_that_nobody_computes_on_stands_still(compute: Compute) -> None:
    standstill = SwapClock(compute)
    began = time.perf_counter()
    with standstill.swapping() as seconds:
        await compute.hold(time.sleep, 0.2)
        assert 0.2 <= seconds() <= time.perf_counter() - began
    await asyncio.sleep(0.2)  # outside of swaps: counted for none, however long it takes
    began = time.perf_counter()
    with standstill.swapping() as seconds:
        await compute.run(time.sleep, 0.3)
        assert seconds() <= time.perf_counter() - began - 0.3


async def test_overlapping_swaps_are_counted_once(compute: Compute) -> None:
    standstill = SwapClock(compute)
    taken = []

    async def swap(before: float, long: float) -> None:
        await asyncio.sleep(before)
        with standstill.swapping() as seconds:
            await asyncio.sleep(long)
            taken.append(seconds())

    began = time.perf_counter()
    await asyncio.gather(swap(0.0, 0.4), swap(0.1, 0.2), swap(0.35, 0.25))
    assert 0.6 <= sum(taken) <= time.perf_counter() - began
