"""Landlock: restricts the files that a process, and all that it starts, can reach from then on.

Standard library only: a worker process restricts itself before it runs any user's code.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import stat
import struct
from collections.abc import Iterable, Sequence
from typing import Final

# System call numbers, the same on every architecture.
_CREATE: Final = 444
_ADD_RULE: Final = 445
_RESTRICT: Final = 446
_VERSION: Final = 1
_BENEATH: Final = 1
_PR_SET_NO_NEW_PRIVS: Final = 38

_EXECUTE: Final = 1 << 0
_WRITE_FILE: Final = 1 << 1
_READ_FILE: Final = 1 << 2
_READ_DIR: Final = 1 << 3
_TRUNCATE: Final = 1 << 14
_IOCTL: Final = 1 << 15
_READ: Final = _EXECUTE | _READ_FILE | _READ_DIR
_OF_FILES: Final = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL
# Version of the interface -> number of rights.
_RIGHTS: Final = {1: 13, 2: 14, 3: 15, 4: 15}
_RIGHTS_NOW: Final = 16

# What a Python program reads on a Linux system, and devices that it may write to.
SYSTEM: Final = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/etc", "/proc")
DEVICES: Final = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom", "/dev/tty")


@functools.cache
def version() -> int:
    """Return the version of the kernel's interface; 0: none, or not allowed."""
    found = _call(_CREATE, None, 0, _VERSION)
    return max(0, found)


def restrict(reads: Iterable[str], writes: Iterable[str], lists: Iterable[str] = ()) -> None:
    """From now on let this process only read and execute `reads`, write `writes`, and list `lists`,
    and what is below them. Paths that do not exist are left out. Raises OSError."""
    every = (1 << _RIGHTS.get(version(), _RIGHTS_NOW)) - 1
    rights = ctypes.create_string_buffer(struct.pack("=Q", every), 8)
    ruleset = _checked("landlock_create_ruleset", _call(_CREATE, rights, 8, 0))
    try:
        for path in reads:
            _allow(ruleset, path, _READ)
        for path in lists:
            _allow(ruleset, path, _READ_DIR)
        for path in (*DEVICES, *writes):
            _allow(ruleset, path, every)
        program = ctypes.CDLL(None, use_errno=True)
        _checked("prctl", program.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
        _checked("landlock_restrict_self", _call(_RESTRICT, ruleset, 0))
    finally:
        os.close(ruleset)


def confine(reads: Sequence[str], writes: Sequence[str], lists: Sequence[str]) -> None:
    """Call `restrict`; temporary files go to the first of `writes`."""
    if writes:
        os.environ["TMPDIR"] = writes[0]
    restrict([*reads, *writes], writes, lists)


def _allow(ruleset: int, path: str, rights: int) -> None:
    with contextlib.suppress(FileNotFoundError):
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
        try:
            if not stat.S_ISDIR(os.fstat(descriptor).st_mode):
                rights &= _OF_FILES
            if not rights:  # an archive on the import path, which cannot be listed
                return
            if version() < 3:
                rights &= ~_TRUNCATE
            if version() < 5:
                rights &= ~_IOCTL
            rule = struct.pack("=Qi", rights, descriptor)
            done = _call(_ADD_RULE, ruleset, _BENEATH, ctypes.c_char_p(rule), 0)
            _checked(f"landlock_add_rule for {path}", done)
        finally:
            os.close(descriptor)


def _call(number: int, *arguments: object) -> int:
    program = ctypes.CDLL(None, use_errno=True)
    words = [ctypes.c_long(a) if isinstance(a, int) else a for a in arguments]
    return int(program.syscall(ctypes.c_long(number), *words))


def _checked(what: str, done: int) -> int:
    if done < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return done
