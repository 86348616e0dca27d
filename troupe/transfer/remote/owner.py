"""`TransferOwner`: serves the states of a host to other hosts, and fetches states from them."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import grpc
from pydantic import SecretStr

from troupe.rpc.addresses import is_loopback_host, join_address, reachable_host
from troupe.rpc.authentication import authentication_of
from troupe.rpc.channel import channel_options
from troupe.rpc.errors import TroupeError, Unavailable
from troupe.rpc.retry import NO_RETRY
from troupe.rpc.settings import ClientSettings
from troupe.transfer.counters import TransferCounters
from troupe.transfer.errors import KeyNotFound
from troupe.transfer.remote.lane import LanePool
from troupe.transfer.remote.peer import IncomingStates, Peer
from troupe.transfer.remote.serving import Admission, PinnedStates, Servicer, TypedErrors
from troupe.transfer.segments import Mappings
from troupe.transfer.sources import StateRequest
from troupe.transfer.store import Transfer
from troupe.v1 import transfer_pb2 as transfer_pb
from troupe.v1 import transfer_pb2_grpc as transfer_grpc

log = logging.getLogger(__name__)

_MAX_MESSAGE_MIB: Final = 64
_SWEEP_SECONDS: Final = 10.0
# Maximum number of cached clients of other hosts' owners.
_MOST_PEERS: Final = 64
_MOST_READERS: Final = 16


class TransferOwner:
    """A gRPC server over one `Transfer`, and UCX where it is installed. Serves until `stop`.

    UCX has crashed processes, so services run this in an `OwnerProcess`.
    """

    def __init__(
        self,
        transfer: Transfer,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        advertise: str = "",
        token: SecretStr | None = None,
        credentials: grpc.ServerCredentials | None = None,
        settings: ClientSettings | None = None,
        use_ucx: bool = True,
        socket: Path | None = None,
    ) -> None:
        """Serve at `host:port` (0: any free port), for callers that send `token`; other hosts reach
        it at the host `advertise`. `settings`: for calls to other owners. `socket`: for processes
        that share its directory but not its loopback, such as containers.

        `credentials` turns TLS on for requests and checksums; bytes in UCX are not encrypted but
        verified against the checksums. Raises Unavailable if the port is taken.
        """
        self._transfer, self._use_ucx = transfer, use_ucx
        # The caller repeats a fetch, since it may know other owners by then.
        settings = settings or ClientSettings(token=token)
        self._settings = settings.model_copy(update={"retry": NO_RETRY})
        self._arrivals, self._held, self._lanes = IncomingStates(), PinnedStates(), LanePool()
        self._mappings = Mappings()
        self._lock = threading.Lock()
        self._peers: OrderedDict[str, Peer] = OrderedDict()
        authentication = authentication_of(token)
        # More threads than readers, so that descriptions do not wait for long reads.
        self._server = grpc.server(
            ThreadPoolExecutor(_MOST_READERS + 8, thread_name_prefix="transfer-owner"),
            interceptors=[
                *([] if authentication is None else [Admission(authentication)]),
                TypedErrors(),
            ],
            options=[*channel_options(_MAX_MESSAGE_MIB), ("grpc.so_reuseport", 0)],
            maximum_concurrent_rpcs=_MOST_READERS + 8,
        )
        if token is None and not is_loopback_host(host):
            log.warning("anyone who reaches %s can read all weights; set TROUPE_TOKEN", host)
        servicer = Servicer(
            transfer,
            use_ucx=use_ucx,
            arrivals=self._arrivals,
            held=self._held,
            lanes=self._lanes,
            mappings=self._mappings,
            fetch=self._fetch,
        )
        transfer_grpc.add_TransferOwnerServicer_to_server(servicer, self._server)
        try:
            bound = self._listen(join_address(host, port), credentials)
            if socket is not None:
                # Processes with access to its directory can read and write the states anyway.
                self._listen(f"unix:{socket}", None)
        except RuntimeError as error:
            raise Unavailable(
                str(error), kind="port_taken", field="port", value=port, remedy="Choose another."
            ) from error
        self.port: int = bound
        self.address = join_address(advertise or reachable_host(host), bound)
        self._server.start()
        self._stopped = threading.Event()
        threading.Thread(target=self._sweep, name="transfer-sweep", daemon=True).start()

    def stop(self, grace: float = 2.0) -> None:
        """Refuse new readers; running reads are cut off after `grace` seconds, and may resume."""
        self._stopped.set()
        self._server.stop(grace).wait(grace + 5)
        for peer in self._peers.values():
            peer.close()
        self._lanes.close()

    def _listen(self, place: str, credentials: grpc.ServerCredentials | None) -> int:
        if credentials is None:
            return self._server.add_insecure_port(place)
        return self._server.add_secure_port(place, credentials)

    def _fetch(
        self, request: transfer_pb.FetchStateRequest, deadline: float
    ) -> transfer_pb.FetchStateResponse:
        """Fetch a state from the first of the request's owners that has it."""
        wanted = StateRequest(request.key, deadline, request.checksum or None, request.base or None)
        failure: TroupeError | None = None
        for address in request.owners:
            if address == self.address:
                continue
            counters = TransferCounters()
            try:
                fetched = self._peer(address).fetch(wanted, self._transfer.roots, counters)
            except KeyNotFound as error:
                failure = failure or error
                continue
            except TroupeError as error:
                log.warning("%s: not from %s: %s", request.key, address, error)
                failure = error
                # gRPC returns UNKNOWN for an invalid address.
                if error.code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.UNKNOWN):
                    failure = Unavailable(
                        error.message, kind="transfer_owner_away", field="owner", value=address
                    )
                continue
            return transfer_pb.FetchStateResponse(
                transport=fetched.choice.transport,
                reason=fetched.choice.reason,
                retries=counters.retries(),
            )
        raise failure or KeyNotFound(request.key, "no known owner has it")

    def _peer(self, address: str) -> Peer:
        with self._lock:
            if address not in self._peers:
                self._peers[address] = Peer(
                    address,
                    self._settings,
                    use_ucx=self._use_ucx,
                    serves_at=self.address,
                    arrivals=self._arrivals,
                    lanes=self._lanes,
                )
            self._peers.move_to_end(address)
            if len(self._peers) > _MOST_PEERS:
                # Not closed, because it may be in use: it ends with its last reference.
                self._peers.popitem(last=False)
            return self._peers[address]

    def _sweep(self) -> None:
        while not self._stopped.wait(_SWEEP_SECONDS):
            self._held.sweep()
            self._mappings.sweep()
            self._transfer.sweep()
