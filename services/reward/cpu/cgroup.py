"""Cores by control groups: a process and all its children, whatever they try."""

from __future__ import annotations

from collections.abc import Sequence

from services.reward.groups import Groups


class CgroupCores:
    """Quota (`cpu`) and which cores (`cpuset`) of groups that others may limit in other ways."""

    def __init__(self, groups: Groups) -> None:
        """Raises OSError where one of the two controllers cannot be used."""
        if missing := {"cpu", "cpuset"} - groups.controllers:
            raise FileNotFoundError(f"no controller {', '.join(sorted(missing))}")
        self.name = f"cgroup{groups.version.removeprefix('v')}"
        self._groups = groups

    def adopt(self, group: str, pids: Sequence[int]) -> None:
        """A share, until they are granted cores."""
        self._groups.adopt(group, pids)
        self._groups.share(group)

    def grant(self, group: str, cores: Sequence[int]) -> None:
        """So much quota, on these cores; without any the least share of all."""
        if cores:
            self._groups.grant(group, cores)
        else:
            self._groups.share(group)

    def revoke(self, group: str) -> None:
        """The least quota."""
        self._groups.revoke(group)

    def forget(self, group: str) -> None:
        """Remove the group."""
        self._groups.forget(group)

    def close(self) -> None:
        """Remove the parent too."""
        self._groups.close()
