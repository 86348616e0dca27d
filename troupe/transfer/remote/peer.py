"""`Peer`: fetches states from the `Owner` of another host."""

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
from troupe.transfer.errors import Corrupt, KeyNotFound, TransferTimeout
from troupe.transfer.places import FetchedState, Wanted
from troupe.transfer.remote import lane as ucx
from troupe.transfer.remote.lane import LaneRead, Lanes, StateSource, by_messages
from troupe.transfer.remote.part import Part, part_in
from troupe.transfer.shelf import Shelf, alone, busy, sweep
from troupe.v1 import transfer_pb2 as pb
from troupe.v1 import transfer_pb2_grpc as rpc

log = logging.getLogger(__name__)

# A chunk that arrives damaged so often was not damaged by chance.
_MOST_CORRUPT: Final = 3
# UCX that broke so often without a single chunk between is given up for gRPC.
_MOST_BROKEN_LANES: Final = 2
_BACKOFF_SECONDS: Final = (0.05, 2.0)


# Asks the owner again whom to read from, naming those that failed.
Reroute = Callable[[Sequence[str]], StateSource]


class Fetch:
    """Brings the missing chunks of a part."""

    def __init__(
        self,
        part: Part,
        owner: StateSource,
        source: StateSource,
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
            self._source = StateSource(source.address, source.stub, "ucx_not_there", False)
            return True
        if error.kind == "transfer_lane_unreachable":
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
    """For who reads from the owner at `address`, and hands on what it gets at `serves_at`."""

    def __init__(self, address: str, stub: rpc.TransferOwnerStub, serves_at: str) -> None:
        self._address, self._stub, self._serves_at = address, stub, serves_at

    def request(
        self, key: str, expected: str | None, failed: Sequence[str] = ()
    ) -> pb.DescribeStateRequest:
        """What to ask. `failed`: sources that did not answer."""
        return pb.DescribeStateRequest(
            key=key, checksum=expected or "", reader=self._serves_at, failed=failed
        )

    def ask(
        self,
        key: str,
        deadline: float,
        expected: str | None,
        failed: Sequence[str] = (),
        begun: LaneRead | None = None,
    ) -> tuple[Manifest, pb.DescribeStateResponse]:
        """What is under `key` there (with the checksum `expected`), until `deadline` of
        the monotonic clock. `begun`: a read that asks it itself.

        Raises KeyNotFound, Corrupt, TransferTimeout, Unavailable, and whatever else the owner says.
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
                raise TransferTimeout(key, f"{self._address} did not say what it is") from error
            # Others may have it.
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
            raise Corrupt(key, f"{self._address} describes it wrongly: {error}") from error
        if manifest.key != key:
            raise Corrupt(key, f"{self._address} describes '{manifest.key}' instead")
        if expected and manifest.checksum != expected:
            raise KeyNotFound(key, f"{self._address} holds another content")
        return manifest, answer


def within(deadline: float) -> float:
    """Seconds that a description may take until `deadline`."""
    return min(_DESCRIBE_SECONDS, max(deadline - time.monotonic(), 0.001))


class IncomingParts:
    """Parts by key and checksum. Safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._parts: dict[tuple[str, str], Part] = {}

    @contextlib.contextmanager
    def coming(self, part: Part) -> Iterator[None]:
        """`part` is there for others within the block."""
        name = (part.manifest.key, part.manifest.checksum)
        with self._lock:
            self._parts[name] = part
        try:
            yield
        finally:
            with self._lock:
                del self._parts[name]

    def find(self, key: str, checksum: str) -> Part | None:
        """The part of this content (of any, for an empty checksum)."""
        with self._lock:
            if checksum:
                return self._parts.get((key, checksum))
            return next((part for (k, _), part in self._parts.items() if k == key), None)


# A reader that was named as source has so long to say that it lives.
_ALIVE_SECONDS: Final = 5.0
_NAP_SECONDS: Final = 0.02
# Of an owner there are never so many at once, each with a thread that verifies. Were there fewer
# threads, two hosts could wait for each other's chunks for ever.
_MOST_FETCHES: Final = 64


class Peer:
    """The states of the owner at `address` ("host:port"). Safe to use from several threads."""

    def __init__(
        self,
        address: str,
        settings: ClientSettings | None = None,
        *,
        use_ucx: bool = True,
        deadline_seconds: float = 600.0,
        serves_at: str = "",
        arrivals: IncomingParts | None = None,
        lanes: Lanes | None = None,
    ) -> None:
        """`deadline_seconds` bounds a fetch whose caller names no time.

        `serves_at`: the address of the owner in this process, which hands on what comes: what
        comes is then in `arrivals`. `lanes`: where UCX workers are kept between fetches.
        """
        self.address = address
        self.deadline_seconds = deadline_seconds
        self._settings, self._use_ucx, self._serves_at = settings, use_ucx, serves_at
        self._arrivals = arrivals or IncomingParts()
        self._own_lanes = lanes is None
        self._lanes = lanes or Lanes()
        self._checker = ThreadPoolExecutor(_MOST_FETCHES, thread_name_prefix="transfer-check")
        self._lock = threading.Lock()
        self._shelves: dict[tuple[Path, ...], Shelf] = {}
        self._channels: dict[str, grpc.Channel] = {}
        self._stub = self._stub_of(address)
        self._describer = Describer(address, self._stub, serves_at)
        # How its owner could be read from the last time.
        self._last: StateSource | None = None

    def close(self) -> None:
        """End the connections."""
        with self._lock:
            channels, self._channels = list(self._channels.values()), {}
        for channel in channels:
            channel.close()
        for shelf in self._shelves.values():
            for spares in shelf.spares.values():
                spares.close()
        self._checker.shutdown(wait=False)
        if self._own_lanes:
            self._lanes.close()

    def fetch(
        self, wanted: Wanted, roots: Sequence[Path], counters: TransferCounters
    ) -> FetchedState:
        """See `places.Source.fetch`: goes on after broken connections with the chunks that are
        missing, until its deadline. Nothing is visible before all of it is verified; a host fetches
        a state once, however many of its processes ask.

        Raises KeyNotFound, Corrupt, StorageFull, TransferTimeout; Unavailable when the owner did
        not answer at all; Unauthenticated.
        """
        shelf, key, deadline = self._shelf(tuple(roots)), wanted.key, wanted.deadline
        path = shelf.paths(key)[0]
        begun = self._begin(wanted, path)
        try:
            with contextlib.ExitStack() as here:
                if begun is not None:
                    # While the owner looks it up.
                    here.enter_context(alone(path, deadline))
                older = shelf.older(key)
                for there in shelf.paths(key):
                    sweep(there.parent)
                manifest, answer = self._describer.ask(key, deadline, wanted.expected, begun=begun)
                if begun is None:
                    here.enter_context(alone(path, deadline))
                if shelf.holds(manifest.key, manifest.checksum):
                    path = shelf.path(manifest.key)
                    return FetchedState(path, Choice("get", "shared_memory", "same_host"))
                fetched = self._fetch(
                    manifest, answer, shelf, counters, deadline, wanted.base, begun
                )
                for old in older:
                    shelf.delete(old)
                return fetched
        except TimeoutError:
            raise TransferTimeout(key, "another process of this host still fetches it") from None
        finally:
            if begun is not None:
                begun.cancel()

    def delete(self, keys: Collection[str], *, timeout: float = 20.0) -> int:
        """Forget values without a version there; how many of them there were.

        Raises InvalidArgument for a key with a version: its owner frees those.
        """
        request = pb.DeleteStatesRequest(keys=keys)
        deleted: int = self._stub.DeleteStates(request, timeout=timeout).deleted
        return deleted

    def _begin(self, wanted: Wanted, path: Path) -> LaneRead | None:
        """A read of all of it, to lie at `path`, that also asks what it is; None where it may be
        another host's to send, or is not likely to be needed."""
        last = self._last
        if last is None or last.why_not_ucx or not last.message_bytes or wanted.base:
            return None
        if busy(path):
            return None
        request = pb.ReadStateRequest(
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
        answer: pb.DescribeStateResponse,
        shelf: Shelf,
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

        with part_in(shelf, manifest) as part, self._arrivals.coming(part):
            reused = self._take_base(part, shelf, base or manifest.base)
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

    def _take_base(self, part: Part, shelf: Shelf, base: str) -> int:
        if not base:
            return 0
        try:
            return part.take_from(*shelf.bytes(base))
        except (KeyNotFound, Corrupt):
            return 0

    def _source(
        self,
        manifest: Manifest,
        answer: pb.DescribeStateResponse,
        origin: StateSource,
        deadline: float,
    ) -> StateSource:
        """Whom `answer` says to read from, if it lives; else the owner itself."""
        if not answer.source:
            return origin
        stub = self._stub_of(answer.source)
        request = pb.DescribeStateRequest(key=manifest.key, checksum=manifest.checksum)
        until = min(deadline, time.monotonic() + _ALIVE_SECONDS)
        while True:
            try:
                there = stub.DescribeState(request, timeout=within(until))
            except TroupeError as error:
                # It may have been asked for the state as lately as this host.
                if isinstance(error, NotFound) and time.monotonic() < until:
                    time.sleep(_NAP_SECONDS)
                    continue
                log.info("%s: not from %s: %s", manifest.key, answer.source, error)
                return origin
            return self._place(answer.source, there)

    def _place(self, address: str, answer: pb.DescribeStateResponse) -> StateSource:
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

    def _stub_of(self, address: str) -> rpc.TransferOwnerStub:
        with self._lock:
            if address not in self._channels:
                self._channels[address] = connect_sync(address, self._settings, no_threads=True)
            return rpc.TransferOwnerStub(self._channels[address])

    def _shelf(self, roots: tuple[Path, ...]) -> Shelf:
        with self._lock:
            if roots not in self._shelves:
                self._shelves[roots] = Shelf(roots)
            return self._shelves[roots]
