"""The places of one training device while a plan is made of who is to hold it (binding.py)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from troupe.scheduling.binding import Policy, Worker


@dataclass
class Seats:
    """One worker while a plan is made."""

    worker: Worker
    held: list[Policy] = field(default_factory=list)
    # Taken or kept free in this plan: (bytes, cost) each.
    taken: list[tuple[float, float]] = field(default_factory=list)
    # Bound in this plan.
    coming: list[Policy] = field(default_factory=list)

    def free(self, policy: Policy, gone: Iterable[str] = ()) -> bool:
        """Whether `policy` has a slot and memory here once those of `gone` have left."""
        worker, names = self.worker, set(gone)
        stay = [one for one in self.held if one.policy not in names]
        if worker.slots and len(stay) + len(self.taken) >= worker.slots:
            return False
        used = sum(one.share for one in stay) + sum(size for size, _ in self.taken)
        return not worker.memory or used + policy.share <= worker.memory

    def hands_over(self, policy: Policy, gone: Iterable[str]) -> bool:
        """Whether `policy` may come while those of `gone` still leave: its state is there."""
        if self.worker.worker_id not in policy.prefetched or not self.free(policy, gone):
            return False
        return self.room_beside(policy)

    def room_beside(self, policy: Policy) -> bool:
        """Whether its state has room next to all others that are here, or come in this plan."""
        if not self.worker.memory:
            return True
        if not policy.size:  # it was bound nowhere yet: what it takes shows when it is loaded
            return not (self.held or self.coming)
        used = sum(one.share for one in (*self.held, *self.coming))
        return used + policy.share <= self.worker.memory

    @property
    def load(self) -> float:
        """What it has to do already."""
        held = sum(one.cost for one in self.held)
        return self.worker.load + held + sum(cost for _, cost in self.taken)
