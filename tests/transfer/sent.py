"""A state of another host, and a record of the parts that are sent."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from troupe.transfer import Transfer
from troupe.transfer.checksum import PIECE_BYTES
from troupe.transfer.remote import serving
from troupe.v1 import transfer_pb2 as transfer_pb

KEY = "job/solver/weights@3"


def state(mib: int = 0) -> dict[str, torch.Tensor]:
    return {
        "b": torch.arange(12, dtype=torch.float32).reshape(3, 4),
        "a": torch.randn(5, 2).to(torch.bfloat16),
        "empty": torch.empty(0, 3),
        "large": torch.arange(mib * 2**18, dtype=torch.int32),
    }


def leftovers(transfer: Transfer) -> list[Path]:
    """Return the files that take room: states, visible or not."""
    notes = (".lock", ".fetched", ".verified")
    files = (path for path in transfer.roots[0].rglob("*") if path.is_file())
    return [path for path in files if not path.name.endswith(notes)]


def corrupting(
    monkeypatch: pytest.MonkeyPatch, spoil: Callable[[int, bytearray], None]
) -> list[int]:
    """Change the owner's bytes after they were checksummed; return the chunks sent, in order."""
    sent: list[int] = []
    real = serving._message
    # Chunks of one message each.
    monkeypatch.setattr(serving, "MESSAGE_BYTES", PIECE_BYTES)

    def message(chunk: int, offset: int, view: memoryview) -> transfer_pb.StateChunk:
        sent.append(chunk)
        made = real(chunk, offset, view)
        data = bytearray(made.data)
        spoil(len(sent), data)
        made.data = bytes(data)
        return made

    monkeypatch.setattr(serving, "_message", message)
    return sent
