"""A sandbox on this host: bubblewrap around the supervisor."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from services.reward import worker
from services.reward.groups import CgroupLimits, ControlGroups, CoreLease, CoreManager
from services.reward.sandbox import SandboxProfile
from services.reward.sandboxes import supervisor


class BubblewrapHome:
    """Frozen between calls by control groups, where there are any."""

    def __init__(
        self,
        name: str,
        cage: SandboxProfile,
        groups: ControlGroups | None,
        cores: CoreManager | None,
    ) -> None:
        """`groups` limit what it takes as a whole, if there are any; `cores` hands cores out."""
        self._name, self._cage = name, cage
        self._groups, self._cores = groups, cores
        self._fence = CgroupLimits(groups) if groups is not None else None

    def launch(self) -> tuple[Sequence[str], dict[str, str], bytes]:
        """Raises FailedPrecondition ("no_sandbox")."""
        files = [supervisor.__file__, worker.__file__]
        command, environment = self._cage.wrap(files, first=True)
        return command, environment, b""

    async def entered(self, pids: Sequence[int]) -> None:
        """Put it into its group."""
        if self._cores is not None:
            self._cores.adopt(self._name, pids)
        if self._fence is not None:
            self._fence.adopt(self._name, pids, self._cage.processes, self._cage.memory_mib)

    async def grant(self, lease: CoreLease) -> None:
        """Tell whoever hands cores out."""
        if self._cores is not None:
            self._cores.grant(lease)

    async def withdraw(self, lease: CoreLease) -> None:
        """Tell whoever hands cores out."""
        if self._cores is not None:
            self._cores.withdraw(lease)

    def memory_kills(self) -> int:
        """What the kernel counts, where it does."""
        return self._groups.memory_kills(self._name) if self._groups is not None else 0

    async def freeze(self) -> None:
        """Where control groups do it; else its first process, all that is left of it between calls,
        waits for the next one or for the service's end. Raises OSError or TimeoutError."""
        if self._groups is not None and "freezer" in self._groups.controllers:
            await asyncio.to_thread(self._groups.freeze, self._name)

    async def thaw(self) -> None:
        """Raises OSError."""
        if self._groups is None or "freezer" not in self._groups.controllers:
            return
        if self._groups.frozen(self._name):
            self._groups.thaw(self._name)

    async def ended(self) -> None:
        """Its group goes with it."""
        if self._cores is not None:
            self._cores.forget(self._name)
        if self._fence is not None:
            self._fence.forget(self._name)
