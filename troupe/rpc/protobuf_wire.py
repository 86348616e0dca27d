"""Protobuf's wire format: joins serialized messages into longer ones, and splits them.

The store and its clients handle rows without parsing them; `services/experience_store/samples.py`
and `claims.py` give the gain.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Final

from google.protobuf.message import DecodeError

# Wire types: of strings, bytes and messages; of numbers; of numbers of 8 and 4 bytes.
_DELIMITED: Final = 2
_VARINT: Final = 0
_FIXED: Final = {1: 8, 5: 4}


# Cached: rows of one job have few different lengths.
@functools.lru_cache(maxsize=4096)
def varint(number: int) -> bytes:
    """Return the encoding of a number that is not negative: seven bits per byte, lowest first."""
    found = bytearray()
    while number > 0x7F:
        found.append(number & 0x7F | 0x80)
        number >>= 7
    found.append(number)
    return bytes(found)


def tag(field: int) -> bytes:
    """Return the tag of a string, bytes or message in field `field`."""
    return varint(field << 3 | _DELIMITED)


def repeated(field: int, messages: Iterable[bytes]) -> list[bytes]:
    """Return the parts, to be joined, of a message whose field `field` holds these messages."""
    start = tag(field)
    parts: list[bytes] = []
    for message in messages:
        parts += (start, varint(len(message)), message)
    return parts


def fields(data: bytes, start: int, end: int) -> list[tuple[int, int, int, int]]:
    """Yield the fields of the message data[start:end] in order: field number, its offset, and the
    offsets where its string, bytes or message begins (for a number: where it ends) and ends.

    Raises `DecodeError` if the data are not a message.
    """
    found = []
    at = start
    try:
        while at < end:
            begin = at
            key, at = _varint_at(data, at)
            kind = key & 7
            value = at
            if kind == _DELIMITED:
                length, value = _varint_at(data, at)
                at = value + length
            elif kind == _VARINT:
                _, at = _varint_at(data, at)
                value = at
            elif kind in _FIXED:
                at += _FIXED[kind]
                value = at
            else:
                # Groups, which proto3 does not have.
                raise DecodeError(f"a field of kind {kind}")
            found.append((key >> 3, begin, value, at))
    except IndexError:
        at = len(data) + 1
    if at != end:
        raise DecodeError("a field is longer than its message")
    return found


def split(data: bytes, start: int, end: int, field: int) -> tuple[bytes, list[tuple[int, int]]]:
    """Return the message data[start:end] without its field `field`, and the ranges of that field's
    strings, bytes or messages. Raises `DecodeError` if the data are not a message.
    """
    rest: list[bytes] = []
    found: list[tuple[int, int]] = []
    kept = start
    for number, begin, value, behind in fields(data, start, end):
        # A field of this number and another wire type is unknown, and kept.
        if number == field and data[begin] & 7 == _DELIMITED:
            rest.append(data[kept:begin])
            found.append((value, behind))
            kept = behind
    rest.append(data[kept:end])
    return b"".join(rest), found


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
