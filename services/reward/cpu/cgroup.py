"""Cores by control groups: a process and all its children, whatever they try.

One group per worker below `{root}/{parent}`: it lives as long as the worker, so that memory and
files of its processes stay between actions while its share of the cores is next to nothing.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

_PERIOD_US = 100_000
# The least that kernels take: one per cent of a core. A worker answers its service with it.
_IDLE_QUOTA_US = 1_000


def write(path: Path, text: str) -> None:
    """Write a control file. Raises OSError."""
    # Control files are written in one piece, and created by the kernel only.
    descriptor = os.open(path, os.O_WRONLY | os.O_TRUNC)
    try:
        os.write(descriptor, text.encode())
    finally:
        os.close(descriptor)


def join(group: Path, pids: Sequence[int]) -> None:
    """Move processes into a group, all their threads with them. Raises OSError."""
    for pid in pids:
        write(group / "cgroup.procs", str(pid))


def remove(path: Path) -> None:
    """Remove a group if nobody is in it."""
    with contextlib.suppress(OSError):  # with members that still end; the next start sweeps it
        path.rmdir()


def sweep(tree: Path, parent: str) -> None:
    """Remove what services left that were killed: `{stem}-{process id}`, and nobody in it."""
    stem, _, own = parent.rpartition("-")
    if not stem or not own.isdigit():
        return
    for path in tree.glob(f"{stem}-*"):
        process = path.name.removeprefix(f"{stem}-")
        if process.isdigit() and not Path("/proc", process).exists():
            for group in [*(p for p in path.iterdir() if p.is_dir()), path]:
                remove(group)


class CgroupV1:
    """Controllers `cpu` (quota) and `cpuset` (which cores), each with a tree of its own."""

    name = "cgroup1"

    def __init__(self, root: Path, parent: str) -> None:
        """Make `parent` in both trees. Raises OSError where that cannot be done."""
        for tree in ("cpu", "cpuset"):
            sweep(root / tree, parent)
        self._cpu, self._cpuset = root / "cpu" / parent, root / "cpuset" / parent
        self._cpu.mkdir(exist_ok=True)
        self._cpuset.mkdir(exist_ok=True)
        above = self._cpuset.parent
        # A new group may use nothing before it is told what.
        self._memory_nodes = (above / "cpuset.mems").read_text().strip()
        self._all_cores = (above / "cpuset.cpus").read_text().strip()
        write(self._cpuset / "cpuset.mems", self._memory_nodes)
        write(self._cpuset / "cpuset.cpus", self._all_cores)

    def adopt(self, group: str, pids: Sequence[int]) -> None:
        """Move `pids` into groups of their own."""
        for tree in (self._cpu, self._cpuset):
            (tree / group).mkdir(exist_ok=True)
        write(self._cpuset / group / "cpuset.mems", self._memory_nodes)
        write(self._cpuset / group / "cpuset.cpus", self._all_cores)
        write(self._cpu / group / "cpu.cfs_period_us", str(_PERIOD_US))
        for tree in (self._cpu, self._cpuset):
            join(tree / group, pids)

    def grant(self, group: str, cores: Sequence[int]) -> None:
        """So much quota, on these cores."""
        write(self._cpuset / group / "cpuset.cpus", ",".join(map(str, cores)))
        write(self._cpu / group / "cpu.cfs_quota_us", str(_PERIOD_US * len(cores)))

    def revoke(self, group: str) -> None:
        """The least quota."""
        write(self._cpu / group / "cpu.cfs_quota_us", str(_IDLE_QUOTA_US))

    def forget(self, group: str) -> None:
        """Remove the groups."""
        for tree in (self._cpu, self._cpuset):
            remove(tree / group)

    def close(self) -> None:
        """Remove the parent too."""
        for tree in (self._cpu, self._cpuset):
            remove(tree)


class CgroupV2:
    """The unified tree: `cpu.max` (quota) and `cpuset.cpus` (which cores)."""

    name = "cgroup2"

    def __init__(self, root: Path, parent: str) -> None:
        """Make `parent` with both controllers. Raises OSError where that cannot be done."""
        offered = (root / "cgroup.controllers").read_text().split()
        if missing := {"cpu", "cpuset"} - set(offered):
            raise FileNotFoundError(f"no controller {', '.join(sorted(missing))} in {root}")
        write(root / "cgroup.subtree_control", "+cpu +cpuset")
        sweep(root, parent)
        self._base = root / parent
        self._base.mkdir(exist_ok=True)
        write(self._base / "cgroup.subtree_control", "+cpu +cpuset")

    def adopt(self, group: str, pids: Sequence[int]) -> None:
        """Move `pids` into a group of their own."""
        (self._base / group).mkdir(exist_ok=True)
        join(self._base / group, pids)

    def grant(self, group: str, cores: Sequence[int]) -> None:
        """So much quota, on these cores."""
        write(self._base / group / "cpuset.cpus", ",".join(map(str, cores)))
        write(self._base / group / "cpu.max", f"{_PERIOD_US * len(cores)} {_PERIOD_US}")

    def revoke(self, group: str) -> None:
        """The least quota."""
        write(self._base / group / "cpu.max", f"{_IDLE_QUOTA_US} {_PERIOD_US}")

    def forget(self, group: str) -> None:
        """Remove the group."""
        remove(self._base / group)

    def close(self) -> None:
        """Remove the parent too."""
        remove(self._base)
