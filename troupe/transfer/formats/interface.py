"""`BucketFormat`: how one kind of inference server takes tensors from a trainer's devices."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch

from troupe.transfer.flat_buckets import FlatBucket


class JoinedGroup(ABC):
    """A process group of the trainer, which is rank 0, and the ranks of one server."""

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

    @abstractmethod
    def join(self, name: str, store: Any, backend: str, size: int, seconds: float) -> JoinedGroup:
        """Join a group of `size` ranks that meet at `store` (a TCPStore), as rank 0. `backend`:
        "nccl" or "gloo". `seconds`: the group's own limit on an operation. Blocking."""
