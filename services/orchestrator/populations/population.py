"""The population of one job: iterations of learning, freezing, matches, and deciding.

Every decision is durable before the next thing is begun, so whoever takes the job over does what is
missing and nothing twice. Members are frozen, and opponents drawn, while no step is open.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from typing import Final

from services.orchestrator.context import JobContext
from services.orchestrator.dispatch import Dispatch
from services.orchestrator.engines import Engines
from services.orchestrator.faults import Patience, together
from services.orchestrator.populations.decisions import (
    measured,
    mixtures,
    restart_due,
    sections,
    settle_due,
    solution,
)
from services.orchestrator.populations.exact import ExactPayoffs
from services.orchestrator.populations.matches import Matches
from services.orchestrator.populations.pool import MemberWeights, member_id_of
from services.orchestrator.populations.slots import Slots
from services.orchestrator.populations.state import (
    CANDIDATE,
    RETIRED,
    SETTLED,
    Member,
    PopulationState,
)
from services.orchestrator.populations.store import PopulationStore
from services.orchestrator.training import Trainers
from troupe.populations.payoffs import PayoffTable
from troupe.v1 import common_pb2 as pb

# Iterations back to which retired members are looked for whose files nobody needs any more.
_SWEPT: Final = 3


class Population:
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
    async def open(cls, job: JobContext, trainers: Trainers, store: PopulationStore) -> Population:
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
        fresh: list[Member] = []
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

    def _patience(self, what: str) -> Patience:
        return Patience(what, self._job.spec.limits.step_seconds, "limits.step_seconds")


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
) -> Member:
    """The member that a frozen version is; the first ones are settled."""
    _, pools = sections(job.spec)
    return Member(
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
