"""The tasks that the queries of a job with a curriculum ask, chosen from the store's pools."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Final

from services.orchestrator.context import JobContext
from services.orchestrator.placement.engines import Engines
from troupe.job.sections import CurriculumSpec
from troupe.rpc import FailedPrecondition, new_id
from troupe.scheduling.curriculum import (
    CurriculumShares,
    SourcePools,
    TaskChoice,
    TaskPool,
    choose_tasks,
    wanted_of,
)
from troupe.v1 import experience_store_pb2 as es

# What metrics call the pools.
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
    """Chooses tasks by the success rates as of the newest step that all policies have committed."""

    def __init__(
        self, job: JobContext, spec: CurriculumSpec, engines: Engines, committed: Mapping[str, int]
    ) -> None:
        """`committed`: by trained policy the number of committed steps, kept up to date."""
        assert job.spec.tasks is not None, "the job was checked"
        self._job = job
        self._spec = spec
        self._engines = engines
        self._committed = committed
        weights = [one.weight for one in job.spec.tasks.mixed.values()]
        self._weights = weights or [1.0]
        self._shares = CurriculumShares(new=spec.explore, failed=spec.replay, solved=spec.review)
        # Metrics of the pools as of the newest choice, in tasks; each choice makes new ones.
        self.sizes: Mapping[str, float] = {}

    async def choose(self, numbers: Sequence[int]) -> list[str]:
        """The ids of the queries with these numbers, which say what each asks."""
        seed = self._job.spec.seed
        low, high = self._spec.band
        found = await self._job.shared.experience.ReadTaskPools(
            es.ReadTaskPoolsRequest(
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
                f"rollout workers report {len(items)} sources of tasks, the job has "
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
    """Metrics of a step whose queries are `choices`: the share of each pool in them."""
    counts = Counter(choice.pool for choice in choices)
    return {
        f"curriculum/{name}": counts[pool] / max(1, len(choices)) for pool, name in _NAMES.items()
    }


def _sizes_of(sources: Sequence[es.TaskPools], items: Sequence[int]) -> dict[str, float]:
    """Metrics of the pools: how many tasks each has, over all sources."""
    found = {
        f"curriculum/tasks/{name}": float(sum(one.pools[pool].size for one in sources))
        for pool, name in _SIZES.items()
    }
    new = sum(
        max(0, size - one.next_new) + one.pools[TaskPool.NEW].size
        for size, one in zip(items, sources, strict=True)
    )
    return found | {"curriculum/tasks/new": float(new)}
