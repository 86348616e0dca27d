"""Turns on the devices that a job's engines and trainers share (`pipeline.colocate`).

Engines have the devices while trajectories are rolled out and evaluated. Trainers have them while
policies are bound, trained or saved (`DeviceTurns.of_trainers`): before such a turn the engines
drain and release their memory; after it the training states move to the hosts' memory, and the
engines come back by way of STALE and a verified update to the newest versions. This is the
colocated baseline of FlexMARL (MAS-RL), and the usual arrangement on few devices (HybridFlow,
arXiv 2409.19256, section 5).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from services.orchestrator.context import JobContext
from services.orchestrator.errors import Deadline, RetryBackoff, is_transient, run_all
from services.orchestrator.placement.engines import Engines, put_to_sleep
from services.orchestrator.placement.policy_trainer import Trainers
from services.orchestrator.placement.workers import WorkerHandle
from troupe.contracts import kinds
from troupe.rpc import TroupeError, Unavailable
from troupe.v1 import orchestrator_pb2 as orchestrator_pb


class DeviceTurns:
    """Switching of colocated policies' devices between engines and trainers.

    Has no effect in a job without colocated policies. Engines have the first turn.
    """

    def __init__(self, job: JobContext, trainers: Trainers, engines: Engines) -> None:
        self._job, self._trainers, self._engines = job, trainers, engines
        self._policies = job.spec.colocated
        self._one_turn = asyncio.Lock()
        self._trainers_have_it = False
        # Seconds of switching since the last call of `values`.
        self._seconds: dict[str, float] = {}

    @asynccontextmanager
    async def of_trainers(self, deadline: Deadline) -> AsyncIterator[None]:
        """Give trainers the devices in the body, and engines afterwards.

        After an error engines stay asleep, since the job ends. Raises `TroupeError`.
        """
        if not self._policies:
            yield
            return
        async with self._one_turn:
            with self._timed("sleep"):
                await self._engines.sleep(self._policies, deadline)
            self._trainers_have_it = True
            yield
            await self._back_to_engines(deadline)
            self._trainers_have_it = False

    async def republish(self, policy: str) -> None:
        """Publish a policy's weights again, since no host has them any more."""
        if self._trainers_have_it or policy not in self._policies:
            await self._trainers.republish(policy)
            return
        seconds = self._engines.prepare_seconds + self._job.shared.settings.bind_timeout_seconds
        what = f"publishing {policy} again"
        deadline = Deadline(what, seconds, "bind_timeout_seconds", self._job.show)
        async with self.of_trainers(deadline):
            await self._trainers.republish(policy)

    def values(self) -> dict[str, float]:
        """Return the metrics since the last call: seconds in which neither engines nor trainers
        worked."""
        found, self._seconds = self._seconds, {}
        return {f"colocate/{what}_seconds": seconds for what, seconds in found.items()}

    async def _back_to_engines(self, deadline: Deadline) -> None:
        attempts = RetryBackoff(deadline)
        while True:
            with self._timed("offload"):
                await self._trainers.offload(self._policies, deadline)
            with self._timed("wake"):
                gone = await self._engines.wake(self._policies, deadline)
            if not gone:
                return
            await self._engines.sleep(self._policies, deadline)
            for policy in sorted(gone):
                await self._trainers.republish(policy)
            lost = ", ".join(sorted(gone))
            await attempts.failed(Unavailable(f"no host had the weights of {lost}"))

    @contextmanager
    def _timed(self, what: str) -> Iterator[None]:
        began = time.monotonic()
        yield
        self._seconds[what] = self._seconds.get(what, 0.0) + time.monotonic() - began


async def bind_alone(
    job: JobContext, trainers: Trainers, deadline: Deadline, *, leftovers: bool
) -> None:
    """Bind all policies of a job before its engines are known.

    Engines of colocated policies that an earlier runner left (`leftovers`) are put to sleep before;
    training states of colocated policies are moved off the devices afterwards.
    """
    policies = job.spec.colocated

    async def sleep(worker: WorkerHandle) -> None:
        try:
            async with worker.while_alive():
                await put_to_sleep(worker, job.job_id, policies, deadline.left)
        except TroupeError as error:
            # A worker that was started since then does not know the job.
            if error.kind != kinds.JOB_NOT_PREPARED and not is_transient(error):
                raise

    if policies and leftovers:
        workers = job.shared.workers.usable(orchestrator_pb.WORKER_KIND_ROLLOUT)
        await run_all(*(sleep(worker) for worker in workers))
    await trainers.bind_all(deadline)
    await trainers.offload(policies, deadline)
