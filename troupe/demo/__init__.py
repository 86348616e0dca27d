"""The example team that `troupe demo` trains: a solver and a checker, two policies of different
size, on three kinds of puzzles. examples/reasoning_team/README.md describes it.

`ending_in_a_line` is how its command lines end early: in one line and a status, without a
traceback. It is here, since every other module imports torch, which takes seconds.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from troupe.disks import is_full


@contextmanager
def ending_in_a_line() -> Iterator[None]:
    """Ctrl-C and SIGTERM end with 130 and 143, files that cannot be written with 1."""

    def end(number: int, frame: FrameType | None) -> None:
        # An exception, not the default: what draws on the terminal puts it in order again.
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    except SystemExit as error:
        if error.code in (128 + signal.SIGINT, 128 + signal.SIGTERM):
            print("interrupted: the warm-start begins anew next time", file=sys.stderr)
        raise
    except OSError as error:
        if error.errno is None:  # not of the system: a library's own
            raise
        where = f"{error.filename} cannot be written" if error.filename else "cannot be written"
        remedy = "Make room, or choose" if is_full(error) else "Choose"
        print(
            f"error: {where}: {error.strerror or error}. {remedy} another directory.",
            file=sys.stderr,
        )
        raise SystemExit(1) from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
