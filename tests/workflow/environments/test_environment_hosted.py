"""Environments in separate processes: they play as usual, and leave nothing behind."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import uvloop

from tests.workflow.environments.hosting import (
    QUICK,
    ZOO,
    gone,
    naughty,
    until_gone,
)
from tests.workflow.environments.zoo import Nim
from troupe.workflow.environments import (
    EnvironmentFault,
    EpisodeOverError,
    FaultLimits,
    IllegalMoveError,
    hosted,
)
from troupe.workflow.environments.conformance import plain_step, play_randomly


async def test_a_hosted_environment_plays_like_a_local_one() -> None:
    alone = play_randomly(Nim(), 5)
    environment = hosted(f"{ZOO}:Nim", limits=QUICK)
    try:
        for _ in range(2):  # a used process restarts
            await environment.reset(5)
            assert environment.properties == Nim().properties
            steps = [await environment.step(moves) for moves in alone.moves]
            assert [plain_step(s) for s in steps] == [plain_step(s) for s in alone.steps]
        with pytest.raises(EpisodeOverError):
            await environment.step({"left": 1})
    finally:
        await environment.close()


async def test_an_illegal_move_changes_nothing() -> None:
    environment = hosted(f"{ZOO}:Nim", limits=QUICK)
    reset = await environment.reset(1)
    pid = environment.pid
    with pytest.raises(IllegalMoveError) as caught:
        await environment.step({"left": 3})
    assert caught.value.seat == "left"
    step = await environment.step({"left": 1})
    assert environment.pid == pid
    heap = int(reset.obs["left"].arrays["heap"][0])
    assert step.obs["right"].text == f"heap {heap - 1}"
    await environment.close()


async def test_prints_of_an_environment_are_not_answers() -> None:
    environment = naughty("print", "step")
    await environment.reset(0)
    assert (await environment.step({"left": 1})).current == ("right",)
    await environment.close()


async def test_a_stuck_one_dies_with_all_that_it_started(tmp_path: Path) -> None:
    note = tmp_path / "note"
    limits = FaultLimits(step_seconds=0.5)
    environment = naughty("children", "step", limits, note=str(note))
    await environment.reset(0)
    with pytest.raises(EnvironmentFault):
        await environment.step({"left": 1})
    for pid in map(int, note.read_text().split()):
        await until_gone(pid)
    await environment.close()


async def test_a_cancelled_request_leaves_no_answer_behind() -> None:
    """The next request must not get the answer of the cancelled one."""
    environment = hosted(f"{ZOO}:Nim", limits=QUICK)
    await environment.reset(0)
    pid = environment.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    asking = asyncio.create_task(environment.step({"left": 1}))
    await asyncio.sleep(0.05)  # the process is stopped: no answer comes
    asking.cancel()
    await asyncio.wait({asking})
    await until_gone(pid)
    assert (await environment.reset(0)).current == ("left",)
    assert environment.pid != pid
    await environment.close()


def test_the_services_event_loop_kills_and_replaces_too() -> None:
    """uvloop has its own process transports."""

    async def hang_and_go_on() -> None:
        environment = naughty("hang", "step", FaultLimits(step_seconds=0.3))
        await environment.reset(0)
        pid = environment.pid
        assert pid is not None
        with pytest.raises(EnvironmentFault, match="was killed"):
            await environment.step({"left": 1})
        await until_gone(pid)
        await environment.reset(0)
        await environment.close()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(hang_and_go_on())


_PARENT = """
import asyncio, sys, time
from troupe.workflow.environments import hosted

async def main():
    environment = hosted("tests.workflow.environments.zoo:Nim")
    await environment.reset(0)
    print(environment.pid, flush=True)
    time.sleep(3600)

asyncio.run(main())
"""


def test_a_hosted_environment_does_not_outlive_its_parent() -> None:
    parent = subprocess.Popen([sys.executable, "-c", _PARENT], stdout=subprocess.PIPE, text=True)
    try:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert not gone(pid)
    finally:
        parent.kill()
        parent.wait()
    asyncio.run(until_gone(pid))
