"""The errors of an embedded cluster, each with the setting at fault and the remedy."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from troupe.rpc.errors import (
    DataLoss,
    DeadlineExceeded,
    FailedPrecondition,
    Internal,
    InvalidArgument,
)


class PortInUse(FailedPrecondition):
    """Another program listens on a requested port."""

    default_kind = "port_in_use"

    def __init__(self, *, field: str, port: int, host: str, option: str) -> None:
        change = f" or choose another with {option}" if option else ""
        super().__init__(
            f"another program listens on port {port} of {host or 'all interfaces'}",
            field=field,
            value=port,
            remedy=f"Stop it (`ss -ltnp 'sport = :{port}'` names it){change}.",
        )


class RedisMissing(FailedPrecondition):
    """The embedded cluster finds no installed redis-server."""

    default_kind = "redis_missing"

    def __init__(self, reason: str) -> None:
        super().__init__(
            f"redis-server is not available: {reason}",
            field="redis_url",
            value="(embedded)",
            remedy="Run `pip install 'troupe-rl[embedded]'`, or name a running Redis with "
            "--redis-url redis://HOST:PORT/0.",
        )


class RedisDataDamaged(DataLoss):
    """The append-only file of the embedded Redis is damaged or gone."""

    default_kind = "redis_data_damaged"

    def __init__(self, path: Path, what: str, command: str = "") -> None:
        cut = (
            f"or copy it and cut off the rest, with the jobs and rows in it: {command} ; "
            if command
            else ""
        )
        super().__init__(
            f"{what}.",
            field="redis",
            value=path,
            remedy=f"Restore it from a backup, {cut}or remove the directory {path.parent} to start "
            "without its jobs.",
        )


class ClusterRunning(FailedPrecondition):
    """A cluster runs in this data directory already."""

    default_kind = "cluster_running"

    def __init__(self, data_dir: Path, pid: int | None) -> None:
        who = f" (process {pid})" if pid else ""
        super().__init__(
            f"a cluster is already running in this directory{who}",
            field="data_dir",
            value=data_dir,
            remedy="Use it, stop it with `troupe down`, or choose another --data-dir.",
        )


class NoCluster(FailedPrecondition):
    """No cluster runs in this data directory."""

    default_kind = "no_cluster"

    def __init__(self, data_dir: Path) -> None:
        super().__init__(
            "no cluster runs in this directory",
            field="data_dir",
            value=data_dir,
            remedy="Start one with `troupe up`, or name another one with --data-dir or --cluster.",
        )


class StateUnreadable(Internal):
    """The cluster's state file is damaged or of another version."""

    default_kind = "cluster_state_unreadable"


class ClusterNotStarted(Internal):
    """A detached supervisor ended; the message is the last line of its log."""

    default_kind = "cluster_not_started"

    def __init__(self, last_line: str, log: Path) -> None:
        super().__init__(last_line or f"the cluster did not start. Its log is {log}.")


class ChildFailed(Internal):
    """A service did not start, or ended and will not be restarted."""

    default_kind = "service_failed"

    def __init__(self, name: str, what: str, log: Path | None, last_line: str = "") -> None:
        last = f" The last line of its log: {last_line}" if last_line else ""
        super().__init__(
            f"{what}.{last}",
            field="service",
            value=name,
            remedy=f"Its log is {log}." if log else None,
        )


class DiskFull(FailedPrecondition):
    """A service cannot start: the disk of the data directory is full or read-only."""

    default_kind = "disk_full"

    def __init__(self, name: str, directory: Path, shortage: str) -> None:
        super().__init__(
            f"{name} cannot start: {shortage}",
            field="data_dir",
            value=directory.parent,
            remedy="Free space there or make it writable, or choose another --data-dir.",
        )


class ChildNotReady(DeadlineExceeded):
    """A service did not answer its health check in time."""

    default_kind = "service_not_ready"

    def __init__(self, name: str, address: str, seconds: float, reason: str, log: Path) -> None:
        super().__init__(
            f"was not ready at {address} within {seconds:g} s ({reason})",
            field="service",
            value=name,
            remedy=f"Its log is {log}; on a slow machine raise --start-timeout.",
        )


class TransferDirNotWritable(FailedPrecondition):
    """The directory for weights and training states cannot be used."""

    default_kind = "transfer_dir_not_writable"

    def __init__(self, transfer_dir: Path, error: OSError) -> None:
        super().__init__(
            f"cannot be used: {error.strerror or error}.",
            field="TROUPE_TRANSFER_DIR",
            value=transfer_dir,
            remedy="Set TROUPE_TRANSFER_DIR to a directory that this user may write to, best in "
            "shared memory; or leave it unset.",
        )


class NotPrivate(FailedPrecondition):
    """The data directory, a file in it or a link on the way to it belongs to another user."""

    default_kind = "data_dir_not_private"

    def __init__(self, data_dir: Path, path: Path, owner: int, *, field: str = "data_dir") -> None:
        """`path`: what is at fault, which belongs to `owner`; `field`: the directory's setting."""
        inside = path.relative_to(data_dir) if path.is_relative_to(data_dir) else None
        what = f"'{path}'" if inside is None else f"'{inside}' in it" if inside.parts else "it"
        super().__init__(
            f"{what} belongs to another user (uid {owner}), who could change the code that the "
            "cluster runs and read the files that it writes",
            field=field,
            value=data_dir,
            remedy=f"Choose another with --{field.replace('_', '-')}, or take ownership: "
            "chown -R $(id -u) DIRECTORY.",
        )


class CommonDirectory(InvalidArgument):
    """The data directory is shared by all users, such as /tmp."""

    default_kind = "data_dir_common"

    def __init__(self, data_dir: Path) -> None:
        super().__init__(
            "is shared by all users, but a data directory must be private",
            field="data_dir",
            value=data_dir,
            remedy=f"Name a directory in it: --data-dir {data_dir / 'runs'}.",
        )


class NotUtf8(InvalidArgument):
    """The name of the data directory is not UTF-8, which Redis, JSON and messages need."""

    default_kind = "data_dir_not_utf8"

    def __init__(self, data_dir: Path) -> None:
        super().__init__(
            "its name is not UTF-8",
            field="data_dir",
            value=os.fsencode(data_dir).decode("utf-8", "backslashreplace"),
            remedy="Rename it, or choose another with --data-dir.",
        )


class NotWritable(FailedPrecondition):
    """The data directory cannot be written."""

    default_kind = "data_dir_not_writable"

    def __init__(self, data_dir: Path, error: OSError) -> None:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        super().__init__(
            f"cannot be written: {error.strerror or error}",
            field="data_dir",
            value=data_dir,
            remedy=f"{'Free space there, or choose' if full else 'Choose'} another with "
            "--data-dir.",
        )
