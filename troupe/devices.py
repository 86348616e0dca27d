"""Devices that compute: their classes and memory, and how people write them.

`8xH100-80GB` is eight devices of class H100 with 80 GB each. Class and count may be left out
(`80GB`, `2x24GB`), and kinds are joined by `+` (`4xH100-80GB+2xL4-24GB`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from troupe.rpc import InvalidArgument

GIB: Final = 1 << 30

# Class of a device that is written without one.
_ANY_CLASS: Final = "gpu"
_KIND: Final = re.compile(
    r"(?:(?P<count>\d{1,6})x)?(?:(?P<name>[A-Za-z][\w.-]*?)-)?(?P<size>\d{1,6}(?:\.\d{1,3})?)"
    r"(?P<unit>GB|GiB|MB|MiB)",
    re.ASCII | re.IGNORECASE,
)
_MOST_DEVICES: Final = 1 << 16


@dataclass(frozen=True, slots=True)
class Device:
    """One device of a machine."""

    index: int
    device_class: str
    """What it is, such as "H100"."""
    memory: int
    """Bytes."""


def parse_devices(text: str, field: str = "devices") -> tuple[Device, ...]:
    """The devices that `text` describes, numbered from 0 in the order of the text.

    GB and MB are powers of two, as in what makers and drivers say of a device's memory. Raises
    InvalidArgument that names `field`.
    """
    found: list[Device] = []
    for part in text.split("+"):
        kind = _KIND.fullmatch(part.strip())
        if kind is None:
            raise InvalidArgument(
                f"{part.strip()!r} is not COUNTxCLASS-MEMORY",
                field=field,
                value=text,
                remedy="Write for example 8xH100-80GB, 2x24GB or 4xH100-80GB+2xL4-24GB.",
            )
        count = 1 if kind["count"] is None else int(kind["count"])
        memory = int(float(kind["size"]) * (GIB if kind["unit"][0] in "Gg" else GIB >> 10))
        if not count or not memory or len(found) + count > _MOST_DEVICES:
            raise InvalidArgument(
                f"{part.strip()!r} has {count} devices of {memory} bytes",
                field=field,
                value=text,
                remedy=f"Give 1 to {_MOST_DEVICES} devices in all, each with memory.",
            )
        name = kind["name"] or _ANY_CLASS
        first = len(found)
        found += [Device(first + n, name, memory) for n in range(count)]
    return tuple(found)
