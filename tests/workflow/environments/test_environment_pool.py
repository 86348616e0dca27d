"""Pools of processes that environments play in: lent, awaited, replaced, ended when idle."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
from collections.abc import AsyncIterator

import pytest

from tests.workflow.environments.hosting import (
    QUICK,
    ZOO,
    environ_of,
    naughty,
    until_gone,
)
from troupe.workflow.environments import (
    EnvironmentFault,
    EnvironmentPool,
    FaultLimits,
    Hosted,
)


@pytest.fixture
async def pool() -> AsyncIterator[EnvironmentPool]:
    pool = EnvironmentPool(f"{ZOO}:Nim", processes=2, limits=QUICK)
    yield pool
    await pool.close()


async def test_a_stuck_environment_does_not_hold_up_others(pool: EnvironmentPool) -> None:
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


async def test_a_pool_lends_processes_again_and_no_more_than_it_may(pool: EnvironmentPool) -> None:
    first, second = Hosted(pool), Hosted(pool)
    await first.reset(0)
    await second.reset(0)
    third = Hosted(pool)
    waiting = asyncio.create_task(third.reset(0))
    await asyncio.sleep(0.05)  # no process is free, however long this takes
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
    """Four players share two processes; one player's processes are killed during its game."""
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
    assert pool.idle <= 2  # player 0 may have killed the last ones, too
    pair = [Hosted(pool), Hosted(pool)]
    await asyncio.gather(*(environment.reset(0) for environment in pair))
    assert pool.lent == 2
    await asyncio.gather(*(environment.close() for environment in pair))
    assert (pool.lent, pool.idle) == (0, 2)


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
