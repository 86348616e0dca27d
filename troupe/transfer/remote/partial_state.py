"""The file of a state that is being fetched, which is invisible under its key until it is
complete."""

from __future__ import annotations

import contextlib
import errno
import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from troupe.rpc.errors import TroupeError, Unavailable
from troupe.transfer import blob, segments
from troupe.transfer.blob import Manifest, chunks_of, spans_of
from troupe.transfer.errors import Corrupt, KeyNotFound, StorageFull
from troupe.transfer.segment_pool import SegmentPool
from troupe.transfer.segments import SegmentStore, SegmentWriter
from troupe.transfer.sources import in_memory

log = logging.getLogger(__name__)

_NAP_SECONDS: Final = 1.0


class PartialState:
    """The file and its chunks. `data` is the writable section of tensors.

    One thread fills it; others may wait for chunks, to forward them to other hosts.
    """

    def __init__(self, path: Path, manifest: Manifest, pool: SegmentPool | None) -> None:
        """Allocate the whole file, or continue a file left by a dead process. Raises OSError."""
        self.path, self.manifest = path, manifest
        self.chunks = chunks_of(manifest)
        head = blob.prefix(manifest)
        name = f".{path.name}.{manifest.checksum}.part"
        self._writer = SegmentWriter(path, len(head) + manifest.end, pool, name=name)
        try:
            self.data = self._writer.mapped[len(head) :]
            self._writer.mapped[: len(head)] = head
        except BaseException:
            self._writer.abandon()
            raise
        self.missing = set(range(len(self.chunks)))
        # Why no more chunks will arrive.
        self._failure: TroupeError | None = None
        self.published = False
        """Whether the complete file is visible under its key."""
        self._changed = threading.Condition()
        if self._writer.resumed:
            self.missing = {i for i in self.missing if self.chunks[i].damaged(self.data)}
            log.info("%s: %d of %d chunks were here", manifest.key, self.num_here, len(self.chunks))

    @property
    def num_here(self) -> int:
        """The number of chunks that have arrived and were verified."""
        return len(self.chunks) - len(self.missing)

    def take_from(self, base: Manifest, data: memoryview) -> int:
        """Copy the chunks that this state shares with another one, and return their bytes."""
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
        """Record that a chunk has arrived and was verified."""
        with self._changed:
            self.missing.discard(index)
            self._changed.notify_all()

    def wait(self, index: int, timeout: float) -> memoryview | None:
        """Return the bytes of a chunk; None when they have not arrived within `timeout` seconds.

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
        """Publish the complete file under its key; `address`: the owner that it came from."""
        assert not self.missing
        self._writer.publish()
        self.published = True
        segments.mark(self.path, "fetched", address)

    def fail(self, error: BaseException) -> None:
        """End the fetch with `error`. Arrived chunks are kept for a later attempt, unless the error
        shows that they are useless."""
        no_use = isinstance(error, Corrupt | KeyNotFound | StorageFull)
        with self._changed:
            self._failure = error if isinstance(error, TroupeError) else Unavailable(repr(error))
            self._changed.notify_all()
        self._writer.abandon(keep_file=not no_use and self.num_here > 0)


@contextlib.contextmanager
def partial_state_in(segments: SegmentStore, manifest: Manifest) -> Iterator[PartialState]:
    """Yield a partial state in the first root of `segments` that has room; an error of the block
    ends it.

    Raises StorageFull.
    """
    part = _made(segments, manifest)
    try:
        yield part
    except BaseException as error:
        part.fail(error)
        raise


def _made(segments: SegmentStore, manifest: Manifest) -> PartialState:
    for root in segments.roots:
        path = root / manifest.key
        pool = segments.pools[root] if in_memory(root) else None
        for again in (False, True):
            try:
                return PartialState(path, manifest, pool)
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                    raise
            if pool is None or again:
                break
            # The pooled files occupy the room that this state needs.
            pool.close()
            pool.sweep(0)
        log.warning("%s: no room for %d bytes in %s", manifest.key, manifest.num_bytes, root)
    raise StorageFull(
        manifest.key, f"no room for {manifest.num_bytes} bytes in {segments.roots[0]}"
    )
