"""The steps that run at one worker."""

from __future__ import annotations

import asyncio
import functools
from typing import Any

import structlog

from services.chassis.telemetry import Telemetry
from services.trainer.binding import Binding
from services.trainer.bindings import Key
from services.trainer.claims import StepClaims
from services.trainer.compute import Compute
from services.trainer.settings import TrainerSettings
from services.trainer.step import StepRun
from services.trainer.suspension import HalfStep
from troupe.rpc import FailedPrecondition, TroupeError, new_id
from troupe.v1 import experience_store_pb2 as store_pb
from troupe.v1 import orchestrator_pb2

log = structlog.get_logger("troupe.trainer")

# The orchestrator learns of a commit in three ways; this one is only the quickest.
_REPORT_SECONDS = 5.0


class Steps:
    """The newest step of each policy, running or ended; counts them and reports commits."""

    def __init__(self, settings: TrainerSettings, compute: Compute, telemetry: Telemetry) -> None:
        self._settings = settings
        self._compute = compute
        self._runs: dict[Key, StepRun] = {}
        self._reports: set[asyncio.Task[None]] = set()
        self._store: Any = None
        self._orchestrator: Any = None
        labels = ["job_id", "policy"]
        self._tokens = telemetry.counter("troupe_trainer_tokens", "Tokens trained.", labels)
        self._busy = telemetry.counter("troupe_trainer_busy_seconds", "Computing.", labels)
        self._steps = telemetry.counter("troupe_trainer_steps", "Steps.", [*labels, "outcome"])

    def connect(self, store: Any, orchestrator: Any) -> None:
        """Stubs of whom steps ask for samples, and of whom they report to."""
        self._store, self._orchestrator = store, orchestrator

    async def stop(self) -> None:
        """Give all steps up, so that their samples are free at once for another worker."""
        runs = list(self._runs.values())
        await asyncio.gather(*(run.cancel() for run in runs))
        leaving = [asyncio.create_task(run.settled()) for run in runs]
        if leaving:
            await asyncio.wait(leaving, timeout=self._settings.trainer_claim_wait_seconds + 1)
        for task in self._reports:
            task.cancel()
        await asyncio.gather(*self._reports, return_exceptions=True)

    def running(self, key: Key) -> StepRun | None:
        """The policy's step, unless it has ended."""
        run = self._runs.get(key)
        return None if run is None or run.done else run

    def join(
        self, binding: Binding, step: int, version: int, oldest_version: int | None
    ) -> StepRun:
        """The running step, or a new one. Raises FailedPrecondition of kind "step_in_progress"."""
        key = (binding.job_id, binding.policy)
        run = self.running(key)
        if run is None:
            return self._start(binding, step, version, oldest_version)
        if run.step != step:
            raise FailedPrecondition(
                f"policy {binding.policy} is in step {run.step}",
                kind="step_in_progress",
                field="step",
                value=step,
                remedy="Steps of one policy follow each other; wait, or bind it afresh.",
            )
        return run

    def go_on(self, binding: Binding, half: HalfStep) -> None:
        """Run the rest of a step that was stopped for a suspension, which failed."""
        binding.half = half
        self._start(binding, half.step, half.version, half.oldest_version)

    async def give_back(self, binding: Binding, half: HalfStep) -> None:
        """Free the samples of a step that was stopped for a suspension: its gradients are gone."""
        await self._make_claims(binding, half.step, half).close()

    async def cancel(self, key: Key) -> None:
        """Give the policy's step up, and forget it."""
        run = self._runs.pop(key, None)
        if run is not None and not run.done:
            await run.cancel()

    def forget(self, key: Key) -> None:
        """The policy leaves; its step has ended."""
        self._runs.pop(key, None)

    def _start(
        self, binding: Binding, step: int, version: int, oldest_version: int | None
    ) -> StepRun:
        half, binding.half = binding.half, None
        if half is not None and (half.step, half.version) != (step, version):
            half = None  # `StepRun` throws its gradients away

        make_claims = functools.partial(self._make_claims, binding, step)
        bounds = (step, version, oldest_version)
        run = StepRun(binding, *bounds, make_claims, self._compute, self._settings, half)
        self._runs[(binding.job_id, binding.policy)] = run
        report = asyncio.create_task(self._after(binding, run))
        self._reports.add(report)
        report.add_done_callback(self._reports.discard)
        return run

    def _make_claims(self, binding: Binding, step: int, half: HalfStep | None) -> StepClaims:
        where = (binding.job_id, binding.policy, step, binding.claimant)
        return StepClaims(self._store, *where, self._settings.trainer_lease_seconds, half)

    async def _after(self, binding: Binding, run: StepRun) -> None:
        """Count the step and tell the orchestrator."""
        commit = await run.outcome()
        if commit is None:
            return
        labels = (binding.job_id, binding.policy)
        outcome = store_pb.StepOutcome.Name(commit.outcome).removeprefix("STEP_OUTCOME_").lower()
        self._steps.labels(*labels, outcome).inc()
        self._tokens.labels(*labels).inc(commit.metrics.get("tokens", 0.0))
        self._busy.labels(*labels).inc(commit.metrics.get("train/seconds", 0.0))
        request = orchestrator_pb2.ReportCommitRequest(
            request_id=new_id("report"), job_id=binding.job_id, commit=commit
        )
        try:
            await self._orchestrator.ReportCommit(request, timeout=_REPORT_SECONDS)
        except TroupeError as error:
            log.warning("commit not reported", policy=binding.policy, error=str(error))
