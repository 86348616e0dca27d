"""The backend of a sandbox on this host: the supervisor, started in bubblewrap."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from services.reward import worker
from services.reward.cgroups import ControlGroups, CoreLease, CoreManager
from services.reward.sandboxes import supervisor
from services.reward.sandboxes.profile import SandboxProfile
from services.reward.sandboxes.sandbox import SandboxBackend


class BubblewrapBackend(SandboxBackend):
    """A bubblewrap sandbox, frozen between calls where control groups can do that.

    Elsewhere nothing but the supervisor is left between calls, and it waits for the next one.
    """

    def __init__(
        self,
        name: str,
        profile: SandboxProfile,
        groups: ControlGroups | None,
        cores: CoreManager | None,
    ) -> None:
        """`groups` limit what it takes as a whole, if there are any; `cores` hands cores out."""
        self._name, self._profile = name, profile
        self._groups, self._cores = groups, cores

    def launch(self) -> tuple[Sequence[str], dict[str, str], bytes]:
        files = [supervisor.__file__, worker.__file__]
        command, environment = self._profile.wrap(files, first=True)
        return command, environment, b""

    async def entered(self, pids: Sequence[int]) -> None:
        if self._cores is not None:
            self._cores.adopt(self._name, pids)
        if self._groups is not None:
            profile = self._profile
            self._groups.confine(self._name, pids, profile.processes, profile.memory_mib)

    async def grant(self, lease: CoreLease) -> None:
        if self._cores is not None:
            self._cores.grant(lease)

    async def withdraw(self, lease: CoreLease) -> None:
        if self._cores is not None:
            self._cores.withdraw(lease)

    def memory_kills(self) -> int:
        return self._groups.memory_kills(self._name) if self._groups is not None else 0

    async def freeze(self) -> None:
        if self._groups is not None and "freezer" in self._groups.controllers:
            await asyncio.to_thread(self._groups.freeze, self._name)

    async def thaw(self) -> None:
        if self._groups is None or "freezer" not in self._groups.controllers:
            return
        if self._groups.frozen(self._name):
            self._groups.thaw(self._name)

    async def ended(self) -> None:
        for manager in (self._cores, self._groups):
            if manager is not None:
                manager.forget(self._name)
