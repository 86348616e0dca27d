"""Protobuf's wire format where long messages are put together from serialized ones, uncopied."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

# Wire type of strings, bytes and messages.
_DELIMITED: Final = 2


def varint(number: int) -> bytes:
    """A number that is not negative, seven bits to a byte, the lowest first."""
    found = bytearray()
    while number > 0x7F:
        found.append(number & 0x7F | 0x80)
        number >>= 7
    found.append(number)
    return bytes(found)


def tag(field: int) -> bytes:
    """What stands before the length of a string, bytes or message in field `field`."""
    return varint(field << 3 | _DELIMITED)


def repeated(field: int, messages: Iterable[bytes]) -> list[bytes]:
    """Parts of a message whose field `field` holds these serialized messages; to be joined."""
    start = tag(field)
    parts: list[bytes] = []
    for message in messages:
        parts += (start, varint(len(message)), message)
    return parts
