"""How a worker process is started, and what it cannot reach.

`process`: a child of the service with its environment; memory is limited call by call. For code of
the team's own. `bubblewrap`: for code that a model wrote. Namespaces of its own for processes,
network, users and the rest; a root of nothing but the interpreter, the packages and system
libraries, all read-only; a private /tmp of limited size; user 65534; no environment of the
service's; limits on processes and files that it cannot raise.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from services.reward import worker
from troupe.rpc import FailedPrecondition
from troupe.v1 import reward_pb2 as pb

PROCESS: Final = "process"
BUBBLEWRAP: Final = "bubblewrap"
LEVELS: Final = (PROCESS, BUBBLEWRAP)

_NOBODY: Final = 65534
_FILES: Final = 256
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

    @classmethod
    def of(cls, spec: pb.FunctionSpec) -> Cage:
        """What a function asks for."""
        if spec.sandbox in ("", PROCESS):
            return cls()
        return cls(spec.sandbox, spec.processes or 64, spec.disk_mib or 256)

    def launch(self) -> tuple[list[str], dict[str, str]]:
        """Command and environment of a worker. Raises FailedPrecondition ("no_sandbox")."""
        imports = [entry for entry in sys.path if entry]
        program = [sys.executable, "-P", worker.__file__]
        if self.level == PROCESS:
            environment = {**os.environ, "PYTHONPATH": os.pathsep.join(imports)}
            return [*program, str(os.getpid())], environment
        wrapper = find_bubblewrap()
        limits = [f"--{name}={value}" for name, value in self._limits().items()]
        environment = {
            "PATH": f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin",
            "HOME": "/tmp",
            "LANG": "C.UTF-8",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(imports),
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        command = [wrapper, *_namespaces(), *_root(imports), *self._private(), *program, "0"]
        return [*command, *limits], environment

    def _limits(self) -> dict[str, int]:
        return {"nproc": self.processes, "fsize": self.disk_mib << 20, "nofile": _FILES, "core": 0}

    def _private(self) -> list[str]:
        size = str(self.disk_mib << 20)
        return [
            *("--proc", "/proc", "--dev", "/dev", "--size", size, "--tmpfs", "/tmp"),
            # Shared memory is a disk too.
            *("--size", size, "--tmpfs", "/dev/shm"),
            *("--remount-ro", "/", "--chdir", "/tmp"),
        ]


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


def _root(imports: Sequence[str]) -> list[str]:
    """Read-only views of what a Python program needs, and of nothing else."""
    binds: dict[str, list[str]] = {}
    for path in _SYSTEM:
        if os.path.islink(path):
            binds[path] = ["--symlink", os.readlink(path), path]
        elif os.path.isdir(path):
            binds[path] = ["--ro-bind", path, path]
    for path in _CONFIGURATION:
        binds[path] = ["--ro-bind-try", path, path]
    wanted = [sys.base_prefix, sys.prefix, str(Path(worker.__file__)), *imports]
    # Where links lead to, too; the outer before the inner, which would be covered by it.
    paths = {place(entry) for entry in wanted for place in (os.path.abspath, os.path.realpath)}
    for path in sorted(paths, key=lambda path: (path.count(os.sep), path)):
        if not _inside(path, binds):
            binds[path] = ["--ro-bind-try", path, path]
    return [word for words in binds.values() for word in words]


def _inside(path: str, binds: Mapping[str, object]) -> bool:
    return any(path == bound or path.startswith(bound + os.sep) for bound in binds)
