"""Training state that waits in the transfer layer while its policy holds no device.

Unlike what `StateStore` keeps, it is of no version alone: gradients that have accumulated, the
step's statistics and the names of its leases go with weights and optimizer. It is not durable and
need not be: whoever cannot have it goes on from the committed version, and the step's samples are
free again by then. It has one owner: who resumes takes it out, and nobody can a second time.
"""

from __future__ import annotations

import dataclasses
import json
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

import numpy as np
import torch

from services.chassis.transfer import HostTransfer
from services.trainer.learning.samples import Row
from troupe.checkpoints.tensors import TensorsDoNotFit, difference
from troupe.rpc import DataLoss, FailedPrecondition, NotFound, new_id
from troupe.transfer import Corrupt, KeyNotFound, Manifest, brought
from troupe.v1 import trainer_pb2

Tensors = dict[str, torch.Tensor]


class ParameterPool:
    """Tensors of one device that nobody uses, by shape; at most `limit` bytes of them.

    Of a GPU none: its caching allocator does the same. Safe to use from several threads.
    """

    def __init__(self, device: torch.device, limit: int = 8 << 30) -> None:
        self.device = device
        self._limit = limit if device.type == "cpu" else 0
        self._free: dict[tuple[torch.Size, torch.dtype], list[torch.Tensor]] = {}
        self._bytes = 0
        self._lock = threading.Lock()

    def give_back(self, tensors: Iterable[torch.Tensor]) -> None:
        """Nobody uses these any more, nor views of them."""
        with self._lock:
            for tensor in tensors:
                size = tensor.nbytes
                whole = size and size == tensor.untyped_storage().nbytes()
                if not whole or self._bytes + size > self._limit or not tensor.is_contiguous():
                    continue
                self._free.setdefault((tensor.shape, tensor.dtype), []).append(tensor)
                self._bytes += size

    def bring(self, tensors: Mapping[str, torch.Tensor]) -> Tensors:
        """Copies of `tensors`, host memory, on the device; complete when this returns."""
        if self.device.type != "cpu":
            return brought(tensors, self.device)
        return {name: self._place(t).copy_(t) for name, t in tensors.items()}

    def _place(self, like: torch.Tensor) -> torch.Tensor:
        with self._lock:
            if found := self._free.get((like.shape, like.dtype)):
                self._bytes -= like.nbytes
                return found.pop()
        return torch.empty(like.shape, dtype=like.dtype)


class PooledParameters:
    """The parameters of one model, which can leave the device and come back."""

    def __init__(
        self, weights: Mapping[str, torch.Tensor], parameters: Sequence[torch.nn.Parameter]
    ) -> None:
        """`weights` lie over the memory of `parameters`; what does not (buffers) stays."""
        places = {p.data_ptr(): p for p in parameters if p.numel()}
        self._named = {
            name: places[t.data_ptr()] for name, t in weights.items() if t.data_ptr() in places
        }

    def leave(self) -> list[torch.Tensor]:
        """Take the memory from under the model; it cannot compute before `enter`."""
        left = []
        for parameter in self._named.values():
            left.append(parameter.data)
            parameter.data = parameter.data.new_empty(0)
        return left

    def enter(self, weights: Mapping[str, torch.Tensor]) -> Tensors:
        """Lay the model over these tensors; returns those that are no parameters.

        Raises ValueError when a parameter is missing; then nothing has changed.
        """
        if wrong := difference(self._named.keys() - weights.keys(), ()):
            raise TensorsDoNotFit(f"weights of the model are missing: {wrong}")
        for name, parameter in self._named.items():
            parameter.data = weights[name]
        return {name: t for name, t in weights.items() if name not in self._named}


Values = dict[str, Any]


def take_apart(sums: Any) -> tuple[Tensors, Values]:
    """The fields of a flat dataclass: tensors, not copied, and plain values."""
    tensors: Tensors = {}
    values: Values = {}
    for column in dataclasses.fields(sums):
        value = getattr(sums, column.name)
        if isinstance(value, torch.Tensor):
            tensors[column.name] = value
        else:
            values[column.name] = value
    return tensors, values


def put_together(sums: Any, tensors: Tensors, values: Values) -> None:
    """Inverse of `take_apart`, into a dataclass of the same type. Raises KeyError, TypeError."""
    for column in dataclasses.fields(sums):
        name = column.name
        setattr(sums, name, tensors[name] if name in tensors else values[name])


def rows_apart(rows: Sequence[Row]) -> tuple[Tensors, list[Values]]:
    """Arrays of all rows, joined by column; and per row its plain values and lengths of arrays."""
    joined: dict[str, list[np.ndarray[Any, Any]]] = {}
    described: list[Values] = []
    for row in rows:
        values: Values = {}
        lengths: dict[str, int] = {}
        for column in dataclasses.fields(row):
            value = getattr(row, column.name)
            if isinstance(value, np.ndarray):
                joined.setdefault(column.name, []).append(value)
                lengths[column.name] = len(value)
            else:
                values[column.name] = value
        described.append({"values": values, "lengths": lengths})
    return {n: torch.from_numpy(np.concatenate(parts)) for n, parts in joined.items()}, described


def rows_together(tensors: Tensors, described: Sequence[Values]) -> list[Row]:
    """Inverse of `rows_apart`; copies."""
    arrays = {name: tensor.cpu().numpy().copy() for name, tensor in tensors.items()}
    begins = dict.fromkeys(arrays, 0)
    rows = []
    for one in described:
        fields: Values = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in one["values"].items()
        }
        for name, length in one["lengths"].items():
            begin = begins[name]
            fields[name] = arrays[name][begin : begin + length]
            begins[name] = begin + length
        rows.append(Row(**fields))
    return rows


def on_host(tensors: Tensors) -> Tensors:
    """What a suspended policy brought along to a device and does not compute with there."""
    return {name: tensor.cpu() for name, tensor in tensors.items()}


def under(prefix: str, tensors: Tensors) -> Tensors:
    """Named `{prefix}/{name}`."""
    return {f"{prefix}/{name}": tensor for name, tensor in tensors.items()}


def below(prefix: str, tensors: Tensors) -> Tensors:
    """Inverse of `under`: of all `tensors`, those that have the prefix."""
    start = f"{prefix}/"
    return {n.removeprefix(start): t for n, t in tensors.items() if n.startswith(start)}


FORMAT: Final = 1
# Of the manifest's metadata.
_DOCUMENT: Final = "training"


@dataclass(frozen=True)
class HalfStep:
    """A step that stopped between two micro-batches, as far as the experience store knows it."""

    step: int
    version: int
    oldest_version: int | None
    claimant: str
    # Claims whose samples are in the gradients.
    claim_ids: list[str] = field(default_factory=list)
    # The last question for samples, whose answer was not used: asked again under the same id it is
    # answered with the same samples.
    question: str = ""
    micro_batches: int = 0
    samples: int = 0
    tokens: int = 0
    # Samples that were dropped since their values are gone.
    gone: int = 0
    # Columns by reference that go with the step's samples.
    refs: list[str] = field(default_factory=list)
    # Seconds that it was at work so far.
    seconds: float = 0.0


@dataclass(frozen=True)
class SuspendedTensors:
    """What a policy takes along: tensors, and a document of plain values."""

    tensors: Tensors
    document: dict[str, Any]


class Suspension:
    """Where one policy's state waits. Blocking, in any thread."""

    def __init__(
        self, transfer: HostTransfer, residence: ParameterPool, job_id: str, policy: str
    ) -> None:
        self._transfer, self._residence = transfer, residence
        self._prefix = f"{job_id}/{policy}/training@"
        self._policy = policy

    def store(
        self, version: int, luggage: SuspendedTensors, half: HalfStep | None, lease: float
    ) -> trainer_pb2.SuspendedState:
        """Put a copy there; `luggage` may be used again. Raises StorageFull."""
        document = {
            **luggage.document,
            "format": FORMAT,
            "step": None if half is None else asdict(half),
        }
        # Every suspension has a key of its own: tensors alone do not tell two of one version apart.
        # Samples without an advantage leave gradients as they were.
        manifest: Manifest = self._transfer.set(
            f"{self._prefix}{version}-{new_id()}",
            luggage.tensors,
            metadata={_DOCUMENT: json.dumps(document)},
        )
        state = trainer_pb2.SuspendedState(
            key=manifest.key,
            checksum=manifest.checksum,
            num_bytes=manifest.num_bytes,
            version=version,
            lease_seconds=lease,
            holders=self._transfer.holders,
        )
        if half is not None:
            state.step, state.claimant = half.step, half.claimant
            state.claims, state.samples = len(half.claim_ids), half.samples
        return state

    def fetch(self, state: trainer_pb2.SuspendedState) -> SuspendedTensors:
        """A copy of what `state` says, on the device, from wherever it is; it stays there.

        Raises NotFound of kind "suspended_state_gone", DataLoss of kind "suspended_state_changed".
        """
        if not state.key.startswith(self._prefix):
            raise FailedPrecondition(
                f"{state.key} is not a state of policy {self._policy}",
                kind="suspended_state_mismatch",
                field="state.key",
                value=state.key,
                remedy="Resume a policy from what its own suspension returned.",
            )
        self._transfer.hint(state.key, state.holders)
        try:
            tensors, manifest = self._transfer.get(
                state.key, expected_checksum=state.checksum, lasting=True
            )
            document = json.loads(manifest.metadata[_DOCUMENT])
            if document["format"] != FORMAT:
                raise ValueError(f"its format is {document['format']}")
            return SuspendedTensors(self._residence.bring(tensors), document)
        except KeyNotFound as error:
            raise self._gone(state.key) from error
        except (Corrupt, KeyError, ValueError) as error:
            raise DataLoss(
                f"the suspended state {state.key} is not what was suspended: {error}",
                kind="suspended_state_changed",
                field="state.checksum",
                value=state.checksum,
                remedy="Bind the policy afresh: its step begins again from the committed version.",
            ) from error

    def take(self, state: trainer_pb2.SuspendedState) -> None:
        """Make it the caller's alone. Raises NotFound of kind "suspended_state_gone"."""
        if not self._transfer.delete(state.key):
            raise self._gone(state.key)

    def forget(self) -> None:
        """Nobody needs what is there of this policy."""
        for key in self._transfer.keys(self._prefix):
            self._transfer.delete(key)

    def _gone(self, key: str) -> NotFound:
        return NotFound(
            f"the suspended state {key} is gone",
            kind="suspended_state_gone",
            field="state.key",
            value=key,
            remedy="Bind the policy afresh: its step begins again from the committed version.",
        )
