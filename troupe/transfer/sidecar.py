"""Small files beside a state: that it was verified or is damaged, where it came from, who works on
it.

Each names the identity of the file that it speaks of; of another one it says nothing.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from troupe.transfer import blob
from troupe.transfer.room import make_directory

# At first, and at the most: what is waited for may take a millisecond, or minutes.
_POLL_SECONDS = (0.0005, 0.005)


def mark(path: Path, kind: str, said: str = "", *, identity: tuple[int, int] | None = None) -> None:
    """Note that the file at `path` is `kind` ("verified", "fetched", "damaged"): the one that is
    there now, or the one of `identity`."""
    with contextlib.suppress(OSError):
        inode, changed = identity or blob.identity(path)
        temp = path.parent / f".{path.name}.{kind}.{os.getpid()}.{threading.get_ident()}.tmp"
        temp.write_text(f"{inode} {changed} {said}")
        temp.replace(_beside(path, kind))


def note(path: Path, kind: str, identity: tuple[int, int] | None = None) -> str | None:
    """What was noted of the very file at `path` (of this `identity`); None for nothing."""
    try:
        inode, changed, said = _beside(path, kind).read_text().split(" ", 2)
        same = (int(inode), int(changed)) == (identity or blob.identity(path))
    except (OSError, ValueError):
        return None
    return said if same else None


def clear(path: Path) -> None:
    """Forget all that was noted of `path`."""
    for kind in ("verified", "fetched", "damaged"):
        _beside(path, kind).unlink(missing_ok=True)


@contextlib.contextmanager
def alone(
    path: Path, deadline: float, *, unless: Callable[[], bool] = lambda: False
) -> Iterator[bool]:
    """Only one thread of one process of this host at a time is here for `path`, told True.

    Once what it is here for is done (`unless`), everybody is let in, and told False. Raises
    TimeoutError at `deadline` (of the monotonic clock), InvalidKey where nothing can be at `path`.
    A process that dies lets go.
    """
    lock = _beside(path, "lock")
    file = _locked(path, lock, deadline, unless)
    if file is None:
        yield False
        return
    try:
        yield not unless()
    finally:
        lock.unlink(missing_ok=True)
        file.close()


def busy(path: Path) -> bool:
    """Whether somebody seems to be `alone` for `path` right now."""
    return _beside(path, "lock").exists()


def _locked(path: Path, lock: Path, deadline: float, unless: Callable[[], bool]) -> BinaryIO | None:
    pause, most = _POLL_SECONDS
    while not unless():
        make_directory(path)
        with contextlib.suppress(FileNotFoundError), contextlib.ExitStack() as stack:
            file = stack.enter_context(open(lock, "ab"))
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # Its last holder may have removed it between our opening and our locking it.
                if os.fstat(file.fileno()).st_ino == lock.stat().st_ino:
                    stack.pop_all()
                    return file
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise TimeoutError(f"another process works on {lock.name}") from None
                time.sleep(pause)
                pause = min(2 * pause, most)
    return None


def _beside(path: Path, kind: str) -> Path:
    return path.parent / f".{path.name}.{kind}"
