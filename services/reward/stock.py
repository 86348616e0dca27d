"""What a host has for calls beside workers and cores: memory, sandboxes, models."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from services.reward.gpu.manager import PREFIX as MODEL
from services.reward.gpu.manager import Board
from services.reward.quota import PREFIX as QUOTA
from services.reward.sandbox import PROCESS
from troupe.scheduling.elastic import Running
from troupe.v1 import reward_pb2 as pb

MEMORY: Final = "memory_mib"
SANDBOX: Final = "sandbox:"
# Of what nobody counts: more than any call takes.
PLENTY: Final = 1 << 20


def needs_of(spec: pb.FunctionSpec, level: str) -> dict[str, int]:
    """What a call takes beside a worker and cores, by resource."""
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
    """Amounts by resource; of what is not named there is nothing, or plenty."""

    def __init__(
        self, amounts: Mapping[str, int], board: Board | None = None, *, plenty: Sequence[str] = ()
    ) -> None:
        """`board`: of the host's models. `plenty`: beginnings of names of what is not counted."""
        self._amounts = dict(amounts)
        self._plenty = tuple(plenty)
        self.board = board
        if board is not None:
            self._amounts |= board.capacity()

    def capacity(self, resource: str) -> int:
        """What there is of `resource`, free or not."""
        missing = PLENTY if resource.startswith(self._plenty) else 0
        return self._amounts.get(resource, missing)

    def free(self, resources: Iterable[str], running: Iterable[Running]) -> dict[str, int]:
        """What nobody holds of `resources`, which are in the order in which calls wait for them.

        Not quotas: those belong to no host.
        """
        wanted = [resource for resource in resources if not resource.startswith(QUOTA)]
        if not wanted:
            return {}
        free = {resource: self.capacity(resource) for resource in wanted}
        for one in running:
            for resource in free.keys() & one.holds.keys():
                free[resource] -= one.holds[resource]
        models = [r.removeprefix(MODEL) for r in wanted if r.startswith(MODEL)]
        if models and self.board is not None:
            room = self.board.room(models)
            free |= {resource: room.get(resource, 0) for resource in free if resource in room}
        return free
