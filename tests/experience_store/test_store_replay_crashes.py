"""The store dies at any Redis round trip of a job that uses samples twice, skips a step, is taken
over and is dropped: its log equals the log of an undisturbed one."""

from __future__ import annotations

from functools import partial
from typing import TypeAlias

import pytest

from services.experience_store.store import Store
from tests.experience_store.mortal import MortalLife
from tests.support.experience import ids_of, make_sample
from troupe.rpc import new_id
from troupe.v1 import experience_store_pb2 as store_pb

POLICY = "solver"
APPLIED = store_pb.STEP_OUTCOME_APPLIED
SKIPPED = store_pb.STEP_OUTCOME_SKIPPED
Fates: TypeAlias = dict[tuple[int, str], tuple[int, str, int]]
"""(step, sample) -> state, why it was dropped, uses."""


class Life(MortalLife):
    """Four steps of one policy; a repeated call finds another process."""

    def __init__(self, url: str, fatal: int, moment: str, *, clustered: bool = False) -> None:
        # Steps are forgotten as soon as they may be.
        make = partial(Store, keep_steps=1)
        queries = ("q0", "q1")
        super().__init__(
            url, fatal, moment, (POLICY,), queries, clustered=clustered, make_store=make
        )
        # Round trips that may be fatal: all but reading the log.
        self.trips = 0

    async def append(self, step: int) -> None:
        """Append two rows per trajectory, one of which gets its reward late."""
        stage = self.stage
        for query, trajectory in stage.trajectories:
            rows = [
                make_sample(query, turn, trajectory, reward=reward, version=step)
                for turn, reward in enumerate((1.0, None))
            ]
            attempt = new_id("append")
            await self.call(partial(stage.append, query, trajectory, rows, attempt=attempt))
            await self.call(partial(stage.fill, rows[1].sample_id, reward=0.5))

    async def claim(self, claimant: str, name: str, samples: int = 64) -> list[str]:
        return ids_of(
            await self.call(partial(self.stage.claim, claimant, claim=name, samples=samples))
        )

    async def commit(
        self, version: int, claims: list[str], outcome: store_pb.StepOutcome.ValueType = APPLIED
    ) -> None:
        reason = "nan_loss: inf" if outcome == SKIPPED else ""
        call = partial(
            self.stage.commit, claims, "second", version=version, outcome=outcome, reason=reason
        )
        await self.call(call)

    async def drop_gone(self, claim: str, sample: str) -> None:
        where = (self.stage.job, POLICY, self.stage.step, "second", claim, [sample])
        await self.call(lambda: self.stage.store.claims.drop_gone(*where))

    async def run(self) -> Fates:
        """Play all steps; return the log afterwards."""
        stage = self.stage
        await self.call(lambda: stage.store.tables.create(stage.job, (POLICY,), [], max_uses=2))
        await self.call(partial(stage.open, 0))
        await self.append(0)
        await self.claim("first", "c0-a", samples=3)
        await self.call(partial(stage.release, ""))
        lost = (await self.claim("second", "c0-b", samples=3))[1]
        await self.drop_gone("c0-b", lost)
        assert await self.call(partial(stage.renew, "second")) == 1
        assert len(await self.claim("second", "c0-c")) == 5
        await self.commit(1, ["c0-b", "c0-c"])
        await self.call(partial(stage.open, 1, 1))
        await self.append(1)
        assert len(await self.claim("second", "c1")) == 15, "seven of step 0 again"
        await self.commit(1, ["c1"], SKIPPED)
        await self.call(partial(stage.open, 2, 1))
        await self.append(2)
        assert len(await self.claim("second", "c2")) == 8, "a skipped step gives nothing back"
        await self.commit(2, ["c2"])
        await self.call(lambda: stage.store.sweeper.sweep())
        await self.call(partial(stage.open, 3, 2))
        for query, trajectory in stage.trajectories:
            await self.call(partial(stage.fail, query, trajectory))
        assert len(await self.claim("second", "c3")) == 8
        await self.commit(3, ["c3"])
        await self.call(partial(stage.open, 4, 3))
        await self.append(4)
        await self.call(lambda: stage.store.tables.drop(stage.job))
        self.trips = self.database.trips
        return await self.fates()

    async def fates(self) -> Fates:
        store, job = self.stage.store, self.stage.job
        return {
            (logged.step, sample.sample_id): (sample.state, sample.reason, sample.uses)
            async for logged in store.audit.read(job, POLICY, 0)
            for sample in logged.samples
        }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("moment", "clustered"), [("before", False), ("middle", True), ("after", False)]
)
async def test_a_crash_at_any_round_trip_changes_no_samples_fate(
    redis_url: str, moment: str, clustered: bool
) -> None:
    undisturbed = Life(redis_url, 0, moment, clustered=clustered)
    wanted = await undisturbed.run()
    await undisturbed.close()
    assert len(wanted) == 8 + (8 + 7) + 8 + 8 + 8
    for fatal in range(1, undisturbed.trips + 1):
        life = Life(redis_url, fatal, moment, clustered=clustered)
        found = await life.run()
        assert life.crashed == 1, f"trip {fatal}"
        assert found == wanted, f"trip {fatal}"
        store, job = life.stage.store, life.stage.job
        report = await store.audit.check(job)
        assert list(report.violations) == [], f"trip {fatal}"
        await store.tables.drop(job, purge_log=True)
        assert await store.database.call("KEYS", f"*{job}*") == [], f"trip {fatal}"
        await life.close()
