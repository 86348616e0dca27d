"""Flat buckets of tensors, in which a trainer sends weights from its devices to servers.

A bucket holds tensors of one dtype one after another in C order, in one tensor: servers load few
large handles or broadcasts faster than many small ones. How a kind of inference server takes a
bucket is its `BucketFormat` (`troupe.transfer.formats`).
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from troupe.transfer.checksum import dtype_name
from troupe.transfer.staging import upload


@dataclass(frozen=True)
class FlatBucket:
    """`flat`: the elements of all tensors; `shapes`: theirs by name, in this order."""

    flat: torch.Tensor
    shapes: dict[str, torch.Size]

    @property
    def dtype(self) -> str:
        """torch's name of the dtype: "bfloat16"."""
        return dtype_name(self.flat.dtype)


def flat_buckets(
    named: Iterable[tuple[str, torch.Tensor]], limit: int, device: torch.device
) -> Iterator[FlatBucket]:
    """Copies of `named` in buckets of at most `limit` bytes, on `device`; a larger tensor is a
    bucket of its own. Read lazily: a few tensors and one bucket are in memory."""
    open_: dict[torch.dtype, list[tuple[str, torch.Tensor]]] = {}
    for name, tensor in named:
        bucket = open_.setdefault(tensor.dtype, [])
        if bucket and sum(one.nbytes for _, one in bucket) + tensor.nbytes > limit:
            yield _joined(bucket, device)
            bucket.clear()
        bucket.append((name, tensor.detach()))
    for bucket in open_.values():
        yield _joined(bucket, device)


def _joined(bucket: list[tuple[str, torch.Tensor]], device: torch.device) -> FlatBucket:
    shapes = {name: tensor.shape for name, tensor in bucket}
    flats = [tensor.reshape(-1) for _, tensor in bucket]
    if device.type != "cuda" or flats[0].is_cuda:
        return FlatBucket(torch.cat(flats), shapes)
    joined = torch.empty(sum(map(len, flats)), dtype=flats[0].dtype, device=device)
    starts = itertools.accumulate(map(len, flats[:-1]), initial=0)
    upload((joined.narrow(0, at, len(flat)), flat) for at, flat in zip(starts, flats, strict=True))
    return FlatBucket(joined, shapes)


@dataclass(frozen=True)
class Meeting:
    """Where the processes of a group meet.

    `store`: a TCPStore of the trainer's. `backend`: "nccl" or "gloo". `size`: ranks, with the
    trainer's. `seconds`: the group's own limit on an operation. `join_seconds`: how long servers
    may take to join. `unique_id`: see `BucketFormat.unique_id`.
    """

    name: str
    store: Any
    backend: str
    size: int
    device: torch.device
    seconds: float
    join_seconds: float
    unique_id: bytes = b""


class JoinedGroup(ABC):
    """A process group of the trainer, which is rank 0, and the ranks of servers."""

    @abstractmethod
    def broadcast(self, tensor: torch.Tensor) -> Any:
        """Begin to send a tensor to the group; returns an object to `wait` for."""

    @abstractmethod
    def end(self) -> None:
        """End the group, also in the middle of a broadcast that nobody receives. May block."""


class BucketFormat(ABC):
    """Encodes buckets for the processes of a server, and joins its groups."""

    @abstractmethod
    def handles(self, bucket: FlatBucket) -> bytes:
        """An encoding of the bucket by handles of its memory, for one reader on this host: nothing
        is copied. The bucket must be kept until all readers have read theirs."""

    def unique_id(self) -> bytes:
        """An id that servers are given to join a new group; empty if they meet at the store."""
        return b""

    @abstractmethod
    def join(self, meeting: Meeting) -> JoinedGroup:
        """Join a group as rank 0. Blocking. Raises RuntimeError and ValueError."""
