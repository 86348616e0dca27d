"""Steps: admission, status, trimming, dropping, watching, listing."""

from __future__ import annotations

import asyncio

import pytest

from services.experience_store.notices import Notices
from services.experience_store.records import JobTableKeys
from services.experience_store.store import Store
from tests.support.experience import Stage, make_stage
from tests.support.waiting import PATIENCE
from troupe.rpc import AlreadyExists, FailedPrecondition, InvalidArgument, NotFound, new_id
from troupe.v1 import common_pb2 as common_pb
from troupe.v1 import experience_store_pb2 as store_pb


async def keys_of(store: Store, job: str) -> list[bytes]:
    keys: list[bytes] = await store.database.call("KEYS", f"*{job}*")
    return keys


async def finish(stage: Stage, *policies: str) -> None:
    """Train the open step in these policies, by default in all."""
    await stage.append_all()
    for policy in policies or stage.policies:
        await stage.claim(claim=f"c{stage.step}-{policy}", policy=policy)
        claims = [f"c{stage.step}-{policy}"]
        await stage.commit(claims, policy=policy, version=stage.step + 1)


async def test_tables_are_declared_once(store: Store) -> None:
    job = new_id("job")
    await store.tables.create(job, ["b", "a"], ["ref"])
    await store.tables.create(job, ["a", "b"], ["ref"])
    with pytest.raises(AlreadyExists) as error:
        await store.tables.create(job, ["a"], ["ref"])
    assert (error.value.kind, error.value.field) == ("tables_differ", "policies")
    with pytest.raises(AlreadyExists) as error:
        await store.tables.create(job, ["a", "b"], [])
    assert error.value.field == "required_columns"


async def test_the_first_opening_decides_what_a_step_consists_of(stage: Stage) -> None:
    await stage.append("q0", "q0-s0-t0")
    assert await stage.open(0) == (True, ["q0-s0-t0"])
    # Policies that have committed since have newer versions: the step keeps its own.
    assert await stage.open(0, version=1) == (True, ["q0-s0-t0"])
    status = await stage.store.steps.status(stage.job, 0)
    assert status.versions == {"checker": 0, "solver": 0}
    assert status.query_ids == ["q0", "q1"]
    stage.queries = ("q0", "q2")
    with pytest.raises(FailedPrecondition) as error:
        await stage.open(0)
    assert (error.value.kind, error.value.field) == ("step_differs", "query_ids")


async def test_a_step_that_is_not_open_is_refused_as_such(stage: Stage) -> None:
    assert not (await stage.store.steps.status(stage.job, 5)).open
    with pytest.raises(NotFound):
        await stage.store.steps.status("nobody", 0)


async def test_committed_steps_are_forgotten_after_a_while(stage: Stage) -> None:
    for step in range(7):
        if step:
            await stage.open(step)
        await finish(stage, *(("solver",) if step > 2 else ()))
    # keep_steps is 2 here; one policy has not committed step 3, none of which may be lost.
    assert await stage.store.steps.all(stage.job) == [3, 4, 5, 6]
    await stage.store.sweeper.sweep()
    assert await stage.store.steps.live(stage.job) == [3, 4, 5, 6]
    stage.step = 0
    with pytest.raises(FailedPrecondition):
        await stage.claim()
    assert all(b":0:" not in key for key in await keys_of(stage.store, stage.job))


async def test_a_job_that_cannot_be_swept_does_not_delay_others(stage: Stage) -> None:
    database = stage.store.database
    broken = [f"broken-{n}" for n in range(20)]  # whichever comes first
    for job in broken:
        await database.call("SADD", "troupe:jobs", job)
        await database.call("ZADD", JobTableKeys(job).live, 0, 0)
        await database.call("SET", JobTableKeys(job).tables, "no table")
    await stage.append("q0", "q0-s0-t0")
    await stage.store.sweeper.sweep()
    assert (stage.job, 0) in stage.store.sweeper._decided
    for job in broken:
        await database.call("SREM", "troupe:jobs", job)
        await database.call("DEL", JobTableKeys(job).live, JobTableKeys(job).tables)


async def test_memory_does_not_grow_with_steps(stage: Stage) -> None:
    sizes = []
    for step in range(8):
        if step:
            await stage.open(step)
        await finish(stage)
        sizes.append(len(await keys_of(stage.store, stage.job)))
    assert len(set(sizes[3:])) == 1


async def test_dropping_tables_frees_everything(stage: Stage) -> None:
    await finish(stage)
    await stage.open(1)
    await stage.append("q0", "q0-s1-t0")
    await stage.store.tables.drop(stage.job)
    left = [key.decode().rpartition("}:")[2] for key in await keys_of(stage.store, stage.job)]
    log, versions = {"log", "logged-tables", "totals"}, {"versioned", "versions", "checksums"}
    assert set(left) == log | versions, "the log and the versions outlive the tables"
    with pytest.raises(AlreadyExists, match="purge_log"):
        await stage.store.tables.create(stage.job, stage.policies, [])
    await stage.store.tables.drop(stage.job, purge_log=True)
    assert await keys_of(stage.store, stage.job) == []
    assert not await stage.store.database.call("SISMEMBER", "troupe:jobs", stage.job)
    await stage.store.tables.drop(stage.job)
    with pytest.raises(NotFound):
        await stage.append("q0", "q0-s1-t1")


async def test_watchers_see_every_change_and_the_end(stage: Stage) -> None:
    statuses = stage.store.watching.watch(stage.job)
    first = await anext(statuses)
    assert (first.trajectories_ended, first.trajectories_expected) == (0, 4)
    await stage.append_all()
    told = 1
    async with asyncio.timeout(PATIENCE):
        while not (status := await anext(statuses)).sealed:
            told += 1
        while status.counts[1].ready != 4:
            status = await anext(statuses)
        await stage.claim(claim="c1")
        await stage.commit(["c1"])
        while status.counts[1].trained != 4:
            status = await anext(statuses)
        await stage.store.tables.drop(stage.job)
        assert [status async for status in statuses] == []
    assert told < 6, "changes that follow one another closely are told together"


async def test_pages_hold_every_sample_once_in_order(store: Store) -> None:
    stage = await make_stage(store, new_id("job"), queries=("a", "b", "c"), group_size=3)
    await finish(stage)
    await stage.open(1)
    await stage.append_all()
    await stage.claim(samples=2)

    async def listed(size: int, **filters: object) -> list[store_pb.Sample]:
        values: dict[str, object] = {"step": None, "state": None} | filters
        found: list[store_pb.Sample] = []
        token = ""
        while True:
            page, token = await store.samples.page(
                stage.job,
                "solver",
                size=size,
                token=token,
                **values,  # type: ignore[arg-type]
            )
            assert len(page) <= size
            found += page
            if not token:
                return found

    everything = await listed(4)
    assert len(everything) == 18
    ids = [sample.sample_id for sample in everything]
    assert ids == [sample.sample_id for sample in await listed(1000)]
    assert len(set(ids)) == 18
    trained, rest = everything[:9], everything[9:]
    assert {sample.state for sample in trained} == {common_pb.SAMPLE_STATE_TRAINED}
    assert all(sample.reward == 1.0 and not sample.prompt_ids.data for sample in trained)
    assert all(sample.prompt_ids.data for sample in rest)
    assert len(await listed(2, step=1, state=common_pb.SAMPLE_STATE_READY)) == 7
    assert len(await listed(2, state=common_pb.SAMPLE_STATE_CLAIMED)) == 2
    assert await listed(2, step=9) == []
    with pytest.raises(InvalidArgument):
        await store.samples.page(stage.job, "solver", None, None, 5, "not a token")


async def test_subscriptions_are_removed_with_their_last_listener(store: Store) -> None:
    notices: Notices = store.notices
    with notices.listen("job", kinds=frozenset()), notices.listen("job", kinds=frozenset()):
        assert "job" in notices._subscriptions
    assert "job" not in notices._subscriptions
