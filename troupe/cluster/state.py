"""The private files of a cluster under `data_dir/.troupe/`: its state, its lock and its token.

Every user of a machine reaches its loopback ports, so services require a token. Only the user who
started the cluster can read the token's file.

The supervisor holds the lock for as long as it lives; the kernel drops it with the process. A
state file whose lock is free is therefore stale, whatever process ids it names.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import secrets
import signal
import stat
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final, Literal

import psutil
from pydantic import BaseModel, ConfigDict, SecretStr, ValidationError

from troupe.cluster.errors import (
    ChildNotReady,
    ClusterRunning,
    CommonDirectory,
    NoCluster,
    NotPrivate,
    NotWritable,
    StateUnreadable,
)
from troupe.disks import is_common, strangers_part
from troupe.rpc.settings import ClientSettings
from troupe.rpc.tokens import one_time_link, read_token

TOKEN_VARIABLE: Final = "TROUPE_TOKEN"
# Folders with secrets or logs, whose files are made private one by one; the mode of the data
# directory protects the rest.
_SECRET_FOLDERS: Final = (".troupe", "logs", "redis")
_TOKEN_BYTES: Final = 32
# How long to try for a lock that another supervisor may hold.
_LOCK_SECONDS: Final = 0.2
Phase = Literal["starting", "ready", "stopping", "stopped", "failed"]


class ServiceRecord(BaseModel):
    """One process of the cluster."""

    model_config = ConfigDict(frozen=True)

    name: str
    state: str
    address: str
    metrics_address: str = ""
    probe: str
    pid: int | None = None
    # Start time of process `pid` in seconds since the epoch, which tells it from a later one.
    created: float | None = None
    restarts: int = 0
    log: Path


class ClusterState(BaseModel):
    """The contents of the state file: phase, addresses and processes, with the Redis password."""

    model_config = ConfigDict(frozen=True)

    format: Literal[1] = 1
    cluster_id: str
    phase: Phase
    message: str = ""
    supervisor_pid: int
    supervisor_created: float
    started_at: float
    data_dir: Path
    transfer_dir: Path
    redis_url: str
    orchestrator_address: str
    panel_url: str = ""
    # The longest time that stopping it takes.
    stop_seconds: float = 60.0
    services: list[ServiceRecord] = []


def state_path(data_dir: Path) -> Path:
    """Return the path of the state file of the cluster in `data_dir`."""
    return data_dir / ".troupe" / "cluster.json"


def write_state(state: ClusterState) -> None:
    """Replace the state file atomically."""
    path = state_path(state.data_dir)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    fresh = path.with_suffix(".new")
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(state.model_dump_json(indent=2))
    fresh.replace(path)


def read_state(data_dir: Path) -> ClusterState | None:
    """Return the last state written, perhaps of an ended cluster; None if there is none.

    Raises `StateUnreadable` when the file is damaged.
    """
    path = state_path(data_dir)
    try:
        return ClusterState.model_validate(json.loads(path.read_bytes()))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, ValidationError) as error:
        raise StateUnreadable(
            "cannot be read",
            field="cluster state",
            value=path,
            remedy="Stop the processes that `ps` shows for it, then delete the file.",
        ) from error


def running_state(data_dir: Path) -> ClusterState | None:
    """Return the state of the cluster that runs in `data_dir`; None if none runs."""
    if not is_locked(data_dir):
        return None
    # The supervisor locks before it writes: for a moment the file is missing or old.
    deadline = time.monotonic() + 2
    while time.monotonic() < deadline:
        state = read_state(data_dir)
        if state is not None and is_alive(state.supervisor_pid, state.supervisor_created):
            return state
        if not is_locked(data_dir):
            return None
        time.sleep(0.05)
    return None


def require_running(data_dir: Path) -> ClusterState:
    """Return `running_state`. Raises `NoCluster` if no cluster runs."""
    state = running_state(data_dir)
    if state is None:
        raise NoCluster(data_dir)
    return state


class ClusterLock:
    """The lock that a data directory's only supervisor holds."""

    def __init__(self, data_dir: Path) -> None:
        self._data_dir = data_dir
        self._descriptor: int | None = None

    def acquire(self) -> None:
        """Take the lock. Raises `ClusterRunning`."""
        path = _lock_path(self._data_dir)
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        deadline = time.monotonic() + _LOCK_SECONDS
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() < deadline:
                    time.sleep(0.005)  # another process's `is_locked` holds it for a moment
                    continue
                os.close(descriptor)
                state = read_state(self._data_dir)
                running = state.supervisor_pid if state else None
                raise ClusterRunning(self._data_dir, running) from None
        self._descriptor = descriptor

    def release(self) -> None:
        """Release the lock if it is held."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def is_locked(data_dir: Path) -> bool:
    """Return whether a supervisor holds the lock of `data_dir`."""
    try:
        # Open for reading: users can inspect and stop a cluster whose disk became read-only.
        descriptor = os.open(_lock_path(data_dir), os.O_RDONLY)
    except FileNotFoundError:
        return False
    except OSError as error:  # not a directory, or not one of this user
        raise NotWritable(data_dir, error) from error
    try:
        # Take a shared lock, so that two concurrent checks do not see each other's lock.
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def created_at(pid: int) -> float | None:
    """Return the start time of process `pid`; None if it does not exist."""
    with suppress(psutil.Error):
        return float(psutil.Process(pid).create_time())
    return None


def is_alive(pid: int | None, created: float | None) -> bool:
    """Return whether process `pid` that started at `created` still runs and is not a zombie."""
    if pid is None or created is None:
        return False
    with suppress(psutil.Error):
        process = psutil.Process(pid)
        same = abs(process.create_time() - created) < 1.0
        return same and process.status() != psutil.STATUS_ZOMBIE
    return False


def _lock_path(data_dir: Path) -> Path:
    return data_dir / ".troupe" / "cluster.lock"


async def end_orphans(state: ClusterState | None, *, timeout: float) -> list[str]:
    """End the processes in `state` that still run; return their names.

    They get SIGTERM, and SIGKILL after `timeout` seconds. A process is signalled only if its start
    time matches the record: its id may have been reused.
    """
    if state is None:
        return []
    orphans = [s for s in state.services if is_alive(s.pid, s.created)]
    left = await _end(orphans, signal.SIGTERM, timeout)
    left = await _end(left, signal.SIGKILL, 5.0)
    if left:
        raise ChildNotReady(
            left[0].name, left[0].address, timeout, "it does not end even when killed", left[0].log
        )
    return [s.name for s in orphans]


async def _end(
    services: list[ServiceRecord], how: signal.Signals, timeout: float
) -> list[ServiceRecord]:
    for service in services:
        assert service.pid is not None  # is_alive
        with suppress(ProcessLookupError):
            if how == signal.SIGKILL:
                os.killpg(service.pid, how)  # every child leads its own group
            else:
                os.kill(service.pid, how)
    deadline = time.monotonic() + timeout
    while services and time.monotonic() < deadline:
        await asyncio.sleep(0.05)
        services = [s for s in services if is_alive(s.pid, s.created)]
    return services


def token_path(data_dir: Path) -> Path:
    """Return the path of the file with the token of the cluster in `data_dir`."""
    return data_dir / ".troupe" / "token"


def require_token(data_dir: Path, environment: Mapping[str, str]) -> SecretStr:
    """Return the token of the cluster in `data_dir`; make and store one if it is missing.

    `TROUPE_TOKEN` in `environment` (the services' own variables), else in this process, overrides
    the stored token. Raises OSError when the file cannot be written, InvalidArgument for a token
    that a header cannot carry.
    """
    given = environment.get(TOKEN_VARIABLE)
    chosen = ClientSettings(token=SecretStr(given)).token if given else None
    chosen = chosen or ClientSettings.of_environment().token
    path = token_path(data_dir)
    kept = read_token(path)
    if chosen is None:
        chosen = kept or SecretStr(secrets.token_urlsafe(_TOKEN_BYTES))
    if kept != chosen:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        fresh = path.with_name(".token.new")
        fresh.unlink(missing_ok=True)
        descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(chosen.get_secret_value() + "\n")
        fresh.replace(path)
    return chosen


def sign_in_link(state: ClusterState) -> str:
    """Return a link that signs one browser in to the panel, once; empty without a panel."""
    token = read_token(token_path(state.data_dir))
    return one_time_link(state.panel_url, token) if state.panel_url and token else ""


def close_to_others(data_dir: Path) -> None:
    """Set the mode of `data_dir` to 0700, and of the files in its folders of secrets to 0600.

    Raises `NotPrivate` if another user owns the directory, one of its entries, a file in its
    folders of secrets, or a link or directory on the path to it where every user may write: that
    user could put code there for this one to run. Raises `CommonDirectory`, OSError.
    """
    if is_common(data_dir):
        raise CommonDirectory(data_dir)
    if (found := strangers_part(data_dir)) is not None:
        raise NotPrivate(data_dir, *found)
    data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    _make_private(data_dir, data_dir.stat(), data_dir)
    for entry in data_dir.iterdir():
        # A mount, or an earlier start as root, leaves entries owned by root.
        if (owner := entry.lstat().st_uid) not in (0, os.geteuid()):
            raise NotPrivate(data_dir, entry, owner)
    for name in _SECRET_FOLDERS:
        folder = data_dir / name
        with suppress(FileNotFoundError):
            _make_private(folder, folder.lstat(), data_dir)
            for path in sorted(folder.rglob("*")):
                _make_private(path, path.lstat(), data_dir)


def _make_private(path: Path, status: os.stat_result, data_dir: Path) -> None:
    if status.st_uid != os.geteuid():
        raise NotPrivate(data_dir, path, status.st_uid)
    mode = stat.S_IMODE(status.st_mode)
    if mode & 0o077 and not stat.S_ISLNK(status.st_mode):
        path.chmod(0o700 if stat.S_ISDIR(status.st_mode) else mode & 0o700)
