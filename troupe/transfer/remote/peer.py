"""Fetching states from other hosts: `Peer` is the client of the owner on another host.

`Describer` asks for the description and source of a state; `Fetch` gets its missing chunks through
UCX or gRPC until all are verified or the deadline passes.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import grpc

from troupe.contracts import kinds
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
from troupe.transfer.blob import Manifest
from troupe.transfer.checksum import PIECE_BYTES
from troupe.transfer.counters import Choice, TransferCounters
from troupe.transfer.errors import Corrupt, KeyNotFound, TransferTimeout, UnknownCodec
from troupe.transfer.remote import lane as ucx
from troupe.transfer.remote.lane import LanePool
from troupe.transfer.remote.partial_state import PartialState, partial_state_in
from troupe.transfer.remote.reading import LaneRead, StateSource, by_messages
from troupe.transfer.segments import SegmentStore, alone, busy, sweep
from troupe.transfer.sources import FetchedState, StateRequest
from troupe.v1 import transfer_pb2 as transfer_pb
from troupe.v1 import transfer_pb2_grpc as transfer_grpc

log = logging.getLogger(__name__)

# After this number of damaged arrivals, a chunk counts as damaged at its source.
_MOST_CORRUPT: Final = 3
# After this number of UCX failures without a chunk in between, gRPC is used.
_MOST_BROKEN_LANES: Final = 2
_BACKOFF_SECONDS: Final = (0.05, 2.0)


# Asks the owner for another source, naming those that failed.
Reroute = Callable[[Sequence[str]], StateSource]


class Fetch:
    """The fetch of the missing chunks of a partial state, from one source after another."""

    def __init__(
        self,
        part: PartialState,
        owner: StateSource,
        source: StateSource,
        reroute: Reroute,
        *,
        counters: TransferCounters,
        deadline: float,
        lanes: LanePool,
        checker: ThreadPoolExecutor,
        begun: LaneRead | None = None,
    ) -> None:
        """Create the fetch. `source`: the owner itself, or a reader that it named. `begun`: a
        started read of all chunks."""
        self._part, self._owner, self._source = part, owner, source
        self._reroute, self._counters, self._deadline = reroute, counters, deadline
        self._lanes, self._checker, self._begun = lanes, checker, begun
        self._key = part.manifest.key
        self._corrupt: Counter[int] = Counter()
        self._failed: list[str] = []
        self._broken = 0

    def run(self) -> Choice:
        """Get all chunks, and return the transport. Raises the errors of `Peer.fetch`."""
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
                # A forwarding reader's copy may be damaged even if the owner's is not.
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
        request = transfer_pb.ReadStateRequest(
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
        """Return whether another transport or source is left after a permanent error."""
        source = self._source
        if error.kind == kinds.TRANSFER_NO_UCX:
            self._source = StateSource(source.address, source.stub, "ucx_not_there", False)
            return True
        if error.kind == kinds.TRANSFER_LANE_UNREACHABLE:
            # Near lanes reach another container of this machine only if it shares its namespaces.
            log.warning("get %s: through TCP from %s (no shared memory)", self._key, source.address)
            self._source = StateSource(source.address, source.stub, "", False)
            return True
        if source.address != self._owner.address:
            return True
        if isinstance(error, NotFound):
            raise KeyNotFound(self._key, f"deleted at {source.address} meanwhile") from error
        if isinstance(error, DataLoss):
            raise Corrupt(self._key, f"at {source.address}: {error.message}") from error
        if error.kind == kinds.TRANSFER_REPLACED:
            raise KeyNotFound(
                self._key, f"replaced at {source.address} while it was read"
            ) from error
        return False

    def _leave_source(self) -> None:
        """Change to another source than the failed reader: one that the owner names, or the owner
        itself."""
        self._failed.append(self._source.address)
        try:
            self._source = self._reroute(self._failed)
        except TroupeError as error:
            log.info(
                "%s: %s does not name another source: %s", self._key, self._owner.address, error
            )
            self._source = self._owner

    def _lane_broke(self, error: ucx.LaneBroken) -> None:
        self._broken += 1
        if self._broken < _MOST_BROKEN_LANES:
            return
        source, self._broken = self._source, 0
        if source.near:
            log.warning("get %s: through TCP from %s: %s", self._key, source.address, error)
            self._source = StateSource(source.address, source.stub, "", False)
            return
        log.warning("%s: UCX to %s failed: %s", self._key, source.address, error)
        self._source = StateSource(source.address, source.stub, "ucx_failed", False)

    def _left(self) -> float:
        left = self._deadline - time.monotonic()
        if left <= 0:
            missing = len(self._part.missing)
            raise TransferTimeout(
                self._key, f"{missing} chunks are missing from {self._source.address}"
            )
        return left


_DESCRIBE_SECONDS: Final = 20.0


class Describer:
    """A client that asks the owner at `address` for descriptions, for a reader that serves at
    `serves_at`."""

    def __init__(self, address: str, stub: transfer_grpc.TransferOwnerStub, serves_at: str) -> None:
        self._address, self._stub, self._serves_at = address, stub, serves_at

    def request(
        self, key: str, expected: str | None, failed: Sequence[str] = ()
    ) -> transfer_pb.DescribeStateRequest:
        """Return the request. `failed`: sources that did not answer."""
        return transfer_pb.DescribeStateRequest(
            key=key, checksum=expected or "", reader=self._serves_at, failed=failed
        )

    def ask(
        self,
        key: str,
        deadline: float,
        expected: str | None,
        failed: Sequence[str] = (),
        begun: LaneRead | None = None,
    ) -> tuple[Manifest, transfer_pb.DescribeStateResponse]:
        """Return the manifest and description of `key` there (with the checksum `expected`), until
        `deadline` on the monotonic clock. `begun`: a started read whose request asked for them.

        Raises KeyNotFound, Corrupt, TransferTimeout, Unavailable, and other errors of the owner.
        """
        try:
            left = within(deadline)
            answer = None if begun is None else begun.described(left)
            if answer is None:
                request = self.request(key, expected, failed)
                answer = self._stub.DescribeState(request, timeout=left)
        except NotFound as error:
            raise KeyNotFound(key, f"not at {self._address}: {error.message}") from error
        except DeadlineExceeded as error:
            if time.monotonic() >= deadline:
                raise TransferTimeout(key, f"{self._address} did not describe it") from error
            # Other owners may have it.
            raise Unavailable(
                f"{self._address} did not describe {key} within {_DESCRIBE_SECONDS:g} s: "
                f"{error.message}",
                kind="transfer_owner_away",
                field="owner",
                value=self._address,
            ) from error
        except DataLoss as error:
            raise Corrupt(key, f"at {self._address}: {error.message}") from error
        try:
            manifest = Manifest.from_json(answer.manifest)
        except ValueError as error:
            raise Corrupt(key, f"{self._address} sent an invalid description: {error}") from error
        if manifest.key != key:
            raise Corrupt(key, f"{self._address} describes '{manifest.key}' instead")
        if expected and manifest.checksum != expected:
            raise KeyNotFound(key, f"{self._address} has different content")
        return manifest, answer


def within(deadline: float) -> float:
    """Return the seconds that a description may take until `deadline`."""
    return min(_DESCRIBE_SECONDS, max(deadline - time.monotonic(), 0.001))


class IncomingStates:
    """States that this process is fetching, by key and checksum. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._parts: dict[tuple[str, str], PartialState] = {}

    @contextlib.contextmanager
    def coming(self, part: PartialState) -> Iterator[None]:
        """Offer `part` to other readers within the block."""
        name = (part.manifest.key, part.manifest.checksum)
        with self._lock:
            self._parts[name] = part
        try:
            yield
        finally:
            with self._lock:
                del self._parts[name]

    def find(self, key: str, checksum: str) -> PartialState | None:
        """Return the state of this key and checksum ("": of any content), if it is being
        fetched."""
        with self._lock:
            if checksum:
                return self._parts.get((key, checksum))
            return next((part for (k, _), part in self._parts.items() if k == key), None)


# Time limit of the answer of a reader that was named as source.
_ALIVE_SECONDS: Final = 5.0
_NAP_SECONDS: Final = 0.02
# Number of verifying threads, more than an owner ever has fetches. With fewer, two hosts could wait
# for each other's chunks forever.
_MOST_FETCHES: Final = 64


class Peer:
    """A client of the owner at `address` ("host:port") of another host. Thread-safe."""

    def __init__(
        self,
        address: str,
        settings: ClientSettings | None = None,
        *,
        use_ucx: bool = True,
        deadline_seconds: float = 600.0,
        serves_at: str = "",
        arrivals: IncomingStates | None = None,
        lanes: LanePool | None = None,
    ) -> None:
        """Connect to the owner. `deadline_seconds` bounds a fetch whose caller does not give a
        time.

        `serves_at`: the address of the owner in this process, which forwards the states being
        fetched from `arrivals`. `lanes`: the pool of UCX lanes between fetches.
        """
        self.address = address
        self.deadline_seconds = deadline_seconds
        self._settings, self._use_ucx, self._serves_at = settings, use_ucx, serves_at
        self._arrivals = arrivals or IncomingStates()
        self._own_lanes = lanes is None
        self._lanes = lanes or LanePool()
        self._checker = ThreadPoolExecutor(_MOST_FETCHES, thread_name_prefix="transfer-check")
        self._lock = threading.Lock()
        self._stores: dict[tuple[Path, ...], SegmentStore] = {}
        self._channels: dict[str, grpc.Channel] = {}
        self._stub = self._stub_of(address)
        self._describer = Describer(address, self._stub, serves_at)
        # How the owner was last read.
        self._last: StateSource | None = None

    def close(self) -> None:
        """End the connections."""
        with self._lock:
            channels, self._channels = list(self._channels.values()), {}
        for channel in channels:
            channel.close()
        for segments in self._stores.values():
            for pool in segments.pools.values():
                pool.close()
        self._checker.shutdown(wait=False)
        if self._own_lanes:
            self._lanes.close()

    def fetch(
        self, wanted: StateRequest, roots: Sequence[Path], counters: TransferCounters
    ) -> FetchedState:
        """See `sources.FetchSource.fetch`. After failures the missing chunks are requested again,
        until the deadline. A state becomes visible when all of it is verified; a host fetches it
        only once, even if several processes request it.

        Raises KeyNotFound, Corrupt, StorageFull, TransferTimeout; Unavailable if the owner did not
        answer at all; Unauthenticated.
        """
        segments, key, deadline = self._segments(tuple(roots)), wanted.key, wanted.deadline
        path = segments.paths(key)[0]
        begun = self._begin(wanted, path)
        try:
            with contextlib.ExitStack() as here:
                if begun is not None:
                    # While the owner looks it up.
                    here.enter_context(alone(path, deadline))
                older = segments.older(key)
                for there in segments.paths(key):
                    sweep(there.parent)
                manifest, answer = self._describer.ask(key, deadline, wanted.expected, begun=begun)
                if begun is None:
                    here.enter_context(alone(path, deadline))
                if segments.holds(manifest.key, manifest.checksum):
                    path = segments.path(manifest.key)
                    return FetchedState(path, Choice("get", "shared_memory", "same_host"))
                fetched = self._fetch(
                    manifest, answer, segments, counters, deadline, wanted.base, begun
                )
                for old in older:
                    segments.delete(old)
                return fetched
        except TimeoutError:
            raise TransferTimeout(key, "another process of this host still fetches it") from None
        finally:
            if begun is not None:
                begun.cancel()

    def delete(self, keys: Collection[str], *, timeout: float = 20.0) -> int:
        """Delete states without a version at the owner, and return their number.

        Raises InvalidArgument for a key with a version, which only its publisher frees.
        """
        request = transfer_pb.DeleteStatesRequest(keys=keys)
        deleted: int = self._stub.DeleteStates(request, timeout=timeout).deleted
        return deleted

    def _begin(self, wanted: StateRequest, path: Path) -> LaneRead | None:
        """Begin a read of the whole state for `path` that also asks for its description; None if
        another host may send it, or if it is probably not needed."""
        last = self._last
        if last is None or last.why_not_ucx or not last.message_bytes or wanted.base:
            return None
        if busy(path):
            return None
        request = transfer_pb.ReadStateRequest(
            chunk_bytes=PIECE_BYTES,
            wanted=self._describer.request(wanted.key, wanted.expected),
        )
        left = wanted.deadline - time.monotonic()
        try:
            return LaneRead(last, request, self._lanes, max(left, 0.001))
        except ucx.LaneBroken as error:
            log.info("%s: not at once through UCX: %s", wanted.key, error)
            return None

    def _fetch(
        self,
        manifest: Manifest,
        answer: transfer_pb.DescribeStateResponse,
        segments: SegmentStore,
        counters: TransferCounters,
        deadline: float,
        base: str | None,
        begun: LaneRead | None,
    ) -> FetchedState:
        key = manifest.key
        origin = self._last = self._place(self.address, answer)

        def reroute(failed: Sequence[str]) -> StateSource:
            _, again = self._describer.ask(key, deadline, manifest.checksum, failed)
            return self._source(manifest, again, origin, deadline)

        with partial_state_in(segments, manifest) as part, self._arrivals.coming(part):
            reused = self._take_base(part, segments, base or manifest.base)
            source = self._source(manifest, answer, origin, deadline)
            choice = Fetch(
                part,
                origin,
                source,
                reroute,
                counters=counters,
                deadline=deadline,
                lanes=self._lanes,
                checker=self._checker,
                begun=begun,
            ).run()
            part.commit(self.address)
        if reused:
            log.info("%s: %d of %d bytes were here", key, reused, manifest.num_bytes)
        return FetchedState(part.path, choice)

    def _take_base(self, part: PartialState, segments: SegmentStore, base: str) -> int:
        if not base:
            return 0
        try:
            return part.take_from(*segments.bytes(base))
        except (KeyNotFound, Corrupt, UnknownCodec):
            return 0

    def _source(
        self,
        manifest: Manifest,
        answer: transfer_pb.DescribeStateResponse,
        origin: StateSource,
        deadline: float,
    ) -> StateSource:
        """Return the source that `answer` names, if it answers; else the owner itself."""
        if not answer.source:
            return origin
        stub = self._stub_of(answer.source)
        request = transfer_pb.DescribeStateRequest(key=manifest.key, checksum=manifest.checksum)
        until = min(deadline, time.monotonic() + _ALIVE_SECONDS)
        while True:
            try:
                there = stub.DescribeState(request, timeout=within(until))
            except TroupeError as error:
                # It may have requested the state as recently as this host.
                if isinstance(error, NotFound) and time.monotonic() < until:
                    time.sleep(_NAP_SECONDS)
                    continue
                log.info("%s: not from %s: %s", manifest.key, answer.source, error)
                return origin
            return self._place(answer.source, there)

    def _place(self, address: str, answer: transfer_pb.DescribeStateResponse) -> StateSource:
        why_not = ""
        if not self._use_ucx or ucx.missing():
            why_not = "ucx_not_here"
        elif not answer.ucx:
            why_not = "ucx_not_there"
        near = not why_not and bool(answer.machine) and answer.machine == ucx.machine()
        return StateSource(
            address,
            self._stub_of(address),
            why_not,
            near,
            lanes=max(answer.lanes, 1),
            message_bytes=answer.message_bytes,
        )

    def _stub_of(self, address: str) -> transfer_grpc.TransferOwnerStub:
        with self._lock:
            if address not in self._channels:
                self._channels[address] = connect_sync(address, self._settings, no_threads=True)
            return transfer_grpc.TransferOwnerStub(self._channels[address])

    def _segments(self, roots: tuple[Path, ...]) -> SegmentStore:
        with self._lock:
            if roots not in self._stores:
                self._stores[roots] = SegmentStore(roots)
            return self._stores[roots]
