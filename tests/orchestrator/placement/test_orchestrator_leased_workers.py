"""The workers of a policy's lease: which ones it must not get, and when it is refused."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator

import pytest

from services.orchestrator.placement.leased_workers import LeasedWorkers
from services.orchestrator.placement.workers import WorkerHandle, WorkerRegistry
from services.orchestrator.settings import OrchestratorSettings
from tests.support.waiting import PATIENCE
from troupe.rpc import FailedPrecondition
from troupe.scheduling import binding
from troupe.v1 import orchestrator_pb2 as orchestrator_pb

WAIT_SECONDS = 60.0
FEW = binding.TooManyRanks("job/solver", ranks=4, most=2)


@pytest.fixture
async def registry() -> AsyncIterator[WorkerRegistry]:
    """A registry of two trainer workers."""
    found = WorkerRegistry(OrchestratorSettings())
    for number in range(2):
        beat = orchestrator_pb.HeartbeatRequest(
            worker_id=f"trainer-{number}",
            kind=orchestrator_pb.WORKER_KIND_TRAINER,
            address=f"127.0.0.1:{number + 1}",
        )
        found.beat(beat)
    yield found
    await found.close()


def leased(registry: WorkerRegistry) -> LeasedWorkers:
    return LeasedWorkers("solver", registry, WAIT_SECONDS, lambda: None)


def workers_of(registry: WorkerRegistry) -> list[WorkerHandle]:
    return registry.usable(orchestrator_pb.WORKER_KIND_TRAINER)


async def test_a_worker_that_failed_is_barred_while_there_is_another(
    registry: WorkerRegistry,
) -> None:
    first, second = workers_of(registry)
    workers = leased(registry)
    workers.assign(first)
    workers.unassign(avoid=first)
    assert workers.group == ()
    assert workers.barred == {first.worker_id}
    second.lose()
    assert workers.barred == set()
    assert workers.avoided == first.worker_id


async def test_a_policy_is_refused_once_no_worker_has_room(registry: WorkerRegistry) -> None:
    first, second = workers_of(registry)
    workers = leased(registry)
    error = FailedPrecondition("no room", kind="policy_too_large")
    workers.bar(first, error)
    workers.check_room()
    workers.check()
    second.lose()  # it may report again, and have room
    workers.check_room()
    workers.check()
    workers.bar(second, error)
    workers.check_room()
    with pytest.raises(FailedPrecondition, match="no room"):
        workers.check()
    assert workers.barred == {first.worker_id, second.worker_id}


async def test_a_gang_that_lost_a_member_is_broken_and_names_its_members(
    registry: WorkerRegistry,
) -> None:
    leader, member = workers_of(registry)
    workers = leased(registry)
    workers.assign(leader)
    assert workers.hosts is None
    workers.assign(leader, member)
    assert workers.group == (leader, member)
    assert workers.hosts is not None
    assert list(workers.hosts.members) == [member.address]
    assert not workers.broken
    member.lose()
    assert workers.broken


async def test_a_first_gang_that_lacks_devices_is_refused_after_the_wait(
    registry: WorkerRegistry,
) -> None:
    workers = leased(registry)
    change = asyncio.ensure_future(workers.change())
    await asyncio.sleep(0)
    assert workers.fall_short(FEW, now=10.0) == 10.0 + WAIT_SECONDS
    async with asyncio.timeout(PATIENCE):
        await change
    assert workers.shortage == FEW
    workers.check()
    # With enough devices in between, the wait restarts.
    assert workers.fall_short(None, now=60.0) == math.inf
    assert workers.fall_short(FEW, now=70.0) == 70.0 + WAIT_SECONDS
    assert workers.fall_short(FEW, now=70.0 + WAIT_SECONDS) == math.inf
    with pytest.raises(FailedPrecondition, match="a gang of 4 devices") as refused:
        workers.check()
    assert refused.value.kind == "gang_too_large"


async def test_a_gang_that_was_bound_before_is_waited_for(registry: WorkerRegistry) -> None:
    workers = leased(registry)
    workers.was_bound = True
    assert workers.fall_short(FEW, now=0.0) == math.inf
    workers.check()


async def test_workers_that_hold_something_are_named_once(registry: WorkerRegistry) -> None:
    first, second = workers_of(registry)
    workers = leased(registry)
    workers.assign(first)
    workers.touch(second)
    workers.unassign()
    assert workers.take_touched() == {first, second}
    assert workers.take_touched() == set()
