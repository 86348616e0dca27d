"""The owner process of a host: `OwnerProcess` runs and supervises it, `HostOwner` is its client."""

from __future__ import annotations

import json
import logging
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from troupe.processes.ending import stop_process
from troupe.rpc.addresses import join_address, local_host, reachable_host
from troupe.rpc.channel import connect_sync
from troupe.rpc.errors import DataLoss, DeadlineExceeded, NotFound, ResourceExhausted, Unavailable
from troupe.rpc.retry import NO_RETRY
from troupe.rpc.settings import ClientSettings
from troupe.transfer.counters import Choice, TransferCounters
from troupe.transfer.errors import Corrupt, KeyNotFound, StorageFull, TransferTimeout
from troupe.transfer.sources import FetchedState, StateRequest
from troupe.v1 import transfer_pb2 as transfer_pb
from troupe.v1 import transfer_pb2_grpc as transfer_grpc

log = logging.getLogger(__name__)

# Returns owners that may have a key (with this checksum), likely ones first. May raise Unavailable.
Locate = Callable[[str, str | None], Sequence[str]]

# How long to wait for the restart of a dead owner.
_PATIENCE_SECONDS: Final = 20.0
_NAP_SECONDS: Final = 0.2


class HostOwner:
    """A `FetchSource` that lets the owner process at `address`, on this host, fetch states.
    Thread-safe.

    UCX stays out of the caller's process; if the owner crashes, the fetch is repeated after its
    restart.
    """

    def __init__(
        self,
        address: str,
        settings: ClientSettings | None = None,
        *,
        locate: Locate,
        deadline_seconds: float = 600.0,
    ) -> None:
        """Connect to the owner. `locate` is called before every attempt."""
        self.address = address
        self.deadline_seconds = deadline_seconds
        self._locate = locate
        # Calls are repeated here, each time with the current owners from `locate`.
        settings = (settings or ClientSettings()).model_copy(update={"retry": NO_RETRY})
        self._channel = connect_sync(address, settings)
        self._stub = transfer_grpc.TransferOwnerStub(self._channel)

    def close(self) -> None:
        """End the connection."""
        self._channel.close()

    def fetch(
        self, wanted: StateRequest, roots: Sequence[Path], counters: TransferCounters
    ) -> FetchedState:
        """See `sources.FetchSource.fetch`."""
        key = wanted.key
        patience = time.monotonic() + _PATIENCE_SECONDS
        while True:
            request = transfer_pb.FetchStateRequest(
                key=key,
                checksum=wanted.expected or "",
                base=wanted.base or "",
                owners=self._locate(key, wanted.expected),
            )
            left = wanted.deadline - time.monotonic()
            if left <= 0:
                raise TransferTimeout(key, f"the owner at {self.address} did not fetch it in time")
            try:
                answer = self._stub.FetchState(request, timeout=left)
                break
            except NotFound as error:
                raise KeyNotFound(key, error.message) from error
            except DataLoss as error:
                raise Corrupt(key, error.message) from error
            except DeadlineExceeded as error:
                raise TransferTimeout(key, error.message) from error
            except ResourceExhausted as error:
                if error.kind == StorageFull.default_kind:
                    raise StorageFull(key, error.message) from error
                failure: ResourceExhausted | Unavailable = error.with_traceback(None)
            except Unavailable as error:
                # This host's owner is unavailable, or all others that may have the state.
                failure = error.with_traceback(None)
            if time.monotonic() > patience:
                try:
                    raise failure
                finally:
                    del failure  # else a reference cycle that keeps the callers' frames
            counters.retried("owner_away")
            time.sleep(_NAP_SECONDS)
        for cause, count in answer.retries.items():
            for _ in range(count):
                counters.retried(cause)
        for root in roots:
            if (path := root / key).is_file():
                return FetchedState(path, Choice("get", answer.transport, answer.reason))
        raise KeyNotFound(key, f"the owner at {self.address} keeps states elsewhere")


_READY_SECONDS: Final = 60.0
_STOP_SECONDS: Final = 8.0
# If a process dies sooner than this after its start, the pause before the next start grows.
_STEADY_SECONDS: Final = 30.0
_BACKOFF_SECONDS: Final = (0.1, 10.0)


class OwnerProcess:
    """The supervised owner process of a host's states: UCX may crash it, never its parent.

    It is restarted at the same port after a crash; readers then continue with their missing chunks.
    It ends with its parent, even if the parent is killed.
    """

    def __init__(
        self,
        roots: Sequence[Path],
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        advertise: str | None = None,
        settings: ClientSettings | None = None,
        tls_cert: Path | None = None,
        tls_key: Path | None = None,
        tls_client_auth: bool = False,
        use_ucx: bool = True,
        socket: Path | None = None,
        log_level: str = "info",
    ) -> None:
        """Start it and wait until it serves at `host:port` (0: any free port).

        Others reach it at the host `advertise`, and processes that share `roots` also at `socket`.
        `settings`: the cluster's token and authority, for its callers and for its own calls.
        `tls_cert` and `tls_key` (PEM) turn TLS on.

        Raises Unavailable if it does not serve within a minute.
        """
        settings = settings or ClientSettings()
        token = settings.token
        self._config: dict[str, Any] = {
            "roots": [str(Path(root).absolute()) for root in roots],
            "host": host,
            "port": port,
            "advertise": advertise or "",
            "settings": settings.model_dump(mode="json", exclude={"token", "retry"}),
            "token": None if token is None else token.get_secret_value(),
            "tls_cert": tls_cert and str(tls_cert),
            "tls_key": tls_key and str(tls_key),
            "tls_client_auth": tls_client_auth,
            "use_ucx": use_ucx,
            "socket": socket and str(socket),
            "log_level": log_level.lower(),
        }
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._begun = threading.Event()
        self._process: subprocess.Popen[str] | None = None
        self._failure: Unavailable | OSError | None = None
        self.port = port
        self.restarts = 0
        # This thread does all starts, since the kernel ends a child together with the thread that
        # started it.
        self._keeper = threading.Thread(target=self._keep, name="transfer-keeper", daemon=True)
        self._keeper.start()
        self._begun.wait()
        if self._failure is not None:
            raise self._failure
        self.address = join_address(advertise or reachable_host(host), self.port)
        self.local = join_address(local_host(host), self.port)

    @property
    def pid(self) -> int:
        """Id of the process that serves now."""
        assert self._process is not None
        return self._process.pid

    def close(self) -> None:
        """Stop the process: readers are cut off after two seconds, and may resume elsewhere.
        Repeatable."""
        self._closed.set()
        with self._lock:
            process = self._process
        assert process is not None
        stop_process(process, _STOP_SECONDS)
        if process.stdin is not None:
            process.stdin.close()
        self._keeper.join(_STOP_SECONDS)

    def _start(self) -> tuple[subprocess.Popen[str], int]:
        process = subprocess.Popen(
            [sys.executable, "-m", "troupe.transfer.remote", str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            # Leaves the cores to the computing processes of this host.
            env={"OMP_NUM_THREADS": "1", **os.environ},
            # Ctrl-C is handled by its parent, which stops it in order.
            start_new_session=True,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        answer = ""
        try:
            # Sent by a pipe: a process list or an environment would show the token.
            process.stdin.write(json.dumps(self._config) + "\n")
            process.stdin.flush()
            if select.select([process.stdout], [], [], _READY_SECONDS)[0]:
                answer = process.stdout.readline().strip()
        except BrokenPipeError:
            pass
        process.stdout.close()
        if not answer.isdigit():
            process.kill()
            status = process.wait()
            raise Unavailable(
                answer
                or f"the owner of states was not ready in {_READY_SECONDS:g} s (status {status})",
                kind="transfer_owner_away",
                field="port",
                value=self._config["port"],
                remedy="See its log. Choose another port if this one is taken.",
            )
        return process, int(answer)

    def _keep(self) -> None:
        try:
            self._process, self.port = self._start()
        except (Unavailable, OSError) as error:
            self._failure = error
            return
        finally:
            self._config["port"] = self.port
            self._begun.set()
        pause = _BACKOFF_SECONDS[0]
        while True:
            began = time.monotonic()
            status = self._process.wait()
            if time.monotonic() - began > _STEADY_SECONDS:
                pause = _BACKOFF_SECONDS[0]
            started = False
            while not started:
                if self._closed.wait(pause):
                    return
                log.warning("the owner of states died with status %d: starting another", status)
                pause = min(2 * pause, _BACKOFF_SECONDS[1])
                started = self._again()

    def _again(self) -> bool:
        """Start another process, and return whether it serves."""
        with self._lock:
            if self._closed.is_set():
                return False
            try:
                self._process, _ = self._start()
            except (Unavailable, OSError) as error:
                log.error("no owner of states: %s", error)
                return False
        self.restarts += 1
        return True
