"""Process-level setup of a service: port binding, parent watch, malloc settings."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import grpc
import psutil

from services.chassis.settings import ServiceSettings
from troupe.rpc import InvalidArgument
from troupe.rpc.addresses import join_address
from troupe.rpc.channel import channel_options
from troupe.rpc.errors import port_error

_PERIOD_SECONDS = 0.5
# Seconds after the parent's end until the process kills itself, if its orderly stop has hung.
_GIVE_UP_SECONDS = 30.0
# Parameters of mallopt, from malloc.h.
_TRIM_THRESHOLD: Final = -1
_MMAP_THRESHOLD: Final = -3


def watch_parent(pid: int, gone: Callable[[], None]) -> None:
    """Call `gone()` from a thread once the process `pid` has ended."""
    try:
        parent = psutil.Process(pid)
    except psutil.NoSuchProcess:
        gone()
        return
    threading.Thread(target=_watch, args=(parent, gone), name="parent-watch", daemon=True).start()


def _watch(parent: psutil.Process, gone: Callable[[], None]) -> None:
    # A zombie still "runs".
    with contextlib.suppress(psutil.NoSuchProcess):
        while parent.is_running() and parent.status() != psutil.STATUS_ZOMBIE:
            time.sleep(_PERIOD_SECONDS)
    gone()
    time.sleep(_GIVE_UP_SECONDS)
    os._exit(1)


def keep_freed_memory() -> None:
    """Tell glibc's malloc to keep freed memory; no effect with other C libraries.

    Services handle thousands of messages of some hundred KB; getting the pages of each from the
    kernel again costs a tenth of the CPU time.
    """
    with contextlib.suppress(AttributeError, OSError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_TRIM_THRESHOLD, 64 * 2**20)
        # The highest value that glibc accepts.
        mallopt(_MMAP_THRESHOLD, 32 * 2**20)


def server_options(settings: ServiceSettings) -> list[tuple[str, Any]]:
    """Return the gRPC server options: the channel's options, and how often clients may ping."""
    return [
        *channel_options(settings.max_message_mib),
        # With SO_REUSEPORT two servers would share one port, and each would get half of the calls.
        ("grpc.so_reuseport", 0),
        # Clients ping every 20 s, also between calls.
        ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
        ("grpc.keepalive_permit_without_calls", 1),
    ]


def bind(server: grpc.aio.Server, settings: ServiceSettings) -> int:
    """Make `server` listen as configured in `settings`, and return the port. Raises
    `TroupeError`."""
    address = join_address(settings.host, settings.port)
    _probe(settings.host, settings.port, "TROUPE_PORT")
    credentials = _credentials(settings)
    try:
        if credentials is None:
            return server.add_insecure_port(address)
        return server.add_secure_port(address, credentials)
    except RuntimeError as error:  # another process bound the port after the probe
        raise port_error(settings.host, settings.port, "TROUPE_PORT", error) from error


def _probe(host: str, port: int, variable: str) -> None:
    """Raise `TroupeError` with the reason why `port` cannot be bound, which gRPC does not give."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, proto) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen(1)
    except OSError as error:
        raise port_error(host, port, variable, error) from None


def _credentials(settings: ServiceSettings) -> grpc.ServerCredentials | None:
    if settings.tls_cert is None and settings.tls_key is None:
        return None
    key = read_pem(settings.tls_key, "tls_key")
    certificate = read_pem(settings.tls_cert, "tls_cert")
    authority = read_pem(settings.tls_ca, "tls_ca") if settings.tls_client_auth else None
    return grpc.ssl_server_credentials(
        [(key, certificate)],
        root_certificates=authority,
        require_client_auth=settings.tls_client_auth,
    )


def read_pem(path: Path | None, field: str) -> bytes:
    """Return the content of the PEM file that the setting `field` names. Raises InvalidArgument."""
    try:
        if path is None:
            raise FileNotFoundError(errno.ENOENT, "not set")
        return path.read_bytes()
    except OSError as error:
        raise InvalidArgument(
            f"cannot be read: {error.strerror}",
            field=field,
            value=path,
            remedy=f"Set TROUPE_{field.upper()} to a readable PEM file.",
        ) from error
