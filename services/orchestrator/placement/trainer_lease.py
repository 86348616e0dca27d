"""The lease of one policy on a trainer worker, as the trainer scheduler gives and takes it.

Of a gang over several workers: on its leader, which trains the policy, and on the *members*, which
only run ranks for it.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import AsyncIterator, Coroutine, Iterable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from typing import Any, Final

import structlog

from services.orchestrator.context import JobContext
from services.orchestrator.errors import RENEWABLE
from services.orchestrator.placement.trainer_scheduler import TableWatch, ready_work
from services.orchestrator.placement.workers import WorkerHandle
from troupe.job import ModelSpec, PolicySpec
from troupe.job.sizing import read_shape, setup_of
from troupe.rpc import FailedPrecondition, TroupeError, Unavailable, new_id
from troupe.scheduling import binding
from troupe.scheduling.memory import ModelShape, RankMemory, TrainingSetup, rank_memory
from troupe.v1 import common_pb2 as pb
from troupe.v1 import experience_store_pb2 as es
from troupe.v1 import orchestrator_pb2 as orch
from troupe.v1 import trainer_pb2 as tr

_log = structlog.get_logger(__name__)
# Scheduling cost of a frozen policy, which is loaded but never computes.
_FROZEN_COST: Final = 0.25
# States of a step in which a policy cannot be suspended.
_UNINTERRUPTED: Final = frozenset({pb.BINDING_STATE_STEPPING, pb.BINDING_STATE_PUBLISHING})
# Kinds of errors that say that the policy is not bound there; of a lost gang nothing is left.
_UNBOUND: Final = RENEWABLE | {"gang_lost"}
# Pause before a policy that could not be suspended is asked again.
_STUCK_SECONDS: Final = 10.0
# When the monotonic clock began. Of two gangs the one that was formed later has the devices: a jump
# of the wall clock must not change their order.
_BEGIN_NS: Final = time.time_ns() - time.monotonic_ns()


class TrainerLease:
    """Where a policy is bound or suspended, and how much work it has.

    `PolicyTrainer` uses the first part of the methods, `TrainerScheduler` the second. While a step
    is suspended, its samples' claims in the store are renewed here.
    """

    def __init__(self, job: JobContext, policy: str, tables: TableWatch | None) -> None:
        spec = job.spec.policies[policy]
        self._job, self._policy, self._tables = job, policy, tables
        self._scheduler = job.shared.trainer_scheduler
        self._trainable = spec.trainable
        self._rules: dict[str, Any] = {
            "ranks": ranks_of(spec),
            "cost": 1.0 if spec.trainable else _FROZEN_COST,
            "quantum": spec.trainer.quantum_seconds,
            "idle": spec.trainer.idle_seconds,
        }
        self.name = f"{job.job_id}/{policy}"
        self.worker: WorkerHandle | None = None
        self._members: tuple[WorkerHandle, ...] = ()
        # When the group of workers was assigned, in nanoseconds since 1970.
        self._formed = 0
        # Since when there are too few devices for its first gang, and how many there are.
        self._short_since: float | None = None
        self.shortage: binding.TooManyRanks | None = None
        # Whether it was bound before, perhaps by an earlier orchestrator.
        self.was_bound = False
        # Whether the assigned worker has bound the policy.
        self.bound = False
        self.suspended: tr.SuspendedState | None = None
        # The open step, and its newest event.
        self._step: int | None = None
        self.progress: tr.StepEvent | None = None
        # Bytes of training state on each device, as a trainer said; 0: unknown.
        self.size = 0
        # What its model is, if this machine can read the configuration, and what each device of a
        # worker needs for it, by the worker's device type and memory.
        self._shape: ModelShape | None = None
        self._setups: dict[tuple[str, int, int], tuple[TrainingSetup, RankMemory]] = {}
        self._reading: asyncio.Task[None] | None = None
        self._suspended_on: WorkerHandle | None = None
        # Workers that may hold something of the policy: a binding, a state, a prefetched copy.
        self._touched: set[WorkerHandle] = set()
        self._prefetched: set[str] = set()
        self._avoid: WorkerHandle | None = None
        # Ids of workers without room for a state of this size.
        self._barred: set[str] = set()
        self._refusal: FailedPrecondition | None = None
        self._arrivals = binding.ReadyOrder()
        self._bound_at = self._idle_since = time.monotonic()
        # Callers that need it bound for something else than a step, and those that use it now.
        self._needs = self._uses = 0
        self._stuck_until = 0.0
        self._suspending: asyncio.Task[None] | None = None
        self._renewing: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        self.swaps, self.swap_seconds = 0, 0.0
        # Seconds that its last suspension, and its last resumption, cost.
        self._moved_out = self._moved_in = 0.0
        if spec.model is not None and spec.simulated is None:
            self._reading = self._spawn(self._read_shape(spec.model))
        self._scheduler.add(self)

    # Called by the policy's trainer.

    @contextmanager
    def needed(self) -> Iterator[None]:
        """Asks for a worker although no step is open: for weights, or a checkpoint."""
        self._needs += 1
        self._scheduler.touch()
        try:
            yield
        finally:
            self._needs -= 1
            self._mark_idle()

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Prevents suspension meanwhile."""
        self._uses += 1
        try:
            yield
        finally:
            self._uses -= 1
            self._scheduler.touch()

    @contextmanager
    def training(self, step: int) -> Iterator[None]:
        """Marks a step of the policy as open meanwhile."""
        self._step = step
        self._scheduler.touch()
        try:
            yield
        finally:
            self._step = self.progress = None
            self._mark_idle()

    def note(self, event: tr.StepEvent) -> None:
        """Takes an event of the open step."""
        self.progress = event
        self._scheduler.touch()

    def resumed(self, seconds: float) -> None:
        """Notes a resumption that kept a device from computing for `seconds`."""
        self._moved_in = seconds
        self._count_swap(seconds)

    def mark_bound(self, size: int) -> None:
        """Notes that the worker has bound the policy; `size`: bytes of its state on each device, 0
        if unknown."""
        self.bound, self.size = True, size or self.size
        self.was_bound = True
        self._bound_at = time.monotonic()
        self._scheduler.touch()

    def unassign(self, avoid: WorkerHandle | None = None) -> None:
        """Gives the worker up; `avoid` is not assigned again while there is another worker."""
        self.worker, self.bound, self._avoid = None, False, avoid
        self._members = ()
        self._scheduler.touch()

    @property
    def group(self) -> tuple[WorkerHandle, ...]:
        """The workers assigned to it, the leader first."""
        return () if self.worker is None else (self.worker, *self._members)

    @property
    def broken(self) -> bool:
        """Whether a worker was lost that ran ranks for its gang."""
        return not all(member.alive for member in self._members)

    @property
    def avoided(self) -> str:
        """Id of the worker that is not assigned again while there is another."""
        return "" if self._avoid is None else self._avoid.worker_id

    @property
    def hosts(self) -> tr.GangHosts | None:
        """The members, for the leader; None for a gang of one worker."""
        members = [member.address for member in self._members]
        return tr.GangHosts(members=members, formed=self._formed) if members else None

    @asynccontextmanager
    async def while_alive(self, worker: WorkerHandle) -> AsyncIterator[None]:
        """Cancels its body when `worker` or a member is lost, and raises `Unavailable` instead."""
        async with AsyncExitStack() as stack:
            for one in (worker, *self._members):
                await stack.enter_async_context(one.while_alive())
            yield

    def give_up_group(self) -> None:
        """Has the leader release the policy, then gives all of its workers up."""
        if self.worker is not None and self._suspending is None:
            self.bound = False
            self._suspending = self._spawn(self._give_up_group(self.worker))

    async def _give_up_group(self, leader: WorkerHandle) -> None:
        try:
            if leader.alive:
                await self._release_at(leader, self._job.shared.settings.cleanup_seconds)
        except TroupeError as error:
            _log.warning("not released", policy=self.name, error=str(error))
        finally:
            self._suspending = None
            if self.worker is leader:
                self.unassign()
            self._notify()

    def too_large_for(self, worker: WorkerHandle, size: int) -> bool:
        """Notes that a device of `worker` has no room for the `size` bytes that the policy needs;
        whether that holds for all workers."""
        if self._shape is None:
            self.size = max(self.size, size)
        self._barred.add(worker.worker_id)
        self.unassign()
        usable = self._job.shared.workers.usable(worker.kind)
        return all(one.worker_id in self._barred for one in usable)

    def change(self) -> Coroutine[Any, Any, object]:
        """Waits until a worker is assigned, refused or given up, from the time of this call on."""
        return self._changed.wait()

    def check(self) -> None:
        """Raises the scheduler's refusal, if the policy fits on no worker."""
        if self._refusal is not None:
            raise self._refusal

    async def settled(self) -> None:
        """Waits until a running suspension is over."""
        if self._suspending is not None:
            await asyncio.wait({self._suspending})

    def discard_suspended(self) -> None:
        """Forgets the suspended state, which is in use again or of no use."""
        self.suspended = None
        self._prefetched.clear()
        if self._renewing is not None:
            self._renewing.cancel()
            self._renewing = None

    async def release(self, seconds: float) -> None:
        """Frees devices and memory of all workers that hold something. Raises `TroupeError`."""
        touched, self._touched = self._touched, set()
        self.unassign()
        self.discard_suspended()
        calls = [self._release_at(one, seconds) for one in touched if one.alive]
        for ended in await asyncio.gather(*calls, return_exceptions=True):
            if isinstance(ended, BaseException):
                raise ended

    async def _release_at(self, worker: WorkerHandle, seconds: float) -> None:
        async def ask() -> None:
            await worker.trainer.Release(self._request(tr.ReleaseRequest), timeout=seconds)

        try:
            await ask()
        except TroupeError:
            self._scheduler.evict(self, worker, ask)
            raise

    def close(self) -> None:
        """Ends the lease with its job."""
        self._scheduler.remove(self)
        self.discard_suspended()
        for task in self._tasks:
            task.cancel()

    # Called by the trainer scheduler.

    def scheduling_view(self, now: float) -> binding.Policy:
        """The policy's demand, for `binding.decide`; the scheduler adds where the policy is."""
        work = self._work()
        self._arrivals.note(work, now)
        oldest = self._arrivals.oldest
        stepping = self.progress is not None and self.progress.state in _UNINTERRUPTED
        stuck = now < self._stuck_until
        barred = set(self._barred)
        if self._avoid is not None and self._others_usable(self._avoid):
            barred.add(self._avoid.worker_id)
        needed = self._memory_needed()
        return binding.Policy(
            self.name,
            work=work,
            since=self._idle_since if oldest is None else oldest,
            wanted=self._step is not None or self._needs > 0,
            **needed,
            bound_at=self._bound_at,
            busy=self._uses > 0 or stepping or stuck or self._suspending is not None,
            leaving=self._suspending is not None,
            accumulating=self.progress is not None and self.progress.samples > 0,
            prefetched=frozenset(self._prefetched),
            barred=frozenset(barred),
            swap=self._moved_out + self._moved_in,
            **self._rules,
        )

    async def _read_shape(self, model: ModelSpec) -> None:
        self._shape = await asyncio.to_thread(read_shape, model)
        self._scheduler.touch()

    def _memory_needed(self) -> dict[str, Any]:
        """The memory fields of `binding.Policy`."""
        workers = self._job.shared.workers.usable(orch.WORKER_KIND_TRAINER)
        if self._shape is None:
            # A pass may need a quarter of a GPU besides the state.
            gpus = [one for one in workers if one.beat.trainer.device == "cuda"]
            quarter = {one.worker_id: one.beat.trainer.memory_bytes // 4 for one in gpus}
            return {"size": self.size, "working": quarter}
        found = {one.worker_id: self._setup_on(self._shape, one)[1] for one in workers}
        if not found:
            return {"size": self.size}
        some = next(iter(found.values()))  # the state is the same on all devices
        model = self._job.spec.policies[self._policy].language_model
        return {
            "size": some.state - some.base,
            "base": model.model_dump_json() if some.base else "",
            "base_size": some.base,
            "working": {worker_id: needed.working for worker_id, needed in found.items()},
        }

    def _setup_on(
        self, shape: ModelShape, worker: WorkerHandle
    ) -> tuple[TrainingSetup, RankMemory]:
        """How each device of `worker` trains the policy, and the memory that it needs."""
        beat, job = worker.beat.trainer, self._job.spec
        kind = device, memory, tokens = beat.device or "cpu", beat.memory_bytes, beat.forward_tokens
        if kind not in self._setups:
            setup = setup_of(
                job, self._policy, shape, device=device, memory=memory, forward_tokens=tokens
            )
            self._setups[kind] = setup, rank_memory(shape, setup)
        return self._setups[kind]

    async def specification_on(self, worker: WorkerHandle) -> str:
        """The job's specification (JSON) for the group led by `worker`, with
        `activation_checkpointing: auto` turned off if all of its devices are GPUs with room for the
        activations. Else the trainer decides: on a GPU for models whose layers can do it."""
        wish = self._job.spec.policies[self._policy].trainer.activation_checkpointing
        if wish != "auto" or not self._trainable or self._reading is None:
            return self._job.spec_json
        await asyncio.wait({self._reading})
        group = (worker, *self._members)
        if self._shape is None:
            return self._job.spec_json
        found = [self._setup_on(self._shape, one)[0] for one in group]
        if any(one.checkpointing or one.device == "cpu" for one in found):
            return self._job.spec_json
        values = json.loads(self._job.spec_json)
        trainer = values["policies"][self._policy].setdefault("trainer", {})
        trainer["activation_checkpointing"] = False
        return json.dumps(values)

    def resolved(self, settings: Iterable[pb.ResolvedSetting]) -> list[pb.ResolvedSetting]:
        """Resolved settings as a trainer reported them, with the memory model as the source of what
        `specification_on` decided, which a trainer cannot tell from what the job says."""
        wish = self._job.spec.policies[self._policy].trainer.activation_checkpointing
        field = f"policies.{self._policy}.trainer.activation_checkpointing"
        found = list(settings)
        for one in found:
            if wish == "auto" and (one.field, one.source) == (field, "given"):
                one.source = "memory model"
        return found

    def suspended_on(self) -> WorkerHandle | None:
        """The worker on whose host the suspended state is, if there is one."""
        return None if self.suspended is None else self._suspended_on

    def assign(self, worker: WorkerHandle, *members: WorkerHandle) -> None:
        """Lets the policy bind to `worker`, which leads a gang over the `members`, too."""
        self.worker, self.bound = worker, False
        self._members, self._formed = members, _BEGIN_NS + time.monotonic_ns()
        self._touched.add(worker)
        self._bound_at = time.monotonic()
        self._notify()

    def refuse(self, error: FailedPrecondition) -> None:
        """Says that the policy can be bound nowhere."""
        if self._refusal is None:
            self._refusal = error
            self._notify()

    def fall_short(self, few: binding.TooManyRanks | None, now: float) -> float:
        """Takes note that the workers form too small gangs only, or (None) that they do not;
        returns when to tell again.

        Refuses a policy whose gang was never there if that stays so. One that was is waited for: a
        lost host is replaced.
        """
        if few is None or few != self.shortage:
            self.shortage, self._short_since = few, None if few is None else now
            if few is not None:
                self._notify()
        if few is None or self.was_bound:
            return math.inf
        assert self._short_since is not None
        until = self._short_since + self._job.shared.settings.gang_wait_seconds
        if now >= until:
            self.refuse(too_many_ranks(few, self._policy))
            return math.inf
        return until

    def suspend(self, *, empty_cache: bool = False) -> None:
        """Has the policy suspended, so that another one may have its worker; `empty_cache`: or
        another process its device."""
        if self.worker is not None and self._suspending is None:
            self._suspending = self._spawn(self._suspend(self.worker, empty_cache))

    def prefetch(self, worker: WorkerHandle) -> None:
        """Has the suspended state fetched to `worker`, where the policy will be bound next."""
        # Once: it is not repeated if it fails.
        self._prefetched.add(worker.worker_id)
        if self.suspended is not None:
            self._touched.add(worker)
            self._spawn(self._prefetch(worker, self.suspended))
        # The worker fetches the state while the policy before is being suspended.
        self._scheduler.touch()

    def release_idle(self) -> None:
        """Releases the policy, which has been idle for long."""
        self._idle_since = time.monotonic()
        self._spawn(self._release_idle())

    def _work(self) -> int:
        if self._needs:
            return 1
        if self._step is None:
            return 0
        if self._tables is None or self._tables.blind:
            return 1  # the amount of work is unknown: the policy takes its turn
        accumulated = self.suspended.samples if self.suspended is not None else 0
        if self.worker is not None and self.progress is not None:
            accumulated = self.progress.samples
        size = self._job.spec.pipeline.micro_batch_samples
        return ready_work(self._tables.latest(self._step), self._policy, size, accumulated)

    def _others_usable(self, worker: WorkerHandle) -> bool:
        usable = self._job.shared.workers.usable(worker.kind)
        return any(one is not worker for one in usable)

    def _mark_idle(self) -> None:
        self._idle_since = time.monotonic()
        self._scheduler.touch()

    async def _suspend(self, worker: WorkerHandle, empty_cache: bool) -> None:
        seconds = self._job.shared.settings.bind_timeout_seconds
        gone = False
        try:
            async with self.while_alive(worker):
                if not self._trainable:
                    # A frozen policy has no training state to keep.
                    await worker.trainer.Release(self._request(tr.ReleaseRequest), timeout=seconds)
                else:
                    request = self._request(tr.SuspendRequest, empty_cache=empty_cache)
                    response = await worker.trainer.Suspend(request, timeout=seconds)
                    self._suspended_on, self.suspended = worker, response.state
                    self._moved_out = response.state.seconds
                    self._count_swap(response.state.seconds)
                    self._renewing = self._spawn(self._renew(response.state))
        except TroupeError as error:
            gone = isinstance(error, Unavailable) or not worker.alive
            if not gone and error.kind not in _UNBOUND:
                self._stuck_until = time.monotonic() + _STUCK_SECONDS
                self._spawn(self._touch_once_unstuck())
                _log.warning("not suspended", policy=self.name, error=str(error))
                return
        finally:
            self._suspending = None
            self._notify()
        if self.worker is worker and gone and self._members:
            self.give_up_group()
        elif self.worker is worker:
            self.unassign()
            self._notify()

    async def _touch_once_unstuck(self) -> None:
        await asyncio.sleep(_STUCK_SECONDS)
        self._scheduler.touch()

    async def _prefetch(self, worker: WorkerHandle, state: tr.SuspendedState) -> None:
        spec_json = await self.specification_on(worker)
        request = self._request(tr.PrefetchRequest, spec_json=spec_json, state=state)
        try:
            async with self.while_alive(worker):
                seconds = self._job.shared.settings.bind_timeout_seconds
                await worker.trainer.Prefetch(request, timeout=seconds)
        except TroupeError as error:
            _log.info("not prefetched", policy=self.name, error=str(error))

    async def _release_idle(self) -> None:
        try:
            await self.release(self._job.shared.settings.cleanup_seconds)
        except TroupeError as error:
            _log.warning("not released", policy=self.name, error=str(error))

    async def _renew(self, state: tr.SuspendedState) -> None:
        """Renews the claims of a suspended step on its samples until it is resumed."""
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
                # If claims were lost, the resumed step begins again.
                _log.warning("claims not renewed", policy=self.name, error=str(error))

    def _request(self, kind: Any, **more: Any) -> Any:
        return kind(
            request_id=new_id("lease"), job_id=self._job.job_id, policy=self._policy, **more
        )

    def _count_swap(self, seconds: float) -> None:
        """Counts a suspension or resumption that kept a device from computing for `seconds`."""
        self.swaps += 1
        self.swap_seconds += seconds

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
        self._scheduler.touch()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def ranks_of(policy: PolicySpec) -> int:
    """Devices that train a policy together."""
    whole = not policy.trainable or policy.simulated is not None or policy.network is not None
    return 1 if whole else policy.trainer.gang


def too_many_ranks(few: binding.TooManyRanks, policy: str) -> FailedPrecondition:
    """The refusal of a policy whose gang is larger than all that the workers form."""
    return FailedPrecondition(
        f"policy {policy} is trained by a gang of {few.ranks} devices; the largest that the "
        f"trainers form has {few.most} (one worker's, or as many of each of several workers)",
        kind="gang_too_large",
        field=f"policies.{policy}.trainer.gang",
        value=few.ranks,
        remedy="Ask for a smaller gang, or start nodes with more devices for trainers.",
    )
