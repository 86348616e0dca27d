"""User-defined columns on their way to the store: small ones inline, large ones by reference."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from troupe.tensors import to_proto
from troupe.transfer import Transfer
from troupe.v1 import experience_store_pb2 as store

# Larger values would fill the store's memory, which is Redis', with what is read once.
INLINE_BYTES: Final = 256 * 1024


@dataclass
class Shelf:
    """Columns of one trajectory. Those that are too large for a row wait here to be `put`."""

    transfer: Transfer
    job_id: str
    large: dict[str, Any] = field(default_factory=dict)
    """Arrays by the key that a row refers to."""

    def columns_of(self, sample_id: str, values: Mapping[str, Any]) -> dict[str, store.Column]:
        """The columns of one sample as messages."""
        return {name: self._column(sample_id, name, value) for name, value in values.items()}

    async def put(self) -> None:
        """Make the large values readable, before anybody can know their keys.

        Raises `TransferError`. Putting a trajectory's values again, as when it is run again,
        replaces them.
        """
        for key, value in self.large.items():
            await asyncio.to_thread(self.transfer.set, key, {"value": _as_tensor(value)})

    async def discard(self) -> None:
        """Nobody will read the large values."""
        await asyncio.to_thread(self._delete, list(self.large))

    def _delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            self.transfer.delete(key)

    def _column(self, sample_id: str, name: str, value: Any) -> store.Column:
        if not hasattr(value, "dtype"):
            return store.Column(json=json.dumps(value, allow_nan=False))
        if value.nbytes <= INLINE_BYTES:
            return store.Column(tensor=to_proto(value))
        key = f"{self.job_id}/columns/{sample_id}/{name}"
        self.large[key] = value
        return store.Column(ref=key)


def _as_tensor(value: Any) -> Any:
    import torch

    return torch.from_numpy(value) if isinstance(value, np.ndarray) else value
