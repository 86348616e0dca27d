"""The registry of workers: joining, beating, being lost, being replaced."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from services.orchestrator.errors import Deadline
from services.orchestrator.placement.workers import WorkerHandle, WorkerRegistry
from services.orchestrator.settings import OrchestratorSettings
from tests.support.waiting import PATIENCE
from troupe.rpc import AlreadyExists, DeadlineExceeded, Unavailable
from troupe.v1 import orchestrator_pb2 as orchestrator_pb

ROLLOUT, TRAINER = orchestrator_pb.WORKER_KIND_ROLLOUT, orchestrator_pb.WORKER_KIND_TRAINER


def beat(
    worker_id: str = "w", port: int = 1, *, draining: bool = False
) -> orchestrator_pb.HeartbeatRequest:
    return orchestrator_pb.HeartbeatRequest(
        worker_id=worker_id, address=f"127.0.0.1:{port}", kind=ROLLOUT, draining=draining
    )


SETTINGS = OrchestratorSettings(heartbeat_seconds=0.02, lost_after_beats=3)


@pytest.fixture
async def registry() -> AsyncIterator[WorkerRegistry]:
    registry = WorkerRegistry(SETTINGS)
    registry.start()
    yield registry
    await registry.close()


def only(registry: WorkerRegistry) -> WorkerHandle:
    (worker,) = registry.all()
    return worker


async def test_a_worker_that_falls_silent_is_lost(registry: WorkerRegistry) -> None:
    assert registry.beat(beat()) == 0.02
    worker = only(registry)
    assert registry.usable(ROLLOUT) == [worker]
    assert registry.usable(TRAINER) == []
    with pytest.raises(Unavailable, match=r"rollout worker w at .* was lost") as caught:
        async with worker.while_alive():
            await asyncio.sleep(10)
    assert caught.value.kind == "worker_lost"
    assert registry.usable(ROLLOUT) == []
    assert registry.all() == [worker], "it can still be looked at"
    with pytest.raises(Unavailable):
        async with worker.while_alive():
            raise AssertionError("it is lost")


async def test_a_worker_that_beats_is_kept() -> None:
    now = 0.0
    registry = WorkerRegistry(SETTINGS, clock=lambda: now)
    registry.start()
    registry.beat(beat())
    for _ in range(20):
        await asyncio.sleep(0.01)
        now += 0.01
        registry.beat(beat())
    assert only(registry).alive
    await registry.close()


async def test_a_worker_whose_event_loop_does_not_advance_is_lost(
    registry: WorkerRegistry,
) -> None:
    def stalled(seconds: float) -> orchestrator_pb.HeartbeatRequest:
        report = beat()
        report.loop_seconds = seconds
        return report

    registry.beat(stalled(30))
    worker = only(registry)
    registry.beat(stalled(59))
    assert worker.alive, "a busy loop is no dead worker"
    registry.beat(stalled(61))
    assert not worker.alive
    for seconds in (62, 63):
        assert registry.beat(stalled(seconds)) == 0.02
    assert registry.all() == [worker], "its reports do not bring it back"
    registry.beat(stalled(0))
    assert only(registry) is not worker
    assert only(registry).alive


async def test_a_worker_that_comes_back_is_another(registry: WorkerRegistry) -> None:
    registry.beat(beat())
    lost = only(registry)
    lost.lose()
    registry.beat(beat())
    assert only(registry) is not lost
    assert only(registry).alive


async def test_a_successor_at_the_same_address_takes_over_at_once(
    registry: WorkerRegistry,
) -> None:
    registry.beat(beat("old"))
    old = only(registry)
    registry.beat(beat("new"))
    assert not old.alive
    assert only(registry).worker_id == "new"


async def test_two_workers_of_one_id_are_told_so_and_the_first_is_kept(
    registry: WorkerRegistry,
) -> None:
    registry.beat(beat())
    first = only(registry)
    with pytest.raises(AlreadyExists, match="a worker of this id lives at") as caught:
        registry.beat(beat(port=10))
    assert (caught.value.kind, caught.value.field) == ("worker_id_taken", "worker_id")
    assert only(registry) is first
    assert first.alive
    # Once the first is lost its id is free.
    first.lose()
    registry.beat(beat(port=10))
    assert only(registry).address == "127.0.0.1:10"


async def test_two_workers_of_one_address_do_not_take_turns(registry: WorkerRegistry) -> None:
    registry.beat(beat("old"))
    registry.beat(beat("new"))
    new = only(registry)
    for _ in range(3):
        with pytest.raises(AlreadyExists, match="worker new reports from the same address"):
            registry.beat(beat("old"))
        registry.beat(beat("new"))
    assert only(registry) is new
    # With its own address it is accepted.
    registry.beat(beat("old", port=10))
    assert [worker.worker_id for worker in registry.all()] == ["new", "old"]


async def test_a_draining_worker_gets_nothing_new(registry: WorkerRegistry) -> None:
    registry.beat(beat())
    changed = asyncio.ensure_future(registry.change())
    await asyncio.sleep(0)
    registry.beat(beat(draining=True))
    await asyncio.wait_for(changed, PATIENCE)
    assert registry.usable(ROLLOUT) == []
    assert only(registry).alive


async def test_while_alive_leaves_other_timeouts_alone(registry: WorkerRegistry) -> None:
    registry.beat(beat())

    async def own() -> None:
        async with only(registry).while_alive():
            raise TimeoutError("its own")

    with pytest.raises(TimeoutError, match="its own"):
        await own()


async def test_waiting_names_what_is_missing(registry: WorkerRegistry) -> None:
    deadline = Deadline("waiting for workers", 0.05, "workers_timeout_seconds")
    with pytest.raises(DeadlineExceeded, match="waiting for a rollout and a trainer worker"):
        await registry.wait_for((ROLLOUT, TRAINER), deadline)


async def test_a_stalled_orchestrator_does_not_blame_its_workers() -> None:
    now = 0.0
    registry = WorkerRegistry(SETTINGS, clock=lambda: now)
    registry.start()
    registry.beat(beat())
    await asyncio.sleep(0.015)
    now += 100.0  # this process was stopped
    await asyncio.sleep(0.03)  # several looks of the registry; more of them change nothing
    assert only(registry).alive
    async with asyncio.timeout(PATIENCE):
        while only(registry).alive:
            now += 0.01
            await asyncio.sleep(0.012)
    await registry.close()
