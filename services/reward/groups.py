"""Control groups: one per worker process, with every controller that this host lets us write.

A group holds a process and all that it starts, whatever they try: their share of the cores, how
much memory they take together, how many they are. It lives as long as the process, so that memory
and files stay between calls while nothing of it runs. With cgroup v2 a process is in one group, so
that whoever limits it in some way must use the same one; with v1 each controller has its own tree.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import structlog

log = structlog.get_logger("troupe.reward")

CGROUPS: Final = Path("/sys/fs/cgroup")
CONTROLLERS: Final = ("cpu", "cpuset", "memory", "pids", "freezer")

_PERIOD_US: Final = 100_000
# The least that kernels take: one per cent of a core. A worker answers its service with it.
_IDLE_QUOTA_US: Final = 1_000
# Weights of who may use a core: of calls that were given some, and of those that take what is left.
_SHARES: Final = {"v1": (1024, 20), "v2": (100, 2)}
_FREEZE_SECONDS: Final = 1.0

_parents = itertools.count()


def own_parent() -> str:
    """A name for the groups of this process, which no other container's process has."""
    space = os.stat("/proc/self/ns/pid").st_ino if os.path.exists("/proc/self/ns/pid") else 0
    return f"troupe-reward-{space}-{os.getpid()}.{next(_parents)}"


class Groups:
    """The groups of one service below `{root}/{parent}` (v2) or `{root}/{controller}/{parent}`.

    Members are named; a name whose process has a successor gets a new group, so that what is left
    of the old one counts for nobody else. Every method but the constructor's may raise OSError
    where the kernel refuses, for one whose process is gone or that was never adopted, too.
    """

    def __init__(self, root: Path, parent: str) -> None:
        """With all controllers that can be had. Raises OSError where there is none."""
        self._unified = (root / "cgroup.controllers").exists()
        self._parent = parent
        self._trees = _unified(root, parent) if self._unified else _separate(root, parent)
        self._current: dict[str, tuple[str, int]] = {}
        self._numbers = itertools.count()
        # Groups whose processes are ending.
        self._retired: list[str] = []

    @property
    def version(self) -> str:
        """ "v1" or "v2"."""
        return "v2" if self._unified else "v1"

    @property
    def controllers(self) -> frozenset[str]:
        """Those of CONTROLLERS that work here."""
        return frozenset(self._trees)

    def adopt(self, name: str, pids: Sequence[int]) -> None:
        """`pids`, a process and what it consists of, are `name` from now on, with no limits yet;
        repeating it changes nothing."""
        if not pids:
            raise ProcessLookupError(f"{name} has no process")
        if name in self._current and self._current[name][1] == pids[0]:
            return
        self.forget(name)
        group = f"{name}.{next(self._numbers)}"
        self._current[name] = (group, pids[0])
        for path in self._paths(group):
            path.mkdir(exist_ok=True)
        if not self._unified and "cpuset" in self._trees:
            # A new group may use nothing before it is told what.
            _copy(self._trees["cpuset"], self._trees["cpuset"] / group, "cpuset.mems")
            _copy(self._trees["cpuset"], self._trees["cpuset"] / group, "cpuset.cpus")
        refused: OSError | None = None
        for path in self._paths(group):
            for pid in pids:
                try:
                    write(path / "cgroup.procs", str(pid))
                except OSError as error:  # of one tree: others may take it all the same
                    refused = error
        if refused is not None:
            raise refused

    def grant(self, name: str, cores: Sequence[int]) -> None:
        """So much quota, on these cores."""
        write(self._file(name, "cpuset", "cpuset.cpus"), ",".join(map(str, cores)))
        self._weigh(name, 0)
        self._quota(name, _PERIOD_US * len(cores))

    def share(self, name: str) -> None:
        """What others leave of any core: no quota, the least weight."""
        if "cpuset" in self._trees:
            everything = "" if self._unified else _read(self._trees["cpuset"] / "cpuset.cpus")
            write(self._file(name, "cpuset", "cpuset.cpus"), everything + "\n")
        if "cpu" in self._trees:
            self._weigh(name, 1)
            self._quota(name, None)

    def revoke(self, name: str) -> None:
        """The least quota."""
        self._quota(name, _IDLE_QUOTA_US)

    def limit(self, name: str, processes: int, memory_mib: int) -> None:
        """At most so many processes and threads, and so much memory together (0: no limit)."""
        if "pids" in self._trees:
            write(self._file(name, "pids", "pids.max"), str(processes or "max"))
        if "memory" not in self._trees:
            return
        if self._unified:
            write(self._file(name, "memory", "memory.max"), str((memory_mib << 20) or "max"))
            swap = self._file(name, "memory", "memory.swap.max")
            if swap.exists():  # not where the kernel does not account for it
                write(swap, "0")
        else:
            write(
                self._file(name, "memory", "memory.limit_in_bytes"), str((memory_mib << 20) or -1)
            )

    def memory_kills(self, name: str) -> int:
        """Processes that the kernel ended because the group's memory was used up; 0 where it does
        not count them."""
        file = "memory.events" if self._unified else "memory.oom_control"
        try:
            counts = _read(self._file(name, "memory", file)).splitlines()
        except OSError:
            return 0
        return sum(int(line.split()[1]) for line in counts if line.startswith("oom_kill "))

    def freeze(self, name: str) -> None:
        """Nothing of it runs until it thaws. Raises TimeoutError when something does not stop."""
        if self._unified:
            write(self._file(name, "freezer", "cgroup.freeze"), "1")
        else:
            write(self._file(name, "freezer", "freezer.state"), "FROZEN")
        deadline = time.monotonic() + _FREEZE_SECONDS
        while not self.frozen(name):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{name} does not freeze within {_FREEZE_SECONDS:g} s")
            time.sleep(0.0005)

    def frozen(self, name: str) -> bool:
        """Whether all of it has stopped."""
        if self._unified:
            return "frozen 1" in _read(self._file(name, "freezer", "cgroup.events"))
        return _read(self._file(name, "freezer", "freezer.state")) == "FROZEN"

    def thaw(self, name: str) -> None:
        """It goes on where it stopped."""
        if self._unified:
            write(self._file(name, "freezer", "cgroup.freeze"), "0")
        else:
            write(self._file(name, "freezer", "freezer.state"), "THAWED")

    def members(self, name: str) -> list[int]:
        """Process ids of all that is in it."""
        if name not in self._current:
            raise FileNotFoundError(f"{name} is in no group")
        paths = self._paths(self._current[name][0])
        return [int(pid) for pid in _read(paths[0] / "cgroup.procs").split()]

    def forget(self, name: str) -> None:
        """Its processes end, or have ended: nothing holds them back, the group goes with them."""
        if name in self._current:
            # What ends must run for it, and v1 does not even kill what is frozen.
            with contextlib.suppress(OSError):
                self.thaw(name)
            with contextlib.suppress(OSError):
                self._quota(name, None)
            self._retired.append(self._current.pop(name)[0])
        self._retired = [group for group in self._retired if not self._removed(group)]

    def close(self) -> None:
        """All are gone."""
        for name in list(self._current):
            self.forget(name)
        self._retired = [group for group in self._retired if not self._removed(group)]
        for tree in set(self._trees.values()):
            _remove(tree)

    def _removed(self, group: str) -> bool:
        for path in self._paths(group):
            _remove(path)
        return not any(path.exists() for path in self._paths(group))

    def _paths(self, group: str) -> list[Path]:
        return sorted({tree / group for tree in self._trees.values()})

    def _file(self, name: str, controller: str, file: str) -> Path:
        if name not in self._current or controller not in self._trees:
            raise FileNotFoundError(f"{name} is in no group of the controller {controller}")
        return self._trees[controller] / self._current[name][0] / file

    def _weigh(self, name: str, place: int) -> None:
        file = "cpu.weight" if self._unified else "cpu.shares"
        write(self._file(name, "cpu", file), str(_SHARES[self.version][place]))

    def _quota(self, name: str, quota: int | None) -> None:
        if self._unified:
            text = f"{'max' if quota is None else quota} {_PERIOD_US}"
            write(self._file(name, "cpu", "cpu.max"), text)
        else:
            write(self._file(name, "cpu", "cpu.cfs_quota_us"), str(-1 if quota is None else quota))


def open_groups(root: Path = CGROUPS, parent: str = "") -> Groups | None:
    """What works here; None where nothing does, which is logged."""
    try:
        groups = Groups(root, parent or own_parent())
    except OSError as error:
        log.info("no control groups", reason=str(error))
        return None
    log.info("control groups", version=groups.version, controllers=sorted(groups.controllers))
    return groups


def write(path: Path, text: str) -> None:
    """Write a control file. Raises OSError."""
    # Control files are written in one piece, and created by the kernel only.
    descriptor = os.open(path, os.O_WRONLY | os.O_TRUNC)
    try:
        os.write(descriptor, text.encode())
    finally:
        os.close(descriptor)


def _unified(root: Path, parent: str) -> dict[str, Path]:
    offered = {*_read(root / "cgroup.controllers").split(), "freezer"}
    tree = root / parent
    _sweep(root, parent)
    tree.mkdir(exist_ok=True)
    trees: dict[str, Path] = {}
    for controller in CONTROLLERS:
        try:
            if controller not in offered:
                raise FileNotFoundError(f"no controller {controller} in {root}")
            if controller != "freezer":  # every group has one
                _enable(root, controller, parent)
                write(tree / "cgroup.subtree_control", f"+{controller}")
            trees[controller] = tree
        except OSError as error:
            log.info("no such control group", controller=controller, reason=str(error))
    return trees


def _enable(root: Path, controller: str, parent: str) -> None:
    """Hand a controller down from `root`, which must have no processes of its own for that."""
    try:
        write(root / "cgroup.subtree_control", f"+{controller}")
    except OSError as error:
        if error.errno != errno.EBUSY:
            raise
        # In a container the root of the tree is where the service itself runs.
        aside = root / f"{parent}-itself"
        aside.mkdir(exist_ok=True)
        write(aside / "cgroup.procs", str(os.getpid()))
        write(root / "cgroup.subtree_control", f"+{controller}")


def _separate(root: Path, parent: str) -> dict[str, Path]:
    trees: dict[str, Path] = {}
    for controller in CONTROLLERS:
        tree = root / controller / parent
        try:
            _sweep(root / controller, parent)
            tree.mkdir(exist_ok=True)
            if controller == "cpuset":
                _copy(tree.parent, tree, "cpuset.mems")
                _copy(tree.parent, tree, "cpuset.cpus")
            trees[controller] = tree
        except OSError as error:
            log.info("no such control group", controller=controller, reason=str(error))
    if not trees:
        raise FileNotFoundError(f"no controller below {root} can be used")
    return trees


def _copy(above: Path, below: Path, file: str) -> None:
    write(below / file, _read(above / file))


def _read(path: Path) -> str:
    return path.read_text().strip()


def _remove(path: Path) -> None:
    """Remove a group if nobody is in it."""
    with contextlib.suppress(OSError):  # with members that still end; the next start sweeps it
        path.rmdir()


def _sweep(tree: Path, parent: str) -> None:
    """End and remove what services left that were killed: `{stem}-{process id}.{number}`."""
    stem, _, own = parent.rpartition("-")
    if not stem or not own.partition(".")[0].isdigit():
        return
    for path in tree.glob(f"{stem}-*"):
        process = path.name.removeprefix(f"{stem}-").partition(".")[0]
        if process.isdigit() and not Path("/proc", process).exists():
            for group in (p for p in path.iterdir() if p.is_dir()):
                _end_all(group)
                _remove(group)
            _remove(path)


def _end_all(group: Path) -> None:
    """Kill what a service that died by itself left frozen: v1 keeps it until it thaws."""
    with contextlib.suppress(OSError):
        for pid in map(int, _read(group / "cgroup.procs").split()):
            if pid > 0:  # 0: of another container
                os.kill(pid, signal.SIGKILL)
        if (group / "freezer.state").exists():
            write(group / "freezer.state", "THAWED")
