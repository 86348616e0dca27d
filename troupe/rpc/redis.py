"""Redis: checks of URLs, of a server's fitness to keep a cluster's state, and redis-py's errors in
terms of an operator.

Fitness is judged by the fields of INFO, because managed services may forbid CONFIG.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

from troupe.rpc.addresses import join_address, split_address, without_secrets
from troupe.rpc.errors import (
    FailedPrecondition,
    Internal,
    ResourceExhausted,
    TroupeError,
    Unavailable,
)

CLUSTER_SCHEMES: Final = {"redis-cluster": "redis", "rediss-cluster": "rediss"}
"""URL schemes of a Redis Cluster, each with the scheme of its nodes."""
# Oldest version with streams, effect replication of scripts that read the clock, and UNLINK.
OLDEST_VERSION: Final = (6, 2)
_NO_EVICTION: Final = "noeviction"
_MIB: Final = 1 << 20
Info = Mapping[str, str]


@dataclass(frozen=True)
class _Trouble:
    """A state in which Redis serves no calls, or accepts no writes, until an operator acts."""

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
        "has no free connections",
        "Raise maxclients: `redis-cli CONFIG SET maxclients 10000`, and in redis.conf.",
    ),
    _Trouble(
        ("BUSY ",),
        "does not answer while a script runs",
        "End the script: `redis-cli SCRIPT KILL`.",
    ),
    _Trouble(
        ("MISCONF",),
        "takes no writes, because it cannot save them to disk",
        "Free space on the disk that `redis-cli CONFIG GET dir` names. If only snapshots fail and "
        "the append-only file is on: `redis-cli CONFIG SET stop-writes-on-bgsave-error no`.",
    ),
    _Trouble(
        ("READONLY", "read only replica"),
        "takes no writes, because it is a replica",
        "Set the URL to the primary, or make this one a primary: `redis-cli REPLICAOF NO ONE`.",
    ),
    _Trouble(
        ("Link with MASTER",),
        "is a replica that has lost its primary",
        "Set the URL to the primary (or `replica-serve-stale-data yes` to read).",
    ),
    _Trouble(
        ("NOREPLICAS", "Not enough good replicas"),
        "takes no writes, because it has too few replicas",
        "Start its replicas, or lower min-replicas-to-write.",
    ),
    _Trouble(
        ("CLUSTERDOWN", "cluster is down", "slot not served"),
        "takes no writes, because nodes of its cluster are down",
        "Start them; `redis-cli CLUSTER INFO` and `CLUSTER NODES` show which.",
    ),
)


def check_url(url: str, *, one_server: bool) -> None:
    """Raise `FailedPrecondition` unless `url` is a valid Redis URL, and with `one_server` names no
    Redis Cluster."""
    # Imported here: services depend on redis-py, client programs do not have it.
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
            raise ValueError("its path is not a database number")
        ConnectionPool.from_url(url).make_connection()
    except (ValueError, TypeError) as error:
        # A parsed port or path may be part of a password.
        reason = "it has no port from 0 to 65535" if str(error).startswith("Port ") else str(error)
        raise FailedPrecondition(
            f"not a Redis URL: {reason}",
            kind="redis_url",
            field="redis_url",
            value=without_secrets(url),
            remedy="Write redis://HOST:PORT/DATABASE, for example redis://127.0.0.1:6379/0, with "
            "USER:PASSWORD@ before the host if it requires them. Percent-encode all characters of "
            "a password except letters and digits, and put an IPv6 address in brackets.",
        ) from None


def shown(url: str) -> str:
    """Return the address in `url` without user and password, for logs and errors."""
    parts = urlsplit(url)
    if parts.scheme == "unix":
        return f"unix://{parts.path}"
    if parts.scheme in CLUSTER_SCHEMES:
        return parts.netloc.rpartition("@")[2]
    return join_address(parts.hostname or "localhost", parts.port or 6379) + parts.path.rstrip("/")


def failure(error: Exception, address: str, *, clustered: bool) -> TroupeError:
    """Return the typed error for a redis-py exception or an error reply of the Redis at `address`.

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
    if isinstance(error, exceptions.InvalidResponse):
        return FailedPrecondition(
            f"What answers at {address} is not Redis: {text}",
            kind="redis_refuses",
            field="redis_url",
            value=address,
            remedy="Correct the URL (TROUPE_REDIS_URL, --redis-url): another program has the port.",
        )
    return Internal(f"Redis at {address}: {text}", kind="redis_error")


def _away(address: str, state: str, remedy: str) -> Unavailable:
    text = f"Redis at {address} {state}"
    return Unavailable(
        text, kind="redis_unavailable", field="redis_url", value=address, remedy=remedy
    )


def _refused(address: str, text: str, remedy: str) -> FailedPrecondition:
    text = f"Redis at {address} refuses us: {text}"
    return FailedPrecondition(
        text, kind="redis_refuses", field="redis_url", value=address, remedy=remedy
    )


def unfitness(info: Info, address: str, *, clustered: bool = False) -> TroupeError | None:
    """Return why the Redis at `address` cannot keep state; None if it can.

    A replica is `Unavailable`, since it may be promoted; everything else needs an operator
    (`FailedPrecondition`). `clustered`: the URL names a Redis Cluster.
    """
    version = info["redis_version"]
    if tuple(int(part) for part in version.split(".")[:2]) < OLDEST_VERSION:
        return FailedPrecondition(
            f"Redis at {address} is too old",
            kind="redis_version",
            field="redis_version",
            value=version,
            remedy="Run Redis 6.2 or newer.",
        )
    if info.get("cluster_enabled") == "1" and not clustered:
        return wrong_scheme(address, clustered=False)
    if info.get("role") == "slave" and info.get("slave_read_only", "1") == "1":
        primary = f"{info.get('master_host')}:{info.get('master_port')}"
        return Unavailable(
            f"Redis at {address} is a read-only replica of {primary} and takes no writes",
            kind="redis_unavailable",
            field="redis_url",
            value=address,
            remedy="Set the URL to the primary, or make this one a primary: "
            "redis-cli REPLICAOF NO ONE.",
        )
    if _limit(info) and _policy(info) != _NO_EVICTION:
        return FailedPrecondition(
            f"Redis at {address} deletes jobs and samples when it reaches its maxmemory of "
            f"{_mib(_limit(info))}" + _evicted(info),
            kind="redis_evicts",
            field="maxmemory-policy",
            value=_policy(info),
            remedy="Run `redis-cli CONFIG SET maxmemory-policy noeviction`, and set it in "
            "redis.conf or in the settings of the managed service, so that a restart keeps it.",
        )
    return None


def risks(info: Info) -> list[str]:
    """Return warnings about a Redis that works, but may lose data."""
    found: list[str] = []
    if _policy(info) != _NO_EVICTION:
        found.append(
            f"maxmemory-policy is {_policy(info)}, which has no effect while maxmemory is 0, but "
            "with a limit Redis would delete jobs and samples: set it to noeviction"
        )
    elif _count(info, "evicted_keys"):
        found.append(f"jobs or samples may be missing{_evicted(info)}")
    if info.get("aof_enabled") == "0":
        found.append(
            "appendonly is no: a crash of Redis or of its machine loses jobs and samples; set "
            "appendonly yes and appendfsync always"
        )
    return found


def full(address: str, info: Info | None) -> ResourceExhausted:
    """Return the error of a Redis that is at its memory limit. `info`: None if it does not
    answer."""
    used = ""
    if info is not None:
        used = f": it uses {_mib(_count(info, 'used_memory'))} of {_mib(_limit(info))}"
    return ResourceExhausted(
        f"Redis at {address} is full{used}",
        kind="redis_full",
        field="maxmemory",
        value=None if info is None else _limit(info),
        remedy="Raise maxmemory (`redis-cli CONFIG SET maxmemory 8gb`, and in redis.conf), train "
        "on fewer trajectories per step, or remove ended jobs (`troupe jobs forget JOB`). Nothing "
        "is lost; jobs continue by themselves once there is room.",
        retry_after_ms=2000,
    )


def wrong_scheme(address: str, *, clustered: bool) -> FailedPrecondition:
    """Return the error of a cluster URL for a single server (`clustered`), or vice versa."""
    found, wanted = ("not a Redis Cluster", "redis") if clustered else ("a node of a cluster", "")
    return FailedPrecondition(
        f"Redis at {address} is {found}",
        kind="redis_url",
        field="redis_url",
        value=address,
        remedy=f"Begin the URL with {wanted or 'redis-cluster'}://. Only TROUPE_STORE_REDIS_URL "
        "may name a Redis Cluster.",
    )


def _policy(info: Info) -> str:
    return info.get("maxmemory_policy", _NO_EVICTION)


def _limit(info: Info) -> int:
    return _count(info, "maxmemory")


def _evicted(info: Info) -> str:
    count = _count(info, "evicted_keys")
    return f" (it has deleted {count:,} keys since it started)" if count else ""


def _count(info: Info, name: str) -> int:
    return int(info.get(name, 0))


def _mib(size: int) -> str:
    return f"{size / _MIB:,.1f} MiB"
