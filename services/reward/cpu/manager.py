"""Which cores an action gets, and how the kernel is told."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import structlog

from services.reward.cpu.affinity import Affinity
from services.reward.cpu.cgroup import CgroupCores
from services.reward.groups import Groups

log = structlog.get_logger("troupe.reward")

_NODES = Path("/sys/devices/system/node")


class Backend(Protocol):
    """How cores are given to a process and all that it starts, and taken back."""

    name: str

    def adopt(self, group: str, pids: Sequence[int]) -> None:
        """From now on `group` is `pids`, a process and its descendants. Raises OSError."""

    def grant(self, group: str, cores: Sequence[int]) -> None:
        """`group` may use exactly these cores; none: what others leave of any. Raises OSError."""

    def revoke(self, group: str) -> None:
        """`group` may use next to nothing, but goes on to exist: its memory and files stay."""

    def forget(self, group: str) -> None:
        """There is no such group any more."""

    def close(self) -> None:
        """There are none any more."""


@dataclass(frozen=True)
class Lease:
    """Cores that one action holds."""

    group: str
    cores: tuple[int, ...]


class CoreManager:
    """Hands out whole cores, those of one NUMA node first. Not thread-safe."""

    def __init__(self, nodes: Mapping[int, Sequence[int]], backend: Backend) -> None:
        """`nodes`: the cores of each NUMA node that may be handed out."""
        self._free: dict[int, list[int]] = {n: sorted(cores) for n, cores in nodes.items()}
        self._node_of = {core: n for n, cores in nodes.items() for core in cores}
        self._backend = backend
        # What calls that run now were granted, by group: a sandbox may run several.
        self._granted: dict[str, list[Lease]] = {}
        # The kernel is told of these only: a container's engine is told by others.
        self._adopted: set[str] = set()
        self.kind = backend.name

    @property
    def free(self) -> int:
        """Cores that nobody holds."""
        return sum(map(len, self._free.values()))

    def take(self, group: str, count: int) -> Lease:
        """`count` cores for `group`, which nobody else gets. Raises ValueError when not free.

        The fullest node that has them all; else of as few nodes as possible.
        """
        if count > self.free:
            raise ValueError(f"{count} cores wanted, {self.free} are free")
        whole = [n for n, cores in self._free.items() if len(cores) >= count]
        order = (
            [min(whole, key=lambda n: (len(self._free[n]), n))]
            if whole
            else sorted(self._free, key=lambda n: (-len(self._free[n]), n))
        )
        taken: list[int] = []
        for node in order:
            part = self._free[node][: count - len(taken)]
            del self._free[node][: len(part)]
            taken += part
        return Lease(group, tuple(taken))

    def adopt(self, group: str, pids: Sequence[int]) -> None:
        """`pids`, a new worker and what it consists of, is `group` from now on."""
        self._adopted.add(group)
        self._tell("adopt", group, pids)
        if group in self._granted:  # it succeeds one that died with a call
            self._apply(group)

    def grant(self, lease: Lease) -> None:
        """Let the kernel know, just before the action runs; without cores it gets what is left."""
        granted = self._granted.setdefault(lease.group, [])
        if not any(one is lease for one in granted):
            granted.append(lease)
        self._apply(lease.group)

    def give_back(self, lease: Lease) -> None:
        """The action has ended."""
        for core in lease.cores:
            self._free[self._node_of[core]].append(core)
        for cores in self._free.values():
            cores.sort()
        self.withdraw(lease)

    def withdraw(self, lease: Lease) -> None:
        """Take back what was granted; the cores stay with whoever holds the lease."""
        granted = self._granted.get(lease.group, [])
        granted[:] = [one for one in granted if one is not lease]
        self._apply(lease.group)

    def _apply(self, group: str) -> None:
        granted = self._granted.get(group)
        if granted and group in self._adopted:
            self._tell("grant", group, sorted({core for one in granted for core in one.cores}))
        elif not granted:
            self._granted.pop(group, None)
            if group in self._adopted:
                self._tell("revoke", group)

    def _tell(self, what: str, group: str, *values: Any) -> None:
        try:
            getattr(self._backend, what)(group, *values)
        except OSError as error:  # its process is gone: whoever waits for it will see
            log.warning("cores of a worker", what=what, group=group, error=str(error))

    def forget(self, group: str) -> None:
        """The worker of `group` is gone for good."""
        self._adopted.discard(group)
        self._backend.forget(group)

    def close(self) -> None:
        """All workers are gone."""
        self._backend.close()


def usable_cores(count: int) -> dict[int, list[int]]:
    """`count` of the cores that this process may use, by NUMA node. Raises ValueError."""
    allowed = sorted(os.sched_getaffinity(0))
    if count > len(allowed):
        raise ValueError(f"{count} cores wanted, this process may use {len(allowed)}")
    nodes: dict[int, list[int]] = {}
    for core in allowed[:count]:
        nodes.setdefault(_node_of(core), []).append(core)
    return nodes


def choose_backend(groups: Groups | None, name: str = "auto") -> Backend:
    """The strongest way that works here: `groups`, else affinity and nice.

    With a `name` that one; raises OSError where it does not work.
    """
    if name == "affinity":
        return Affinity()
    try:
        if groups is None:
            raise FileNotFoundError("no control groups can be written here")
        backend = CgroupCores(groups)
        if name not in ("auto", backend.name):
            raise FileNotFoundError(f"control groups are {groups.version} here")
    except OSError as error:
        if name != "auto":
            raise
        log.info("cores are not given through control groups", reason=str(error))
        return Affinity()
    return backend


def _node_of(core: int) -> int:
    for node in _NODES.glob(f"node*/cpu{core}"):
        return int(node.parent.name.removeprefix("node"))
    return 0
