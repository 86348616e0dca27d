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
from collections.abc import Iterator
from contextlib import suppress
from typing import Final

# Our own code is the service's, which an edit does not change.
_OURS: Final = frozenset({"troupe", "services", "__main__", "__mp_main__"})
_INSTALLED: Final = ("site-packages", "dist-packages", sysconfig.get_paths()["stdlib"])

# Modification times of files, in nanoseconds, when their modules were imported.
_mtimes: dict[str, int] = {}
_lock = threading.Lock()


def forget_edited() -> list[str]:
    """Drop the users' modules from `sys.modules` if a file of theirs was edited; which ones.

    All of them go, since any may have imported something from the edited one. What jobs hold of
    the old modules stays as it is.
    """
    with _lock:
        importlib.invalidate_caches()  # a file may also be new
        users = dict(_users_modules())
        if all(_mtimes.get(path, now) == now for path in users.values() for now in [_mtime(path)]):
            return []
        for name in users:
            sys.modules.pop(name, None)
        _mtimes.clear()
        return sorted(users)


def remember_files() -> None:
    """Note when the files of all imported users' modules were written."""
    for _, path in _users_modules():
        _mtimes.setdefault(path, _mtime(path))


def _users_modules() -> Iterator[tuple[str, str]]:
    """Names and files of modules that people edit: not installed ones, not ours."""
    for name, module in list(sys.modules.items()):
        path = getattr(module, "__file__", None)
        if path and name.partition(".")[0] not in _OURS and not any(p in path for p in _INSTALLED):
            yield name, path


def _mtime(path: str) -> int:
    with suppress(OSError):
        return os.stat(path).st_mtime_ns
    return 0  # removed, which is an edit too
