"""A trainer worker: owns a device and no policy, until policies are bound to it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path
from typing import Any, TypeVar

import structlog
from pydantic import ValidationError

from services.chassis.telemetry import Telemetry
from services.chassis.transfer import HostTransfer
from services.trainer.binding import Binding
from services.trainer.checkpoint import checkpoint_path
from services.trainer.claims import StepClaims
from services.trainer.compute import Compute, choose_device
from services.trainer.foreign import ForeignStates
from services.trainer.policy_model import import_transformers
from services.trainer.settings import TrainerSettings
from services.trainer.step import StepRun
from troupe.job import JobSpec
from troupe.rpc import FailedPrecondition, InvalidArgument, NotFound, TroupeError, connect, new_id
from troupe.v1 import common_pb2 as pb
from troupe.v1 import experience_store_pb2 as store_pb
from troupe.v1 import (
    experience_store_pb2_grpc,
    orchestrator_pb2,
    orchestrator_pb2_grpc,
    trainer_pb2,
)

log = structlog.get_logger("troupe.trainer")

T = TypeVar("T")
Key = tuple[str, str]
# The orchestrator learns of a commit in three ways; this one is only the quickest.
_REPORT_SECONDS = 5.0


class TrainerWorker:
    """Bindings by (job, policy), and the steps that they run."""

    def __init__(self, settings: TrainerSettings, telemetry: Telemetry) -> None:
        self._settings = settings
        self._device = choose_device(settings.trainer_device)
        self._compute = Compute(settings.threads, self._device)
        self._transfer = HostTransfer(settings, telemetry)
        self._foreign = ForeignStates(self._transfer, settings)
        self._bindings: dict[Key, Binding] = {}
        self._runs: dict[Key, StepRun] = {}
        # Binding, releasing and starting a step of one policy exclude each other.
        self._locks: dict[Key, asyncio.Lock] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._exit = contextlib.AsyncExitStack()
        self._store: Any = None
        self._orchestrator: Any = None
        labels = ["job_id", "policy"]
        self._tokens = telemetry.counter("troupe_trainer_tokens", "Tokens trained.", labels)
        self._busy = telemetry.counter("troupe_trainer_busy_seconds", "Computing.", labels)
        self._steps = telemetry.counter("troupe_trainer_steps", "Steps.", [*labels, "outcome"])

    async def start(self) -> None:
        """Open channels (nothing is called yet) and warm up."""
        settings = self._settings
        store = connect(settings.experience_store_address, settings.client())
        orchestrator = connect(settings.orchestrator_address, settings.client())
        await self._exit.enter_async_context(store)
        await self._exit.enter_async_context(orchestrator)
        self._store = experience_store_pb2_grpc.ExperienceStoreStub(store)
        self._orchestrator = orchestrator_pb2_grpc.OrchestratorStub(orchestrator)
        await self._transfer.start()
        self._spawn(self._compute.run(import_transformers))

    async def stop(self) -> None:
        """Give all steps up, so that their samples are free at once for another worker."""
        runs = list(self._runs.values())
        await asyncio.gather(*(run.cancel() for run in runs))
        leaving = [asyncio.create_task(run.settled()) for run in runs]
        if leaving:
            await asyncio.wait(leaving, timeout=self._settings.trainer_claim_wait_seconds + 1)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._transfer.stop()
        await self._exit.aclose()
        self._compute.close()

    # What the servicer calls.

    async def bind(
        self, job_id: str, policy: str, spec_json: str, version: int, checksum: str
    ) -> Binding:
        """Bind a policy at a version. Repeatable.

        A step that runs from that very version goes on: whoever asks has only forgotten about
        it. Anything else ends it.
        """
        spec = _parse_spec(spec_json)
        if policy not in spec.policies:
            raise InvalidArgument(
                f"the job has no policy '{policy}'",
                field="policy",
                value=policy,
                remedy=f"Known: {', '.join(sorted(spec.policies))}.",
            )
        # Loading goes on when the caller's deadline passes, and the next call finds it done.
        return await self._detached(self._bind(job_id, policy, spec, spec_json, version, checksum))

    async def run_step(
        self, job_id: str, policy: str, step: int, version: int, oldest_version: int | None = None
    ) -> AsyncIterator[trainer_pb2.StepEvent]:
        """Start the step, or attach to it when it runs already; see `StepRun.watch`.

        Samples that began under a version before `oldest_version` are not trained.
        """
        key = (job_id, policy)
        async with self._lock(key):
            binding = self._bound(key)
            if not binding.trainable:
                raise FailedPrecondition(
                    f"policy {policy} is frozen", kind="policy_frozen", field="policy", value=policy
                )
            run = self._runs.get(key)
            if run is not None and not run.done and run.step != step:
                raise FailedPrecondition(
                    f"policy {policy} is in step {run.step}",
                    kind="step_in_progress",
                    field="step",
                    value=step,
                    remedy="Steps of one policy follow each other; wait, or bind it afresh.",
                )
            if run is None or run.done:
                run = self._runs[key] = self._start_run(binding, step, version, oldest_version)
        async for event in run.watch():
            yield event

    async def save_checkpoint(self, job_id: str, policy: str, version: int) -> tuple[str, int]:
        """Path and size of the checkpoint of `version`; training goes on meanwhile."""
        binding = self._bound((job_id, policy))
        return await asyncio.to_thread(binding.save_checkpoint, version)

    def checkpoint(self, job_id: str, policy: str, version: int) -> Path:
        """Where `save_checkpoint` wrote. Raises NotFound of kind "checkpoint_not_found"."""
        path = checkpoint_path(self._settings.data_dir, job_id, policy, version)
        if not path.is_dir():
            raise NotFound(
                f"there is no checkpoint of {policy}@{version} here",
                kind="checkpoint_not_found",
                field="version",
                value=version,
                remedy="Save it first, with the same worker.",
            )
        return path

    async def offer_state(
        self, job_id: str, policy: str, version: int, checksum: str
    ) -> trainer_pb2.OfferStateResponse:
        """Let a trainer of another host read a committed state of this one's disk."""
        return await asyncio.to_thread(self._foreign.offer, job_id, policy, version, checksum)

    async def keep_state(
        self, job_id: str, policy: str, version: int, offer: trainer_pb2.OfferStateResponse
    ) -> bool:
        """Keep a copy of a state that a trainer of another host offers; False if of this one."""
        return await asyncio.to_thread(self._foreign.keep, job_id, policy, version, offer)

    async def release(self, job_id: str, policy: str) -> None:
        """Give a policy up, if it is bound here; its committed state is on disk."""
        await self._detached(self._release((job_id, policy)))

    def statuses(self) -> list[trainer_pb2.BindingStatus]:
        """All bindings, by job and policy."""
        return [self._bindings[key].status() for key in sorted(self._bindings)]

    def heartbeat(self) -> orchestrator_pb2.HeartbeatRequest:
        """What this worker tells the orchestrator every second."""
        busy = [
            f"{status.policy}: {pb.BindingState.Name(status.state)[14:].lower()} "
            f"step {status.step}, {status.samples} samples"
            for status in self.statuses()
            if status.state != pb.BINDING_STATE_IDLE
        ]
        return orchestrator_pb2.HeartbeatRequest(
            kind=orchestrator_pb2.WORKER_KIND_TRAINER,
            bindings=self.statuses(),
            doing="; ".join(busy) or ("idle" if self._bindings else "unbound"),
            transfer_address=self._transfer.address,
        )

    # How.

    async def _bind(
        self, job_id: str, policy: str, spec: JobSpec, spec_json: str, version: int, checksum: str
    ) -> Binding:
        key = (job_id, policy)
        async with self._lock(key):
            old, run = self._bindings.get(key), self._runs.get(key)
            busy = run is not None and not run.done and run.starts_from(version)
            if busy and old is not None and _same(old, spec_json, version, checksum):
                if not old.dirty:
                    await self._compute.run(old.ensure_published)
                return old
            await self._cancel_run(key)
            if old is not None and _matches(old, spec_json, version, checksum):
                await self._compute.run(old.ensure_published)
                return old
            settings = self._settings
            binding = Binding(
                job_id, policy, spec, spec_json, settings, self._transfer, self._device
            )
            self._bindings[key] = binding
            try:
                await self._compute.run(binding.load, version, checksum)
            except BaseException:
                binding.move(pb.BINDING_STATE_RELEASED)
                del self._bindings[key]
                raise
            binding.move(pb.BINDING_STATE_IDLE)
            # The number of threads is part of what deterministic results depend on.
            threads = settings.threads
            log.info("bound", job_id=job_id, policy=policy, version=version, threads=threads)
            return binding

    async def _release(self, key: Key) -> None:
        async with self._lock(key):
            await self._cancel_run(key)
            self._runs.pop(key, None)
            binding = self._bindings.pop(key, None)
            if binding is not None:
                binding.move(pb.BINDING_STATE_RELEASED)
                await self._compute.run(binding.leave)

    async def _cancel_run(self, key: Key) -> None:
        run = self._runs.pop(key, None)
        if run is not None and not run.done:
            await run.cancel()

    def _start_run(
        self, binding: Binding, step: int, version: int, oldest_version: int | None
    ) -> StepRun:
        lease = self._settings.trainer_lease_seconds

        def make_claims() -> StepClaims:
            where = (binding.job_id, binding.policy, step, binding.claimant)
            return StepClaims(self._store, *where, lease)

        bounds = (step, version, oldest_version)
        run = StepRun(binding, *bounds, make_claims, self._compute, self._settings)
        self._spawn(self._after(binding, run))
        return run

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

    def _bound(self, key: Key) -> Binding:
        binding = self._bindings.get(key)
        if binding is None or binding.state == pb.BINDING_STATE_BINDING:
            raise NotFound(
                f"policy {key[1]} of job {key[0]} is not bound to this worker",
                kind="not_bound",
                field="policy",
                value=key[1],
                remedy="Bind it here, or ask the worker that it is bound to.",
            )
        return binding

    def _lock(self, key: Key) -> asyncio.Lock:
        return self._locks.setdefault(key, asyncio.Lock())

    async def _detached(self, work: Coroutine[Any, Any, T]) -> T:
        return await asyncio.shield(self._spawn(work))

    def _spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _parse_spec(text: str) -> JobSpec:
    try:
        return JobSpec.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        raise InvalidArgument(
            first["msg"],
            kind="invalid_spec",
            field=".".join(map(str, first["loc"])) or "spec_json",
            remedy="Send the validated specification (JobSpec.model_dump_json).",
        ) from error


def _matches(binding: Binding, spec_json: str, version: int, checksum: str) -> bool:
    return (
        _same(binding, spec_json, version, checksum)
        and not binding.dirty
        and binding.state == pb.BINDING_STATE_IDLE
    )


def _same(binding: Binding, spec_json: str, version: int, checksum: str) -> bool:
    return (
        binding.spec_json == spec_json
        and binding.version == version
        and (not checksum or binding.weights.checksum == checksum)
    )
