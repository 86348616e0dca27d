"""Forgets imported modules whose files were edited, so that the next import reads them anew.

A service outlives many jobs. Who mends a workflow and resumes the job, or submits it again, means
the file as it is now, not as it was when the first job imported it.
"""

from __future__ import annotations

import importlib
import os
import sys
import sysconfig
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Final

# Our own code is the service's, which an edit does not change.
_OURS: Final = frozenset({"troupe", "services", "__main__", "__mp_main__"})
_INSTALLED: Final = ("site-packages", "dist-packages", sysconfig.get_paths()["stdlib"])

# Modification times of files, in nanoseconds, when their modules were imported.
_mtimes: dict[str, int] = {}
_NEVER: Final = -1
_lock = threading.Lock()
# When `_mtimes` was last complete; in nanoseconds as files have them.
_complete_at = time.time_ns()


def forget_edited() -> list[str]:
    """Drop the users' modules from `sys.modules` if a file of theirs was edited; which ones.

    All of them go, since any may have imported something from the edited one: save for those that
    another thread is importing, which go next time. What jobs hold of the old modules stays as it
    is.
    """
    with _lock:
        importlib.invalidate_caches()  # a file may also be new
        users = dict(_users_modules())
        if not any(map(_edited, users.values())):
            return []
        _mtimes.clear()
        for name in _being_imported() & users.keys():
            _mtimes[users.pop(name)] = _NEVER
        for name in users:
            sys.modules.pop(name, None)
        return sorted(users)


def remember_files() -> None:
    """Note when the files of all imported users' modules were written."""
    global _complete_at
    with _lock:
        _complete_at = time.time_ns()
        for _, path in _users_modules():
            _mtimes.setdefault(path, _mtime(path))


def _edited(path: str) -> bool:
    now = _mtime(path)
    known = _mtimes.get(path)
    # A module that a function imported is not known yet: its file may be newer than the module.
    return now > _complete_at if known is None else now != known


def _being_imported() -> set[str]:
    """Modules of imports under way, with their packages: without them an import fails."""
    names: set[str] = set()
    for name, module in sys.modules.copy().items():  # others import meanwhile
        if getattr(getattr(module, "__spec__", None), "_initializing", False):
            parts = name.split(".")
            names |= {".".join(parts[:end]) for end in range(1, len(parts) + 1)}
    return names


def _users_modules() -> Iterator[tuple[str, str]]:
    """Names and files of modules that people edit: not installed ones, not ours."""
    for name, module in sys.modules.copy().items():  # others import meanwhile
        path = getattr(module, "__file__", None)
        if path and name.partition(".")[0] not in _OURS and not any(p in path for p in _INSTALLED):
            yield name, path


def _mtime(path: str) -> int:
    with suppress(OSError):
        return os.stat(path).st_mtime_ns
    return 0  # removed, which is an edit too
