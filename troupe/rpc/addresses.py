"""Addresses: hosts and ports as text, removal of secrets from URLs, calls without a proxy.

This module makes and parses every "host:port" and "http://host:port", so that IPv6 addresses have
their brackets and no client is given a server's wildcard address.

A URL may hold a password (`redis://:secret@host`, `https://user:secret@host`); all errors and logs
pass through `without_secrets`.

`http_proxy` and similar variables are for external hosts. Calls to loopback and to services of the
cluster use no proxy, neither in gRPC (`troupe.rpc.channel`) nor in HTTP clients of the cluster's
processes (`bypass_proxy`), unless `TROUPE_PROXY=1`.
"""

from __future__ import annotations

import ipaddress
import os
import re
import socket
from collections.abc import Iterable
from functools import cache
from typing import Final
from urllib.parse import urlsplit

HIDDEN: Final = "***"
PROXY_VARIABLE: Final = "TROUPE_PROXY"
LOOPBACKS: Final = ("127.0.0.1", "::1")
# curl and Python read the lower-case variable first, others the upper-case one, gRPC its own.
_EXCEPTIONS: Final = ("no_proxy", "NO_PROXY")
_GRPC_EXCEPTIONS: Final = "no_grpc_proxy"

_WORD: Final = re.compile(r"\S+")
# Host and port behind "://" of a URL without a user.
_HOST: Final = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[\w.-]+)(:\d{1,5})?(?=[/?#]|$)")
# A scope of an IPv6 address (`fe80::1%eth0`) is part of it.
_AUTHORITY: Final = re.compile(
    r"(?:\[(?P<address>[0-9A-Fa-f:.]+(?:%[\w.-]+)?)\]|(?P<name>[^\s\[\]@:/?#\\,%]*))"
    r"(?::[0-9]{0,5})?",
    re.ASCII,
)
_SECRET_PARAMETER: Final = re.compile(
    r"([?&](?:password|passwd|pwd|token|access_token|auth|secret|api[_-]?key|key|signature|sig)=)"
    r"[^&\s#'\"<>`]+",
    re.IGNORECASE,
)


def without_secrets(text: str) -> str:
    """Return `text` with `***` for user and password in every URL, and for secrets in its query."""
    if "://" not in text:
        return text
    return _SECRET_PARAMETER.sub(rf"\g<1>{HIDDEN}", _WORD.sub(_hide_user, text))


def _hide_user(found: re.Match[str]) -> str:
    """Hide user and password of the URLs in a word.

    An "@" after a host, as in a path, hides nothing. An unencoded password may hold any character,
    so text that is not a host is hidden up to the last "@".
    """
    word = found.group()
    last = word.rfind("@")
    start = word.find("://")
    while 0 <= start < last:
        start += 3
        if not _HOST.match(word, start):
            return f"{word[:start]}{HIDDEN}{word[last:]}"
        start = word.find("://", start)
    return word


def join_address(host: str, port: int | str) -> str:
    """Return "host:port", with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


def http_url(host: str, port: int | str) -> str:
    """Return "http://host:port", with brackets around an IPv6 address."""
    return f"http://{join_address(host, port)}"


def split_address(address: str) -> tuple[str, str]:
    """Return the host, without brackets, and the port of "host:port" or "[host]:port".

    "port" has an empty host, "[host]" an empty port. In an IPv6 address without brackets, such as
    `$(POD_IP):50051` in Kubernetes, the last colon counts.
    """
    if address.startswith("["):
        host, _, port = address[1:].partition("]")
        return host, port.removeprefix(":")
    host, _, port = address.rpartition(":")
    return host, port


def host_of(address: str) -> str:
    """Return the host in "host:port", "[host]:port" or a URL, in lower case; empty if there is none
    or if parsers could disagree."""
    try:
        authority = urlsplit(address if "://" in address else f"//{address}").netloc
    except ValueError:
        return ""
    return authority_host(authority.rpartition("@")[2])


def authority_host(authority: str) -> str:
    """Return the host of a header `Host` ("name:port", "[address]:port" or without a port), in
    lower case and without brackets; empty if the header is malformed. Brackets must hold an IPv6
    address, and only a port may follow the host."""
    found = _AUTHORITY.fullmatch(authority)
    if found is None:
        return ""
    if found["address"] is None:
        return found["name"].lower()
    try:
        ipaddress.IPv6Address(found["address"])
    except ValueError:
        return ""
    return found["address"].lower()


def bare_host(host: str) -> str:
    """Return a host as sockets take it, without the brackets that an IPv6 address has in URLs."""
    host = host.strip()
    return host[1:-1] if host.startswith("[") and host.endswith("]") else host


def is_loopback_host(host: str) -> bool:
    """Return whether `host`, a name or an address, is loopback."""
    address = _ip_address(host)
    return host.lower() == "localhost" if address is None else address.is_loopback


def is_wildcard_host(host: str) -> bool:
    """Return whether a server at `host` listens on all interfaces: `0.0.0.0` (also written `0`),
    `::`, `*`, or nothing."""
    address = _ip_address(host)
    return bare_host(host) in ("", "*", "0") if address is None else address.is_unspecified


def local_host(host: str) -> str:
    """Return the host at which processes of this machine reach a server that listens at `host`."""
    if not is_wildcard_host(host):
        return host
    address = _ip_address(host)
    return "::1" if address is not None and address.version == 6 and has_ipv6() else "127.0.0.1"


def reachable_host(host: str) -> str:
    """Return the host at which other machines reach a server that listens at `host` on this one."""
    return socket.gethostname() if is_wildcard_host(host) else host


def listen(host: str, port: int, *, backlog: int | None = None) -> socket.socket:
    """Return a listening socket at `host`; the one at `::` takes IPv4 clients, too. Raises
    OSError."""
    name = None if bare_host(host) in ("", "*") else bare_host(host)
    family, _, _, _, address = socket.getaddrinfo(
        name, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    both = family is socket.AF_INET6 and is_wildcard_host(host) and socket.has_dualstack_ipv6()
    return socket.create_server(address[:2], family=family, backlog=backlog, dualstack_ipv6=both)


@cache
def has_ipv6() -> bool:
    """Return whether this machine has the IPv6 loopback address."""
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


def _ip_address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Return the address in `host`, an IPv6 address with or without brackets; None if it is a name.

    A server of both families sees an IPv4 caller as `::ffff:127.0.0.1`, which is returned as IPv4.
    """
    try:
        bare = bare_host(host)
        # Brackets hold an IPv6 address: `[127.0.0.1]` is nothing.
        of = ipaddress.ip_address if bare == host.strip() else ipaddress.IPv6Address
        address = of(bare)
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address


def may_use_proxy() -> bool:
    """Return whether TROUPE_PROXY sends calls within the cluster through the proxy, too."""
    return os.environ.get(PROXY_VARIABLE, "").strip().lower() in ("1", "true", "yes", "on")


def bypass_proxy(addresses: Iterable[str] = ()) -> None:
    """Set `no_proxy` so that HTTP clients of this process and its children reach loopback and the
    hosts of `addresses` (host:port, or URLs) without a proxy.

    Clients read the variables when they are constructed: call this before.
    """
    hosts = [host for host in map(host_of, addresses) if host]
    straight = ["localhost", *LOOPBACKS, *([] if may_use_proxy() else hosts)]
    names = [*_EXCEPTIONS, *([_GRPC_EXCEPTIONS] if _GRPC_EXCEPTIONS in os.environ else [])]
    # Both get one value: libraries differ in which of the two they read.
    for name in names:
        before = os.environ.get(name) or os.environ.get("no_proxy") or os.environ.get("NO_PROXY")
        known = [one.strip() for one in (before or "").split(",") if one.strip()]
        if "*" not in known:
            os.environ[name] = ",".join(dict.fromkeys([*known, *straight]))
