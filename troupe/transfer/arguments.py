"""What callers say beside a state, checked before anything is read, hashed or waited for."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Mapping
from typing import Any, Final

from troupe.rpc.errors import InvalidArgument
from troupe.transfer.errors import InvalidKey
from troupe.transfer.manifest import version_in

SEGMENT: Final = re.compile(r"[A-Za-z0-9_@=-][A-Za-z0-9._@=-]*")
# A file's name holds 255: the segment, and beside it up to 40 more (`Part`, `sidecar`).
_MOST_SEGMENT, _MOST_KEY = 200, 1024
_MOST_VERSION = 2**63 - 1
# Nobody waits for longer, and gRPC can say it.
_MOST_SECONDS: Final = 1e8


def check_key(key: Any) -> None:
    """Raise InvalidKey unless a state can be stored under it."""
    if why := why_no_key(key):
        raise InvalidKey(str(key), why)


def why_no_key(key: Any) -> str:
    """Empty for a key."""
    segments = key.split("/") if isinstance(key, str) else [""]
    if not all(SEGMENT.fullmatch(segment) for segment in segments):
        return "is not a key"
    if len(key) > _MOST_KEY or max(map(len, segments)) > _MOST_SEGMENT:
        return f"is longer than {_MOST_KEY} characters, or a segment than {_MOST_SEGMENT}"
    if version_in(key) > _MOST_VERSION:
        return "has a version of more than 63 bits"
    return ""


def deadline_in(timeout: Any) -> float | None:
    """When `timeout` seconds from now are over, of the monotonic clock; None for 0 or None.

    Raises InvalidArgument for what is no number of seconds that ends ("nan" never would).
    """
    if timeout is None:
        return None
    if not isinstance(timeout, int | float) or not math.isfinite(timeout):
        raise InvalidArgument(
            "is no number of seconds",
            kind="transfer_timeout_invalid",
            field="timeout",
            value=timeout,
            remedy="Give a finite number, or 0 to not wait.",
        )
    return time.monotonic() + min(timeout, _MOST_SECONDS) if timeout else None


def metadata_of(metadata: Any) -> dict[str, str]:
    """A copy of it. Raises InvalidArgument for what is not text by text."""
    if metadata is None:
        return {}
    at: object = metadata
    if isinstance(metadata, Mapping):
        odd = [k for k, v in metadata.items() if type(k) is not str or type(v) is not str]
        if not odd:
            return dict(metadata)
        at = odd[0]
    raise InvalidArgument(
        f"is a {type(metadata).__qualname__} that is not text by text",
        kind="transfer_metadata_invalid",
        field="metadata",
        value=at,
        remedy="Give a mapping from str to str; write other values as JSON.",
    )


def check_prefix(prefix: Any) -> None:
    """Raise InvalidKey unless keys can be asked whether they start with it."""
    if not isinstance(prefix, str):
        raise InvalidKey(str(prefix), "is no text that keys could start with")


def check_checksum(expected: Any) -> None:
    """Raise InvalidArgument for what is neither None nor text."""
    if expected is not None and not isinstance(expected, str):
        raise InvalidArgument(
            f"is a {type(expected).__qualname__}",
            kind="transfer_checksum_invalid",
            field="expected_checksum",
            value=expected,
            remedy="Give `Manifest.checksum`, 32 hex digits.",
        )
