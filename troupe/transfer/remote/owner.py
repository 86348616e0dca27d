"""`Owner`: lets other hosts read what is stored on this one."""

from __future__ import annotations

import hmac
import ipaddress
import logging
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, NoReturn

import grpc
from pydantic import SecretStr

from troupe.rpc.channel import channel_options
from troupe.rpc.errors import (
    DETAILS_KEY,
    FailedPrecondition,
    InvalidArgument,
    TroupeError,
    Unauthenticated,
    Unavailable,
    to_status,
)
from troupe.transfer.checksum import bytes_checksum
from troupe.transfer.manifest import Manifest
from troupe.transfer.remote import lane as ucx
from troupe.transfer.remote.layout import MAX_CHUNK_BYTES, MAX_MESSAGE_CHUNK_BYTES, num_chunks
from troupe.transfer.store import Transfer
from troupe.v1 import transfer_pb2 as pb
from troupe.v1 import transfer_pb2_grpc as rpc

log = logging.getLogger(__name__)

# Chunks on their way at once: enough that hashing the next hides behind sending the last.
WINDOW: Final = 4
_MAX_MESSAGE_MIB: Final = 64
# A reader that takes nothing for so long is given up; it asks again if it lives.
_IDLE_SECONDS: Final = 30.0


class Owner:
    """A gRPC server over one `Transfer`, and UCX where it is installed. Serves until `stop`."""

    def __init__(
        self,
        transfer: Transfer,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        token: SecretStr | None = None,
        credentials: grpc.ServerCredentials | None = None,
        use_ucx: bool = True,
        max_readers: int = 8,
    ) -> None:
        """Serve at `host:port` (0: any free port), to who sends `token`.

        `credentials` turns TLS on for requests and checksums; bytes in UCX are in the clear and
        verified against those. Raises Unavailable when the port is taken.
        """
        # Two threads more than readers: descriptions do not wait for a long read.
        self._server = grpc.server(
            ThreadPoolExecutor(max_readers + 2, thread_name_prefix="transfer-owner"),
            interceptors=[] if token is None else [_Bearer(token)],
            options=[*channel_options(_MAX_MESSAGE_MIB), ("grpc.so_reuseport", 0)],
            maximum_concurrent_rpcs=max_readers + 2,
        )
        if token is None and not _is_loopback(host):
            log.warning("anyone who reaches %s can read all weights; set TROUPE_TOKEN", host)
        rpc.add_TransferOwnerServicer_to_server(_Servicer(transfer, use_ucx), self._server)
        place = f"{host}:{port}"
        try:
            if credentials is None:
                bound = self._server.add_insecure_port(place)
            else:
                bound = self._server.add_secure_port(place, credentials)
        except RuntimeError as error:
            raise Unavailable(
                str(error), kind="port_taken", field="port", value=port, remedy="Choose another."
            ) from error
        self.address = f"{host}:{bound}"
        self._server.start()

    def stop(self, grace: float = 2.0) -> None:
        """Refuse new readers; those that read are cut after `grace` seconds, and may resume."""
        self._server.stop(grace).wait(grace + 5)


class _Servicer(rpc.TransferOwnerServicer):
    def __init__(self, transfer: Transfer, use_ucx: bool) -> None:
        self._transfer = transfer
        self._why_not = ucx.missing() if use_ucx else "switched off"
        if self._why_not:
            log.warning("other hosts read from here through gRPC: %s", self._why_not)

    def DescribeState(  # noqa: N802
        self, request: pb.DescribeStateRequest, context: grpc.ServicerContext
    ) -> pb.DescribeStateResponse:
        try:
            manifest = self._transfer.manifest(request.key)
        except TroupeError as error:
            _abort(context, error)
        return pb.DescribeStateResponse(manifest=manifest.to_json(), ucx=not self._why_not)

    def ReadState(  # noqa: N802
        self, request: pb.ReadStateRequest, context: grpc.ServicerContext
    ) -> Iterator[pb.StateChunk]:
        try:
            manifest, data = self._transfer.stored_bytes(request.key)
            _check(request, manifest)
            if request.HasField("lane"):
                yield from self._by_lane(request, data, context.is_active)
            else:
                for chunk in request.chunks:
                    yield _message(chunk, _slice(data, chunk, request.chunk_bytes))
        except TroupeError as error:
            _abort(context, error)
        except ucx.LaneBroken as error:
            if not context.is_active():
                log.info("%s: its reader went away", request.key)
            _abort(context, Unavailable(str(error), kind="transfer_lane_broken"))

    def _by_lane(
        self, request: pb.ReadStateRequest, data: memoryview, alive: Callable[[], bool]
    ) -> Iterator[pb.StateChunk]:
        if self._why_not:
            raise FailedPrecondition(
                f"no UCX here: {self._why_not}", kind="transfer_no_ucx", field="lane"
            )
        with ucx.Lane() as lane:
            lane.connect(request.lane.address)
            flying: deque[Any] = deque()

            def room(most: int) -> Callable[[], bool]:
                def there_is() -> bool:
                    if not alive():
                        raise ucx.LaneBroken("the reader went away")
                    while flying and flying[0].completed:
                        flying.popleft()
                    return len(flying) <= most

                return there_is

            for place, chunk in enumerate(request.chunks):
                view = _slice(data, chunk, request.chunk_bytes)
                flying.append(lane.send(view, request.lane.first_tag + place))
                yield pb.StateChunk(chunk=chunk, checksum=bytes_checksum(view))
                lane.wait(room(WINDOW - 1), idle=_IDLE_SECONDS)
            lane.wait(room(0), idle=_IDLE_SECONDS)


def _check(request: pb.ReadStateRequest, manifest: Manifest) -> None:
    if manifest.checksum != request.checksum:
        raise FailedPrecondition(
            f"holds {manifest.checksum} by now",
            kind="transfer_replaced",
            field="checksum",
            value=request.checksum,
            remedy="Ask for its description again.",
        )
    limit = MAX_CHUNK_BYTES if request.HasField("lane") else MAX_MESSAGE_CHUNK_BYTES
    if not 0 < request.chunk_bytes <= limit:
        raise InvalidArgument(
            f"must be between 1 and {limit}", field="chunk_bytes", value=request.chunk_bytes
        )
    count = num_chunks(manifest, request.chunk_bytes)
    if beyond := [chunk for chunk in request.chunks if chunk >= count]:
        raise InvalidArgument(
            f"the state has {count} chunks of this size", field="chunks", value=beyond[0]
        )


def _message(chunk: int, view: memoryview) -> pb.StateChunk:
    return pb.StateChunk(chunk=chunk, checksum=bytes_checksum(view), data=bytes(view))


def _slice(data: memoryview, chunk: int, size: int) -> memoryview:
    return data[chunk * size : (chunk + 1) * size]


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _abort(context: Any, error: TroupeError) -> NoReturn:
    status = to_status(error)
    context.set_trailing_metadata(((DETAILS_KEY, status.SerializeToString()),))
    context.abort(error.code, status.message)
    raise AssertionError("abort raises")


class _Bearer(grpc.ServerInterceptor):  # type: ignore[type-arg]
    """Refuses callers without the cluster's token."""

    def __init__(self, token: SecretStr) -> None:
        self._expected = f"Bearer {token.get_secret_value()}".encode()

    def intercept_service(self, continuation: Callable[[Any], Any], details: Any) -> Any:
        sent = dict(details.invocation_metadata or ()).get("authorization", "")
        if hmac.compare_digest(str(sent).encode(), self._expected):
            return continuation(details)
        error = Unauthenticated(
            "the bearer token is wrong" if sent else "a bearer token is required",
            field="token",
            remedy="Set TROUPE_TOKEN to the token that the services were started with.",
        )

        def refuse(request: Any, context: Any) -> Any:
            _abort(context, error)

        handler = continuation(details)
        if handler is not None and handler.response_streaming:
            return grpc.unary_stream_rpc_method_handler(refuse)
        return grpc.unary_unary_rpc_method_handler(refuse)
