"""Suspended states in parts: every rank of a gang stores its own shards, and takes back its own.

A part is a state of the transfer layer with boxes of tensors. `StoredParts` says which box of which
tensor is where, so that a reader with another layout (more ranks, fewer, or one device) takes the
boxes that it needs from several parts. The description is a tensor of the suspended state itself
(`PARTS`): the checksum of the state covers its parts' checksums.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from services.chassis.transfer import HostTransfer
from troupe.checkpoints.adapters import Tensors
from troupe.transfer.checksum import dtype_name, dtype_of

# Name of the tensor of a suspended state that describes its parts.
PARTS: Final = "parts"


@dataclass(frozen=True)
class Box:
    """A part of a tensor: in each dimension, where it begins and how far it reaches."""

    offset: tuple[int, ...]
    size: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        """Return the box of all of a tensor."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def count(self) -> int:
        """Number of elements."""
        return math.prod(self.size)

    def common(self, other: Box) -> Box:
        """Return the part that both have; of no elements where there is none."""
        begins = tuple(map(max, self.offset, other.offset))
        mine, theirs = self._ends(), other._ends()
        sizes = (max(0, min(a, b) - at) for a, b, at in zip(mine, theirs, begins, strict=True))
        return Box(begins, tuple(sizes))

    def within(self, other: Box) -> tuple[slice, ...]:
        """Return the slices of this box in a tensor that holds `other`, which contains it."""
        starts = (a - b for a, b in zip(self.offset, other.offset, strict=True))
        return tuple(slice(at, at + n) for at, n in zip(starts, self.size, strict=True))

    def _ends(self) -> tuple[int, ...]:
        return tuple(a + n for a, n in zip(self.offset, self.size, strict=True))


@dataclass(frozen=True)
class StoredPart:
    """A part of a suspended state: its key in the transfer layer, and its boxes by tensor name."""

    key: str
    checksum: str
    num_bytes: int
    # "host:port" of transfer owners that had it when it was stored.
    holders: tuple[str, ...]
    boxes: Mapping[str, Box]

    def to_fields(self) -> dict[str, Any]:
        """Return its fields as plain values (JSON)."""
        boxes = {name: [box.offset, box.size] for name, box in self.boxes.items()}
        return {**vars(self), "boxes": boxes}

    @classmethod
    def of_fields(cls, fields: Mapping[str, Any]) -> StoredPart:
        """Restore a part from the result of `to_fields`."""
        boxes = {
            name: Box(tuple(offset), tuple(size))
            for name, (offset, size) in fields["boxes"].items()
        }
        return cls(**{**fields, "holders": tuple(fields["holders"]), "boxes": boxes})


def store_part(
    transfer: HostTransfer, key: str, tensors: Mapping[str, torch.Tensor], boxes: Mapping[str, Box]
) -> StoredPart:
    """Store a copy of `tensors`, which are these boxes of larger ones. Raises StorageFull."""
    manifest = transfer.set(key, tensors)
    holders = tuple(transfer.holders)
    return StoredPart(key, manifest.checksum, manifest.num_bytes, holders, boxes)


@dataclass(frozen=True)
class StoredParts:
    """All parts of a state. Boxes of two parts are the same, where hosts have replicas of the
    weights, or do not overlap."""

    # Dtype and shape of the whole tensors, by name.
    tensors: Mapping[str, tuple[str, tuple[int, ...]]]
    parts: tuple[StoredPart, ...]

    @classmethod
    def of(cls, tensors: Mapping[str, torch.Tensor], parts: Iterable[StoredPart]) -> StoredParts:
        """Describe the whole `tensors`, whose shapes and dtypes alone are looked at."""
        about = {name: (dtype_name(t.dtype), tuple(t.shape)) for name, t in tensors.items()}
        return cls(about, tuple(parts))

    @property
    def num_bytes(self) -> int:
        """Bytes of all parts."""
        return sum(part.num_bytes for part in self.parts)

    @property
    def keys(self) -> list[str]:
        """Keys of the parts in the transfer layer."""
        return [part.key for part in self.parts]

    def encode(self) -> bytes:
        """Return the description as JSON."""
        parts = [part.to_fields() for part in self.parts]
        return json.dumps({"tensors": self.tensors, "parts": parts}).encode()

    @classmethod
    def decode(cls, data: bytes) -> StoredParts:
        """Restore the description from the bytes of `encode`."""
        found = json.loads(data)
        about = {name: (dtype, tuple(shape)) for name, (dtype, shape) in found["tensors"].items()}
        return cls(about, tuple(map(StoredPart.of_fields, found["parts"])))

    def as_tensor(self) -> torch.Tensor:
        """Return the description as a tensor of a suspended state."""
        return torch.frombuffer(bytearray(self.encode()), dtype=torch.uint8)

    @classmethod
    def in_state(cls, tensors: Mapping[str, torch.Tensor]) -> StoredParts | None:
        """Return the description among the tensors of a suspended state; None if it has no
        parts."""
        found = tensors.get(PARTS)
        return None if found is None else cls.decode(found.cpu().numpy().tobytes())


class PartsReader:
    """A reader of boxes of a stored state, on any host. It opens the parts that they are in."""

    def __init__(self, transfer: HostTransfer, stored: StoredParts) -> None:
        self._transfer, self._stored = transfer, stored
        here = set(transfer.holders)
        # This host's parts first: they cross no network.
        self._parts = sorted(stored.parts, key=lambda part: here.isdisjoint(part.holders))
        self._opened: dict[str, Tensors] = {}

    def whole(self) -> Tensors:
        """Return all tensors, each as `read` does."""
        return {
            name: self.read(name, Box.whole(shape))
            for name, (_, shape) in self._stored.tensors.items()
        }

    def read(self, name: str, box: Box) -> torch.Tensor:
        """Return a box of a tensor, in host memory: a copy, or, of a part that has all of it, a
        view, which must not be written to.

        Raises KeyNotFound, Corrupt, or ValueError if the parts do not make the box.
        """
        found: torch.Tensor | None = None
        missing = box.count
        read: set[Box] = set()
        for part in self._parts:
            theirs = part.boxes.get(name)
            common = None if theirs is None else box.common(theirs)
            if theirs is None or common is None or not common.count or common in read:
                continue
            read.add(common)
            piece = self._tensor(part, name)[common.within(theirs)]
            if common == box:
                return piece
            if found is None:
                found = piece.new_empty(box.size)
            found[common.within(box)] = piece
            missing -= common.count
        if missing:
            raise ValueError(f"its parts lack {missing} of {box.count} elements of '{name}'")
        if found is None:
            found = torch.empty(box.size, dtype=dtype_of(self._stored.tensors[name][0]))
        return found

    def _tensor(self, part: StoredPart, name: str) -> torch.Tensor:
        if part.key not in self._opened:
            self._transfer.hint(part.key, part.holders)
            self._opened[part.key], _ = self._transfer.get(
                part.key, expected_checksum=part.checksum
            )
        return self._opened[part.key][name]
