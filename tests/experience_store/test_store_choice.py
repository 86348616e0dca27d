"""The choice of a claim's samples: none too old, whole groups, about equal tokens."""

from __future__ import annotations

import statistics

import numpy as np
import pytest

from services.experience_store import claims
from services.experience_store.store import Store
from tests.support.experience import Response, Stage, ids_of, make_sample, make_stage
from troupe.rpc import FailedPrecondition, new_id

CLAIMED = Response.OUTCOME_CLAIMED
WAIT = Response.OUTCOME_WAIT
EXHAUSTED = Response.OUTCOME_EXHAUSTED


async def append_versions(stage: Stage, versions: dict[str, tuple[int, ...]]) -> None:
    """Append rows; per query, the version that began each trajectory's only row."""
    for query, begun in versions.items():
        for number, version in enumerate(begun):
            trajectory = f"{query}-s{stage.step}-t{number}"
            row = make_sample(query, 0, trajectory, version=version)
            await stage.append(query, trajectory, [row])


async def reasons_of(stage: Stage) -> dict[str, int]:
    """Return why samples of the solver were dropped."""
    status = await stage.store.steps.status(stage.job, stage.step)
    return dict(next(c for c in status.counts if c.policy == "solver").drop_reasons)


async def rows_of(stage: Stage) -> int:
    """Return the solver's raw rows in Redis."""
    database = stage.store.database
    keys = await database.call("KEYS", f"*{{{stage.job}/solver}}:{stage.step}:rows:*")
    return sum([await database.call("HLEN", key) for key in keys])


async def drain(
    stage: Stage, *, samples: int = 64, tokens: int = 0, whole: bool = False, balance: bool = False
) -> list[Response]:
    """Return all claims of a step."""
    found = []
    while True:
        response = await stage.claim(samples=samples, tokens=tokens, whole=whole, balance=balance)
        if response.outcome != CLAIMED:
            assert response.outcome == EXHAUSTED
            return found
        found.append(response)


# -- staleness


async def test_a_group_that_an_older_version_began_is_dropped_as_a_whole(stage: Stage) -> None:
    await append_versions(stage, {"q0": (5, 3), "q1": (4, 4)})
    response = await stage.claim(claim="c1", oldest=4)
    assert ids_of(response) == ["q1_0_q1-s0-t0", "q1_0_q1-s0-t1"]
    assert await stage.counts() == {"claimed": 2, "dropped": 2}
    assert await reasons_of(stage) == {"stale": 2}
    assert await rows_of(stage) == 2, "payloads of dropped samples are freed at once"
    assert (await stage.commit(["c1"]))[0].num_samples == 2


async def test_stale_samples_make_no_full_micro_batch(stage: Stage) -> None:
    await append_versions(stage, {"q0": (3, 3)})
    assert (await stage.claim(samples=2, oldest=4)).outcome == WAIT
    await append_versions(stage, {"q1": (4, 4)})
    assert len((await stage.claim(samples=2, oldest=4)).samples) == 2


async def test_stale_groups_that_ripen_after_the_bound_was_named_are_dropped(stage: Stage) -> None:
    assert (await stage.claim(oldest=4)).outcome == WAIT
    await append_versions(stage, {"q0": (5, 3)})
    assert await stage.counts() == {"dropped": 2}
    await append_versions(stage, {"q1": (3, 9)})
    assert (await stage.claim(oldest=4)).outcome == EXHAUSTED


async def test_a_stale_group_still_waits_for_its_rewards(stage: Stage) -> None:
    """It is incomplete until then; its drop must not race with the calls that fill it."""
    await stage.claim(oldest=4)
    for trajectory in ("q0-s0-t0", "q0-s0-t1"):
        await stage.append("q0", trajectory, [make_sample("q0", 0, trajectory, reward=None)])
    assert await stage.counts() == {"pending": 2}
    await stage.fill("q0_0_q0-s0-t0", reward=1.0)
    assert await stage.fill("q0_0_q0-s0-t1", reward=1.0) == ("D", True)
    assert await reasons_of(stage) == {"stale": 2}


async def test_the_bound_only_rises(stage: Stage) -> None:
    await append_versions(stage, {"q0": (3, 3)})
    assert (await stage.claim(samples=4, oldest=5)).outcome == WAIT
    await append_versions(stage, {"q1": (4, 4)})
    assert (await stage.claim(oldest=2)).outcome == EXHAUSTED, "4 stays excluded"
    assert await reasons_of(stage) == {"stale": 4}


async def test_a_stale_group_with_a_claimed_member_stays_until_it_is_released(
    stage: Stage,
) -> None:
    await append_versions(stage, {"q0": (3, 3), "q1": (5, 5)})
    assert ids_of(await stage.claim(samples=1, oldest=3)) == ["q0_0_q0-s0-t0"]
    rest = await stage.claim("other", samples=1, oldest=4)
    assert ids_of(rest) == ["q0_0_q0-s0-t1"], "half a group would have other statistics"
    await stage.release("other")
    assert await reasons_of(stage) == {}, "the trainer holds its other half"
    await stage.release("trainer")
    assert await reasons_of(stage) == {"stale": 2}
    assert len((await stage.claim(oldest=4)).samples) == 2


async def test_a_row_without_versions_is_never_stale(stage: Stage) -> None:
    for query, trajectory in stage.trajectories:
        row = make_sample(query, 0, trajectory)
        del row.versions[:]
        await stage.append(query, trajectory, [row])
    assert len((await stage.claim(oldest=100)).samples) == 4


# -- whole groups


async def test_a_claim_of_whole_groups_splits_none(store: Store) -> None:
    queries = tuple(f"q{number}" for number in range(4))
    stage = await make_stage(store, new_id("job"), queries=queries, group_size=3)
    for query, trajectory in stage.trajectories:
        # Two agents: two groups per query, whose samples alternate in order of their ids.
        rows = [
            make_sample(query, turn, trajectory, agent=("planner", "worker")[turn % 2])
            for turn in range(2)
        ]
        await stage.append(query, trajectory, rows)
    claimed = await drain(stage, samples=7, whole=True)
    groups = [[item.sample.group_id for item in response.samples] for response in claimed]
    assert [len(names) for names in groups] == [6, 6, 6, 6]
    assert len({name for names in groups for name in names}) == 8
    assert all(names.count(name) == 3 for names in groups for name in names)


async def test_a_group_larger_than_the_bounds_is_claimed_whole(stage: Stage) -> None:
    await stage.append_all()
    assert len((await stage.claim(samples=1, whole=True)).samples) == 2
    assert len((await stage.claim(tokens=1, whole=True)).samples) == 2
    assert (await stage.claim(whole=True)).outcome == EXHAUSTED


async def test_a_group_that_cannot_be_sent_is_refused_by_name(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claims, "CLAIM_BYTES", 100)
    monkeypatch.setattr(claims, "GROUP_BYTES", 200)
    await stage.append_all()
    with pytest.raises(FailedPrecondition) as error:
        await stage.claim(whole=True)
    assert (error.value.kind, error.value.value) == ("group_too_large", "q0/solver")
    assert await stage.counts() == {"ready": 4}
    assert len((await stage.claim()).samples) == 1


# -- balance


async def lengths_of_a_mix(store: Store, *, group_size: int = 1, seed: int = 0) -> Stage:
    """Return a step of 256 ready samples with lognormal lengths."""
    lengths = np.random.default_rng(seed).lognormal(4, 1, 256).astype(int) + 2
    queries = tuple(f"q{number:03}" for number in range(256 // group_size))
    stage = await make_stage(
        store, new_id("job"), policies=("solver",), queries=queries, group_size=group_size
    )
    for (query, trajectory), tokens in zip(stage.trajectories, lengths, strict=True):
        await stage.append(query, trajectory, [make_sample(query, 0, trajectory, tokens=tokens)])
    return stage


def tokens_of(response: Response) -> int:
    return sum(
        item.sample.prompt_ids.shape[0] + item.sample.response_ids.shape[0]
        for item in response.samples
    )


def spread(claimed: list[Response]) -> float:
    """Return the standard deviation of the claims' tokens over their mean."""
    tokens = [tokens_of(response) for response in claimed]
    return statistics.pstdev(tokens) / statistics.mean(tokens)


@pytest.mark.parametrize(("group_size", "samples"), [(1, 16), (4, 32)])
async def test_balanced_claims_have_about_equally_many_tokens(
    store: Store, group_size: int, samples: int
) -> None:
    whole = group_size > 1
    plain = await drain(
        await lengths_of_a_mix(store, group_size=group_size), samples=samples, whole=whole
    )
    stage = await lengths_of_a_mix(store, group_size=group_size)
    balanced = await drain(stage, samples=samples, whole=whole, balance=True)
    assert len(balanced) == len(plain) == 256 // samples
    assert all(len(response.samples) == samples for response in balanced)
    claimed = [sample for response in balanced for sample in ids_of(response)]
    assert len(set(claimed)) == 256
    if whole:
        for response in balanced:
            queries = [item.sample.query_id for item in response.samples]
            assert all(queries.count(query) == 4 for query in queries)
    assert spread(balanced) < spread(plain) / 3


async def test_balance_respects_a_bound_of_tokens(store: Store) -> None:
    plain = await drain(await lengths_of_a_mix(store), tokens=2000)
    balanced = await drain(await lengths_of_a_mix(store), tokens=2000, balance=True)
    assert all(tokens_of(claim) <= 2000 or len(claim.samples) == 1 for claim in balanced)
    assert len(balanced) <= len(plain)
    assert spread(balanced[:-1]) < spread(plain[:-1]) / 2


async def test_balancing_that_is_requested_late_applies_from_then_on(store: Store) -> None:
    stage = await lengths_of_a_mix(store)
    first = await stage.claim(samples=16)
    assert ids_of(first) == [f"q{n:03}_0_q{n:03}-s0-t0" for n in range(16)]
    rest = await drain(stage, samples=16, balance=True)
    assert len(rest) == 15
    assert spread(rest) < 0.1
    await stage.release("trainer")
    again = await drain(stage, samples=16, balance=True)
    assert spread(again) < 0.1, "what came back is in its place"
