"""What a sandbox takes as a whole: processes and memory, by control groups.

Limits that a process inherits count for one process (memory) or do not bind at all where the
service is root (processes): the kernel exempts root, whatever a user namespace calls it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import structlog

from services.reward.cpu.cgroup import join, remove, sweep, write

log = structlog.get_logger("troupe.reward")

# Of the interpreter and the packages that a function imports, beside what its calls take.
_BASE_MIB = 256


class Fence:
    """Groups of the controllers `pids` and `memory`: two trees (v1), or one for both (v2)."""

    def __init__(self, trees: dict[str, Path]) -> None:
        """`trees`: where the controllers "pids" and "memory" have this service's groups."""
        self._trees = trees

    def adopt(self, name: str, pids: Sequence[int], processes: int, memory_mib: int) -> None:
        """`pids` together may be at most `processes` and take `memory_mib` (0: unlimited)."""
        try:
            for tree in set(self._trees.values()):
                (tree / name).mkdir(exist_ok=True)
            if "pids" in self._trees:
                write(self._trees["pids"] / name / "pids.max", str(processes))
            if "memory" in self._trees and memory_mib:
                group = self._trees["memory"] / name
                for file, value in _memory_limits(group, _BASE_MIB + memory_mib):
                    write(file, value)
            for tree in set(self._trees.values()):
                join(tree / name, pids)
        except OSError as error:  # it is gone: whoever waits for it will see
            log.warning("a sandbox got no limits as a whole", name=name, error=str(error))

    def forget(self, name: str) -> None:
        """Its processes are gone."""
        for tree in set(self._trees.values()):
            remove(tree / name)

    def close(self) -> None:
        """All are gone."""
        for tree in set(self._trees.values()):
            remove(tree)


def make_fence(root: Path, parent: str) -> Fence | None:
    """With what works here; None where nothing does, which is logged."""
    trees: dict[str, Path] = {}
    unified = root / "cgroup.controllers"
    for controller in ("pids", "memory"):
        tree = root if unified.exists() else root / controller
        try:
            if unified.exists():
                write(root / "cgroup.subtree_control", f"+{controller}")
            sweep(tree, parent)
            (tree / parent).mkdir(exist_ok=True)
            if unified.exists():
                write(tree / parent / "cgroup.subtree_control", f"+{controller}")
            trees[controller] = tree / parent
        except OSError as error:
            log.info("sandboxes as a whole are not limited", controller=controller, why=str(error))
    return Fence(trees) if trees else None


def _memory_limits(group: Path, mib: int) -> list[tuple[Path, str]]:
    if (unified := group / "memory.max").exists():
        return [(unified, str(mib << 20)), (group / "memory.swap.max", "0")]
    return [(group / "memory.limit_in_bytes", str(mib << 20))]
