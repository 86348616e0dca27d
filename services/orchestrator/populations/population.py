"""The population of one job: iterations of learning, freezing, matches, and deciding.

Every decision is durable before the next thing is begun, so whoever takes the job over does what is
missing and nothing twice. Members are frozen, and opponents drawn, while no step is open.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import structlog

from services.orchestrator.context import JobContext
from services.orchestrator.errors import Deadline, together
from services.orchestrator.pipeline.dispatch import Dispatch, TicketBatch, add_in_parts
from services.orchestrator.placement.engines import Engines
from services.orchestrator.placement.policy_trainer import Trainers
from services.orchestrator.populations.decisions import (
    measured,
    mixtures,
    restart_due,
    sections,
    settle_due,
    solution,
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
from troupe.populations.matches import turn_beside
from troupe.populations.payoffs import Members, PayoffTable, rated
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
class PlannedMatch:
    """One match: a cell, and which of its matches."""

    cell: Members
    number: int

    @property
    def name(self) -> str:
        """The trajectory."""
        return f"m{'x'.join(map(str, self.cell))}-t{self.number}"


def due(spec: JobSpec, state: PopulationState) -> list[PlannedMatch]:
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
        PlannedMatch(cell, state.attempts.get(cell, 0) + number)
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

    def due(self) -> list[PlannedMatch]:
        """The matches of the next round, the same whenever this is asked before it is folded."""
        return due(self._job.spec, self._state)

    async def play(self, plan: Sequence[PlannedMatch]) -> None:
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

    async def _waves(self, left: Sequence[PlannedMatch], total: int) -> None:
        """Play these, with as few loads as may be."""
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
        patience = Deadline(
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

        batch = TicketBatch(
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
        self, one: PlannedMatch, members: dict[str, str], places: dict[tuple[str, str], str]
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

    def _members(self, one: PlannedMatch) -> dict[str, str]:
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

    def _fold(self, plan: Sequence[PlannedMatch]) -> None:
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

    def _agents_of(self, one: PlannedMatch) -> list[str]:
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


# Iterations back to which retired members are looked for whose files nobody needs any more.
_SWEPT: Final = 3


class PopulationRun:
    """Between the steps of a job: `catch_up`. During them: `slots.cast_of`."""

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
        # Matches beside the steps of the next iteration.
        self._aside: asyncio.Task[None] | None = None

    @classmethod
    async def open(
        cls, job: JobContext, trainers: Trainers, store: PopulationStore
    ) -> PopulationRun:
        """The population where the runner before left it; of a new job, its learners' first
        versions. Policies are bound."""
        weights = MemberWeights(job, trainers)
        state = await store.load(job.job_id)
        if state is None:
            state = await _first(job, weights)
            await store.save(job.job_id, job.epoch, state)
        found = cls(job, trainers, store, weights, state)
        if state.stopped:
            # A resume may have come with another `population.stop`.
            record = await job.shared.store.get(job.job_id)
            if not found._stop_reason(time.time() - record.created_at):
                state.stopped = ""
        return found

    def attend(self, dispatch: Dispatch, engines: Engines) -> None:
        """Who plays matches, and where slots are."""
        self.slots.engines = engines
        self._matches = Matches(self._job, dispatch, self._store, self.slots, self.state)

    @property
    def stopped(self) -> bool:
        """No further iteration begins."""
        return bool(self.state.stopped)

    def next_due(self, step: int) -> int:
        """Steps after which something is to be done, from `step` on."""
        due = self.state.began + self._population.iteration_steps
        every = self._population.redraw_steps
        if every and self.state.casting is not None:
            due = min(due, self.state.casting.step + every)
        return max(due, step + 1)

    async def catch_up(self, step: int, *, finished: bool, seconds: float) -> None:
        """Do what is due after `step` steps. `seconds` have passed since the job began.

        Raises `TroupeError`: a member that is gone, matches that fail, payoffs that the meta-solver
        is not for.
        """
        state = self.state
        over = finished and step > state.began
        boundary = over or step >= state.began + self._population.iteration_steps
        if state.pending and (boundary or finished or not self.slots.apart):
            await self._conclude(step, seconds)
        if boundary and not self.stopped:
            await self._freeze(step)
            if finished or not self.slots.apart:
                await self._conclude(step, seconds)
        if finished or self.stopped:
            return
        await self._begin_again()
        if state.pending and self._aside is None:
            self._aside = asyncio.create_task(self._measure(), name="matches")
        await self.slots.cast(step, self._patience("loading opponents"))

    async def close(self) -> None:
        """Nothing is played any more. Repeatable."""
        aside, self._aside = self._aside, None
        if aside is not None:
            aside.cancel()
            await asyncio.gather(aside, return_exceptions=True)

    async def watch(self) -> None:
        """Raise what goes wrong beside the steps; else return when there is nothing beside them."""
        if self._aside is not None:
            await asyncio.shield(self._aside)

    def metrics(self) -> dict[str, float]:
        """Of the newest solution."""
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
        """Compute what can be; play until nothing is due, every round being counted at once."""
        if self._exact is not None:
            await self._exact.settle()
        while plan := self._matches.due():
            await self._matches.play(plan)
            await self._save()

    async def _conclude(self, step: int, seconds: float) -> None:
        """Know the payoffs of all members, and decide upon them."""
        if self._aside is not None:
            try:
                await self._aside
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
        state.stopped = self._stop_reason(seconds)
        await self._save()
        if state.stopped:
            await self._job.info(f"the population is complete: {state.stopped}")

    async def _freeze(self, step: int) -> None:
        """An iteration is over: what learners are now become candidates, older ones retire."""
        state, retired = self.state, []
        fresh: list[FrozenMember] = []
        for learner in self._pools.learners:
            newest, parent = state.newest(learner), state.parent(learner)
            ref, size = await self._weights.freeze(learner)
            if newest.state == CANDIDATE:
                retired.append(newest)
            if ref.checksum == parent.checksum:
                continue  # it has not learned anything: there is such a member
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
        # Who retired before may have been drawn from until now, or a crash came between.
        for one in state.unneeded(since=state.iteration - _SWEPT):
            await self._weights.drop(one, files=True)

    def _note_restarts(self, learners: Iterable[str]) -> None:
        """These begin again with their first weights, unless they are there: durable before it is
        done, so that whoever takes the job over leaves the same versions."""
        for learner in learners:
            weights = self._trainers.policies[learner].weights
            if weights.checksum != self.state.first(learner).checksum:
                self.state.restarting[learner] = weights.version

    async def _begin_again(self) -> None:
        """Move those that are to begin again to their next version. No step is open."""
        state = self.state
        if not state.restarting:
            return
        patience = self._patience("beginning again")

        async def one(learner: str, left: int) -> None:
            trainer = self._trainers.policies[learner]
            weights = await trainer.restart(left, state.first(learner).checksum, patience)
            await self.slots.engines.update(weights, patience)

        await together(*(one(*item) for item in state.restarting.items()))
        names = ", ".join(sorted(state.restarting))
        state.began_with |= {learner: left + 1 for learner, left in state.restarting.items()}
        state.restarting = {}
        self._trainers.began_with(state.began_with)
        await self._save()
        await self._job.info(f"{names}: the next best response begins with the first weights")

    def _stop_reason(self, seconds: float) -> str:
        stop, state = self._population.stop, self.state
        newest = state.history[-1].nash_conv
        if stop.nash_conv is not None and newest is not None and newest <= stop.nash_conv:
            return f"NashConv is {newest:.4g}"
        if stop.improvement is not None and len(state.history) > stop.patience:
            last = state.history[-stop.patience :]
            gains = [gain for one in last for gain in one.gains.values()]
            if all(one.gains for one in last) and max(gains) <= stop.improvement:
                return (
                    f"new members got at most {max(gains):.4g} more than those before in "
                    f"{stop.patience} iterations"
                )
        if stop.iterations is not None and state.iteration >= stop.iterations:
            return f"{state.iteration} iterations are over"
        if stop.seconds is not None and seconds >= stop.seconds:
            return f"{seconds:.0f} s have passed"
        return ""

    async def _save(self) -> None:
        await self._store.save(self._job.job_id, self._job.epoch, self.state)

    def _patience(self, what: str) -> Deadline:
        return Deadline(what, self._job.spec.limits.step_seconds, "limits.step_seconds")


async def _first(job: JobContext, weights: MemberWeights) -> PopulationState:
    """Pools of the learners' first versions, one of them in every slot."""
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
        # Nobody has met: whoever there is comes equally often, until payoffs are known.
        state.mixtures = {
            learner: {
                pool: dict.fromkeys(names, 1.0 / len(names)) for pool, names in by_pool.items()
            }
            for learner in pools.learners
        }
    return state


def _member(
    job: JobContext, ref: pb.WeightsRef, size: int, *, step: int, iteration: int, parent: str
) -> FrozenMember:
    """The member that a frozen version is; the first ones are settled."""
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
