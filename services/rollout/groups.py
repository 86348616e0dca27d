"""How far the queries of a job are on this worker: turns of nearly finished ones go first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from services.rollout.router import PolicyRouter
from troupe.scheduling.elastic.waiters import group_waiters


class Groups:
    """Trajectories of each query that have not ended here. A group runs on one worker."""

    def __init__(self, routers: Iterable[PolicyRouter]) -> None:
        """`routers` are told when a group becomes smaller."""
        self._routers = list(routers)
        self._left: Counter[str] = Counter()
        self._begun: Counter[str] = Counter()

    def left(self, query_id: str) -> int:
        """Trajectories of the query that have not ended."""
        return self._left[query_id]

    def waiters(self, query_id: str) -> int:
        """Trajectories that wait for what one of the query's does next."""
        return group_waiters(self._begun[query_id], self._left[query_id])

    def begin(self, query_id: str) -> None:
        """A trajectory is to run."""
        self._begun[query_id] += 1
        self._left[query_id] += 1

    def end(self, query_id: str) -> None:
        """A trajectory has ended, however."""
        left = self._left[query_id] = self._left[query_id] - 1
        if left <= 0:
            del self._left[query_id], self._begun[query_id]
            return
        for router in self._routers:
            router.regroup(query_id, left)
