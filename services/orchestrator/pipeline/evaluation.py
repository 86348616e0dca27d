"""Evaluations on held-out queries."""

from __future__ import annotations

import asyncio
import math
import time
from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping
from typing import Final

from services.orchestrator.context import JobContext
from services.orchestrator.errors import Deadline
from services.orchestrator.pipeline.dispatch import Dispatch, TicketBatch, run_batch
from services.orchestrator.pipeline.failures import check_failures, report_failures
from services.orchestrator.pipeline.metrics import Tally, bounds_of
from services.orchestrator.pipeline.team_monitors import Contributions, JudgeErrors
from troupe.algorithms.scores import (
    MOST_VOTERS,
    interval,
    majority_at_k,
    mean_interval,
    pass_at_k,
    steps_of_k,
    success_of,
)
from troupe.contracts.metric_names import (
    TEAM,
    TEAM_MEAN,
    TEAM_SCORE,
)
from troupe.job.metrics import evaluation_prefix
from troupe.job.section import MAX_QUERIES, MAX_TRAJECTORIES
from troupe.job.sections.run import EvaluationSpec
from troupe.scheduling import admission
from troupe.v1 import common_pb2 as common_pb
from troupe.v1 import rollout_pb2 as rollout_pb

# Names of scores whose metrics are not called `<score>/mean`.
METRICS: Final[Mapping[str, str]] = {TEAM_SCORE: TEAM_MEAN}


class EvaluationRunner:
    """Evaluation after `step` steps, of the same held-out queries each time.

    Its samples are neither stored nor trained on.
    """

    def __init__(
        self, job: JobContext, dispatch: Dispatch, step: int, name: str, items: int | None
    ) -> None:
        """`name`: "" is the section `evaluation`. `items`: number of items of its tasks; None:
        endless or unknown."""
        self._job = job
        self._dispatch = dispatch
        self._step = step
        self._set = name
        self._spec = job.spec.evaluation_of(name)
        self._queries = self._spec.queries
        if name and items is not None:
            most = min(MAX_QUERIES, MAX_TRAJECTORIES // self._spec.samples)
            self._queries = min(self._queries or most, items)
        self._name = f"the evaluation {f'of {name} ' if name else ''}after {step} steps"
        self._total = self._queries * self._spec.samples
        self.tally = Tally(job.spec.agents, {})
        self._solved = SolvedQueries(self._spec)
        self._rewards = RewardsByQuery(job.spec.agents)
        self._judges = JudgeErrors(self._spec)
        self._contributions = Contributions(job, name, self._queries)
        trajectories = job.shared.trajectories
        self._recent = trajectories.buffer(job.job_id, step, "evaluate")
        # Versions that generated its turns, by policy.
        self._versions: defaultdict[str, set[int]] = defaultdict(set)

    async def run(self) -> tuple[dict[str, float], dict[str, float]]:
        """Return the evaluation's metrics, and the scores for comparing evaluations, both with the
        bounds of their intervals."""
        began = time.monotonic()
        # In a thread: planning thousands of queries would block the event loop.
        plan = await asyncio.to_thread(
            admission.plan_evaluation,
            job_seed=self._job.spec.seed,
            step=self._step,
            queries=self._queries,
            samples=self._spec.samples,
            name=self._set,
        )
        deadline = Deadline(self._name, self._job.spec.limits.step_seconds, "limits.step_seconds")
        batch = TicketBatch(self._step, deadline, self._on_end)
        try:
            await run_batch(self._dispatch, batch, self._groups(plan), self._show_progress())
        finally:
            await self._recent.flush()
        await report_failures(self._job, self._name, self.tally, self._total)
        solved = await asyncio.to_thread(self._solved.values)
        intervals = self._rewards.intervals()
        values = self.tally.values(time.monotonic() - began) | solved | self._judges.values()
        values |= await self._contributions.values(self._name)
        for score, bounds in intervals.items():
            values |= bounds_of(METRICS.get(score, f"{score}/mean"), bounds)
        for policy, versions in sorted(self._versions.items()):
            values[f"version/{policy}"] = float(min(versions))
            if len(versions) > 1:
                await self._job.warn(f"{self._name}: {policy} played versions {sorted(versions)}")
        short = f"{self._set}/" if self._set else ""
        scores = self.tally.scores() | solved
        for score, bounds in intervals.items():
            scores |= bounds_of(score, bounds)
        prefix = evaluation_prefix(self._set)
        return (
            {f"{prefix}{name}": value for name, value in values.items()},
            {f"{short}{name}": value for name, value in scores.items()},
        )

    def _groups(self, plan: Iterable[admission.QueryPlan]) -> Iterator[list[rollout_pb.Ticket]]:
        for query in plan:
            tickets = evaluation_tickets(query, self._set)
            yield tickets
            yield from self._contributions.groups(query, tickets)

    def _on_end(self, event: rollout_pb.TrajectoryEvent) -> None:
        if self._contributions.add(event):
            return
        self.tally.add(event)
        self._solved.add(event)
        self._judges.add(event)
        self._rewards.add(event)
        self._recent.add(event)
        for turn in event.turns:
            self._versions[turn.policy].update(span.version for span in turn.versions)
        check_failures(self._job, self._name, self.tally, self._total)

    async def _show_progress(self) -> None:
        of = f" of {self._set}" if self._set else ""
        total = self._total + self._contributions.total
        while True:
            done = self.tally.ended + self._contributions.ended
            self._job.show(
                f"evaluating: {done} of {total} held-out trajectories{of}",
                step=self._step,
                done=done,
                total=total,
            )
            await asyncio.sleep(self._job.shared.settings.activity_seconds)
            await self._recent.flush()


class SolvedQueries:
    """Successes and answers of an evaluation's trajectories."""

    def __init__(self, spec: EvaluationSpec) -> None:
        self._spec = spec
        # Answer and success of each ended trajectory, by query.
        self._votes: defaultdict[str, list[tuple[str | None, bool]]] = defaultdict(list)

    def add(self, event: rollout_pb.TrajectoryEvent) -> None:
        """Count an ended trajectory. A failed one has not solved its query."""
        if event.state == common_pb.TRAJECTORY_STATE_COMPLETED:
            success = success_of(event.rewards, event.metrics, self._spec.success)
            solved = success >= self._spec.threshold
            self._votes[event.query_id].append((event.answer or None, solved))
        elif event.state == common_pb.TRAJECTORY_STATE_FAILED:
            self._votes[event.query_id].append((None, False))

    def values(self) -> dict[str, float]:
        """Return `pass@k` and `maj@k`, means over the queries, each with the bounds of its
        interval."""
        queries = list(self._votes.values())
        if not (queries and self._spec.counts_solved):
            return {}
        found: dict[str, list[float]] = defaultdict(list)
        voted = self._spec.answer_pattern is not None or any(
            answer is not None for votes in queries for answer, _ in votes
        )
        for votes in queries:
            ks = [k for k in steps_of_k(self._spec.samples) if k <= len(votes)]
            solved = sum(solved for _, solved in votes)
            for k in ks:
                found[f"pass@{k}"].append(pass_at_k(len(votes), solved, k))
            ks = [k for k in ks if 1 < k <= MOST_VOTERS]
            if voted and ks:
                for k, value in zip(ks, majority_at_k(votes, ks), strict=True):
                    found[f"maj@{k}"].append(value)
        values: dict[str, float] = {}
        for name, each in found.items():
            mean = sum(each) / len(each)
            bounds = interval(mean, len(each))
            values |= {name: mean, **bounds_of(name, bounds)}
        return values


class RewardsByQuery:
    """Rewards of an evaluation by query. A query's trajectories depend on each other, so intervals
    are over the means of queries."""

    def __init__(self, agents: Container[str]) -> None:
        self._agents = agents
        # Rewards of a query's trajectories, by score and query.
        self._rewards: defaultdict[str, defaultdict[str, list[float]]]
        self._rewards = defaultdict(lambda: defaultdict(list))

    def add(self, event: rollout_pb.TrajectoryEvent) -> None:
        """Add an ended trajectory. A failed one has no reward."""
        if event.state != common_pb.TRAJECTORY_STATE_COMPLETED:
            return
        for name, reward in event.rewards.items():
            team = name == TEAM and name not in self._agents
            score = TEAM_SCORE if team else f"reward/{name}"
            self._rewards[score][event.query_id].append(reward)

    def intervals(self) -> dict[str, tuple[float, float]]:
        """Return the 95 % intervals of the mean rewards, by score: `team_success`,
        `reward/<agent>`."""
        found = {
            score: mean_interval([math.fsum(each) / len(each) for each in queries.values()])
            for score, queries in self._rewards.items()
        }
        return {score: bounds for score, bounds in found.items() if bounds is not None}


def evaluation_tickets(query: admission.QueryPlan, name: str) -> list[rollout_pb.Ticket]:
    """Return the tickets of a query of evaluation `name`."""
    return [
        rollout_pb.Ticket(
            query_id=query.query_id,
            trajectory_id=trajectory_id,
            split="held_out",
            index=query.index,
            seed=seed,
            purpose=rollout_pb.Ticket.PURPOSE_EVALUATE,
            evaluation=name,
        )
        for trajectory_id, seed in zip(query.trajectory_ids, query.seeds, strict=True)
    ]
