"""A state's file while its bytes arrive: invisible under its key until all of it is there."""

from __future__ import annotations

import contextlib
import errno
import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from troupe.rpc.errors import TroupeError, Unavailable
from troupe.transfer import blob, shelf
from troupe.transfer.blob import Manifest, chunks_of, spans_of
from troupe.transfer.errors import Corrupt, KeyNotFound, StorageFull
from troupe.transfer.places import in_memory
from troupe.transfer.shelf import Room, Shelf
from troupe.transfer.spares import Spares

log = logging.getLogger(__name__)

_NAP_SECONDS: Final = 1.0


class Part:
    """The file and its chunks. `data` is the section of tensors, writable.

    One thread fills it; others may wait for its chunks to hand them on.
    """

    def __init__(self, path: Path, manifest: Manifest, spares: Spares | None) -> None:
        """Take all the room at once. What a process that died had got of it stays.

        Raises OSError.
        """
        self.path, self.manifest = path, manifest
        self.chunks = chunks_of(manifest)
        head = blob.prefix(manifest)
        name = f".{path.name}.{manifest.checksum}.part"
        self._room = Room(path, len(head) + manifest.end, spares, name=name)
        try:
            self.data = self._room.mapped[len(head) :]
            self._room.mapped[: len(head)] = head
        except BaseException:
            self._room.abandon()
            raise
        self.missing = set(range(len(self.chunks)))
        # Why there will be no more chunks.
        self._failure: TroupeError | None = None
        self._committed = False
        self._changed = threading.Condition()
        if self._room.resumed:
            self.missing = {i for i in self.missing if self.chunks[i].damaged(self.data)}
            log.info("%s: %d of %d chunks were here", manifest.key, self.num_here, len(self.chunks))

    @property
    def shown(self) -> bool:
        """Whether all of it is under its key."""
        return self._committed

    @property
    def num_here(self) -> int:
        """Chunks that have arrived and are what they should be."""
        return len(self.chunks) - len(self.missing)

    def take_from(self, base: Manifest, data: memoryview) -> int:
        """Copy from another state what this one has too; how many bytes that are."""
        there = {span.checksum: span for span in spans_of(base)}
        copied = 0
        for index in sorted(self.missing):
            chunk = self.chunks[index]
            if not all(span.checksum in there for span in chunk.spans):
                continue
            for span in chunk.spans:
                old = there[span.checksum]
                if old.nbytes == span.nbytes:
                    self.data[span.offset : span.offset + span.nbytes] = data[
                        old.offset : old.offset + old.nbytes
                    ]
            if not chunk.damaged(self.data):
                self.arrived(index)
                copied += chunk.nbytes
        return copied

    def arrived(self, index: int) -> None:
        """The chunk is there, verified."""
        with self._changed:
            self.missing.discard(index)
            self._changed.notify_all()

    def wait(self, index: int, timeout: float) -> memoryview | None:
        """The bytes of a chunk; None when they have not arrived within `timeout` seconds.

        Raises Unavailable when they never will.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: index not in self.missing or self._failure is not None,
                min(timeout, _NAP_SECONDS),
            )
            if index not in self.missing:
                return self.chunks[index].of(self.data)
            if self._failure is not None:
                raise Unavailable(
                    f"was being fetched here, which failed: {self._failure.message}",
                    kind="transfer_source_failed",
                )
            return None

    def commit(self, address: str) -> None:
        """Show the file under its key, all chunks being there. It came from `address`."""
        assert not self.missing
        self._room.show()
        self._committed = True
        shelf.mark(self.path, "fetched", address)

    def fail(self, error: BaseException) -> None:
        """Give the room back. What has arrived stays for who goes on, unless it is of no use."""
        no_use = isinstance(error, Corrupt | KeyNotFound | StorageFull)
        with self._changed:
            self._failure = error if isinstance(error, TroupeError) else Unavailable(repr(error))
            self._changed.notify_all()
        self._room.abandon(keep_file=not no_use and self.num_here > 0)


@contextlib.contextmanager
def part_in(shelf: Shelf, manifest: Manifest) -> Iterator[Part]:
    """A part in the first root of `shelf` that has room; ended with what the block raises.

    Raises StorageFull.
    """
    part = _made(shelf, manifest)
    try:
        yield part
    except BaseException as error:
        part.fail(error)
        raise


def _made(shelf: Shelf, manifest: Manifest) -> Part:
    for root in shelf.roots:
        path = root / manifest.key
        spares = shelf.spares[root] if in_memory(root) else None
        for again in (False, True):
            try:
                return Part(path, manifest, spares)
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                    raise
            if spares is None or again:
                break
            # What is kept for later is of more use now.
            spares.close()
            spares.sweep(0)
        log.warning("%s: no room for %d bytes in %s", manifest.key, manifest.num_bytes, root)
    raise StorageFull(manifest.key, f"no room for {manifest.num_bytes} bytes in {shelf.roots[0]}")
