"""The store, Redis or the network fails while trainers exchange the sums of joint pairs, or one of
them gives the step up: the weights are those of an undisturbed run, bit for bit."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from testbed.chaos.proxy import Link
from tests.experience_store.test_store_process import Process
from tests.support.redis_server import RedisServer
from tests.support.waiting import until
from tests.trainer.stage import TrainingStage
from tests.trainer.test_joint_steps import (
    audited,
    checksums,
    given,
    play,
    spec_of,
    undisturbed,
)
from troupe.rpc import TroupeError


@pytest.fixture
async def store(durable_redis: RedisServer, tmp_path: Path) -> AsyncIterator[Process]:
    """A store in a process of its own, on a Redis of its own."""
    process = Process(durable_redis.url, tmp_path)
    await process.start()
    yield process
    process.end(signal.SIGKILL)


@pytest.fixture
async def store_address(store: Process) -> str:
    """Where the killable store is; it keeps its port."""
    return f"127.0.0.1:{store.port}"


async def freed(redis: RedisServer, stage: TrainingStage) -> None:
    """Wait until nothing is left in Redis of what the trainers of the job exchanged."""
    with redis.client() as client:
        await until(lambda: not client.keys(f"*{stage.job_id}*pair_sums*"))


@pytest.mark.parametrize("dead", ["store", "redis", "both"])
async def test_a_store_that_is_killed_while_a_trainer_waits_for_sums_changes_no_bit(
    stage: TrainingStage, store: Process, durable_redis: RedisServer, dead: str
) -> None:
    spec = spec_of(stage)
    trainers = {policy: await stage.trainer(worker_id=policy) for policy in ("checker", "solver")}
    for policy, trainer in trainers.items():
        await trainer.bind(spec, policy)
    await play(stage)
    solver = asyncio.create_task(trainers["solver"].run(0, 0, "solver"))
    await given(stage, "solver")
    if dead != "redis":
        store.end(signal.SIGKILL)
    if dead != "store":
        durable_redis.kill()
    # The other trainer begins its step while nothing answers.
    checker = asyncio.create_task(trainers["checker"].run(0, 0, "checker"))
    if dead != "store":
        durable_redis.start()
    if dead != "redis":
        await store.start()
    commits = {"checker": await checker, "solver": await solver}
    assert [checksums(commits)] == await undisturbed(stage)
    await audited(stage)
    await freed(durable_redis, stage)


async def test_sums_whose_answer_was_lost_on_the_way_are_the_same_when_asked_for_again(
    stage: TrainingStage, store_address: str, durable_redis: RedisServer
) -> None:
    spec = spec_of(stage)
    near = await stage.trainer()
    await near.bind(spec, "checker")
    async with Link(store_address) as link:
        far = await stage.trainer(worker_id="far", experience_store_address=link.address)
        await far.bind(spec, "solver")
        await play(stage)
        solver = asyncio.create_task(far.run(0, 0, "solver"))
        await given(stage, "solver")
        # What the store says arrives no more, and is lost with the connection.
        link.hold(forth=False)
        checker = await near.run(0, 0, "checker")
        assert not solver.done()
        link.sever()
        link.heal()
        commits = {"checker": checker, "solver": await solver}
    assert [checksums(commits)] == await undisturbed(stage)
    await audited(stage)
    await freed(durable_redis, stage)


@pytest.mark.parametrize("lost", [False, True])
async def test_a_step_given_up_while_it_waits_for_sums_finds_them_when_it_begins_again(
    stage: TrainingStage, durable_redis: RedisServer, monkeypatch: pytest.MonkeyPatch, lost: bool
) -> None:
    """Also if Redis has `lost` them, as with a late flush, after the other policy has read them."""
    spec = spec_of(stage)
    here, there = await stage.trainer(), await stage.trainer(worker_id="there")
    await here.bind(spec, "solver")
    await there.bind(spec, "checker")
    await play(stage)
    running = asyncio.create_task(here.run(0, 0, "solver"))
    await given(stage, "solver")
    await here.release("solver")
    with pytest.raises(TroupeError) as stopped:
        await running
    assert stopped.value.kind == "step_released"
    learner = there.worker.bindings.bound[(stage.job_id, "checker")].learner
    apply = learner.apply

    def apply_late(*args: Any) -> Any:
        with durable_redis.client() as client:
            for policy in ("checker", "solver"):
                step = f"troupe:{{{stage.job_id}/{policy}}}:0"
                assert client.hdel(f"{step}:step", "pair_sums")
                assert client.unlink(f"{step}:pair_sums")
        return apply(*args)

    if lost:
        monkeypatch.setattr(learner, "apply", apply_late)
    # The other policy waits for nobody, and the first finds what it has learned from.
    checker = await there.run(0, 0, "checker")
    await here.bind(spec, "solver")
    commits = {"checker": checker, "solver": await here.run(0, 0, "solver")}
    assert [checksums(commits)] == await undisturbed(stage)
    await audited(stage)
    await freed(durable_redis, stage)
