"""Frames: messages on pipes and sockets, each with its length in front.

A frame is the length of its body in four bytes, big endian, and the body. Programs inside the
reward service's sandboxes cannot import Troupe, so services/reward/worker.py repeats the format.
"""

from __future__ import annotations

from typing import BinaryIO, Final, Protocol

HEADER_BYTES: Final = 4


class FrameTooLarge(ValueError):
    """A frame announces a body of more bytes than its reader accepts."""

    def __init__(self, size: int, most: int) -> None:
        super().__init__(f"a message of {size:,} bytes; {most:,} at most")
        self.size = size


class AsyncReader(Protocol):
    """A source for `read_frame`, such as an `asyncio.StreamReader`."""

    async def readexactly(self, size: int, /) -> bytes:
        """Return the next `size` bytes. Raises EOFError when the stream ends before."""


def frame(body: bytes) -> bytes:
    """Return the frame with this body."""
    return len(body).to_bytes(HEADER_BYTES, "big") + body


async def read_frame(stream: AsyncReader, most: int) -> bytes:
    """Read one frame and return its body, of at most `most` bytes.

    Raises EOFError when the stream ends before the frame does, and `FrameTooLarge`.
    """
    size = int.from_bytes(await stream.readexactly(HEADER_BYTES), "big")
    if size > most:
        raise FrameTooLarge(size, most)
    return await stream.readexactly(size)


def read_frame_from(file: BinaryIO) -> bytes | None:
    """Read one frame from a blocking file whose other end is trusted; None at its end."""
    header = file.read(HEADER_BYTES)
    if len(header) < HEADER_BYTES:
        return None
    return file.read(int.from_bytes(header, "big"))
