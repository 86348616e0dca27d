"""Sandbox profiles: how a worker process is started, and what it cannot reach, by level.

`process`, for the team's own code: a child of the service that sees some of its environment; memory
is limited call by call. `bubblewrap`, for code that a model wrote: namespaces of its own for
processes, network and the rest; a read-only root of the interpreter, packages and system libraries;
a private /tmp of limited size; an unprivileged user, on the host too; nothing of the service's
environment; limits on processes and files that it cannot raise. `container`, for an image of the
team's own: see `services/reward/sandboxes/container.py`.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import secrets
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Final

from services.reward import worker
from services.reward.sandboxes import landlock, mounts
from services.reward.sandboxes.seccomp import filter_path
from troupe.rpc import FailedPrecondition
from troupe.v1 import reward_pb2 as reward_pb

# The setting with further variables that functions see (`RewardSettings.reward_environment`).
ALLOWED: Final = "TROUPE_REWARD_ENVIRONMENT"

_PASSED: Final = (
    # The user and the language.
    *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "TERM", "LANG", "LANGUAGE", "LC_*", "TZ"),
    *("TMPDIR", "XDG_*"),
    # How programs and Python find what they load.
    *("LD_LIBRARY_PATH", "LD_PRELOAD", "PYTHON*", "VIRTUAL_ENV", "CONDA_PREFIX"),
    # Threads, memory and devices.
    *("*_NUM_THREADS", "OMP_*", "KMP_*", "MKL_*", "OPENBLAS_*", "RAYON_*", "MALLOC_*"),
    *("TOKENIZERS_PARALLELISM", "ATEN_CPU_CAPABILITY", "ONEDNN_*", "DNNL_*", "TROUPE_THREADS"),
    *("CUDA_*", "NVIDIA_*", "NCCL_*", "ROCR_*", "HIP_*", "TORCH_*", "PYTORCH_*", "TRITON_*"),
    "TROUPE_REWARD_CORES",
    # Where models and data sets are kept.
    *("HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "HF_DATASETS_CACHE", "HF_DATASETS_OFFLINE"),
    *("TRANSFORMERS_CACHE", "TRANSFORMERS_OFFLINE"),
    # The way to the network.
    *("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"),
    *("NO_PROXY", "no_proxy"),
)
# These too, unless there is a password in them.
_PROXIES: Final = frozenset({"http_proxy", "https_proxy", "all_proxy"})


def environment_of_functions(
    imports: Sequence[str], environment: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Return the variables of `environment` (by default the service's own) that functions of the
    level `process` see, and `imports` as their import path."""
    whole = os.environ if environment is None else environment
    named = [name.strip() for name in whole.get(ALLOWED, "").split(",")]
    patterns = [*_PASSED, *(name for name in named if name)]
    passed = {
        name: value
        for name, value in whole.items()
        if any(fnmatchcase(name, pattern) for pattern in patterns)
        or (name.lower() in _PROXIES and "@" not in value)
    }
    return {**passed, "PYTHONPATH": os.pathsep.join(imports)}


PROCESS: Final = "process"
BUBBLEWRAP: Final = "bubblewrap"
CONTAINER: Final = "container"
# Levels of the workers that a host keeps; calls of all others get a sandbox of their own.
OF_WORKERS: Final = (PROCESS, BUBBLEWRAP)
# Programs that run containers.
_ENGINES: Final = ("docker", "podman")

# The path of uploaded source in a sandbox, which must not see the folder around it.
SOURCE: Final = "/source"
# How many cores the service hands out to calls; 0: none.
HANDED_OUT: Final = "TROUPE_REWARD_CORES"

_NOBODY: Final = 65534
# Users of sandboxes that root starts, one each, so that none uses up the limits of another: in a
# range that neither distributions nor container engines assign (systemd's "UIDs and GIDs").
_FIRST_USER: Final = 1_900_000_000
_USERS: Final = 1 << 16
# Capabilities that root needs to become another user (CAP_SETGID, CAP_SETUID, CAP_SETPCAP) and to
# make namespaces (CAP_SYS_ADMIN), by their bits.
_BECOME: Final = 1 << 6 | 1 << 7 | 1 << 8
_ADMINISTER: Final = 1 << 21
_FILES: Final = 256


@dataclass(frozen=True)
class SandboxProfile:
    """How a worker is confined; workers of equal profiles are interchangeable."""

    level: str = PROCESS
    processes: int = 0
    disk_mib: int = 0
    memory_mib: int = 0
    image: str = ""
    # Files and folders that it may read, or read and write; both empty: all that the service may.
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    # Folder of uploaded source, first on the import path; empty: there is none.
    source: str = ""

    @classmethod
    def of(cls, spec: reward_pb.FunctionSpec) -> SandboxProfile:
        """Return the profile that a function declares."""
        if spec.sandbox in ("", PROCESS):
            return cls(reads=tuple(spec.reads), writes=tuple(spec.writes))
        return cls(
            spec.sandbox, spec.processes or 64, spec.disk_mib or 256, spec.memory_mib, spec.image
        )

    def launch(
        self, program: Sequence[str] = (worker.__file__,), *, first: bool = False
    ) -> tuple[list[str], dict[str, str]]:
        """Return the command and environment of one of our programs, by default the worker, on this
        host; `first` as in `wrap`. Raises FailedPrecondition ("no_sandbox")."""
        if self.level == PROCESS:
            environment = environment_of_functions([entry for entry in sys.path if entry])
            command = [sys.executable, "-P", *program, f"--parent={os.getpid()}"]
            if self.reads or self.writes:
                command.append(f"--landlock={json.dumps(self._files())}")
            if self.source:
                command.append(f"--source={self.source}")
            return command, environment
        return self.wrap(program, first=first)

    def wrap(
        self, program: Sequence[str], *, first: bool = False
    ) -> tuple[list[str], dict[str, str]]:
        """Return the command and environment to start one of our Python programs (a file and its
        arguments) in bubblewrap, with its limits as further arguments; `first`: as the first
        process.

        Raises FailedPrecondition ("no_sandbox").
        """
        bubblewrap = find_bubblewrap()
        files = [word for word in program if os.path.isabs(word)]
        imports = mounts.imports()
        environment = {
            "PATH": f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin",
            "HOME": "/tmp",
            "LANG": "C.UTF-8",
            "OMP_NUM_THREADS": "1",
            # Tells a call whether the cores that it finds are its own.
            HANDED_OUT: os.environ.get(HANDED_OUT, "0"),
            "PYTHONPATH": os.pathsep.join(imports),
            "PYTHONDONTWRITEBYTECODE": "1",
            # Packages below the home directory could be written by an earlier call.
            "PYTHONNOUSERSITE": "1",
        }
        user = unprivileged_user()
        sources = [self.source] if self.source else []
        if user.reads_as_another:
            _check_readable([sys.base_prefix, sys.prefix, *sources, *imports])
        limits = self.limits()
        if user.shared:
            del limits["nproc"]  # it would count processes of other sandboxes, too
        filtered = filter_path()
        command = [
            # bubblewrap reads the filter from a descriptor.
            *(["/bin/sh", "-c", 'exec "$@" 9<"$0"', filtered] if filtered else []),
            *user.before,
            bubblewrap,
            *(["--seccomp", "9"] if filtered else []),
            *("--die-with-parent", "--new-session", "--hostname", "sandbox"),
            *user.namespaces,
            *(["--as-pid-1"] if first else []),
            # Private mounts first: they would cover an interpreter below the host's /tmp.
            *self._private(),
            *mounts.root(files, imports),
            *(["--ro-bind", self.source, SOURCE] if self.source else []),
            *("--remount-ro", "/", "--chdir", "/tmp"),
            *user.after,
            *(sys.executable, "-P", *program),
            *(f"--{name}={value}" for name, value in limits.items()),
            *([f"--source={SOURCE}"] if self.source else []),
        ]
        return command, environment

    def _files(self) -> list[list[str]]:
        """Return the paths that landlock lets a process read, write, and list: those declared, and
        those that a Python program needs; files of the services only if they were declared by
        name."""
        hidden = mounts.kept()
        imports = [*([self.source] if self.source else []), *mounts.imports()]
        modules, _ = mounts.shown(imports)
        needed = [*landlock.SYSTEM, sys.base_prefix, sys.prefix, worker.__file__, *modules]
        reads = mounts.without(needed, hidden)
        return [
            [*reads, *mounts.without(self.reads, hidden, declared=True)],
            mounts.without(self.writes, hidden, declared=True),
            imports,  # where the interpreter looks for modules
        ]

    def limits(self) -> dict[str, int]:
        """Limits of each process, by their names for `setrlimit`."""
        return {"nproc": self.processes, "fsize": self.disk_mib << 20, "nofile": _FILES, "core": 0}

    def _private(self) -> list[str]:
        size = str(self.disk_mib << 20)
        return [
            *("--proc", "/proc", *mounts.kernel(), "--dev", "/dev"),
            *("--perms", "1777", "--size", size, "--tmpfs", "/tmp"),
            # Shared memory takes memory like a disk.
            *("--perms", "1777", "--size", size, "--tmpfs", "/dev/shm"),
            # /dev itself would be writable without a limit.
            *("--remount-ro", "/dev"),
        ]


@dataclass(frozen=True)
class SandboxUser:
    """The user of a sandbox's processes, as words of the command that starts it: before bubblewrap,
    its options, and before the program inside."""

    before: tuple[str, ...] = ()
    namespaces: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    # Whether other sandboxes have the same user in the same user namespace.
    shared: bool = False
    # Whether it has fewer rights to files than the service.
    reads_as_another: bool = False


def unprivileged_user() -> SandboxUser:
    """Return the user of the next sandbox. Where the service is root each has another one: root
    outside owns the kernel's files, whatever its id inside. Raises FailedPrecondition
    ("no_sandbox")."""
    own = (
        *("--unshare-user", "--unshare-all", "--uid", str(_NOBODY), "--gid", str(_NOBODY)),
        *(("--disable-userns",) if _disables_users() else ()),
    )
    if os.geteuid() != 0:
        return SandboxUser(namespaces=own)
    can, user = _capabilities(), _next_user()
    if can & _BECOME != _BECOME or user is None:
        raise _no_sandbox(
            "the reward service is root and cannot become another user",
            "Start it as an unprivileged user, or let it set user ids (CAP_SETUID, CAP_SETGID, "
            "CAP_SETPCAP).",
        )
    become = (
        *(find_setpriv(), "--reuid", str(user), "--regid", str(user), "--clear-groups"),
        *("--inh-caps=-all", "--bounding-set=-all"),
    )
    if not can & _ADMINISTER:  # in a container: namespaces are made without privileges
        return SandboxUser(before=become, namespaces=own, reads_as_another=True)
    spaces = ("pid", "net", "ipc", "uts")
    return SandboxUser(
        # Root makes the namespaces, and becomes the user for good.
        namespaces=(
            *(f"--unshare-{name}" for name in spaces),
            *("--unshare-cgroup-try", "--cap-drop", "ALL"),
            *(w for cap in ("SETUID", "SETGID", "SETPCAP") for w in ("--cap-add", f"CAP_{cap}")),
        ),
        # `kill_tree` ends the first process of a sandbox, bubblewrap's own first process
        # the others: bubblewrap outside may not kill processes of another user.
        after=become,
        shared=user == _NOBODY,
        reads_as_another=True,
    )


def find_bubblewrap() -> str:
    """Return the path of bubblewrap. Raises FailedPrecondition of kind "no_sandbox"."""
    if found := shutil.which("bwrap"):
        return found
    raise _no_sandbox(
        "bubblewrap is not installed where the reward service runs",
        "Install it (Debian's package `bubblewrap`), or use the image that has it.",
    )


def find_setpriv() -> str:
    """Return the path of setpriv, which changes users. Raises FailedPrecondition of kind
    "no_sandbox"."""
    if found := shutil.which("setpriv"):
        return found
    raise _no_sandbox(
        "setpriv is not installed where the reward service runs as root",
        "Install it (the package `util-linux`), or start the service as an unprivileged user.",
    )


def find_engine() -> str:
    """Return the path of docker or podman. Raises FailedPrecondition of kind "no_sandbox"."""
    for name in _ENGINES:
        if found := shutil.which(name):
            return found
    raise FailedPrecondition(
        "neither docker nor podman is installed where the reward service runs",
        kind="no_sandbox",
        field="function.sandbox",
        value=CONTAINER,
        remedy="Install one and let the service use its engine (DOCKER_HOST), or declare "
        "`sandbox: bubblewrap`.",
    )


def _no_sandbox(message: str, remedy: str) -> FailedPrecondition:
    return FailedPrecondition(
        message, kind="no_sandbox", field="function.sandbox", value=BUBBLEWRAP, remedy=remedy
    )


def _capabilities() -> int:
    """Return the effective capabilities of this process, as bits."""
    with open("/proc/self/status", encoding="ascii", errors="replace") as status:
        return next((int(line.split()[1], 16) for line in status if line[:7] == "CapEff:"), 0)


_users: Final = itertools.count(secrets.randbelow(_USERS))


def _next_user() -> int | None:
    """Return a user id that no recent sandbox of this service has had; 65534 where the service's
    container maps only few ids, None where it does not map that one either."""
    user = _FIRST_USER + next(_users) % _USERS
    for one in (user, _NOBODY):
        if all(_mapped(one, f"/proc/self/{kind}_map") for kind in ("uid", "gid")):
            return one
    return None


def _mapped(number: int, file: str) -> bool:
    ranges: Iterator[tuple[int, ...]]
    ranges = (tuple(map(int, line.split())) for line in Path(file).read_text().splitlines())
    return any(first <= number < first + count for first, _, count in ranges)


@functools.cache
def _disables_users() -> bool:
    """Return whether bubblewrap (0.8 on) can forbid further user namespaces."""
    help_text = subprocess.run([find_bubblewrap(), "--help"], capture_output=True, timeout=30)
    return b"--disable-userns" in help_text.stdout + help_text.stderr


def _check_readable(paths: Sequence[str]) -> None:
    for path in paths:
        try:
            mode = os.stat(path).st_mode
        except OSError:  # it does not exist
            continue
        needed = 0o005 if stat.S_ISDIR(mode) else 0o004
        if mode & needed != needed:
            raise _no_sandbox(
                f"{path} can be read by its owner only, and a sandbox of a service that is root "
                "has a user of its own",
                f"Let others read it (chmod -R o+rX {path}), or start the service as its owner.",
            )
