"""The owner's side of each call: validate, find, send."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from typing import Final

import grpc

from troupe.rpc.errors import (
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    TroupeError,
    Unavailable,
)
from troupe.transfer.cast import check_cast
from troupe.transfer.checksum import PIECE_BYTES
from troupe.transfer.chunks import chunks_of
from troupe.transfer.manifest import Manifest, version_in
from troupe.transfer.mappings import Mappings
from troupe.transfer.remote import lane as ucx
from troupe.transfer.remote.arrivals import Arrivals
from troupe.transfer.remote.callers import abort, from_here
from troupe.transfer.remote.held import Held
from troupe.transfer.remote.lanes import Lanes
from troupe.transfer.remote.sending import (
    UCX_MESSAGE_BYTES,
    Arriving,
    Source,
    Stored,
    messages,
    send,
)
from troupe.transfer.store import Transfer
from troupe.v1 import transfer_pb2 as pb
from troupe.v1 import transfer_pb2_grpc as rpc

log = logging.getLogger(__name__)

# Of one reader: two of its cores copy and verify, and none is left of the smallest hosts.
MOST_LANES: Final = 2
# Smaller messages of a chunk would cost more than they gain.
_LEAST_BYTES: Final = 512 << 10
# Brings a state of another host here; the key that it is under then, and how it came.
FetchHere = Callable[[pb.FetchStateRequest, float], pb.FetchStateResponse]


class Servicer(rpc.TransferOwnerServicer):
    """Answers for one `Transfer` and for what is on its way to it."""

    def __init__(
        self,
        transfer: Transfer,
        *,
        use_ucx: bool,
        arrivals: Arrivals,
        held: Held,
        lanes: Lanes,
        mappings: Mappings,
        fetch: FetchHere,
    ) -> None:
        self._transfer, self._arrivals, self._held = transfer, arrivals, held
        self._lanes, self._mappings, self._fetch = lanes, mappings, fetch
        self._why_not = ucx.missing() if use_ucx else "switched off"
        if self._why_not:
            log.warning("other hosts read from here through gRPC: %s", self._why_not)

    def DescribeState(  # noqa: N802
        self, request: pb.DescribeStateRequest, context: grpc.ServicerContext
    ) -> pb.DescribeStateResponse:
        try:
            return self._description(request, context)[1]
        except TroupeError as error:
            abort(context, error)

    def ReadState(  # noqa: N802
        self, request: pb.ReadStateRequest, context: grpc.ServicerContext
    ) -> Iterator[pb.StateChunk]:
        try:
            if request.HasField("wanted"):
                manifest, description = self._description(request.wanted, context)
                yield pb.StateChunk(description=description)
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
        self, request: pb.FetchStateRequest, context: grpc.ServicerContext
    ) -> pb.FetchStateResponse:
        try:
            if not from_here(context.peer()):
                raise FailedPrecondition(
                    "only processes of its own host have an owner fetch",
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

    def ListStates(  # noqa: N802
        self, request: pb.ListStatesRequest, context: grpc.ServicerContext
    ) -> pb.ListStatesResponse:
        found = []
        for key in self._transfer.keys(request.prefix):
            try:
                found.append(_stored(self._transfer.manifest(key)))
            except TroupeError as error:
                log.info("%s is not listed: %s", key, error)
        return pb.ListStatesResponse(states=found)

    def WatchStates(  # noqa: N802
        self, request: pb.WatchStatesRequest, context: grpc.ServicerContext
    ) -> Iterator[pb.StoredState]:
        seen = set(request.known)
        while context.is_active():
            # In short turns: a caller that left is noticed.
            for manifest in self._transfer.watch(request.prefix, timeout=0.5, known=seen):
                seen.add(manifest.key)
                yield _stored(manifest)

    def DeleteStates(  # noqa: N802
        self, request: pb.DeleteStatesRequest, context: grpc.ServicerContext
    ) -> pb.DeleteStatesResponse:
        try:
            for key in request.keys:
                if version_in(key) >= 0:
                    raise InvalidArgument(
                        f"'{key}' has a version: who published it frees it",
                        kind="transfer_versioned_key",
                        field="keys",
                        value=key,
                        remedy="Name values without '@'.",
                    )
            deleted = sum(self._transfer.delete(key) for key in request.keys)
        except TroupeError as error:
            abort(context, error)
        return pb.DeleteStatesResponse(deleted=deleted)

    def _description(
        self, request: pb.DescribeStateRequest, context: grpc.ServicerContext
    ) -> tuple[Manifest, pb.DescribeStateResponse]:
        left = context.time_remaining()
        until = None if left is None else time.monotonic() + left
        manifest = self._described(request, until)
        source = ""
        if request.reader:
            count, failed = len(chunks_of(manifest)), list(request.failed)
            source = self._held.source_for(manifest, count, request.reader, failed)
        has_ucx = not self._why_not
        return manifest, pb.DescribeStateResponse(
            manifest=manifest.to_json(),
            ucx=has_ucx,
            source=source,
            machine=ucx.machine() if has_ucx else "",
            lanes=MOST_LANES if has_ucx else 0,
            message_bytes=UCX_MESSAGE_BYTES if has_ucx else 0,
        )

    def _described(self, request: pb.DescribeStateRequest, deadline: float | None) -> Manifest:
        part = None if request.cast else self._arrivals.find(request.key, request.checksum)
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
        if request.cast:
            opened[2].close()
            dtype = check_cast(request.cast)
            key = self._transfer.cast(request.key, dtype, deadline=deadline).key
            opened = self._transfer.opened(key)
        manifest, lease = self._mappings.lease(opened)
        self._held.told(manifest, lease)
        return manifest

    def _source(self, request: pb.ReadStateRequest) -> Source:
        """Raises FailedPrecondition of kind "transfer_replaced", NotFound."""
        part = self._arrivals.find(request.key, request.checksum)
        if part is not None:
            return Arriving(part, self._transfer, self._mappings)
        try:
            return Stored(*self._held.find(request.key, request.checksum))
        except NotFound:
            manifest, lease = self._mappings.lease(self._transfer.opened(request.key))
        if manifest.checksum != request.checksum:
            raise FailedPrecondition(
                f"holds {manifest.checksum} by now",
                kind="transfer_replaced",
                field="checksum",
                value=request.checksum,
                remedy="Ask for its description again.",
            )
        return Stored(manifest, lease)

    def _by_lane(
        self, request: pb.ReadStateRequest, source: Source, alive: Callable[[], bool]
    ) -> None:
        if self._why_not:
            raise FailedPrecondition(
                f"no UCX here: {self._why_not}", kind="transfer_no_ucx", field="lanes"
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

    def _lane_to(self, asked: pb.UcxLane) -> ucx.Lane:
        """Raises LaneBroken; FailedPrecondition for a near one that cannot be reached."""
        try:
            return self._lanes.take(near=asked.near, address=asked.address)
        except ucx.LaneBroken as error:
            if not asked.near:
                raise
            raise FailedPrecondition(
                str(error), kind="transfer_lane_unreachable", field="lanes"
            ) from error


def _check(request: pb.ReadStateRequest, num_chunks: int) -> None:
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
            remedy="Ask for no more than the state's description says.",
        )
    for asked in request.lanes:
        size = asked.message_bytes
        if size != request.lanes[0].message_bytes or (size and not _cuts(size)):
            raise InvalidArgument(
                f"a chunk comes in messages of at least {_LEAST_BYTES} bytes that make it up",
                field="message_bytes",
                value=size,
                remedy="Ask for what the state's description says, in all lanes, or for none.",
            )
    if beyond := [chunk for chunk in request.chunks if chunk >= num_chunks]:
        raise InvalidArgument(f"the state has {num_chunks} chunks", field="chunks", value=beyond[0])


def _cuts(message_bytes: int) -> bool:
    return message_bytes >= _LEAST_BYTES and PIECE_BYTES % message_bytes == 0


def _stored(manifest: Manifest) -> pb.StoredState:
    return pb.StoredState(
        key=manifest.key,
        version=manifest.version,
        checksum=manifest.checksum,
        num_bytes=manifest.num_bytes,
    )
