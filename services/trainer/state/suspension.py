"""Suspended training state, kept in the transfer layer while its policy has no device.

Unlike a state of `StateStore`, it may be from the middle of a step: it includes accumulated
gradients, the step's statistics and the ids of its claims. It is not durable: if it is lost, the
policy continues from the committed version, and the step's samples become claimable again. It has
one owner: `take` removes it, and fails the second time. The ranks of a gang store a learner's
tensors in parts (parts.py), which the state describes.

`ParameterPool` keeps the memory of policies that left the device for reuse, since fresh pages cost
several times as much as a copy. The functions below it split a step's state into tensors and plain
values.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

import numpy as np
import torch

from services.chassis.transfer import HostTransfer
from services.trainer.learning.samples import Row
from services.trainer.state.parts import PARTS, PartsReader, StoredParts
from troupe.checkpoints.adapters import Tensors
from troupe.contracts.payloads import Payload, Payloads, PlacedPayload
from troupe.rpc import DataLoss, FailedPrecondition, NotFound, new_id
from troupe.transfer import Corrupt, KeyNotFound, Manifest, brought
from troupe.v1 import trainer_pb2 as trainer_pb

Values = dict[str, Any]
FORMAT: Final = 2
# Field of the manifest's metadata that holds the plain values.
_DOCUMENT: Final = "training"


class ParameterPool:
    """Free tensors of one device for reuse, by shape and dtype; at most `limit` bytes of them.

    Empty on a GPU, whose caching allocator does the same. Safe to use from several threads.
    """

    def __init__(self, device: torch.device, limit: int = 8 << 30) -> None:
        self.device = device
        self._limit = limit if device.type == "cpu" else 0
        self._free: dict[tuple[torch.Size, torch.dtype], list[torch.Tensor]] = {}
        self._bytes = 0
        self._lock = threading.Lock()

    def give_back(self, tensors: Iterable[torch.Tensor]) -> None:
        """Add tensors for reuse; neither they nor views of them may be in use."""
        with self._lock:
            for tensor in tensors:
                size = tensor.nbytes
                whole = size and size == tensor.untyped_storage().nbytes()
                if not whole or self._bytes + size > self._limit or not tensor.is_contiguous():
                    continue
                self._free.setdefault((tensor.shape, tensor.dtype), []).append(tensor)
                self._bytes += size

    def copy_to_device(self, tensors: Mapping[str, torch.Tensor]) -> Tensors:
        """Copy `tensors` from host memory to the device; complete when this returns."""
        if self.device.type != "cpu":
            return brought(tensors, self.device)
        return {name: self._empty_like(t).copy_(t) for name, t in tensors.items()}

    def _empty_like(self, like: torch.Tensor) -> torch.Tensor:
        with self._lock:
            if found := self._free.get((like.shape, like.dtype)):
                self._bytes -= like.nbytes
                return found.pop()
        return torch.empty(like.shape, dtype=like.dtype)


def split_fields(sums: Any) -> tuple[Tensors, Values]:
    """Split the fields of a flat dataclass into tensors, not copied, and plain values."""
    tensors: Tensors = {}
    values: Values = {}
    for column in dataclasses.fields(sums):
        value = getattr(sums, column.name)
        if isinstance(value, torch.Tensor):
            tensors[column.name] = value
        else:
            values[column.name] = value
    return tensors, values


def join_fields(sums: Any, tensors: Tensors, values: Values) -> None:
    """Inverse of `split_fields`: set the fields of `sums`. Raises KeyError for a missing one."""
    for column in dataclasses.fields(sums):
        name = column.name
        setattr(sums, name, tensors[name] if name in tensors else values[name])


def pack_rows(rows: Sequence[Row]) -> tuple[Tensors, list[Values]]:
    """Return rows as tensors, concatenated by column, and per row its plain values and array
    lengths."""
    joined: dict[str, list[np.ndarray[Any, Any]]] = {}
    described: list[Values] = []
    packed: set[bytes] = set()
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
        if row.columns:
            values["columns"] = [
                (name, _kind_of(value)) for name, value in sorted(row.columns.items())
            ]
            contents = [_bytes_of(value) for _, value in sorted(row.columns.items())]
            joined.setdefault("columns", []).append(
                np.frombuffer(bytearray(b"".join(contents)), np.uint8)
            )
            lengths["columns"] = sum(map(len, contents))
        if row.payloads:
            # The rows of a group, and the turns of a conversation, have the same payloads: each
            # content is packed once.
            new = {one.payload.digest: one.payload.data for one in row.payloads}
            contents = [data for digest, data in new.items() if digest not in packed]
            values["payloads"] = []
            for one in row.payloads:
                payload, length = one.payload, 0
                if payload.digest not in packed:
                    packed.add(payload.digest)
                    length = len(payload.data)
                about = (payload.kind, payload.media_type, payload.digest.hex())
                values["payloads"].append((*about, one.position, one.tokens, length))
            joined.setdefault("payloads", []).append(
                np.frombuffer(bytearray(b"".join(contents)), np.uint8)
            )
            lengths["payloads"] = sum(map(len, contents))
        described.append({"values": values, "lengths": lengths})
    return {n: torch.from_numpy(np.concatenate(parts)) for n, parts in joined.items()}, described


def unpack_rows(tensors: Tensors, described: Sequence[Values]) -> list[Row]:
    """Return the inverse of `pack_rows`; copies."""
    arrays = {name: tensor.cpu().numpy().copy() for name, tensor in tensors.items()}
    begins = dict.fromkeys(arrays, 0)
    contents: dict[str, bytes] = {}
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
        if "payloads" in one["lengths"]:
            added = fields["payloads"].tobytes()
            fields["payloads"] = _payloads(one["values"]["payloads"], added, contents)
        if "columns" in one["lengths"]:
            fields["columns"] = _columns(one["values"]["columns"], fields["columns"].tobytes())
        rows.append(Row(**fields))
    return rows


def _kind_of(value: Any) -> tuple[str, list[int], int]:
    """Return dtype, shape and bytes of a user-defined column's value; JSON has dtype ""."""
    if isinstance(value, np.ndarray):
        return value.dtype.str, list(value.shape), value.nbytes
    return "", [], len(_bytes_of(value))


def _bytes_of(value: Any) -> bytes:
    return value.tobytes() if isinstance(value, np.ndarray) else json.dumps(value).encode()


def _columns(described: Sequence[Sequence[Any]], contents: bytes) -> dict[str, Any]:
    """Return the inverse of `_kind_of` and `_bytes_of` for the columns of a row."""
    found, begin = {}, 0
    for name, (dtype, shape, size) in described:
        part = contents[begin : begin + size]
        found[name] = np.frombuffer(part, dtype).reshape(shape) if dtype else json.loads(part)
        begin += size
    return found


def _payloads(
    described: Sequence[Sequence[Any]], added: bytes, contents: dict[str, bytes]
) -> Payloads:
    """Return the payloads of a row. `added`: contents that no earlier row has, which are put into
    `contents`, by digest."""
    found, begin = [], 0
    for kind, media_type, digest, position, tokens, length in described:
        if digest not in contents:
            contents[digest] = added[begin : begin + length]
            begin += length
        payload = Payload(kind, media_type, contents[digest], bytes.fromhex(digest))
        found.append(PlacedPayload(payload, position, tokens))
    return tuple(found)


def on_host(tensors: Tensors) -> Tensors:
    """Copy state tensors that the device does not compute with to the CPU."""
    return {name: tensor.cpu() for name, tensor in tensors.items()}


def under(prefix: str, tensors: Tensors) -> Tensors:
    """Rename tensors to `{prefix}/{name}`."""
    return {f"{prefix}/{name}": tensor for name, tensor in tensors.items()}


def below(prefix: str, tensors: Tensors) -> Tensors:
    """Return the inverse of `under`, of those `tensors` that have the prefix."""
    start = f"{prefix}/"
    return {n.removeprefix(start): t for n, t in tensors.items() if n.startswith(start)}


@dataclass
class SuspendedStep:
    """A step between two micro-batches, where it may be suspended: its claims and counts."""

    step: int
    version: int
    oldest_version: int | None
    claimant: str
    # Claims whose samples are in the gradients.
    claim_ids: list[str] = field(default_factory=list)
    # Request id of the last claim, if its answer was not used: repeated under the same id, the
    # claim returns the same samples.
    pending_claim: str = ""
    micro_batches: int = 0
    samples: int = 0
    tokens: int = 0
    # Samples that were dropped because some of their values are lost.
    gone: int = 0
    # Keys of columns by reference that are deleted once the step is committed.
    refs: list[str] = field(default_factory=list)
    # Seconds of work so far, without suspensions.
    seconds: float = 0.0
    # Whether the store keeps the rows of all micro-batches, so that the step may be committed
    # before its state is on disk.
    keeping: bool = False


@dataclass(frozen=True)
class SuspendedTensors:
    """The state of a suspended policy: tensors, and a document of plain (JSON) values."""

    tensors: Tensors
    document: dict[str, Any]
    # Keys of the parts that ranks have stored, which are deleted once a learner has the state.
    parts: Sequence[str] = ()


def state_keys(key: str) -> str:
    """Return the beginning of the keys of suspended states, and of their parts, of the policy
    "JOB/POLICY"."""
    return f"{key}/training@"


@contextlib.contextmanager
def found_intact(key: str, checksum: str) -> Iterator[None]:
    """Enter a context in which the suspended state `key`, or a part of it, is read.

    Raises NotFound of kind "suspended_state_gone", DataLoss of kind "suspended_state_changed".
    """
    try:
        yield
    except KeyNotFound as error:
        raise _gone(key) from error
    except (Corrupt, KeyError, ValueError) as error:
        raise DataLoss(
            f"the suspended state {key} is not what was suspended: {error}",
            kind="suspended_state_changed",
            field="state.checksum",
            value=checksum,
            remedy="Bind the policy afresh: its step begins again from the committed version.",
        ) from error


def _gone(key: str) -> NotFound:
    return NotFound(
        f"the suspended state {key} is gone",
        kind="suspended_state_gone",
        field="state.key",
        value=key,
        remedy="Bind the policy afresh: its step begins again from the committed version.",
    )


class Suspension:
    """Stores and fetches the suspended state of one policy. Blocking, in any thread."""

    def __init__(
        self,
        transfer: HostTransfer,
        pool: ParameterPool,
        job_id: str,
        policy: str,
        *,
        gang: bool = False,
    ) -> None:
        """`gang`: whether the ranks of a gang, not this process, have the state on devices."""
        self._transfer, self._pool, self._gang = transfer, pool, gang
        self._prefix = state_keys(f"{job_id}/{policy}")
        self._policy = policy

    def store(
        self,
        version: int,
        suspended: SuspendedTensors,
        unfinished: SuspendedStep | None,
        lease: float,
    ) -> trainer_pb.SuspendedState:
        """Put a copy of `suspended` into the transfer layer. Raises StorageFull, and then deletes
        the parts that ranks have stored."""
        stored = StoredParts.in_state(suspended.tensors)
        document = {
            **suspended.document,
            "format": FORMAT,
            "step": None if unfinished is None else asdict(unfinished),
        }
        # Every suspension has a key of its own: two suspensions of one version may have equal
        # tensors, if the samples trained in between had no gradient.
        try:
            manifest: Manifest = self._transfer.set(
                f"{self._prefix}{version}-{new_id()}",
                suspended.tensors,
                metadata={_DOCUMENT: json.dumps(document)},
            )
        except BaseException:
            self.drop(() if stored is None else stored.keys)
            raise
        state = trainer_pb.SuspendedState(
            key=manifest.key,
            checksum=manifest.checksum,
            num_bytes=manifest.num_bytes + (0 if stored is None else stored.num_bytes),
            version=version,
            lease_seconds=lease,
            holders=self._transfer.holders,
        )
        if unfinished is not None:
            state.step, state.claimant = unfinished.step, unfinished.claimant
            state.claims, state.samples = len(unfinished.claim_ids), unfinished.samples
        return state

    def fetch(
        self, state: trainer_pb.SuspendedState, *, bring_parts: bool = False
    ) -> SuspendedTensors:
        """Copy the suspended `state` to the device, from any host, without removing it; for a gang
        to host memory, without its parts, which the ranks read. `bring_parts`: have those on this
        host.

        Raises NotFound of kind "suspended_state_gone", DataLoss of kind "suspended_state_changed".
        """
        if not state.key.startswith(self._prefix):
            raise FailedPrecondition(
                f"{state.key} is not a state of policy {self._policy}",
                kind="suspended_state_mismatch",
                field="state.key",
                value=state.key,
                remedy="Resume a policy from the state that its own suspension returned.",
            )
        self._transfer.hint(state.key, state.holders)
        with found_intact(state.key, state.checksum):
            tensors, manifest = self._transfer.get(
                state.key, expected_checksum=state.checksum, lasting=True
            )
            document = json.loads(manifest.metadata[_DOCUMENT])
            if document["format"] != FORMAT:
                raise ValueError(f"its format is {document['format']}")
            stored = StoredParts.in_state(tensors)
            keys = () if stored is None else stored.keys
            if self._gang:
                if bring_parts and stored is not None:
                    self._bring(stored)
                # Copies, since a view would keep the memory of the whole state.
                copied = {name: tensor.clone() for name, tensor in tensors.items()}
                return SuspendedTensors(copied, document, keys)
            if stored is not None:
                whole = PartsReader(self._transfer, stored).whole()
                tensors = {name: t for name, t in tensors.items() if name != PARTS} | whole
            return SuspendedTensors(self._pool.copy_to_device(tensors), document, keys)

    def _bring(self, stored: StoredParts) -> None:
        for part in stored.parts:
            self._transfer.hint(part.key, part.holders)
            self._transfer.fetch(part.key, expected_checksum=part.checksum)

    def take(self, state: trainer_pb.SuspendedState) -> None:
        """Remove the state, which now belongs to the caller.

        Raises NotFound of kind "suspended_state_gone".
        """
        if not self._transfer.delete(state.key):
            raise _gone(state.key)

    def drop(self, parts: Collection[str]) -> None:
        """Delete parts of a state, on all hosts."""
        self._transfer.drop(parts)

    def forget(self) -> None:
        """Delete all suspended states of this policy."""
        for key in self._transfer.keys(self._prefix):
            self._transfer.delete(key)
