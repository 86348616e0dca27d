"""One owner process per host, whoever of the host's services runs it.

Services that share a `transfer_dir` are one host. The first one to lock `{transfer_dir}/.owner-*`
starts the owner process (`troupe.transfer.remote.OwnerProcess`), which lets other hosts read what
is stored there and fetches what is not; the file says where it is. When that service dies the
lock is free and its owner process ends; within a second another service of the host takes over,
at the same port where it can be had, so that addresses that others remember stay true.
"""

from __future__ import annotations

import fcntl
import json
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final, Protocol

import structlog

from services.chassis.heartbeat import host_id
from troupe.rpc import TroupeError

log = structlog.get_logger("troupe.transfer")

_CLOSE_SECONDS: Final = 3.0
_SOCKET_NAME_BYTES: Final = 108


class Process(Protocol):
    """`troupe.transfer.remote.OwnerProcess`, as far as this needs it."""

    @property
    def address(self) -> str: ...
    @property
    def local(self) -> str: ...
    def close(self) -> None: ...


@dataclass(frozen=True)
class Place:
    """Where the host's owner is: for other hosts, and for processes of its own."""

    address: str
    local: str
    host_id: str


class HostOwnership:
    """Runs the host's owner process, or knows where it is. Safe to use from several threads."""

    def __init__(
        self,
        root: Path,
        mark: str,
        port: int,
        start: Callable[[int], Process],
        *,
        certified: bool = False,
    ) -> None:
        """`start(port)` starts an owner process over `root`; 0: at any port. `port` is where it
        has to be, 0: where the one before it was, if that is free. Services of the same `mark`
        share an owner. `certified`: it shows a certificate, which may not name the loopback."""
        self._path = root / f".owner-{mark}"
        socket = (root / f".socket-{mark}").absolute()
        # Where the owner is reached by who shares the directory and no loopback, as containers do;
        # the kernel takes no longer names.
        self.socket = socket if len(os.fsencode(socket)) < _SOCKET_NAME_BYTES else None
        self._port, self._certified = port, certified
        self._start = start
        self._process: Process | None = None
        self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._mutex = threading.Lock()
        self._closed = False

    @property
    def is_ours(self) -> bool:
        """Whether this process runs it."""
        return self._process is not None

    def place(self) -> Place | None:
        """Where the owner is, as far as is known now."""
        try:
            said = json.loads(self._path.read_bytes())
            return Place(**said)
        except (OSError, ValueError, TypeError):  # none yet, or it is being written
            return None

    def near(self) -> str | None:
        """Where this process reaches the owner, as far as is known now."""
        place = self.place()
        if place is None:
            return None
        here = place.host_id == host_id()
        if self.socket is not None and (self._certified or not here):
            return f"unix:{self.socket}"
        return place.local if here else place.address

    def look(self) -> None:
        """Take over if nobody runs an owner. Blocks while it starts. Raises `TroupeError`."""
        with self._mutex:
            if self._closed or self._process is not None:
                return
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return
            try:
                process = self._start_somewhere()
                place = Place(process.address, process.local, host_id())
                data = json.dumps(asdict(place)).encode()
                os.ftruncate(self._file, 0)
                os.pwrite(self._file, data, 0)
            except BaseException:
                fcntl.flock(self._file, fcntl.LOCK_UN)
                raise
            self._process = process
            log.info("other hosts read states from here", address=process.address)

    def close(self) -> None:
        """End the owner process if it is ours; another service may take over. Repeatable.

        One that is just being started is left: it ends with this process.
        """
        if not self._mutex.acquire(timeout=_CLOSE_SECONDS):
            log.warning("an owner that does not come up is left behind")
            return
        try:
            process, self._process = self._process, None
            if self._closed:
                return
            self._closed = True
            if process is not None:
                process.close()
            os.close(self._file)  # frees the lock, with the place left for who comes next
        finally:
            self._mutex.release()

    def _start_somewhere(self) -> Process:
        before = self.place()
        if not self._port and before is not None:
            _, _, port = before.local.rpartition(":")
            with suppress(TroupeError, ValueError):
                return self._start(int(port))
        return self._start(self._port)
