"""One training step: open it, roll it out, train each policy, bring engines up to date."""

from __future__ import annotations

import asyncio
import time
from collections import ChainMap, deque
from collections.abc import Awaitable, Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Final

from services.orchestrator.context import JobContext
from services.orchestrator.errors import Deadline, alongside, together
from services.orchestrator.pipeline.dispatch import Dispatch, TicketBatch, add_in_parts
from services.orchestrator.pipeline.evaluation import (
    check_failures,
    report_failures,
    report_unused_endpoints,
)
from services.orchestrator.pipeline.metrics import Redundancy, Tally, commit_metrics, staleness
from services.orchestrator.pipeline.step_queries import STALE, SURPLUS, Cursor, StepQueries
from services.orchestrator.placement.engines import Engines
from services.orchestrator.placement.policy_trainer import Trainers
from services.orchestrator.placement.trainer_scheduler import TableWatch
from services.orchestrator.state.trajectories import as_event
from troupe.rpc import DeadlineExceeded, TroupeError
from troupe.scheduling import admission
from troupe.v1 import common_pb2 as pb
from troupe.v1 import experience_store_pb2 as es
from troupe.v1 import rollout_pb2 as ro

if TYPE_CHECKING:
    from services.orchestrator.populations.population import PopulationRun

# The store says when something changed; this is for what it could not say.
_LOOK_SECONDS: Final = 1.0
# What the store has ended is told by whoever ran it so soon, or never.
_LAST_WORDS_SECONDS: Final = 10.0


@dataclass(frozen=True)
class StepContext:
    """The parts that the steps of a job share."""

    job: JobContext
    trainers: Trainers
    engines: Engines
    dispatch: Dispatch
    tables: TableWatch
    # Who plays whom, in a job that says so.
    population: PopulationRun | None = None
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
        crew: StepContext,
        roster: StepQueries,
        patience: Deadline,
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
        self.batch = TicketBatch(
            roster.step, patience, on_end, floors=floors, ended=roster.ended_now
        )
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
        move = admission.next_move(
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


# The step is lost already: the store is asked once, briefly.
_ASK_SECONDS: Final = 5.0


async def name_missing_columns(
    job: JobContext, step: int, error: DeadlineExceeded
) -> DeadlineExceeded:
    """`error`, or one that names the required columns that nobody filled, and in which rows."""
    lacking: dict[str, list[str]] = {}
    for policy in job.spec.trained_policies:
        for column in await _missing(job, policy, step):
            lacking.setdefault(column, []).append(policy)
    if not lacking:
        return error
    what = "; ".join(
        f"rows of {' and '.join(policies)} wait for the column {column!r}, which nobody filled"
        for column, policies in lacking.items()
    )
    return DeadlineExceeded(
        f"{error.message}: {what}",
        kind=error.kind,
        field=error.field,
        value=error.value,
        remedy="Fill it (FillColumns) within this time, or submit a job without it in "
        "`pipeline.required_columns`.",
    )


async def _missing(job: JobContext, policy: str, step: int) -> list[str]:
    """Required columns that the first pending row of a policy lacks."""
    required = job.spec.pipeline.required_columns
    if not required:
        return []
    request = es.ListSamplesRequest(
        job_id=job.job_id,
        policy=policy,
        step=step,
        state=pb.SAMPLE_STATE_PENDING,
        page_size=1,
    )
    with suppress(TroupeError):
        found = await job.shared.experience.ListSamples(request, timeout=_ASK_SECONDS)
        return [name for row in found.samples for name in required if name not in row.columns]
    return []


# Modes in which training begins with the first micro-batch that is ready.
_EAGER: Final = frozenset({"micro_batch", "async"})


class StepRunner:
    """Runs one step of a job in the job's pipeline mode.

    The step may have been begun before a crash: trajectories that ended then are not run again,
    and policies that committed are not trained again. In mode `async` the step `before` may not be
    over: every policy trains its steps in order, whatever the others do.
    """

    def __init__(
        self,
        crew: StepContext,
        step: int,
        cursor: Cursor,
        before: StepRunner | None,
        ahead: int,
        will_follow: Callable[[], bool],
        rolled_out: Callable[[], None],
    ) -> None:
        """`rolled_out` is called when all trajectories have ended, while policies are trained."""
        job = crew.job
        self._crew = crew
        self._job = job
        self.step = step
        self._before = before
        self._rolled_out = rolled_out
        self._mode = job.spec.pipeline.mode
        self._name = f"step {step + 1}"
        # Those `ahead` of it may take as long each.
        self._patience = Deadline(
            self._name, job.spec.limits.step_seconds * (1 + ahead), "limits.step_seconds"
        )
        self._roster = StepQueries(job, step, cursor)
        self._rollout: StepRollout = StepRollout(
            crew,
            self._roster,
            self._patience,
            self._on_end,
            None if before is None else before._rollout,
            will_follow,
        )
        # Of what ended before a restart, the failures: a job that was resumed must not fail over
        # them again, their cause may be mended.
        self._forgiven = 0
        self._unseen = 0
        self._commits: dict[str, es.StepCommit] = {}
        self._committed = {policy: asyncio.Event() for policy in job.spec.trained_policies}
        on_policy = self._mode != "async"
        self._tally = Tally(job.spec.agents, self._roster.versions if on_policy else {})
        self._redundancy = Redundancy(self._roster.redundant)
        self._recent = job.shared.trajectories.buffer(job.job_id, step, evaluation=False)
        self._began = time.monotonic()
        self._ended = 0.0

    async def open(self, found: es.GetStepResponse) -> None:
        """Admit the step durably, or take it up as it was `found`."""
        roster, before = self._roster, self._before
        # What the step before leaves over is still to come, if it may leave anything.
        first = before is None or before._roster.closed
        await roster.open(
            found,
            {one: self._crew.trainers.policies[one].weights.version for one in self._committed},
            roster.wanted + (roster.spare if first else 0),
        )
        self._rollout.opened()
        for policy in roster.commits:
            self._crew.committed[policy] = max(self._crew.committed[policy], self.step + 1)
        kept = await self._job.shared.trajectories.find(self._job.job_id, roster.ended)
        for one in kept:
            self._tally.add(as_event(one), timed=False)
            self._redundancy.add(as_event(one))
        self._unseen = len(roster.ended) - len(kept)
        self._forgiven = self._tally.failed

    async def run(self) -> dict[str, float]:
        """The step's metrics, when every policy has committed it and engines serve the result.

        Raises `TroupeError`: a fault of the job, or `DeadlineExceeded` naming what was missing.
        """
        rollout = self._roll_out()
        policies = self._job.spec.trained_policies
        try:
            if self._mode in _EAGER:
                await together(rollout, *(self._train(policy) for policy in policies))
            else:
                await rollout
                if self._mode == "serial":
                    for policy in policies:
                        await self._train(policy)
                else:
                    await together(*(self._train(policy) for policy in policies))
        except DeadlineExceeded as error:
            raise await name_missing_columns(self._job, self.step, error) from error
        finally:
            await self._recent.flush()
        await report_failures(self._job, self._name, self._tally, self._total)
        await report_unused_endpoints(self._job, self._name, self._tally)
        return await self._values()

    async def _roll_out(self) -> None:
        await self._rollout.run()
        self._rolled_out()

    async def flush(self) -> None:
        """Write the trajectories that have ended."""
        await self._recent.flush()

    @property
    def _total(self) -> int:
        return self._roster.trajectories

    @property
    def progress(self) -> tuple[int, int]:
        """Trajectories that have ended, and all of them."""
        return max(0, self._total - self._rollout.batch.open), self._total

    async def _values(self) -> dict[str, float]:
        values = self._tally.values(self._rollout.seconds)
        if unseen := self._unseen + self._rollout.batch.unseen:
            # Ended in the store just before a worker or an orchestrator could tell.
            values["trajectories/unseen"] = float(unseen)
        values |= self._rollout.values()
        values |= self._redundancy.values()
        values |= self._crew.engines.values()
        values |= self._crew.trainers.swaps()
        values |= commit_metrics(self._commits.values())
        values |= staleness(self._commits.values())
        self._ended = time.monotonic()
        began = self._began if self._before is None else max(self._began, self._before._ended)
        values["step/seconds"] = self._ended - began
        # It would keep every step before it.
        self._before = None
        return values

    def _on_end(self, event: ro.TrajectoryEvent) -> None:
        self._tally.add(event)
        self._redundancy.add(event)
        self._recent.add(event)
        begun = self._total - len(self._roster.ended)
        check_failures(self._job, self._name, self._tally, begun, forgiven=self._forgiven)

    async def _train(self, policy: str) -> None:
        """Commit the policy's step; the ledger moves, engines load what is new."""
        if self._before is not None:
            await self._patience.wait(self._before._committed[policy].wait())
        trainer = self._crew.trainers.policies[policy]
        if (found := self._roster.commits.get(policy)) is not None:
            commit = trainer.adopt(found)
        else:
            commit = await trainer.run_step(self.step, self._patience)
        await self._job.shared.ledger.commit(self._job.job_id, commit)
        if commit.outcome == es.STEP_OUTCOME_SKIPPED:
            await self._job.warn(
                f"{self._name}: {policy} skipped its update, its weights stay: {commit.reason}"
            )
        elif commit.outcome == es.STEP_OUTCOME_EMPTY:
            await self._job.warn(f"{self._name}: there was no sample for {policy}")
        if gone := int(commit.metrics.get("train/values_gone", 0)):
            await self._job.warn(
                f"{self._name}: {gone} samples of {policy} were dropped: no host has their values"
            )
        self._commits[policy] = commit
        weights = trainer.weights
        crew = self._crew
        crew.committed[policy] = max(crew.committed[policy], self.step + 1)
        self._committed[policy].set()
        await crew.engines.update(weights, self._patience)
        crew.served[policy] = max(crew.served[policy], self.step + 1)
        # More steps may open.
        crew.tables.touch()

    def describe(self) -> str:
        """What the step does now, for people."""
        policies = self._crew.trainers.policies
        trained = self._job.spec.trained_policies
        busy = sum(
            policies[policy].progress is not None
            for policy in trained
            if policy not in self._commits
        )
        total = self._job.spec.pipeline.steps
        over, of = self.progress
        parts = [f"{over} of {of} trajectories"]
        if busy:
            parts.append(f"{busy} of {len(trained)} policies training")
        if self._commits:
            parts.append(f"{len(self._commits)} committed")
        if over < of and not self._crew.engines.ready(self._roster.versions):
            parts.append("waiting for a rollout worker")
        waiting = [policies[policy] for policy in trained if policies[policy].worker is None]
        if suspended := sum(one.suspended for one in waiting):
            parts.append(f"{suspended} suspended")
        if unbound := [one.policy for one in waiting if not one.suspended]:
            parts.append(f"waiting for a trainer worker for {', '.join(unbound)}")
        return f"step {self.step + 1}/{total}: {', '.join(parts)}"


# Nothing has to be pushed for a step to be allowed to open: another job may have freed memory.
OnFinish = Callable[[int, dict[str, float]], Awaitable[None]]


class Window:
    """Opens the steps of a job, as many at once as its staleness bounds allow, and ends them in
    order. In the on-policy modes that is one at a time.

    `on_finish` is awaited with every step that is over and its metrics.
    """

    def __init__(self, crew: StepContext, first: int, on_finish: OnFinish) -> None:
        spec = crew.job.spec
        self._crew = crew
        self._next = first
        self._on_finish = on_finish
        self._alpha = {policy: spec.alpha_of(policy) for policy in spec.trained_policies}
        self._depth = 1 + max(self._alpha.values())
        self._cursor = Cursor()
        self._open: deque[tuple[StepRunner, asyncio.Task[dict[str, float]]]] = deque()
        self._taken_up = False
        # No step from here on may open: something else comes first.
        self._until = first
        self._closing = False
        crew.committed.update(dict.fromkeys(self._alpha, first))
        crew.served.update(crew.committed)

    def close(self) -> None:
        """Open no further step; `run` returns when those that are open are over."""
        self._closing = True
        self._crew.tables.touch()

    async def run(self, until: int) -> None:
        """Return when all steps before `until` are over, or all open ones after `close`.

        What a runner before this one had opened is taken up, whatever `until` says.
        Raises `TroupeError`: a fault of the job.
        """
        self._until = until
        try:
            if not self._taken_up:
                await self._take_up()
            ticker = asyncio.create_task(self._tick())
            try:
                while True:
                    while self._may_open():
                        await self._start(es.GetStepResponse())
                    if not self._open:
                        return
                    await self._wait()
                    await self._finish()
            finally:
                ticker.cancel()
                await asyncio.gather(ticker, return_exceptions=True)
        finally:
            # Only a fault or a cancellation leaves any.
            for _, task in self._open:
                task.cancel()
            await asyncio.gather(*(task for _, task in self._open), return_exceptions=True)
            self._open.clear()

    def _may_open(self) -> bool:
        if self._closing or self._next >= self._until or len(self._open) >= self._depth:
            return False
        if self._open and self._crew.tables.over_high_water:
            return False
        return not admission.holding_back(self._next, self._crew.served, self._alpha)

    def _will_follow(self, step: int) -> bool:
        """Whether a step will open while the one before it is still open."""
        if self._closing or step >= self._until or self._crew.tables.over_high_water:
            return False
        return self._depth > 1

    def _begin_early(self, step: int) -> None:
        """Have the trajectories of a step begun that opens next, if the job asks for it."""
        job = self._crew.job
        if not job.spec.pipeline.early_start or self._closing or step >= self._until:
            return
        limit = job.spec.limits.max_concurrent_trajectories
        plans = StepQueries(job, step, self._cursor).next_plans(most=limit)
        groups = [train_tickets(plan, ()) for plan in plans]
        count = admission.next_wave([len(one) for one in groups], in_flight=0, limit=limit)
        self._crew.dispatch.early.begin(step, groups[:count])

    async def _take_up(self) -> None:
        """Go on with what was open, and with the cursor where the newest step left it."""
        first = self._next
        if first:
            self._cursor.see(await self._ask(first - 1))
        found = [await self._ask(first)]
        while found[-1].open and len(found) < self._depth:
            found.append(await self._ask(first + len(found)))
        # All of them have seen to the cursor before any takes from it.
        steps = [one for one in found if one.open]
        for one in steps:
            self._cursor.see(one)
        for one in steps:
            await self._start(one)
        self._taken_up = True

    async def _ask(self, step: int) -> es.GetStepResponse:
        request = es.GetStepRequest(job_id=self._crew.job.job_id, step=step)
        return await self._crew.job.shared.experience.GetStep(request)

    async def _start(self, found: es.GetStepResponse) -> None:
        step = self._next
        before = self._open[-1][0] if self._open else None
        runner = StepRunner(
            self._crew,
            step,
            self._cursor,
            before,
            len(self._open),
            lambda: self._will_follow(step + 1),
            partial(self._begin_early, step + 1),
        )
        await runner.open(found)
        self._open.append((runner, asyncio.create_task(runner.run())))
        self._next += 1
        self._crew.tables.touch()

    async def _wait(self) -> None:
        """Until a step is over, has failed, or another may perhaps open."""
        change = asyncio.ensure_future(self._crew.tables.change(_LOOK_SECONDS))
        try:
            await asyncio.wait(
                {change, *(task for _, task in self._open)}, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            change.cancel()

    async def _finish(self) -> None:
        """End what is over, oldest first; raise what failed."""
        for _, task in self._open:
            if task.done():
                task.result()
        while self._open and self._open[0][1].done():
            runner, task = self._open.popleft()
            await self._on_finish(runner.step, task.result())

    async def _tick(self) -> None:
        """Tell followers of progress, and write trajectories, now and then."""
        job = self._crew.job
        while True:
            if self._open:
                oldest = self._open[0][0]
                over, total = oldest.progress
                text = oldest.describe()
                if more := len(self._open) - 1:
                    text += f"; {more} more step{'s' if more > 1 else ''} open"
                job.show(text, step=oldest.step + 1, done=over, total=total)
            await asyncio.sleep(job.shared.settings.activity_seconds)
            for runner, _ in list(self._open):
                await runner.flush()
