"""Bearer tokens of the clusters that run on this machine: where they are kept, how they are found.

An embedded cluster has a token of its own, in a file of its data directory that only its user
reads. So that programs of that user need not be told which data directory an address belongs to,
the supervisor names both in a record below a directory that is this user's alone, and holds a lock
on it for as long as it lives: what a dead cluster left is never believed.

Browsers cannot send a token, so the panel takes sessions: a link with a code that is good once
(`LinkCodes`) opens one, a cookie carries it. Both are signed with the token, and end with it.
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

from troupe.rpc.addresses import host_of, is_loopback_host
from troupe.scratch import memory_root, private_directory

_LINK_SECONDS: Final = 24 * 3600.0
_SESSION_SECONDS: Final = 7 * 24 * 3600.0


def read_token(path: Path) -> SecretStr | None:
    """The token in the file `path`; None when there is none, or when others may have put it there.

    Only a plain file of this user is read that nobody else may read or write.
    """
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
    """Whether only this machine answers at `address` ("host:port")."""
    return is_loopback_host(host_of(address))


def local_token(address: str) -> SecretStr | None:
    """The token of this user's embedded cluster of which a service is at `address` ("host:port").

    None for addresses of other machines, and where no such cluster runs.
    """
    if not is_loopback_address(address):
        return None
    wanted = f"127.0.0.1:{address.rpartition(':')[2]}"
    try:
        records = list(_records().glob("*.json"))
    except OSError:
        return None
    for path in records:
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
            record = _read_live(path)
            if record is not None and wanted in record["addresses"]:
                return read_token(Path(record["token_file"]))
    return None


class ClusterRecord:
    """Says, for as long as it is open, which token the services at some addresses take."""

    def __init__(self, cluster_id: str, token_file: Path, addresses: Iterable[str]) -> None:
        """Raises OSError: the directory of records is another user's, or memory is full."""
        directory = private_directory(_records())
        _sweep(directory)
        self._path = directory / f"{cluster_id}.json"
        # Under another name until it is locked: whoever finds one that is not, removes it.
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
        """The addresses are free again."""
        self._path.unlink(missing_ok=True)
        os.close(self._descriptor)


class LinkCodes:
    """Codes of links that sign a browser in, each once, and the sessions that they open."""

    def __init__(self, token: SecretStr) -> None:
        """Codes that were made before this moment are not taken: who made this knew of no use."""
        self._key = token.get_secret_value().encode()
        self._since = time.time()
        self._used: dict[str, float] = {}

    def redeem(self, code: str) -> bool:
        """Whether `code` is good, which it is once."""
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
        """A new session, as a cookie carries it."""
        return _signed(self._key, "session", time.time())

    def is_session(self, cookie: str) -> bool:
        """Whether `cookie` is a session that is still open."""
        made = self._made(cookie, "session")
        return made is not None and made > time.time() - _SESSION_SECONDS

    def _made(self, text: str, purpose: str) -> float | None:
        """When `text` was signed for `purpose`; None: it was not."""
        body, _, signature = text.rpartition(".")
        expected = _signature(self._key, purpose, body)
        if not hmac.compare_digest(signature.encode("utf-8", "replace"), expected.encode()):
            return None
        return float(int(body.partition(".")[0]))


def one_time_link(panel_url: str, token: SecretStr) -> str:
    """An address of the panel at `panel_url` that signs in the browser which opens it first."""
    # Rounded up: never before the panel's start within the second in which it started.
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
    """The record at `path` if its supervisor lives; it must be this user's, and so its directory.

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
    """Remove what clusters left whose supervisor was killed."""
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
