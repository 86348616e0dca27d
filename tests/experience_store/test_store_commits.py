"""Commits: all samples of a step or none, once, and the version only rises."""

from __future__ import annotations

import asyncio

import pytest
import xxhash

from services.experience_store.store import Store
from tests.support.experience import Stage, ids_of, make_stage
from troupe.rpc import FailedPrecondition, InvalidArgument, new_id
from troupe.v1 import experience_store_pb2 as store_pb

SKIPPED = store_pb.STEP_OUTCOME_SKIPPED
EMPTY = store_pb.STEP_OUTCOME_EMPTY


async def kind_of(call: object) -> str:
    with pytest.raises((FailedPrecondition, InvalidArgument)) as error:
        await call  # type: ignore[misc]
    return error.value.kind


async def test_the_first_commit_stays(stage: Stage) -> None:
    await stage.append_all()
    await stage.claim(claim="c1")
    first, existed = await stage.commit(["c1"])
    assert not existed
    assert (first.num_samples, first.weights.version) == (4, 1)
    assert dict(first.metrics) == {"loss/policy": 0.5}
    for claims, claimant, version in ((["c1"], "trainer", 1), ([], "zombie", 9)):
        again, existed = await stage.commit(claims, claimant, version=version, digest=version)
        assert existed
        assert again == first


async def test_racing_commits_have_one_winner(stage: Stage) -> None:
    await stage.append_all()
    await stage.claim(claim="c1")
    results = await asyncio.gather(*(stage.commit(["c1"]) for _ in range(8)))
    assert [existed for _, existed in results].count(False) == 1


async def test_a_commit_needs_every_sample_of_the_step(stage: Stage) -> None:
    *most, last = stage.trajectories
    for trajectory in most:
        await stage.append(*trajectory)
    await stage.claim(claim="c1", samples=2)
    assert await kind_of(stage.commit(["c1"])) == "step_unsealed"
    await stage.append(*last)
    assert await kind_of(stage.commit(["c1"])) == "step_incomplete"
    await stage.claim("other", claim="c2")
    assert await kind_of(stage.commit(["c1"])) == "step_incomplete"
    assert await kind_of(stage.commit(["c1", "c2"])) == "claim_lost"
    await stage.release("other")
    await stage.claim(claim="c3")
    assert await kind_of(stage.commit(["c1", "c1"])) == "step_incomplete"
    assert await kind_of(stage.commit(["c1", "c3", "never made"])) == "claim_lost"
    assert await stage.counts() == {"claimed": 4}, "a refused commit changes nothing"
    assert (await stage.commit(["c1", "c3"]))[0].num_samples == 4


def digest_of(samples: list[str]) -> int:
    return sum(xxhash.xxh3_64_intdigest(sample.encode()) for sample in samples) % 2**64


async def test_a_commit_must_name_the_trained_samples(stage: Stage) -> None:
    await stage.append_all()
    first = ids_of(await stage.claim(claim="c1", samples=3))
    rest = ids_of(await stage.claim(claim="c2"))
    right = digest_of(rest + first)
    for wrong in (digest_of(first), digest_of([*first, *rest, *rest]), right ^ 1, 0):
        call = stage.commit(["c1", "c2"], digest=wrong)
        assert await kind_of(call) == "digest_mismatch"
        assert await stage.counts() == {"claimed": 4}, "a refused commit changes nothing"
    commit, _ = await stage.commit(["c1", "c2", "c1"], digest=right)
    assert commit.samples_digest == right


async def test_claims_of_another_claimant_are_refused_whatever_the_digest(stage: Stage) -> None:
    await stage.append_all()
    held = ids_of(await stage.claim("owner", claim="c1"))
    for digest in (None, digest_of(held), 7):
        assert await kind_of(stage.commit(["c1"], "thief", digest=digest)) == "claim_lost"
    assert await stage.counts() == {"claimed": 4}
    await stage.release("owner")
    assert await kind_of(stage.commit(["c1"], "owner", digest=digest_of(held))) == "claim_lost"


async def test_the_store_computes_a_digest_that_the_trainer_left_out(stage: Stage) -> None:
    await stage.append_all()
    held = ids_of(await stage.claim(claim="c1"))
    commit, _ = await stage.commit(["c1"], outcome=SKIPPED, reason="nan_loss", version=0)
    assert commit.samples_digest == digest_of(held)
    await stage.open(1)
    for query, trajectory in stage.trajectories:
        await stage.fail(query, trajectory)
    commit, _ = await stage.commit([], outcome=EMPTY, version=0)
    assert not commit.HasField("samples_digest")


async def test_payloads_are_freed_with_the_commit(stage: Stage) -> None:
    await stage.append_all()
    await stage.claim(claim="c1")
    await stage.commit(["c1"])
    keys = {
        key.decode().rpartition("}:0:")[2]
        for key in await stage.store.database.call("KEYS", f"*{{{stage.job}/solver}}:0:*")
    }
    assert keys == {"step", "ended", "queries", "book", "members", "tallies"}
    rows = await stage.store.database.call("KEYS", f"*{{{stage.job}/checker}}:0:rows:*")
    assert len(rows) == 4, "the other policy's rows are still needed"


async def test_a_skipped_step_drops_its_samples_and_keeps_the_version(stage: Stage) -> None:
    await stage.append_all()
    await stage.claim(claim="c1")
    commit, _ = await stage.commit(["c1"], outcome=SKIPPED, reason="nan_loss: inf", version=0)
    assert (commit.num_samples, commit.reason) == (4, "nan_loss: inf")
    status = await stage.store.steps.status(stage.job, 0)
    assert await stage.counts() == {"dropped": 4}
    assert dict(status.counts[1].drop_reasons) == {"nan_loss": 4}


async def test_the_outcome_must_fit_the_samples(stage: Stage) -> None:
    for query, trajectory in stage.trajectories:
        await stage.fail(query, trajectory)
    assert await kind_of(stage.commit([])) == "invalid_argument"
    commit, existed = await stage.commit([], outcome=EMPTY, version=0)
    assert (commit.num_samples, commit.outcome, existed) == (0, EMPTY, False)
    await stage.open(1)
    await stage.append_all()
    assert await kind_of(stage.commit([], outcome=EMPTY, version=0)) == "step_incomplete"
    await stage.claim(claim="c1")
    assert await kind_of(stage.commit(["c1"], outcome=EMPTY, version=0)) == "invalid_argument"


async def test_only_an_applied_step_makes_the_next_version(store: Store) -> None:
    stage = await make_stage(store, new_id("job"), version=4)
    for step, version in ((0, 5), (1, 6)):
        if step:
            await stage.open(step)
        await stage.append_all()
        await stage.claim(claim=f"c{step}")
        for wrong in {0, 4, 5, 6, 7} - {version}:
            assert await kind_of(stage.commit([f"c{step}"], version=wrong)) == "version_gap"
        await stage.commit([f"c{step}"], version=version)
    await stage.open(2)
    await stage.append_all()
    await stage.claim(claim="c2")
    for wrong in (5, 7):
        skipped = stage.commit(["c2"], version=wrong, outcome=SKIPPED, reason="nan_loss")
        assert await kind_of(skipped) == "version_gap"
    await stage.commit(["c2"], version=6, outcome=SKIPPED, reason="nan_loss")
    await stage.open(3)
    await stage.append_all()
    await stage.claim(claim="c3")
    empty = stage.commit([], outcome=EMPTY, version=6, checksum="another")
    assert await kind_of(empty) == "step_incomplete"
    other = stage.commit(["c3"], version=6, outcome=SKIPPED, reason="nan", checksum="another")
    assert await kind_of(other) == "checksum_conflict"


async def test_steps_of_a_policy_are_committed_in_order(stage: Stage) -> None:
    await stage.open(1)
    await stage.append_all()
    await stage.claim(claim="c1")
    assert await kind_of(stage.commit(["c1"], version=1)) == "version_gap"
    stage.step = 0
    await stage.append_all()
    await stage.claim(claim="c0")
    await stage.commit(["c0"], version=1)
    stage.step = 1
    await stage.commit(["c1"], version=2)


async def test_policies_commit_independently(store: Store) -> None:
    stage = await make_stage(store, new_id("job"))
    await stage.append_all()
    for policy in stage.policies:
        await stage.claim(claim=f"c-{policy}", policy=policy)
        await stage.commit([f"c-{policy}"], policy=policy)
    status = await store.steps.status(stage.job, 0)
    assert [commit.policy for commit in status.commits] == ["checker", "solver"]
