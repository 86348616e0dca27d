"""The gRPC service of an owner: describes states, sends their chunks, and fetches for its host."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, NoReturn
from urllib.parse import unquote

import grpc

from troupe.contracts import kinds
from troupe.rpc.addresses import is_loopback_host, split_address
from troupe.rpc.authentication import HEADER, Authentication, require
from troupe.rpc.errors import (
    DETAILS_KEY,
    FailedPrecondition,
    Internal,
    InvalidArgument,
    NotFound,
    TroupeError,
    Unauthenticated,
    Unavailable,
    to_status,
    undecodable,
)
from troupe.transfer.blob import Chunk, Manifest, chunks_of, messages_of, version_in
from troupe.transfer.checksum import PIECE_BYTES
from troupe.transfer.remote import lane as ucx
from troupe.transfer.remote.lane import LanePool
from troupe.transfer.remote.partial_state import PartialState
from troupe.transfer.remote.peer import IncomingStates
from troupe.transfer.segments import Lease, Mappings
from troupe.transfer.store import Transfer
from troupe.v1 import transfer_pb2 as transfer_pb
from troupe.v1 import transfer_pb2_grpc as transfer_grpc

# Messages in flight through one lane.
_WINDOW: Final = 16
# Bytes of one gRPC message, which is small because gRPC copies it several times.
MESSAGE_BYTES: Final = 2 << 20
# Bytes of a UCX message, for readers that verify each message as it arrives: half of a core's own
# cache. (Each message costs some 20 us on either side.)
UCX_MESSAGE_BYTES: Final = 1 << 20
# A reader that takes nothing for this time is abandoned; if it is alive, it asks again.
_IDLE_SECONDS: Final = 30.0


class StoredState:
    """A complete state of this host, as a source of chunks."""

    def __init__(self, manifest: Manifest, lease: Lease) -> None:
        self.chunks = chunks_of(manifest)
        self._lease = lease

    def wait(self, index: int, alive: Callable[[], bool]) -> memoryview:
        """Return the bytes of a chunk."""
        return self.chunks[index].of(self._lease.data)


class ArrivingState:
    """A state that this host is still fetching, as a source of the chunks that have arrived."""

    def __init__(self, part: PartialState, transfer: Transfer, mappings: Mappings) -> None:
        self.chunks: tuple[Chunk, ...] = part.chunks
        self._part, self._transfer, self._mappings = part, transfer, mappings
        self._stored: StoredState | None = None

    def wait(self, index: int, alive: Callable[[], bool]) -> memoryview:
        """Wait for a chunk to arrive, and return its bytes. Raises Unavailable if it does not
        arrive."""
        if self._stored is None and self._part.published:
            # From now on the file may be deleted and refilled, so keep a lease on it.
            key = self._part.manifest.key
            manifest, lease = self._mappings.lease(self._transfer.opened(key))
            if manifest.checksum != self._part.manifest.checksum:
                raise Unavailable("was replaced meanwhile", kind="transfer_source_failed")
            self._stored = StoredState(manifest, lease)
        if self._stored is not None:
            return self._stored.wait(index, alive)
        deadline = time.monotonic() + _IDLE_SECONDS
        while (arrived := self._part.wait(index, _IDLE_SECONDS)) is None:
            if not alive():
                raise ucx.LaneBroken("the reader went away")
            if time.monotonic() > deadline:
                raise Unavailable(
                    f"chunk {index} did not arrive here within {_IDLE_SECONDS:g} s",
                    kind="transfer_source_failed",
                )
        return arrived


ServedState = StoredState | ArrivingState


def send(
    lanes: Sequence[ucx.Lane],
    request: transfer_pb.ReadStateRequest,
    source: ServedState,
    alive: Callable[[], bool],
) -> None:
    """Send the chunks alternately through `lanes`, from this thread; through shared memory the
    receiver copies."""
    size = request.lanes[0].message_bytes
    tags = PIECE_BYTES // size if size else 1
    flying: deque[tuple[ucx.Lane, Any]] = deque()

    def done() -> bool:
        return bool(flying[0][1].completed)

    def lives() -> None:
        if not alive():
            raise ucx.LaneBroken("the reader went away")

    def until(most: int) -> None:
        while len(flying) > most:
            flying[0][0].wait(done, idle=_IDLE_SECONDS, meanwhile=lives)
            while flying and flying[0][1].completed:
                flying.popleft()

    for place, index in enumerate(request.chunks):
        data = source.wait(index, alive)
        lane, asked = lanes[place % len(lanes)], request.lanes[place % len(lanes)]
        for number, (at, stop) in enumerate(messages_of(len(data), size)):
            tag = asked.first_tag + place * tags + number
            flying.append((lane, lane.send(data[at:stop], tag)))
            until(len(lanes) * _WINDOW - 1)
    until(0)


def messages(index: int, data: memoryview) -> Iterator[transfer_pb.StateChunk]:
    for at in range(0, len(data), MESSAGE_BYTES):
        yield _message(index, at, data[at : at + MESSAGE_BYTES])


def _message(index: int, offset: int, data: memoryview) -> transfer_pb.StateChunk:
    return transfer_pb.StateChunk(chunk=index, offset=offset, data=bytes(data))


# How much longer the last reader of a chain may take than the first. For more readers the owner
# begins another chain, so that a slow reader delays only a few others.
_LATE: Final = 0.25
_LONGEST: Final = 16


class ReaderTree:
    """The sources of a state's readers, which form chains that begin at the owner."""

    def __init__(self, num_chunks: int) -> None:
        self._longest = min(max(int(_LATE * num_chunks), 1), _LONGEST)
        # Reader -> its source (None: the owner), in order of arrival.
        self._source: dict[str, str | None] = {}

    def join(self, reader: str, failed: Iterable[str] = ()) -> str | None:
        """Return the source of `reader`; None: the owner itself. `failed`: sources that did not
        answer it.

        A reader that joins again gets a source that neither failed nor reads from it. Readers of a
        failed source also join again.
        """
        below = self._below(reader)
        for address in failed:
            self._source.pop(address, None)
        self._source.pop(reader, None)
        busy = set(self._source.values())
        free = [
            one
            for one in self._source
            if one not in busy and one not in below and 0 < self._depth(one) < self._longest
        ]
        # The longest chain that is not too long; of equal chains the oldest.
        source = max(free, key=self._depth, default=None)
        self._source[reader] = source
        return source

    def leave(self, reader: str) -> None:
        """Remove a reader, which is then no longer a source."""
        self._source.pop(reader, None)

    def _depth(self, reader: str) -> int:
        """Return the number of readers from the owner to this one; 0 if one between them has
        left."""
        depth, at = 1, self._source[reader]
        while at is not None:
            if at not in self._source:
                return 0
            depth, at = depth + 1, self._source[at]
        return depth

    def _below(self, reader: str) -> set[str]:
        """Return `reader`, and all that read from it directly or indirectly."""
        found = {reader}
        while True:
            more = {one for one, source in self._source.items() if source in found} - found
            if not more:
                return found
            found |= more


# A reader that got a description must begin or resume reading within this time.
_PIN_SECONDS: Final = 30.0
# A reader tree without requests for this time is forgotten.
_TREE_SECONDS: Final = 300.0


@dataclass
class _Pin:
    manifest: Manifest
    lease: Lease
    until: float
    # Number of readers that got its description and have not read all of it.
    readers: int = 0


class PinnedStates:
    """States that stay mapped for readers that got their description, even after deletion; and
    their reader trees. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pins: dict[tuple[str, str], _Pin] = {}
        self._trees: dict[tuple[str, str], tuple[ReaderTree, float]] = {}

    def pin(self, manifest: Manifest, lease: Lease) -> None:
        """Keep a state for a reader that got its description."""
        name = (manifest.key, manifest.checksum)
        with self._lock:
            hold = self._pins.setdefault(name, _Pin(manifest, lease, 0.0))
            hold.readers += 1
            hold.until = time.monotonic() + _PIN_SECONDS

    def find(self, key: str, checksum: str) -> tuple[Manifest, Lease]:
        """Return the pinned state of this content. Raises NotFound."""
        with self._lock:
            hold = self._pins.get((key, checksum))
            if hold is None:
                raise NotFound(f"no state with this content is kept for '{key}'")
            hold.until = time.monotonic() + _PIN_SECONDS
            return hold.manifest, hold.lease

    def read(self, key: str, checksum: str) -> None:
        """Record that a reader has read all of it."""
        with self._lock:
            if (hold := self._pins.get((key, checksum))) is not None:
                hold.readers -= 1
                if hold.readers <= 0:
                    del self._pins[(key, checksum)]

    def source_for(
        self, manifest: Manifest, num_chunks: int, reader: str, failed: list[str]
    ) -> str:
        """Return the address of the source of `reader`; "": this owner."""
        name = (manifest.key, manifest.checksum)
        with self._lock:
            tree = self._trees.get(name, (ReaderTree(num_chunks), 0.0))[0]
            self._trees[name] = (tree, time.monotonic() + _TREE_SECONDS)
            return tree.join(reader, failed) or ""

    def sweep(self) -> None:
        """Unpin states and forget trees that were not requested in time."""
        now = time.monotonic()
        with self._lock:
            self._pins = {n: hold for n, hold in self._pins.items() if hold.until > now}
            self._trees = {n: (t, until) for n, (t, until) in self._trees.items() if until > now}


log = logging.getLogger(__name__)


def from_here(peer: str) -> bool:
    """Return whether a caller, by gRPC's name `peer`, is a process of this host."""
    kind, _, place = peer.partition(":")
    if kind == "unix":
        return True
    host, _ = split_address(unquote(place))
    return is_loopback_host(host)


def abort(context: Any, error: TroupeError) -> NoReturn:
    """End a call with a typed error."""
    status = to_status(error)
    context.set_trailing_metadata(((DETAILS_KEY, status.SerializeToString()),))
    context.abort(error.code, status.message)
    raise AssertionError("abort raises")


class TypedErrors(grpc.ServerInterceptor):  # type: ignore[type-arg]
    """An interceptor that turns exceptions of handlers, and requests that cannot be parsed, into
    typed errors; gRPC itself would return UNKNOWN."""

    def intercept_service(self, continuation: Callable[[Any], Any], details: Any) -> Any:
        handler = continuation(details)
        if handler is None:
            return None
        decode = handler.request_deserializer or bytes

        def unary(raw: bytes, context: Any) -> Any:
            with _typed(context):
                return handler.unary_unary(_decoded(decode, raw), context)

        def stream(raw: bytes, context: Any) -> Iterator[Any]:
            with _typed(context):
                yield from handler.unary_stream(_decoded(decode, raw), context)

        codec = (None, handler.response_serializer)
        if handler.response_streaming:
            return grpc.unary_stream_rpc_method_handler(stream, *codec)
        return grpc.unary_unary_rpc_method_handler(unary, *codec)


def _decoded(decode: Callable[[bytes], Any], raw: bytes) -> Any:
    try:
        return decode(raw)
    except Exception as error:
        raise undecodable(raw, error) from None


@contextmanager
def _typed(context: Any) -> Iterator[None]:
    try:
        yield
    except TroupeError as error:
        abort(context, error)
    except Exception as error:
        if type(error) is Exception and not error.args:  # how gRPC's `abort` leaves a handler
            raise
        log.exception("a call failed")
        abort(context, Internal(f"{type(error).__name__}: {error}"))


class Admission(grpc.ServerInterceptor):  # type: ignore[type-arg]
    """An interceptor that refuses callers whom `authentication` does not admit."""

    def __init__(self, authentication: Authentication) -> None:
        self._authentication = authentication

    def intercept_service(self, continuation: Callable[[Any], Any], details: Any) -> Any:
        sent = dict(details.invocation_metadata or ()).get(HEADER, "")
        try:
            require(self._authentication, str(sent))
        except Unauthenticated as error:
            refusal = error
        else:
            return continuation(details)

        def refuse(request: Any, context: Any) -> Any:
            abort(context, refusal)

        handler = continuation(details)
        if handler is not None and handler.response_streaming:
            return grpc.unary_stream_rpc_method_handler(refuse)
        return grpc.unary_unary_rpc_method_handler(refuse)


# Maximum lanes of one reader: two of its cores copy and verify, which are all cores of the smallest
# hosts.
MOST_LANES: Final = 2
# Minimum bytes of a message: smaller ones would cost more than they gain.
_LEAST_BYTES: Final = 512 << 10
# Fetches a state from another host, until a deadline (monotonic clock).
FetchHere = Callable[[transfer_pb.FetchStateRequest, float], transfer_pb.FetchStateResponse]


class Servicer(transfer_grpc.TransferOwnerServicer):
    """The servicer of the states of one `Transfer`, including states that it is fetching."""

    def __init__(
        self,
        transfer: Transfer,
        *,
        use_ucx: bool,
        arrivals: IncomingStates,
        held: PinnedStates,
        lanes: LanePool,
        mappings: Mappings,
        fetch: FetchHere,
    ) -> None:
        self._transfer, self._arrivals, self._held = transfer, arrivals, held
        self._lanes, self._mappings, self._fetch = lanes, mappings, fetch
        self._why_not = ucx.missing() if use_ucx else "switched off"
        if self._why_not:
            log.warning("other hosts read from this host through gRPC: %s", self._why_not)

    def DescribeState(  # noqa: N802
        self, request: transfer_pb.DescribeStateRequest, context: grpc.ServicerContext
    ) -> transfer_pb.DescribeStateResponse:
        try:
            return self._description(request)[1]
        except TroupeError as error:
            abort(context, error)

    def ReadState(  # noqa: N802
        self, request: transfer_pb.ReadStateRequest, context: grpc.ServicerContext
    ) -> Iterator[transfer_pb.StateChunk]:
        try:
            if request.HasField("wanted"):
                manifest, description = self._description(request.wanted)
                yield transfer_pb.StateChunk(description=description)
                if description.source:
                    return
                request.key, request.checksum = manifest.key, manifest.checksum
                request.chunks[:] = range(len(chunks_of(manifest)))
            source = self._source(request)
            _check(request, len(source.chunks))
            if request.lanes:
                self._by_lane(request, source, context.is_active)
            else:
                for index in request.chunks:
                    yield from messages(index, source.wait(index, context.is_active))
            self._held.read(request.key, request.checksum)
        except TroupeError as error:
            abort(context, error)
        except ucx.LaneBroken as error:
            if not context.is_active():
                log.info("%s: its reader went away", request.key)
            abort(context, Unavailable(str(error), kind="transfer_lane_broken"))

    def FetchState(  # noqa: N802
        self, request: transfer_pb.FetchStateRequest, context: grpc.ServicerContext
    ) -> transfer_pb.FetchStateResponse:
        try:
            if not from_here(context.peer()):
                raise FailedPrecondition(
                    "an owner fetches only for processes of its own host",
                    kind="transfer_not_from_here",
                    field="peer",
                    value=context.peer(),
                    remedy="Ask the owner of your host: at its loopback address, or at the "
                    "socket in its transfer_dir.",
                )
            left = context.time_remaining()
            return self._fetch(request, time.monotonic() + (600.0 if left is None else left))
        except TroupeError as error:
            abort(context, error)

    def DeleteStates(  # noqa: N802
        self, request: transfer_pb.DeleteStatesRequest, context: grpc.ServicerContext
    ) -> transfer_pb.DeleteStatesResponse:
        try:
            for key in request.keys:
                if version_in(key) >= 0:
                    raise InvalidArgument(
                        f"'{key}' has a version, so only its publisher frees it",
                        kind="transfer_versioned_key",
                        field="keys",
                        value=key,
                        remedy="Name values without '@'.",
                    )
            deleted = sum(self._transfer.delete(key) for key in request.keys)
        except TroupeError as error:
            abort(context, error)
        return transfer_pb.DeleteStatesResponse(deleted=deleted)

    def _description(
        self, request: transfer_pb.DescribeStateRequest
    ) -> tuple[Manifest, transfer_pb.DescribeStateResponse]:
        manifest = self._described(request)
        source = ""
        if request.reader:
            count, failed = len(chunks_of(manifest)), list(request.failed)
            source = self._held.source_for(manifest, count, request.reader, failed)
        has_ucx = not self._why_not
        return manifest, transfer_pb.DescribeStateResponse(
            manifest=manifest.to_json(),
            ucx=has_ucx,
            source=source,
            machine=ucx.machine() if has_ucx else "",
            lanes=MOST_LANES if has_ucx else 0,
            message_bytes=UCX_MESSAGE_BYTES if has_ucx else 0,
        )

    def _described(self, request: transfer_pb.DescribeStateRequest) -> Manifest:
        part = self._arrivals.find(request.key, request.checksum)
        if part is not None:
            return part.manifest
        opened = self._transfer.opened(request.key)
        if request.checksum and opened[0].checksum != request.checksum:
            opened[2].close()
            raise NotFound(
                f"holds {opened[0].checksum}",
                kind="transfer_other_content",
                field="checksum",
                value=request.checksum,
            )
        manifest, lease = self._mappings.lease(opened)
        self._held.pin(manifest, lease)
        return manifest

    def _source(self, request: transfer_pb.ReadStateRequest) -> ServedState:
        """Return the source of the chunks that a request reads.

        Raises NotFound; FailedPrecondition of kind "transfer_replaced" for another content.
        """
        part = self._arrivals.find(request.key, request.checksum)
        if part is not None:
            return ArrivingState(part, self._transfer, self._mappings)
        try:
            return StoredState(*self._held.find(request.key, request.checksum))
        except NotFound:
            manifest, lease = self._mappings.lease(self._transfer.opened(request.key))
        if manifest.checksum != request.checksum:
            raise FailedPrecondition(
                f"has the content {manifest.checksum} now",
                kind=kinds.TRANSFER_REPLACED,
                field="checksum",
                value=request.checksum,
                remedy="Ask for its description again.",
            )
        return StoredState(manifest, lease)

    def _by_lane(
        self, request: transfer_pb.ReadStateRequest, source: ServedState, alive: Callable[[], bool]
    ) -> None:
        if self._why_not:
            raise FailedPrecondition(
                f"no UCX here: {self._why_not}", kind=kinds.TRANSFER_NO_UCX, field="lanes"
            )
        taken: list[ucx.Lane] = []
        try:
            taken.extend(self._lane_to(asked) for asked in request.lanes)
            send(taken, request, source, alive)
        except BaseException:
            for lane in taken:
                lane.close()
            raise
        for lane, asked in zip(taken, request.lanes, strict=True):
            self._lanes.give(lane, address=asked.address)

    def _lane_to(self, asked: transfer_pb.UcxLane) -> ucx.Lane:
        """Return a lane to a reader. Raises LaneBroken, and FailedPrecondition if a near reader
        cannot be reached."""
        try:
            return self._lanes.take(near=asked.near, address=asked.address)
        except ucx.LaneBroken as error:
            if not asked.near:
                raise
            raise FailedPrecondition(
                str(error), kind=kinds.TRANSFER_LANE_UNREACHABLE, field="lanes"
            ) from error


def _check(request: transfer_pb.ReadStateRequest, num_chunks: int) -> None:
    if request.chunk_bytes != PIECE_BYTES:
        raise InvalidArgument(
            f"states are cut at {PIECE_BYTES} bytes here",
            field="chunk_bytes",
            value=request.chunk_bytes,
            remedy="Run the same version of Troupe on all hosts.",
        )
    if len(request.lanes) > MOST_LANES:
        raise InvalidArgument(
            f"one reader has at most {MOST_LANES} lanes here",
            field="lanes",
            value=len(request.lanes),
            remedy="Request at most the number in the state's description.",
        )
    for asked in request.lanes:
        size = asked.message_bytes
        cuts = not size or (size >= _LEAST_BYTES and PIECE_BYTES % size == 0)
        if size != request.lanes[0].message_bytes or not cuts:
            raise InvalidArgument(
                f"a chunk must be divided into messages of at least {_LEAST_BYTES} bytes",
                field="message_bytes",
                value=size,
                remedy="Request the number in the state's description in all lanes, or none.",
            )
    if beyond := [chunk for chunk in request.chunks if chunk >= num_chunks]:
        raise InvalidArgument(f"the state has {num_chunks} chunks", field="chunks", value=beyond[0])
