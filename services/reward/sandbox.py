"""How a worker process is started, and what it cannot reach.

`process`: a child of the service with its environment; memory is limited call by call. For code of
the team's own. `bubblewrap`: for code that a model wrote. Namespaces of its own for processes,
network, users and the rest; a root of nothing but the interpreter, the packages and system
libraries, all read-only; a private /tmp of limited size; user 65534; no environment of the
service's; limits on processes and files that it cannot raise. `container`: for an image of the
team's own, see `services/reward/sandboxes/container.py`.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from services.reward import worker
from services.reward.sandboxes.seccomp import filter_path
from troupe.rpc import FailedPrecondition
from troupe.v1 import reward_pb2 as pb

PROCESS: Final = "process"
BUBBLEWRAP: Final = "bubblewrap"
CONTAINER: Final = "container"
LEVELS: Final = (PROCESS, BUBBLEWRAP, CONTAINER)

# Where a sandbox has uploaded source: the folder itself may be what it must not see.
SOURCE: Final = "/source"
HANDED_OUT: Final = "TROUPE_REWARD_CORES"

_NOBODY: Final = 65534
_FILES: Final = 256
# What `_private` mounts for each sandbox anew; nothing of the host's may cover it.
_PRIVATE: Final = ("/proc", "/dev", "/dev/shm", "/tmp")
# What programs find at the root of a Linux system, beside the interpreter's own folders.
_SYSTEM: Final = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
_CONFIGURATION: Final = (
    "/etc/ld.so.cache",
    "/etc/ld.so.conf",
    "/etc/ld.so.conf.d",
    "/etc/alternatives",
    "/etc/localtime",
    "/etc/mime.types",
)


@dataclass(frozen=True)
class Cage:
    """What a worker is confined to; workers of one cage can stand in for each other."""

    level: str = PROCESS
    processes: int = 0
    disk_mib: int = 0
    memory_mib: int = 0
    image: str = ""
    # Files and folders that it may read, or read and write; both empty: whatever it may anyway.
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    # Folder of uploaded source, where modules are looked for first; empty: there is none.
    source: str = ""

    @classmethod
    def of(cls, spec: pb.FunctionSpec) -> Cage:
        """What a function asks for."""
        if spec.sandbox in ("", PROCESS):
            return cls(reads=tuple(spec.reads), writes=tuple(spec.writes))
        return cls(
            spec.sandbox, spec.processes or 64, spec.disk_mib or 256, spec.memory_mib, spec.image
        )

    def launch(self) -> tuple[list[str], dict[str, str]]:
        """Command and environment of a worker. Raises FailedPrecondition ("no_sandbox")."""
        if self.level == PROCESS:
            imports = [*([self.source] if self.source else []), *_imports()]
            environment = {**os.environ, "PYTHONPATH": os.pathsep.join(imports)}
            command = [sys.executable, "-P", worker.__file__, str(os.getpid())]
            if self.reads or self.writes:
                programs = [sys.base_prefix, sys.prefix, worker.__file__, *_shown(imports)]
                command.append(f"--landlock={json.dumps([self.reads, self.writes, programs])}")
            return command, environment
        return self.wrap([worker.__file__, "0"])

    def wrap(
        self, program: Sequence[str], *, first: bool = False
    ) -> tuple[list[str], dict[str, str]]:
        """How a Python program (a file and its arguments) of ours is started in bubblewrap, with
        its limits as further arguments; `first`: as the sandbox's first process.

        Raises FailedPrecondition ("no_sandbox").
        """
        files = [word for word in program if os.path.isabs(word)]
        imports = _shown(_imports())
        environment = {
            "PATH": f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin",
            "HOME": "/tmp",
            "LANG": "C.UTF-8",
            "OMP_NUM_THREADS": "1",
            # Whether the cores that a call finds are its own, or everybody's.
            HANDED_OUT: os.environ.get(HANDED_OUT, "0"),
            "PYTHONPATH": os.pathsep.join([*([SOURCE] if self.source else []), *imports]),
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        filtered = filter_path()
        command = [
            # It reads the filter from a file that it finds open.
            *(["/bin/sh", "-c", 'exec "$@" 9<"$0"', filtered] if filtered else []),
            find_bubblewrap(),
            *(["--seccomp", "9"] if filtered else []),
            *_namespaces(),
            *(["--as-pid-1"] if first else []),
            # The private places first: an interpreter below the host's /tmp would be covered.
            *self._private(),
            *_root([*files, *imports]),
            *(["--ro-bind", self.source, SOURCE] if self.source else []),
            *("--remount-ro", "/", "--chdir", "/tmp"),
            *(sys.executable, "-P", *program),
            *(f"--{name}={value}" for name, value in self.limits().items()),
        ]
        return command, environment

    def limits(self) -> dict[str, int]:
        """Of every process: resources as `setrlimit` names them."""
        return {"nproc": self.processes, "fsize": self.disk_mib << 20, "nofile": _FILES, "core": 0}

    def _private(self) -> list[str]:
        size = str(self.disk_mib << 20)
        return [
            *("--proc", "/proc", "--dev", "/dev", "--size", size, "--tmpfs", "/tmp"),
            # Shared memory is a disk too.
            *("--size", size, "--tmpfs", "/dev/shm"),
        ]


def _imports() -> list[str]:
    return [entry for entry in sys.path if entry]


def find_bubblewrap() -> str:
    """The program. Raises FailedPrecondition of kind "no_sandbox"."""
    found = shutil.which("bwrap")
    if found is None:
        raise FailedPrecondition(
            "bubblewrap is not installed where the reward service runs",
            kind="no_sandbox",
            field="function.sandbox",
            value=BUBBLEWRAP,
            remedy="Install it (Debian's package `bubblewrap`), or use the image that has it.",
        )
    return found


def _namespaces() -> list[str]:
    user = str(_NOBODY)
    return [
        *("--unshare-all", "--die-with-parent", "--new-session"),
        *("--uid", user, "--gid", user, "--hostname", "sandbox"),
    ]


def _root(paths: Sequence[str]) -> list[str]:
    """Read-only views of what a Python program needs, and of nothing else."""
    binds: dict[str, list[str]] = {}
    for path in _SYSTEM:
        if os.path.islink(path):
            binds[path] = ["--symlink", os.readlink(path), path]
        elif os.path.isdir(path):
            binds[path] = ["--ro-bind", path, path]
    for path in _CONFIGURATION:
        binds[path] = ["--ro-bind-try", path, path]
    wanted = [sys.base_prefix, sys.prefix, *paths]
    # The outer before the inner, which would be covered by it.
    every = {place for entry in wanted for place in _places(entry)}
    for path in sorted(every, key=lambda path: (path.count(os.sep), path)):
        if not _inside(path, binds):
            binds[path] = ["--ro-bind-try", path, path]
    return [word for words in binds.values() for word in words]


def _inside(path: str, binds: Mapping[str, object]) -> bool:
    return any(path == bound or path.startswith(bound + os.sep) for bound in binds)


def _places(path: str) -> set[str]:
    """Where it is, and where links lead to; POSIX lets a path begin with two slashes."""
    return {"/" + place(path).lstrip("/") for place in (os.path.abspath, os.path.realpath)}


def _shown(imports: Sequence[str]) -> list[str]:
    """Those that a sandbox may see all of: not /tmp itself, nor the root, where the service was
    started there."""
    private = [f"{place}/" for entry in _PRIVATE for place in _places(entry)]

    def covers(path: str) -> bool:
        above = [place.rstrip("/") + "/" for place in _places(path)]
        return any(place.startswith(one) for place in private for one in above)

    return [path for path in imports if not covers(path)]
