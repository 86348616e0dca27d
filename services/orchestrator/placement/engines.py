"""A job's engines, kept up on every rollout worker at the newest committed versions.

This is the orchestrator's part of admitting a weight version: `update` has every prepared worker
load it, and `ready` returns the workers that may run a query that needs it.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Coroutine, Mapping
from contextlib import asynccontextmanager
from typing import Any, Final

from services.orchestrator.context import JobContext
from services.orchestrator.crash_loops import CrashLoopGuard
from services.orchestrator.errors import Deadline, RetryBackoff, cancel_all, is_transient, run_all
from services.orchestrator.placement.engine_balancer import Balancer
from services.orchestrator.placement.shared_servers import SharedServers
from services.orchestrator.placement.workers import WorkerHandle
from troupe.contracts import kinds
from troupe.rpc import TroupeError, Unavailable, new_id
from troupe.v1 import common_pb2 as common_pb
from troupe.v1 import orchestrator_pb2 as orchestrator_pb
from troupe.v1 import rollout_pb2 as rollout_pb

# Time for loading weights and the like, beyond the start of the engines themselves.
_MARGIN_SECONDS: Final = 60.0
# Workers prepared at the same time are ready within this time of each other.
_LEAST_GATHERING_SECONDS: Final = 1.0
# States of engines that serve, or will once they have loaded weights.
_COUNTED: Final = (
    common_pb.ENGINE_STATE_HEALTHY,
    common_pb.ENGINE_STATE_UPDATING,
    common_pb.ENGINE_STATE_STALE,
)


class Engines:
    """The engines of a job: prepared on every rollout worker that joins, and updated to new
    versions.

    A worker is `ready` while its engines serve the wanted versions: a lagging or restarted worker
    gets no query. Faults of the job end `run`.
    """

    def __init__(
        self,
        job: JobContext,
        weights: dict[str, common_pb.WeightsRef],
        republish: Callable[[str], Awaitable[None]],
    ) -> None:
        self._job = job
        self._wanted = weights
        self._republish = republish
        # Prepared workers, and the version that each policy has there.
        self._served: dict[WorkerHandle, dict[str, int]] = {}
        self._troubles: dict[WorkerHandle, str] = {}
        self._loading: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        # By policy: the step result that workers were last told to load before its commit.
        self._ahead: dict[str, str] = {}
        self._background: set[asyncio.Task[None]] = set()
        # Metrics of updates since the last call of `values`.
        self._swaps: dict[str, float] = {}
        self._changed = asyncio.Event()
        # Whether trainers have the devices of colocated policies, and how many workers are being
        # prepared, which puts engines on devices.
        self._asleep = False
        self._preparing = 0
        # Workers that may have engines of the job, prepared or not.
        self._touched: set[WorkerHandle] = set()
        self._crash_guard = CrashLoopGuard(
            job.shared.workers,
            job.shared.deaths,
            job.job_id,
            job.spec.limits.worker_deaths,
            "prepared engines",
            "policies",
            "Look into the rollout workers' logs for the cause: a model too large for the "
            "memory, a workflow's module that crashes. Then resume the job.",
        )
        # Number of items of an evaluation's tasks, if a worker has reported it.
        self.evaluation_items: dict[str, int] = {}
        self.task_items: tuple[int, ...] = ()
        self._noted: set[str] = set()
        limits = [policy.engine.start_timeout_seconds for policy in job.spec.policies.values()]
        # How long a worker may take to have all engines up.
        self.prepare_seconds = max(limits) + _MARGIN_SECONDS
        # Whether the job may begin on the workers that are ready.
        self._gathered = False
        self._shared = SharedServers(job, lambda: self._served)
        self._balancer = Balancer(
            job, lambda: self._served, republish, start_seconds=self.prepare_seconds
        )

    def ready(self, floors: Mapping[str, int] | None = None) -> list[WorkerHandle]:
        """Return the workers that may run queries now: those that serve the newest version of every
        policy, or at least the version in `floors`."""
        if self._asleep or not self._gathered:
            return []
        wanted = {policy: ref.version for policy, ref in self._wanted.items()} | dict(floors or {})
        return [
            worker
            for worker, versions in self._served.items()
            if worker.usable
            and self._shared.serves(worker)
            and versions.keys() == wanted.keys()
            and all(versions[policy] >= version for policy, version in wanted.items())
        ]

    async def change(self) -> None:
        """Wait until `ready` may have changed."""
        await self._changed.wait()

    def lost_job(self, worker: WorkerHandle) -> None:
        """Have a worker prepared again that no longer knows the job."""
        if self._served.pop(worker, None) is not None:
            self._notify()

    async def wait_ready(self, deadline: Deadline) -> None:
        """Wait for a ready worker. Raises `DeadlineExceeded` with the cause."""
        while not self.ready():
            workers = self._job.shared.workers.usable(orchestrator_pb.WORKER_KIND_ROLLOUT)
            troubles = "; ".join(
                f"{worker}: {self._troubles[worker]}"
                for worker in workers
                if worker in self._troubles
            )
            waiting = "preparing engines" if workers else "waiting for a rollout worker"
            deadline.report(f"{waiting} ({troubles})" if troubles else waiting)
            await deadline.wait(self.change())

    async def run(self) -> None:
        """Keep every rollout worker prepared and its engines balanced, until cancelled."""
        try:
            await run_all(
                self._keep_all(), self._balancer.run(), self._shared.run(), self._gather_workers()
            )
        finally:
            await cancel_all(self._background)

    @property
    def device_classes(self) -> dict[str, str]:
        """Classes of the devices of policies' engines, where their workers report any."""
        found: dict[str, str] = {}
        for worker in self._served:
            of_worker = {one.device_class for one in worker.beat.devices if one.device_class}
            for engine in worker.beat.engines:
                if engine.job_id == self._job.job_id:
                    classes = {engine.device_class} if engine.device_class else of_worker
                    if len(classes) == 1:
                        found[engine.policy] = min(classes)
        return found

    @property
    def counts(self) -> Counter[str]:
        """Engines of each policy that serve or load weights, on all prepared workers."""
        return Counter(
            engine.policy
            for worker in self._served
            for engine in worker.beat.engines
            if engine.job_id == self._job.job_id and engine.state in _COUNTED
        )

    def values(self) -> dict[str, float]:
        """Return the metrics since the last call."""
        swaps, self._swaps = self._swaps, {}
        return self._balancer.values() | swaps

    async def _gather_workers(self) -> None:
        """Let the job begin when all its workers are prepared, have failed, or have had twice the
        first one's time. Otherwise the first worker would get the whole first step."""
        clock = asyncio.get_running_loop()
        began = clock.time()
        while not self._served:
            await self.change()
        took = clock.time() - began
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(_LEAST_GATHERING_SECONDS, took)):
                while any(
                    worker not in self._served and worker not in self._troubles
                    for worker in self._job.shared.workers.usable(
                        orchestrator_pb.WORKER_KIND_ROLLOUT
                    )
                ):
                    await self.change()
        self._gathered = True
        self._notify()

    async def _keep_all(self) -> None:
        """Run a task per rollout worker that keeps it prepared."""
        keepers: dict[WorkerHandle, asyncio.Task[None]] = {}
        workers = self._job.shared.workers
        try:
            while True:
                usable = workers.usable(orchestrator_pb.WORKER_KIND_ROLLOUT)
                self._shared.join(usable)
                for worker in usable:
                    if worker not in keepers:
                        keepers[worker] = asyncio.create_task(self._keep(worker))
                joined = asyncio.ensure_future(workers.change())
                try:
                    await asyncio.wait(
                        {joined, *keepers.values()}, return_when=asyncio.FIRST_COMPLETED
                    )
                finally:
                    joined.cancel()
                for worker, task in list(keepers.items()):
                    if task.done():
                        task.result()
                        del keepers[worker]
                self._notify()
        finally:
            await cancel_all(keepers.values())

    async def update(self, weights: common_pb.WeightsRef, deadline: Deadline) -> None:
        """Have every prepared worker load a version, and wait until they serve it.

        A worker that is lost meanwhile, or has lost the job, is left to `run`.
        """
        self._ahead.pop(weights.policy, None)
        if self._wanted[weights.policy].version == weights.version:
            return
        self._wanted[weights.policy] = weights
        # Commits may come faster than engines load: versions are loaded in order.
        async with self._loading[weights.policy]:
            workers = list(self._served)
            swaps: list[rollout_pb.UpdateWeightsResponse] = []
            await run_all(
                *(self._update(one, weights, deadline, swaps, len(workers)) for one in workers)
            )
            # Followers of servers load versions verified by the keepers.
            await self._shared.tell()
            self._note(weights.policy, swaps)
        self._notify()

    def load_ahead(self, weights: common_pb.WeightsRef) -> None:
        """Have prepared workers load a policy's next version before its commit, in the background.
        `update` has them serve it. Repeatable.

        A worker that cannot, or fails, loads the committed version.
        """
        if self._ahead.get(weights.policy) != weights.trained_on.step_result:
            self._ahead[weights.policy] = weights.trained_on.step_result
            self._start(self._load_ahead(weights))

    def give_up_ahead(self, policy: str) -> None:
        """Have workers go back to the committed version, in the background, if they were to load
        the next one before its commit. Repeatable."""
        if self._ahead.pop(policy, None) is not None:
            self._start(self._bring_back(policy))

    async def _load_ahead(self, weights: common_pb.WeightsRef) -> None:
        policy, result = weights.policy, weights.trained_on.step_result
        async with self._loading[policy]:  # an `update` waits for the end
            follows = weights.version == self._wanted[policy].version + 1
            if self._asleep or not follows or self._ahead.get(policy) != result:
                return
            workers = list(self._served)
            request = rollout_pb.LoadAheadRequest(
                request_id=new_id("ahead"), weights=weights, workers=len(workers)
            )
            await asyncio.gather(*(self._try_ahead(worker, request) for worker in workers))

    async def _try_ahead(self, worker: WorkerHandle, request: rollout_pb.LoadAheadRequest) -> None:
        with contextlib.suppress(TroupeError):  # the worker logs why
            async with worker.while_alive():
                await worker.rollout.LoadAhead(request, timeout=self.prepare_seconds)

    async def _bring_back(self, policy: str) -> None:
        async with self._loading[policy]:
            ref = self._wanted[policy]
            workers = list(self._served)
            await asyncio.gather(*(self._try_back(one, ref, len(workers)) for one in workers))

    async def _try_back(
        self, worker: WorkerHandle, ref: common_pb.WeightsRef, workers: int
    ) -> None:
        # An engine that nobody tells goes back after a while by itself.
        with contextlib.suppress(TroupeError):
            async with worker.while_alive():
                await self._call_update(worker, ref, self.prepare_seconds, workers)

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def sleep(self, policies: Collection[str], deadline: Deadline) -> None:
        """Take the engines of these policies off their devices on all workers, until `wake`.

        Idempotent. No worker is prepared meanwhile; a lost one is left to `run`. Raises the
        `TroupeError` of an engine that cannot free its memory.
        """
        self._asleep = True
        while self._preparing:
            deadline.report("waiting for engines that are being prepared")
            await deadline.wait(self.change())
        await run_all(
            *(self._sleep(worker, policies, deadline) for worker in self._touched if worker.alive)
        )

    async def wake(self, policies: Collection[str], deadline: Deadline) -> frozenset[str]:
        """Bring the engines of these policies back to their devices and to the newest versions.

        Returns the policies whose weights no host has anymore: engines must sleep again while these
        are published. A lost worker is left to `run`. Raises `TroupeError`.
        """
        gone: set[str] = set()
        await run_all(
            *(self._wake(worker, policies, deadline, gone) for worker in list(self._served))
        )
        if not gone:
            self._asleep = False
            self._notify()
        return frozenset(gone)

    async def release(self, seconds: float) -> None:
        """Have rollout workers release the job, as far as they answer."""
        request = rollout_pb.ReleaseJobRequest(
            request_id=new_id("release"), job_id=self._job.job_id
        )
        workers = self._job.shared.workers.usable(orchestrator_pb.WORKER_KIND_ROLLOUT)
        self._served.clear()
        await asyncio.gather(
            *(worker.rollout.ReleaseJob(request, timeout=seconds) for worker in workers),
            return_exceptions=True,
        )

    async def _keep(self, worker: WorkerHandle) -> None:
        """Prepare the worker, and again whenever it loses the job, until the worker is lost."""
        attempts = RetryBackoff(Deadline(f"preparing {worker}", math.inf, ""))
        while worker.alive:
            if worker in self._served:
                await self._changed.wait()
                continue
            try:
                async with worker.while_alive():
                    await self._job.shared.deaths.turn(self._job.job_id)
                    async with self._on_devices():
                        await self._prepare(worker)
                attempts.reset()
                self._crash_guard.clear()
                self._troubles.pop(worker, None)
                self._notify()
            except TroupeError as error:
                if isinstance(error, Unavailable):
                    self._crash_guard.note(worker)
                if not worker.alive:
                    break
                self._troubles[worker] = str(error)
                if error.kind == kinds.WEIGHTS_NOT_FOUND and error.field:
                    await self._republish(error.field)
                    error = Unavailable(str(error))
                await attempts.failed(error)
                if attempts.worth_a_notice:
                    await self._job.warn(f"{worker} could not be prepared: {error}")
                self._notify()
        if self._shared.leave(worker):
            await self._shared.tell()
        if self._served.pop(worker, None) is not None:
            await self._job.warn(f"{worker} was lost")
        self._troubles.pop(worker, None)
        self._touched.discard(worker)
        self._crash_guard.check()

    @asynccontextmanager
    async def _on_devices(self) -> AsyncIterator[None]:
        """Wait until engines have their devices, and let them keep these meanwhile."""
        while self._asleep:
            await self.change()
        self._preparing += 1
        try:
            yield
        finally:
            self._preparing -= 1
            self._notify()

    async def _sleep(
        self, worker: WorkerHandle, policies: Collection[str], deadline: Deadline
    ) -> None:
        try:
            async with worker.while_alive():
                await put_to_sleep(worker, self._job.job_id, policies, deadline.left)
        except TroupeError as error:
            if error.kind != kinds.JOB_NOT_PREPARED:
                if not is_transient(error):
                    raise
                await self._job.warn(f"{worker} could not put engines to sleep: {error}")
            self.lost_job(worker)

    async def _wake(
        self, worker: WorkerHandle, policies: Collection[str], deadline: Deadline, gone: set[str]
    ) -> None:
        try:
            async with worker.while_alive():
                await self._call_wake(worker, policies, min(deadline.left, self.prepare_seconds))
        except TroupeError as error:
            if (
                error.kind == kinds.WEIGHTS_NOT_FOUND
                and (policy := error.field)
                and policy in policies
            ):
                gone.add(policy)
                return
            if not is_transient(error):
                raise
            await self._job.warn(f"{worker} could not wake engines: {error}")
            self.lost_job(worker)

    async def _call_wake(
        self, worker: WorkerHandle, policies: Collection[str], seconds: float
    ) -> None:
        request = rollout_pb.WakeEnginesRequest(
            request_id=new_id("wake"), job_id=self._job.job_id, policies=policies
        )
        await worker.rollout.WakeEngines(request, timeout=seconds)

    async def _prepare(self, worker: WorkerHandle) -> None:
        """Prepare the job, then load the versions that were committed meanwhile."""
        wanted = dict(self._wanted)
        request = rollout_pb.PrepareJobRequest(
            request_id=new_id("prepare"),
            job_id=self._job.job_id,
            spec_json=self._job.spec_json,
            weights=wanted.values(),
            servers=(shared := self._shared.plan(worker)),
        )
        self._touched.add(worker)
        answer = await worker.rollout.PrepareJob(request, timeout=self.prepare_seconds)
        self._shared.told(worker, shared)
        self._shared.note(worker, answer.engines)
        # Every worker says the same.
        self.evaluation_items.update(answer.evaluation_items)
        self.task_items = self.task_items or tuple(answer.task_items)
        for note in answer.notes:
            if note not in self._noted:
                self._noted.add(note)
                await self._job.info(note)
        if colocated := self._job.spec.colocated:
            # The previous orchestrator may have left them asleep.
            await self._call_wake(worker, colocated, self.prepare_seconds)
        await self._job.shared.store.note_resolved(self._job.job_id, answer.resolved)
        versions = {policy: ref.version for policy, ref in wanted.items()}
        behind = [ref for ref in self._wanted.values() if versions[ref.policy] != ref.version]
        while behind:
            for ref in behind:
                await self._call_update(worker, ref, self.prepare_seconds)
                versions[ref.policy] = ref.version
            behind = [ref for ref in self._wanted.values() if versions[ref.policy] != ref.version]
        self._served[worker] = versions
        await self._shared.tell()

    def _note(self, policy: str, swaps: list[rollout_pb.UpdateWeightsResponse]) -> None:
        """Add up an update's metrics: the transfer of the slowest host, since hosts fetch at the
        same time, the sum of the time in which engines did not serve, and the whole update of the
        slowest engine."""
        if not swaps:
            return
        found = {
            "exposed_seconds": sum(swap.exposed_seconds for swap in swaps),
            "transfer_seconds": max(swap.transfer_seconds for swap in swaps),
            "update_seconds": max(
                (e.update_seconds for swap in swaps for e in swap.engines if e.policy == policy),
                default=0.0,
            ),
        }
        for name, value in found.items():
            name = f"{policy}/weights/{name}"
            self._swaps[name] = self._swaps.get(name, 0.0) + value

    async def _update(
        self,
        worker: WorkerHandle,
        ref: common_pb.WeightsRef,
        deadline: Deadline,
        swaps: list[rollout_pb.UpdateWeightsResponse],
        workers: int,
    ) -> None:
        """Have one of so many workers load a version; an unreachable worker is left to `_keep`."""
        attempts = RetryBackoff(deadline)
        while worker in self._served and worker.alive:
            try:
                async with worker.while_alive():
                    seconds = min(deadline.left, self.prepare_seconds)
                    swaps.append(await self._call_update(worker, ref, seconds, workers))
                if (versions := self._served.get(worker)) is not None:
                    versions[ref.policy] = ref.version
                return
            except TroupeError as error:
                if error.kind != kinds.WEIGHTS_NOT_FOUND:
                    if not is_transient(error):
                        raise
                    await self._job.warn(
                        f"{worker} could not load {ref.policy}@{ref.version}: {error}"
                    )
                    self.lost_job(worker)
                    return
                await self._republish(ref.policy)
                await attempts.failed(Unavailable(str(error)))

    async def _call_update(
        self, worker: WorkerHandle, ref: common_pb.WeightsRef, seconds: float, workers: int = 1
    ) -> rollout_pb.UpdateWeightsResponse:
        request = rollout_pb.UpdateWeightsRequest(
            request_id=new_id("update"), weights=ref, workers=workers
        )
        answer = await worker.rollout.UpdateWeights(request, timeout=seconds)
        self._shared.note(worker, answer.engines)
        return answer

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


async def put_to_sleep(
    worker: WorkerHandle, job_id: str, policies: Collection[str], seconds: float
) -> None:
    """Take engines of a job off the devices of a worker. Raises `TroupeError`."""
    request = rollout_pb.SleepEnginesRequest(
        request_id=new_id("sleep"), job_id=job_id, policies=policies
    )
    await worker.rollout.SleepEngines(request, timeout=seconds)
