"""Redundant trajectories: the first to complete form the group, once; the others are ended."""

from __future__ import annotations

import asyncio
import random

import pytest

from services.experience_store.database import Database
from services.experience_store.log import StepAudit, StepMembership
from services.experience_store.records import Ending
from services.experience_store.requests import check_open
from services.experience_store.store import Store
from tests.support.crashing import MOMENTS, CrashError, CrashingDatabase
from tests.support.experience import Stage, ids_of, make_sample, make_stage
from troupe.rpc import FailedPrecondition, InvalidArgument, new_id
from troupe.v1 import experience_store_pb2 as store_pb

POLICIES = ("checker", "solver")


@pytest.fixture
async def spare(store: Store) -> Stage:
    """q0 and q1: two trajectories that count, two redundant ones."""
    return await make_stage(store, new_id("job"), redundant=2)


def names(query: str, *numbers: int) -> list[str]:
    return [f"{query}-s0-t{number}" for number in numbers]


async def trajectories_claimed(stage: Stage, policy: str) -> list[str]:
    """Return the trajectories whose samples a trainer gets, sorted."""
    ready = (await stage.counts(policy))["ready"]
    response = await stage.claim(claim=new_id("claim"), policy=policy, samples=ready)
    return sorted(claimed.sample.trajectory_id for claimed in response.samples)


async def test_the_first_trajectories_to_complete_form_the_group(spare: Stage) -> None:
    assert spare.appended is None
    await spare.append("q0", *names("q0", 3))
    assert await spare.counts() == {"pending": 1}
    await spare.append("q0", *names("q0", 1))
    assert spare.appended is not None
    assert spare.appended.group_complete
    # Claimable at once: nothing can change the group's statistics any more.
    response = await spare.claim(claim="c1", samples=2)
    assert [list(claimed.group_rewards) for claimed in response.samples] == [[1.0, 1.0]] * 2
    late = [make_sample("q0", 1, "q0-s0-t0", reward=0.0)]
    assert not await spare.append("q0", "q0-s0-t0", late, attempt="late")
    assert (spare.appended.drop_reason, spare.appended.group_complete) == ("redundant", True)
    assert not await spare.append("q0", "q0-s0-t0", late, attempt="late")
    assert not await spare.fail("q0", "q0-s0-t2")
    # A repetition of the call that completed it gets the same answer.
    assert not await spare.append("q0", "q0-s0-t1")
    status = await spare.status(queries=True)
    assert [(q.trajectories_ended, q.complete, q.samples) for q in status.queries] == [
        (4, True, 4),
        (0, False, 0),
    ]
    assert (status.expected, status.ended, status.complete, status.sealed) == (8, 4, 1, False)
    assert status.ended_trajectories == names("q0", 1, 3)
    for policy in POLICIES:
        assert dict((await spare.table(policy)).drop_reasons) == {"redundant": 2}
    again = await spare.claim(claim="c1", samples=2)
    assert ids_of(again) == ids_of(response)


async def test_spare_trajectories_take_the_place_of_failed_ones(spare: Stage) -> None:
    await spare.fail("q0", *names("q0", 0))
    await spare.append("q0", *names("q0", 1))
    await spare.fail("q0", *names("q0", 2))
    assert await spare.counts() == {"pending": 1}
    await spare.append("q0", *names("q0", 3))
    assert spare.appended is not None
    assert not spare.appended.group_complete, "there was nobody left to end"
    assert await trajectories_claimed(spare, "solver") == names("q0", 1, 3)
    assert (await spare.status(queries=True)).queries[0].complete


async def test_a_group_with_too_many_failures_is_smaller(spare: Stage) -> None:
    for number in (0, 1, 2):
        await spare.fail("q0", *names("q0", number))
    assert await spare.counts() == {}
    await spare.append("q0", *names("q0", 3))
    assert await trajectories_claimed(spare, "solver") == names("q0", 3)
    for number in range(4):
        await spare.fail("q1", *names("q1", number))
    status = await spare.status()
    assert (status.complete, status.sealed) == (2, True)
    with pytest.raises(FailedPrecondition) as error:
        await spare.append("q1", "q1-s0-t9")
    assert error.value.kind == "group_closed"


async def test_any_race_gives_groups_of_the_same_size(redis_url: str) -> None:
    """All end at once, in two stores, some twice: exactly two of each query are trained."""
    stores = [Store(Database(redis_url)) for _ in range(2)]
    stage = await make_stage(stores[0], new_id("job"), queries=("q0", "q1", "q2"), redundant=3)
    twins = [
        Stage(store, stage.job, stage.policies, stage.queries, 2, redundant=3) for store in stores
    ]
    calls = [
        twin.append(query, trajectory) for twin in twins for query, trajectory in stage.trajectories
    ]
    random.Random(5).shuffle(calls)
    await asyncio.gather(*calls)
    for policy in POLICIES:
        found = await trajectories_claimed(stage, policy)
        assert [len([t for t in found if t.startswith(q)]) for q in stage.queries] == [2, 2, 2]
    status = await stage.status()
    assert (status.sealed, status.ended, status.expected) == (True, 15, 15)
    kept = {t for t, ending in status.endings.items() if ending.state == "COMPLETED"}
    assert set(found) == kept
    audit = await stage.store.audit.check(stage.job)
    assert not audit.violations
    assert dict(audit.trajectories_by_state) == {"COMPLETED": 6, "ABORTED": 9}
    for store in stores:
        await store.stop()


@pytest.mark.parametrize("clustered", [False, True])
@pytest.mark.parametrize("moment", MOMENTS)
async def test_a_group_is_completed_whenever_its_last_writer_dies(
    redis_url: str, moment: str, clustered: bool
) -> None:
    for fatal in range(1, 8 if clustered else 3):
        database = CrashingDatabase(redis_url, 0, moment, clustered=clustered)
        stage = await make_stage(Store(database), new_id("job"), redundant=2)
        await stage.fail("q0", *names("q0", 0))
        await stage.append("q0", *names("q0", 1))
        database.die(fatal, moment)
        try:
            await stage.append("q0", "q0-s0-t3", attempt="third")
            died = False
        except CrashError:
            died = True
        await database.close()
        stage.store = Store(Database(redis_url))
        # Another writer is first, then the one that does not know whether its call arrived.
        raced = await stage.append("q0", "q0-s0-t2", attempt="second")
        repeated = await stage.append("q0", "q0-s0-t3", attempt="third")
        assert raced != repeated, "one of them is the second of the group"
        assert died or repeated
        await stage.store.sweeper.sweep()
        kept = names("q0", 1, 3 if repeated else 2)
        for policy in POLICIES:
            assert await trajectories_claimed(stage, policy) == kept
            assert dict((await stage.table(policy)).drop_reasons) == {
                "deadline": 1,
                "redundant": 1,
            }
        for number in range(4):
            await stage.fail("q1", *names("q1", number))
        assert (await stage.status()).sealed
        audit = await stage.store.audit.check(stage.job)
        assert not audit.violations
        staged = f"*{{{stage.job}/*}}:0:staged:*"
        assert await stage.store.database.call("KEYS", staged) == []
        await stage.store.stop()


async def test_a_failure_unknown_to_a_table_does_not_delay_its_group(redis_url: str) -> None:
    """It is decided but not carried out: the group is claimable, the step is not over."""
    database = CrashingDatabase(redis_url, 0, "before", clustered=True)
    stage = await make_stage(Store(database), new_id("job"), queries=("q0",), redundant=2)
    database.die(2, "before")
    with pytest.raises(CrashError):
        await stage.fail("q0", "q0-s0-t0")
    await database.close()
    stage.store = Store(Database(redis_url))
    await stage.append("q0", *names("q0", 1))
    await stage.append("q0", *names("q0", 2))
    claim = await stage.claim(claim="c1", samples=2)
    assert len(claim.samples) == 2
    with pytest.raises(FailedPrecondition) as error:
        await stage.commit(["c1"])
    assert error.value.kind == "step_unsealed"
    await stage.store.steps.settle(stage.job, 0)
    assert (await stage.commit(["c1"]))[0].num_samples == 2
    await stage.store.stop()


async def test_steps_may_differ_in_redundant_trajectories(spare: Stage) -> None:
    other = Stage(spare.store, spare.job, spare.policies, spare.queries, 2, redundant=1)
    with pytest.raises(FailedPrecondition, match="redundant") as error:
        await other.open(0)
    assert error.value.kind == "step_differs"
    await spare.open(1, held_open=True)
    await other.open(2, held_open=True, queries=["q8"])
    spare.step = 1
    with pytest.raises(FailedPrecondition) as error:
        await spare.amend(carry=["q0"], carry_to=2)
    assert (error.value.kind, error.value.field) == ("step_differs", "carry_to")


def test_a_negative_number_of_redundant_trajectories_is_refused() -> None:
    request = store_pb.OpenStepRequest(query_ids=["q0"], group_size=2, redundant=-1)
    with pytest.raises(InvalidArgument) as error:
        check_open(request, [])
    assert error.value.field == "redundant"


def test_the_audit_reports_a_group_that_is_too_large() -> None:
    fields = {"queries": '["q0"]', "versions": "{}", "group_size": "1", "redundant": "2"}
    completed = Ending("COMPLETED", "a", "q0", "")
    spare = Ending("ABORTED", "", "q0", "redundant")
    for endings, said in (
        ({"t0": completed, "q0\t2": spare, "q0\t3": spare}, []),
        ({"t0": completed, "t1": completed, "q0\t3": spare}, ["2 of 1 trajectories of query q0"]),
        ({"t0": Ending("FAILED", "", "q0", "x"), "q0\t2": spare, "q0\t3": spare}, ["only 0 of 1"]),
    ):
        audit = StepAudit([], 1)
        audit.add(0, StepMembership(0, fields, endings), {})
        violations = list(audit.report({}, {}).violations)
        assert len(violations) == len(said)
        assert all(part in one for part, one in zip(said, violations, strict=True))
