"""`Peer`: fetches states from the `Owner` of another host."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import grpc

from troupe.rpc.channel import connect_sync
from troupe.rpc.errors import DeadlineExceeded, NotFound, TroupeError
from troupe.rpc.settings import ClientSettings
from troupe.transfer import room, sidecar
from troupe.transfer.arguments import known_in
from troupe.transfer.cast import cast_key
from troupe.transfer.checksum import PIECE_BYTES
from troupe.transfer.counters import Choice, TransferCounters
from troupe.transfer.errors import Corrupt, KeyNotFound, TransferTimeout, VersionWentBackwards
from troupe.transfer.manifest import Manifest
from troupe.transfer.places import Wanted
from troupe.transfer.remote import lane as ucx
from troupe.transfer.remote.arrivals import Arrivals
from troupe.transfer.remote.describer import Describer, within
from troupe.transfer.remote.fetch import Fetch
from troupe.transfer.remote.lanes import Lanes
from troupe.transfer.remote.part import Part, part_in
from troupe.transfer.remote.reading import LaneRead, Place
from troupe.transfer.shelf import Shelf
from troupe.v1 import transfer_pb2 as pb
from troupe.v1 import transfer_pb2_grpc as rpc

log = logging.getLogger(__name__)

# A reader that was named as source has so long to say that it lives.
_ALIVE_SECONDS: Final = 5.0
_NAP_SECONDS: Final = 0.02
# Of an owner there are never so many at once, each with a thread that verifies. Were there fewer
# threads, two hosts could wait for each other's chunks for ever.
_MOST_FETCHES: Final = 64


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
        serves_at: str = "",
        arrivals: Arrivals | None = None,
        lanes: Lanes | None = None,
    ) -> None:
        """`deadline_seconds` bounds a fetch whose caller names no time.

        `serves_at`: the address of the owner in this process, which hands on what comes: what
        comes is then in `arrivals`. `lanes`: where UCX workers are kept between fetches.
        """
        self.address = address
        self.deadline_seconds = deadline_seconds
        self._settings, self._use_ucx, self._serves_at = settings, use_ucx, serves_at
        self._arrivals = arrivals or Arrivals()
        self._own_lanes = lanes is None
        self._lanes = lanes or Lanes()
        self._checker = ThreadPoolExecutor(_MOST_FETCHES, thread_name_prefix="transfer-check")
        self._lock = threading.Lock()
        self._shelves: dict[tuple[Path, ...], Shelf] = {}
        self._channels: dict[str, grpc.Channel] = {}
        self._stub = self._stub_of(address)
        self._describer = Describer(address, self._stub, serves_at)
        # How its owner could be read from the last time.
        self._last: Place | None = None

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

    def fetch(self, wanted: Wanted, roots: Sequence[Path], counters: TransferCounters) -> Fetched:
        """See `places.Source.fetch`: goes on after broken connections with the chunks that are
        missing, until its deadline. Nothing is visible before all of it is verified; a host fetches
        a state once, however many of its processes ask.

        Raises KeyNotFound, Corrupt, StorageFull, TransferTimeout; Unavailable when the owner did
        not answer at all; Unauthenticated.
        """
        shelf, key, deadline = self._shelf(tuple(roots)), wanted.key, wanted.deadline
        path = shelf.paths(wanted.stored)[0]
        begun = self._begin(wanted, path)
        try:
            with contextlib.ExitStack() as here:
                if begun is not None:
                    # While the owner looks it up.
                    here.enter_context(sidecar.alone(path, deadline))
                older = shelf.older(wanted.stored)
                for there in shelf.paths(wanted.stored):
                    room.sweep(there.parent)
                manifest, answer = self._describer.ask(
                    key, deadline, wanted.expected, wanted.cast, begun=begun
                )
                if begun is None:
                    here.enter_context(sidecar.alone(path, deadline))
                if shelf.holds(manifest.key, manifest.checksum):
                    path = shelf.path(manifest.key)
                    return Fetched(path, manifest, Choice("get", "shared_memory", "same_host"))
                # Of it this host has what was cast.
                base = wanted.base and cast_key(wanted.base, wanted.cast)
                fetched = self._fetch(manifest, answer, shelf, counters, deadline, base, begun)
                for old in older:
                    shelf.delete(old)
                return fetched
        except TimeoutError:
            raise TransferTimeout(key, "another process of this host still fetches it") from None
        finally:
            if begun is not None:
                begun.cancel()

    def keys(self, prefix: str = "", *, timeout: float = 20.0) -> list[str]:
        """Keys that are stored there, sorted."""
        return [state.key for state in self._list(prefix, timeout)]

    def newest(self, stem: str, *, at_least: int = 0, timeout: float = 20.0) -> Manifest:
        """The highest version there under `stem`; see `Transfer.newest`."""
        found = [s for s in self._list(f"{stem}@", timeout) if s.version >= 0]
        if not found:
            raise KeyNotFound(stem, f"no version of it is stored at {self.address}")
        last = max(found, key=lambda state: state.version)
        if last.version < at_least:
            raise VersionWentBackwards(
                last.key, f"is the newest version, but {at_least} was there before"
            )
        return self._describer.ask(last.key, time.monotonic() + timeout, last.checksum, None)[0]

    def watch(
        self, prefix: str, *, timeout: float, known: Collection[str] = ()
    ) -> Iterator[pb.StoredState]:
        """What is stored there under `prefix`, each key once, as it appears; ends after `timeout`
        seconds. Raises TroupeError, of which InvalidArgument for `known` that are no keys."""
        request = pb.WatchStatesRequest(prefix=prefix, known=known_in(known))
        stream: Any = self._stub.WatchStates(request, timeout=timeout)
        try:
            yield from stream
        except DeadlineExceeded:
            return
        finally:
            stream.cancel()

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
        if sidecar.busy(path):
            return None
        request = pb.ReadStateRequest(
            chunk_bytes=PIECE_BYTES,
            wanted=self._describer.request(wanted.key, wanted.expected, wanted.cast),
        )
        left = wanted.deadline - time.monotonic()
        try:
            return LaneRead(last, request, self._lanes, max(left, 0.001))
        except ucx.LaneBroken as error:
            log.info("%s: not at once through UCX: %s", wanted.stored, error)
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
    ) -> Fetched:
        key = manifest.key
        origin = self._last = self._place(self.address, answer)

        def reroute(failed: Sequence[str]) -> Place:
            _, again = self._describer.ask(key, deadline, manifest.checksum, None, failed)
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
        return Fetched(part.path, manifest, choice)

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
        origin: Place,
        deadline: float,
    ) -> Place:
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

    def _place(self, address: str, answer: pb.DescribeStateResponse) -> Place:
        why_not = ""
        if not self._use_ucx or ucx.missing():
            why_not = "ucx_not_here"
        elif not answer.ucx:
            why_not = "ucx_not_there"
        near = not why_not and bool(answer.machine) and answer.machine == ucx.machine()
        return Place(
            address,
            self._stub_of(address),
            why_not,
            near,
            lanes=max(answer.lanes, 1),
            message_bytes=answer.message_bytes,
        )

    def _list(self, prefix: str, timeout: float) -> Sequence[pb.StoredState]:
        request = pb.ListStatesRequest(prefix=prefix)
        states: Sequence[pb.StoredState] = self._stub.ListStates(request, timeout=timeout).states
        return states

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
