"""The store dies while rosters change, at any Redis round trip: k or k+1, never half."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

from services.experience_store.database import Database
from services.experience_store.records import PolicyKeys
from services.experience_store.store import Store
from tests.experience_store.mortal import MortalLife
from tests.support.crashing import MOMENTS, CrashError
from tests.support.experience import Response, ids_of, make_sample
from troupe.rpc import new_id

POLICIES = ("checker", "solver")
QUERIES = ("q0", "q1", "q2")


class Life(MortalLife):
    """Two overlapping steps whose rosters change; a repeated call finds another process."""

    def __init__(self, url: str, fatal: int, moment: str, *, clustered: bool = False) -> None:
        super().__init__(url, fatal, moment, POLICIES, QUERIES, clustered=clustered)

    async def append(self, query: str, number: int) -> bool:
        """End a trajectory with a row per policy, whose rewards come later."""
        name = f"{query}-t{number}"
        rows = [
            make_sample(query, turn, name, policy=policy, agent=policy, reward=None)
            for turn, policy in enumerate(POLICIES)
        ]
        append = partial(self.stage.append, query, name, rows, attempt=new_id("append"))
        return bool(await self.call(append))

    async def fill(self, query: str, number: int) -> None:
        for turn, policy in enumerate(POLICIES):
            name = f"{query}_{turn}_{query}-t{number}"
            await self.call(partial(self.stage.fill, name, policy=policy, reward=0.5))

    async def train(self, step: int) -> set[tuple[str, str]]:
        """Claim and commit a whole step; return the (query, trajectory) trained, equal for all."""
        self.stage.step = step
        found = []
        for policy in POLICIES:
            claim = partial(self.stage.claim, claim=f"c-{step}-{policy}", policy=policy)
            response: Response = await self.call(claim)
            names = [sample.split("_") for sample in ids_of(response)]
            commit = partial(
                self.stage.commit, [f"c-{step}-{policy}"], policy=policy, version=step + 1
            )
            assert (await self.call(commit))[0].num_samples == len(names)
            found.append({(query, trajectory) for query, _, trajectory in names})
            assert len(found[-1]) == len(names)
        assert found[0] == found[1]
        return found[0]

    async def run(self) -> None:
        stage = self.stage
        await self.call(lambda: stage.store.tables.create(stage.job, POLICIES, []))
        await self.call(partial(stage.open, 0, held_open=True))
        await self.call(partial(stage.open, 1, held_open=True, queries=["q8"]))
        stage.step = 0
        for query, number in (("q0", 0), ("q0", 1), ("q1", 0), ("q2", 0)):
            assert await self.append(query, number)
        await self.fill("q0", 0)
        await self.call(partial(stage.amend, add=["q5"], cursor=6))
        amend = partial(
            stage.amend, drop=["q0", "q2"], reason="surplus", carry=["q1"], carry_to=1, close=True
        )
        assert await self.call(amend) == ["q0"]
        # All of this still names step 0.
        assert await self.append("q1", 1)
        assert not await self.append("q2", 1)
        for number in range(2):
            assert await self.append("q5", number)
        for query in ("q0", "q1", "q5"):
            for number in range(2):
                await self.fill(query, number)
        assert await self.train(0) == {
            (query, f"{query}-t{n}") for query in ("q0", "q5") for n in range(2)
        }
        stage.step = 1
        await self.call(partial(stage.amend, close=True))
        for number in range(2):
            await self.append("q8", number)
            await self.fill("q8", number)
        assert await self.train(1) == {
            (query, f"{query}-t{n}") for query in ("q1", "q8") for n in range(2)
        }
        for step, queries, dropped in ((0, ["q0", "q5"], {"surplus": 2}), (1, ["q8", "q1"], {})):
            stage.step = step
            status = await self.call(partial(stage.status, queries=True))
            assert status.query_ids == queries
            assert [(q.samples, q.kept, q.pending) for q in status.queries] == [(4, 4, 0)] * 2
            assert status.sealed
            assert all(dict(counts.drop_reasons) == dropped for counts in status.counts)
        audit = await self.call(lambda: stage.store.audit.check(stage.job))
        assert list(audit.violations) == []
        assert audit.trajectories_ended == audit.trajectories_admitted == 10
        assert [(p.appended, p.trained, p.dropped, p.lost) for p in audit.policies] == [
            (9, 8, 1, 0)
        ] * 2
        held = await self.call(lambda: stage.store.high_water.of_job(stage.job))
        assert set(held.values()) == {0}, "all raw rows are freed"

    async def close(self) -> None:
        await self.stage.store.tables.drop(self.stage.job, purge_log=True)
        left = await self.stage.store.database.call("KEYS", f"*{self.stage.job}*")
        assert left == []
        await self.stage.store.database.close()


async def lives(
    redis_url: str, moments: Callable[[int], tuple[str, ...]], *, clustered: bool = False
) -> None:
    undisturbed = Life(redis_url, 0, "before", clustered=clustered)
    await undisturbed.run()
    trips = undisturbed.database.trips
    await undisturbed.close()
    for fatal in range(1, trips + 1):
        for moment in moments(fatal):
            life = Life(redis_url, fatal, moment, clustered=clustered)
            try:
                await life.run()
                assert life.crashed == 1
            except Exception as error:
                error.add_note(f"died {moment} trip {fatal} of {trips}")
                raise
            await life.close()


async def test_a_crash_while_rosters_change_loses_and_doubles_nothing(redis_url: str) -> None:
    """Each round trip once, each moment at every fourth; all of them in the slow test."""
    await lives(redis_url, lambda fatal: (MOMENTS[fatal % 4],))


@pytest.mark.slow
@pytest.mark.parametrize("clustered", [False, True])
async def test_a_crash_at_any_moment_while_rosters_change(redis_url: str, clustered: bool) -> None:
    await lives(redis_url, lambda _: MOMENTS, clustered=clustered)


@pytest.mark.parametrize("moment", MOMENTS)
async def test_an_amendment_that_nobody_repeats_is_completed_by_the_next_caller(
    redis_url: str, moment: str
) -> None:
    for fatal in (1, 2, 3):
        life = Life(redis_url, 0, moment)
        stage = life.stage
        await stage.store.tables.create(stage.job, POLICIES, [])
        await stage.open(0, held_open=True)
        await stage.open(1, held_open=True, queries=["q8"])
        stage.step = 0
        for query in QUERIES:
            await life.append(query, 0)
        life.database.die(fatal, moment)
        with pytest.raises(CrashError):
            await stage.amend(drop=["q0"], reason="surplus", carry=["q1"], carry_to=1, close=True)
        await life.database.close()
        survivor = Store(Database(redis_url))
        stage.store = survivor
        decided = (fatal, moment) != (1, "before")
        assert (await stage.status()).closed == decided
        # The decision holds at once for all callers, whatever the tables know.
        assert await life.append("q1", 1)
        assert stage.counted == int(decided)
        await life.fill("q1", 0)
        await life.fill("q1", 1)
        assert await life.append("q0", 1) == (not decided)
        await survivor.sweeper.sweep()
        for policy in POLICIES:
            counts = await stage.counts(policy)
            assert counts == (
                {"dropped": 1, "pending": 1} if decided else {"ready": 2, "pending": 3}
            )
            stage.step = 1
            assert await stage.counts(policy) == ({"ready": 2} if decided else {})
            stage.step = 0
        await life.close()


async def left_undone(life: Life, query: str, fatal: int) -> None:
    """End a trajectory; the store dies before this round trip."""
    life.database.die(fatal, "before")
    rows = [
        make_sample(query, turn, f"{query}-t0", policy=policy, agent=policy, reward=0.25)
        for turn, policy in enumerate(POLICIES)
    ]
    try:
        await life.stage.append(query, f"{query}-t0", rows, attempt="first")
    finally:
        life.database.live()


async def lagging(redis_url: str) -> Life:
    """Return step 0 with an ending of q1 that is only decided, and step 1 to carry q1 to."""
    # If one server has all keys, an ending cannot stop after its decision.
    life = Life(redis_url, 0, "before", clustered=True)
    stage = life.stage
    await stage.store.tables.create(stage.job, POLICIES, [])
    await stage.open(0, held_open=True)
    await stage.open(1, held_open=True, queries=["q8"])
    stage.step = 0
    # Its rows are staged and it is decided, but no table knows of it.
    with pytest.raises(CrashError):
        await left_undone(life, "q1", 3)
    return life


async def trains_both(life: Life) -> None:
    """Check that q1's rows are in step 1, from the first attempt, and nowhere else."""
    stage = life.stage
    stage.step = 1
    await stage.store.sweeper.sweep()
    await stage.store.steps.settle(stage.job, 1)
    for turn, policy in enumerate(POLICIES):
        assert await stage.counts(policy) == {"ready": 2}
        claimed = (await stage.claim(policy=policy, samples=2)).samples
        first = next(c.sample for c in claimed if c.sample.trajectory_id == "q1-t0")
        assert (first.sample_id, first.reward) == (f"q1_{turn}_q1-t0", 0.25)
    stage.step = 0
    assert [await stage.counts(policy) for policy in POLICIES] == [{}, {}]
    for policy in POLICIES:
        key = PolicyKeys(stage.job, policy).step(0, "step")
        assert await stage.store.database.call("HGET", key, "ended") in (None, b"0")
    await life.close()


async def test_rows_that_are_staged_move_with_their_query(redis_url: str) -> None:
    life = await lagging(redis_url)
    await life.stage.amend(carry=["q1"], carry_to=1)
    await life.stage.append("q1", "q1-t1")
    await trains_both(life)


async def test_tables_learn_of_the_roster_before_moved_rows(redis_url: str) -> None:
    life = await lagging(redis_url)
    # Decided, but no table knows of it. Then the ending is repeated in the new step.
    life.database.die(1, "after")
    with pytest.raises(CrashError):
        await life.stage.amend(carry=["q1"], carry_to=1)
    life.stage.step = 1
    assert not await life.stage.append("q1", "q1-t0", attempt="second")
    life.stage.step = 0
    await life.stage.append("q1", "q1-t1")
    await trains_both(life)


@pytest.mark.parametrize("clustered", [False, True])
@pytest.mark.parametrize("fatal", range(1, 9))
async def test_a_moved_ending_survives_the_death_of_its_repeating_writer(
    redis_url: str, fatal: int, clustered: bool
) -> None:
    life = await lagging(redis_url)
    life.database.clustered = clustered
    life.database.die(1, "after")
    with pytest.raises(CrashError):
        await life.stage.amend(carry=["q1"], carry_to=1)
    life.database.live()
    with pytest.raises(CrashError):
        await left_undone(life, "q1", fatal)
    await life.stage.append("q1", "q1-t1")
    await trains_both(life)


async def test_a_late_ending_finds_the_new_step_of_its_query(redis_url: str) -> None:
    life = await lagging(redis_url)
    stage = life.stage
    ending = (await stage.status()).endings["q1-t0"]
    table = await stage.store.tables.get(stage.job)
    await stage.amend(carry=["q1"], carry_to=1)
    await stage.store.steps.carry_out(table, 0, "q1-t0", ending, 0)
    await stage.append("q1", "q1-t1")
    await trains_both(life)


async def test_rows_that_arrive_after_their_query_was_dropped_are_dropped(redis_url: str) -> None:
    life = await lagging(redis_url)
    stage = life.stage
    await stage.amend(drop=["q1"], reason="surplus")
    assert [await stage.counts(policy) for policy in POLICIES] == [{}, {}]
    await stage.store.steps.settle(stage.job, 0)
    for counts in (await stage.status()).counts:
        assert (counts.dropped, counts.pending) == (1, 0)
        assert dict(counts.drop_reasons) == {"surplus": 2}
    audit = await stage.store.audit.check(stage.job)
    assert list(audit.violations) == []
    await life.close()
