"""The place of one policy among those that share trainer workers: what the binder sees of it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, Final

import structlog

from services.orchestrator.context import JobContext
from services.orchestrator.errors import RENEWABLE
from services.orchestrator.placement.trainer_scheduler import ReadyOrder, TableWatch, ready_work
from services.orchestrator.placement.workers import WorkerHandle
from troupe.rpc import FailedPrecondition, TroupeError, Unavailable, new_id
from troupe.scheduling import binding
from troupe.v1 import common_pb2 as pb
from troupe.v1 import experience_store_pb2 as es
from troupe.v1 import trainer_pb2 as tr

_log = structlog.get_logger(__name__)
# A frozen policy is loaded but never computes.
_FROZEN_COST: Final = 0.25
# States of a step that nothing interrupts.
_UNINTERRUPTED: Final = frozenset({pb.BINDING_STATE_STEPPING, pb.BINDING_STATE_PUBLISHING})
# It is not bound there (any more); of a gang that was lost, nothing is left to suspend.
_UNBOUND: Final = RENEWABLE | {"gang_lost"}
# A policy that could not be suspended is not asked again for so long.
_STUCK_SECONDS: Final = 10.0


class TrainerLease:
    """Where a policy is bound or suspended, and what work it has. See `binder.Seated`.

    Leases of a suspended step are renewed here: nobody else knows of them.
    """

    def __init__(self, job: JobContext, policy: str, tables: TableWatch | None) -> None:
        spec = job.spec.policies[policy]
        self._job, self._policy, self._tables = job, policy, tables
        self._binder = job.shared.binder
        self._trainable = spec.trainable
        self._rules: dict[str, Any] = {
            "cost": 1.0 if spec.trainable else _FROZEN_COST,
            "quantum": spec.trainer.quantum_seconds,
            "idle": spec.trainer.idle_seconds,
        }
        self.name = f"{job.job_id}/{policy}"
        self.worker: WorkerHandle | None = None
        # Whether the worker has bound it since it was seated there.
        self.bound = False
        self.suspended: tr.SuspendedState | None = None
        # The step that it trains, and how far that is.
        self._step: int | None = None
        self.progress: tr.StepEvent | None = None
        self.size = 0
        self._home: WorkerHandle | None = None
        # Who may have something of it: its device, its state, a copy that was fetched ahead.
        self._places: set[WorkerHandle] = set()
        self._prefetched: set[str] = set()
        self._avoid: WorkerHandle | None = None
        # Where state of this size found no room.
        self._barred: set[str] = set()
        self._refusal: FailedPrecondition | None = None
        self._arrivals = ReadyOrder()
        self._bound_at = self._idle_since = time.monotonic()
        # Those that need it bound for something else than a step, and those that use it now.
        self._visits = self._uses = 0
        self._stuck_until = 0.0
        self._leaving: asyncio.Task[None] | None = None
        self._renewing: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        self.swaps, self.swap_seconds = 0, 0.0
        self._binder.add(self)

    # What its policy says.

    @contextmanager
    def visit(self) -> Iterator[None]:
        """It is to be bound although it may have no step: for its weights, or a checkpoint."""
        self._visits += 1
        self._binder.touch()
        try:
            yield
        finally:
            self._visits -= 1
            self._rest()

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """It cannot be suspended meanwhile."""
        self._uses += 1
        try:
            yield
        finally:
            self._uses -= 1
            self._binder.touch()

    @contextmanager
    def training(self, step: int) -> Iterator[None]:
        """A step of it is open."""
        self._step = step
        self._binder.touch()
        try:
            yield
        finally:
            self._step = self.progress = None
            self._rest()

    def note(self, event: tr.StepEvent) -> None:
        """Its step went on."""
        self.progress = event
        self._binder.touch()

    def was_bound(self, size: int) -> None:
        """Its worker has bound it; bytes of its training state, if that is known."""
        self.bound, self.size = True, size or self.size
        self._bound_at = time.monotonic()
        self._binder.touch()

    def vacate(self, avoid: WorkerHandle | None = None) -> None:
        """It is bound nowhere (any more); `avoid`: not there, if there is another."""
        self.worker, self.bound, self._avoid = None, False, avoid
        self._binder.touch()

    def too_large_for(self, worker: WorkerHandle, size: int) -> bool:
        """`worker` has found no room for so many bytes; whether that is so of all there are."""
        self.size = max(self.size, size)
        self._barred.add(worker.worker_id)
        self.vacate()
        usable = self._job.shared.workers.usable(worker.kind)
        return all(one.worker_id in self._barred for one in usable)

    def change(self) -> Coroutine[Any, Any, object]:
        """Wait until it is seated, refused, or has left: from this call on."""
        return self._changed.wait()

    def check(self) -> None:
        """Raise what makes it impossible to bind."""
        if self._refusal is not None:
            raise self._refusal

    async def settled(self) -> None:
        """Wait until a suspension that is under way is over."""
        if self._leaving is not None:
            await asyncio.wait({self._leaving})

    def drop(self) -> None:
        """Its suspended state is used, or of no more use."""
        self.suspended = None
        self._prefetched.clear()
        if self._renewing is not None:
            self._renewing.cancel()
            self._renewing = None

    async def release(self, seconds: float) -> None:
        """Give devices and memory back, wherever it has been. Raises `TroupeError`."""
        places, self._places = self._places, set()
        self.vacate()
        self.drop()
        calls = [self._release_at(one, seconds) for one in places if one.alive]
        for ended in await asyncio.gather(*calls, return_exceptions=True):
            if isinstance(ended, BaseException):
                raise ended

    async def _release_at(self, worker: WorkerHandle, seconds: float) -> None:
        async def ask() -> None:
            await worker.trainer.Release(self._request(tr.ReleaseRequest), timeout=seconds)

        try:
            await ask()
        except TroupeError:
            self._binder.evict(self, worker, ask)
            raise

    def close(self) -> None:
        """Its job has ended."""
        self._binder.remove(self)
        self.drop()
        for task in self._tasks:
            task.cancel()

    # What the binder says; see `binder.Seated`.

    def picture(self, now: float) -> binding.Policy:
        work = self._work()
        self._arrivals.note(work, now)
        oldest = self._arrivals.oldest
        stepping = self.progress is not None and self.progress.state in _UNINTERRUPTED
        stuck = now < self._stuck_until
        barred = set(self._barred)
        if self._avoid is not None and self._others(self._avoid):
            barred.add(self._avoid.worker_id)
        return binding.Policy(
            self.name,
            work=work,
            since=self._idle_since if oldest is None else oldest,
            wanted=self._step is not None or self._visits > 0,
            size=self.size,
            bound_at=self._bound_at,
            busy=self._uses > 0 or stepping or stuck or self._leaving is not None,
            leaving=self._leaving is not None,
            accumulating=self.progress is not None and self.progress.samples > 0,
            prefetched=frozenset(self._prefetched),
            barred=frozenset(barred),
            **self._rules,
        )

    def home(self) -> WorkerHandle | None:
        return None if self.suspended is None else self._home

    def seat(self, worker: WorkerHandle) -> None:
        self.worker, self.bound = worker, False
        self._places.add(worker)
        self._bound_at = time.monotonic()
        self._wake()

    def refuse(self, error: FailedPrecondition) -> None:
        self._refusal = error
        self._wake()

    def leave(self) -> None:
        if self.worker is not None and self._leaving is None:
            self._leaving = self._spawn(self._leave(self.worker))

    def expect(self, worker: WorkerHandle) -> None:
        # Once: whatever comes of it, it is not asked for again.
        self._prefetched.add(worker.worker_id)
        if self.suspended is not None:
            self._places.add(worker)
            self._spawn(self._prefetch(worker, self.suspended))
        # It may come while the one before leaves: the worker brings its state first.
        self._binder.touch()

    def retire(self) -> None:
        self._idle_since = time.monotonic()
        self._spawn(self._retire())

    # How.

    def _work(self) -> int:
        if self._visits:
            return 1
        if self._step is None:
            return 0
        if self._tables is None or self._tables.blind:
            return 1  # nobody says: everyone has a turn
        accumulated = self.suspended.samples if self.suspended is not None else 0
        if self.worker is not None and self.progress is not None:
            accumulated = self.progress.samples
        size = self._job.spec.pipeline.micro_batch_samples
        return ready_work(self._tables.latest(self._step), self._policy, size, accumulated)

    def _others(self, worker: WorkerHandle) -> bool:
        usable = self._job.shared.workers.usable(worker.kind)
        return any(one is not worker for one in usable)

    def _rest(self) -> None:
        self._idle_since = time.monotonic()
        self._binder.touch()

    async def _leave(self, worker: WorkerHandle) -> None:
        seconds = self._job.shared.settings.bind_timeout_seconds
        try:
            async with worker.while_alive():
                if not self._trainable:
                    # Nothing but what is published is needed of a frozen policy.
                    await worker.trainer.Release(self._request(tr.ReleaseRequest), timeout=seconds)
                else:
                    request = self._request(tr.SuspendRequest)
                    response = await worker.trainer.Suspend(request, timeout=seconds)
                    self._home, self.suspended = worker, response.state
                    self.count_swap(response.state.seconds)
                    self._renewing = self._spawn(self._renew(response.state))
        except TroupeError as error:
            gone = isinstance(error, Unavailable) or not worker.alive
            if not gone and error.kind not in _UNBOUND:
                self._stuck_until = time.monotonic() + _STUCK_SECONDS
                self._spawn(self._touch_once_unstuck())
                _log.warning("not suspended", policy=self.name, error=str(error))
                return
        finally:
            self._leaving = None
            self._wake()
        if self.worker is worker:
            self.vacate()
            self._wake()

    async def _touch_once_unstuck(self) -> None:
        await asyncio.sleep(_STUCK_SECONDS)
        self._binder.touch()

    async def _prefetch(self, worker: WorkerHandle, state: tr.SuspendedState) -> None:
        request = self._request(tr.PrefetchRequest, spec_json=self._job.spec_json, state=state)
        try:
            async with worker.while_alive():
                seconds = self._job.shared.settings.bind_timeout_seconds
                await worker.trainer.Prefetch(request, timeout=seconds)
        except TroupeError as error:
            _log.info("not prefetched", policy=self.name, error=str(error))

    async def _retire(self) -> None:
        try:
            await self.release(self._job.shared.settings.cleanup_seconds)
        except TroupeError as error:
            _log.warning("not released", policy=self.name, error=str(error))

    async def _renew(self, state: tr.SuspendedState) -> None:
        """Keep the samples of a suspended step leased, until it goes on."""
        if not state.HasField("step"):
            return
        while True:
            await asyncio.sleep(state.lease_seconds / 3)
            request = es.RenewClaimsRequest(
                request_id=new_id("renew"),
                job_id=self._job.job_id,
                policy=self._policy,
                step=state.step,
                claimant=state.claimant,
                lease_seconds=state.lease_seconds,
            )
            try:
                await self._job.shared.experience.RenewClaims(
                    request, timeout=state.lease_seconds / 2
                )
            except TroupeError as error:
                # Who resumes it finds out whether they were lost: then its step begins again.
                _log.warning("leases not renewed", policy=self.name, error=str(error))

    def _request(self, kind: Any, **more: Any) -> Any:
        return kind(request_id=new_id("seat"), job_id=self._job.job_id, policy=self._policy, **more)

    def count_swap(self, seconds: float) -> None:
        """It came to, or left, a device that did not compute for so long."""
        self.swaps += 1
        self.swap_seconds += seconds

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
        self._binder.touch()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
