"""One state on its way: what is still missing, from whom, and what went wrong so far."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from troupe.rpc.errors import (
    DataLoss,
    DeadlineExceeded,
    FailedPrecondition,
    NotFound,
    ResourceExhausted,
    TroupeError,
    Unavailable,
)
from troupe.transfer.checksum import PIECE_BYTES
from troupe.transfer.counters import Choice, TransferCounters
from troupe.transfer.errors import Corrupt, KeyNotFound, TransferTimeout
from troupe.transfer.remote import lane as ucx
from troupe.transfer.remote.lanes import Lanes
from troupe.transfer.remote.part import Part
from troupe.transfer.remote.reading import LaneRead, Place, by_messages
from troupe.v1 import transfer_pb2 as pb

log = logging.getLogger(__name__)

# A chunk that arrives damaged so often was not damaged by chance.
_MOST_CORRUPT: Final = 3
# UCX that broke so often without a single chunk between is given up for gRPC.
_MOST_BROKEN_LANES: Final = 2
_BACKOFF_SECONDS: Final = (0.05, 2.0)


# Asks the owner again whom to read from, naming those that failed.
Reroute = Callable[[Sequence[str]], Place]


class Fetch:
    """Brings the missing chunks of a part."""

    def __init__(
        self,
        part: Part,
        owner: Place,
        source: Place,
        reroute: Reroute,
        *,
        counters: TransferCounters,
        deadline: float,
        lanes: Lanes,
        checker: ThreadPoolExecutor,
        begun: LaneRead | None = None,
    ) -> None:
        """From `source`, which `owner` named or is. `begun`: a read of all of it."""
        self._part, self._owner, self._source = part, owner, source
        self._reroute, self._counters, self._deadline = reroute, counters, deadline
        self._lanes, self._checker, self._begun = lanes, checker, begun
        self._key = part.manifest.key
        self._corrupt: Counter[int] = Counter()
        self._failed: list[str] = []
        self._broken = 0

    def run(self) -> Choice:
        """All of them; how they came. Raises what `Peer.fetch` does."""
        pause = _BACKOFF_SECONDS[0]
        while self._part.missing:
            here, left = self._part.num_here, self._left()
            try:
                self._attempt(left)
                continue
            except (Unavailable, DeadlineExceeded, ResourceExhausted, ucx.LaneBroken) as error:
                self._counters.retried("broken_connection")
                missing = len(self._part.missing)
                log.info("%s: %d chunks are missing: %s", self._key, missing, error)
                failure: Exception = error
            except (NotFound, DataLoss, FailedPrecondition) as error:
                # Of who only hands it on, another copy than the owner's may be damaged.
                handed_on = self._source.address != self._owner.address
                if (isinstance(error, Corrupt) and not handed_on) or not self._another(error):
                    raise
                self._corrupt.clear()
                failure = error
            if self._part.num_here > here:
                self._broken, pause = 0, _BACKOFF_SECONDS[0]
            if self._source.address != self._owner.address:
                self._leave_source()
            elif isinstance(failure, ucx.LaneBroken):
                self._lane_broke(failure)
            elif not isinstance(failure, FailedPrecondition):
                time.sleep(min(pause, max(self._deadline - time.monotonic(), 0)))
                pause = min(2 * pause, _BACKOFF_SECONDS[1])
        how = self._source
        if how.why_not_ucx:
            return Choice("get", "grpc", how.why_not_ucx)
        return Choice("get", "ucx", "other_host")

    def _attempt(self, left: float) -> None:
        source, missing = self._source, sorted(self._part.missing)
        begun, self._begun = self._begun, None
        if begun is not None and begun.under_way:
            if begun.place == source and len(missing) == len(self._part.chunks):
                begun.receive(missing, self._part, self._arrived, self._checker)
                return
            begun.cancel()
        request = pb.ReadStateRequest(
            key=self._key,
            checksum=self._part.manifest.checksum,
            chunk_bytes=PIECE_BYTES,
            chunks=missing,
        )
        if source.why_not_ucx:
            words = source.why_not_ucx.replace("_", " ")
            log.warning("get %s: through gRPC from %s (%s)", self._key, source.address, words)
            by_messages(source.stub, request, self._part, self._arrived, left)
            return
        read = LaneRead(source, request, self._lanes, left)
        read.receive(missing, self._part, self._arrived, self._checker)

    def _arrived(self, index: int, damaged: str) -> None:
        if not damaged:
            self._part.arrived(index)
            return
        self._counters.retried("corrupt_chunk")
        self._corrupt[index] += 1
        log.warning("%s: chunk %d ('%s') arrived damaged", self._key, index, damaged)
        if self._corrupt[index] < _MOST_CORRUPT:
            return
        raise Corrupt(
            self._key,
            f"chunk {index} ('{damaged}') arrived damaged {self._corrupt[index]} times from "
            f"{self._source.address}",
        )

    def _another(self, error: TroupeError) -> bool:
        """Whether there is another way after an answer that repeating will not change."""
        source = self._source
        if error.kind == "transfer_no_ucx":
            self._source = Place(source.address, source.stub, "ucx_not_there", False)
            return True
        if error.kind == "transfer_lane_unreachable":
            # Near lanes reach another container of this machine only if it shares its namespaces.
            log.warning("get %s: through TCP from %s (no shared memory)", self._key, source.address)
            self._source = Place(source.address, source.stub, "", False)
            return True
        if source.address != self._owner.address:
            return True
        if isinstance(error, NotFound):
            raise KeyNotFound(self._key, f"deleted at {source.address} meanwhile") from error
        if isinstance(error, DataLoss):
            raise Corrupt(self._key, f"at {source.address}: {error.message}") from error
        if error.kind == "transfer_replaced":
            raise KeyNotFound(
                self._key, f"replaced at {source.address} while it was read"
            ) from error
        return False

    def _leave_source(self) -> None:
        """Another reader failed: the owner knows the next one, or is it itself."""
        self._failed.append(self._source.address)
        try:
            self._source = self._reroute(self._failed)
        except TroupeError as error:
            log.info(
                "%s: %s does not say where to go on: %s", self._key, self._owner.address, error
            )
            self._source = self._owner

    def _lane_broke(self, error: ucx.LaneBroken) -> None:
        self._broken += 1
        if self._broken < _MOST_BROKEN_LANES:
            return
        source, self._broken = self._source, 0
        if source.near:
            log.warning("get %s: through TCP from %s: %s", self._key, source.address, error)
            self._source = Place(source.address, source.stub, "", False)
            return
        log.warning("%s: UCX to %s failed: %s", self._key, source.address, error)
        self._source = Place(source.address, source.stub, "ucx_failed", False)

    def _left(self) -> float:
        left = self._deadline - time.monotonic()
        if left <= 0:
            missing = len(self._part.missing)
            raise TransferTimeout(
                self._key, f"{missing} chunks are missing from {self._source.address}"
            )
        return left
