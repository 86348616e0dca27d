"""Queries of one step, taken from the training split and kept durably in the experience store; and
their tasks in a job with a curriculum, chosen from the store's pools (`Curriculum`)."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Final

from services.orchestrator.context import JobContext
from services.orchestrator.placement.engines import Engines
from troupe.job.sections.run import CurriculumSpec
from troupe.rpc import FailedPrecondition, new_id
from troupe.scheduling import admission
from troupe.scheduling.curriculum import (
    CurriculumShares,
    SourcePools,
    TaskChoice,
    TaskPool,
    choose_tasks,
    number_of,
    wanted_of,
)
from troupe.v1 import experience_store_pb2 as store_pb

# Reasons for a query to leave its step: others were complete first, or it would be too old when
# trained.
SURPLUS: Final = "surplus"
STALE: Final = "stale"


class Cursor:
    """The position in the training split of the next query that no step of a job has taken.

    The store keeps the cursor's position after every step, so that no number is taken twice or
    skipped after a restart.
    """

    def __init__(self, curriculum: Curriculum | None = None) -> None:
        """`curriculum` chooses the tasks of queries; None: the items of the split in order."""
        self.at = 0
        self.curriculum = curriculum
        # Held from a choice of tasks until the store knows their queries.
        self.lock = asyncio.Lock()

    async def take(self, count: int, *, offline: bool) -> list[str]:
        """Return the ids of the next `count` queries; `offline`: they are rows to learn from."""
        first, self.at = self.at, self.at + count
        numbers = range(first, self.at)
        if self.curriculum is None or offline or not count:
            return [admission.query_id_of(number) for number in numbers]
        return await self.curriculum.choose(numbers)

    def see(self, found: store_pb.GetStepResponse) -> None:
        """Move past the items of a step that was opened before."""
        taken = [number_of(query_id) + 1 for query_id in found.query_ids]
        self.at = max(self.at, found.cursor, *taken)


class StepQueries:
    """The queries of one step. `plans` holds its present queries, which change only until it is
    `closed`.

    Every change is durable in the store before it takes effect.
    """

    def __init__(self, job: JobContext, step: int, cursor: Cursor) -> None:
        self._job = job
        self._cursor = cursor
        self._store = job.shared.experience
        self.step = step
        pipeline, offline = job.spec.pipeline, job.spec.offline
        self.wanted = pipeline.queries_per_step
        self.group_size = pipeline.group_size
        self.spare = pipeline.over_sampling
        self.redundant = pipeline.redundant_trajectories
        self._offline = job.spec.is_offline(step)
        if offline is not None and self._offline:
            # Queries are rows to learn from: each is one trajectory, which no workflow plays.
            self.wanted = offline.rows_per_step or self.wanted * self.group_size
            self.group_size, self.spare, self.redundant = 1, 0, 0
        self.max_refills = (pipeline.max_refills or self.wanted) if pipeline.dynamic_sampling else 0
        self.held = bool(self.spare or self.max_refills)
        # The step in the queries' ids. In mode async a query may end in a later step.
        self._named_step = None if pipeline.mode == "async" else step
        self.plans: dict[str, admission.QueryPlan] = {}
        # Oldest version that generates samples of this step, by policy.
        self.versions: dict[str, int] = {}
        self.closed = not self.held
        # Trajectories that had ended when this step was opened.
        self.ended: Collection[str] = frozenset()
        self.commits: dict[str, store_pb.StepCommit] = {}
        self.left = 0
        # Metrics of the pools from which its newest tasks were chosen.
        self._pool_sizes: Mapping[str, float] = {}

    @property
    def trajectories(self) -> int:
        """Number of trajectories of its queries."""
        return len(self.plans) * (self.group_size + self.redundant)

    async def open(
        self, found: store_pb.GetStepResponse, versions: Mapping[str, int], fresh: int
    ) -> None:
        """Open the step in the store with `fresh` queries, or continue it as `found`."""
        self.commits = {commit.policy: commit for commit in found.commits}
        if found.open:
            self.versions.update(found.versions)
            await self._plan(found.query_ids)
            self._cursor.see(found)
            self.closed = self.closed or found.closed
            if self.held:
                self.ended = await self._over(found.ended_trajectory_ids)
                return
            await self._open()
            return
        self.versions.update(versions)
        async with self._cursor.lock:
            await self._plan(await self._take(fresh))
            await self._open()

    async def _take(self, count: int) -> list[str]:
        taken = await self._cursor.take(count, offline=self._offline)
        if self._cursor.curriculum is not None and not self._offline:
            # Now, since steps overlap in mode async, and the next one chooses anew.
            self._pool_sizes = self._cursor.curriculum.sizes
        return taken

    async def _open(self) -> None:
        await self._check_epoch()
        response = await self._store.OpenStep(
            store_pb.OpenStepRequest(
                request_id=new_id("open"),
                job_id=self._job.job_id,
                step=self.step,
                versions=self.versions,
                query_ids=self.plans,
                group_size=self.group_size,
                held_open=self.held,
                cursor=self._cursor.at,
                redundant=self.redundant,
            )
        )
        self.ended = await self._over(response.ended_trajectory_ids)

    async def progress(self) -> list[admission.QueryProgress]:
        """Return the progress of each query, as the store counts it."""
        request = store_pb.GetStepRequest(
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
        """Return the trajectories that have ended so far according to the store."""
        request = store_pb.GetStepRequest(job_id=self._job.job_id, step=self.step)
        return await self._over((await self._store.GetStep(request)).ended_trajectory_ids)

    async def _over(self, ended: Collection[str]) -> Collection[str]:
        """Return `ended` and the redundant trajectories of complete queries, which the store ends
        without knowing their names."""
        if not (self.redundant and ended):
            return frozenset(ended)
        complete = [one.query_id for one in await self.progress() if one.complete]
        redundant = (self.plans[query_id].trajectory_ids for query_id in complete)
        return frozenset(ended).union(*redundant)

    async def join(self, count: int) -> list[admission.QueryPlan]:
        """Add `count` new queries, in the order of the split."""
        async with self._cursor.lock:
            added = await self._plan(await self._take(count))
            ids = [plan.query_id for plan in added]
            await self._amend(add_query_ids=ids, cursor=self._cursor.at)
        return added

    async def close(
        self,
        *,
        drop: Collection[str] = (),
        reason: str = SURPLUS,
        carry: Collection[str] = (),
        target: StepQueries | None = None,
    ) -> tuple[list[str], list[str]]:
        """Close the step: no query joins or leaves it anymore.

        Returns the queries of `drop` and of `carry` (to the step `target`) that have left. Queries
        that were complete by then stay.
        """
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
        """Return the first `most` queries with which the step would open now, without taking
        them."""
        at = self._cursor.at
        numbers = range(at, at + min(most, self.wanted + self.spare))
        return self._planned(map(admission.query_id_of, numbers))

    def values(self) -> dict[str, float]:
        """Return the metrics of the choice of its tasks: shares of pools, and the sizes of these,
        in tasks."""
        if self._cursor.curriculum is None or self._offline:
            return {}
        choices = [plan.choice for plan in self.plans.values() if plan.choice is not None]
        return shares_of(choices) | dict(self._pool_sizes)

    def _planned(self, query_ids: Iterable[str]) -> list[admission.QueryPlan]:
        spec = self._job.spec
        plans = admission.plan_queries(
            query_ids,
            job_seed=spec.seed,
            group_size=self.group_size + self.redundant,
            step=self._named_step,
        )
        return list(plans)

    async def _plan(self, query_ids: Collection[str]) -> list[admission.QueryPlan]:
        # In a thread: hundreds of thousands of trajectories take seconds, and a blocked event loop
        # would count workers as lost.
        plans = await asyncio.to_thread(self._planned, query_ids)
        self.plans.update((plan.query_id, plan) for plan in plans)
        return plans

    async def _amend(self, **changes: Any) -> Collection[str]:
        await self._check_epoch()
        request = store_pb.AmendStepRequest(
            request_id=new_id("amend"), job_id=self._job.job_id, step=self.step, **changes
        )
        return frozenset((await self._store.AmendStep(request)).complete_query_ids)

    async def _check_epoch(self) -> None:
        """Raise `Superseded` if another orchestrator has the job and now takes items."""
        await self._job.shared.store.check_epoch(self._job.job_id, self._job.epoch)


# Names of the pools in metrics.
_NAMES: Final = {
    TaskPool.NEW: "explored",
    TaskPool.WITHIN: "in_band",
    TaskPool.FAILED: "replayed",
    TaskPool.SOLVED: "reviewed",
    TaskPool.ASKED: "repeated",
}
_SIZES: Final = {
    TaskPool.WITHIN: "in_band",
    TaskPool.FAILED: "below_band",
    TaskPool.SOLVED: "above_band",
}


class Curriculum:
    """The choice of tasks by success rates as of the newest step that all policies have
    committed."""

    def __init__(
        self, job: JobContext, spec: CurriculumSpec, engines: Engines, committed: Mapping[str, int]
    ) -> None:
        """`committed`: number of committed steps by trained policy, kept up to date by the
        caller."""
        assert job.spec.tasks is not None, "the job was checked"
        self._job = job
        self._spec = spec
        self._engines = engines
        self._committed = committed
        weights = [one.weight for one in job.spec.tasks.mixed.values()]
        self._weights = weights or [1.0]
        self._shares = CurriculumShares(new=spec.explore, failed=spec.replay, solved=spec.review)
        # Metrics of the pools as of the newest choice, in tasks. Each choice replaces them.
        self.sizes: Mapping[str, float] = {}

    async def choose(self, numbers: Sequence[int]) -> list[str]:
        """Return the ids of the queries with these numbers; an id names the query's task."""
        seed = self._job.spec.seed
        low, high = self._spec.band
        found = await self._job.shared.experience.ReadTaskPools(
            store_pb.ReadTaskPoolsRequest(
                request_id=new_id("pools"),
                job_id=self._job.job_id,
                before_step=min(self._committed.values()),
                low=low,
                high=high,
                memory=self._spec.memory,
                wanted=wanted_of(numbers, self._weights, seed=seed),
            )
        )
        items = self._engines.task_items
        if len(items) != len(self._weights):
            raise FailedPrecondition(
                f"rollout workers report {len(items)} sources of tasks, but the job has "
                f"{len(self._weights)}",
                kind="tasks_differ",
                field="tasks",
                remedy="Run one release of Troupe on all hosts.",
            )
        self.sizes = _sizes_of(found.sources, items)
        chosen = choose_tasks(
            numbers,
            [
                SourcePools(
                    size=size,
                    next_new=one.next_new,
                    pools={pool: one.pools[pool].items for pool in TaskPool if pool in one.pools},
                )
                for size, one in zip(items, found.sources, strict=True)
            ],
            weights=self._weights,
            shares=self._shares,
            seed=seed,
        )
        return [choice.query_id for choice in chosen]


def shares_of(choices: Collection[TaskChoice]) -> dict[str, float]:
    """Return the metrics of a step whose queries are `choices`: the share of each pool in them."""
    counts = Counter(choice.pool for choice in choices)
    return {
        f"curriculum/{name}": counts[pool] / max(1, len(choices)) for pool, name in _NAMES.items()
    }


def _sizes_of(sources: Sequence[store_pb.TaskPools], items: Sequence[int]) -> dict[str, float]:
    """Return the metrics of the pools: how many tasks each has, over all sources."""
    found = {
        f"curriculum/tasks/{name}": float(sum(one.pools[pool].size for one in sources))
        for pool, name in _SIZES.items()
    }
    new = sum(
        max(0, size - one.next_new) + one.pools[TaskPool.NEW].size
        for size, one in zip(items, sources, strict=True)
    )
    return found | {"curriculum/tasks/new": float(new)}
