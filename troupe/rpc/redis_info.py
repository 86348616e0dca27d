"""Whether a Redis is fit to keep the state of a cluster, judged by the fields of its INFO.

INFO has all of them, also in managed services that forbid CONFIG.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from troupe.rpc.errors import FailedPrecondition, ResourceExhausted, TroupeError, Unavailable

# Oldest version with streams, effect replication of scripts that read the clock, and UNLINK.
OLDEST_VERSION: Final = (6, 2)
_NO_EVICTION: Final = "noeviction"
_MIB: Final = 1 << 20
Info = Mapping[str, str]


def unfitness(info: Info, address: str, *, clustered: bool = False) -> TroupeError | None:
    """Why the Redis at `address` cannot keep state; None if it can.

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
    """Warnings about a Redis that works, but may lose what it keeps."""
    found: list[str] = []
    if _policy(info) != _NO_EVICTION:
        found.append(
            f"maxmemory-policy is {_policy(info)}; it has no effect while maxmemory is 0, but with "
            "a limit Redis would delete jobs and samples: set it to noeviction"
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
    """The error of a Redis that is at its memory limit. `info`: None if it does not answer."""
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
    """The error of a URL for a Redis Cluster (`clustered`) that is none, or the other way round."""
    found, wanted = ("no Redis Cluster", "redis") if clustered else ("a node of a cluster", "")
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
