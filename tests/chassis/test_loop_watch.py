"""The metric of a blocked event loop."""

from __future__ import annotations

import asyncio
import time

import pytest

from services.chassis import telemetry as module
from services.chassis.telemetry import LoopWatch, Telemetry
from tests.support.waiting import until


def late(telemetry: Telemetry, clock: str, seconds: float) -> float:
    """Return how many checks were late by at most this number of seconds."""
    labels = {"clock": clock, "le": str(seconds)}
    return (
        telemetry.registry.get_sample_value("troupe_event_loop_late_seconds_bucket", labels) or 0.0
    )


def looks(telemetry: Telemetry) -> float:
    """How often it looked."""
    name = "troupe_event_loop_late_seconds_count"
    return telemetry.registry.get_sample_value(name, {"clock": "wall"}) or 0.0


async def until_looked(telemetry: Telemetry, more: int) -> None:
    """Waits for `more` looks."""
    wanted = looks(telemetry) + more
    await until(lambda: looks(telemetry) >= wanted)


async def test_a_blocking_call_and_one_that_computes_are_told_apart() -> None:
    telemetry = Telemetry()
    watch = LoopWatch(telemetry)
    watch.start()
    await until_looked(telemetry, 1)
    time.sleep(0.4)  # noqa: ASYNC251 - that is what is measured
    await until_looked(telemetry, 1)
    # It was late by a third of a second at least, and has computed next to nothing of it.
    assert looks(telemetry) - late(telemetry, "wall", 0.3) >= 1
    assert looks(telemetry) == late(telemetry, "cpu", 0.3)
    busy = time.thread_time()
    while time.thread_time() - busy < 0.4:
        pass
    await until_looked(telemetry, 1)
    assert looks(telemetry) - late(telemetry, "cpu", 0.3) >= 1
    watch.stop()
    seen = looks(telemetry)
    await asyncio.sleep(0.1)  # it has stopped: nobody looks, however long this takes
    assert looks(telemetry) == seen


async def test_a_loop_that_computes_is_looked_at_more_often_than_an_idle_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_IDLE_LOOK_SECONDS", 3600.0)
    telemetry = Telemetry()
    watch = LoopWatch(telemetry)
    watch.start()

    async def compute() -> None:
        while True:
            began = time.thread_time()
            while time.thread_time() - began < 0.01:
                pass
            await asyncio.sleep(0)

    computing = asyncio.create_task(compute())
    await until_looked(telemetry, 5)
    computing.cancel()
    await until(lambda: watch._interval >= 3600.0)  # the look that finds it idle
    seen = looks(telemetry)
    await asyncio.sleep(0.2)  # the next look is an hour away
    assert looks(telemetry) == seen
    watch.stop()
