"""Suspended training state of a policy: its location, and the claims of its open step."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

import structlog

from services.orchestrator.placement.workers import WorkerHandle
from troupe.rpc import TroupeError, new_id
from troupe.v1 import experience_store_pb2 as store_pb
from troupe.v1 import trainer_pb2 as trainer_pb

if TYPE_CHECKING:
    from troupe.v1.experience_store_pb2_grpc import ExperienceStoreAsyncStub

_log = structlog.get_logger(__name__)
# Pause before a policy that could not be suspended is asked again.
_STUCK_SECONDS: Final = 10.0


class PolicySuspension:
    """The suspended state of one policy, if any, and the cost of suspensions.

    While a step is suspended, its samples' claims in the store are renewed here.
    """

    def __init__(
        self,
        job_id: str,
        policy: str,
        experience: ExperienceStoreAsyncStub,
        touch_scheduler: Callable[[], None],
    ) -> None:
        self._job_id, self._policy = job_id, policy
        self._experience, self._touch_scheduler = experience, touch_scheduler
        self.state: trainer_pb.SuspendedState | None = None
        self._suspended_by: WorkerHandle | None = None
        # Ids of workers that fetch the state, or have it.
        self.prefetched: set[str] = set()
        self._renewing: asyncio.Task[None] | None = None
        self._stuck_until = 0.0
        self._retry: asyncio.TimerHandle | None = None
        # Suspensions and resumptions since `take_swaps`, and their cost.
        self._swaps, self._swap_seconds = 0, 0.0
        # Seconds that the last suspension, and the last resumption, cost.
        self._moved_out = self._moved_in = 0.0

    @property
    def home(self) -> WorkerHandle | None:
        """The worker on whose host the suspended state is, if there is one."""
        return None if self.state is None else self._suspended_by

    @property
    def swap_seconds(self) -> float:
        """Total cost of the last suspension and the last resumption."""
        return self._moved_out + self._moved_in

    def stuck(self, now: float) -> bool:
        """Return whether a worker could not suspend the policy and is not asked again yet."""
        return now < self._stuck_until

    async def suspend(self, worker: WorkerHandle, *, free_device: bool, seconds: float) -> None:
        """Have `worker` suspend the policy. Raises `TroupeError`."""
        request = trainer_pb.SuspendRequest(
            request_id=new_id("lease"),
            job_id=self._job_id,
            policy=self._policy,
            free_device=free_device,
        )
        response = await worker.trainer.Suspend(request, timeout=seconds)
        self._suspended_by, self.state = worker, response.state
        self._moved_out = response.state.seconds
        self._count_swap(response.state.seconds)
        self._renewing = asyncio.create_task(self._renew(response.state))

    def failed(self) -> None:
        """Note that a worker could not suspend the policy, so that it is asked again after a
        pause."""
        self._stuck_until = time.monotonic() + _STUCK_SECONDS
        loop = asyncio.get_running_loop()
        self._retry = loop.call_later(_STUCK_SECONDS, self._touch_scheduler)

    def resumed(self, seconds: float) -> None:
        """Note a resumption that kept a device from computing for `seconds`."""
        self._moved_in = seconds
        self._count_swap(seconds)

    def discard(self) -> None:
        """Forget the state, which is in use again or useless."""
        self.state = None
        self.prefetched.clear()
        if self._renewing is not None:
            self._renewing.cancel()
            self._renewing = None

    def take_swaps(self) -> tuple[int, float]:
        """Return the suspensions and resumptions since the last call, and the seconds that they
        cost."""
        found = self._swaps, self._swap_seconds
        self._swaps, self._swap_seconds = 0, 0.0
        return found

    def close(self) -> None:
        """Forget the state and stop asking."""
        self.discard()
        if self._retry is not None:
            self._retry.cancel()

    def _count_swap(self, seconds: float) -> None:
        self._swaps += 1
        self._swap_seconds += seconds

    async def _renew(self, state: trainer_pb.SuspendedState) -> None:
        """Renew the claims of a suspended step on its samples until it is resumed."""
        if not state.HasField("step"):
            return
        while True:
            await asyncio.sleep(state.lease_seconds / 3)
            request = store_pb.RenewClaimsRequest(
                request_id=new_id("renew"),
                job_id=self._job_id,
                policy=self._policy,
                step=state.step,
                claimant=state.claimant,
                lease_seconds=state.lease_seconds,
            )
            try:
                await self._experience.RenewClaims(request, timeout=state.lease_seconds / 2)
            except TroupeError as error:
                # If claims were lost, the resumed step begins again.
                name = f"{self._job_id}/{self._policy}"
                _log.warning("claims not renewed", policy=name, error=str(error))
