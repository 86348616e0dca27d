"""Checks of the arguments of `Transfer`, made before anything is read, hashed or waited for."""

from __future__ import annotations

import math
import os
import re
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Final

from troupe.rpc.errors import InvalidArgument
from troupe.transfer.blob import version_in
from troupe.transfer.errors import InvalidKey

SEGMENT: Final = re.compile(r"[A-Za-z0-9_@=-][A-Za-z0-9._@=-]*")
# A file name has at most 255 characters: a segment of a key, and up to 40 more of a partial file or
# a mark.
_MOST_SEGMENT, _MOST_KEY = 200, 1024
_MOST_VERSION = 2**63 - 1
# The longest timeout, which gRPC can still express.
_MOST_SECONDS: Final = 1e8


def check_key(key: Any) -> None:
    """Raise InvalidKey unless a state can be stored under it."""
    if why := why_no_key(key):
        raise InvalidKey(str(key), why)


def why_no_key(key: Any) -> str:
    """Return why `key` is not a key; "" for a key."""
    segments = key.split("/") if isinstance(key, str) else [""]
    if not all(SEGMENT.fullmatch(segment) for segment in segments):
        return "is not a key"
    if len(key) > _MOST_KEY or max(map(len, segments)) > _MOST_SEGMENT:
        return (
            f"is longer than {_MOST_KEY} characters, or has a segment longer than {_MOST_SEGMENT}"
        )
    if version_in(key) > _MOST_VERSION:
        return "has a version of more than 63 bits"
    return ""


def deadline_in(timeout: Any) -> float | None:
    """Return the end of `timeout` seconds from now, on the monotonic clock; None for 0 or None.

    Raises InvalidArgument for anything but a finite number.
    """
    if timeout is None:
        return None
    if not isinstance(timeout, int | float) or not math.isfinite(timeout):
        raise InvalidArgument(
            "is not a number of seconds",
            kind="transfer_timeout_invalid",
            field="timeout",
            value=timeout,
            remedy="Give a finite number, or 0 to not wait.",
        )
    return time.monotonic() + min(timeout, _MOST_SECONDS) if timeout else None


def metadata_of(metadata: Any) -> dict[str, str]:
    """Return a copy of `metadata`. Raises InvalidArgument unless it maps str to str."""
    if metadata is None:
        return {}
    at: object = metadata
    if isinstance(metadata, Mapping):
        odd = [k for k, v in metadata.items() if type(k) is not str or type(v) is not str]
        if not odd:
            return dict(metadata)
        at = odd[0]
    raise InvalidArgument(
        f"is a {type(metadata).__qualname__} that does not map text to text",
        kind="transfer_metadata_invalid",
        field="metadata",
        value=at,
        remedy="Give a mapping from str to str; write other values as JSON.",
    )


def check_checksum(expected: Any) -> None:
    """Raise InvalidArgument unless a checksum is text or None."""
    if expected is not None and not isinstance(expected, str):
        raise InvalidArgument(
            f"is a {type(expected).__qualname__}",
            kind="transfer_checksum_invalid",
            field="expected_checksum",
            value=expected,
            remedy="Give `Manifest.checksum`, 32 hex digits.",
        )


def roots_in(root: Any, fallback: Any) -> list[Path]:
    """Return the given directories, each once. Raises InvalidArgument for anything but a path."""
    given = {name: r for name, r in (("root", root), ("fallback", fallback)) if r is not None}
    for name, place in given.items():
        if not isinstance(place, str | os.PathLike):
            raise InvalidArgument(
                f"is a {type(place).__qualname__}, which does not name a directory",
                kind="transfer_root_unusable",
                field=name,
                value=place,
                remedy="Give a pathlib.Path, or nothing for the default.",
            )
    return list(dict.fromkeys(Path(place).absolute() for place in given.values()))


def peers_in(peers: Any) -> tuple[Any, ...]:
    """Return the sources to fetch from. Raises InvalidArgument for anything without `fetch`."""
    if not isinstance(peers, Collection) or isinstance(peers, str | bytes | Mapping):
        odd = peers
    elif (odd := next((p for p in peers if not callable(getattr(p, "fetch", None))), None)) is None:
        return tuple(peers)
    raise InvalidArgument(
        f"a {type(odd).__qualname__} is not a source to fetch from",
        kind="transfer_peers_invalid",
        field="peers",
        value=odd,
        remedy="Give a list of `troupe.transfer.remote.Peer` or other sources.",
    )
