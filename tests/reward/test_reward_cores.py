"""Cores for calls: as many as pay, given while one runs, and taken back."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Sequence

import psutil
import pytest
import pytest_asyncio
from hypothesis import given
from hypothesis import strategies as st

from services.reward.call import FunctionCall
from services.reward.cgroups import Affinity, CoreManager, usable_cores
from services.reward.dispatch.invocation import PendingInvocation
from services.reward.dispatch.queues import Queues
from services.reward.function import RegisteredFunction
from services.reward.quota import Budget
from tests.reward.test_reward_service import Client, client_of
from tests.support.waiting import PATIENCE, block_until, until
from troupe.rpc import InvalidArgument, new_id
from troupe.v1 import reward_pb2 as reward_pb

two_cores = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")


class Recorder:
    """A backend that only records its calls."""

    name = "recorder"

    def __init__(self) -> None:
        self.held: dict[str, Sequence[int]] = {}

    def adopt(self, group: str, pids: Sequence[int]) -> None:
        self.held[group] = ()

    def grant(self, group: str, cores: Sequence[int]) -> None:
        self.held[group] = cores

    def revoke(self, group: str) -> None:
        self.held[group] = ()

    def forget(self, group: str) -> None:
        self.held.pop(group, None)

    def close(self) -> None:
        self.held.clear()


def test_cores_of_one_node_first() -> None:
    manager = CoreManager({0: [0, 1, 2, 3], 1: [4, 5]}, Recorder())
    pair = manager.take("a", 2)
    assert pair.cores == (4, 5)  # the node that it fills, not the one that it would split
    assert manager.take("b", 3).cores == (0, 1, 2)
    manager.give_back(pair)
    assert manager.take("c", 3).cores == (4, 5, 3)
    with pytest.raises(ValueError, match="1 cores wanted, 0 are free"):
        manager.take("d", 1)


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 5)), max_size=30))
def test_property_no_core_is_held_twice(moves: list[tuple[bool, int]]) -> None:
    manager = CoreManager({0: [0, 1, 2], 1: [3, 4, 5]}, Recorder())
    leases = []
    for give, count in moves:
        if give and leases:
            manager.give_back(leases.pop(count % len(leases)))
        elif count <= manager.free:
            leases.append(manager.take(str(count), count))
        held = [core for lease in leases for core in lease.cores]
        assert len(held) == len(set(held)) == 6 - manager.free


@pytest.fixture
def spinner() -> Iterator[subprocess.Popen[bytes]]:
    """A process with a child."""
    program = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'input()'])"
    process = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE)
    try:
        yield process
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in psutil.Process(process.pid).children():
                child.kill()
        process.kill()
        process.wait()


def test_affinity_reaches_children(spinner: subprocess.Popen[bytes]) -> None:
    core = min(os.sched_getaffinity(0))
    manager = CoreManager({0: [core]}, Affinity())
    block_until(psutil.Process(spinner.pid).children)
    children = psutil.Process(spinner.pid).children()
    manager.adopt("w", [spinner.pid])
    lease = manager.take("w", 1)
    manager.grant(lease)
    assert children[0].cpu_affinity() == psutil.Process(spinner.pid).cpu_affinity() == [core]
    manager.give_back(lease)
    if os.geteuid() == 0:
        assert children[0].nice() == 19
    for process in (*children, spinner):
        process.kill()
        process.wait()
    manager.grant(lease)  # of a process that is gone: nothing to report, nothing to harm


def test_more_cores_than_there_are() -> None:
    with pytest.raises(ValueError, match="cores wanted, this process may use"):
        usable_cores(10_000)


# Through the service.


@two_cores
@pytest.mark.parametrize("backend", ["auto", "affinity"])
async def test_a_call_runs_on_the_cores_that_it_was_given(backend: str) -> None:
    async with client_of(reward_workers=2, reward_cores=2, reward_core_backend=backend) as client:
        await client.register("its_cores", max_cores=2, parallel_fraction=1.0)
        alone = await client.invoke("its_cores")
        assert (alone.cores, alone.result_json) == (2, "2")
        await client.register("its_cores", version="narrow")
        narrow = await asyncio.gather(*(client.invoke("its_cores") for _ in range(4)))
        assert [(one.cores, one.result_json) for one in narrow] == [(1, "1")] * 4
        # A worker that died left nothing held, and its successor is given cores again.
        await client.register("dies")
        assert (
            await client.invoke("dies")
        ).error.kind == reward_pb.InvocationError.KIND_WORKER_DIED
        again = await asyncio.gather(*(client.invoke("its_cores") for _ in range(4)))
        assert [one.result_json for one in again] == ["1"] * 4


@two_cores
@pytest.mark.parametrize("parallel", [0.0, 1.0])
async def test_calls_that_could_use_more_cores_than_there_are_all_end(parallel: float) -> None:
    """While all runs had one number of cores, one call in eight explores another one: never one
    that no host has, for which it and all behind it would wait for ever."""
    async with client_of(reward_workers=2, reward_cores=2) as client:
        await client.register("its_cores", max_cores=8, parallel_fraction=parallel)
        for _ in range(3):
            calls = (client.invoke("its_cores") for _ in range(40))
            done = await asyncio.wait_for(asyncio.gather(*calls), PATIENCE)
            assert {one.cores for one in done} <= {1, 2}


@two_cores
async def test_the_speed_up_of_a_function_is_learned() -> None:
    async with client_of(reward_workers=2, reward_cores=2) as client:
        # It declares that it scales, so it gets both; now and then an untried number of cores.
        await client.register("sleeps", max_cores=2, parallel_fraction=1.0)
        calls = [await client.invoke("sleeps", {"seconds": 0.02}) for _ in range(40)]
        assert calls[0].cores == 2
        assert {one.cores for one in calls} == {1, 2}
        listed = (await client.stub.ListFunctions(reward_pb.ListFunctionsRequest())).functions
        (status,) = (one for one in listed if one.function.name == "sleeps")
        assert min(status.serial_seconds, status.parallel_seconds) >= 0
        assert status.serial_seconds + status.parallel_seconds > 0.01


@two_cores
async def test_held_cores_are_listed_by_function() -> None:
    async with client_of(reward_workers=2, reward_cores=2) as client:
        await client.register("sleeps", cores=2)

        async def held() -> int:
            listed = (await client.stub.ListFunctions(reward_pb.ListFunctionsRequest())).functions
            return listed[0].cores_held

        async def holds(cores: int) -> None:
            async def so_many() -> bool:
                return await held() == cores

            await until(so_many)

        call = asyncio.create_task(client.invoke("sleeps", {"seconds": 0.3}))
        await holds(2)
        await call
        await holds(0)


async def test_a_function_that_could_never_run_is_refused_when_registered(
    client_with_one_core: Client,
) -> None:
    for fields, field in [
        ({"cores": 2}, "function.cores"),
        ({"cores": 1, "max_cores": -1}, "function.max_cores"),
        ({"cores": 0, "parallel_fraction": 1.5}, "function.parallel_fraction"),
    ]:
        with pytest.raises(InvalidArgument) as caught:
            await client_with_one_core.register("score", version=new_id(), **fields)
        assert caught.value.field == field


@pytest_asyncio.fixture
async def client_with_one_core() -> AsyncIterator[Client]:
    async with client_of(reward_workers=1, reward_cores=1) as client:
        yield client


# The queues.


def _waiting(function: RegisteredFunction, arrival: int, priority: int = 0) -> PendingInvocation:
    done: asyncio.Future[reward_pb.InvokeResponse] = asyncio.Future(loop=asyncio.new_event_loop())
    rank = (0.0, arrival)
    call = FunctionCall("{}", priority=priority)
    return PendingInvocation(str(arrival), function, call, done, float(arrival), rank)


def test_queues_function_without_room_delays_no_other() -> None:
    limited = RegisteredFunction(reward_pb.FunctionSpec(name="limited"))
    other = RegisteredFunction(reward_pb.FunctionSpec(name="other"))

    def room(function: RegisteredFunction) -> int:
        return 1 if function is limited else 9

    queues = Queues()
    for arrival in range(4):
        queues.add(_waiting(limited, arrival))
    late, urgent = _waiting(other, 9), _waiting(other, 10, priority=1)
    queues.add(late)
    queues.add(urgent)
    assert [w.invocation_id for w in queues.first(10, Budget({}, 0), room)] == ["10", "0", "9"]
    queues.remove(late)
    assert [w.invocation_id for w in queues.first(1, Budget({}, 0), room)] == ["10"]
    assert (len(queues), limited.queued, other.queued) == (5, 4, 1)
