"""Which walls stand between a call and this host: what works here, not what was asked for."""

from __future__ import annotations

from pathlib import Path

from services.reward.groups import Groups
from services.reward.sandbox import CONTAINER, PROCESS, Cage
from services.reward.sandboxes.container import find_engine
from services.reward.sandboxes.seccomp import filter_path
from troupe.rpc import FailedPrecondition


def layers(cage: Cage, groups: Groups | None) -> list[str]:
    """Their names, for people: "namespaces", "seccomp", "cgroup:memory", ..."""
    if cage.level == CONTAINER:
        try:
            return [f"container:{Path(find_engine()).name}"]
        except FailedPrecondition:
            return []
    limited = ["rlimit:as"] if cage.memory_mib else []
    if cage.level == PROCESS:
        return [*limited, *(["landlock"] if cage.reads or cage.writes else [])]
    found = ["namespaces", "read-only root", "no_new_privs", "rlimits", *limited]
    if filter_path() is not None:
        found.append("seccomp")
    if groups is not None:
        found += [f"cgroup:{name}" for name in ("memory", "pids") if name in groups.controllers]
    return found
