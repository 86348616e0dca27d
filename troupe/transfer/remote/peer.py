"""`Peer`: fetches states from the `Owner` of another host."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from troupe.rpc.channel import connect_sync
from troupe.rpc.errors import (
    DataLoss,
    DeadlineExceeded,
    FailedPrecondition,
    NotFound,
    ResourceExhausted,
    TroupeError,
    Unavailable,
)
from troupe.rpc.settings import ClientSettings
from troupe.transfer.counters import Choice, TransferCounters
from troupe.transfer.errors import Corrupt, KeyNotFound, TransferTimeout
from troupe.transfer.manifest import Manifest
from troupe.transfer.remote import lane as ucx
from troupe.transfer.remote.layout import LANE_CHUNK_BYTES, MESSAGE_CHUNK_BYTES, num_chunks
from troupe.transfer.remote.part import Part, part_in
from troupe.transfer.remote.reading import by_lane, by_messages
from troupe.v1 import transfer_pb2 as pb
from troupe.v1 import transfer_pb2_grpc as rpc

log = logging.getLogger(__name__)

# A chunk that arrives damaged so often was not damaged by chance.
_MOST_CORRUPT: Final = 3
# UCX that broke so often without a single chunk between is given up for gRPC.
_MOST_BROKEN_LANES: Final = 2
_BACKOFF_SECONDS: Final = (0.05, 2.0)
_DESCRIBE_SECONDS: Final = 20.0


@dataclass(frozen=True)
class Fetched:
    """A state that lies on this host now, all of its bytes verified."""

    path: Path
    manifest: Manifest
    choice: Choice


class Peer:
    """The states of the owner at `address` ("host:port"). Safe to use from several threads."""

    def __init__(
        self,
        address: str,
        settings: ClientSettings | None = None,
        *,
        use_ucx: bool = True,
        deadline_seconds: float = 600.0,
    ) -> None:
        """`deadline_seconds` bounds a fetch whose caller names no time."""
        self.address = address
        self.deadline_seconds = deadline_seconds
        self._use_ucx = use_ucx
        self._channel = connect_sync(address, settings)
        self._stub = rpc.TransferOwnerStub(self._channel)

    def close(self) -> None:
        """End the connection."""
        self._channel.close()

    def fetch(
        self, key: str, roots: Sequence[Path], counters: TransferCounters, deadline: float
    ) -> Fetched:
        """Bring the state under `key` into the first of `roots` that has room.

        Goes on after broken connections with the chunks that are missing, until `deadline` (of
        the monotonic clock). Nothing is visible before all of it is verified.

        Raises KeyNotFound, Corrupt, StorageFull, TransferTimeout; Unavailable when the owner did
        not answer at all; Unauthenticated.
        """
        manifest, has_ucx = self._describe(key, deadline)
        with part_in(roots, manifest) as part:
            choice = _Fetch(self._stub, self.address, part, counters, deadline).run(
                self._why_not_ucx(has_ucx)
            )
            part.commit()
            return Fetched(part.path, manifest, choice)

    def _describe(self, key: str, deadline: float) -> tuple[Manifest, bool]:
        left = min(_DESCRIBE_SECONDS, max(deadline - time.monotonic(), 0.001))
        try:
            answer = self._stub.DescribeState(pb.DescribeStateRequest(key=key), timeout=left)
        except NotFound as error:
            raise KeyNotFound(key, f"nothing is stored under it at {self.address}") from error
        except DataLoss as error:
            raise Corrupt(key, f"at {self.address}: {error.message}") from error
        try:
            manifest = Manifest.from_json(answer.manifest)
        except ValueError as error:
            raise Corrupt(key, f"{self.address} describes it wrongly: {error}") from error
        if manifest.key != key:
            raise Corrupt(key, f"{self.address} describes '{manifest.key}' instead")
        return manifest, answer.ucx

    def _why_not_ucx(self, there: bool) -> str:
        if not self._use_ucx or ucx.missing():
            return "ucx_not_here"
        return "" if there else "ucx_not_there"


class _Fetch:
    """One state on its way: what is still missing, and what went wrong so far."""

    def __init__(
        self,
        stub: rpc.TransferOwnerStub,
        address: str,
        part: Part,
        counters: TransferCounters,
        deadline: float,
    ) -> None:
        self._stub, self._address, self._part = stub, address, part
        self._counters, self._deadline = counters, deadline
        self._key = part.manifest.key

    def run(self, why_not_ucx: str) -> Choice:
        """All chunks, by UCX unless there is a reason not to; how it was done."""
        if not why_not_ucx:
            try:
                self._all(LANE_CHUNK_BYTES, by_lane)
            except ucx.LaneBroken as error:
                log.warning("%s: UCX to %s failed: %s", self._key, self._address, error)
                why_not_ucx = "ucx_failed"
            else:
                return Choice("get", "ucx", "other_host")
        words = why_not_ucx.replace("_", " ")
        log.warning("get %s: through gRPC from %s (%s)", self._key, self._address, words)
        self._all(MESSAGE_CHUNK_BYTES, by_messages)
        return Choice("get", "grpc", why_not_ucx)

    def _all(self, chunk_bytes: int, read: Callable[..., None]) -> None:
        missing = set(range(num_chunks(self._part.manifest, chunk_bytes)))
        corrupt: Counter[int] = Counter()
        pause, broken = _BACKOFF_SECONDS[0], 0

        def arrived(chunk: int, whole: bool) -> None:
            if whole:
                missing.discard(chunk)
                return
            self._counters.retried("corrupt_chunk")
            corrupt[chunk] += 1
            log.warning("%s: chunk %d arrived damaged", self._key, chunk)
            if corrupt[chunk] >= _MOST_CORRUPT:
                raise Corrupt(self._key, f"chunk {chunk} arrived damaged {corrupt[chunk]} times")

        while missing:
            before = len(missing)
            left = self._deadline - time.monotonic()
            if left <= 0:
                raise TransferTimeout(
                    self._key, f"{len(missing)} chunks are missing from {self._address}"
                )
            request = pb.ReadStateRequest(
                key=self._key,
                checksum=self._part.manifest.checksum,
                chunk_bytes=chunk_bytes,
                chunks=sorted(missing),
            )
            try:
                read(self._stub, request, self._part.data, arrived, left)
            except (Unavailable, DeadlineExceeded, ResourceExhausted, ucx.LaneBroken) as error:
                self._counters.retried("broken_connection")
                log.info("%s: %d chunks are missing: %s", self._key, len(missing), error)
                broken = 0 if len(missing) < before else broken + 1
                if isinstance(error, ucx.LaneBroken) and broken >= _MOST_BROKEN_LANES:
                    raise
                time.sleep(min(pause, max(self._deadline - time.monotonic(), 0)))
                pause = min(2 * pause, _BACKOFF_SECONDS[1]) if broken else _BACKOFF_SECONDS[0]
            except NotFound as error:
                raise KeyNotFound(self._key, f"deleted at {self._address} meanwhile") from error
            except Corrupt:
                raise
            except DataLoss as error:
                raise Corrupt(self._key, f"at {self._address}: {error.message}") from error
            except FailedPrecondition as error:
                raise _replaced(self._key, self._address, error) from error


def _replaced(key: str, address: str, error: TroupeError) -> TroupeError:
    if error.kind != "transfer_replaced":
        return error
    return KeyNotFound(key, f"replaced at {address} while it was read")
