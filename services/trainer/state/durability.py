"""Training state that becomes durable behind the steps, and what a crash meanwhile needs.

A step may be committed before its state is on disk. Then the experience store keeps the step's
rows, by micro-batch, and `Durability` copies weights, optimizer and random generators to host
memory every few steps and has one thread write the copy while the next steps run. A worker that
binds a version which is on no disk loads the newest one that is, and computes the later steps again
from their rows (`recovery`). `troupe.scheduling.durability` decides how often.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, TypeVar

import structlog
import torch

from services.trainer.settings import TrainerSettings
from services.trainer.state.parameter_memory import can_pin
from services.trainer.state.suspension import below, under
from services.trainer.state.training_state import Snapshot, StateStore, TrainingState
from troupe.checkpoints.adapters import Tensors
from troupe.contracts import kinds
from troupe.devices import host_memory
from troupe.job import JobSpec
from troupe.prefixes import restore
from troupe.rpc import TroupeError, new_id
from troupe.rpc.channel import connect_sync
from troupe.scheduling.durability import StateCosts, StatePlan, is_due, plan_states
from troupe.v1 import experience_store_pb2 as store_pb
from troupe.v1 import experience_store_pb2_grpc as store_grpc

log = structlog.get_logger("troupe.trainer")
T = TypeVar("T")

# Deadline in seconds of a call to the experience store.
_CALL_SECONDS: Final = 60.0
# A commit comes soon if the state that is written before it takes no longer. Engines that hold the
# weights meanwhile wait longer (`services.rollout.engines.base.COMMIT_SECONDS`).
_SOON_SECONDS: Final = 30.0
# Share of the free host memory that a copy may take.
_MEMORY_SHARE: Final = 0.8
# The writer yields to threads that compute, where cores are short (as `nice`).
_NICENESS: Final = 10


class KeptRowsClient:
    """Client of the experience store for the kept rows of one policy. Blocking; thread-safe."""

    def __init__(
        self, settings: TrainerSettings, job_id: str, policy: str, step_seconds: float
    ) -> None:
        """`step_seconds`: limit of a step, so also of reading its rows while it is made again."""
        self._settings, self._step_seconds = settings, step_seconds
        self._named = {"job_id": job_id, "policy": policy}

    def describe(self) -> store_pb.DescribeKeptRowsResponse:
        """Return the version that the store knows to be on disk, and the later ones that it has
        rows of.

        Empty for a job that has no tables.
        """
        request = store_pb.DescribeKeptRowsRequest(**self._named)
        with self._store() as store:
            try:
                found: store_pb.DescribeKeptRowsResponse = store.DescribeKeptRows(
                    request, timeout=_CALL_SECONDS
                )
            except TroupeError as error:
                if error.kind not in (kinds.TABLES_NOT_FOUND, kinds.UNKNOWN_POLICY):
                    raise
                found = store_pb.DescribeKeptRowsResponse()
            return found

    def read(
        self, version: int
    ) -> Iterator[tuple[Sequence[store_pb.ClaimedSample], store_pb.PairSums | None]]:
        """Yield the micro-batches that made `version`, in the order of their accumulation; last,
        without samples, the sums of its joint pairs, if there were any.

        Raises DataLoss of kind "kept_rows_gone" when they are not kept any more.
        """
        request = store_pb.ReadKeptRowsRequest(version=version, **self._named)
        with self._store() as store:
            for batch in store.ReadKeptRows(request, timeout=self._step_seconds):
                yield restore(batch.samples), batch.sums if batch.HasField("sums") else None

    def free(self, version: int, checksum: str) -> None:
        """Tell the store that `version` is on disk."""
        request = store_pb.FreeKeptRowsRequest(
            request_id=new_id("free"), version=version, checksum=checksum, **self._named
        )
        with self._store() as store:
            store.FreeKeptRows(request, timeout=_CALL_SECONDS)

    @contextlib.contextmanager
    def _store(self) -> Iterator[Any]:
        where, client = self._settings.experience_store_address, self._settings.client()
        with contextlib.closing(connect_sync(where, client)) as channel:
            yield store_grpc.ExperienceStoreStub(channel)


class HostCopy:
    """Host memory for one copy of a policy's tensors, reused by the next copy: fresh pages, and
    pinned ones all the more, cost several times as much as the copy itself."""

    def __init__(self, device: torch.device, *, sharers: int = 1) -> None:
        """`sharers`: how many processes of this host make such a copy at once."""
        self._pinned = can_pin(device)
        self._device, self._sharers = device, sharers
        self._buffers: Tensors = {}

    def fits(self, tensors: Mapping[str, torch.Tensor]) -> bool:
        """Return whether the host has the memory that the buffers lack."""
        needed = sum(t.nbytes for name, t in tensors.items() if not self._has(name, t))
        return needed * self._sharers <= host_memory()[1] * _MEMORY_SHARE

    def reserve(self, tensors: Mapping[str, torch.Tensor]) -> bool:
        """Have memory for a copy of tensors of these shapes; what the last copy lacks is fresh, and
        written to once. False, and none, where others have taken it since `fits`."""
        for gone in self._buffers.keys() - tensors.keys():
            del self._buffers[gone]
        try:
            for name, tensor in tensors.items():
                if not self._has(name, tensor):
                    self._buffers.pop(name, None)
                    self._buffers[name] = torch.zeros(
                        tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=self._pinned
                    )
        except (RuntimeError, MemoryError) as error:  # torch has no type of its own for the host's
            log.warning("no host memory for a copy of the state", error=str(error))
            self.give_back()
            return False
        return True

    def take(self, tensors: Mapping[str, torch.Tensor]) -> Tensors | None:
        """Copy `tensors`; complete when this returns. The last copy is overwritten. None as
        `reserve`."""
        if not self.reserve(tensors):
            return None
        for name, tensor in tensors.items():
            self._buffers[name].copy_(tensor.detach(), non_blocking=self._pinned)
        if self._pinned:
            torch.cuda.synchronize(self._device)
        return dict(self._buffers)

    def give_back(self) -> None:
        """Free the memory; the last copy must not be in use."""
        self._buffers = {}

    def _has(self, name: str, tensor: torch.Tensor) -> bool:
        have = self._buffers.get(name)
        return have is not None and (have.shape, have.dtype) == (tensor.shape, tensor.dtype)


@dataclass(frozen=True)
class Recovery:
    """How a version that is on no disk is computed: the state to load, and the steps after it."""

    version: int
    checksum: str
    commits: Sequence[store_pb.StepCommit]


class Durability:
    """When states of one policy are written, by whom, and how steps since then are found again.

    The methods block and belong to the compute thread, unless they say otherwise.
    """

    def __init__(
        self, spec: JobSpec, states: StateStore, settings: TrainerSettings, device: torch.device
    ) -> None:
        self._spec, self._states = spec, states
        limit = spec.limits.step_seconds
        self.rows = KeptRowsClient(settings, states.job_id, states.policy, limit)
        self._copy = HostCopy(device)
        # Of the newest version that is on disk, and of the newest that is so or is being written.
        self.durable = self._begun = 0
        self._costs = StateCosts()
        self._over_high_water = False
        # Why the last write in the background failed: then the next step writes before its commit.
        self.failure: Exception | None = None
        self._writer: concurrent.futures.Executor | None = None
        self._writing: concurrent.futures.Future[None] | None = None
        # Getting memory for the first copy.
        self._reserving: concurrent.futures.Future[bool] | None = None
        self._lock = threading.Lock()
        # What the next commit reports.
        self._metrics: dict[str, float] = {}

    # Decisions.

    def keeps_rows(self, step: int, committed: int, *, copies: bool) -> bool:
        """Return whether this step may be committed before its state is on disk, so that its rows
        have to be kept from its first micro-batch on.

        `copies`: whether the learner's state can be copied (`PolicyLearner.copies`).
        """
        spec, plan = self._spec, self._plan()
        if spec.population is not None or self.failure is not None or self._is_wanted(step):
            return False
        due_then = committed + 1 - self._begun >= plan.every
        if plan.background and copies:
            return True
        return not due_then and not self._over_high_water

    def commits_soon(self, *, keeping: bool) -> bool:
        """Return whether a step, whose weights are made, waits for no long write before its
        commit. `keeping`: as `keeps_rows` has said."""
        writing = self._costs.writing
        return keeping or (writing is not None and writing <= _SOON_SECONDS)

    def _plan(self) -> StatePlan:
        return plan_states(self._spec.state.every, self._spec.state.background, self._costs)

    def _is_wanted(self, step: int) -> bool:
        """Return whether the state that `step` makes is needed on disk at once: by a checkpoint, or
        because it is the last one."""
        spec, done = self._spec, step + 1
        every = [spec.checkpoint.every, *spec.best_intervals]
        return done >= spec.pipeline.steps or any(n and done % n == 0 for n in every)

    # Writing.

    def save(self, state: TrainingState) -> None:
        """Write `state` before this returns. Raises as `StateStore.save`."""
        self.settle()
        began = time.perf_counter()
        self._states.save(state)
        seconds = time.perf_counter() - began
        self._costs = replace(self._costs, writing=seconds)
        self._metrics["train/state_write_seconds"] = seconds

    def saved(self, version: int) -> None:
        """Note that `version`, which is committed, is on disk. In any thread."""
        with self._lock:
            self.durable = max(self.durable, version)
            self._begun = max(self._begun, version)
            self.failure = None

    def loaded(self, version: int) -> None:
        """Note that `version` was loaded from disk."""
        with self._lock:
            self.durable = self._begun = version

    def write_behind(
        self,
        state: TrainingState,
        prune: Callable[[int], None],
        *,
        over_high_water: bool = False,
        at_once: bool = False,
    ) -> None:
        """Have a copy of the committed `state` written while later steps run, if it is time.

        At most one copy exists: when twice as many steps as planned are behind, this waits until
        the one before is written. Without memory for a copy the state is written before this
        returns. `prune` deletes older states; `at_once`: do not wait for the planned step.
        """
        self._over_high_water = over_high_water
        mine = state.snapshot
        tensors = under("weights", mine.weights) | under("moments", mine.moments)
        busy = self._writing is not None and not self._writing.done()
        behind = state.version - self._begun
        if self._reserving is None and tensors and self._copy.fits(tensors):
            self._reserving = self._in_background(self._copy.reserve, tensors)
        if not at_once and not is_due(
            self._plan(), behind, over_high_water=over_high_water, writing=busy
        ):
            return
        self.settle()
        if self.failure is not None and not at_once:
            return  # the next step writes before its commit, which says what is wrong
        if self._reserving is not None:
            self._reserving.result()
        began = time.perf_counter()
        try:
            copy = self._copied(state, tensors)
        except TroupeError as error:
            # A gang has lost a rank. The step is committed: the next one finds out.
            log.warning("state not copied", error=str(error), **self._about())
            return
        if copy is None:
            log.warning("no host memory for a copy: the state is written at once", **self._about())
            self._write(state, prune)
            return
        seconds = time.perf_counter() - began
        self._costs = replace(self._costs, copying=seconds)
        self._metrics["train/state_copy_seconds"] = seconds
        with self._lock:
            self._begun = state.version
        self._writing = self._in_background(self._write, copy, prune)

    def _copied(self, state: TrainingState, tensors: Tensors) -> TrainingState | None:
        """Return the state over a copy of its tensors, or of a gang's shards; None without
        memory."""
        if state.snapshot.copy_parts is not None:
            write = state.snapshot.copy_parts()
            return None if write is None else replace(state, snapshot=Snapshot(write_parts=write))
        if not self._copy.fits(tensors) or (copied := self._copy.take(tensors)) is None:
            return None
        copy = Snapshot(below("weights", copied), below("moments", copied))
        return replace(state, snapshot=copy)

    def _in_background(self, call: Callable[..., T], *args: Any) -> concurrent.futures.Future[T]:
        if self._writer is None:
            self._writer = concurrent.futures.ThreadPoolExecutor(1, "state", initializer=step_back)
        return self._writer.submit(call, *args)

    def _write(self, state: TrainingState, prune: Callable[[int], None]) -> None:
        """Write, tell the store, delete older states. A failure is kept, not raised."""
        began = time.perf_counter()
        try:
            self._states.save(state)
        except Exception as error:  # of any kind: later steps, and `close`, wait for this thread
            with contextlib.suppress(OSError):
                if max(self._states.versions(), default=-1) > state.version:
                    return  # another worker has written a later one, and swept this one away
            log.error("state not written", error=str(error), version=state.version, **self._about())
            with self._lock:
                self.failure, self._begun = error, self.durable
            return
        seconds = time.perf_counter() - began
        self._costs = replace(self._costs, writing=seconds)
        self._metrics["train/state_write_seconds"] = seconds
        self.saved(state.version)
        self.free_rows(state.version, state.checksum)
        with contextlib.suppress(OSError):  # what is left is deleted with the next
            prune(state.version)

    def free_rows(self, version: int, checksum: str) -> None:
        """Tell the store that `version` is on disk. A failure is logged: the next state tells."""
        try:
            self.rows.free(version, checksum)
        except TroupeError as error:
            log.warning("rows are kept longer", error=str(error), **self._about())

    def settle(self) -> None:
        """Wait until no state is being written. In any thread."""
        if (writing := self._writing) is not None:
            writing.result()

    def close(self) -> None:
        """End the thread and free the copy's memory, once it is written. In any thread."""
        self.settle()
        if self._reserving is not None:
            self._reserving.result()
        self._copy.give_back()
        if self._writer is not None:
            self._writer.shutdown(wait=False)
        self._writer = self._writing = self._reserving = None

    # Measurements.

    def stepped(self, seconds: float) -> None:
        """Note how long a step took without its state."""
        self._costs = replace(self._costs, step=seconds)

    def metrics(self, version: int) -> dict[str, float]:
        """Return metrics of writing since the last call, and how many steps `version` is ahead of
        the newest state on disk."""
        found, self._metrics = self._metrics, {}
        return {**found, "train/state_steps_behind": float(max(0, version - self.durable))}

    # After a crash.

    def recovery(self, version: int, checksum: str) -> Recovery | None:
        """Return how to compute `version` if no disk has it and the store has kept its rows.

        Raises Unavailable while the store does not answer.
        """
        self.settle()
        if version == 0 or self._states.exists(version, checksum):
            return None
        found = self.rows.describe()
        commits = [one.commit for one in found.versions if one.commit.weights.version <= version]
        wanted = range(version - len(commits) + 1, version + 1)
        if not commits or [one.weights.version for one in commits] != list(wanted):
            return None  # it is on another host's disk, or lost: `StateStore.load` finds out
        if checksum and commits[-1].weights.checksum != checksum:
            return None
        # A later state may be on disk, of which the store was not told.
        for index in range(len(commits) - 1, 0, -1):
            weights = commits[index - 1].weights
            if self._states.exists(weights.version, weights.checksum):
                return Recovery(weights.version, weights.checksum, commits[index:])
        base = commits[0].weights.version - 1
        known = found.HasField("durable_version") and found.durable_version == base
        return Recovery(base, found.durable_checksum if known else "", commits)

    def recomputed(self, steps: int, seconds: float) -> None:
        """Note that so many steps were computed again."""
        self._metrics["train/state_recomputed_steps"] = float(steps)
        log.info("steps computed again", steps=steps, seconds=round(seconds, 3), **self._about())

    def _about(self) -> dict[str, str]:
        return {"job_id": self._states.job_id, "policy": self._states.policy}


def step_back() -> None:
    """Give this thread a lower priority, where the system has one for threads."""
    with contextlib.suppress(OSError, AttributeError):
        me = threading.get_native_id()
        os.sched_setscheduler(me, os.SCHED_BATCH, os.sched_param(0))
        os.setpriority(os.PRIO_PROCESS, me, _NICENESS)
