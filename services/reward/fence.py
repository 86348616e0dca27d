"""What a sandbox takes as a whole: processes and memory, by control groups.

Limits that a process inherits count for one process (memory) or do not bind at all where the
service is root (processes): the kernel exempts root, whatever a user namespace calls it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import structlog

from services.reward.groups import Groups

log = structlog.get_logger("troupe.reward")

# Of the interpreter and the packages that a function imports, beside what its calls take.
BASE_MIB: Final = 256


class Fence:
    """Limits on the groups that sandboxed workers are in anyway."""

    def __init__(self, groups: Groups) -> None:
        """`groups`: shared with whoever hands cores out."""
        self._groups = groups
        for controller in sorted({"pids", "memory"} - groups.controllers):
            log.warning("sandboxes as a whole are not limited", controller=controller)

    def adopt(self, name: str, pids: Sequence[int], processes: int, memory_mib: int) -> None:
        """`pids` together may be at most `processes` and take `memory_mib` (0: unlimited)."""
        try:
            try:
                self._groups.adopt(name, pids)
            finally:  # where it is in some groups only
                self._groups.limit(name, processes, memory_mib and BASE_MIB + memory_mib)
        except OSError as error:  # it is gone: whoever waits for it will see
            log.warning("a sandbox is not limited as a whole", name=name, error=str(error))

    def forget(self, name: str) -> None:
        """Its processes are gone."""
        self._groups.forget(name)

    def close(self) -> None:
        """All are gone."""
        self._groups.close()
