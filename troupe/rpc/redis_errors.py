"""Errors of Redis: a URL that is none, and what redis-py raises, with what an operator can do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

from troupe.rpc.addresses import join_address, split_address, without_secrets
from troupe.rpc.errors import FailedPrecondition, Internal, TroupeError, Unavailable
from troupe.rpc.redis_info import full, wrong_scheme

CLUSTER_SCHEMES: Final = {"redis-cluster": "redis", "rediss-cluster": "rediss"}
"""URL schemes of a Redis Cluster, each with the scheme of its nodes."""


@dataclass(frozen=True)
class _Trouble:
    """What Redis says when it serves no calls, or takes no writes, until an operator acts."""

    words: tuple[str, ...]
    """Parts of its error, one of which identifies it. Inside scripts errors have other codes."""
    state: str
    remedy: str


_TROUBLES: Final = (
    _Trouble(
        ("loading the dataset",),
        "is reading its data after a restart",
        "Wait; `redis-cli INFO persistence` shows loading_eta_seconds.",
    ),
    _Trouble(
        ("max number of clients",),
        "has no connection left",
        "Raise maxclients: `redis-cli CONFIG SET maxclients 10000`, and in redis.conf.",
    ),
    _Trouble(
        ("BUSY ",),
        "answers nothing while a script runs",
        "End the script: `redis-cli SCRIPT KILL`.",
    ),
    _Trouble(
        ("MISCONF",),
        "takes no writes, since it cannot save them to disk",
        "Free the disk that `redis-cli CONFIG GET dir` names. Where only snapshots fail and the "
        "append-only file is on: `redis-cli CONFIG SET stop-writes-on-bgsave-error no`.",
    ),
    _Trouble(
        ("READONLY", "read only replica"),
        "takes no writes, since it is a replica",
        "Set the URL to the primary, or make this one a primary: `redis-cli REPLICAOF NO ONE`.",
    ),
    _Trouble(
        ("Link with MASTER",),
        "is a replica that has lost its primary",
        "Set the URL to the primary (or `replica-serve-stale-data yes` to read).",
    ),
    _Trouble(
        ("NOREPLICAS", "Not enough good replicas"),
        "takes no writes, since it has too few replicas",
        "Start its replicas, or lower min-replicas-to-write.",
    ),
    _Trouble(
        ("CLUSTERDOWN", "cluster is down", "slot not served"),
        "takes no writes, since nodes of its cluster are away",
        "Start them; `redis-cli CLUSTER INFO` and `CLUSTER NODES` show which.",
    ),
)


def check_url(url: str, *, one_server: bool) -> None:
    """Raise `FailedPrecondition` unless `url` is one that a client can be made of, and with
    `one_server` names no Redis Cluster."""
    # A dependency of services, which client programs do not have.
    from redis import ConnectionPool

    try:
        parts = urlsplit(url)
        database = parts.path.strip("/")
        if parts.scheme in CLUSTER_SCHEMES:
            if one_server:
                raise ValueError("only TROUPE_STORE_REDIS_URL may name a Redis Cluster")
            first, *others = parts.netloc.rpartition("@")[2].split(",")
            for node in others:
                if not split_address(node)[1].isdecimal():
                    raise ValueError(f"'{node}' is not HOST:PORT")
            url = f"{CLUSTER_SCHEMES[parts.scheme]}://{first}?{parts.query}"
        elif parts.scheme in ("redis", "rediss") and database and not database.isdecimal():
            raise ValueError("its path is not the number of a database")
        ConnectionPool.from_url(url).make_connection()
    except (ValueError, TypeError) as error:
        # What is read as a port or a path may be a part of a password.
        reason = "it has no port from 0 to 65535" if str(error).startswith("Port ") else str(error)
        raise FailedPrecondition(
            f"not a Redis URL: {reason}",
            kind="redis_url",
            field="redis_url",
            value=without_secrets(url),
            remedy="Write redis://HOST:PORT/DATABASE, for example redis://127.0.0.1:6379/0, with "
            "USER:PASSWORD@ before a host that asks for them. Percent-encode all signs of a "
            "password but letters and digits, and put an IPv6 address in brackets.",
        ) from None


def shown(url: str) -> str:
    """The address in `url` without user and password, for logs and errors."""
    parts = urlsplit(url)
    if parts.scheme == "unix":
        return f"unix://{parts.path}"
    if parts.scheme in CLUSTER_SCHEMES:
        return parts.netloc.rpartition("@")[2]
    return join_address(parts.hostname or "localhost", parts.port or 6379) + parts.path.rstrip("/")


def failure(error: Exception, address: str, *, clustered: bool) -> TroupeError:
    """The typed error for what redis-py raised, or for an error reply, of the Redis at `address`.

    `clustered`: the URL names a Redis Cluster."""
    from redis import exceptions

    text = str(error)
    if isinstance(error, exceptions.NoPermissionError):
        remedy = "Allow the user all commands, keys and channels: ACL SETUSER NAME +@all ~* &*."
        return _refused(address, text, remedy)
    # A user without a password is told about HELLO.
    if isinstance(error, exceptions.AuthenticationError) or "HELLO" in text:
        return _refused(address, text, "Put the right user and password into the URL.")
    if "protected mode" in text:
        return _refused(address, text, "Set a password (requirepass) and put it into the URL.")
    if isinstance(error, exceptions.MovedError | exceptions.AskError) or (
        "cluster mode" in text.lower()
    ):
        return wrong_scheme(address, clustered=clustered)
    for trouble in _TROUBLES:
        if any(word in text for word in trouble.words):
            return _away(address, f"{trouble.state} ({text})", trouble.remedy)
    unreachable = (
        exceptions.ConnectionError,
        exceptions.TimeoutError,
        exceptions.RedisClusterException,
        OSError,  # TimeoutError is one, too
    )
    if isinstance(error, unreachable):
        # For example `redis.ConnectionError: Error 111 connecting to ...`.
        return _away(
            address,
            f"does not answer: {text or type(error).__name__}",
            "Start it, or correct the URL (TROUPE_REDIS_URL, --redis-url).",
        )
    # Inside a script the error has another class, and up to Redis 6 another code.
    if isinstance(error, exceptions.OutOfMemoryError) or "'maxmemory'" in text:
        return full(address, None)
    if "DB index is out of range" in text:
        return _refused(address, text, "Name a database below its setting `databases` in the URL.")
    if text.lower().startswith("unknown command"):
        return _refused(address, text, "Use a Redis in which no command is renamed or removed.")
    return Internal(f"Redis at {address}: {text}", kind="redis_error")


def _away(address: str, state: str, remedy: str) -> Unavailable:
    return Unavailable(
        f"Redis at {address} {state}",
        kind="redis_unavailable",
        field="redis_url",
        value=address,
        remedy=remedy,
    )


def _refused(address: str, text: str, remedy: str) -> FailedPrecondition:
    return FailedPrecondition(
        f"Redis at {address} refuses us: {text}",
        kind="redis_refuses",
        field="redis_url",
        value=address,
        remedy=remedy,
    )
