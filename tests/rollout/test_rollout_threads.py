"""Threads of users that never return: they take nothing from anybody else."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from tests.rollout.house import evaluation, open_house
from tests.support.waiting import PATIENCE
from troupe.user_code import DaemonThreads
from troupe.v1 import common_pb2 as common_pb

# A pool has at most 32 threads, whatever the machine.
MANY = 40
HANGING = """
import asyncio, time
from troupe.user_code import DaemonThreads

async def main():
    asyncio.get_running_loop().set_default_executor(DaemonThreads())
    try:
        await asyncio.wait_for(asyncio.to_thread(time.sleep, 3600), 0.1)
    except TimeoutError:
        print("given up")

asyncio.run(main())
"""


async def test_a_worker_goes_on_whatever_hangs_in_threads(tmp_path: Path) -> None:
    async with open_house(tmp_path) as house:
        quick = {"trajectory_seconds": 0.5, "turn_seconds": 5}
        await house.prepare("waits_in_a_thread", limits=quick)
        ended = await house.run(evaluation(MANY))
        assert {event.state for event in ended.values()} == {common_pb.TRAJECTORY_STATE_FAILED}
        # Loads weights and queries, in threads.
        await house.prepare("one_turn")
        event = await house.run_one()
        assert event.state == common_pb.TRAJECTORY_STATE_COMPLETED, event.reason


async def test_results_and_errors_come_back() -> None:
    asyncio.get_running_loop().set_default_executor(DaemonThreads())
    assert await asyncio.to_thread(divmod, 7, 2) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        await asyncio.to_thread(divmod, 7, 0)
    # Unconverted, it would end the event loop that awaits it.
    with pytest.raises(RuntimeError, match="SystemExit: 3"):
        await asyncio.to_thread(sys.exit, 3)


def test_a_process_ends_whatever_hangs_in_threads() -> None:
    done = subprocess.run(
        [sys.executable, "-c", HANGING],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert (done.stdout, done.stderr) == ("given up\n", "")
