"""Life cycle of a training step, from its queries to the engines that serve its result.

The order of events in one step (`StepRunner`):

1. take queries: `open` takes items of the training split and opens the step in the experience
   store;
2. dispatch: `_roll_out` gives the queries' trajectories to rollout workers, which run the workflow,
   have it rewarded and write the samples into the store;
3. wait for rewards: `StepRollout` waits until all trajectories have ended, while queries join
   (`pipeline.dynamic_sampling`) or leave (`pipeline.over_sampling`) the step;
4. train, publish: `_train` has each policy's trainer worker run the optimizer step; the trainer
   publishes the new weights;
5. commit: the trainer commits the step in the store, which moves the policy's version, for good;
6. admit: `Engines.update` has every rollout worker load the version. When the version is served,
   `StepWindow` may open a further step. Where steps do not overlap, engines that take weights from
   the trainer's devices load them already during 4 and 5 (`Engines.load_ahead`), and serve them
   from now on.

Modes `serial` and `sync` train once the rollout is over, on the engines' devices if the job
colocates them (`DeviceTurns`); `serial` one policy after another, unless they learn joint pairs,
for which each needs the others. `micro_batch` and `async` train with the first samples that are
ready; in `async` several steps are open at once (`pipeline.alpha`).
"""

from __future__ import annotations

import asyncio
import time
from collections import ChainMap, deque
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Final

from services.orchestrator.context import JobContext
from services.orchestrator.errors import Deadline, cancel_all, run_all, run_with_background
from services.orchestrator.pipeline.dispatch import Dispatch, TicketBatch, add_in_parts
from services.orchestrator.pipeline.failures import (
    CommonFailure,
    check_failures,
    report_failures,
    report_unused_endpoints,
)
from services.orchestrator.pipeline.metrics import (
    Redundancy,
    Tally,
    add_to_profile,
    commit_metrics,
    staleness,
    without_signal,
)
from services.orchestrator.pipeline.split_watch import SplitWatch, StepTotals
from services.orchestrator.pipeline.step_queries import (
    STALE,
    SURPLUS,
    Curriculum,
    Cursor,
    StepQueries,
)
from services.orchestrator.placement.device_turns import DeviceTurns
from services.orchestrator.placement.engines import Engines
from services.orchestrator.placement.policy_trainer import Trainers
from services.orchestrator.placement.trainer_scheduler import TableWatch
from services.orchestrator.state.trajectories import as_event
from troupe.contracts import metric_names
from troupe.rpc import DeadlineExceeded, TroupeError
from troupe.scheduling import admission
from troupe.states import OFFLINE
from troupe.twin.profile import JobProfile
from troupe.v1 import common_pb2 as common_pb
from troupe.v1 import experience_store_pb2 as store_pb
from troupe.v1 import rollout_pb2 as rollout_pb

if TYPE_CHECKING:
    from services.orchestrator.populations.population import PopulationRun

# The store pushes changes; this poll covers changes that it could not push.
_LOOK_SECONDS: Final = 1.0
# Consecutive steps without a signal after which the user gets advice.
_FLAT_STEPS: Final = 5
# A worker reports a trajectory's end this soon after the store has it, or never.
_REPORT_GRACE_SECONDS: Final = 10.0
# Time limit for looking up missing columns in the store after the step has failed.
_LOOKUP_SECONDS: Final = 5.0
# Modes in which training begins with the first micro-batch that is ready.
_EAGER: Final = frozenset({"micro_batch", "async"})


async def warn_of(job: JobContext, step: str, commit: store_pb.StepCommit) -> None:
    """Tell the user about a step that changed no weights, learned nothing, or lost samples.

    `step`: "step 3".
    """
    policy = commit.policy
    if commit.outcome == store_pb.STEP_OUTCOME_SKIPPED:
        await job.warn(f"{step}: {policy} skipped its update, so its weights stay: {commit.reason}")
    elif commit.outcome == store_pb.STEP_OUTCOME_EMPTY and not job.spec.is_offline(commit.step):
        await job.warn(f"{step}: there was no sample for {policy}")
    elif commit.outcome == store_pb.STEP_OUTCOME_EMPTY:
        # The next steps may have none either: their rows belong to other agents.
        job.complaints[f"no row/{policy}"] += 1
        if job.complaints[f"no row/{policy}"] == 1:
            await job.warn(f"{step}: there was no row to learn from for {policy}")
    flat = without_signal(commit, job.spec.algorithm)
    in_a_row = job.complaints[f"no signal/{policy}"] + 1 if flat else 0
    job.complaints[f"no signal/{policy}"] = in_a_row
    if in_a_row == _FLAT_STEPS:
        await job.warn(
            f"{step}: {policy} had no signal in {in_a_row} steps in a row: all "
            "trajectories of each query got the same reward. Try easier tasks (or harder ones, "
            "if all succeed; `curriculum` chooses by success), a larger `pipeline.group_size`, a "
            "higher `temperature` of its agents' `sampling`, or `pipeline.dynamic_sampling`"
        )
    if gone := int(commit.metrics.get(metric_names.VALUES_GONE, 0)):
        await job.warn(f"{step}: {gone} samples of {policy} were dropped: no host has their values")


class EngineHold:
    """A hold that keeps engines at their versions while evaluations run concurrently with the next
    steps.

    Trainers continue: policies commit the steps that `pipeline.alpha` has let open, and engines
    load the committed versions after the evaluations. Thus all trajectories of an evaluation are of
    the versions that it names, whatever the number of engines per policy.
    """

    def __init__(self) -> None:
        self.evaluations = 0
        """Evaluations that run now, one after another."""
        self._free = asyncio.Event()
        self._free.set()

    @contextmanager
    def during(self, evaluations: int) -> Iterator[None]:
        """Hold engines at their versions in the body of a `with`."""
        self.evaluations = evaluations
        self._free.clear()
        try:
            yield
        finally:
            self.evaluations = 0
            self._free.set()

    async def wait(self) -> None:
        """Wait until engines may load another version."""
        await self._free.wait()


@dataclass(frozen=True)
class StepContext:
    """Parts of a running job that its steps share."""

    job: JobContext
    trainers: Trainers
    engines: Engines
    dispatch: Dispatch
    tables: TableWatch
    turns: DeviceTurns
    # Draws opponents, in a job with a `population` section.
    population: PopulationRun | None = None
    hold: EngineHold = field(default_factory=EngineHold)
    common_failure: CommonFailure = field(default_factory=CommonFailure)
    # Measured durations of trajectories and steps.
    profile: JobProfile = field(kw_only=True)
    split: SplitWatch = field(kw_only=True)
    # By trained policy: committed steps, the version after them, and steps whose result engines
    # serve.
    committed: dict[str, int] = field(default_factory=dict)
    versions: dict[str, int] = field(default_factory=dict)
    served: dict[str, int] = field(default_factory=dict)

    def note_commit(self, policy: str, step: int) -> None:
        """Note that a policy has committed a step. Its trainer knows the version before, when the
        worker reports it: the two must not be read in between."""
        self.committed[policy] = max(self.committed[policy], step + 1)
        self.versions[policy] = self.trainers.policies[policy].weights.version


class StepRunner:
    """The runner of one step of a job in its pipeline mode; see the module for the order of events.

    The step may have begun before a restart: ended trajectories do not run again, and policies that
    committed do not train again. In mode `async` the step `before` may still be open: every policy
    trains its steps in order, independently of the others.
    """

    def __init__(
        self,
        context: StepContext,
        step: int,
        cursor: Cursor,
        before: StepRunner | None,
        ahead: int,
        will_follow: Callable[[], bool],
        rolled_out: Callable[[], None],
    ) -> None:
        """`ahead`: open steps before this one. `will_follow` says whether the next step will open
        while this one is open; `rolled_out` is called when all trajectories have ended."""
        job = context.job
        self._context = context
        self._job = job
        self.step = step
        self._before = before
        self._rolled_out = rolled_out
        self._mode = job.spec.pipeline.mode
        self._name = f"step {step + 1}"
        # Each open step before it and each concurrent evaluation may take as long.
        parts = 1 + ahead + context.hold.evaluations
        self._deadline = Deadline(
            self._name, job.spec.limits.step_seconds * parts, "limits.step_seconds"
        )
        self._queries = StepQueries(job, step, cursor)
        self._rollout: StepRollout = StepRollout(
            context,
            self._queries,
            self._deadline,
            self._on_end,
            None if before is None else before._rollout,
            will_follow,
        )
        # Failures before a restart: a resumed job must not fail because of them again, since their
        # cause may be fixed.
        self._forgiven = 0
        # Trajectories that ended before a restart and are not kept.
        self._unseen = 0
        self._commits: dict[str, store_pb.StepCommit] = {}
        self._committed = {policy: asyncio.Event() for policy in job.spec.trained_policies}
        on_policy = self._mode != "async"
        self._tally = Tally(job.spec.agents, self._queries.versions if on_policy else {})
        self._redundancy = Redundancy(self._queries.redundant)
        self._totals = StepTotals()
        # Ended trajectories for inspection.
        self.recent = job.shared.trajectories.buffer(job.job_id, step, "train")
        self._began = time.monotonic()
        self._ended = 0.0

    async def open(self, found: store_pb.GetStepResponse) -> None:
        """Take queries and open the step in the store, or goes on with the open step `found`."""
        queries, before = self._queries, self._before
        # The previous step may pass its surplus queries on to this one, so no spare ones are taken
        # yet.
        first = before is None or before._queries.closed
        await queries.open(
            found,
            {one: self._context.trainers.policies[one].weights.version for one in self._committed},
            queries.wanted + (queries.spare if first else 0),
        )
        self._rollout.opened()
        for policy in queries.commits:
            self._context.note_commit(policy, self.step)
        kept = await self._job.shared.trajectories.find(self._job.job_id, queries.ended)
        for one in kept:
            self._tally.add(as_event(one), timed=False)
            self._redundancy.add(as_event(one))
        self._unseen = len(queries.ended) - len(kept)
        self._forgiven = self._tally.failed

    async def run(self) -> dict[str, float]:
        """Return the step's metrics, once every policy has committed it and engines serve the
        result.

        Raises `TroupeError`: a fault of the job, or `DeadlineExceeded` naming what was missing.
        """
        policies = self._job.spec.trained_policies
        try:
            if self._mode in _EAGER:
                await run_all(self._roll_out(), *(self._train(policy) for policy in policies))
            elif self._mode == "serial" and not self._job.spec.exchanges_pairs(self.step):
                await self._roll_out()
                async with self._context.turns.of_trainers(self._deadline):
                    for policy in policies:
                        await self._train(policy)
            else:
                await self._roll_out()
                async with self._context.turns.of_trainers(self._deadline):
                    await run_all(*(self._train(policy) for policy in policies))
        except DeadlineExceeded as error:
            raise await name_missing_columns(self._job, self.step, error) from error
        finally:
            await self.recent.flush()
        await report_failures(self._job, self._name, self._tally, self._total)
        await report_unused_endpoints(self._job, self._name, self._tally)
        return await self._values()

    async def _roll_out(self) -> None:
        """Run the step's trajectories until all have ended with their rewards."""
        await self._rollout.run()
        if not self._unseen + self._rollout.batch.unseen:
            self._context.common_failure.add(self._name, self._tally, len(self._queries.plans))
        self._rolled_out()

    async def _train(self, policy: str) -> None:
        """Train a policy's step, commit its version, and have engines serve it."""
        if self._before is not None:
            await self._deadline.wait(self._before._committed[policy].wait())
        trainer = self._context.trainers.policies[policy]
        # Train and publish, unless the store has a commit from an earlier runner.
        if (found := self._queries.commits.get(policy)) is not None:
            commit = trainer.adopt(found)
        else:
            stepped = partial(self._load_ahead, policy)
            commit = await trainer.run_step(self.step, self._deadline, stepped)
        # Commit: the version has moved.
        await self._job.shared.weight_versions.adopt(self._job.job_id, self._job.epoch, commit)
        await warn_of(self._job, self._name, commit)
        self._commits[policy] = commit
        weights = trainer.weights
        served = self._context.served
        self._context.note_commit(policy, self.step)
        self._committed[policy].set()
        # Admit: rollout workers load the version.
        await self._deadline.wait(self._context.hold.wait())
        await self._context.engines.update(weights, self._deadline)
        served[policy] = max(served[policy], self.step + 1)
        # More steps may open.
        self._context.tables.touch()

    def _load_ahead(self, policy: str, weights: common_pb.WeightsRef | None) -> None:
        """Have engines load a step's weights before their commit; None: have them go back.

        Only where steps do not overlap: no turn is waiting then. With `async`, engines serve the
        former version until the commit instead, since what they compute with the new one would be
        held back.
        """
        engines = self._context.engines
        if weights is None:
            engines.give_up_ahead(policy)
        elif self._mode != "async" and not self._context.hold.evaluations:
            engines.load_ahead(weights)

    @property
    def _total(self) -> int:
        return self._queries.trajectories

    @property
    def progress(self) -> tuple[int, int]:
        """Number of ended trajectories, and of all."""
        return max(0, self._total - self._rollout.batch.open), self._total

    def describe(self) -> str:
        """Describe the step's present activity."""
        policies = self._context.trainers.policies
        trained = self._job.spec.trained_policies
        busy = sum(
            policies[policy].progress is not None
            for policy in trained
            if policy not in self._commits
        )
        total = self._job.spec.pipeline.steps
        over, of = self.progress
        parts = [f"{over} of {of} trajectories"]
        if self._context.hold.evaluations:
            parts.append("engines keep their versions for an evaluation")
        if busy:
            parts.append(f"{busy} of {len(trained)} policies training")
        if self._commits:
            parts.append(f"{len(self._commits)} committed")
        if over < of and not self._context.engines.ready(self._queries.versions):
            parts.append("waiting for a rollout worker")
        waiting = [policies[policy] for policy in trained if policies[policy].worker is None]
        if suspended := sum(one.suspended for one in waiting):
            parts.append(f"{suspended} suspended")
        parts += [one.shortage for one in waiting if one.shortage]
        if unbound := [one.policy for one in waiting if not (one.suspended or one.shortage)]:
            parts.append(f"waiting for a trainer worker for {', '.join(unbound)}")
        return f"step {self.step + 1}/{total}: {', '.join(parts)}"

    def _on_end(self, event: rollout_pb.TrajectoryEvent) -> None:
        self._tally.add(event)
        self._redundancy.add(event)
        self.recent.add(event)
        add_to_profile(self._context.profile, event, self.step)
        self._totals.add(event)
        begun = self._total - len(self._queries.ended)
        check_failures(self._job, self._name, self._tally, begun, forgiven=self._forgiven)

    async def _values(self) -> dict[str, float]:
        values = self._tally.values(self._rollout.seconds)
        if unseen := self._unseen + self._rollout.batch.unseen:
            # Ended in the store just before a worker or an orchestrator could report it.
            values["trajectories/unseen"] = float(unseen)
        values |= self._rollout.values()
        values |= self._queries.values()
        values |= self._redundancy.values()
        values |= self._context.engines.values()
        values |= self._context.trainers.swaps()
        values |= self._context.turns.values()
        values |= commit_metrics(self._commits.values(), self._job.spec.algorithm)
        values |= staleness(self._commits.values())
        self._ended = time.monotonic()
        began = self._began if self._before is None else max(self._began, self._before._ended)
        values[metric_names.STEP_SECONDS] = self._ended - began
        values |= self._context.split.metrics(self._totals, values)
        # Otherwise each step would keep all earlier ones in memory.
        self._before = self._rollout._before = None
        return values


class StepRollout:
    """The rollout of a step: runs its trajectories to their ends, and decides which queries stay in
    it.

    Steps are closed in order. A query that leaves a step continues in the next one, if that is open
    and the query will not be too old there.
    """

    def __init__(
        self,
        context: StepContext,
        queries: StepQueries,
        deadline: Deadline,
        on_end: Callable[[rollout_pb.TrajectoryEvent], None],
        before: StepRollout | None,
        will_follow: Callable[[], bool],
    ) -> None:
        self._context = context
        self._deadline = deadline
        self._before = before
        self._will_follow = will_follow
        self.queries = queries
        floors: Mapping[str, int] = queries.versions
        if context.population is not None:
            # A view: versions are known once the step is open.
            floors = ChainMap(queries.versions, context.population.slots.training_floors)
        self.batch = TicketBatch(
            queries.step, deadline, on_end, floors=floors, ended=queries.ended_now
        )
        self.after: StepRollout | None = None
        self.joined = 0
        self.carried = 0
        self.seconds = 0.0

    def opened(self) -> None:
        """Note that the store has the step, so that queries of the previous one may continue in
        it."""
        if self._before is not None:
            self._before.after = self

    async def run(self) -> None:
        """Raise `TroupeError`: a fault of the job, or the deadline saying what was missing."""
        began = time.monotonic()
        await self._dispatch(list(self.queries.plans.values()))
        if self.queries.closed:
            self.batch.seal()
        if self.queries.closed and not self.batch.open:
            return
        dispatch = self._context.dispatch
        ends = self.batch.finished(lambda: dispatch.describe(self.batch))
        await run_with_background(
            run_all(self._adjust_until_closed(), ends), self._end_unreported()
        )
        self.seconds = time.monotonic() - began

    async def _dispatch(self, plans: Collection[admission.QueryPlan]) -> None:
        groups = (group for plan in plans if (group := self._tickets(plan)))
        await add_in_parts(self._context.dispatch, self.batch, groups)

    def _tickets(self, plan: admission.QueryPlan) -> list[rollout_pb.Ticket]:
        offline = self._context.job.spec.is_offline(self.queries.step)
        tickets = train_tickets(plan, self.queries.ended, offline=offline)
        if (population := self._context.population) is not None:
            cast, learners = population.slots.cast_of(plan.index)
            for ticket in tickets:
                ticket.cast.update(cast)
                ticket.learners[:] = learners
        return tickets

    async def _adjust_until_closed(self) -> None:
        while not self.queries.closed:
            await self._deadline.wait(self._context.tables.change(_LOOK_SECONDS))
            await self._adjust()
        self.batch.seal()

    async def _adjust(self) -> None:
        """Depending on progress, let queries join, or close the step and let the surplus leave."""
        queries = self.queries
        # The previous step passes its surplus on to this one; only then is the missing number
        # known.
        first = self._before is None or self._before.queries.closed
        move = admission.next_move(
            await queries.progress(),
            wanted=queries.wanted,
            spare=queries.spare if first else 0,
            max_refills=queries.max_refills,
            may_close=first,
            first_k=queries.spare > 0,
        )
        if move.add:
            self.joined += move.add
            await self._dispatch(await queries.join(move.add))
        elif move.close:
            await self._close(move.leave)

    async def _close(self, leave: Collection[str]) -> None:
        dispatch = self._context.dispatch
        if not leave or self._context.job.spec.pipeline.mode != "async":
            dropped, _ = await self.queries.close(drop=leave)
            dispatch.withdraw(self.batch, dropped, SURPLUS)
        elif (after := self.after) is not None:
            stale = [query_id for query_id in leave if self._too_old(query_id, after)]
            carry = [query_id for query_id in leave if query_id not in stale]
            dropped, carried = await self.queries.close(
                drop=stale, reason=STALE, carry=carry, target=after.queries
            )
            dispatch.withdraw(self.batch, dropped, STALE)
            dispatch.move(self.batch, carried, after.batch)
            after.carried += len(carried)
        elif self._will_follow():
            return  # they continue in the next step once it is open
        else:
            dropped, _ = await self.queries.close(drop=leave)
            dispatch.withdraw(self.batch, dropped, SURPLUS)
        self._context.tables.touch()

    def _too_old(self, query_id: str, after: StepRollout) -> bool:
        spec, committed = self._context.job.spec, self._context.committed
        return admission.too_old(
            self.batch.started.get(query_id, {}),
            after.queries.step,
            committed=committed,
            versions=self._context.versions,
            alpha={policy: spec.alpha_of(policy) for policy in committed},
        )

    async def _end_unreported(self) -> None:
        """Stop waiting for trajectories that have ended in the store and are never reported.

        A worker reports how a trajectory ended, or its stream breaks and the store is asked. A
        stream that stays open but silent must not delay the step: trajectories that ended in the
        store a whole grace period ago are counted as ended without a report.
        """
        known: frozenset[str] = frozenset()
        while True:
            reported = self.batch.reported
            await asyncio.sleep(_REPORT_GRACE_SECONDS)
            if self.batch.reported != reported:
                continue
            ended = frozenset(await self.batch.ended())
            self._context.dispatch.end_unreported(self.batch, known & ended)
            known = ended

    def values(self) -> Mapping[str, float]:
        """Return the metrics of a step whose queries could change."""
        if not self.queries.held:
            return {}
        return {
            "queries/trained": float(len(self.queries.plans)),
            "queries/joined": float(self.joined),
            "queries/left": float(self.queries.left),
            "queries/carried_in": float(self.carried),
        }


def train_tickets(
    query: admission.QueryPlan, ended: Collection[str], *, offline: bool = False
) -> list[rollout_pb.Ticket]:
    """Return the tickets for the trajectories of a query that have not ended; `offline`: it is a
    row to learn from."""
    task = None
    if (choice := query.choice) is not None:
        task = rollout_pb.TaskRef(source=choice.source, item=choice.item)
    return [
        rollout_pb.Ticket(
            query_id=query.query_id,
            trajectory_id=trajectory_id,
            split=OFFLINE if offline else "train",
            index=query.index,
            seed=seed,
            purpose=rollout_pb.Ticket.PURPOSE_TRAIN,
            task=task,
        )
        for trajectory_id, seed in zip(query.trajectory_ids, query.seeds, strict=True)
        if trajectory_id not in ended
    ]


async def name_missing_columns(
    job: JobContext, step: int, error: DeadlineExceeded
) -> DeadlineExceeded:
    """Return `error`, or an error that names the unfilled required columns and their rows."""
    lacking: dict[str, list[str]] = {}
    for policy in job.spec.trained_policies:
        for column in await _missing_columns(job, policy, step):
            lacking.setdefault(column, []).append(policy)
    if not lacking:
        return error
    what = "; ".join(
        f"rows of {' and '.join(policies)} wait for the column {column!r}, which was never filled"
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


async def _missing_columns(job: JobContext, policy: str, step: int) -> list[str]:
    """Return the missing required columns of a policy's first pending row."""
    required = job.spec.pipeline.required_columns
    if not required:
        return []
    request = store_pb.ListSamplesRequest(
        job_id=job.job_id,
        policy=policy,
        step=step,
        state=common_pb.SAMPLE_STATE_PENDING,
        page_size=1,
    )
    with suppress(TroupeError):
        found = await job.shared.experience.ListSamples(request, timeout=_LOOKUP_SECONDS)
        return [name for row in found.samples for name in required if name not in row.columns]
    return []


class StepWindow:
    """The window of a job's open steps: opens as many as the staleness bounds allow, and ends them
    in order. The on-policy modes allow one at a time.

    `on_finish` is awaited with every finished step and its metrics.
    """

    def __init__(
        self,
        context: StepContext,
        first: int,
        on_finish: Callable[[int, dict[str, float]], Awaitable[None]],
    ) -> None:
        spec = context.job.spec
        self._context = context
        self._next = first
        self._on_finish = on_finish
        self._alpha = {policy: spec.alpha_of(policy) for policy in spec.trained_policies}
        self._depth = 1 + max(self._alpha.values())
        curriculum = None
        if spec.curriculum is not None:
            curriculum = Curriculum(
                context.job, spec.curriculum, context.engines, context.committed
            )
        self._cursor = Cursor(curriculum)
        self._open: deque[tuple[StepRunner, asyncio.Task[dict[str, float]]]] = deque()
        self._resumed = self._starting = False
        # Whether an earlier runner may have left open steps that are not resumed.
        self._left = True
        # The first step that may not open yet, because an evaluation or a checkpoint comes first.
        self._until = first
        self._closing = False
        context.committed.update(dict.fromkeys(self._alpha, first))
        policies = context.trainers.policies
        context.versions.update({one: policies[one].weights.version for one in self._alpha})
        context.served.update(context.committed)

    @property
    def idle(self) -> bool:
        """Whether no step is open, or being opened, or left open by an earlier runner."""
        return not (self._open or self._starting or self._left)

    async def look(self) -> None:
        """Find out whether an earlier runner has left an open step."""
        if not self._resumed:
            self._left = (await self._get_step(self._next)).open

    def close(self) -> None:
        """Stop opening steps; `run` returns when the open ones are over."""
        self._closing = True
        self._context.tables.touch()

    async def run(self, until: int) -> None:
        """Run until all steps before `until` are over, or, after `close`, all open ones.

        Steps that an earlier runner had opened run regardless of `until`. Raises `TroupeError`: a
        fault of the job.
        """
        self._until = until
        try:
            if not self._resumed:
                await self._resume_open_steps()
            progress = asyncio.create_task(self._show_progress())
            try:
                while True:
                    while self._may_open():
                        await self._start(store_pb.GetStepResponse())
                    if not self._open:
                        return
                    await self._wait()
                    await self._finish()
            finally:
                await cancel_all([progress])
        finally:
            # Only a fault or a cancellation leaves any.
            await cancel_all(task for _, task in self._open)
            self._open.clear()

    def _may_open(self) -> bool:
        if self._closing or self._next >= self._until or len(self._open) >= self._depth:
            return False
        if self._open and self._context.tables.over_high_water:
            return False
        # The staleness bound: engines must serve recent enough versions of every policy.
        return not admission.holding_back(self._next, self._context.served, self._alpha)

    def _will_follow(self, step: int) -> bool:
        """Return whether a step will open while the one before it is still open."""
        if self._closing or step >= self._until or self._context.tables.over_high_water:
            return False
        return self._depth > 1

    def _begin_early(self, step: int) -> None:
        """Have workers begin trajectories of the next step (`pipeline.early_start`)."""
        job = self._context.job
        if not job.spec.pipeline.early_start or self._closing or step >= self._until:
            return
        if job.spec.is_offline(step):
            return  # there is nothing to set up
        limit = job.spec.limits.max_concurrent_trajectories
        plans = StepQueries(job, step, self._cursor).next_plans(most=limit)
        groups = [train_tickets(plan, ()) for plan in plans]
        count = admission.groups_that_fit([len(one) for one in groups], in_flight=0, limit=limit)
        self._context.dispatch.early.begin(step, groups[:count])

    async def _resume_open_steps(self) -> None:
        """Continue the steps that were open (possibly more than allowed now, if `pipeline.alpha`
        was lowered), and the cursor of the newest of them."""
        first = self._next
        if first:
            self._cursor.see(await self._get_step(first - 1))
        found = [await self._get_step(first)]
        while found[-1].open:
            found.append(await self._get_step(first + len(found)))
        # All of them move the cursor before any step takes from it.
        steps = [one for one in found if one.open]
        for one in steps:
            self._cursor.see(one)
        for one in steps:
            await self._start(one)
        self._resumed, self._left = True, False

    async def _get_step(self, step: int) -> store_pb.GetStepResponse:
        request = store_pb.GetStepRequest(job_id=self._context.job.job_id, step=step)
        return await self._context.job.shared.experience.GetStep(request)

    async def _start(self, found: store_pb.GetStepResponse) -> None:
        step = self._next
        before = self._open[-1][0] if self._open else None
        runner = StepRunner(
            self._context,
            step,
            self._cursor,
            before,
            len(self._open),
            lambda: self._will_follow(step + 1),
            partial(self._begin_early, step + 1),
        )
        self._starting = True
        await runner.open(found)
        self._open.append((runner, asyncio.create_task(runner.run())))
        self._starting = False
        self._next += 1
        self._context.tables.touch()

    async def _wait(self) -> None:
        """Wait until a step is over or has failed, or another one may open.

        Looks again every `_LOOK_SECONDS`, since memory that another job frees is not pushed.
        """
        change = asyncio.ensure_future(self._context.tables.change(_LOOK_SECONDS))
        try:
            await asyncio.wait(
                {change, *(task for _, task in self._open)}, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            change.cancel()

    async def _finish(self) -> None:
        """End the steps that are over, oldest first; raise the error of one that failed."""
        for _, task in self._open:
            if task.done():
                task.result()
        while self._open and self._open[0][1].done():
            runner, task = self._open.popleft()
            await self._on_finish(runner.step, task.result())

    async def _show_progress(self) -> None:
        """Show followers the progress of the oldest step, and write ended trajectories."""
        while True:
            # In separate calls, so that no variable keeps a step that ends in the meantime.
            self._show()
            await asyncio.sleep(self._context.job.shared.settings.activity_seconds)
            await self._flush()

    def _show(self) -> None:
        if self._open:
            oldest = self._open[0][0]
            over, total = oldest.progress
            text = oldest.describe()
            if more := len(self._open) - 1:
                text += f"; {more} more step{'s' if more > 1 else ''} open"
            self._context.job.show(text, step=oldest.step + 1, done=over, total=total)

    async def _flush(self) -> None:
        for runner, _ in list(self._open):
            await runner.recent.flush()
