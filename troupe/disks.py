"""Errors and checks of full disks, in words for people."""

from __future__ import annotations

import errno
import os
import re
import tempfile
from pathlib import Path
from typing import Final

# The system error in the texts of safetensors' and tokenizers' exceptions.
_NUMBER: Final = re.compile(r"\(os error (\d+)\)|Os \{ code: (\d+)")
_NO_ROOM: Final = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def system_error(error: BaseException) -> OSError | None:
    """The OSError that `error` is or quotes; None for any other error."""
    if isinstance(error, OSError):
        return error
    match = _NUMBER.search(str(error))
    if match is None:
        return None
    number = int(match[1] or match[2])
    return OSError(number, os.strerror(number))


def is_full(error: OSError) -> bool:
    """Whether an error means that the disk, or the quota of the writing user, is full."""
    return error.errno in _NO_ROOM


_MIB: Final = 1 << 20
# Free bytes that a service needs: more than one of its writes, and a tenth of a small disk.
_NEEDED_BYTES: Final = 64 * _MIB
_NEEDED_PART: Final = 10
_PROBE_BYTES: Final = 1 << 16
_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})


def shortage(directory: Path) -> str | None:
    """Why nothing can be written into `directory` for long, naming its disk; None: there is room.

    Blocks while it writes and removes a small file, which is how a quota is noticed.
    """
    try:
        disk = os.statvfs(directory)
    except OSError:
        return None
    total = disk.f_blocks * disk.f_frsize
    # Part of a disk may be kept for root.
    free = (disk.f_bfree if os.geteuid() == 0 else disk.f_bavail) * disk.f_frsize
    if total and free < min(_NEEDED_BYTES, total // _NEEDED_PART):
        return f"the disk of {directory} is full ({free // _MIB} of {total // _MIB} MiB are free)"
    if disk.f_files and not disk.f_ffree:
        return f"the disk of {directory} is full (it has no inodes left)"
    try:
        with tempfile.NamedTemporaryFile(dir=directory, prefix=".room-") as probe:
            probe.write(bytes(_PROBE_BYTES))
            probe.flush()
            os.fsync(probe.fileno())
    except OSError as error:
        if error.errno in _FULL:
            return f"the disk of {directory} is full ({error.strerror})"
    return None
