"""Where a client finds its cluster: its data directory, its address, its token."""

from __future__ import annotations

import os
import re
from pathlib import Path

from troupe.cluster.errors import NoCluster
from troupe.cluster.settings import DEFAULT_DATA_DIR, require_utf8
from troupe.cluster.state import running_state, token_path
from troupe.rpc.errors import InvalidArgument, TroupeError
from troupe.rpc.settings import ClientSettings
from troupe.rpc.tokens import is_loopback_address, local_token, read_token

ADDRESS_VARIABLE = "TROUPE_ORCHESTRATOR_ADDRESS"
DATA_DIR_VARIABLE = "TROUPE_DATA_DIR"
_ADDRESS = re.compile(r"(\[[0-9a-fA-F:.]+\]|[\w.-]+):([0-9]{1,5})")


def data_directory(given: Path | None = None) -> Path:
    """Return the data directory as an absolute path: `given`, else `TROUPE_DATA_DIR`, else `runs`
    in the working directory. Raises `NotUtf8`."""
    chosen = given or Path(os.environ.get(DATA_DIR_VARIABLE) or DEFAULT_DATA_DIR)
    return require_utf8(chosen.expanduser().absolute())


def resolve_address(given: str | None = None, data_dir: Path | None = None) -> str:
    """Return the orchestrator's "host:port".

    It is `given`, else `TROUPE_ORCHESTRATOR_ADDRESS`, else the address of the embedded cluster that
    runs in the data directory. Raises `InvalidArgument` or `NoCluster`.
    """
    address = given or os.environ.get(ADDRESS_VARIABLE)
    if address:
        return check_address(address)
    directory = data_directory(data_dir)
    state = running_state(directory)
    if state is None:
        raise NoCluster(directory)
    return state.orchestrator_address


def settings_for(address: str, data_dir: Path | None = None) -> ClientSettings:
    """Return the default client settings for the orchestrator at `address`, read from `TROUPE_*`.

    For an embedded cluster of this user, the token comes from its data directory and TLS is off,
    whatever `TROUPE_*` say. Raises `InvalidArgument`.
    """
    settings = ClientSettings.of_environment()
    token = local_token(address)
    if token is None:
        if not _runs_in(directory := data_directory(data_dir), address):
            return settings
        token = read_token(token_path(directory)) or settings.token
    return settings.model_copy(
        update={"token": token, "tls_ca": None, "tls_cert": None, "tls_key": None}
    )


def _runs_in(directory: Path, address: str) -> bool:
    """Return whether the cluster that runs in `directory` has its orchestrator at `address`."""
    if not is_loopback_address(address):
        return False
    try:
        state = running_state(directory)
    except TroupeError:  # the address is given, so an unreadable data directory does not matter
        return False
    return state is not None and state.orchestrator_address == address


def check_address(address: str) -> str:
    """Return `address`. Raises `InvalidArgument` when it is not host:port."""
    match = _ADDRESS.fullmatch(address)
    if match is None or not 0 < int(match.group(2)) < 65536:
        raise InvalidArgument(
            "is not an address",
            field="address",
            value=address,
            remedy="Give the orchestrator's host:port, for example 127.0.0.1:50051 or [::1]:50051.",
        )
    return address
