"""One round of matches: which are due, played wave by wave, each counted once.

A match is a trajectory whose name says all of it: the members' places and a number. How it ended is
durable as soon as it is known; the payoff table takes a whole round at once, in the order of the
plan and not of arrival. A round that is taken up again plays what is missing, and adds up to the
same bits.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import structlog

from services.orchestrator.batch import Batch
from services.orchestrator.context import JobContext
from services.orchestrator.dispatch import Dispatch, add_in_parts
from services.orchestrator.faults import Patience
from services.orchestrator.job_store import Superseded
from services.orchestrator.populations.decisions import sections
from services.orchestrator.populations.slots import Slots
from services.orchestrator.populations.state import CANDIDATE, SETTLED, PopulationState
from services.orchestrator.populations.store import PopulationStore
from services.orchestrator.records import timestamp
from troupe.job import JobSpec
from troupe.populations import Precision, matches_due, seats
from troupe.populations.matches import turn_beside
from troupe.populations.payoffs import Members
from troupe.populations.ratings import rated
from troupe.populations.slots import match_waves, visible_cells
from troupe.rpc import FailedPrecondition, ResourceExhausted, TroupeError
from troupe.scheduling import admission
from troupe.v1 import common_pb2 as pb
from troupe.v1 import orchestrator_pb2 as orch
from troupe.v1 import rollout_pb2 as ro

# Times that a match is played which somebody aborts.
_ROUNDS: Final = 3
# Matches in a row, in whole rounds, that fail before nobody expects another end of the next one.
_IN_VAIN: Final = 16
# To write what had ended when a wave broke off.
_LAST_SECONDS: Final = 5.0
_log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class Planned:
    """One match: a cell, and which of its matches."""

    cell: Members
    number: int

    @property
    def name(self) -> str:
        """The trajectory."""
        return f"m{'x'.join(map(str, self.cell))}-t{self.number}"


def due(spec: JobSpec, state: PopulationState) -> list[Planned]:
    """The matches of the next round of a job."""
    population, pools = sections(spec)
    if not population.plays_matches:
        return []
    wanted, width = population.matches, population.matches.half_width
    precision = Precision(wanted.least, wanted.most, float("inf") if width is None else width)
    # Members that anybody may still meet.
    places = [state.places(pools.pool_of(one).name, SETTLED, CANDIDATE) for one in pools.agents]
    visible = set(visible_cells(places, symmetric=pools.symmetric))
    return [
        Planned(cell, state.attempts.get(cell, 0) + number)
        for cell, count in matches_due(state.table, precision)
        if cell in visible
        for number in range(count)
    ]


class Matches:
    """Fills a population's payoff table."""

    def __init__(
        self,
        job: JobContext,
        dispatch: Dispatch,
        store: PopulationStore,
        slots: Slots,
        state: PopulationState,
    ) -> None:
        self._job, self._dispatch, self._store, self._slots = job, dispatch, store, slots
        self._state = state
        self._population, self._pools = sections(job.spec)
        self._ended: dict[str, orch.Match] = {}
        # Seen here in this round; in whole rounds since a match was completed.
        self._failed = self._in_vain = 0

    def due(self) -> list[Planned]:
        """The matches of the next round, the same whenever this is asked before it is folded."""
        return due(self._job.spec, self._state)

    async def play(self, plan: Sequence[Planned]) -> None:
        """Play what has not ended of `plan`, and count all of it.

        Raises `TroupeError`: a fault of the job, or ResourceExhausted where too many fail.
        """
        names = {one.name: one for one in plan}
        known = await self._store.matches(self._job.job_id, list(names))
        self._ended = dict(known)
        # Those that are known may be what a resume has mended.
        self._failed = 0
        for _ in range(_ROUNDS):
            left = [one for name, one in names.items() if name not in self._ended]
            await self._waves(left, len(plan))
        if gone := [name for name in names if name not in self._ended]:
            raise ResourceExhausted(
                f"{len(gone)} matches were aborted {_ROUNDS} times, the first is {gone[0]}",
                kind="matches_aborted",
                field="population.matches",
                remedy="Look into the rollout workers' logs for who aborts them, then resume the "
                "job.",
            )
        failed = sum(one.state == pb.TRAJECTORY_STATE_FAILED for one in self._ended.values())
        if failed < len(plan):
            self._in_vain = 0
        elif len(known) < len(plan):
            # However many may fail: else such rounds would follow each other for ever. But a round
            # of a few, those that failed before, may fail as a whole by chance.
            self._in_vain += len(plan)
            if self._in_vain >= _IN_VAIN:
                last = next(one for name, one in self._ended.items() if name not in known)
                raise self._too_many(f"the last {self._in_vain} matches all failed", last.reason)
        self._state.planned += len(plan)
        self._state.failed += failed
        self._fold(plan)

    async def _waves(self, left: Sequence[Planned], total: int) -> None:
        """Play these, with as few loads as may be."""
        pool_of = [self._pools.pool_of(agent).name for agent in self._pools.agents]
        served = {pool.name: len(pool.match_slots) for pool in self._pools.pools}
        cells = list(dict.fromkeys(one.cell for one in left))
        for loaded, some in match_waves(cells, pool_of, served):
            chosen = set(some)
            await self._wave(loaded, [one for one in left if one.cell in chosen], total)

    async def _wave(
        self, loaded: dict[str, list[int]], wave: Sequence[Planned], total: int
    ) -> None:
        step = self._state.began
        patience = Patience(
            "matches between members", self._job.spec.limits.step_seconds, "limits.step_seconds"
        )
        await self._slots.load_matches(loaded, patience)
        places = self._slots.places()
        new: dict[str, orch.Match] = {}
        recent = self._job.shared.trajectories.buffer(
            self._job.job_id, step, evaluation=True, match=True
        )
        members = {one.name: self._members(one) for one in wave}

        def on_end(event: ro.TrajectoryEvent) -> None:
            if event.state == pb.TRAJECTORY_STATE_ABORTED:
                return  # by whoever ran it, for no fault of the game: it is played again
            match = self._match(event, members[event.trajectory_id])
            new[event.trajectory_id] = self._ended[event.trajectory_id] = match
            recent.add(event)
            self._check_failures(event, total)

        batch = Batch(
            step, patience, on_end, floors=self._slots.match_floors(), aside=self._slots.apart
        )

        async def write() -> None:
            done = dict(new)
            await self._store.add_matches(self._job.job_id, self._job.epoch, done)
            for name in done:
                del new[name]
            await recent.flush()

        async def tick() -> None:
            while True:
                await asyncio.sleep(self._job.shared.settings.activity_seconds)
                try:
                    await write()
                except Superseded as error:
                    return batch.fail(error)
                except TroupeError as error:
                    # It is written with what ends next.
                    self._warn(error)
                if not self._slots.apart:
                    text = f"matches: {len(self._ended)} of {total}"
                    self._job.show(text, step=step, done=len(self._ended), total=total)

        ticker = asyncio.create_task(tick())
        try:
            try:
                tickets = ([self._ticket(one, members[one.name], places)] for one in wave)
                await add_in_parts(self._dispatch, batch, tickets)
                batch.seal()
                await batch.finished(lambda: self._dispatch.describe(batch))
            finally:
                # Those of a pause run for nobody.
                self._dispatch.withdraw(batch, [one.name for one in wave], "cancelled")
                ticker.cancel()
                await asyncio.gather(ticker, return_exceptions=True)
        except BaseException:
            # What has ended is not played again, whatever ended the wave; which is what is told.
            try:
                async with asyncio.timeout(_LAST_SECONDS):
                    await write()
            except (TroupeError, TimeoutError) as error:
                self._warn(error)
            raise
        await write()

    def _warn(self, error: Exception) -> None:
        _log.warning("matches not written", job_id=self._job.job_id, error=repr(error))

    def _ticket(
        self, one: Planned, members: dict[str, str], places: dict[tuple[str, str], str]
    ) -> ro.Ticket:
        seed = f"match/{'x'.join(map(str, one.cell))}"
        return ro.Ticket(
            query_id=one.name,
            trajectory_id=one.name,
            # Of the training items, in their order: every cell meets the same ones.
            split="train",
            index=one.number,
            seed=admission.seed_of(self._job.spec.seed, seed, one.number, 0),
            purpose=ro.Ticket.PURPOSE_MATCH,
            cast={
                agent: places[self._pools.pool_of(agent).name, member]
                for agent, member in members.items()
            },
        )

    def _members(self, one: Planned) -> dict[str, str]:
        """Who plays whom, by agent."""
        return {
            agent: self._state.pools[self._pools.pool_of(agent).name][place]
            for agent, place in zip(self._agents_of(one), one.cell, strict=True)
        }

    def _match(self, event: ro.TrajectoryEvent, members: dict[str, str]) -> orch.Match:
        completed = event.state == pb.TRAJECTORY_STATE_COMPLETED
        payoffs: dict[str, float] = {}
        if completed:
            for agent in members:
                if agent not in event.rewards:
                    raise FailedPrecondition(
                        f"the match {event.trajectory_id} gave no reward to '{agent}'",
                        kind="match_without_payoff",
                        field="workflow",
                        value=self._job.spec.workflow,
                        remedy="Return a reward for every player; it is what a match pays.",
                    )
                payoffs[agent] = event.rewards[agent]
        return orch.Match(
            trajectory_id=event.trajectory_id,
            iteration=self._state.iteration,
            members=members,
            payoffs=payoffs,
            state=event.state,
            reason=event.reason,
            seconds=event.seconds,
            at=timestamp(time.time()),
        )

    def _fold(self, plan: Sequence[Planned]) -> None:
        state = self._state
        for one in plan:
            state.attempts[one.cell] = max(state.attempts.get(one.cell, 0), one.number + 1)
            match = self._ended[one.name]
            if match.state != pb.TRAJECTORY_STATE_COMPLETED:
                continue
            members = self._members(one)
            # By player of the cell; the members of a symmetric one may have sat anywhere.
            by_member = [match.payoffs[agent] for agent in self._agents_of(one)]
            state.table.record(one.cell, by_member)
            state.played += 1
            self._count_wins(members, match)
            names = list(members.values())
            paid = [match.payoffs[agent] for agent in members]
            state.ratings |= rated(state.ratings, names, paid)

    def _agents_of(self, one: Planned) -> list[str]:
        """The agent that each player of the cell is; in a symmetric game they take turns."""
        agents = self._pools.agents
        if not self._pools.symmetric:
            return list(agents)
        # Workflows may change seats from query to query. Networks never do.
        fixed = self._job.spec.environment is not None
        turn = one.number if fixed else turn_beside(len(agents), one.number)
        return [agents[place] for place in seats(len(agents), turn)]

    def _count_wins(self, members: dict[str, str], match: orch.Match) -> None:
        for agent, member in members.items():
            for other_agent, other in members.items():
                if member == other:
                    continue
                counts = self._state.wins.setdefault((member, other), [0, 0, 0])
                ahead = match.payoffs[agent] - match.payoffs[other_agent]
                counts[0] += ahead > 0
                counts[1] += ahead == 0
                counts[2] += 1

    def _check_failures(self, event: ro.TrajectoryEvent, total: int) -> None:
        if event.state != pb.TRAJECTORY_STATE_FAILED:
            return
        self._failed += 1
        # Of all rounds of the iteration: those after the first are of few matches.
        failed, planned = self._state.failed + self._failed, self._state.planned + total
        limit = self._job.spec.limits.max_failed_fraction
        if admission.too_many_failed(failed, planned, limit):
            raise self._too_many(
                f"{failed} of {planned} matches failed (at most {limit:.0%} may)", event.reason
            )

    def _too_many(self, what: str, reason: str) -> ResourceExhausted:
        return ResourceExhausted(
            f"{what}, the last so: {reason}",
            kind="too_many_failed_matches",
            field="limits.max_failed_fraction",
            value=self._job.spec.limits.max_failed_fraction,
            remedy="Mend the cause (`troupe population matches` shows what failed), then "
            "resume the job.",
        )
