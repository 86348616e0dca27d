"""Trainers whose processes run only on demand."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.cluster.test_cluster_supervisor import spec
from tests.support.waiting import PATIENCE, until
from troupe.cluster.child import ChildState
from troupe.cluster.embedded import ElasticTrainers, pick_ports
from troupe.cluster.membership import TrainerDemand
from troupe.cluster.supervisor import Supervisor
from troupe.rpc import TroupeError, Unavailable

NAMES = ["trainer-0", "trainer-1"]


class Binder:
    """Reports the values that a test sets."""

    def __init__(self) -> None:
        self.says: TrainerDemand | TroupeError = TrainerDemand(0, 0)
        self.asked = 0

    async def demand(self) -> TrainerDemand:
        self.asked += 1
        if isinstance(self.says, TroupeError):
            raise self.says
        return self.says


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("troupe.cluster.embedded._POLL_SECONDS", 0.05)


@pytest.fixture
async def supervisor(tmp_path: Path) -> AsyncIterator[Supervisor]:
    ports = pick_ports(NAMES)
    made = Supervisor([spec(name, ports[name]) for name in NAMES], tmp_path / "logs")
    await made.start()
    yield made
    await made.stop()


def states(supervisor: Supervisor) -> list[ChildState]:
    return [supervisor.children[name].state for name in NAMES]


async def test_trainers_end_without_demand_and_return_with_it(supervisor: Supervisor) -> None:
    binder = Binder()
    binder.says = TrainerDemand(0, 1)
    pids = [child.pid for child in supervisor.children.values()]
    following = asyncio.create_task(
        ElasticTrainers(supervisor, NAMES, binder.demand, idle_seconds=0.3).run()
    )
    try:
        # A job still holds one, then the orchestrator is gone: nothing changes.
        await until(lambda: binder.asked > 8)
        binder.says = Unavailable("away")
        seen = binder.asked
        await until(lambda: binder.asked > seen + 8)
        assert states(supervisor) == [ChildState.SERVING] * 2

        binder.says = TrainerDemand(0, 0)
        await until(lambda: states(supervisor) == [ChildState.PARKED] * 2)
        assert [child.pid for child in supervisor.children.values()] == [None, None]

        # As many as wanted, or all of them if more are wanted.
        binder.says = TrainerDemand(1, 0)
        await until(lambda: states(supervisor) == [ChildState.SERVING, ChildState.PARKED])
        binder.says = TrainerDemand(5, 1)
        await until(lambda: states(supervisor) == [ChildState.SERVING] * 2)
        back = [child.pid for child in supervisor.children.values()]
        assert None not in back
        assert set(back).isdisjoint(pids)
        # A worker that came back is kept alive as before.
        os.kill(back[0] or 0, signal.SIGKILL)
        await until(lambda: supervisor.children[NAMES[0]].restarts == 1)
        await until(lambda: states(supervisor) == [ChildState.SERVING] * 2)
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)


async def test_a_trainer_that_does_not_return_is_given_up(supervisor: Supervisor) -> None:
    await supervisor.park(NAMES[0])
    child = supervisor.children[NAMES[0]]
    child.spec = spec(NAMES[0], 1, script="raise SystemExit(3)")
    await supervisor.unpark(NAMES[0])
    assert child.state == ChildState.FAILED
    async with asyncio.timeout(PATIENCE):
        assert "status 3" in str(await supervisor.failure())
