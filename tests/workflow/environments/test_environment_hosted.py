"""Environments in processes of their own: faults, deadlines, replacements, nothing left behind."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import uvloop

from tests.workflow.environments.zoo import Naughty, Nim
from troupe.workflow import EntrypointError
from troupe.workflow.environments import (
    COUNTERS,
    EnvironmentContractError,
    EnvironmentFault,
    EnvironmentPool,
    EpisodeOverError,
    FaultLimits,
    Hosted,
    IllegalMoveError,
    Local,
    ObservationTooLargeError,
    hosted,
)
from troupe.workflow.environments.playing import plain_step, play_randomly

ZOO = "tests.workflow.environments.zoo"
QUICK = FaultLimits(retries=2, backoff_seconds=0.01, max_backoff_seconds=0.02, wait_seconds=60)


def naughty(what: str, when: str, limits: FaultLimits = QUICK, **args: Any) -> Hosted:
    return hosted(f"{ZOO}:Naughty", {"what": what, "when": when, **args}, limits=limits)


def counts() -> dict[str, int]:
    return {event: COUNTERS.of(event) for event in ("resets", "retries", "faults", "kills")}  # type: ignore[arg-type]


def gained(before: dict[str, int]) -> dict[str, int]:
    return {event: now - before[event] for event, now in counts().items() if now != before[event]}


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    with open(f"/proc/{pid}/stat", encoding="ascii") as stat:
        return stat.read().rsplit(")", 1)[1].split()[0] == "Z"


def environ_of(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/environ").read_text().split("\0")


async def until_gone(pid: int) -> None:
    for _ in range(1000):
        if gone(pid):
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"process {pid} is still there")


@pytest.fixture
async def pool() -> AsyncIterator[EnvironmentPool]:
    pool = EnvironmentPool(f"{ZOO}:Nim", processes=2, limits=QUICK)
    yield pool
    await pool.close()


async def test_it_plays_as_it_does_in_this_process() -> None:
    alone = play_randomly(Nim(), 5)
    environment = hosted(f"{ZOO}:Nim", limits=QUICK)
    try:
        for _ in range(2):  # a used process begins anew
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


@pytest.mark.parametrize(
    ("what", "reason", "says"),
    [
        ("raise", "raised", "a bug of its author"),
        pytest.param("exit", "raised", "SystemExit", marks=pytest.mark.slow),
        ("die", "died", "exit status 7; last words"),
        ("hang", "deadline", "within 0.3 s and was killed"),
        pytest.param("spin", "deadline", "and was killed", marks=pytest.mark.slow),
    ],
)
async def test_a_fault_in_a_step_is_not_repeated(what: str, reason: str, says: str) -> None:
    seconds = 0.3 if reason == "deadline" else 20
    limits = FaultLimits(step_seconds=seconds, retries=2, backoff_seconds=0.01)
    environment = naughty(what, "step", limits)
    await environment.reset(0)
    pid, before = environment.pid, counts()
    assert pid is not None
    with pytest.raises(EnvironmentFault, match=says) as caught:
        await environment.step({"left": 1})
    assert caught.value.reason == reason
    assert caught.value.kind == "environment"
    assert caught.value.environment in caught.value.message
    assert gained(before) == {"faults": 1} | ({"kills": 1} if reason == "deadline" else {})
    await until_gone(pid)
    with pytest.raises(EpisodeOverError):  # the episode is lost
        await environment.step({"left": 1})
    if what == "die":
        await environment.reset(0)  # on a fresh process
        assert environment.pid != pid
    await environment.close()


@pytest.mark.parametrize(
    ("what", "when"),
    [
        ("raise", "init"),
        ("die", "reset"),
        ("hang", "reset"),
        pytest.param("hang", "init", marks=pytest.mark.slow),  # starts take long beside others
    ],
)
async def test_a_beginning_is_tried_again_on_a_fresh_process(
    tmp_path: Path, what: str, when: str
) -> None:
    limits = FaultLimits(start_seconds=20, reset_seconds=20, retries=2, backoff_seconds=0.01)
    if what == "hang":  # a start has to import the interpreter's world first
        limits = replace(
            limits, **{"start_seconds": 3} if when == "init" else {"reset_seconds": 0.3}
        )
    environment = naughty(what, when, limits, once=str(tmp_path / "once"))
    before = counts()
    reset = await environment.reset(0)
    assert reset.current == ("left",)
    assert gained(before) == {
        "resets": 1,
        "retries": 1,
        "faults": 1,
        **({"kills": 1} if what == "hang" else {}),
    }
    await environment.close()


async def test_a_beginning_that_always_fails_says_how_often_it_was_tried() -> None:
    environment = naughty("raise", "reset")
    with pytest.raises(EnvironmentFault, match=r"a bug of its author.*\(tried 3 times\)") as caught:
        await environment.reset(0)
    assert "in _misbehave" in caught.value.traceback
    await environment.close()


async def test_what_cannot_be_imported_is_not_tried_again() -> None:
    environment = hosted("tests.workflow.environments.nowhere:Nim", limits=QUICK)
    before = counts()
    with pytest.raises(EntrypointError, match="does not exist here"):
        await environment.reset(0)
    assert gained(before) == {}
    await environment.close()


async def test_what_it_prints_is_no_answer() -> None:
    environment = naughty("print", "step")
    await environment.reset(0)
    assert (await environment.step({"left": 1})).current == ("right",)
    await environment.close()


async def test_a_huge_observation_is_refused() -> None:
    environment = naughty("huge", "never")
    with pytest.raises(ObservationTooLargeError):
        await environment.reset(0)
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


async def test_nobody_waits_for_a_stuck_one(pool: EnvironmentPool) -> None:
    stuck = naughty("hang", "step", FaultLimits(step_seconds=600))
    await stuck.reset(0)
    waiting = asyncio.create_task(stuck.step({"left": 1}))
    other = Hosted(pool)
    await other.reset(0)
    await other.step({"left": 1})
    assert not waiting.done()
    waiting.cancel()
    await asyncio.wait({waiting})
    await stuck.close()
    await other.close()


async def test_a_cancelled_request_leaves_no_answer_behind() -> None:
    """The next request must not get the answer of the cancelled one."""
    environment = hosted(f"{ZOO}:Nim", limits=QUICK)
    await environment.reset(0)
    pid = environment.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    asking = asyncio.create_task(environment.step({"left": 1}))
    await asyncio.sleep(0.05)
    asking.cancel()
    await asyncio.wait({asking})
    await until_gone(pid)
    assert (await environment.reset(0)).current == ("left",)
    assert environment.pid != pid
    await environment.close()


async def test_a_pool_lends_processes_again_and_no_more_than_it_may(pool: EnvironmentPool) -> None:
    first, second = Hosted(pool), Hosted(pool)
    await first.reset(0)
    await second.reset(0)
    third = Hosted(pool)
    waiting = asyncio.create_task(third.reset(0))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    pid = first.pid
    await first.close()
    await first.close()  # repeatable: the slot is given back once
    await waiting
    assert third.pid == pid
    assert pool.lent == 2
    await second.close()
    await third.close()
    assert (pool.lent, pool.idle) == (0, 2)


async def test_waiting_for_a_process_has_a_deadline() -> None:
    limits = FaultLimits(wait_seconds=0.1, retries=0)
    pool = EnvironmentPool(f"{ZOO}:Nim", processes=1, limits=limits)
    first, second = Hosted(pool), Hosted(pool)
    await first.reset(0)
    with pytest.raises(EnvironmentFault, match="was free within") as caught:
        await second.reset(0)
    assert caught.value.reason == "no_process"
    await pool.close()


@pytest.mark.slow  # it starts a process for every one that it kills
async def test_killed_processes_cost_their_episode_and_no_place_in_the_pool(
    pool: EnvironmentPool,
) -> None:
    """Four players share two processes; those of one player are killed under it."""
    played = lost = 0

    async def play_some(player: int) -> None:
        nonlocal played, lost
        for number in range(3):
            environment = Hosted(pool)
            try:
                reset = await environment.reset(number)
                if player == 0 and environment.pid is not None:
                    os.kill(environment.pid, signal.SIGKILL)
                seats = reset.current
                while seats:
                    seats = (await environment.step(dict.fromkeys(seats, 1))).current
                played += 1
            except EnvironmentFault:
                lost += 1
            finally:
                await environment.close()

    await asyncio.gather(*(play_some(player) for player in range(4)))
    assert (played, lost) == (9, 3)
    assert pool.lent == 0
    assert 1 <= pool.idle <= 2


def test_the_services_event_loop_kills_and_replaces_too() -> None:
    """uvloop has process transports of its own."""

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


async def test_an_idle_process_ends() -> None:
    pool = EnvironmentPool(f"{ZOO}:Nim", limits=QUICK, idle_seconds=0.05)
    environment = Hosted(pool)
    await environment.reset(0)
    pid = environment.pid
    assert pid is not None
    await environment.close()
    await until_gone(pid)
    assert pool.idle == 0


async def test_a_process_has_one_thread_and_its_own_group(pool: EnvironmentPool) -> None:
    environment = Hosted(pool)
    await environment.reset(0)
    pid = environment.pid
    assert pid is not None
    assert os.getpgid(pid) == pid
    assert "OMP_NUM_THREADS=1" in environ_of(pid)
    await environment.close()


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


def test_it_does_not_outlive_its_parent() -> None:
    parent = subprocess.Popen([sys.executable, "-c", _PARENT], stdout=subprocess.PIPE, text=True)
    try:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert not gone(pid)
    finally:
        parent.kill()
        parent.wait()
    asyncio.run(until_gone(pid))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
async def test_a_pool_survives_the_end_of_its_loop() -> None:
    """A workflow object is older than the event loop of a test or a second run."""
    pool = EnvironmentPool(f"{ZOO}:Nim", limits=QUICK)

    async def one() -> int:
        environment = Hosted(pool)
        await environment.reset(0)
        pid = environment.pid
        await environment.close()
        assert pid is not None
        return pid

    first = await asyncio.to_thread(lambda: asyncio.run(one()))
    second = await one()
    assert first != second
    await until_gone(first)
    await pool.close()
    gc.collect()  # transports of the former loop complain that it is closed


@pytest.mark.parametrize("what", ["raise", "exit"])
async def test_in_this_process_too_it_cannot_end_more_than_its_episode(what: str) -> None:
    environment = Local(lambda: Naughty(what, "step"), name="naughty")
    await environment.reset(0)
    with pytest.raises(EnvironmentFault, match="naughty raised"):
        await environment.step({"left": 1})
    await environment.close()


async def test_what_is_no_step_is_told_from_another_process_too() -> None:
    environment = naughty("nothing", "step", QUICK)
    await environment.reset(0)
    with pytest.raises(EnvironmentContractError, match="step is None") as caught:
        await environment.step({"left": 1})
    assert caught.value.field == "step"
    await environment.close()


async def test_in_this_process_a_fault_is_typed_and_a_beginning_is_repeated() -> None:
    made: list[Nim] = []

    def make() -> Nim:
        if not made:
            made.append(Nim())
            raise OSError("no licence is free")
        return Nim()

    environment = Local(make, name="nim", limits=QUICK)
    before = counts()
    await environment.reset(3)
    assert gained(before) == {"resets": 1, "retries": 1, "faults": 1}
    await environment.close()
    await environment.close()
