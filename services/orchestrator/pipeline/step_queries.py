"""The queries of one step, as the experience store holds them, and what may change about them."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Final

from services.orchestrator.context import JobContext
from troupe.rpc import new_id
from troupe.scheduling import admission
from troupe.v1 import experience_store_pb2 as es

# Why a query leaves its step: others were complete first; it would be too old when it is trained.
SURPLUS: Final = "surplus"
STALE: Final = "stale"


class Cursor:
    """The first item of the training split that no step of a job has taken. Every step keeps where
    it was when it last took some, so that no item is taken twice or left out."""

    def __init__(self, start: int = 0) -> None:
        self.at = start

    def take(self, count: int) -> range:
        """The next `count` items."""
        first, self.at = self.at, self.at + count
        return range(first, self.at)

    def see(self, found: es.GetStepResponse) -> None:
        """A step that was opened before took these."""
        taken = [admission.index_of(query_id) + 1 for query_id in found.query_ids]
        self.at = max(self.at, found.cursor, *taken)


class StepQueries:
    """The queries of one step. `plans` are those in it now; they may only change until `closed`.

    Every change is durable in the store before anything else is done about it.
    """

    def __init__(self, job: JobContext, step: int, cursor: Cursor) -> None:
        self._job = job
        self._cursor = cursor
        self._store = job.shared.experience
        self.step = step
        pipeline = job.spec.pipeline
        self.wanted = pipeline.queries_per_step
        self.spare = pipeline.over_sampling
        self.redundant = pipeline.redundant_trajectories
        self.max_refills = (pipeline.max_refills or self.wanted) if pipeline.dynamic_sampling else 0
        self.held = bool(self.spare or self.max_refills)
        # In mode async a query may go on in a later step than it began in.
        self._home = None if pipeline.mode == "async" else step
        self.plans: dict[str, admission.QueryPlan] = {}
        # What the rows of this step were or will be generated with, at least.
        self.versions: dict[str, int] = {}
        self.closed = not self.held
        # Trajectories that had ended when this was opened.
        self.ended: Collection[str] = frozenset()
        self.commits: dict[str, es.StepCommit] = {}
        self.left = 0

    @property
    def trajectories(self) -> int:
        """Trajectories of the queries that are in it now."""
        return len(self.plans) * (self._job.spec.pipeline.group_size + self.redundant)

    async def open(
        self, found: es.GetStepResponse, versions: Mapping[str, int], fresh: int
    ) -> None:
        """Admit the step with `fresh` queries, or take it up as it was `found`."""
        self.commits = {commit.policy: commit for commit in found.commits}
        if found.open:
            self.versions.update(found.versions)
            await self._plan([admission.index_of(query_id) for query_id in found.query_ids])
            self._cursor.see(found)
            self.closed = self.closed or found.closed
        else:
            self.versions.update(versions)
            await self._plan(self._cursor.take(fresh))
        if self.held and found.open:
            self.ended = await self._over(found.ended_trajectory_ids)
            return
        await self._check_epoch()
        response = await self._store.OpenStep(
            es.OpenStepRequest(
                request_id=new_id("open"),
                job_id=self._job.job_id,
                step=self.step,
                versions=self.versions,
                query_ids=self.plans,
                group_size=self._job.spec.pipeline.group_size,
                held_open=self.held,
                cursor=self._cursor.at,
                redundant=self.redundant,
            )
        )
        self.ended = await self._over(response.ended_trajectory_ids)

    async def progress(self) -> list[admission.QueryProgress]:
        """How far each query is."""
        request = es.GetStepRequest(
            job_id=self._job.job_id, step=self.step, counts_only=True, with_queries=True
        )
        return [
            admission.QueryProgress(
                query_id=one.query_id,
                complete=one.complete,
                settled=one.complete and not one.pending,
                kept=one.kept,
            )
            for one in (await self._store.GetStep(request)).queries
            if one.query_id in self.plans
        ]

    async def ended_now(self) -> Collection[str]:
        """The trajectories that have ended by now."""
        request = es.GetStepRequest(job_id=self._job.job_id, step=self.step)
        return await self._over((await self._store.GetStep(request)).ended_trajectory_ids)

    async def _over(self, ended: Collection[str]) -> Collection[str]:
        """Those that `ended` by themselves, and those that were redundant: the store ends these
        without knowing their names."""
        if not (self.redundant and ended):
            return frozenset(ended)
        complete = [one.query_id for one in await self.progress() if one.complete]
        redundant = (self.plans[query_id].trajectory_ids for query_id in complete)
        return frozenset(ended).union(*redundant)

    async def join(self, count: int) -> list[admission.QueryPlan]:
        """Fresh queries, in order."""
        added = await self._plan(self._cursor.take(count))
        await self._amend(add_query_ids=[plan.query_id for plan in added], cursor=self._cursor.at)
        return added

    async def close(
        self,
        *,
        drop: Collection[str] = (),
        reason: str = SURPLUS,
        carry: Collection[str] = (),
        target: StepQueries | None = None,
    ) -> tuple[list[str], list[str]]:
        """From now on nobody joins or leaves. Of those to `drop` and to `carry` to another step,
        returns which have really left: what was complete by then stays."""
        complete = await self._amend(
            drop_query_ids=drop,
            drop_reason=reason,
            carry_query_ids=carry,
            carry_to=target.step if target is not None else 0,
            close=True,
        )
        dropped = [query_id for query_id in drop if query_id not in complete]
        carried = [query_id for query_id in carry if query_id not in complete]
        for query_id in dropped:
            del self.plans[query_id]
        for query_id in carried:
            assert target is not None, "somewhere to carry it"
            target.plans[query_id] = self.plans.pop(query_id)
        self.left += len(dropped)
        self.closed = True
        return dropped, carried

    def next_plans(self, most: int) -> list[admission.QueryPlan]:
        """The first `most` of what it would open with now, if the step before is closed. Nothing is
        taken."""
        at = self._cursor.at
        return self._planned(range(at, at + min(most, self.wanted + self.spare)))

    def _planned(self, indexes: Iterable[int]) -> list[admission.QueryPlan]:
        spec = self._job.spec
        plans = admission.plan_queries(
            indexes,
            job_seed=spec.seed,
            group_size=spec.pipeline.group_size + self.redundant,
            step=self._home,
        )
        return list(plans)

    async def _plan(self, indexes: Collection[int]) -> list[admission.QueryPlan]:
        # In a thread: of hundreds of thousands of trajectories it takes seconds, and a loop that
        # hears no heartbeats takes workers for dead.
        plans = await asyncio.to_thread(self._planned, indexes)
        self.plans.update((plan.query_id, plan) for plan in plans)
        return plans

    async def _amend(self, **changes: Any) -> Collection[str]:
        await self._check_epoch()
        request = es.AmendStepRequest(
            request_id=new_id("amend"), job_id=self._job.job_id, step=self.step, **changes
        )
        return frozenset((await self._store.AmendStep(request)).complete_query_ids)

    async def _check_epoch(self) -> None:
        """Items of the tasks are given out here: not by one that another has taken the job from."""
        await self._job.shared.store.check_epoch(self._job.job_id, self._job.epoch)
