"""torchrun, for ranks that must not outlive who led them: `python -m services.trainer.gang.agent`.

Takes torchrun's own arguments. It restarts nothing: a gang that lost a rank is torn down, and the
step begins again from the last committed state.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with(parent: int, number: signal.Signals) -> None:
    """Have the kernel send this process `number` when its parent, `parent`, has ended."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)
    if os.getppid() != parent:  # it was quicker
        os.kill(os.getpid(), number)


def main() -> None:
    """Run torchrun with the arguments of this process."""
    if parent := os.environ.get("TROUPE_PARENT_PID"):
        die_with(int(parent), signal.SIGTERM)
    # For the ranks, whose parent this is.
    os.environ["TROUPE_PARENT_PID"] = str(os.getpid())
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    try:
        torchrun(sys.argv[1:])
    except SignalException as error:
        sys.exit(128 + error.sigval)
    except ChildFailedError as error:
        # Which rank ended first, and how.
        sys.exit(str(error))


if __name__ == "__main__":
    main()
