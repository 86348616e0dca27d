"""Finds the orchestrator when nobody says where it is, and how it may be called."""

from __future__ import annotations

import os
import re
from pathlib import Path

from troupe.cluster.access import token_path
from troupe.cluster.errors import NoCluster
from troupe.cluster.settings import DEFAULT_DATA_DIR, require_utf8
from troupe.cluster.state import running_state
from troupe.rpc.errors import InvalidArgument, TroupeError
from troupe.rpc.settings import ClientSettings
from troupe.rpc.tokens import is_loopback_address, local_token, read_token

ADDRESS_VARIABLE = "TROUPE_ORCHESTRATOR_ADDRESS"
DATA_DIR_VARIABLE = "TROUPE_DATA_DIR"
_ADDRESS = re.compile(r"(\[[0-9a-fA-F:.]+\]|[\w.-]+):([0-9]{1,5})")


def data_directory(given: Path | None = None) -> Path:
    """`given`, else `TROUPE_DATA_DIR`, else `runs` here; absolute. Raises `NotUtf8`."""
    chosen = given or Path(os.environ.get(DATA_DIR_VARIABLE) or DEFAULT_DATA_DIR)
    return require_utf8(chosen.expanduser().absolute())


def resolve_address(given: str | None = None, data_dir: Path | None = None) -> str:
    """The orchestrator's "host:port".

    `given`, else `TROUPE_ORCHESTRATOR_ADDRESS`, else that of the embedded cluster that runs in
    the data directory. Raises `InvalidArgument` or `NoCluster`.
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
    """How to call the orchestrator at `address`, as far as the caller does not say.

    An embedded cluster of this user takes its own token, which it keeps in its data directory, and
    speaks without TLS, whatever `TROUPE_*` say of others. Raises `InvalidArgument`.
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
    """Whether the orchestrator at `address` is that of the cluster that runs in `directory`."""
    if not is_loopback_address(address):
        return False
    try:
        state = running_state(directory)
    except TroupeError:  # whoever was given an address needs no data directory
        return False
    return state is not None and state.orchestrator_address == address


def check_address(address: str) -> str:
    """`address`, or `InvalidArgument` when it is not host:port."""
    match = _ADDRESS.fullmatch(address)
    if match is None or not 0 < int(match.group(2)) < 65536:
        raise InvalidArgument(
            "this is not an address.",
            field="address",
            value=address,
            remedy="Give host:port of the orchestrator, for example 127.0.0.1:50051.",
        )
    return address
