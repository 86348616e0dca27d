"""Files and kernel interfaces of the host visible to confined code, as arguments of bubblewrap.

Of a folder on the import path only what can be imported is shown: a project's folder also holds
secrets and a cluster's data (`runs/`). The services' own files are hidden wherever they are: Redis'
files with their password, jobs, logs, weights, keys. Entries of /proc that belong to the machine,
and not to a process of the sandbox, are read-only or covered (the lists of the OCI runtime
specification, and what else this kernel has there).
"""

from __future__ import annotations

import functools
import importlib.machinery
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import Final

# Mounted for each sandbox (`SandboxProfile`); no mount of the host may cover it.
PRIVATE: Final = ("/proc", "/dev", "/dev/shm", "/tmp")
# Variables that name files and folders of the services.
_KEPT: Final = (
    *("TROUPE_DATA_DIR", "TROUPE_TRANSFER_DIR", "TROUPE_TRANSFER_FALLBACK_DIR"),
    *("TROUPE_TLS_KEY", "TROUPE_SIMULATED_TRACE_DIR"),
)
# The default of TROUPE_DATA_DIR (`services.chassis.settings`).
_DEFAULT_DATA_DIR: Final = "runs"
# A file in every data directory of a cluster (`troupe.cluster.state`).
_MARK: Final = ".troupe"

# Folders at the root of a Linux system that programs need.
_SYSTEM: Final = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
_CONFIGURATION: Final = (
    "/etc/ld.so.cache",
    "/etc/ld.so.conf",
    "/etc/ld.so.conf.d",
    "/etc/alternatives",
    "/etc/localtime",
    "/etc/mime.types",
)
_SUFFIXES: Final = tuple(importlib.machinery.all_suffixes())
_INSTALLED: Final = ("site-packages", "dist-packages")
# A folder with more modules is shown as a whole, with its other files covered one by one: each
# mount makes the next one slower.
_MOST_MODULES: Final = 64
# How deep, and among how many files, a folder without __init__.py is searched for modules.
_DEPTH: Final = 3
_MOST_SEARCHED: Final = 2000

# Entries of /proc with facts about the machine, or about other users' processes and keys.
_COVERED: Final = frozenset(
    {
        *("acpi", "asound", "interrupts", "kallsyms", "kcore", "key-users", "keys", "kmsg"),
        *("kpagecgroup", "kpagecount", "kpageflags", "latency_stats", "sched_debug", "scsi"),
        *("timer_list", "timer_stats", "vmallocinfo", "slabinfo"),
    }
)


def kept() -> list[str]:
    """Return the files and folders of the services that confined code must not read, by this
    process's settings; absolute, links followed, whether they exist or not."""
    named = [value for name in _KEPT if (value := os.environ.get(name))]
    if not os.environ.get("TROUPE_DATA_DIR"):
        named.append(_DEFAULT_DATA_DIR)
    return sorted({os.path.realpath(os.path.expanduser(path)) for path in named})


def imports() -> list[str]:
    """Return the import path of this process, without entries that would cover private mounts: /tmp
    or the root, if the service was started there."""
    private = [f"{place}/" for entry in PRIVATE for place in _spellings(entry)]

    def covers(path: str) -> bool:
        above = [place.rstrip("/") + "/" for place in _spellings(path)]
        return any(place.startswith(one) for place in private for one in above)

    return [path for path in sys.path if path and not covers(path)]


def shown(entries: Iterable[str]) -> tuple[list[str], list[str]]:
    """Return the files and folders to show of `entries` of the import path, and those below to
    cover."""
    show: list[str] = []
    cover: list[str] = []
    whole = [sys.base_prefix, sys.prefix]
    for entry in entries:
        if _installed(entry, whole) or not os.path.isdir(entry):  # an archive, say
            show.append(entry)
            continue
        modules, others = _contents(entry)
        if len(modules) <= _MOST_MODULES or _is_kept(entry):
            show += modules
        else:
            show.append(entry)
            cover += others
    return show, cover


def root(paths: Sequence[str], entries: Sequence[str]) -> list[str]:
    """Return bwrap's arguments for a read-only root with only the needs of a Python program: the
    interpreter, the system's programs, `paths`, and `entries` of the import path."""
    show, cover = shown(entries)
    binds: dict[str, list[str]] = {}
    for path in _SYSTEM:
        if os.path.islink(path):
            binds[path] = ["--symlink", os.readlink(path), path]
        elif os.path.isdir(path):
            binds[path] = ["--ro-bind", path, path]
    for path in _CONFIGURATION:
        binds[path] = ["--ro-bind-try", path, path]
    for entry in (sys.base_prefix, sys.prefix, *paths, *show):
        for path in _spellings(entry):
            binds.setdefault(path, ["--ro-bind-try", path, path])
    covers = {place for path in cover for place in _spellings(path)} - binds.keys()
    covers |= set(_seen_through(binds, kept()))
    # Outer paths before inner ones. What is below a bind is visible, below a cover it is not.
    placed: dict[str, bool] = {}
    words: list[str] = []
    for path in sorted({*binds, *covers}, key=lambda path: (path.count(os.sep), path)):
        seen = next((placed[above] for above in _above(path) if above in placed), False)
        if path in covers and seen:
            placed[path] = False
            words += _covered(path)
        elif path not in covers and not seen:
            placed[path] = True
            words += binds[path]
    folders = [path for path, bound in placed.items() if not bound and os.path.isdir(path)]
    words += [word for path in folders for word in ("--remount-ro", path)]
    return [*_folders_above(path for path, bound in placed.items() if bound), *words]


def _above(path: str) -> list[str]:
    """Return the folders that contain a path, the nearest first."""
    return [str(folder) for folder in PurePath(path).parents]


def _folders_above(binds: Iterable[str]) -> list[str]:
    """Return bwrap's arguments for the folders above `binds`, open to the sandbox's user:
    bubblewrap would give them the host's modes, and root's home is closed."""
    above = {folder for path in binds for folder in _above(path)}
    made = sorted(folder for folder in above if folder not in ("/", *PRIVATE))
    return [word for folder in made for word in ("--perms", "0755", "--dir", folder)]


def without(paths: Iterable[str], hidden: Sequence[str], *, declared: bool = False) -> list[str]:
    """Return `paths`, with each path that contains something of `hidden` replaced by its other
    contents, for mechanisms that can only allow. `declared`: paths inside `hidden` were named, and
    stay."""
    found: list[str] = []
    ahead = [(path, declared) for path in paths]
    while ahead:
        path, named = ahead.pop()
        real = os.path.realpath(path)
        if any(_within(one, real) and one != real for one in hidden):
            try:
                names = os.listdir(real)
            except OSError:  # not shown, since it cannot be listed
                continue
            ahead += [(os.path.join(real, name), False) for name in names]
        elif named or not any(_within(real, one) for one in hidden):
            found.append(path)
    return found


def kernel() -> list[str]:
    """Return bwrap's arguments after `--proc /proc` that cover the machine's entries or make them
    read-only."""
    words: list[str] = []
    for name, what in _machine().items():
        path = f"/proc/{name}"
        if name in _COVERED:
            words += ["--tmpfs", path, "--remount-ro", path] if what == "folder" else _blind(path)
        else:
            words += ["--ro-bind-try", path, path]
    return words


@functools.cache
def _machine() -> Mapping[str, str]:
    """Return the type ("file" or "folder") of each entry of /proc to cover or make read-only, by
    name."""
    found: dict[str, str] = {}
    with os.scandir("/proc") as entries:
        for entry in entries:
            if entry.name.isdigit() or entry.is_symlink():
                continue
            try:
                mode = entry.stat(follow_symlinks=False).st_mode
            except OSError:  # seen by others only
                continue
            if entry.is_dir(follow_symlinks=False):
                found[entry.name] = "folder"
            elif entry.name in _COVERED or mode & 0o222:
                found[entry.name] = "file"
    return found


def _contents(folder: str) -> tuple[list[str], list[str]]:
    """Return the modules that can be imported from a folder, and its other files; empty if
    unreadable."""
    modules: list[str] = []
    others: list[str] = []
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                (modules if _importable(entry) else others).append(entry.path)
    except OSError:
        return [], []
    return sorted(modules), sorted(others)


def _importable(entry: os.DirEntry[str]) -> bool:
    if not entry.is_dir():
        return entry.name.endswith(_SUFFIXES)
    if entry.name.endswith((".dist-info", ".egg-info")):  # what importlib.metadata finds
        return True
    if not entry.name.isidentifier() or os.path.exists(os.path.join(entry.path, _MARK)):
        return False
    if os.path.isfile(os.path.join(entry.path, "__init__.py")):
        return True
    # A package without __init__.py; not a cluster's data, with the sources that it was sent.
    return not _is_kept(entry.path) and _holds_modules(entry.path)


def _is_kept(path: str) -> bool:
    real = os.path.realpath(path)
    return any(_within(real, one) for one in kept())


def _holds_modules(folder: str) -> bool:
    """Return whether a folder contains modules, down to a limited depth."""
    left = _MOST_SEARCHED
    ahead = [(folder, 0)]
    while ahead:
        path, depth = ahead.pop()
        try:
            with os.scandir(path) as entries:
                for entry in entries:
                    left -= 1
                    if left < 0:
                        return False
                    if entry.name.endswith(_SUFFIXES):
                        return True
                    deeper = depth < _DEPTH and entry.name.isidentifier()
                    if deeper and entry.is_dir(follow_symlinks=False):
                        ahead.append((entry.path, depth + 1))
        except OSError:
            continue
    return False


def _installed(entry: str, whole: Sequence[str]) -> bool:
    """Return whether an entry of the import path is a folder of installed packages."""
    if os.path.basename(entry.rstrip("/")) in _INSTALLED:
        return True
    real = os.path.realpath(entry)
    libraries = [os.path.join(os.path.realpath(prefix), "lib") for prefix in whole]
    return any(_within(real, library) for library in libraries)


def _seen_through(binds: Iterable[str], hidden: Sequence[str]) -> Iterator[str]:
    """Yield the paths in a sandbox with these binds at which something of `hidden` would be
    visible."""
    for bound in binds:
        real = os.path.realpath(bound)
        for one in hidden:
            if _within(one, real):
                yield bound + one[len(real.rstrip("/")) :]


def _covered(path: str) -> list[str]:
    """Return bwrap's arguments that cover a folder by an empty one, or a file by an empty one."""
    if os.path.isdir(path):
        return ["--tmpfs", path]
    return _blind(path) if os.path.exists(path) else []


def _blind(path: str) -> list[str]:
    return ["--ro-bind", "/dev/null", path]


def _within(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder.rstrip("/") + "/")


def _spellings(path: str) -> set[str]:
    """Return the absolute path, and that with links followed, each with a single leading slash."""
    return {"/" + place(path).lstrip("/") for place in (os.path.abspath, os.path.realpath)}
