"""Runs a command that cannot outlive the process that started it.

Executed as a script by file name, in front of every child of the embedded cluster:

    python -S -E tether.py PARENT_PID COMMAND [ARGUMENT ...]

A service watches its parent by itself, but redis-server does not, and a service stuck in
native code could not. The kernel can: PR_SET_PDEATHSIG survives exec. (subprocess's
`preexec_fn` would do the same between fork and exec of a threaded process, where almost
nothing is safe.) Imports nothing of ours, so that it costs milliseconds.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    """Tie this process to its parent, then become the command."""
    parent, command = int(sys.argv[1]), sys.argv[2:]
    if sys.platform.startswith("linux"):
        libc = ctypes.CDLL(None, use_errno=True)
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        # The parent may have died before the call above: no signal would ever come.
        if os.getppid() != parent:
            raise SystemExit(143)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"cannot run {command[0]}: {error.strerror}", file=sys.stderr)
        raise SystemExit(127) from None


if __name__ == "__main__":
    main()
