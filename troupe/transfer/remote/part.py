"""A state's file while its bytes arrive: invisible under its key until all of it is there."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import mmap
import os
import secrets
from collections.abc import Iterator, Sequence
from pathlib import Path

from troupe.transfer import blob
from troupe.transfer.checksum import bytes_checksum
from troupe.transfer.errors import Corrupt, StorageFull
from troupe.transfer.manifest import Manifest

log = logging.getLogger(__name__)


class Part:
    """The file and its chunks. `data` is the section of tensors, writable."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        """Take all the room at once. Raises OSError."""
        self.path, self.manifest = path, manifest
        path.parent.mkdir(parents=True, exist_ok=True)
        blob.sweep(path.parent)
        prefix = blob.prefix(manifest)
        self._temp = path.parent / f".{path.name}.{secrets.token_hex(8)}.tmp"
        self._file = open(self._temp, "x+b", buffering=0)  # noqa: SIM115
        try:
            # `sweep` tells a dead reader's file by it, as it does a dead writer's.
            fcntl.flock(self._file, fcntl.LOCK_EX)
            # A store through a mapping without room behind it would kill the process.
            os.posix_fallocate(self._file.fileno(), 0, len(prefix) + manifest.end)
            self._file.write(prefix)
            self._mapping = mmap.mmap(self._file.fileno(), 0)
        except BaseException:
            self.abandon()
            raise
        self.data = memoryview(self._mapping)[len(prefix) :]

    def commit(self) -> None:
        """Check every tensor, then show the file under its key. Raises Corrupt."""
        for entry in self.manifest.entries:
            if (
                bytes_checksum(self.data[entry.offset : entry.offset + entry.nbytes])
                != entry.checksum
            ):
                raise Corrupt(
                    self.manifest.key,
                    f"the bytes of '{entry.name}' do not match their checksum at their owner",
                )
        self._temp.replace(self.path)

    def abandon(self) -> None:
        """Give the room back, unless committed."""
        with contextlib.suppress(FileNotFoundError):
            self._temp.unlink()
        self._file.close()


@contextlib.contextmanager
def part_in(roots: Sequence[Path], manifest: Manifest) -> Iterator[Part]:
    """A part in the first of `roots` that has room; gone afterwards unless committed.

    Raises StorageFull.
    """
    for root in roots:
        try:
            part = Part(root / manifest.key, manifest)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            log.warning("%s: no room for %d bytes in %s", manifest.key, manifest.num_bytes, root)
            continue
        try:
            yield part
        finally:
            part.abandon()
        return
    raise StorageFull(manifest.key, f"no room for {manifest.num_bytes} bytes in {roots[0]}")
