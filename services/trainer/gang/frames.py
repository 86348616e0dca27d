"""What the lead of a gang and its ranks tell each other: JSON and raw bytes, no pickle.

The lead and rank 0 share a Unix socket; the ranks pass frames on as tensors of bytes (group.py).
"""

from __future__ import annotations

import dataclasses
import json
import socket
import threading
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from safetensors.torch import load, save

from services.trainer.fields import rows_apart, rows_together
from services.trainer.rows import Row

_LENGTH_BYTES = 8


@dataclasses.dataclass(frozen=True)
class Frame:
    """An order, an answer or a sign of progress."""

    # Says what it is, and carries everything small; only what JSON can say.
    header: dict[str, Any]
    body: bytes = b""

    def encode(self) -> bytes:
        """Length of the header (8 bytes, little-endian), header, body."""
        header = json.dumps(self.header).encode()
        return len(header).to_bytes(_LENGTH_BYTES, "little") + header + self.body

    @classmethod
    def decode(cls, data: bytes) -> Frame:
        """Inverse of `encode`. Raises ValueError for bytes that are no frame."""
        end = _LENGTH_BYTES + int.from_bytes(data[:_LENGTH_BYTES], "little")
        header = json.loads(data[_LENGTH_BYTES:end])
        if not isinstance(header, dict):
            raise ValueError("the header of a frame is no object")
        return cls(header, data[end:])


class Channel:
    """One end of the socket between the lead and rank 0. Raises EOFError, OSError once cut."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(True)
        self._connection = Connection(connection.detach())
        self._sending = threading.Lock()

    @classmethod
    def to(cls, path: Path) -> Channel:
        """Connect to the lead that listens at `path`."""
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(str(path))
        return cls(connection)

    def send(self, frame: Frame) -> None:
        """Send it; any thread may."""
        with self._sending:
            self._connection.send_bytes(frame.encode())

    def receive(self, seconds: float) -> Frame | None:
        """The next frame, or None if none comes within `seconds`."""
        if not self._connection.poll(seconds):
            return None
        return Frame.decode(self._connection.recv_bytes())

    def close(self) -> None:
        """The other end sees EOFError."""
        self._connection.close()


def encode_rows(rows: Sequence[Row]) -> tuple[list[dict[str, Any]], bytes]:
    """Rows as what JSON can say, and their arrays as safetensors."""
    arrays, described = rows_apart(rows)
    return described, save(arrays)


def decode_rows(described: Sequence[dict[str, Any]], data: bytes) -> list[Row]:
    """Inverse of `encode_rows`, bit for bit."""
    return rows_together(load(data), described)
