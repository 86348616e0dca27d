"""Protobuf's wire format: long messages put together from serialized ones, and taken apart."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Final

# Wire types: of strings, bytes and messages; of numbers; of numbers of 8 and 4 bytes.
_DELIMITED: Final = 2
_VARINT: Final = 0
_FIXED: Final = {1: 8, 5: 4}


# Rows of one job are of few different lengths.
@functools.lru_cache(maxsize=4096)
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


def spans(data: bytes, start: int, end: int, field: int) -> list[tuple[int, int]]:
    """Where the strings, bytes or messages of field `field` lie in the message data[start:end],
    which has been parsed before: nothing is checked.
    """
    found = []
    at = start
    while at < end:
        key, at = _varint_at(data, at)
        kind = key & 7
        if kind == _DELIMITED:
            length, at = _varint_at(data, at)
            if key >> 3 == field:
                found.append((at, at + length))
            at += length
        elif kind == _VARINT:
            _, at = _varint_at(data, at)
        elif kind in _FIXED:
            at += _FIXED[kind]
        else:
            # Groups, which proto3 does not have.
            return []
    return found


def _varint_at(data: bytes, at: int) -> tuple[int, int]:
    byte = data[at]
    at += 1
    if byte < 0x80:
        return byte, at
    number, shift = byte & 0x7F, 7
    while True:
        byte = data[at]
        at += 1
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            return number, at
        shift += 7
