"""Amounts of resources that a call needs and a host has, apart from workers and cores.

Resources are memory, sandboxes by level, models on devices, and quotas of outside interfaces.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from services.reward.gpu.manager import MODEL, ModelPlacement
from services.reward.quota import QUOTA
from services.reward.sandboxes.profile import PROCESS
from troupe.scheduling.elastic import Running
from troupe.v1 import reward_pb2 as reward_pb

WORKERS: Final = "workers"
# Only on hosts that lease cores.
CORES: Final = "cores"
MEMORY: Final = "memory_mib"
# Followed by the level of the sandbox.
SANDBOX: Final = "sandbox:"
# Amount of an uncounted resource: more than any call takes.
PLENTY: Final = 1 << 20


def needs_of(spec: reward_pb.FunctionSpec, level: str) -> dict[str, int]:
    """Return the amounts, by resource, that a call takes in a sandbox of `level` in addition to a
    worker and cores."""
    needs: dict[str, int] = {}
    if spec.memory_mib:
        needs[MEMORY] = spec.memory_mib
    if level != PROCESS:
        needs[SANDBOX + level] = 1
    if spec.model_service:
        needs[MODEL + spec.model_service] = 1
    if spec.quota:
        needs[QUOTA + spec.quota] = spec.quota_units or 1
    return needs


class HostResources:
    """Amounts of one host, by resource. It has no other resources, except uncounted ones whose
    names begin with an item of `plenty`."""

    def __init__(
        self,
        amounts: Mapping[str, int],
        placement: ModelPlacement | None = None,
        *,
        plenty: Sequence[str] = (),
    ) -> None:
        """`placement`: of the host's models on its devices."""
        self._amounts = dict(amounts)
        self._plenty = tuple(plenty)
        self.placement = placement
        if placement is not None:
            self._amounts |= placement.capacity()

    def capacity(self, resource: str) -> int:
        """Return the amount of `resource`, free or not."""
        missing = PLENTY if resource.startswith(self._plenty) else 0
        return self._amounts.get(resource, missing)

    def room(self, needs: Mapping[str, int], running: Iterable[Running]) -> int:
        """Return how many calls with `needs` fit when nothing else runs; of a model, in addition to
        running ones."""
        room = PLENTY
        for resource, amount in needs.items():
            if not resource.startswith(QUOTA):
                others = running if resource.startswith(MODEL) else ()
                held = sum(one.holds.get(resource, 0) for one in others)
                room = min(room, (self.capacity(resource) - held) // amount)
        return room

    def free(self, resources: Iterable[str], running: Iterable[Running]) -> dict[str, int]:
        """Free amounts of `resources`, in the order in which calls wait for them; without quotas,
        which belong to no host."""
        wanted = [resource for resource in resources if not resource.startswith(QUOTA)]
        if not wanted:
            return {}
        free = {resource: self.capacity(resource) for resource in wanted}
        for one in running:
            for resource in free.keys() & one.holds.keys():
                free[resource] -= one.holds[resource]
        models = [r.removeprefix(MODEL) for r in wanted if r.startswith(MODEL)]
        if models and self.placement is not None:
            room = self.placement.room(models)
            free |= {resource: room.get(resource, 0) for resource in free if resource in room}
        return free
