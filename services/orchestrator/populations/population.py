"""The population loop of one job: iterations of training, freezing members, matches, decisions.

Every decision is durable before the next one begins, so that a runner that takes over the job
continues without repeating anything. Members are frozen, and opponents drawn, while no step is
open.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import structlog

from services.orchestrator.context import JobContext
from services.orchestrator.errors import Deadline, cancel_all, run_all
from services.orchestrator.pipeline.dispatch import Dispatch, TicketBatch, run_batch
from services.orchestrator.placement.engines import Engines
from services.orchestrator.placement.policy_trainer import Trainers
from services.orchestrator.populations.decisions import (
    measured,
    mixtures,
    restart_due,
    sections,
    settle_due,
    solution,
    stop_reason,
)
from services.orchestrator.populations.exact import ExactPayoffs
from services.orchestrator.populations.slots import MemberWeights, Slots, member_id_of
from services.orchestrator.populations.state import (
    CANDIDATE,
    RETIRED,
    SETTLED,
    FrozenMember,
    PopulationState,
    PopulationStore,
)
from services.orchestrator.state.job_store import Superseded
from services.orchestrator.state.records import timestamp
from troupe.job import JobSpec
from troupe.populations import Precision, matches_due, seats
from troupe.populations.payoffs import Members, PayoffTable, episode_of_match, rated
from troupe.populations.slots import match_waves, visible_cells
from troupe.rpc import FailedPrecondition, ResourceExhausted, TroupeError
from troupe.scheduling import admission
from troupe.v1 import common_pb2 as common_pb
from troupe.v1 import orchestrator_pb2 as orchestrator_pb
from troupe.v1 import rollout_pb2 as rollout_pb

_log = structlog.get_logger(__name__)
# Maximum attempts at a match that workers abort.
_ATTEMPTS: Final = 3
# The job fails after this many failed matches in a row, if whole rounds fail.
_MOST_FAILED_IN_A_ROW: Final = 16
# Time limit in seconds for writing the results of a wave that was interrupted.
_LAST_SECONDS: Final = 5.0
# Number of iterations whose retired members are checked for files that can be deleted.
_SWEPT: Final = 3


class PopulationRun:
    """The population of a running job.

    Between steps `catch_up` does what is due; during steps `slots.cast_of` gives the opponents.
    """

    def __init__(
        self,
        job: JobContext,
        trainers: Trainers,
        store: PopulationStore,
        weights: MemberWeights,
        state: PopulationState,
    ) -> None:
        self._job, self._trainers, self._store, self._weights = job, trainers, store, weights
        self._population, self._pools = sections(job.spec)
        self.state = state
        self.slots = Slots(job, weights, store, state)
        trainers.began_with(state.began_with)
        self._matches: Matches
        self._exact: ExactPayoffs | None = None
        if self._population.game is not None:
            self._exact = ExactPayoffs(job, store, self.slots, state)
        # Plays matches during the steps of the next iteration.
        self._background_matches: asyncio.Task[None] | None = None

    @classmethod
    async def open(
        cls, job: JobContext, trainers: Trainers, store: PopulationStore
    ) -> PopulationRun:
        """Load the job's population from its durable state, or begin it with first versions.

        The job's policies must be bound.
        """
        weights = MemberWeights(job, trainers)
        state = await store.load(job.job_id)
        if state is None:
            state = await _first(job, weights)
            await store.save(job.job_id, job.epoch, state)
        found = cls(job, trainers, store, weights, state)
        if state.stopped:
            # The job may have been resumed with another `population.stop`.
            record = await job.shared.store.get(job.job_id)
            if not stop_reason(job.spec, state, record.seconds_since_start):
                state.stopped = ""
        return found

    def attach(self, dispatch: Dispatch, engines: Engines) -> None:
        """Set how matches are dispatched, and the engines that serve slots."""
        self.slots.engines = engines
        self._matches = Matches(self._job, dispatch, self._store, self.slots, self.state)

    @property
    def stopped(self) -> bool:
        """Whether the population has met its stop condition: no further iteration begins."""
        return bool(self.state.stopped)

    def next_due(self, step: int) -> int:
        """Return the step count, after `step`, at which `catch_up` has something to do next."""
        due = self.state.began + self._population.iteration_steps
        every = self._population.redraw_steps
        if every and self.state.casting is not None:
            due = min(due, self.state.casting.step + every)
        return max(due, step + 1)

    async def catch_up(self, step: int, *, finished: bool, seconds: float) -> None:
        """Do what is due after `step` steps, `seconds` after the job began.

        Raises `TroupeError`: a member's files are lost, matches fail, or the meta-solver does not
        support the payoffs.
        """
        state = self.state
        over = finished and step > state.began
        boundary = over or step >= state.began + self._population.iteration_steps
        if state.pending and (boundary or finished or not self.slots.separate_match_slots):
            await self._conclude(step, seconds)
        if boundary and not self.stopped:
            await self._freeze(step)
            if finished or not self.slots.separate_match_slots:
                await self._conclude(step, seconds)
        if finished or self.stopped:
            return
        await self._begin_again()
        if state.pending and self._background_matches is None:
            self._background_matches = asyncio.create_task(self._measure(), name="matches")
        await self.slots.cast(step, self._deadline("loading opponents"))

    async def close(self) -> None:
        """Stop background matches. Idempotent."""
        matches, self._background_matches = self._background_matches, None
        if matches is not None:
            await cancel_all([matches])

    async def watch(self) -> None:
        """Wait for background matches, and raise their error."""
        if self._background_matches is not None:
            await asyncio.shield(self._background_matches)

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the newest solution."""
        state = self.state
        found = {
            "population/iteration": float(state.iteration),
            "population/members": float(sum(m.state != RETIRED for m in state.members.values())),
            "population/matches": float(state.played),
        }
        if state.history:
            newest = state.history[-1]
            found |= {f"population/gain/{pool}": gain for pool, gain in newest.gains.items()}
            if newest.nash_conv is not None:
                found["population/nash_conv"] = newest.nash_conv
        return found

    async def _measure(self) -> None:
        """Compute exact payoffs if possible, and play rounds of matches until none is due."""
        if self._exact is not None:
            await self._exact.settle()
        while plan := self._matches.due():
            await self._matches.play(plan)
            await self._save()

    async def _conclude(self, step: int, seconds: float) -> None:
        """Complete the payoffs of all members, then decide on settling, mixtures and stopping."""
        if self._background_matches is not None:
            try:
                await self._background_matches
            finally:
                await self.close()
        await self._measure()
        state = self.state
        settled = settle_due(self._job.spec, state)
        for learner in settled:
            state.newest(learner).state = SETTLED
            state.settled_at[learner] = state.iteration
        self._note_restarts(restart_due(self._job.spec, state, settled))
        solved = solution(self._job.spec, state, step)
        if self._exact is not None:
            solved.nash_conv = await self._exact.nash_conv(solved.mixtures)
        state.history.append(solved)
        state.mixtures = mixtures(self._job.spec, state)
        state.casting = None
        state.pending = False
        state.stopped = stop_reason(self._job.spec, state, seconds)
        await self._save()
        if state.stopped:
            await self._job.info(f"the population is complete: {state.stopped}")

    async def _freeze(self, step: int) -> None:
        """End an iteration: learners' current versions become candidates, older ones retire."""
        state, retired = self.state, []
        fresh: list[FrozenMember] = []
        for learner in self._pools.learners:
            newest, parent = state.newest(learner), state.parent(learner)
            ref, size = await self._weights.freeze(learner)
            if newest.state == CANDIDATE:
                retired.append(newest)
            if ref.checksum == parent.checksum:
                continue  # unchanged since the member that it continued from
            where = {"step": step, "iteration": state.iteration + 1}
            fresh.append(_member(self._job, ref, size, **where, parent=parent.member_id))
        for one in retired:
            if any(new.learner == one.learner for new in fresh):
                one.state = RETIRED
        for one in fresh:
            state.members[one.member_id] = one
            for pool in self._pools.pools:
                if one.learner in pool.learners:
                    state.pools[pool.name].append(one.member_id)
        sizes = [len(state.pools[self._pools.pool_of(a).name]) for a in self._pools.agents]
        state.table.grow(sizes)
        state.iteration += 1
        state.planned = state.failed = 0
        state.began = step
        state.pending = True
        self._note_restarts(restart_due(self._job.spec, state))
        await self._save()
        # Members that retired earlier may have been in use until now.
        for one in state.unneeded(since=state.iteration - _SWEPT):
            await self._weights.drop(one, files=True)

    def _note_restarts(self, learners: Iterable[str]) -> None:
        """Record which learners restart from their first weights, unless they have them already.

        The record is durable before the restart is made, so that it is made once even if the
        orchestrator restarts in between.
        """
        for learner in learners:
            weights = self._trainers.policies[learner].weights
            if weights.checksum != self.state.first(learner).checksum:
                self.state.restarting[learner] = weights.version

    async def _begin_again(self) -> None:
        """Move restarted learners to their next version, which has their first weights.

        No step may be open.
        """
        state = self.state
        if not state.restarting:
            return
        deadline = self._deadline("beginning again")

        async def one(learner: str, left: int) -> None:
            trainer = self._trainers.policies[learner]
            weights = await trainer.restart(left, state.first(learner).checksum, deadline)
            await self.slots.engines.update(weights, deadline)

        await run_all(*(one(*item) for item in state.restarting.items()))
        names = ", ".join(sorted(state.restarting))
        state.began_with |= {learner: left + 1 for learner, left in state.restarting.items()}
        state.restarting = {}
        self._trainers.began_with(state.began_with)
        await self._save()
        await self._job.info(f"{names}: the next best response starts from the first weights")

    async def _save(self) -> None:
        await self._store.save(self._job.job_id, self._job.epoch, self.state)

    def _deadline(self, what: str) -> Deadline:
        return Deadline(what, self._job.spec.limits.step_seconds, "limits.step_seconds")


async def _first(job: JobContext, weights: MemberWeights) -> PopulationState:
    """Return the state of a new job: pools of the learners' first versions, one in every slot."""
    _, pools = sections(job.spec)
    members = {}
    for learner in pools.learners:
        ref, size = await weights.freeze(learner)
        members[member_id_of(ref)] = _member(job, ref, size, step=0, iteration=0, parent="")
    by_pool = {
        pool.name: [name for name, one in members.items() if one.learner in pool.learners]
        for pool in pools.pools
    }
    sizes = [len(by_pool[pools.pool_of(agent).name]) for agent in pools.agents]
    state = PopulationState(by_pool, PayoffTable(sizes, pools.symmetric), members)
    for pool in pools.pools:
        for slot in (*pool.slots, *pool.evaluation_slots):
            state.slots[slot] = (by_pool[pool.name][0], 0)
    if not measured(job.spec) or all(size == 1 for size in sizes):
        state.mixtures = mixtures(job.spec, state)
    else:
        # Uniform until payoffs are known.
        state.mixtures = {
            learner: {
                pool: dict.fromkeys(names, 1.0 / len(names)) for pool, names in by_pool.items()
            }
            for learner in pools.learners
        }
    return state


def _member(
    job: JobContext, ref: common_pb.WeightsRef, size: int, *, step: int, iteration: int, parent: str
) -> FrozenMember:
    """Make the member for a frozen version: a candidate, or settled if it is a first version."""
    _, pools = sections(job.spec)
    return FrozenMember(
        member_id=member_id_of(ref),
        learner=ref.policy,
        kind=pools.learners[ref.policy].kind,
        version=ref.version,
        checksum=ref.checksum,
        step=step,
        iteration=iteration,
        parent=parent,
        state=CANDIDATE if iteration else SETTLED,
        num_bytes=size,
        frozen_at=time.time(),
    )


@dataclass(frozen=True)
class PlannedMatch:
    """One match to play: a cell of the payoff table, and its number among the cell's matches."""

    cell: Members
    number: int

    @property
    def name(self) -> str:
        """The id of its query and trajectory."""
        return f"m{'x'.join(map(str, self.cell))}-t{self.number}"


def due(spec: JobSpec, state: PopulationState) -> list[PlannedMatch]:
    """Return the matches of a job's next round."""
    population, pools = sections(spec)
    if not population.plays_matches:
        return []
    wanted, width = population.matches, population.matches.half_width
    precision = Precision(wanted.least, wanted.most, float("inf") if width is None else width)
    # Only between members that may still become opponents.
    places = [state.places(pools.pool_of(one).name, SETTLED, CANDIDATE) for one in pools.agents]
    visible = set(visible_cells(places, symmetric=pools.symmetric))
    return [
        PlannedMatch(cell, state.attempts.get(cell, 0) + number)
        for cell, count in matches_due(state.table, precision)
        if cell in visible
        for number in range(count)
    ]


class Matches:
    """Matches between members, which count in the payoff table."""

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
        self._ended: dict[str, orchestrator_pb.Match] = {}
        # Failed matches of this round, and in a row since the last completed match.
        self._failed = self._failed_in_a_row = 0

    def due(self) -> list[PlannedMatch]:
        """Return the matches of the next round, the same until `play` has counted it."""
        return due(self._job.spec, self._state)

    async def play(self, plan: Sequence[PlannedMatch]) -> None:
        """Play the matches of `plan` that have not ended, then count all of it.

        Raises `TroupeError`: an error of the job, or ResourceExhausted if too many matches fail.
        """
        names = {one.name: one for one in plan}
        known = await self._store.matches(self._job.job_id, list(names))
        self._ended = dict(known)
        # Failures before a resume do not count: their cause may have been fixed.
        self._failed = 0
        for _ in range(_ATTEMPTS):
            left = [one for name, one in names.items() if name not in self._ended]
            await self._waves(left, len(plan))
        if gone := [name for name in names if name not in self._ended]:
            raise ResourceExhausted(
                f"{len(gone)} matches were aborted {_ATTEMPTS} times; the first is {gone[0]}",
                kind="matches_aborted",
                field="population.matches",
                remedy="Find the cause in the rollout workers' logs, then resume the job.",
            )
        failed = sum(one.state == common_pb.TRAJECTORY_STATE_FAILED for one in self._ended.values())
        if failed < len(plan):
            self._failed_in_a_row = 0
        elif len(known) < len(plan):
            # Regardless of the failure limit, since rounds that fail as a whole would repeat
            # forever. But a single round of a few matches may fail as a whole by chance.
            self._failed_in_a_row += len(plan)
            if self._failed_in_a_row >= _MOST_FAILED_IN_A_ROW:
                last = next(one for name, one in self._ended.items() if name not in known)
                raise self._too_many(
                    f"the last {self._failed_in_a_row} matches all failed", last.reason
                )
        self._state.planned += len(plan)
        self._state.failed += failed
        self._count_results(plan)

    async def _waves(self, left: Sequence[PlannedMatch], total: int) -> None:
        """Play matches in waves that share loaded members, so that few members are loaded."""
        pool_of = [self._pools.pool_of(agent).name for agent in self._pools.agents]
        served = {pool.name: len(pool.match_slots) for pool in self._pools.pools}
        cells = list(dict.fromkeys(one.cell for one in left))
        for loaded, some in match_waves(cells, pool_of, served):
            chosen = set(some)
            await self._wave(loaded, [one for one in left if one.cell in chosen], total)

    async def _wave(
        self, loaded: dict[str, list[int]], wave: Sequence[PlannedMatch], total: int
    ) -> None:
        step = self._state.began
        deadline = Deadline(
            "matches between members", self._job.spec.limits.step_seconds, "limits.step_seconds"
        )
        await self._slots.load_matches(loaded, deadline)
        places = self._slots.places()
        new: dict[str, orchestrator_pb.Match] = {}
        recent = self._job.shared.trajectories.buffer(self._job.job_id, step, "match")
        members = {one.name: self._members(one) for one in wave}

        def on_end(event: rollout_pb.TrajectoryEvent) -> None:
            if event.state == common_pb.TRAJECTORY_STATE_ABORTED:
                return  # aborted by the worker, not by the game: it will be repeated
            match = self._match(event, members[event.trajectory_id])
            new[event.trajectory_id] = self._ended[event.trajectory_id] = match
            recent.add(event)
            self._check_failures(event, total)

        batch = TicketBatch(
            step,
            deadline,
            on_end,
            floors=self._slots.match_floors(),
            low_priority=self._slots.separate_match_slots,
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
                    # Not lost: these results are written together with the next ones.
                    self._warn(error)
                if not self._slots.separate_match_slots:
                    text = f"matches: {len(self._ended)} of {total}"
                    self._job.show(text, step=step, done=len(self._ended), total=total)

        groups = ([self._ticket(one, members[one.name], places)] for one in wave)
        try:
            await run_batch(self._dispatch, batch, groups, tick())
        except BaseException:
            # Results are written even if the wave failed, so that no ended match is repeated.
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
        self, one: PlannedMatch, members: dict[str, str], places: dict[tuple[str, str], str]
    ) -> rollout_pb.Ticket:
        seed = f"match/{'x'.join(map(str, one.cell))}"
        return rollout_pb.Ticket(
            query_id=one.name,
            trajectory_id=one.name,
            # Training items in dataset order, the same ones for every cell.
            split="train",
            index=one.number,
            seed=admission.seed_of(self._job.spec.seed, seed, one.number, 0),
            purpose=rollout_pb.Ticket.PURPOSE_MATCH,
            cast={
                agent: places[self._pools.pool_of(agent).name, member]
                for agent, member in members.items()
            },
        )

    def _members(self, one: PlannedMatch) -> dict[str, str]:
        """Return the member that plays each agent, by agent."""
        return {
            agent: self._state.pools[self._pools.pool_of(agent).name][place]
            for agent, place in zip(self._agents_of(one), one.cell, strict=True)
        }

    def _match(
        self, event: rollout_pb.TrajectoryEvent, members: dict[str, str]
    ) -> orchestrator_pb.Match:
        completed = event.state == common_pb.TRAJECTORY_STATE_COMPLETED
        payoffs: dict[str, float] = {}
        if completed:
            for agent in members:
                if agent not in event.rewards:
                    raise FailedPrecondition(
                        f"the match {event.trajectory_id} gave no reward to '{agent}'",
                        kind="match_without_payoff",
                        field="workflow",
                        value=self._job.spec.workflow,
                        remedy="Return a reward for every player: it is the match's payoff.",
                    )
                payoffs[agent] = event.rewards[agent]
        return orchestrator_pb.Match(
            trajectory_id=event.trajectory_id,
            iteration=self._state.iteration,
            members=members,
            payoffs=payoffs,
            state=event.state,
            reason=event.reason,
            seconds=event.seconds,
            at=timestamp(time.time()),
        )

    def _count_results(self, plan: Sequence[PlannedMatch]) -> None:
        state = self._state
        for one in plan:
            state.attempts[one.cell] = max(state.attempts.get(one.cell, 0), one.number + 1)
            match = self._ended[one.name]
            if match.state != common_pb.TRAJECTORY_STATE_COMPLETED:
                continue
            members = self._members(one)
            # Payoffs by player of the cell: in a symmetric game members take turns as agents.
            by_member = [match.payoffs[agent] for agent in self._agents_of(one)]
            state.table.record(one.cell, by_member)
            state.played += 1
            self._count_wins(members, match)
            names = list(members.values())
            paid = [match.payoffs[agent] for agent in members]
            state.ratings |= rated(state.ratings, names, paid)

    def _agents_of(self, one: PlannedMatch) -> list[str]:
        """Return the agent of each player of the cell; in a symmetric game members take turns."""
        agents = self._pools.agents
        if not self._pools.symmetric:
            return list(agents)
        # Workflows may change agents' seats from query to query, networks never do.
        fixed = self._job.spec.environment is not None
        turn = one.number if fixed else episode_of_match(len(agents), one.number)
        return [agents[place] for place in seats(len(agents), turn)]

    def _count_wins(self, members: dict[str, str], match: orchestrator_pb.Match) -> None:
        for agent, member in members.items():
            for other_agent, other in members.items():
                if member == other:
                    continue
                counts = self._state.wins.setdefault((member, other), [0, 0, 0])
                ahead = match.payoffs[agent] - match.payoffs[other_agent]
                counts[0] += ahead > 0
                counts[1] += ahead == 0
                counts[2] += 1

    def _check_failures(self, event: rollout_pb.TrajectoryEvent, total: int) -> None:
        if event.state != common_pb.TRAJECTORY_STATE_FAILED:
            return
        self._failed += 1
        # Counted over all rounds of the iteration, since later rounds have few matches.
        failed, planned = self._state.failed + self._failed, self._state.planned + total
        limit = self._job.spec.limits.max_failed_fraction
        if admission.too_many_failed(failed, planned, limit):
            raise self._too_many(
                f"{failed} of {planned} matches failed (at most {limit:.0%} may)", event.reason
            )

    def _too_many(self, what: str, reason: str) -> ResourceExhausted:
        return ResourceExhausted(
            f"{what}, the last with: {reason}",
            kind="too_many_failed_matches",
            field="limits.max_failed_fraction",
            value=self._job.spec.limits.max_failed_fraction,
            remedy="Fix the cause (`troupe population matches` shows the failures), then "
            "resume the job.",
        )
