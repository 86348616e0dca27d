"""The compute thread's clock, and the time that arriving and leaving policies cost."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import pytest
import torch

from services.trainer.compute import Compute, SwapClock

# They race a real clock.
pytestmark = pytest.mark.slow
LATE = 0.15


@pytest.fixture
async def compute() -> AsyncIterator[Compute]:
    made = Compute(1, torch.device("cpu"))
    yield made
    made.close()


async def test_running_work_counts_as_busy_and_a_held_thread_does_not(
    compute: Compute,
) -> None:
    running = asyncio.create_task(compute.run(time.sleep, 0.4))
    await asyncio.sleep(0.2)
    assert 0.1 < compute.busy_seconds < 0.2 + LATE
    await running
    await compute.hold(time.sleep, 0.2)
    assert 0.4 <= compute.busy_seconds < 0.4 + LATE


async def test_a_device_that_nobody_computes_on_stands_still(compute: Compute) -> None:
    standstill = SwapClock(compute)
    with standstill.swapping() as seconds:
        await compute.hold(time.sleep, 0.2)
        assert 0.2 <= seconds() < 0.2 + LATE
    await asyncio.sleep(0.2)  # nobody's
    with standstill.swapping() as seconds:
        await compute.run(time.sleep, 0.3)
        assert seconds() < LATE


async def test_overlapping_swaps_are_counted_once(compute: Compute) -> None:
    standstill = SwapClock(compute)
    taken = []

    async def swap(before: float, long: float) -> None:
        await asyncio.sleep(before)
        with standstill.swapping() as seconds:
            await asyncio.sleep(long)
            taken.append(seconds())

    await asyncio.gather(swap(0.0, 0.4), swap(0.1, 0.2), swap(0.35, 0.25))
    assert 0.6 <= sum(taken) < 0.6 + LATE
