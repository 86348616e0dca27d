"""One training step: open it, roll it out, train each policy, bring engines up to date."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Final

from services.orchestrator.evaluation import (
    check_failures,
    report_failures,
    report_unused_endpoints,
)
from services.orchestrator.faults import Patience, together
from services.orchestrator.metrics import Tally, commit_metrics, staleness
from services.orchestrator.redundancy import Redundancy
from services.orchestrator.roster import Cursor, Roster
from services.orchestrator.step_rollout import Crew, StepRollout
from services.orchestrator.trajectories import as_event
from services.orchestrator.waiting import name_missing_columns
from troupe.rpc import DeadlineExceeded
from troupe.v1 import experience_store_pb2 as es
from troupe.v1 import rollout_pb2 as ro

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
        crew: Crew,
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
        self._patience = Patience(
            self._name, job.spec.limits.step_seconds * (1 + ahead), "limits.step_seconds"
        )
        self._roster = Roster(job, step, cursor)
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
