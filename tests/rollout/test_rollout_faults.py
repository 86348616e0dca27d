"""Infrastructure that is killed under trajectories costs time, and decides nothing."""

# ruff: noqa: ASYNC240 - these tests watch processes and files

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from services.rollout import rewards
from tests.rollout import plays
from tests.rollout.fragile import Workshop
from tests.rollout.house import PLAYS, House, open_house, training
from tests.rollout.processes import ServiceProcess
from tests.support.redis_server import RedisServer
from tests.support.waiting import until
from troupe.rpc import connect, new_id
from troupe.tensors import to_proto
from troupe.v1 import common_pb2 as common_pb
from troupe.v1 import experience_store_pb2 as store_pb
from troupe.v1 import reward_pb2 as reward_pb
from troupe.v1 import reward_pb2_grpc as reward_grpc

COMPLETED = common_pb.TRAJECTORY_STATE_COMPLETED
FAILED = common_pb.TRAJECTORY_STATE_FAILED
DETERMINISTIC = {"pipeline": {"deterministic": True}}
SCORED = {"rewards": {"score": {"entrypoint": f"{PLAYS}:takes_its_time"}}}


@pytest.fixture
def traces(tmp_path: Path) -> Path:
    """Where `takes_its_time` leaves process ids."""
    path = tmp_path / "traces"
    path.mkdir()
    return path


@pytest.fixture
def reward(tmp_path: Path, traces: Path) -> Iterator[ServiceProcess]:
    """A reward service of this test's own."""
    (tmp_path / "reward").mkdir()
    process = ServiceProcess(
        "reward",
        tmp_path / "reward",
        {"TROUPE_TEST_TRACES": str(traces), "TROUPE_REWARD_ENVIRONMENT": "TROUPE_TEST_*"},
    )
    process.start()
    yield process
    process.stop()


async def calls(traces: Path, count: int) -> list[list[int]]:
    """Process ids (worker, its parent) of the first `count` calls, once they have begun."""
    await until(lambda: sum(bool(p.read_text()) for p in traces.iterdir()) >= count)
    return [list(map(int, path.read_text().split())) for path in sorted(traces.iterdir())]


@pytest.mark.parametrize("kills", [1, pytest.param(3, marks=pytest.mark.slow)])
async def test_a_reward_service_that_is_killed_costs_time_only(
    tmp_path: Path, reward: ServiceProcess, store_process: ServiceProcess, traces: Path, kills: int
) -> None:
    async with open_house(tmp_path, store=store_process.address, reward=reward.address) as house:
        # Less than one restart takes: in a deterministic job only the workflow's time counts.
        await house.prepare(
            "one_turn", limits={"trajectory_seconds": 0.4}, **SCORED, **DETERMINISTIC
        )
        await house.open_step(queries=1, group_size=2)
        running = asyncio.create_task(house.run(training(1, 2)))
        begun = 0
        for _ in range(kills):
            # As soon as one has restarted: none may end before the last kill.
            await calls(traces, begun + 1)
            reward.kill()
            await asyncio.sleep(0.5)  # how long the service is away; any time will do
            begun = len(list(traces.iterdir()))
            await asyncio.to_thread(reward.start)
        ended = await running
        assert {e.state for e in ended.values()} == {COMPLETED}, ended
        for event in ended.values():
            assert event.rewards["checker"] == 10.0
        assert (await house.step()).sealed


async def test_without_determinism_the_trajectorys_time_is_the_bound(
    tmp_path: Path, reward: ServiceProcess, traces: Path
) -> None:
    async with open_house(tmp_path, reward=reward.address) as house:
        await house.prepare("one_turn", limits={"trajectory_seconds": 20}, **SCORED)
        running = asyncio.create_task(house.run_one())
        await calls(traces, 1)
        reward.kill()
        event = await running
        assert event.state == FAILED
        assert "deadline" in event.reason
        await asyncio.to_thread(reward.start)
        assert (await house.run_one()).state == COMPLETED


async def test_a_reward_worker_that_is_killed_is_forgiven(
    tmp_path: Path, reward: ServiceProcess, traces: Path
) -> None:
    async with open_house(tmp_path, reward=reward.address) as house:
        await house.prepare("one_turn", **SCORED)
        running = asyncio.create_task(house.run_one())
        for kill in range(rewards.LIVES - 1):
            worker, _ = (await calls(traces, kill + 1))[kill]
            os.kill(worker, signal.SIGKILL)
        event = await running
        assert event.state == COMPLETED, event.reason
        assert len(await calls(traces, rewards.LIVES)) == rewards.LIVES


async def test_an_invocation_that_somebody_else_cancelled_is_asked_for_again(
    tmp_path: Path, reward: ServiceProcess, traces: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids: list[str] = []

    def remembered(prefix: str) -> str:
        ids.append(new_id(prefix))
        return ids[-1]

    monkeypatch.setattr(rewards, "new_id", remembered)
    async with open_house(tmp_path, reward=reward.address) as house:
        await house.prepare("one_turn", **SCORED)
        running = asyncio.create_task(house.run_one())
        await calls(traces, 1)
        channel = connect(reward.address)
        await reward_grpc.RewardStub(channel).CancelInvocation(
            reward_pb.CancelInvocationRequest(invocation_id=ids[-1])
        )
        await channel.close(None)
        assert (await running).state == COMPLETED
        assert len(set(ids)) == len(ids) > 2


async def test_an_engine_that_is_away_for_long_changes_no_bit_of_a_deterministic_job(
    tmp_path: Path, store_process: ServiceProcess, quick_restarts: None
) -> None:
    rows = []
    for disturbed in (False, True):
        workshop = Workshop()
        async with open_house(tmp_path, store=store_process.address, make=workshop) as house:
            limits = {"turn_seconds": 0.3, "trajectory_seconds": 0.5}
            await house.prepare("team", limits=limits, **DETERMINISTIC)
            await house.open_step()
            running = asyncio.create_task(house.run(training()))
            if disturbed:
                for engine in (workshop.engines["big"][0], workshop.engines["small"][0]):
                    await until(lambda engine=engine: engine.load().running > 0)  # type: ignore[misc]
                    engine.failing_starts = 4  # away for longer than both limits
                    engine.pull_plug()
            ended = await running
            assert {e.state for e in ended.values()} == {COMPLETED}, ended
            rows.append([as_bytes(s) for p in ("big", "small") for s in await house.samples(p)])
    assert len(rows[0]) == 12
    assert sorted(rows[0]) == sorted(rows[1])


async def test_a_deterministic_workflow_that_hangs_by_itself_still_ends(tmp_path: Path) -> None:
    async with open_house(tmp_path) as house:
        await house.prepare("never_returns", limits={"trajectory_seconds": 0.5}, **DETERMINISTIC)
        event = await house.run_one()
        assert event.state == FAILED
        assert event.reason.startswith("deadline: not done within limits.trajectory_seconds")


async def test_a_store_above_its_high_water_mark_is_waited_for(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    # The mark is for the payloads of all jobs of a Redis: not the one that tests share.
    redis = RedisServer(tmp_path)
    redis.start()
    settings = {"TROUPE_REDIS_URL": redis.url, "TROUPE_STORE_HIGH_WATER_MIB": "2"}
    store = ServiceProcess("experience_store", tmp_path / "store", settings)
    store.start()
    plays.RELEASED = asyncio.Event()
    try:
        async with open_house(tmp_path, store=store.address) as house:
            hoard = new_id("hoard")
            await fill(house, hoard, 3 << 20)
            await house.prepare("one_turn")
            await house.open_step(step=0)
            await house.open_step(step=1)
            # The oldest step continues, otherwise nothing ever would.
            ended = await house.run(training(step=0), step=0)
            assert {e.state for e in ended.values()} == {COMPLETED}
            running = asyncio.create_task(house.run(training(step=1), step=1))
            await asyncio.sleep(1.5)  # nothing frees rows, so that it waits however long this takes
            assert not running.done()
            assert len(house.service._runner) == 4
            await house.store.DropTables(
                store_pb.DropTablesRequest(request_id=new_id("drop"), job_id=hoard)
            )
            assert {e.state for e in (await running).values()} == {COMPLETED}
            assert (await house.step(1)).sealed
    finally:
        store.stop()
        redis.stop()


async def fill(house: House, job_id: str, size: int) -> None:
    """Rows of `size` bytes in a job of their own."""
    ids = to_proto(np.zeros(4, np.int32))
    sample = store_pb.Sample(
        sample_id="q0_0_q0-s0-t0",
        policy="p",
        query_id="q0",
        trajectory_id="q0-s0-t0",
        agent="a",
        group_id="q0/a",
        prompt_ids=ids,
        response_ids=ids,
        logprobs=to_proto(np.zeros(4, np.float32)),
        reward=1.0,
        columns={"weight": store_pb.Column(tensor=to_proto(np.zeros(size // 4, np.float32)))},
    )
    requests: list[tuple[Any, Any]] = [
        (house.store.CreateTables, store_pb.CreateTablesRequest(policies=["p"])),
        (
            house.store.OpenStep,
            store_pb.OpenStepRequest(query_ids=["q0"], group_size=2, versions={"p": 0}),
        ),
        (
            house.store.AppendTrajectory,
            store_pb.AppendTrajectoryRequest(
                query_id="q0", trajectory_id="q0-s0-t0", state=COMPLETED, samples=[sample]
            ),
        ),
    ]
    for call, request in requests:
        request.request_id, request.job_id = new_id("fill"), job_id
        await call(request)


def as_bytes(sample: store_pb.Sample) -> bytes:
    """All of a row."""
    return sample.SerializeToString(deterministic=True)
