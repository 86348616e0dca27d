"""Access to an embedded cluster: the token of its services, and its data directory's permissions.

Every user of a machine reaches its loopback ports, so services ask for a token. The token's file
is readable by the user who started the cluster alone.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from pydantic import SecretStr

from troupe.cluster.errors import NotPrivate
from troupe.cluster.state import ClusterState
from troupe.rpc.settings import ClientSettings
from troupe.rpc.tokens import one_time_link, read_token

TOKEN_VARIABLE: Final = "TROUPE_TOKEN"
# Folders with secrets or logs, whose files are made private one by one; the rest is protected by
# the mode of the data directory.
_SECRET_FOLDERS: Final = (".troupe", "logs", "redis")
_TOKEN_BYTES: Final = 32


def token_path(data_dir: Path) -> Path:
    """The file with the token of the cluster of `data_dir`."""
    return data_dir / ".troupe" / "token"


def require_token(data_dir: Path, environment: Mapping[str, str]) -> SecretStr:
    """The token of the cluster of `data_dir`, made and stored when there is none.

    `TROUPE_TOKEN` of `environment` (the services' own variables), else of this process, overrides
    the stored one. Raises OSError when the file cannot be written, InvalidArgument for a token that
    no header can carry.
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
    """A link that signs one browser in at the panel, once; empty where there is no panel."""
    token = read_token(token_path(state.data_dir))
    return one_time_link(state.panel_url, token) if state.panel_url and token else ""


def close_to_others(data_dir: Path) -> None:
    """Make `data_dir` 0700, and the files in its folders of secrets 0600.

    Raises `NotPrivate` where the directory, or a file in its folders of secrets, belongs to another
    user, who could have put code there that this one would run; OSError.
    """
    data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    _make_private(data_dir, data_dir.stat(), data_dir)
    for name in _SECRET_FOLDERS:
        folder = data_dir / name
        with contextlib.suppress(FileNotFoundError):
            _make_private(folder, folder.lstat(), data_dir)
            for path in sorted(folder.rglob("*")):
                _make_private(path, path.lstat(), data_dir)


def _make_private(path: Path, status: os.stat_result, data_dir: Path) -> None:
    if status.st_uid != os.geteuid():
        raise NotPrivate(data_dir, path, status.st_uid)
    mode = stat.S_IMODE(status.st_mode)
    if mode & 0o077 and not stat.S_ISLNK(status.st_mode):
        path.chmod(0o700 if stat.S_ISDIR(status.st_mode) else mode & 0o700)
