"""Monitors of a team in an evaluation: what its agents contribute, and what its judges let through.
docs/team-monitors.md has the definitions."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from services.orchestrator.context import JobContext
from services.orchestrator.pipeline.failures import report_failures
from services.orchestrator.pipeline.metrics import Tally, bounds_of
from troupe.algorithms.scores import success_of
from troupe.algorithms.team_monitors import PairedMeans, SharesByQuery
from troupe.contracts.metric_names import (
    ACCEPTS,
    ACCEPTS_WRONG,
    CONTRIBUTION,
    REJECTS_RIGHT,
)
from troupe.job.sections.run import EvaluationSpec
from troupe.scheduling.admission import QueryPlan
from troupe.v1 import common_pb2 as common_pb
from troupe.v1 import rollout_pb2 as rollout_pb

# Between a trajectory's id and the agent that is replaced in its repetition; in no agent's name.
_WITHOUT: Final = ".without."


class Contributions:
    """Repetitions of an evaluation's first queries with one agent replaced, and the difference that
    this makes to success."""

    def __init__(self, job: JobContext, evaluation: str, queries: int) -> None:
        """`queries`: number of the evaluation's queries."""
        self._job = job
        self._spec = job.spec.evaluation_of(evaluation)
        self._agents = job.spec.replaced_agents(evaluation)
        asked = 0 if self._spec.contributions is None else self._spec.contributions.queries
        self._queries = min(asked, queries)
        self.total = self._queries * self._spec.samples * len(self._agents)
        """Number of repetitions."""
        # Queries that are played again.
        self._repeated: set[str] = set()
        # Of the repetitions only.
        self._tally = Tally((), {})
        self._means: defaultdict[str, PairedMeans] = defaultdict(PairedMeans)

    @property
    def ended(self) -> int:
        """Number of repetitions that have ended."""
        return self._tally.ended

    def groups(
        self, query: QueryPlan, played: Sequence[rollout_pb.Ticket]
    ) -> Iterator[list[rollout_pb.Ticket]]:
        """Yield the repetitions of a query's tickets `played`, with the same seeds: a group for
        each agent that is replaced."""
        spec = self._spec.contributions
        if spec is None or query.index >= self._queries:
            return
        self._repeated.add(query.query_id)
        for agent in self._agents:
            group = []
            for one in played:
                ticket = rollout_pb.Ticket()
                ticket.CopyFrom(one)
                ticket.trajectory_id = f"{one.trajectory_id}{_WITHOUT}{agent}"
                if spec.by is None:
                    ticket.left_out.append(agent)
                else:
                    ticket.cast[agent] = spec.by
                group.append(ticket)
            yield group

    def add(self, event: rollout_pb.TrajectoryEvent) -> bool:
        """Count an ended trajectory; return whether it is a repetition, which nothing else of the
        evaluation counts. A failed one, and one without rewards, has no success."""
        _, repeated, agent = event.trajectory_id.rpartition(_WITHOUT)
        if repeated:
            self._tally.add(event)
        success = _success_of(event, self._spec)
        if success is not None and event.query_id in self._repeated:
            for one in (agent,) if repeated else self._agents:
                self._means[one].add(event.query_id, success, replaced=bool(repeated))
        return bool(repeated)

    async def values(self, name: str) -> dict[str, float]:
        """Return `contribution/<agent>` with the bounds of its interval, and warn of repetitions
        that failed in the evaluation `name`."""
        if not self.total:
            return {}
        await report_failures(self._job, f"{name}, with an agent replaced", self._tally, self.total)
        found: dict[str, float] = {}
        for agent in self._agents:
            if (difference := self._means[agent].difference()) is not None:
                mean, bounds = difference
                found[f"{CONTRIBUTION}{agent}"] = mean
                found |= {} if bounds is None else bounds_of(f"{CONTRIBUTION}{agent}", bounds)
        return found


class JudgeErrors:
    """How often an evaluation's judges accept what does not solve the query, and reject what
    does."""

    def __init__(self, spec: EvaluationSpec) -> None:
        self._spec = spec
        self._accepted: Mapping[str, SharesByQuery] = {one: SharesByQuery() for one in spec.judges}
        self._rejected: Mapping[str, SharesByQuery] = {one: SharesByQuery() for one in spec.judges}

    def add(self, event: rollout_pb.TrajectoryEvent) -> None:
        """Count an ended trajectory. A failed one, one without rewards, and one in which a judge
        said nothing, has no verdict."""
        if not self._spec.judges or (success := _success_of(event, self._spec)) is None:
            return
        for judge in self._spec.judges:
            if (verdict := event.metrics.get(f"{ACCEPTS}{judge}")) is None:
                continue
            if success >= self._spec.threshold:
                self._rejected[judge].add(event.query_id, not verdict)
            else:
                self._accepted[judge].add(event.query_id, bool(verdict))

    def values(self) -> dict[str, float]:
        """Return `accepts_wrong/<judge>` and `rejects_right/<judge>`, with the bounds of their
        intervals."""
        found: dict[str, float] = {}
        for name, errors in ((ACCEPTS_WRONG, self._accepted), (REJECTS_RIGHT, self._rejected)):
            for judge, shares in errors.items():
                if (value := shares.value()) is not None:
                    share, bounds = value
                    found |= {f"{name}{judge}": share, **bounds_of(f"{name}{judge}", bounds)}
        return found


def _success_of(event: rollout_pb.TrajectoryEvent, spec: EvaluationSpec) -> float | None:
    """Return the success of an ended trajectory; None if it has none."""
    if event.state != common_pb.TRAJECTORY_STATE_COMPLETED:
        return None
    success = success_of(event.rewards, event.metrics, spec.success)
    return success if math.isfinite(success) else None
