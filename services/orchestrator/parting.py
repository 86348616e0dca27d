"""Trajectories that are not waited for by themselves any more, but for their last words."""

from __future__ import annotations

from collections.abc import Collection

from services.orchestrator.batch import Batch
from troupe.v1 import rollout_pb2 as ro


class Parting:
    """Redundant ones that were withdrawn while they ran: how far they came is still to be told, and
    some may be members of their group."""

    def __init__(self) -> None:
        # With its query.
        self._batches: dict[str, tuple[Batch, str]] = {}

    def __contains__(self, trajectory_id: str) -> bool:
        return trajectory_id in self._batches

    def add(self, batch: Batch, query_id: str, running: Collection[str], members: int) -> None:
        """These of a query run, and the store has all `members` of its group."""
        self._batches.update(dict.fromkeys(running, (batch, query_id)))
        batch.complete(query_id, running, members)

    def of(self, batch: Batch, trajectory_ids: Collection[str]) -> set[str]:
        """Which of these are parting from this batch."""
        return {one for one in trajectory_ids if one in self and self._batches[one][0] is batch}

    def end(self, event: ro.TrajectoryEvent) -> None:
        """One of them has ended."""
        batch, _ = self._batches.pop(event.trajectory_id)
        batch.end_withdrawn(event)

    def end_untold(self, trajectory_ids: Collection[str]) -> None:
        """Nobody will say any more how these ended, as far as they are parting."""
        for trajectory_id in trajectory_ids:
            if (found := self._batches.pop(trajectory_id, None)) is not None:
                batch, query_id = found
                batch.end_untold(query_id, trajectory_id)
