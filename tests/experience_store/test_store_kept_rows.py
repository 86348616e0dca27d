"""Copies of trained rows: kept until the state that they made is on disk, and no longer."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.experience_store.store import Store
from tests.support.experience import Stage, make_stage
from tests.support.experience_client import Client
from troupe.rpc import DataLoss, FailedPrecondition, InvalidArgument, new_id
from troupe.v1 import common_pb2 as common_pb
from troupe.v1 import experience_store_pb2 as store_pb


async def _keep(stage: Stage, claimed: list[store_pb.ClaimMicroBatchResponse]) -> None:
    for index, claim in enumerate(claimed):
        for _ in range(2):  # a repeated call changes nothing
            await stage.store.kept_rows.keep(
                store_pb.KeepRowsRequest(
                    job_id=stage.job,
                    policy="solver",
                    step=stage.step,
                    claimant="trainer",
                    index=index,
                    samples=claim.samples,
                )
            )


async def _claimed(stage: Stage) -> list[store_pb.ClaimMicroBatchResponse]:
    """Return all rows of the step in micro-batches of three."""
    await stage.append_all()
    return [await stage.claim(samples=3), await stage.claim(samples=3)]


async def _step(stage: Stage, version: int, *, kept: bool) -> list[store_pb.KeptMicroBatch]:
    """Commit the stage's step as `version`; return its trained samples."""
    claimed = await _claimed(stage)
    how: dict[str, Any] = {"durable": True}
    if kept:
        await _keep(stage, claimed)
        how = {"kept": 2}
    ids = [claim.claim_id for claim in claimed]
    await stage.commit(ids, version=version, checksum=f"sum-{version}", **how)
    for policy in set(stage.policies) - {"solver"}:
        other = await stage.claim("other", policy=policy)
        await stage.commit([other.claim_id], "other", policy=policy, version=version)
    await stage.open(stage.step + 1, version)
    return [store_pb.KeptMicroBatch(samples=claim.samples) for claim in claimed]


async def _read(stage: Stage, version: int) -> list[store_pb.KeptMicroBatch]:
    rows = stage.store.kept_rows.read(stage.job, "solver", version)
    return [store_pb.KeptMicroBatch.FromString(batch) async for batch in rows]


async def _bytes(stage: Stage) -> int:
    return (await stage.store.high_water.of_job(stage.job))["solver"]


async def test_rows_are_read_as_they_were_claimed_until_their_state_is_on_disk(
    stage: Stage,
) -> None:
    before = await _bytes(stage)
    trained = {version: await _step(stage, version, kept=True) for version in (1, 2, 3)}
    found = await stage.store.kept_rows.describe(stage.job, "solver")
    assert [one.commit.weights.version for one in found.versions] == [1, 2, 3]
    assert [one.commit.step for one in found.versions] == [0, 1, 2]
    assert [one.micro_batches for one in found.versions] == [2, 2, 2]
    assert not found.HasField("durable_version")
    for version, batches in trained.items():
        assert await _read(stage, version) == batches
    assert await _bytes(stage) == before + found.kept_bytes > before
    await stage.store.kept_rows.free(stage.job, "solver", 2, "sum-2")
    await stage.store.kept_rows.free(stage.job, "solver", 1, "sum-1")  # late, and not a step back
    found = await stage.store.kept_rows.describe(stage.job, "solver")
    assert (found.durable_version, found.durable_checksum) == (2, "sum-2")
    assert [one.commit.weights.version for one in found.versions] == [3]
    assert await _read(stage, 3) == trained[3]
    with pytest.raises(DataLoss):
        await _read(stage, 2)
    await _step(stage, 4, kept=False)
    found = await stage.store.kept_rows.describe(stage.job, "solver")
    assert (found.durable_version, found.kept_bytes, len(found.versions)) == (4, 0, 0)
    assert await _bytes(stage) == before


async def test_a_commit_that_relies_on_rows_which_are_not_kept_is_refused(stage: Stage) -> None:
    claimed = await _claimed(stage)
    await _keep(stage, claimed[:1])
    ids = [claim.claim_id for claim in claimed]
    with pytest.raises(FailedPrecondition) as error:
        await stage.commit(ids, kept=2)
    assert error.value.kind == "rows_not_kept"
    await stage.commit(ids, durable=True, checksum="a")
    found = await stage.store.kept_rows.describe(stage.job, "solver")
    assert (found.durable_version, found.kept_bytes) == (1, 0)
    with pytest.raises(FailedPrecondition) as error:
        await _keep(stage, claimed)
    assert error.value.kind == "step_committed"


async def test_copies_of_attempts_that_were_given_up_go_with_the_commit(stage: Stage) -> None:
    before = await _bytes(stage)
    await stage.append_all()
    first = await stage.claim("zombie", samples=3)
    request = store_pb.KeepRowsRequest(
        job_id=stage.job, policy="solver", claimant="zombie", samples=first.samples
    )
    await stage.store.kept_rows.keep(request)
    await stage.release("")
    claimed = [await stage.claim(samples=3), await stage.claim(samples=3)]
    await stage.commit([claim.claim_id for claim in claimed], durable=True)
    assert await _bytes(stage) == before


async def test_tables_are_dropped_with_what_is_kept(stage: Stage, store: Store) -> None:
    await _step(stage, 1, kept=True)
    pattern = f"troupe:{{{stage.job}/*"
    assert await store.database.call("KEYS", f"{pattern}kept*")
    await store.tables.drop(stage.job, purge_log=True)
    assert not await store.database.call("KEYS", pattern)


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(kept=st.lists(st.booleans(), min_size=1, max_size=6), freed=st.sets(st.integers(1, 6)))
async def test_every_version_after_the_one_on_disk_can_be_computed(
    store: Store, kept: list[bool], freed: set[int]
) -> None:
    """In every order of commits and of states on disk: rows exist for every version after the
    newest state on disk, and for no other."""
    stage = await make_stage(store, new_id("job"), policies=("solver",))
    before = await _bytes(stage)
    durable = 0
    for version, keeps in enumerate(kept, start=1):
        await _step(stage, version, kept=keeps)
        if version in freed or not keeps:
            await store.kept_rows.free(stage.job, "solver", version, f"sum-{version}")
            durable = version
        found = await store.kept_rows.describe(stage.job, "solver")
        assert found.durable_version == durable
        later = [one.commit.weights.version for one in found.versions]
        assert later == list(range(durable + 1, version + 1))
        for one in later:
            assert len(await _read(stage, one)) == 2
        assert await _bytes(stage) == before + found.kept_bytes
    await store.tables.drop(stage.job, purge_log=True)


async def test_bad_requests_name_the_field(client: Client) -> None:
    request = store_pb.CommitStepRequest(
        request_id=new_id(),
        job_id="job",
        policy="solver",
        claimant="trainer",
        claim_ids=["one"],
        outcome=store_pb.STEP_OUTCOME_SKIPPED,
        weights=common_pb.WeightsRef(policy="solver"),
        kept_micro_batches=1,
    )
    with pytest.raises(InvalidArgument) as error:
        await client.stub.CommitStep(request)
    assert error.value.field == "kept_micro_batches"
    keep = store_pb.KeepRowsRequest(
        request_id=new_id(), job_id="job", policy="solver", claimant="trainer", index=-1
    )
    with pytest.raises(InvalidArgument) as error:
        await client.stub.KeepRows(keep)
    assert error.value.field == "index"
