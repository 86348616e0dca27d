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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

import psutil
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


class ControlGroups:
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


def open_groups(root: Path = CGROUPS, parent: str = "") -> ControlGroups | None:
    """What works here; None where nothing does, which is logged."""
    try:
        groups = ControlGroups(root, parent or own_parent())
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


# Of the interpreter and the packages that a function imports, beside what its calls take.
BASE_MIB: Final = 256


class CgroupLimits:
    """Limits on the groups that sandboxed workers are in anyway."""

    def __init__(self, groups: ControlGroups) -> None:
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


def descendants(pid: int) -> list[int]:
    """Ids of the processes below `pid`; empty when it is gone.

    The kernel's own lists, where it keeps them: psutil looks through all processes of the machine.
    """
    found: list[int] = []
    ahead = [pid]
    while ahead:
        try:
            below = _children(ahead.pop())
        except FileNotFoundError:
            return _slowly(pid)
        found += below
        ahead += below
    return found


def family(pid: int) -> list[int]:
    """`pid` and its `descendants`; empty when it is gone."""
    below = descendants(pid)
    return [pid, *below] if psutil.pid_exists(pid) else []


def kill_with_children(pid: int) -> None:
    """Kill a process, its group and its children: a sandbox's first process, with which all in it
    end, is of another user and another session than what waits for it outside."""
    try:
        below = _children(pid)
    except FileNotFoundError:
        below = _slowly(pid)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    for child in below:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(child, signal.SIGKILL)


def _children(pid: int) -> list[int]:
    """Raises FileNotFoundError where the kernel keeps no lists."""
    found: list[int] = []
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
    except (FileNotFoundError, ProcessLookupError):
        return found  # it has ended
    for task in tasks:
        try:
            found += map(int, (task / "children").read_text().split())
        except ProcessLookupError:
            continue
        except FileNotFoundError:
            if task.exists():
                raise
    return found


def _slowly(pid: int) -> list[int]:
    try:
        return [child.pid for child in psutil.Process(pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


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


class CgroupCores:
    """Quota (`cpu`) and which cores (`cpuset`) of groups that others may limit in other ways."""

    def __init__(self, groups: ControlGroups) -> None:
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


_NODES = Path("/sys/devices/system/node")


class CpuBackend(Protocol):
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
class CoreLease:
    """Cores that one action holds."""

    group: str
    cores: tuple[int, ...]


class CoreManager:
    """Hands out whole cores, those of one NUMA node first. Not thread-safe."""

    def __init__(self, nodes: Mapping[int, Sequence[int]], backend: CpuBackend) -> None:
        """`nodes`: the cores of each NUMA node that may be handed out."""
        self._free: dict[int, list[int]] = {n: sorted(cores) for n, cores in nodes.items()}
        self._node_of = {core: n for n, cores in nodes.items() for core in cores}
        self._backend = backend
        # What calls that run now were granted, by group: a sandbox may run several.
        self._granted: dict[str, list[CoreLease]] = {}
        # The kernel is told of these only: a container's engine is told by others.
        self._adopted: set[str] = set()
        self.kind = backend.name

    @property
    def free(self) -> int:
        """Cores that nobody holds."""
        return sum(map(len, self._free.values()))

    def take(self, group: str, count: int) -> CoreLease:
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
        return CoreLease(group, tuple(taken))

    def adopt(self, group: str, pids: Sequence[int]) -> None:
        """`pids`, a new worker and what it consists of, is `group` from now on."""
        self._adopted.add(group)
        self._tell("adopt", group, pids)
        if group in self._granted:  # it succeeds one that died with a call
            self._apply(group)

    def grant(self, lease: CoreLease) -> None:
        """Let the kernel know, just before the action runs; without cores it gets what is left."""
        granted = self._granted.setdefault(lease.group, [])
        if not any(one is lease for one in granted):
            granted.append(lease)
        self._apply(lease.group)

    def give_back(self, lease: CoreLease) -> None:
        """The action has ended."""
        for core in lease.cores:
            self._free[self._node_of[core]].append(core)
        for cores in self._free.values():
            cores.sort()
        self.withdraw(lease)

    def withdraw(self, lease: CoreLease) -> None:
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


def choose_backend(groups: ControlGroups | None, name: str = "auto") -> CpuBackend:
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
