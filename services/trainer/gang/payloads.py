"""Contents of payloads (images, ...) on their way from the leader of a gang to its ranks.

Every rank gets the tokens of all rows of a micro-batch and computes a share of them. If contents
came with the rows, each would be copied to every rank, one host after another. So rows travel
without contents (a payload is known by its digest), and the leader stores those contents in the
transfer layer of its host: under one key per row, the contents that no earlier row of the step has.
A rank reads what its own passes need when it plans them: on the leader's host from shared memory,
elsewhere through the owner of its host. Rows with common prefixes go to one rank, so that most
contents reach one host only. The keys are deleted with the step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from services.chassis.transfer import HostTransfer
from services.trainer.gang.loads import LoadProgress
from services.trainer.learning.samples import Row
from troupe.checkpoints.adapters import Tensors
from troupe.contracts.payloads import Payload, Payloads, PlacedPayload
from troupe.rpc import Aborted, new_id
from troupe.transfer import Corrupt, KeyNotFound


@dataclass(frozen=True)
class StoredContent:
    """Where the content of a payload is."""

    # Key in the transfer layer. Its tensors are uint8 [n] by digest (hexadecimal).
    key: str
    num_bytes: int
    # "host:port" of transfer owners that had it when it was stored.
    holders: tuple[str, ...]


class StepPayloads:
    """The leader's contents of one step's payloads. Not thread-safe."""

    def __init__(self, transfer: Callable[[], HostTransfer], key: str) -> None:
        """`transfer`: returns the leader's transfer layer, which ranks read. `key`: a policy's."""
        self._transfer, self._prefix = transfer, f"{key}/payloads@"
        # By digest, in hexadecimal.
        self._stored: dict[str, StoredContent] = {}

    def store(self, rows: Sequence[Row]) -> tuple[Sequence[Row], dict[str, Any]]:
        """Store contents that earlier rows of the step do not have. Return the rows without
        contents, and plain values (JSON) that tell ranks where each content is; no values if the
        rows have no payloads. Raises StorageFull."""
        needed: dict[str, StoredContent] = {}
        for row in rows:
            contents = {one.payload.digest.hex(): one.payload.data for one in row.payloads}
            new = {name: data for name, data in contents.items() if name not in self._stored}
            if new:
                key = f"{self._prefix}{new_id()}"
                transfer = self._transfer()
                transfer.set(key, {name: _tensor_of(data) for name, data in new.items()})
                holders = tuple(transfer.holders)
                for name, data in new.items():
                    self._stored[name] = StoredContent(key, len(data), holders)
            needed |= {name: self._stored[name] for name in contents}
        if not needed:
            return rows, {}
        where = {name: dataclasses.astuple(one) for name, one in needed.items()}
        return [_without_contents(row) for row in rows], {"payloads": where}

    def drop(self) -> None:
        """Delete the contents on this host: the step has ended, or its ranks have."""
        for key in {one.key for one in self._stored.values()}:
            self._transfer().delete(key)
        self._stored.clear()


class RankPayloads:
    """A rank's view of the contents of one step's payloads."""

    def __init__(self) -> None:
        self._transfer: HostTransfer | None = None
        # By digest.
        self._stored: dict[bytes, StoredContent] = {}

    def find(self, transfer: HostTransfer, where: Mapping[str, Any]) -> None:
        """Remember where contents are: the values of `StepPayloads.store`."""
        self._transfer = transfer
        for name, (key, num_bytes, holders) in where.items():
            self._stored[bytes.fromhex(name)] = StoredContent(key, num_bytes, tuple(holders))

    def filled(self, several: Sequence[Payloads], progress: LoadProgress) -> list[Payloads]:
        """Return `several` with all contents. Raises Aborted of kind "payload_gone", and the errors
        of `Transfer.get`."""
        missing = {
            one.payload.digest
            for payloads in several
            for one in payloads
            if not one.payload.data and one.payload.digest in self._stored
        }
        progress.total = sum(self._stored[one].num_bytes for one in missing)
        opened: dict[str, Tensors] = {}
        found: dict[bytes, bytes] = {}

        def fill(placed: PlacedPayload) -> PlacedPayload:
            payload = placed.payload
            if payload.data or (stored := self._stored.get(payload.digest)) is None:
                return placed
            if payload.digest not in found:
                found[payload.digest] = self._content(payload, stored, opened)
                progress.add(stored.num_bytes)
            return replace(placed, payload=replace(payload, data=found[payload.digest]))

        return [tuple(map(fill, payloads)) for payloads in several]

    def forget(self, *, fetched: bool) -> None:
        """Forget the contents: the step is over. `fetched`: this host has fetched copies of them,
        which are deleted."""
        if fetched and self._transfer is not None:
            for key in {one.key for one in self._stored.values()}:
                self._transfer.delete(key)
        self._stored.clear()

    def _content(
        self, payload: Payload, stored: StoredContent, opened: dict[str, Tensors]
    ) -> bytes:
        assert self._transfer is not None, "contents were stored"
        try:
            if stored.key not in opened:
                self._transfer.hint(stored.key, stored.holders)
                opened[stored.key], _ = self._transfer.get(stored.key)
            return opened[stored.key][payload.digest.hex()].numpy().tobytes()
        except (KeyNotFound, Corrupt) as error:
            raise Aborted(
                f"the content of a payload of kind {payload.kind} is gone from the leader of a "
                f"gang: {error.message}",
                kind="payload_gone",
                field="payloads",
                value=payload.digest.hex(),
                remedy="The step begins again from the last committed state.",
            ) from error


def _tensor_of(data: bytes) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(bytearray(data), np.uint8))


def _without_contents(row: Row) -> Row:
    bare = tuple(replace(one, payload=replace(one.payload, data=b"")) for one in row.payloads)
    return replace(row, payloads=bare) if bare else row
