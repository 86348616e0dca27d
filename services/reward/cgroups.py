"""Cores, memory and process limits of worker processes: control groups, and core leases.

There is one control group per worker process, with every controller that is writable on this host.
It holds the process and its descendants and lives as long as the process, so memory and files stay
between calls while nothing runs. With cgroup v2 a process is in one group, which limits of all
kinds must share; with v1 each controller has its own tree.
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
from typing import Any, Final

import psutil
import structlog

from troupe.processes.ending import descendants

log = structlog.get_logger("troupe.reward")

CGROUPS: Final = Path("/sys/fs/cgroup")
CONTROLLERS: Final = ("cpu", "cpuset", "memory", "pids", "freezer")

_PERIOD_US: Final = 100_000
# The least quota that kernels take: one per cent of a core, enough to answer the service.
_IDLE_QUOTA_US: Final = 1_000
# CPU weights: of calls that hold cores, and of those that use what is left.
_SHARES: Final = {"v1": (1024, 20), "v2": (100, 2)}
_FREEZE_SECONDS: Final = 1.0
# Memory of the interpreter and imported packages, in addition to a call's memory.
BASE_MIB: Final = 256

_parents = itertools.count()


def own_parent() -> str:
    """Return a name for the groups of this process that is unique over the containers of the
    host."""
    space = os.stat("/proc/self/ns/pid").st_ino if os.path.exists("/proc/self/ns/pid") else 0
    return f"troupe-reward-{space}-{os.getpid()}.{next(_parents)}"


class ControlGroups:
    """The control groups of one service, below `{root}/{parent}` (v2) or
    `{root}/{controller}/{parent}` (v1).

    Groups are named after their executor or sandbox. When its process is replaced, the name gets a
    new group, so that leftovers of the old process do not count against the new one. All methods
    may raise OSError: if the kernel refuses, or if the process has ended or was never adopted.
    """

    def __init__(self, root: Path, parent: str) -> None:
        """Uses all controllers that are writable. Raises OSError where there is none."""
        self._unified = (root / "cgroup.controllers").exists()
        self._parent = parent
        self._trees = _unified(root, parent) if self._unified else _separate(root, parent)
        self._current: dict[str, tuple[str, int]] = {}
        self._numbers = itertools.count()
        # Groups to be removed when their processes have ended.
        self._retired: list[str] = []

    @property
    def version(self) -> str:
        """ "v1" or "v2"."""
        return "v2" if self._unified else "v1"

    @property
    def name(self) -> str:
        """The name of this way to give cores: "cgroup1" or "cgroup2"."""
        return f"cgroup{self.version.removeprefix('v')}"

    @property
    def controllers(self) -> frozenset[str]:
        """The controllers of CONTROLLERS that are writable."""
        return frozenset(self._trees)

    def adopt(self, name: str, pids: Sequence[int]) -> None:
        """Move `pids`, a process and its descendants, to a new group of `name`, without limits yet;
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
            # A new cpuset is empty, and takes no process before it is filled.
            _copy(self._trees["cpuset"], self._trees["cpuset"] / group, "cpuset.mems")
            _copy(self._trees["cpuset"], self._trees["cpuset"] / group, "cpuset.cpus")
        refused: OSError | None = None
        for path in self._paths(group):
            for pid in pids:
                try:
                    write(path / "cgroup.procs", str(pid))
                except OSError as error:  # of this tree; the others may accept it
                    refused = error
        if refused is not None:
            raise refused

    def confine(self, name: str, pids: Sequence[int], processes: int, memory_mib: int) -> None:
        """Bound a sandbox as a whole: `pids` and their descendants, to `processes` and `memory_mib`
        (0: no bound). Raises nothing: where it fails, that is logged."""
        try:
            try:
                self.adopt(name, pids)
            finally:  # also where it was adopted by some of the controllers only
                self.limit(name, processes, memory_mib and BASE_MIB + memory_mib)
        except OSError as error:  # the process may have ended: its caller sees that
            log.warning("a sandbox is not limited as a whole", name=name, error=str(error))

    def grant(self, name: str, cores: Sequence[int]) -> None:
        """Bind the group to `cores`, with their full quota; without cores, give it the unused
        time."""
        if not cores:
            self.share(name)
            return
        write(self._file(name, "cpuset", "cpuset.cpus"), ",".join(map(str, cores)))
        self._weigh(name, 0)
        self._quota(name, _PERIOD_US * len(cores))

    def share(self, name: str) -> None:
        """Let the group use the unused time of any core: no quota, the lowest weight."""
        if "cpuset" in self._trees:
            everything = "" if self._unified else _read(self._trees["cpuset"] / "cpuset.cpus")
            write(self._file(name, "cpuset", "cpuset.cpus"), everything + "\n")
        if "cpu" in self._trees:
            self._weigh(name, 1)
            self._quota(name, None)

    def revoke(self, name: str) -> None:
        """Give the group the least quota; its memory and files stay."""
        self._quota(name, _IDLE_QUOTA_US)

    def limit(self, name: str, processes: int, memory_mib: int) -> None:
        """Bound processes and threads, and memory, of the group as a whole; 0: no bound."""
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
        """Return the processes that the kernel killed because the group's memory was used up; 0
        where it does not count them."""
        file = "memory.events" if self._unified else "memory.oom_control"
        try:
            counts = _read(self._file(name, "memory", file)).splitlines()
        except OSError:
            return 0
        return sum(int(line.split()[1]) for line in counts if line.startswith("oom_kill "))

    def freeze(self, name: str) -> None:
        """Stop all processes of the group. Raises TimeoutError when one does not stop."""
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
        """Return whether all processes of the group are stopped."""
        if self._unified:
            return "frozen 1" in _read(self._file(name, "freezer", "cgroup.events"))
        return _read(self._file(name, "freezer", "freezer.state")) == "FROZEN"

    def thaw(self, name: str) -> None:
        """Resume the processes of the group."""
        if self._unified:
            write(self._file(name, "freezer", "cgroup.freeze"), "0")
        else:
            write(self._file(name, "freezer", "freezer.state"), "THAWED")

    def forget(self, name: str) -> None:
        """Lift all limits from processes that end or have ended; the group is removed then."""
        if name in self._current:
            # A process must run to end, and v1 does not kill what is frozen.
            with contextlib.suppress(OSError):
                self.thaw(name)
            with contextlib.suppress(OSError):
                self._quota(name, None)
            self._retired.append(self._current.pop(name)[0])
        self._retired = [group for group in self._retired if not self._removed(group)]

    def close(self) -> None:
        """Remove all groups."""
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
    """Return the control groups that are writable here; None, and a log line, where there are
    none."""
    try:
        groups = ControlGroups(root, parent or own_parent())
    except OSError as error:
        log.info("no control groups", reason=str(error))
        return None
    log.info("control groups", version=groups.version, controllers=sorted(groups.controllers))
    for controller in sorted({"pids", "memory"} - groups.controllers):
        log.warning("sandboxes as a whole are not limited", controller=controller)
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
    """Delegate a controller from `root`, which must not have processes of its own for that."""
    try:
        write(root / "cgroup.subtree_control", f"+{controller}")
    except OSError as error:
        if error.errno != errno.EBUSY:
            raise
        # In a container the service itself runs in the root of the tree.
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
    """Remove a group that is empty."""
    with contextlib.suppress(OSError):  # its processes are still ending: the next start sweeps it
        path.rmdir()


def _sweep(tree: Path, parent: str) -> None:
    """Kill and remove the groups of services that were killed: `{stem}-{process id}.{number}`."""
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
    """Kill all processes of a group left by a killed service, including frozen ones."""
    with contextlib.suppress(OSError):
        for pid in map(int, _read(group / "cgroup.procs").split()):
            if pid > 0:  # 0: of another container
                os.kill(pid, signal.SIGKILL)
        if (group / "freezer.state").exists():
            write(group / "freezer.state", "THAWED")


def family(pid: int) -> list[int]:
    """Return `pid` and its `descendants`; empty after it has ended."""
    below = descendants(pid)
    return [pid, *below] if psutil.pid_exists(pid) else []


# Nice value of a worker without a call: its children run behind everything else.
_IDLE_NICE = 19
# Nice value of a call that takes no cores.
_SHARE_NICE = 10


class Affinity:
    """The backend without control groups, which gives cores by CPU affinity and nice values: to a
    process and its present children, from which later ones inherit them."""

    name = "affinity"

    def __init__(self) -> None:
        self._pids: dict[str, int] = {}
        # Without the right to lower a nice value again, it must never be raised.
        self._may_renice = os.geteuid() == 0

    def adopt(self, group: str, pids: Sequence[int]) -> None:
        """Call `pids`, a process and its descendants, `group`."""
        self._pids[group] = pids[0]

    def grant(self, group: str, cores: Sequence[int]) -> None:
        """Bind the processes to `cores`; without cores to any, behind calls that hold some."""
        for process in self._members(group):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.cpu_affinity(list(cores) or sorted(os.sched_getaffinity(0)))
                if self._may_renice:
                    process.nice(0 if cores else _SHARE_NICE)

    def revoke(self, group: str) -> None:
        """Let the processes run at the lowest priority."""
        if not self._may_renice:
            return
        for process in self._members(group):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.nice(_IDLE_NICE)

    def forget(self, group: str) -> None:
        """Handle the end of the processes of `group`."""
        self._pids.pop(group, None)

    def close(self) -> None:
        """Handle the end of all processes."""
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


_NODES = Path("/sys/devices/system/node")


@dataclass(frozen=True)
class CoreLease:
    """Cores that one call, or one chunk of calls, holds."""

    group: str
    cores: tuple[int, ...]


class CoreManager:
    """A manager of whole cores of this host, leased from one NUMA node if possible. Not
    thread-safe."""

    def __init__(
        self, nodes: Mapping[int, Sequence[int]], backend: Affinity | ControlGroups
    ) -> None:
        """`nodes`: the cores of each NUMA node that may be handed out. `backend`: control groups
        say which (`cpuset`) and how much of them (`cpu`) a worker gets."""
        self._free: dict[int, list[int]] = {n: sorted(cores) for n, cores in nodes.items()}
        self._node_of = {core: n for n, cores in nodes.items() for core in cores}
        self.total = len(self._node_of)
        self._backend = backend
        # Group -> leases of its running calls: a sandbox may run several.
        self._granted: dict[str, list[CoreLease]] = {}
        # Groups whose cores `backend` sets; a container's cores are set by its engine.
        self._adopted: set[str] = set()
        self.kind = backend.name

    @property
    def free(self) -> int:
        """Cores not leased."""
        return sum(map(len, self._free.values()))

    def take(self, group: str, count: int) -> CoreLease:
        """Lease `count` cores to `group`. Raises ValueError when they are not free.

        They come from the fullest node that has them all, else from as few nodes as possible.
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
        """Put `pids`, a new worker process and its descendants, into `group`."""
        self._adopted.add(group)
        self._call_backend("adopt", group, pids)
        if isinstance(self._backend, ControlGroups):
            self._call_backend("share", group)  # it has no cores of its own yet
        if group in self._granted:  # its predecessor died during a call
            self._apply(group)

    def grant(self, lease: CoreLease) -> None:
        """Set the cores of a lease in the kernel, just before the call runs."""
        granted = self._granted.setdefault(lease.group, [])
        if not any(one is lease for one in granted):
            granted.append(lease)
        self._apply(lease.group)

    def give_back(self, lease: CoreLease) -> None:
        """Return the cores of a call that has ended."""
        for core in lease.cores:
            self._free[self._node_of[core]].append(core)
        for cores in self._free.values():
            cores.sort()
        self.withdraw(lease)

    def withdraw(self, lease: CoreLease) -> None:
        """Undo `grant`; the cores stay leased."""
        granted = self._granted.get(lease.group, [])
        granted[:] = [one for one in granted if one is not lease]
        self._apply(lease.group)

    def _apply(self, group: str) -> None:
        granted = self._granted.get(group)
        if granted and group in self._adopted:
            self._call_backend(
                "grant", group, sorted({core for one in granted for core in one.cores})
            )
        elif not granted:
            self._granted.pop(group, None)
            if group in self._adopted:
                self._call_backend("revoke", group)

    def _call_backend(self, what: str, group: str, *values: Any) -> None:
        try:
            getattr(self._backend, what)(group, *values)
        except OSError as error:  # its process has ended: its caller sees that
            log.warning("cores of a worker", what=what, group=group, error=str(error))

    def forget(self, group: str) -> None:
        """Handle the permanent end of the worker process of `group`."""
        self._adopted.discard(group)
        self._backend.forget(group)

    def close(self) -> None:
        """Handle the end of all workers."""
        self._backend.close()


class CoreCount:
    """A count of another host's cores; that host itself chooses the cores of a call."""

    def __init__(self, count: int) -> None:
        self.free = self.total = count

    def take(self, group: str, count: int) -> CoreLease:
        """Lease `count` cores to `group`. Raises ValueError when they are not free."""
        if count > self.free:
            raise ValueError(f"{count} cores wanted, {self.free} are free")
        self.free -= count
        return CoreLease(group, tuple(range(count)))

    def give_back(self, lease: CoreLease) -> None:
        """Return the cores of a call that has ended."""
        self.free += len(lease.cores)


def usable_cores(count: int) -> dict[int, list[int]]:
    """Return `count` of the cores that this process may use, by NUMA node. Raises ValueError."""
    allowed = sorted(os.sched_getaffinity(0))
    if count > len(allowed):
        raise ValueError(f"{count} cores wanted, this process may use {len(allowed)}")
    nodes: dict[int, list[int]] = {}
    for core in allowed[:count]:
        nodes.setdefault(_node_of(core), []).append(core)
    return nodes


def choose_backend(groups: ControlGroups | None, name: str = "auto") -> Affinity | ControlGroups:
    """Return the strongest backend that works here: control groups, else affinity and nice values.

    With a `name` only that one; raise OSError where it does not work.
    """
    if name == "affinity":
        return Affinity()
    try:
        if groups is None:
            raise FileNotFoundError("no control groups can be written here")
        if missing := {"cpu", "cpuset"} - groups.controllers:
            raise FileNotFoundError(f"no controller {', '.join(sorted(missing))}")
        if name not in ("auto", groups.name):
            raise FileNotFoundError(f"control groups are {groups.version} here")
    except OSError as error:
        if name != "auto":
            raise
        log.info("cores are not assigned through control groups", reason=str(error))
        return Affinity()
    return groups


def _node_of(core: int) -> int:
    for node in _NODES.glob(f"node*/cpu{core}"):
        return int(node.parent.name.removeprefix("node"))
    return 0
