"""The store dies at any Redis round trip; the next caller finds k or k+1, never half."""

from __future__ import annotations

from functools import partial

import pytest

from services.experience_store.database import Database
from services.experience_store.store import Store
from tests.experience_store.mortal import MortalLife
from tests.support.crashing import MOMENTS, CrashError
from tests.support.experience import Response, ids_of, make_sample
from tests.support.waiting import PATIENCE
from troupe.rpc import FailedPrecondition, new_id

POLICIES = ("checker", "solver")
QUERIES = ("q0", "q1")


class Life(MortalLife):
    """One step of a job, each call repeated by another process when the first one dies."""

    def __init__(
        self, url: str, fatal: int, moment: str, *, rerun: bool = False, clustered: bool = False
    ) -> None:
        super().__init__(url, fatal, moment, POLICIES, QUERIES, clustered=clustered)
        self._rerun = rerun

    async def append(self, query: str, trajectory: str) -> None:
        stage = self.stage
        ids = [new_id("append") for _ in range(2)]
        crashed = self.crashed

        async def attempt() -> None:
            number = self.crashed - crashed
            # The same client repeats the call, or one that has rolled out again.
            again = number if self._rerun else 0
            rows = [
                make_sample(query, 10 * again + turn, trajectory, policy=policy, reward=None)
                for turn, policy in enumerate(stage.policies)
            ]
            await stage.append(query, trajectory, rows, attempt=ids[again])

        await self.call(attempt)

    async def train(self, policy: str) -> list[str]:
        """Fill the rewards, claim everything, commit; returns the samples trained."""
        stage = self.stage

        async def listed() -> list[str]:
            page, _ = await stage.store.samples.page(stage.job, policy, 0, None, 50, "")
            return [sample.sample_id for sample in page]

        async def fill(name: str) -> None:
            await stage.fill(name, policy=policy, reward=float(len(name)))

        async def claim(name: str) -> Response:
            return await stage.claim(claim=name, policy=policy, samples=3, wait=PATIENCE)

        for name in await self.call(listed):
            await self.call(partial(fill, name))
        claims: dict[str, list[str]] = {}
        while True:
            name = f"claim-{policy}-{len(claims)}"
            response = await self.call(partial(claim, name))
            if response.outcome == Response.OUTCOME_EXHAUSTED:
                break
            claims[name] = ids_of(response)
        assert await self.call(partial(stage.renew, "trainer", policy=policy)) == 2
        commit, _ = await self.call(partial(stage.commit, list(claims), policy=policy))
        trained = [sample for samples in claims.values() for sample in samples]
        assert commit.num_samples == len(trained)
        return trained

    async def run(self) -> dict[str, list[str]]:
        """Play the step to its end; returns the samples trained per policy."""
        stage = self.stage

        async def create() -> None:
            await stage.store.tables.create(stage.job, POLICIES, [])

        await self.call(create)
        await self.call(partial(stage.open, 0))
        for query, trajectory in stage.trajectories:
            await self.append(query, trajectory)
        return {policy: await self.train(policy) for policy in POLICIES}


async def trips_of(redis_url: str, *, clustered: bool) -> int:
    """Round trips of an undisturbed life."""
    life = Life(redis_url, 0, "before", clustered=clustered)
    await life.run()
    await life.close()
    return life.database.trips


# Every other pair; the slow test has the other half.
LIVES = [
    pytest.param(
        moment, rerun, clustered, marks=pytest.mark.slow if (i + rerun + clustered) % 2 else ()
    )
    for i, moment in enumerate(MOMENTS)
    for rerun in (False, True)
    for clustered in (False, True)
]


@pytest.mark.parametrize(("moment", "rerun", "clustered"), LIVES)
async def test_a_crash_at_any_round_trip_loses_and_doubles_nothing(
    redis_url: str, moment: str, rerun: bool, clustered: bool
) -> None:
    trips = await trips_of(redis_url, clustered=clustered)
    for fatal in range(1, trips + 1):
        life = Life(redis_url, fatal, moment, rerun=rerun, clustered=clustered)
        trained = await life.run()
        assert life.crashed == 1, f"trip {fatal} of {trips}"
        for turn, policy in enumerate(POLICIES):
            origin = [sample.split("_") for sample in trained[policy]]
            assert len(origin) == 4
            assert {(query, name) for query, _, name in origin} == set(life.stage.trajectories)
            assert all(int(number) % 10 == turn for _, number, _ in origin)
        # Both tables hold rows of the same run of each trajectory.
        runs = [
            {sample.split("_")[2]: int(sample.split("_")[1]) // 10 for sample in samples}
            for samples in trained.values()
        ]
        assert runs[0] == runs[1]
        database = life.stage.store.database
        left = await database.call("KEYS", f"*{{{life.stage.job}/*}}:0:*")
        assert {key.decode().rpartition("}:0:")[2] for key in left} <= {
            *("step", "ended", "queries", "book", "members", "dropped", "tallies"),
        }
        store, job = life.stage.store, life.stage.job
        report = await store.audit.check(job)
        assert list(report.violations) == []
        assert [policy.trained for policy in report.policies] == [4, 4]
        assert set((await store.high_water.of_job(job)).values()) == {0}
        await store.tables.drop(job, purge_log=True)
        assert await database.call("KEYS", f"*{life.stage.job}*") == []
        await life.close()


async def test_the_sweeper_completes_a_call_that_nobody_repeats(redis_url: str) -> None:
    # With one server the first table has decided; in a cluster, stage and decide have arrived.
    for moment, clustered in (("almost", False), *((moment, True) for moment in MOMENTS)):
        life = Life(redis_url, 0, moment, clustered=clustered)
        stage = life.stage
        await stage.store.tables.create(stage.job, POLICIES, [])
        await stage.open(0)
        *most, last = stage.trajectories
        for query, trajectory in most:
            await stage.append(query, trajectory)
        # Carrying out does not arrive, or only in one table.
        life.database.die(3 if clustered else 1, moment)
        with pytest.raises(CrashError):
            await stage.append(*last)
        await life.close()
        survivor = Store(Database(redis_url), sweep_seconds=0.05)
        await survivor.start()
        stage.store = survivor
        for policy in POLICIES:
            response = await stage.claim(policy=policy, wait=PATIENCE)
            assert len(response.samples) == 4
        await survivor.stop()


@pytest.mark.parametrize("moment", MOMENTS)
async def test_samples_whose_values_are_gone_are_dropped_once(redis_url: str, moment: str) -> None:
    life = Life(redis_url, 0, moment)
    stage = life.stage
    await stage.store.tables.create(stage.job, POLICIES, [])
    await stage.open(0)
    await stage.append_all()
    first = ids_of(await stage.claim(claim="c1", samples=3))
    second = ids_of(await stage.claim(claim="c2"))
    gone = [first[0], *second]

    async def drop_gone(claim: str) -> int:
        where = (stage.job, "solver", 0, "trainer", claim)
        return await stage.store.claims.drop_gone(*where, gone)

    life.database.die(1, moment)
    assert await life.call(partial(drop_gone, "c1")) in (0, 1)  # 0: the call had arrived
    assert life.crashed == 1
    assert await drop_gone("c2") == 1
    response = await stage.claim(claim="c1")
    assert ids_of(response) == first[1:]
    # Statistics of a group are final: a sample claimed later still has this reward among them.
    assert [list(one.group_rewards) for one in response.samples] == [[1.0, 1.0]] * 2
    assert ids_of(await stage.claim(claim="c2")) == []
    assert (await stage.claim()).outcome == Response.OUTCOME_EXHAUSTED
    await stage.commit(["c1", "c2"])
    assert await stage.counts() == {"trained": 2, "dropped": 2}
    assert dict((await stage.table()).drop_reasons) == {"value_gone": 2}
    report = await stage.store.audit.check(stage.job)
    assert list(report.violations) == []
    assert dict(report.policies[1].drop_reasons) == {"value_gone": 2}
    await stage.store.tables.drop(stage.job, purge_log=True)
    await life.close()


async def test_only_the_claim_holder_may_report_missing_values(redis_url: str) -> None:
    life = Life(redis_url, 0, "before")
    stage = life.stage
    await stage.store.tables.create(stage.job, POLICIES, [])
    await stage.open(0)
    await stage.append_all()
    gone = ids_of(await stage.claim(claim="c1"))
    for claimant, claim in (("somebody else", "c1"), ("trainer", "never made")):
        with pytest.raises(FailedPrecondition) as error:
            await stage.store.claims.drop_gone(stage.job, "solver", 0, claimant, claim, gone)
        assert error.value.kind == "claim_lost"
    await stage.release("trainer")
    with pytest.raises(FailedPrecondition, match="released"):
        await stage.store.claims.drop_gone(stage.job, "solver", 0, "trainer", "c1", gone)
    assert await stage.counts() == {"ready": 4}
    await stage.store.tables.drop(stage.job, purge_log=True)
    await life.close()
