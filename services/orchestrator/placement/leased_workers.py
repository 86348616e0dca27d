"""Workers of a policy's lease: assigned, given up, refused.

A gang over several workers has a *leader*, which trains the policy, and *members*, which only run
ranks for it.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Final

from services.orchestrator.placement.workers import WorkerHandle, WorkerRegistry
from troupe.contracts import kinds
from troupe.rpc import FailedPrecondition
from troupe.scheduling import binding
from troupe.v1 import orchestrator_pb2 as orchestrator_pb
from troupe.v1 import trainer_pb2 as trainer_pb

# Start of the monotonic clock. Of two gangs the later one has the devices, and a jump of the wall
# clock must not change their order.
_BEGIN_NS: Final = time.time_ns() - time.monotonic_ns()


class LeasedWorkers:
    """The workers of one policy, and those that it must not get."""

    def __init__(
        self,
        policy: str,
        registry: WorkerRegistry,
        gang_wait_seconds: float,
        touch_scheduler: Callable[[], None],
    ) -> None:
        """`gang_wait_seconds`: how long a policy's first gang may lack devices."""
        self._policy, self._registry = policy, registry
        self._gang_wait_seconds, self._touch_scheduler = gang_wait_seconds, touch_scheduler
        self.leader: WorkerHandle | None = None
        self._members: tuple[WorkerHandle, ...] = ()
        # When the group of workers was assigned, in nanoseconds since 1970.
        self._formed = 0
        # Whether the leader has bound the policy.
        self.bound = False
        # Whether the policy was bound before, perhaps by an earlier orchestrator.
        self.was_bound = False
        self.bound_at = time.monotonic()
        # Workers that may hold a binding, a state or a prefetched copy of the policy.
        self._touched: set[WorkerHandle] = set()
        self._avoid: WorkerHandle | None = None
        # Ids of workers without room for the policy's state, and what the last of them said.
        self._too_small: set[str] = set()
        self._too_large: FailedPrecondition | None = None
        # Start and extent of the lack of devices for its first gang.
        self._short_since: float | None = None
        self.shortage: binding.TooManyRanks | None = None
        self._refusal: FailedPrecondition | None = None
        self._changed = asyncio.Event()

    @property
    def group(self) -> tuple[WorkerHandle, ...]:
        """The assigned workers, the leader first."""
        return () if self.leader is None else (self.leader, *self._members)

    @property
    def broken(self) -> bool:
        """Whether a member was lost."""
        return not all(member.alive for member in self._members)

    @property
    def hosts(self) -> trainer_pb.GangHosts | None:
        """The members, for the leader; None for a gang of one worker."""
        members = [member.address for member in self._members]
        return trainer_pb.GangHosts(members=members, formed=self._formed) if members else None

    @property
    def avoided(self) -> str:
        """Id of the worker that is not assigned again while there is another."""
        return "" if self._avoid is None else self._avoid.worker_id

    @property
    def barred(self) -> frozenset[str]:
        """Ids of the workers that the policy must not get now."""
        avoid = self._avoid
        if avoid is None or all(one is avoid for one in self._registry.usable(avoid.kind)):
            return frozenset(self._too_small)
        return frozenset(self._too_small | {avoid.worker_id})

    def assign(self, leader: WorkerHandle, *members: WorkerHandle) -> None:
        """Let the policy bind to `leader`, which runs its gang over the `members`, too."""
        self.leader, self.bound = leader, False
        self._members, self._formed = members, _BEGIN_NS + time.monotonic_ns()
        self._touched.add(leader)
        self.bound_at = time.monotonic()
        self.notify()

    def unassign(self, avoid: WorkerHandle | None = None) -> None:
        """Give the workers up; `avoid` is not assigned again while there is another worker."""
        self.leader, self.bound, self._avoid = None, False, avoid
        self._members = ()
        self._touch_scheduler()

    def mark_bound(self) -> None:
        """Note that the leader has bound the policy."""
        self.bound = self.was_bound = True
        self.bound_at = time.monotonic()
        self._touch_scheduler()

    def bar(self, worker: WorkerHandle, error: FailedPrecondition) -> None:
        """Give up `worker`, whose devices are too small for the policy, as `error` says."""
        self._too_small.add(worker.worker_id)
        self._too_large = error
        self.unassign()

    def check_room(self) -> None:
        """Refuse the policy once all workers are too small for it, those included that were lost a
        moment ago."""
        if self._too_large is not None:
            expected = self._registry.expected(orchestrator_pb.WORKER_KIND_TRAINER)
            if expected and all(one.worker_id in self._too_small for one in expected):
                self.refuse(self._too_large)

    def touch(self, worker: WorkerHandle) -> None:
        """Note that `worker` may hold something of the policy."""
        self._touched.add(worker)

    def take_touched(self) -> set[WorkerHandle]:
        """Return the workers that may hold something of the policy, which are forgotten here."""
        touched, self._touched = self._touched, set()
        return touched

    def refuse(self, error: FailedPrecondition) -> None:
        """Note that no worker can bind the policy."""
        if self._refusal is None:
            self._refusal = error
            self.notify()

    def check(self) -> None:
        """Raise the scheduler's refusal, if there is one."""
        if self._refusal is not None:
            raise self._refusal

    def fall_short(self, few: binding.TooManyRanks | None, now: float) -> float:
        """Note that the workers form too small gangs only, or (None) that they do not; return when
        to tell again.

        Refuse a policy whose gang was never there if that stays so. If it was there, wait for it: a
        lost host is replaced.
        """
        if few is None or few != self.shortage:
            self.shortage, self._short_since = few, None if few is None else now
            if few is not None:
                self.notify()
        if few is None or self.was_bound:
            return math.inf
        assert self._short_since is not None
        until = self._short_since + self._gang_wait_seconds
        if now >= until:
            self.refuse(_too_many_ranks(few, self._policy))
            return math.inf
        return until

    @asynccontextmanager
    async def while_alive(self, leader: WorkerHandle) -> AsyncIterator[None]:
        """Cancel the body when `leader` or a member is lost, and raise `Unavailable` instead."""
        async with AsyncExitStack() as stack:
            for one in (leader, *self._members):
                await stack.enter_async_context(one.while_alive())
            yield

    def change(self) -> Coroutine[None, None, object]:
        """Wait until a worker is assigned, refused or given up after this call."""
        return self._changed.wait()

    def notify(self) -> None:
        """Wake the callers of `change` and the scheduler."""
        self._changed.set()
        self._changed = asyncio.Event()
        self._touch_scheduler()


def _too_many_ranks(few: binding.TooManyRanks, policy: str) -> FailedPrecondition:
    """Return the refusal of a policy whose gang is larger than all that the workers form."""
    return FailedPrecondition(
        f"policy {policy} is trained by a gang of {few.ranks} devices, but the largest that the "
        f"trainers form has {few.most} (one worker's, or as many of each of several workers)",
        kind=kinds.GANG_TOO_LARGE,
        field=f"policies.{policy}.trainer.gang",
        value=few.ranks,
        remedy="Ask for a smaller gang, or start nodes with more devices for trainers.",
    )
