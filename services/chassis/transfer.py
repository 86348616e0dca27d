"""`HostTransfer`: a service's `Transfer` that also fetches states from other hosts.

A host's *owner* is the process that serves its states to other hosts. Three sources, each of which
may be out of date, tell which hosts hold a state:

- a reference may name holders (`WeightsRef.holders`), such as its publisher;
- the orchestrator knows from heartbeats where the hosts are and what their workers have loaded
  (`Orchestrator.LocateState`), also after a restart of it or of the publisher;
- an owner itself answers whether it has the key with the checksum.

There is no central list of holders that could be lost or wrong, and a host that has fetched a
version can serve it. A worker whose orchestrator is unreachable asks the owners that it last knew.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import json
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import structlog

from services.chassis.heartbeat import host_id
from services.chassis.settings import ServiceSettings
from services.chassis.telemetry import Telemetry
from troupe.rpc import NO_RETRY, ClientSettings, TroupeError, Unavailable
from troupe.rpc.addresses import split_address
from troupe.rpc.channel import connect_sync
from troupe.transfer import Transfer, TransferCounters
from troupe.transfer.remote import HostOwner, OwnerProcess, Peer
from troupe.transfer.sources import FetchedState, StateRequest
from troupe.v1 import orchestrator_pb2 as orchestrator_pb
from troupe.v1 import orchestrator_pb2_grpc as orchestrator_grpc

log = structlog.get_logger("troupe.transfer")

_CLOSE_SECONDS: Final = 3.0
_SOCKET_NAME_BYTES: Final = 108


@dataclass(frozen=True)
class OwnerAddress:
    """Addresses of a host's owner: for other hosts, and for processes of its own host."""

    address: str
    local: str
    host_id: str


class HostOwnership:
    """Handle of the host's owner process, started here or by another service. Thread-safe."""

    def __init__(
        self,
        root: Path,
        mark: str,
        port: int,
        start: Callable[[int], OwnerProcess],
        *,
        certified: bool = False,
    ) -> None:
        """`start(port)` starts an owner process over `root`; 0: at any port.

        `port`: its fixed port; 0: the port of the previous owner, if that is free. Services with
        the same `mark` share an owner. `certified`: the owner has a TLS certificate, which may lack
        the loopback address.
        """
        self._path = root / f".owner-{mark}"
        socket = (root / f".socket-{mark}").absolute()
        # Unix socket for processes that share the directory but no loopback, as containers do; the
        # kernel limits the length of its path.
        self.socket = socket if len(os.fsencode(socket)) < _SOCKET_NAME_BYTES else None
        self._port, self._certified = port, certified
        self._start = start
        self._process: OwnerProcess | None = None
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        self._file = os.open(self._path, flags, 0o600)
        self._mutex = threading.Lock()
        self._closed = False

    def place(self) -> OwnerAddress | None:
        """Return the addresses of the owner, if one has been started."""
        try:
            return OwnerAddress(**json.loads(self._path.read_bytes()))
        except (OSError, ValueError, TypeError):  # there is no file yet, or it is being written
            return None

    def near(self) -> str | None:
        """Return the address at which this process reaches the owner, if one has been started."""
        place = self.place()
        if place is None:
            return None
        here = place.host_id == host_id()
        if self.socket is not None and (self._certified or not here):
            return f"unix:{self.socket}"
        return place.local if here else place.address

    def look(self) -> None:
        """Start an owner unless another service runs one. Blocking. Raises `TroupeError`."""
        with self._mutex:
            if self._closed or self._process is not None:
                return
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return
            try:
                process = self._start_somewhere()
                place = OwnerAddress(process.address, process.local, host_id())
                data = json.dumps(asdict(place)).encode()
                os.ftruncate(self._file, 0)
                os.pwrite(self._file, data, 0)
            except BaseException:
                fcntl.flock(self._file, fcntl.LOCK_UN)
                raise
            self._process = process
            log.info("other hosts read states from here", address=process.address)

    def close(self) -> None:
        """End the owner process if this service runs it; another may take over. Idempotent.

        An owner that is just being started is left alone: it ends with this process.
        """
        if not self._mutex.acquire(timeout=_CLOSE_SECONDS):
            log.warning("an owner that does not start is abandoned")
            return
        try:
            process, self._process = self._process, None
            if self._closed:
                return
            self._closed = True
            if process is not None:
                process.close()
            os.close(self._file)  # frees the lock; the addresses stay for the next owner
        finally:
            self._mutex.release()

    def _start_somewhere(self) -> OwnerProcess:
        before = self.place()
        if not self._port and before is not None:
            _, port = split_address(before.local)
            with suppress(TroupeError, ValueError):
                return self._start(int(port))
        return self._start(self._port)


_LOCATE_SECONDS: Final = 5.0
# Seconds between checks whether the host has an owner.
_LOOK_SECONDS: Final = 1.0
# Seconds to wait for the host's owner before a fetch fails.
_OWNER_SECONDS: Final = 30.0
_SWEEP_SECONDS: Final = 10.0
_HINTS: Final = 4096


class HostTransfer(Transfer):
    """A `Transfer` over this host's `transfer_dir` and, if `settings.shares_states`, other hosts.

    Other hosts' states can be fetched between `start` and `stop`.
    """

    def __init__(self, settings: ServiceSettings, telemetry: Telemetry) -> None:
        self._settings = settings
        self._client = settings.client()
        self._hints: OrderedDict[str, tuple[str, ...]] = OrderedDict()
        self._known: tuple[str, ...] = ()
        self._mutex = threading.Lock()
        self._owner: HostOwnership | None = None
        self._watch: threading.Thread | None = None
        self._looked, self._stopped = threading.Event(), threading.Event()
        self._refusal: Unavailable | None = None
        self._exit = contextlib.ExitStack()
        self._directory: Any = None
        peers = [_OtherHosts(self, self._client)] if settings.shares_states else []
        fallback = settings.transfer_fallback_dir
        super().__init__(settings.transfer_dir, fallback=fallback, peers=peers)
        telemetry.registry.register(self.counters)
        if settings.shares_states:
            # Several clusters on one machine may share the directory.
            mark = hashlib.sha256(settings.orchestrator_address.encode()).hexdigest()[:8]
            self._owner = HostOwnership(
                self.roots[0],
                mark,
                settings.transfer_port,
                self._launch,
                certified=settings.tls_cert is not None,
            )

    async def start(self) -> None:
        """Make sure that this host has an owner. Raises `TroupeError` if none can be started."""
        if self._owner is None:
            threading.Thread(target=self._sweep_on, name="transfer-sweep", daemon=True).start()
            return
        hasty = self._settings.client(retry=NO_RETRY)
        channel = connect_sync(self._settings.orchestrator_address, hasty)
        self._exit.callback(channel.close)
        self._directory = orchestrator_grpc.OrchestratorStub(channel)
        self._watch = threading.Thread(target=self._look_on, args=(self._owner,), daemon=True)
        self._watch.start()
        await asyncio.to_thread(self._looked.wait, _OWNER_SECONDS)
        if self._refusal is not None and self._owner.place() is None:
            raise self._refusal

    async def stop(self) -> None:
        """Stop the owner and the threads that `start` started. Idempotent."""
        self._stopped.set()
        if self._owner is not None:
            await asyncio.to_thread(self._owner.close)
        self._exit.close()
        await asyncio.to_thread(self.close)

    @property
    def client(self) -> ClientSettings:
        """The settings with which this process calls other services."""
        return self._client

    @property
    def address(self) -> str:
        """The address at which other hosts read this host's states; "" if they cannot."""
        place = None if self._owner is None else self._owner.place()
        return "" if place is None else place.address

    @property
    def holders(self) -> list[str]:
        """The `WeightsRef.holders` for a state of this host."""
        return [self.address] if self.address else []

    def hint(self, key: str, holders: Collection[str]) -> None:
        """Remember owners that had `key`."""
        if not holders:
            return
        with self._mutex:
            self._hints[key] = tuple(holders)
            self._hints.move_to_end(key)
            while len(self._hints) > _HINTS:
                self._hints.popitem(last=False)

    def locate(self, key: str, expected: str | None = None) -> Sequence[str]:
        """Return owners of other hosts that may have `key`, most likely first. Blocking.

        Raises Unavailable if the orchestrator is unreachable and no owner was known before.
        """
        with self._mutex:
            hinted = self._hints.get(key, ())
        try:
            owners = tuple(self.directory(key).owners)
        except TroupeError as error:
            if not (hinted or self._known):
                raise Unavailable(
                    f"the hosts that have {key} are unknown: {error.message}", kind="directory_away"
                ) from error
            log.warning("the hosts that have a state are unknown", key=key, error=str(error))
            owners = self._known
        else:
            self._known = owners
        return [one for one in dict.fromkeys((*hinted, *owners)) if one != self.address]

    def directory(self, key: str) -> orchestrator_pb.LocateStateResponse:
        """Ask the orchestrator which hosts may have `key`. Blocking. Raises `TroupeError`."""
        if self._directory is None:
            raise Unavailable("this host reaches no other host", kind="directory_away")
        request = orchestrator_pb.LocateStateRequest(key=key)
        answer: orchestrator_pb.LocateStateResponse = self._directory.LocateState(
            request, timeout=_LOCATE_SECONDS
        )
        return answer

    def drop(self, keys: Iterable[str]) -> None:
        """Delete unversioned `keys` (samples' values) on all hosts. Blocking.

        A host that does not answer keeps them until its workers release the job.
        """
        keys = list(keys)
        for key in keys:
            self.delete(key)
        if not keys or self._owner is None:
            return
        try:
            addresses = self.locate(keys[0])
        except Unavailable as error:
            log.info("values of samples are kept for now", keys=len(keys), error=str(error))
            return
        for address in addresses:
            peer = Peer(address, self._settings.client(retry=NO_RETRY), use_ucx=False)
            try:
                peer.delete(keys)
            except TroupeError as error:
                log.info("values of samples are kept", keys=len(keys), at=address, error=str(error))
            finally:
                peer.close()

    def near_owner(self, deadline: float) -> str:
        """Return the address of this host's owner, waiting for one until `deadline` (monotonic
        clock).

        Raises Unavailable.
        """
        deadline = min(deadline, time.monotonic() + _OWNER_SECONDS)
        while True:
            near = None if self._owner is None else self._owner.near()
            if near is not None:
                return near
            if time.monotonic() > deadline:
                raise Unavailable(
                    f"no process of this host serves {self.roots[0]} to other hosts",
                    kind="transfer_owner_away",
                    remedy="Find the cause in the logs of its workers.",
                )
            time.sleep(0.05)

    def _look_on(self, owner: HostOwnership) -> None:
        """Keep an owner running, from one thread: an owner ends with the thread that started it."""
        while True:
            try:
                owner.look()
                self._refusal = None
            except (TroupeError, OSError) as error:
                self._refusal = Unavailable(
                    f"this host cannot serve its states: {error}", kind="transfer_owner_away"
                )
                log.warning("this host has no owner of its states", error=str(error))
            self._looked.set()
            if self._stopped.wait(_LOOK_SECONDS):
                return

    def _sweep_on(self) -> None:
        """Sweep periodically, on a host without an owner that does."""
        while not self._stopped.wait(_SWEEP_SECONDS):
            self.sweep()

    def _launch(self, port: int) -> OwnerProcess:
        settings = self._settings
        host, _ = split_address(settings.address)
        return OwnerProcess(
            roots=list(self.roots),
            host=settings.host,
            port=port,
            advertise=settings.transfer_host or host,
            settings=self._client,
            tls_cert=settings.tls_cert,
            tls_key=settings.tls_key,
            tls_client_auth=settings.tls_client_auth,
            use_ucx=settings.transfer_ucx,
            socket=None if self._owner is None else self._owner.socket,
            log_level=settings.log_level,
        )


class _OtherHosts:
    """A `sources.FetchSource` that has this host's owner fetch states from other hosts."""

    address = "other hosts"
    deadline_seconds = 600.0

    def __init__(self, host: HostTransfer, client: ClientSettings) -> None:
        self._host, self._client = host, client
        self._mutex = threading.Lock()
        self._at: tuple[str, HostOwner] | None = None

    def fetch(
        self, wanted: StateRequest, roots: Sequence[Path], counters: TransferCounters
    ) -> FetchedState:
        """See `sources.FetchSource.fetch`."""
        return self._owner(wanted.deadline).fetch(wanted, roots, counters)

    def _owner(self, deadline: float) -> HostOwner:
        address = self._host.near_owner(deadline)
        with self._mutex:
            if self._at is None or self._at[0] != address:
                source = HostOwner(address, self._client, locate=self._host.locate)
                self._at = (address, source)
            return self._at[1]
