"""Bearer tokens of clusters on this machine, and sign-in links of the control panel.

An embedded cluster keeps its token in a file of its data directory that only its user can read. The
supervisor writes the token's file and the addresses into a record in a private directory, so that
the user's programs find the token by address. It locks the record while it lives; records without a
lock are ignored.

Browsers cannot send a token. A link with a one-time code (`LinkCodes`) opens a session, which a
cookie carries. Both are signed with the token and become invalid with it.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import hmac
import json
import os
import secrets
import stat
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from pydantic import SecretStr

from troupe.disks import memory_root, private_directory
from troupe.rpc.addresses import (
    LOOPBACKS,
    host_of,
    is_loopback_host,
    join_address,
    split_address,
)

_LINK_SECONDS: Final = 24 * 3600.0
_SESSION_SECONDS: Final = 7 * 24 * 3600.0


def read_token(path: Path) -> SecretStr | None:
    """Return the token in the file `path`; None unless it is a regular file of this user with no
    access for others."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(file.fileno())
        private = stat.S_ISREG(status.st_mode) and status.st_mode & 0o077 == 0
        if not private or status.st_uid != os.geteuid():
            return None
        text = file.read(4096).decode("ascii", errors="replace").strip()
    return SecretStr(text) if text and text.isascii() and text.isprintable() else None


def is_loopback_address(address: str) -> bool:
    """Return whether `address` ("host:port") is loopback."""
    return is_loopback_host(host_of(address))


def local_token(address: str) -> SecretStr | None:
    """Return the token of this user's embedded cluster that has a service at `address`
    ("host:port").

    None for other machines, and where no such cluster runs.
    """
    if not is_loopback_address(address):
        return None
    host, port = split_address(address)
    # A name may mean either family.
    hosts = LOOPBACKS if host.lower() == "localhost" else (host,)
    wanted = {join_address(host, port) for host in hosts}
    try:
        records = list(_records().glob("*.json"))
    except OSError:
        return None
    for path in records:
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
            record = _read_live(path)
            if record is not None and not wanted.isdisjoint(record["addresses"]):
                return read_token(Path(record["token_file"]))
    return None


class ClusterRecord:
    """The record of a running cluster: token file and addresses, locked while it is open."""

    def __init__(self, cluster_id: str, token_file: Path, addresses: Iterable[str]) -> None:
        """Write the record. Raises OSError for another user's directory or a full disk."""
        directory = private_directory(_records())
        _sweep(directory)
        self._path = directory / f"{cluster_id}.json"
        # Renamed once it is locked: other processes remove records without a lock.
        draft = self._path.with_suffix(".new")
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        self._descriptor = os.open(draft, flags, 0o600)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX)
            record = {"token_file": str(token_file), "addresses": sorted(addresses)}
            os.write(self._descriptor, json.dumps(record).encode())
            draft.rename(self._path)
        except OSError:
            draft.unlink(missing_ok=True)
            os.close(self._descriptor)
            raise

    def close(self) -> None:
        """Remove the record."""
        self._path.unlink(missing_ok=True)
        os.close(self._descriptor)


class LinkCodes:
    """The one-time codes of sign-in links, and the sessions that they open."""

    def __init__(self, token: SecretStr) -> None:
        """Refuse codes from before now, because they may have been used."""
        self._key = token.get_secret_value().encode()
        self._since = time.time()
        self._used: dict[str, float] = {}

    def redeem(self, code: str) -> bool:
        """Accept a valid code once; return False for other codes."""
        now = time.time()
        self._used = {one: made for one, made in self._used.items() if made > now - _LINK_SECONDS}
        made = self._made(code, "link")
        if made is None or code in self._used or made < self._since:
            return False
        if made < now - _LINK_SECONDS:
            return False
        self._used[code] = made
        return True

    def session(self) -> str:
        """Return the cookie value of a new session."""
        return _signed(self._key, "session", time.time())

    def is_session(self, cookie: str) -> bool:
        """Return whether `cookie` is a valid session."""
        made = self._made(cookie, "session")
        return made is not None and made > time.time() - _SESSION_SECONDS

    def _made(self, text: str, purpose: str) -> float | None:
        """Return the time at which `text` was signed for `purpose`; None: invalid signature."""
        body, _, signature = text.rpartition(".")
        expected = _signature(self._key, purpose, body)
        if not hmac.compare_digest(signature.encode("utf-8", "replace"), expected.encode()):
            return None
        return float(int(body.partition(".")[0]))


def one_time_link(panel_url: str, token: SecretStr) -> str:
    """Return a link to the panel at `panel_url` that signs in the first browser that opens it."""
    # Round up, so that the time is not before the panel's start in the same second.
    code = _signed(token.get_secret_value().encode(), "link", time.time() + 1)
    return f"{panel_url}/session?code={code}"


def _signed(key: bytes, purpose: str, made: float) -> str:
    body = f"{int(made)}.{secrets.token_urlsafe(16)}"
    return f"{body}.{_signature(key, purpose, body)}"


def _signature(key: bytes, purpose: str, body: str) -> str:
    return hmac.new(key, f"{purpose}.{body}".encode("utf-8", "replace"), hashlib.sha256).hexdigest()


def _records() -> Path:
    return memory_root() / f"troupe-{os.geteuid()}-clusters"


def _read_live(path: Path) -> dict[str, Any] | None:
    """Return the record at `path` if its supervisor lives; file and directory must be this user's.

    Raises OSError, ValueError.
    """
    directory = path.parent.lstat()
    if not stat.S_ISDIR(directory.st_mode) or directory.st_uid != os.geteuid():
        return None
    if directory.st_mode & 0o022:
        return None
    with open(path, "rb", opener=_no_link) as file:
        if os.fstat(file.fileno()).st_uid != os.geteuid() or not _is_locked(file.fileno()):
            return None
        record: dict[str, Any] = json.loads(file.read(1 << 16))
    return record


def _sweep(directory: Path) -> None:
    """Remove records of clusters whose supervisor was killed."""
    for path in directory.glob("*.json"):
        with contextlib.suppress(OSError), open(path, "rb", opener=_no_link) as file:
            if not _is_locked(file.fileno()):
                path.unlink()


def _is_locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    fcntl.flock(descriptor, fcntl.LOCK_UN)
    return False


def _no_link(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC)
