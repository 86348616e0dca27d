"""Cores by affinity and nice: works everywhere, and binds whoever does not fight it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence

import psutil

from services.reward.descendants import descendants

# Of a worker without an action: whatever its children still do, others go first.
_IDLE_NICE = 19
# Of an action that takes no cores: it waits for something else, and gets what others leave.
_SHARE_NICE = 10


class Affinity:
    """Affinity of a process and of the children that it has at that moment; later ones inherit."""

    name = "affinity"

    def __init__(self) -> None:
        self._pids: dict[str, int] = {}
        # Without the right to lower a nice value again, it must never be raised.
        self._may_renice = os.geteuid() == 0

    def adopt(self, group: str, pids: Sequence[int]) -> None:
        """`group` is the first of `pids` and its descendants."""
        self._pids[group] = pids[0]

    def grant(self, group: str, cores: Sequence[int]) -> None:
        """Bind them to `cores`; without any to none, behind those who hold some."""
        for process in self._members(group):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.cpu_affinity(list(cores) or sorted(os.sched_getaffinity(0)))
                if self._may_renice:
                    process.nice(0 if cores else _SHARE_NICE)

    def revoke(self, group: str) -> None:
        """Leave them where they are, behind everybody else."""
        if not self._may_renice:
            return
        for process in self._members(group):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.nice(_IDLE_NICE)

    def forget(self, group: str) -> None:
        """Nothing is left behind."""
        self._pids.pop(group, None)

    def close(self) -> None:
        """Nothing is left behind."""
        self._pids.clear()

    def _members(self, group: str) -> list[psutil.Process]:
        try:
            process = psutil.Process(self._pids[group])
        except (KeyError, psutil.NoSuchProcess) as error:
            raise ProcessLookupError(f"{group} has no process: {error}") from error
        found = [process]
        for pid in descendants(process.pid):
            with contextlib.suppress(psutil.NoSuchProcess):
                found.append(psutil.Process(pid))
        return found
