"""Services are killed while one trainer waits for the other's sums of joint pairs: the job ends
with the weights of an undisturbed one, bit for bit."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from redis import Redis

from tests.e2e.standing import Standing, ended, final_states, stand_up, until_job
from tests.support.waiting import until
from troupe.client import AsyncClient, AsyncJobHandle
from troupe.client.records.jobs import JobState
from troupe.cluster.state import running_state

STEPS = 16
POLICIES = ("checker", "solver")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Standing]:
    """Two trainers, of which each holds one policy."""
    directory, one = tmp_path_factory.mktemp("standing"), {"TROUPE_TRAINER_SLOTS": "1"}
    with stand_up(directory, trainers=2, environment=one) as standing:
        yield standing


@pytest.fixture(scope="module")
def undisturbed() -> dict[str, list[Any]]:
    """The states at the end of the undisturbed job, once one has run."""
    return {}


def text_of(cluster: Standing) -> str:
    job = yaml.safe_load(
        cluster.yaml(
            **{
                "pipeline.steps": STEPS,
                "pipeline.mode": "sync",
                "pipeline.deterministic": True,
                "pipeline.micro_batch_samples": 3,
                "preferences": {
                    "tasks": {"source": "tests.support.tiny_team:JointPairs"},
                    "steps": STEPS,
                    "rows_per_step": 8,
                    "joint": True,
                },
            }
        )
    )
    for name in ("workflow", "tasks", "tools", "rewards"):
        job.pop(name, None)
    return yaml.safe_dump(job)


async def expect(cluster: Standing, client: AsyncClient, states: dict[str, list[Any]]) -> None:
    """Have `states` hold those of an undisturbed job."""
    if not states:
        end = await ended(await client.submit(text_of(cluster)))
        assert end.job.state == JobState.SUCCEEDED, end.job.problem
        states |= final_states(cluster.data_dir, end.job)


def redis_of(cluster: Standing) -> Redis:
    state = running_state(cluster.data_dir)
    assert state is not None
    return Redis.from_url(state.redis_url)


def waiting(redis: Redis, job: str) -> bool:
    """Whether just one policy has given its sums of some step."""
    given = [key.decode().rsplit(":", 2)[1] for key in redis.keys(f"*{job}*:pair_sums")]
    return any(given.count(step) == 1 for step in given)


async def until_waiting(cluster: Standing, handle: AsyncJobHandle, step: int) -> None:
    """Wait until one policy waits for the other's sums in this step or a later one."""
    with redis_of(cluster) as redis:
        await until_job(handle, lambda one: one.step >= step)
        await until(lambda: waiting(redis, handle.id))


async def stop_within_an_exchange(cluster: Standing, handle: AsyncJobHandle) -> int:
    """Stop a trainer's process so that the other one waits for it; return its id."""
    pid = cluster.pid("trainer-1")
    with redis_of(cluster) as redis:
        while True:
            job = await handle.info()
            assert not job.state.ended, job
            os.kill(pid, signal.SIGSTOP)
            # Several times in turn: the other one may have been about to give its own.
            seen = []
            for _ in range(20):
                seen.append(await asyncio.to_thread(waiting, redis, handle.id))
                await asyncio.sleep(0.05)
            if all(seen[-10:]):
                return pid
            # It had given its own already, so nobody waits: let it go on a little.
            os.kill(pid, signal.SIGCONT)
            await asyncio.sleep(0.07)


def up(cluster: Standing, service: str) -> int | None:
    """Return the process of a service that serves."""
    state = running_state(cluster.data_dir)
    assert state is not None
    return next((s.pid for s in state.services if s.name == service and s.state == "serving"), None)


async def lose(cluster: Standing, names: tuple[str, ...]) -> None:
    """Kill services at once, and wait until others are in their places."""
    before = {name: cluster.pid(name) for name in names}
    for pid in before.values():
        os.kill(pid, signal.SIGKILL)
    for name, pid in before.items():
        await until(lambda name=name, pid=pid: up(cluster, name) not in (None, pid))


@pytest.mark.slow
@pytest.mark.parametrize(
    "names",
    [
        (),
        ("experience_store",),
        ("orchestrator",),
        ("redis",),
        ("redis", "experience_store", "orchestrator"),
    ],
    ids="+".join,
)
async def test_services_killed_within_an_exchange_of_sums_change_no_bit(
    cluster: Standing, undisturbed: dict[str, list[Any]], names: tuple[str, ...]
) -> None:
    async with cluster.client() as client:
        await expect(cluster, client, undisturbed)
        handle = await client.submit(text_of(cluster))
        await until_job(handle, lambda one: one.step >= 2)
        trainer = await stop_within_an_exchange(cluster, handle)
        try:
            await lose(cluster, names)
        finally:
            os.kill(trainer, signal.SIGCONT)
        end = await ended(handle)
        assert end.job.state == JobState.SUCCEEDED, end.job.problem
        audit = await handle.audit()
    assert audit.passed, audit
    assert end.job.versions == dict.fromkeys(POLICIES, STEPS)
    assert final_states(cluster.data_dir, end.job) == undisturbed
    with redis_of(cluster) as redis:
        await until(lambda: not redis.keys(f"*{handle.id}*pair_sums*"))


@pytest.mark.slow
async def test_policies_that_take_turns_on_one_device_lose_nothing_when_services_are_killed(
    tmp_path: Path, cluster: Standing, undisturbed: dict[str, list[Any]]
) -> None:
    """One of them is always suspended, with the sums that it gave in the store."""
    async with cluster.client() as client:
        await expect(cluster, client, undisturbed)
    one = {"TROUPE_TRAINER_SLOTS": "1"}
    with stand_up(tmp_path, trainers=1, environment=one) as single:
        async with single.client() as client:
            handle = await client.submit(text_of(single))
            for step, name in enumerate(("orchestrator", "experience_store", "trainer-0"), 1):
                await until_waiting(single, handle, 3 * step)
                await lose(single, (name,))
            end = await ended(handle)
            assert end.job.state == JobState.SUCCEEDED, end.job.problem
            audit = await handle.audit()
        assert audit.passed, audit
        assert final_states(single.data_dir, end.job) == undisturbed
