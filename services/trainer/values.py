"""Values that samples keep by reference, and what to do when they are nowhere any more.

A host that is lost takes along the values that its rollout kept. Nobody can make them again: the
samples are dropped with that reason, and the step goes on with the others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np

from services.trainer.rows import Load
from troupe.transfer.errors import Corrupt, KeyNotFound, TransferTimeout
from troupe.v1 import experience_store_pb2 as store_pb

Array = np.ndarray[Any, np.dtype[Any]]
# The value under a key, waiting so many seconds for it (0: asking once). Raises TransferError.
Fetch = Callable[[str, float], Array]
# Rows of claimed samples, whose values it loads.
Read = Callable[[Sequence[store_pb.ClaimedSample], Load], Sequence[Any]]

# What is not what was set is as good as gone.
_GONE: Final = (KeyNotFound, Corrupt)


class ValueGone(Exception):
    """No host has the value under `key`."""

    def __init__(self, key: str) -> None:
        super().__init__(f"the value '{key}' is gone")
        self.key = key


class Values:
    """Loads values for one attempt at a step. Blocking."""

    def __init__(self, fetch: Fetch, patience: float) -> None:
        """`patience`: seconds that the first value of a claim which is nowhere is waited for: a
        host that is away may come back. No other one of the claim is: hosts are lost with many
        values at once. The next claim, which may be hours later, waits anew."""
        self._fetch = fetch
        self._patience = patience
        # What is left of it for the claim that is being read.
        self._left = patience

    def read(
        self, claimed: Sequence[store_pb.ClaimedSample], read: Read
    ) -> tuple[Sequence[Any], list[store_pb.Sample]]:
        """The rows of a claim, and those of its samples that values are gone of.

        Raises what `read` does, and TransferError: TransferTimeout, which repetition may cure,
        while a host that may have a value does not answer.
        """
        self._left = self._patience
        found: dict[str, Array] = {}

        def load(key: str) -> Array:
            if key not in found:
                found[key] = self._load(key)
            return found[key]

        try:
            return read(claimed, load), []
        except ValueGone:
            pass
        kept: list[store_pb.ClaimedSample] = []
        gone: list[store_pb.Sample] = []
        for item in claimed:
            try:
                read([item], load)
            except ValueGone:
                gone.append(item.sample)
            else:
                kept.append(item)
        return read(kept, load), gone

    def _load(self, key: str) -> Array:
        try:
            return self._fetch(key, self._left)
        except (*_GONE, TransferTimeout) as error:
            if isinstance(error, TransferTimeout) and not isinstance(error.__cause__, _GONE):
                raise
            self._left = 0.0
            raise ValueGone(key) from error
