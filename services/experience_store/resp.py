"""What travels to and from a Redis server (RESP2), as far as the store speaks it.

redis-py makes the connection: addresses, TLS, passwords. Its own packing and parsing are for any
command, one argument and one line at a time; a row is several of each, and they took a fifth of the
store's work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

from redis import exceptions

Command = Sequence[str | bytes | memoryview | int | float]

# Longer parts travel as they are; shorter ones are copied into one text.
_LONG: Final = 4096


def pack(commands: Iterable[Command]) -> list[bytes | memoryview]:
    """Buffers to be written one behind another."""
    buffers: list[bytes | memoryview] = []
    short: list[bytes | memoryview] = []
    for command in commands:
        short.append(b"*%d\r\n" % len(command))
        for part in command:
            if isinstance(part, str):
                part = part.encode()
            elif isinstance(part, int | float):
                part = repr(part).encode()
            size = len(part)
            if size < _LONG:
                short += (b"$%d\r\n" % size, part, b"\r\n")
            else:
                short.append(b"$%d\r\n" % size)
                buffers += (b"".join(short), part)
                short = [b"\r\n"]
    buffers.append(b"".join(short))
    return buffers


class Replies:
    """Takes bytes as they come, gives the replies that are complete."""

    def __init__(self, error_of: Callable[[str], Exception]) -> None:
        """`error_of`: the exception of an error's text."""
        self._error_of = error_of
        # Not parsed yet. As long as it has less than `_wanted` bytes nothing can be.
        self._chunks: list[bytes] = []
        self._size = 0
        self._wanted = 1
        # Arrays that are not complete: elements that are to come, and those that are here.
        self._open: list[tuple[int, list[Any]]] = []

    def feed(self, data: bytes) -> list[Any]:
        """The replies that `data` completes; errors as exceptions. Raises `InvalidResponse` for
        what is no reply.
        """
        try:
            return self._read(data)
        except ValueError as error:  # a size or an integer that is no number
            raise exceptions.InvalidResponse(f"Protocol Error: {error}") from error

    def _read(self, data: bytes) -> list[Any]:
        self._chunks.append(data)
        self._size += len(data)
        found: list[Any] = []
        if self._size < self._wanted:
            return found
        text = data if len(self._chunks) == 1 else b"".join(self._chunks)
        at, end = 0, len(text)
        wanted = 1
        while at < end:
            line = text.find(b"\r\n", at)
            if line < 0:
                wanted = end - at + 1
                break
            kind, value, behind = text[at], text[at + 1 : line], line + 2
            reply: Any
            if kind == 36:  # $
                size = int(value)
                if size < 0:
                    reply = None
                elif behind + size + 2 > end:
                    wanted = behind + size + 2 - at
                    break
                else:
                    reply = text[behind : behind + size]
                    behind += size + 2
            elif kind == 58:  # :
                reply = int(value)
            elif kind == 43:  # +
                reply = value
            elif kind == 42:  # *
                size = int(value)
                if size > 0:
                    self._open.append((size, []))
                    at = behind
                    continue
                reply = None if size < 0 else []
            elif kind == 45:  # -
                reply = self._error_of(value.decode(errors="replace"))
            else:
                raise exceptions.InvalidResponse(f"Protocol Error: {text[at:line]!r}")
            at = behind
            while self._open:
                size, elements = self._open[-1]
                elements.append(reply)
                if len(elements) < size:
                    break
                self._open.pop()
                reply = elements
            else:
                found.append(reply)
        rest = text[at:]
        self._chunks, self._size, self._wanted = ([rest] if rest else []), len(rest), wanted
        return found
