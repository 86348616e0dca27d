"""Addresses: what of them may be shown, and that those of the cluster are reached without a proxy.

A URL may hold a password (`redis://:secret@host`, `https://user:secret@host`), and addresses stand
in errors and logs, which are copied into issues and chats: `without_secrets` is applied to both.

`http_proxy` and its kin are for the world outside. Calls to loopback and to services of the cluster
go straight, by gRPC (`troupe.rpc.channel`) and by whatever HTTP client runs in a process of the
cluster (`go_straight`), unless `TROUPE_PROXY=1`.
"""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Iterable
from typing import Final
from urllib.parse import urlsplit

HIDDEN: Final = "***"
PROXY_VARIABLE: Final = "TROUPE_PROXY"
_LOOPBACK: Final = ("localhost", "127.0.0.1", "::1")
# What libraries read: curl and Python the small one first, others the large one, gRPC its own.
_EXCEPTIONS: Final = ("no_proxy", "NO_PROXY")
_GRPC_EXCEPTIONS: Final = "no_grpc_proxy"

_WORD: Final = re.compile(r"\S+")
# What stands behind "://" where there is no user: a host, and what ends it.
_HOST: Final = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[\w.-]+)(:\d{1,5})?(?=[/?#]|$)")
_SECRET_PARAMETER: Final = re.compile(
    r"([?&](?:password|passwd|pwd|token|access_token|auth|secret|api[_-]?key|key|signature|sig)=)"
    r"[^&\s#'\"<>`]+",
    re.IGNORECASE,
)


def without_secrets(text: str) -> str:
    """`text` with `***` for user and password in every URL, and for secrets in its query."""
    if "://" not in text:
        return text
    return _SECRET_PARAMETER.sub(rf"\g<1>{HIDDEN}", _WORD.sub(_hide_user, text))


def _hide_user(found: re.Match[str]) -> str:
    """A word, with the user of the URLs in it hidden.

    An "@" behind a host, as in a path, hides nothing. A password that was not encoded may hold
    whatever a URL may: what is no host and has an "@" behind it is hidden up to the last one.
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


def host_of(address: str) -> str:
    """The host in "host:port", "[host]:port" or a URL; empty where there is none."""
    try:
        return urlsplit(address if "://" in address else f"//{address}").hostname or ""
    except ValueError:
        return ""


def is_loopback_host(host: str) -> bool:
    """Whether `host`, a name or an address, can only mean this machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def may_use_proxy() -> bool:
    """Whether the environment says that calls within the cluster go through its proxy."""
    return os.environ.get(PROXY_VARIABLE, "").strip().lower() in ("1", "true", "yes", "on")


def go_straight(addresses: Iterable[str] = ()) -> None:
    """Have HTTP clients of this process, and of those that it starts, reach loopback and the hosts
    of `addresses` (host:port, or URLs) without a proxy, whatever `http_proxy` says.

    Clients read the exceptions when they are made: call this before.
    """
    hosts = [host for host in map(host_of, addresses) if host]
    straight = [*_LOOPBACK, *([] if may_use_proxy() else hosts)]
    names = [*_EXCEPTIONS, *([_GRPC_EXCEPTIONS] if _GRPC_EXCEPTIONS in os.environ else [])]
    # Both are written alike: libraries differ in which of the two they read.
    for name in names:
        before = os.environ.get(name) or os.environ.get("no_proxy") or os.environ.get("NO_PROXY")
        known = [one.strip() for one in (before or "").split(",") if one.strip()]
        if "*" not in known:
            os.environ[name] = ",".join(dict.fromkeys([*known, *straight]))
