"""The rollout of one step: its trajectories, and who joins and leaves while they run."""

from __future__ import annotations

import asyncio
import time
from collections import ChainMap
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from services.orchestrator.batch import Batch
from services.orchestrator.context import JobContext
from services.orchestrator.dispatch import Dispatch, add_in_parts
from services.orchestrator.engines import Engines
from services.orchestrator.faults import Patience, alongside, together
from services.orchestrator.roster import STALE, SURPLUS, Roster
from services.orchestrator.table_watch import TableWatch
from services.orchestrator.training import Trainers
from troupe.scheduling import admission, rosters
from troupe.v1 import rollout_pb2 as ro

if TYPE_CHECKING:  # most jobs have none
    from services.orchestrator.populations.population import Population

# The store says when something changed; this is for what it could not say.
_LOOK_SECONDS: Final = 1.0
# What the store has ended is told by whoever ran it so soon, or never.
_LAST_WORDS_SECONDS: Final = 10.0


@dataclass(frozen=True)
class Crew:
    """The parts that the steps of a job share."""

    job: JobContext
    trainers: Trainers
    engines: Engines
    dispatch: Dispatch
    tables: TableWatch
    # Who plays whom, in a job that says so.
    population: Population | None = None
    # Steps that each trained policy has committed; those that engines serve the result of.
    committed: dict[str, int] = field(default_factory=dict)
    served: dict[str, int] = field(default_factory=dict)


class StepRollout:
    """Runs the trajectories of a step until its roster is closed and all of them have ended.

    Steps are closed in order: what leaves a step goes on in the one after it, if that is open and
    it will not be too old there.
    """

    def __init__(
        self,
        crew: Crew,
        roster: Roster,
        patience: Patience,
        on_end: Callable[[ro.TrajectoryEvent], None],
        before: StepRollout | None,
        will_follow: Callable[[], bool],
    ) -> None:
        self._crew = crew
        self._patience = patience
        self._before = before
        self._will_follow = will_follow
        self.roster = roster
        floors: Mapping[str, int] = roster.versions
        if crew.population is not None:
            # A view: versions are known once the roster is open.
            floors = ChainMap(roster.versions, crew.population.slots.training_floors)
        self.batch = Batch(roster.step, patience, on_end, floors=floors, ended=roster.ended_now)
        self.after: StepRollout | None = None
        self.joined = 0
        self.carried = 0
        self.seconds = 0.0

    def opened(self) -> None:
        """The store knows the step: from now on queries of the one before may go on in it."""
        if self._before is not None:
            self._before.after = self

    async def run(self) -> None:
        """Raises `TroupeError`: a fault of the job, or the deadline saying what was missing."""
        began = time.monotonic()
        await self._start(list(self.roster.plans.values()))
        if self.roster.closed:
            self.batch.seal()
        if self.roster.closed and not self.batch.open:
            return
        dispatch = self._crew.dispatch
        ends = self.batch.finished(lambda: dispatch.describe(self.batch))
        await alongside(together(self._keep(), ends), self._watch())
        self.seconds = time.monotonic() - began

    async def _start(self, plans: Collection[admission.QueryPlan]) -> None:
        groups = (group for plan in plans if (group := self._tickets(plan)))
        await add_in_parts(self._crew.dispatch, self.batch, groups)

    def _tickets(self, plan: admission.QueryPlan) -> list[ro.Ticket]:
        tickets = train_tickets(plan, self.roster.ended)
        if (population := self._crew.population) is not None:
            cast, learners = population.slots.cast_of(plan.index)
            for ticket in tickets:
                ticket.cast.update(cast)
                ticket.learners[:] = learners
        return tickets

    async def _keep(self) -> None:
        """Let queries join and leave until the roster is closed."""
        while not self.roster.closed:
            await self._patience.wait(self._crew.tables.change(_LOOK_SECONDS))
            await self._look()
        self.batch.seal()

    async def _watch(self) -> None:
        """Whoever runs a trajectory tells how it ended, or its stream breaks, and the store is
        asked. A stream that stays and says nothing must not hold the step: while nothing is told,
        what the store has ended for longer than telling takes is not waited for any more."""
        known: frozenset[str] = frozenset()
        while True:
            told = self.batch.told
            await asyncio.sleep(_LAST_WORDS_SECONDS)
            if self.batch.told != told:
                continue
            ended = frozenset(await self.batch.ended())
            self._crew.dispatch.end_untold(self.batch, known & ended)
            known = ended

    async def _look(self) -> None:
        roster = self.roster
        # What the step before leaves over comes here: only then is it known what is missing.
        first = self._before is None or self._before.roster.closed
        move = rosters.next_move(
            await roster.progress(),
            wanted=roster.wanted,
            spare=roster.spare if first else 0,
            max_refills=roster.max_refills,
            may_close=first,
            first_k=roster.spare > 0,
        )
        if move.add:
            self.joined += move.add
            await self._start(await roster.join(move.add))
        elif move.close:
            await self._close(move.leave)

    async def _close(self, leave: Collection[str]) -> None:
        dispatch = self._crew.dispatch
        if not leave or self._crew.job.spec.pipeline.mode != "async":
            dropped, _ = await self.roster.close(drop=leave)
            dispatch.withdraw(self.batch, dropped, SURPLUS)
        elif (after := self.after) is not None:
            stale = [query_id for query_id in leave if self._too_old(query_id, after)]
            carry = [query_id for query_id in leave if query_id not in stale]
            dropped, carried = await self.roster.close(
                drop=stale, reason=STALE, carry=carry, target=after.roster
            )
            dispatch.withdraw(self.batch, dropped, STALE)
            dispatch.move(self.batch, carried, after.batch)
            after.carried += len(carried)
        elif self._will_follow():
            return  # they go on in the next step once it is open
        else:
            dropped, _ = await self.roster.close(drop=leave)
            dispatch.withdraw(self.batch, dropped, SURPLUS)
        self._crew.tables.touch()

    def _too_old(self, query_id: str, after: StepRollout) -> bool:
        spec, policies = self._crew.job.spec, self._crew.trainers.policies
        committed = self._crew.committed
        return admission.too_old(
            self.batch.started.get(query_id, {}),
            after.roster.step,
            committed=committed,
            versions={policy: policies[policy].weights.version for policy in committed},
            alpha={policy: spec.alpha_of(policy) for policy in committed},
        )

    def values(self) -> Mapping[str, float]:
        """Metrics of a roster that could change."""
        if not self.roster.held:
            return {}
        return {
            "queries/trained": float(len(self.roster.plans)),
            "queries/joined": float(self.joined),
            "queries/left": float(self.roster.left),
            "queries/carried_in": float(self.carried),
        }


def train_tickets(query: admission.QueryPlan, ended: Collection[str]) -> list[ro.Ticket]:
    """Tickets for the trajectories of a query that have not ended."""
    return [
        ro.Ticket(
            query_id=query.query_id,
            trajectory_id=trajectory_id,
            split="train",
            index=query.index,
            seed=seed,
            purpose=ro.Ticket.PURPOSE_TRAIN,
        )
        for trajectory_id, seed in zip(query.trajectory_ids, query.seeds, strict=True)
        if trajectory_id not in ended
    ]
