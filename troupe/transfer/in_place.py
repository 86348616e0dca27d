"""Model directories in which other programs of this host read a state in place, without a copy.

The file of a state is safetensors (`troupe.transfer.blob`). An inference server that loads a
checkpoint wants a directory: it gets one with a hard link of that file and the small files that
belong to a checkpoint. Such a reader takes no lock; but a file with a further name is never
refilled (`segment_pool`), so a state that is deleted or replaced meanwhile stays unchanged until
the directory is closed. Directories of dead processes are swept, like their half-written files.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import secrets
import shutil
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO, Final

_PLACE: Final = ".in-place"
_LOCK: Final = ".lock"
WEIGHTS_FILE: Final = "model.safetensors"


class ModelDirectory:
    """A directory with a state as `model.safetensors`, for readers on this host, until `close`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def close(self) -> None:
        """Remove the directory. Readers keep files that they have open. Repeatable."""
        shutil.rmtree(self.path, ignore_errors=True)


class ModelDirectories:
    """The model directories of this process under one root. Thread-safe."""

    def __init__(self, root: Path) -> None:
        self._root = root / _PLACE
        self._mutex = threading.Lock()
        self._numbers = itertools.count()
        self._own: Path | None = None
        # Held while this process lives; it tells others that the directory is in use.
        self._lock: BinaryIO | None = None

    def make(self, path: Path, file: BinaryIO, files: Mapping[str, bytes]) -> ModelDirectory:
        """Return a directory with a link of `file`, which is open and was found at `path`, and with
        `files` by name.

        Raises FileNotFoundError if another state has taken its path, and OSError if the file system
        has no hard links or no room.
        """
        made = ModelDirectory(self._place() / str(next(self._numbers)))
        try:
            made.path.mkdir(mode=0o700)
            target = made.path / WEIGHTS_FILE
            os.link(path, target)
            if not os.path.samestat(target.stat(), os.fstat(file.fileno())):
                raise FileNotFoundError(f"{path} was replaced")
            for name, content in files.items():
                (made.path / name).write_bytes(content)
        except BaseException:
            made.close()
            raise
        return made

    def close(self) -> None:
        """Remove all directories of this process."""
        with self._mutex:
            if self._own is not None:
                shutil.rmtree(self._own, ignore_errors=True)
            if self._lock is not None:
                self._lock.close()
            self._own = self._lock = None

    def _place(self) -> Path:
        """Return this process's own directory."""
        with self._mutex:
            # (A directory that was not locked yet may have been swept.)
            while self._own is None or not self._own.is_dir():
                self._root.mkdir(parents=True, exist_ok=True, mode=0o700)
                self.sweep()
                own = self._root / secrets.token_hex(8)
                own.mkdir(mode=0o700)
                lock = open(own / _LOCK, "wb")  # noqa: SIM115
                fcntl.flock(lock, fcntl.LOCK_EX)
                self._own, self._lock = own, lock
            return self._own

    def sweep(self) -> None:
        """Remove the directories of processes that have ended."""
        with contextlib.suppress(FileNotFoundError):
            for left in self._root.iterdir():
                with contextlib.suppress(OSError), open(left / _LOCK, "rb") as lock:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(left, ignore_errors=True)
