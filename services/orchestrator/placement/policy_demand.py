"""Demands of a policy on trainer workers: its work, and the memory that its training needs."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from services.orchestrator.context import JobContext
from services.orchestrator.placement.trainer_scheduler import TableWatch, ready_work
from services.orchestrator.placement.workers import WorkerHandle
from troupe.job import ModelSpec, PolicySpec
from troupe.job.sizing import read_shape, setup_of
from troupe.scheduling import binding
from troupe.scheduling.memory import ModelShape, RankMemory, TrainingSetup, rank_memory
from troupe.scheduling.precedence import waiting_seconds
from troupe.v1 import common_pb2 as common_pb
from troupe.v1 import orchestrator_pb2 as orchestrator_pb
from troupe.v1 import trainer_pb2 as trainer_pb

# Scheduling cost of a frozen policy, which is loaded but never computes.
_FROZEN_COST: Final = 0.25
# States of a step in which a policy cannot be suspended.
_UNINTERRUPTED: Final = frozenset(
    {common_pb.BINDING_STATE_STEPPING, common_pb.BINDING_STATE_PUBLISHING}
)


class PolicyDemand:
    """The work of one policy, its age, and other callers that need the policy bound."""

    def __init__(
        self,
        job: JobContext,
        policy: str,
        tables: TableWatch | None,
        touch_scheduler: Callable[[], None],
    ) -> None:
        """`tables`: say how much work of a step is ready; None: unknown."""
        self._policy, self._tables = policy, tables
        self._micro_batch = job.spec.pipeline.micro_batch_samples
        self._touch_scheduler = touch_scheduler
        spec = job.spec.policies[policy]
        self._rules: dict[str, Any] = {
            "ranks": _ranks_of(spec),
            "ahead": waiting_seconds(job.spec.priority),
            "cost": 1.0 if spec.trainable else _FROZEN_COST,
            "quantum": spec.trainer.quantum_seconds,
            "idle": spec.trainer.idle_seconds,
        }
        self.memory = TrainingMemory(job, policy, touch_scheduler)
        # The open step, and its newest event.
        self._step: int | None = None
        self.progress: trainer_pb.StepEvent | None = None
        # Callers that need it bound for something other than a step, and callers that use it now.
        self._needs = self._uses = 0
        self._arrivals = binding.ReadyOrder()
        self._idle_since = time.monotonic()

    @property
    def has_work(self) -> bool:
        """Whether work was ready when it was last looked at."""
        return self._arrivals.oldest is not None

    @contextmanager
    def needed(self) -> Iterator[None]:
        """Ask for a worker although no step is open: for weights, or a checkpoint."""
        self._needs += 1
        self._touch_scheduler()
        try:
            yield
        finally:
            self._needs -= 1
            self._mark_idle()

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Prevent suspension meanwhile."""
        self._uses += 1
        try:
            yield
        finally:
            self._uses -= 1
            self._touch_scheduler()

    @contextmanager
    def training(self, step: int) -> Iterator[None]:
        """Mark a step of the policy as open meanwhile."""
        self._step = step
        self._touch_scheduler()
        try:
            yield
        finally:
            self._step = self.progress = None
            self._mark_idle()

    def note(self, event: trainer_pb.StepEvent) -> None:
        """Take an event of the open step."""
        self.progress = event
        self._touch_scheduler()

    def restart_idle_time(self) -> None:
        """Count the policy as idle from now on."""
        self._idle_since = time.monotonic()

    def view(
        self, name: str, now: float, *, assigned: bool, suspended: trainer_pb.SuspendedState | None
    ) -> binding.Policy:
        """Return the demand for `binding.decide`, without what follows from the policy's workers.

        `assigned`: whether a worker has the policy; `suspended`: its suspended state.
        """
        progress = self.progress
        accumulated = suspended.samples if suspended is not None else 0
        if assigned and progress is not None:
            accumulated = progress.samples
        work = self._work(accumulated)
        self._arrivals.note(work, now)
        oldest = self._arrivals.oldest
        return binding.Policy(
            name,
            work=work,
            since=self._idle_since if oldest is None else oldest,
            wanted=self._step is not None or self._needs > 0,
            busy=self._uses > 0 or (progress is not None and progress.state in _UNINTERRUPTED),
            accumulating=progress is not None and progress.samples > 0,
            **self.memory.needed(),
            **self._rules,
        )

    def _work(self, accumulated: int) -> int:
        """Return the micro-batches that could be computed now; `accumulated` samples were computed
        already."""
        if self._needs:
            return 1
        if self._step is None:
            return 0
        if self._tables is None or self._tables.blind:
            return 1  # the amount of work is unknown, so the policy takes its turn
        status = self._tables.latest(self._step)
        return ready_work(status, self._policy, self._micro_batch, accumulated)

    def _mark_idle(self) -> None:
        self.restart_idle_time()
        self._touch_scheduler()


class TrainingMemory:
    """Training settings and memory per device of one policy, by kind of worker."""

    def __init__(self, job: JobContext, policy: str, touch_scheduler: Callable[[], None]) -> None:
        self._job, self._policy = job, policy
        self._touch_scheduler = touch_scheduler
        # Bytes of training state on each device, as a trainer said; 0: unknown.
        self._state_bytes = 0
        # The model's shape, if this machine can read the configuration.
        self._shape: ModelShape | None = None
        # By a worker's device type and memory.
        self._setups: dict[tuple[str, int, int], tuple[TrainingSetup, RankMemory]] = {}
        self._reading: asyncio.Task[None] | None = None
        spec = job.spec.policies[policy]
        if spec.model is not None and spec.simulated is None:
            self._reading = asyncio.create_task(self._read_shape(spec.model))

    def close(self) -> None:
        """Stop reading the model's configuration."""
        if self._reading is not None:
            self._reading.cancel()

    def measured(self, state_bytes: int) -> None:
        """Note the bytes of training state on each device, as a worker said; 0 if unknown."""
        self._state_bytes = state_bytes or self._state_bytes

    def exceeds(self, state_bytes: int) -> None:
        """Note that a device had no room for so many bytes of training state."""
        if self._shape is None:
            self._state_bytes = max(self._state_bytes, state_bytes)

    def needed(self) -> dict[str, Any]:
        """Return the memory fields of `binding.Policy`."""
        workers = self._job.shared.workers.usable(orchestrator_pb.WORKER_KIND_TRAINER)
        if self._shape is None:
            # A pass may need a quarter of a GPU in addition to the state.
            gpus = [one for one in workers if one.beat.trainer.device == "cuda"]
            quarter = {one.worker_id: one.beat.trainer.memory_bytes // 4 for one in gpus}
            return {"size": self._state_bytes, "working": quarter}
        found = {one.worker_id: self._setup_on(self._shape, one)[1] for one in workers}
        if not found:
            return {"size": self._state_bytes}
        some = next(iter(found.values()))  # the state is the same on all devices
        model = self._job.spec.policies[self._policy].language_model
        return {
            # A gang with all weights on each of its hosts has said so.
            "size": max(some.state - some.base, self._state_bytes),
            "base": model.model_dump_json() if some.base else "",
            "base_size": some.base,
            "working": {worker_id: needed.working for worker_id, needed in found.items()},
        }

    async def specification_on(self, *group: WorkerHandle) -> str:
        """Return the job's specification (JSON) for a group of workers, with
        `activation_checkpointing: auto` turned off if all of its devices are GPUs with room for the
        activations. Else the trainer decides: on a GPU for models whose layers can do it."""
        spec = self._job.spec.policies[self._policy]
        wish = spec.trainer.activation_checkpointing
        if wish != "auto" or not spec.trainable or self._reading is None:
            return self._job.spec_json
        await asyncio.wait({self._reading})
        if self._shape is None:
            return self._job.spec_json
        found = [self._setup_on(self._shape, one)[0] for one in group]
        if any(one.checkpointing or one.device == "cpu" for one in found):
            return self._job.spec_json
        values = json.loads(self._job.spec_json)
        trainer = values["policies"][self._policy].setdefault("trainer", {})
        trainer["activation_checkpointing"] = False
        return json.dumps(values)

    def resolved(
        self, settings: Iterable[common_pb.ResolvedSetting]
    ) -> list[common_pb.ResolvedSetting]:
        """Return the resolved settings as a trainer reported them, with the memory model as the
        source of what `specification_on` decided, which a trainer cannot tell from what the job
        says."""
        wish = self._job.spec.policies[self._policy].trainer.activation_checkpointing
        field = f"policies.{self._policy}.trainer.activation_checkpointing"
        found = list(settings)
        for one in found:
            if wish == "auto" and (one.field, one.source) == (field, "given"):
                one.source = "memory model"
        return found

    async def _read_shape(self, model: ModelSpec) -> None:
        self._shape = await asyncio.to_thread(read_shape, model)
        self._touch_scheduler()

    def _setup_on(
        self, shape: ModelShape, worker: WorkerHandle
    ) -> tuple[TrainingSetup, RankMemory]:
        """Return how each device of `worker` trains the policy, and the memory that it needs."""
        beat, job = worker.beat.trainer, self._job.spec
        kind = device, memory, tokens = beat.device or "cpu", beat.memory_bytes, beat.forward_tokens
        if kind not in self._setups:
            setup = setup_of(
                job, self._policy, shape, device=device, memory=memory, forward_tokens=tokens
            )
            self._setups[kind] = setup, rank_memory(shape, setup)
        return self._setups[kind]


def _ranks_of(policy: PolicySpec) -> int:
    """Return the devices that train a policy together."""
    whole = not policy.trainable or policy.simulated is not None
    return 1 if whole else policy.trainer.ranks
