"""A job in Redis: its state machine, its log; nothing twice."""

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from services.orchestrator.populations.state import PopulationStore
from services.orchestrator.state.event_log import EventLog
from services.orchestrator.state.job_store import JobStore, Superseded
from services.orchestrator.state.records import JobRecord
from services.orchestrator.state.redis import JobKeys, RedisAccess, StateUnavailable
from tests.support.cluster import job_yaml
from tests.support.ports import free_port
from tests.support.waiting import PATIENCE, until
from troupe import states
from troupe.job import parse_job
from troupe.rpc import FailedPrecondition, InvalidArgument, NotFound, new_id
from troupe.v1 import common_pb2 as common_pb
from troupe.v1 import orchestrator_pb2 as orchestrator_pb


@dataclass
class Desk:
    """The durable parts, on the shared Redis."""

    redis: RedisAccess
    log: EventLog
    store: JobStore

    async def make(
        self, state: common_pb.JobState.ValueType = common_pb.JOB_STATE_SUBMITTED
    ) -> JobRecord:
        record = JobRecord(
            job_id=new_id("job"),
            request_id="r",
            spec_json=parse_job(job_yaml()).model_dump_json(),
            directory=Path("/tmp/nowhere"),
            created_at=time.time(),
            state=state,
        )
        assert await self.store.create(record)
        return record


@pytest.fixture
async def desk(redis_url: str) -> AsyncIterator[Desk]:
    redis = RedisAccess(redis_url)
    log = EventLog(redis)
    store = JobStore(redis, log)
    yield Desk(redis, log, store)
    await redis.close()


async def test_a_record_comes_back_as_it_was(desk: Desk) -> None:
    record = replace(
        await desk.make(),
        job_id=new_id("job"),
        problem=common_pb.Problem(kind="k", message="m"),
        before={"reward/solver": 0.25},
        step=3,
        versions={"solver": 2},
    )
    await desk.store.create(record)
    assert await desk.store.get(record.job_id) == record
    assert not await desk.store.create(replace(record, step=0)), "the first one stays"
    assert record.job_id in await desk.store.ids()
    with pytest.raises(NotFound):
        await desk.store.get("nobody")


@pytest.mark.parametrize("source", list(states.JOB))
async def test_the_state_machine_is_the_table(
    desk: Desk, source: common_pb.JobState.ValueType
) -> None:
    for target in states.JOB:
        job_id = (await desk.make(source)).job_id
        count = len(await desk.log.page(job_id, ""))
        if states.allowed(states.JOB, source, target):  # type: ignore[arg-type]
            moved = await desk.store.move(job_id, target)  # type: ignore[arg-type]
            assert moved.state == target
            (event,) = (await desk.log.page(job_id, ""))[count:]
            assert event.state.state == target
            continue
        if source == target:
            await desk.store.move(job_id, target)  # type: ignore[arg-type]
        else:
            with pytest.raises(FailedPrecondition):
                await desk.store.move(job_id, target)  # type: ignore[arg-type]
        assert (await desk.store.get(job_id)).state == source
        assert len(await desk.log.page(job_id, "")) == count


async def test_of_many_at_once_one_moves_it(desk: Desk) -> None:
    job_id = (await desk.make(common_pb.JOB_STATE_RUNNING)).job_id
    targets = (
        common_pb.JOB_STATE_SUCCEEDED,
        common_pb.JOB_STATE_FAILED,
        common_pb.JOB_STATE_CANCELLING,
    )
    results = await asyncio.gather(
        *(desk.store.move(job_id, target) for target in targets), return_exceptions=True
    )
    assert sum(not isinstance(result, Exception) for result in results) == 1
    assert len(await desk.log.page(job_id, "")) == 2


async def test_only_the_newest_runner_writes(desk: Desk) -> None:
    job_id = (await desk.make()).job_id
    old = await desk.store.adopt(job_id)
    new = await desk.store.adopt(job_id)
    with pytest.raises(Superseded, match="another orchestrator"):
        await desk.store.move(job_id, common_pb.JOB_STATE_STARTING, epoch=old)
    with pytest.raises(Superseded):
        await desk.store.finish_step(job_id, old, 0, {})
    with pytest.raises(Superseded):
        await desk.store.note_checkpoint(job_id, old, 1, None)
    with pytest.raises(Superseded):
        await desk.store.note_version(job_id, old, "solver", 1)
    await desk.store.move(job_id, common_pb.JOB_STATE_STARTING, epoch=new)


async def test_a_step_is_finished_once(desk: Desk) -> None:
    job_id = (await desk.make()).job_id
    epoch = await desk.store.adopt(job_id)
    assert await desk.store.finish_step(job_id, epoch, 0, {"reward/mean": 0.5})
    assert not await desk.store.finish_step(job_id, epoch, 0, {"reward/mean": 0.7})
    assert await desk.store.finish_step(job_id, epoch, 1, {"kl": 0.1})
    assert (await desk.store.get(job_id)).step == 2
    assert [row.step for row in await desk.store.metrics(job_id)] == [1, 2]
    [view] = await desk.store.views([job_id])
    assert view.metrics == {"reward/mean": 0.5, "kl": 0.1}


async def test_a_row_may_have_any_number_of_metrics(desk: Desk) -> None:
    """A workflow names its own: one per task is thousands. So do members' answers in a game."""
    job_id = (await desk.make()).job_id
    epoch = await desk.store.adopt(job_id)
    values = {f"trajectory/solved_{number}": float(number) for number in range(10_000)}
    assert await desk.store.finish_step(job_id, epoch, 0, values)
    [view] = await desk.store.views([job_id])
    assert view.metrics == values
    populations = PopulationStore(desk.redis, desk.store)
    answers = {f"pool/{number}": "{}" for number in range(10_000)}
    await populations.add_answers(job_id, epoch, answers)
    assert await populations.answers(job_id, ["pool/0", "pool/9999"]) == {
        "pool/0": "{}",
        "pool/9999": "{}",
    }


async def test_the_data_that_a_list_of_jobs_reads_does_not_grow_with_steps(desk: Desk) -> None:
    """Users poll lists of dozens of jobs, each of tens of thousands of steps."""
    record = await desk.make()
    job_id = record.job_id
    sizes = []
    epoch = await desk.store.adopt(job_id)
    for step in range(200):
        await desk.store.note_version(job_id, epoch, "solver", step + 1)
        await desk.store.finish_step(job_id, epoch, step, {"reward/mean": 0.5})
        keys = JobKeys(job_id)
        read = [await desk.redis.call("HLEN", key) for key in (keys.record, keys.latest)]
        sizes.append(read)
    assert sizes[0] == sizes[-1]
    [view] = await desk.store.views([job_id])
    assert view.record.versions == {"solver": 200}
    await desk.store.delete(job_id)
    assert await desk.redis.call("KEYS", f"*{job_id}*") == []


async def test_a_problem_goes_when_the_job_is_resumed(desk: Desk) -> None:
    job_id = (await desk.make(common_pb.JOB_STATE_RUNNING)).job_id
    problem = common_pb.Problem(kind="engine_died", message="it died")
    record = await desk.store.move(job_id, common_pb.JOB_STATE_FAILED, problem=problem)
    assert record.problem == problem
    assert record.ended_at > 0
    record = await desk.store.move(job_id, common_pb.JOB_STATE_SUBMITTED)
    assert record.problem is None
    assert record.ended_at == 0


async def test_a_follower_reads_pages_and_then_waits(desk: Desk) -> None:
    job_id = (await desk.make(common_pb.JOB_STATE_RUNNING)).job_id
    for n in range(600):
        await desk.log.notice(job_id, orchestrator_pb.Notice.SEVERITY_INFO, str(n))
    seen: list[orchestrator_pb.JobEvent] = []

    async def running() -> bool:
        return False

    async def follow() -> None:
        async for event in desk.log.follow(job_id, "", running):
            seen.append(event)  # noqa: PERF401

    task = asyncio.create_task(follow())
    await until(lambda: len(seen) == 601)
    desk.log.show(job_id, orchestrator_pb.Activity(text="rolling out"))
    await until(lambda: seen[-1].HasField("activity"))
    await desk.store.move(job_id, common_pb.JOB_STATE_SUCCEEDED)
    await asyncio.wait_for(task, PATIENCE)
    assert [e.notice.text for e in seen if e.HasField("notice")] == [str(n) for n in range(600)]
    assert seen[-1].state.state == common_pb.JOB_STATE_SUCCEEDED
    ids = [event.event_id for event in seen if event.event_id]
    assert ids == sorted(set(ids), key=lambda i: tuple(map(int, i.split("-"))))


async def test_of_activities_a_slow_follower_gets_the_newest(desk: Desk) -> None:
    job_id = (await desk.make(common_pb.JOB_STATE_RUNNING)).job_id

    async def running() -> bool:
        return False

    following = desk.log.follow(job_id, "", running)
    await anext(following)
    for n in range(1000):
        desk.log.show(job_id, orchestrator_pb.Activity(text=str(n)))
    assert (await anext(following)).activity.text == "999"
    assert desk.log.activity(job_id) == "999"
    await following.aclose()  # type: ignore[attr-defined]
    assert not desk.log._waiting


async def test_a_redis_that_is_not_there_is_named_without_its_password() -> None:
    port = free_port()
    redis = RedisAccess(f"redis://:secret@127.0.0.1:{port}/0", patience=0.1)
    with pytest.raises(StateUnavailable) as caught:
        await redis.ping()
    text = str(caught.value)
    assert f"redis://127.0.0.1:{port}/0" in text
    assert "secret" not in text
    assert "TROUPE_REDIS_URL" in text
    await redis.close()


async def test_directories_follow_the_data_directory(desk: Desk, tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    before = JobStore(desk.redis, desk.log, data_dir=old)
    after = JobStore(desk.redis, desk.log, data_dir=new)
    record = replace(await desk.make(), job_id=new_id("job"), directory=old / "solved")
    await before.create(record)
    key = JobKeys(record.job_id).record
    assert await desk.redis.call("HGET", key, "directory") == b"solved"
    assert (await before.get(record.job_id)).directory == old / "solved"
    assert (await after.get(record.job_id)).directory == new / "solved"
    [view] = await after.views([record.job_id])
    assert view.record.directory == new / "solved"


async def test_metrics_come_in_pages_the_newest_first(desk: Desk) -> None:
    job_id = (await desk.make(common_pb.JOB_STATE_RUNNING)).job_id
    assert await desk.store.metrics_page(job_id, 10, "") == ([], "")
    epoch = await desk.store.adopt(job_id)
    for step in range(25):
        await desk.store.finish_step(job_id, epoch, step, {"a": step / 4})
    seen: list[list[int]] = []
    token, more = "", True
    while more:
        rows, token = await desk.store.metrics_page(job_id, 10, token)
        seen.append([row.step for row in rows])
        # A page does not change when rows are added.
        await desk.store.finish_step(job_id, epoch, 24 + len(seen), {"a": 1.0})
        more = bool(token)
    assert seen == [[*range(16, 26)], [*range(6, 16)], [*range(1, 6)]]
    for wrong in ("-1", "0", "x", "1" * 30):
        with pytest.raises(InvalidArgument, match="page"):
            await desk.store.metrics_page(job_id, 10, wrong)


async def test_later_steps_are_read_without_the_history(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id = (await desk.make(common_pb.JOB_STATE_RUNNING)).job_id
    epoch = await desk.store.adopt(job_id)
    for step in range(400):
        await desk.store.finish_step(job_id, epoch, step, {"a": 1.0})
    read: list[int] = []
    page = desk.store.metrics_page

    async def counted(*given: Any) -> tuple[list[orchestrator_pb.MetricsLogged], str]:
        rows, token = await page(*given)
        read.append(len(rows))
        return rows, token

    monkeypatch.setattr(desk.store, "metrics_page", counted)
    for after in (0, 1, 150, 397, 400):
        read.clear()
        found = [row.step for row in await desk.store.metrics(job_id, after)]
        assert found == [*range(after + 1, 401)]
        # One page more than needed, and each page is four times the previous one.
        assert sum(read) <= min(400, 5 * max(64, 400 - after))


async def test_a_follower_skips_old_metrics_only(desk: Desk) -> None:
    job_id = (await desk.make(common_pb.JOB_STATE_RUNNING)).job_id
    epoch = await desk.store.adopt(job_id)
    for step in range(300):
        await desk.store.finish_step(job_id, epoch, step, {"a": 1.0})
        if step % 100 == 0:
            await desk.log.notice(job_id, orchestrator_pb.Notice.SEVERITY_INFO, f"after {step}")
    await desk.store.move(job_id, common_pb.JOB_STATE_SUCCEEDED)

    async def ended() -> bool:
        return True

    async def told(after: str, recent: int | None) -> list[str]:
        events = [one async for one in desk.log.follow(job_id, after, ended, recent)]
        return [f"{one.metrics.step}" if one.HasField("metrics") else "-" for one in events]

    assert await told("", 5) == [*"----", "297", "298", "299", "300", "-"]
    assert len(await told("", None)) == len(await told("", 10_000)) == 305
    # A client that reconnects gets the events since then.
    first = (await desk.log.page(job_id, ""))[0].event_id
    assert len(await told(first, 5)) == 304
