"""Processes that cannot outlive their parent.

The kernel signals them when the parent ends, however it ends (prctl(2), PR_SET_PDEATHSIG). Our own
programs request the signal themselves (`end_with_parent`). This file, run as a script (`tethered`),
starts all other programs, because the setting survives exec. (subprocess's `preexec_fn` would do
the same between fork and exec of a threaded process, where almost nothing is safe.)

The kernel counts the *thread* that started a process as its parent: a thread that starts tethered
processes must live as long as they do.

This file imports nothing from Troupe and little else, so that the script costs milliseconds and a
worker of the reward service can load it by its path.
"""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import sys
from collections.abc import Sequence

_PR_SET_PDEATHSIG = 1


def end_with_parent(parent: int, number: signal.Signals = signal.SIGTERM) -> None:
    """Have the kernel send this process `number` when its parent, the process `parent`, ends.

    If the parent has already ended, this process gets the signal at once. Systems other than Linux
    have no such setting: there, only this check is made.
    """
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)
    if os.getppid() != parent:
        os.kill(os.getpid(), number)


def tethered(command: Sequence[str]) -> list[str]:
    """Return the command that runs `command` as a child of this process which gets SIGTERM when
    this process ends. The command replaces the script: both have one process id.

    Raises FileNotFoundError when the command's program is not found.
    """
    from shutil import which  # the script does not need it, and it takes long to import

    if which(command[0]) is None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), command[0])
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), *command]


def main() -> None:
    """Tie this process to its parent, then become the command."""
    parent, command = int(sys.argv[1]), sys.argv[2:]
    end_with_parent(parent)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"cannot run {command[0]}: {error.strerror}", file=sys.stderr)
        raise SystemExit(127) from None


if __name__ == "__main__":
    main()
