"""One stored state as one file: `magic | manifest length | manifest | tensors`.

One file, so that one rename makes all of it visible or none. Who reads it holds a shared lock for
as long as it has it mapped; a file that nobody has mapped and no key names may be used again.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import io
import itertools
import json
import math
import mmap
import os
import re
import time
from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import torch
import xxhash

from troupe.rpc.errors import InvalidArgument
from troupe.transfer.checksum import (
    PIECE_BYTES,
    bytes_checksum,
    combine,
    dtype_name,
    hasher,
    host_bytes,
    whole,
)
from troupe.transfer.checksum import dtype_of as dtype_of
from troupe.transfer.deferred import DeferredBytes, DeferredTensors, deferred_bytes
from troupe.transfer.errors import LayoutMismatch
from troupe.transfer.staging import DeviceBytes, upload

_PLAIN = (bool, int, float, str)
# Containers inside each other: readers go down as many steps as writers did.
_DEEPEST = 100


def is_flat(tree: Any) -> bool:
    """Whether `tree` is a mapping from names to tensors, which needs no nesting."""
    return isinstance(tree, Mapping) and all(
        type(name) is str and isinstance(leaf, torch.Tensor) for name, leaf in tree.items()
    )


def flatten(tree: Any) -> tuple[dict[str, torch.Tensor], str]:
    """Tensors by their path ("optimizer.0.step"), and the JSON of what is around them.

    "" for a flat mapping, whose names stay as they are. Raises InvalidArgument.
    """
    if is_flat(tree):
        for name, tensor in tree.items():
            _check(name, tensor)
        return dict(tree), ""
    tensors: dict[str, torch.Tensor] = {}
    skeleton = _skeleton(tree, "", tensors, 0)
    try:
        return tensors, json.dumps(skeleton, separators=(",", ":"))
    except ValueError as error:  # an integer of thousands of digits
        raise _refused("", f"holds a number that cannot be written: {error}") from None


def unflatten(tensors: Mapping[str, torch.Tensor], nesting: str) -> Any:
    """Inverse of `flatten`. Raises ValueError when the two do not belong together."""
    if not nesting:
        return dict(tensors)
    try:
        return _grown(json.loads(nesting), tensors)
    except (KeyError, TypeError, IndexError) as error:
        raise ValueError(f"the tree does not fit its tensors: {error!r}") from error


def _skeleton(tree: Any, path: str, tensors: dict[str, torch.Tensor], depth: int) -> Any:
    """Containers as [kind, ...]; a plain value stands for itself."""
    if isinstance(tree, torch.Tensor):
        _check(path, tree)
        # Two paths may read the same ({"a.b": x, "a": {"b": y}}).
        name, count = path, len(tensors)
        while name in tensors:
            name, count = f"{path}#{count}", count + 1
        tensors[name] = tree
        return ["tensor", name]
    if tree is None or type(tree) in _PLAIN:
        return tree
    if depth == _DEEPEST:
        raise _refused(path, f"is nested more than {_DEEPEST} deep, or contains itself")
    if isinstance(tree, Mapping):
        items = []
        for key, child in tree.items():
            if type(key) not in (str, int):
                raise _refused(path, f"has the key {key!r}; keys are str or int")
            items.append([key, _skeleton(child, _join(path, key), tensors, depth + 1)])
        return ["dict", items]
    if type(tree) in (list, tuple):
        kind = "list" if type(tree) is list else "tuple"
        under = [_skeleton(c, _join(path, i), tensors, depth + 1) for i, c in enumerate(tree)]
        return [kind, under]
    raise _refused(path, f"is a {type(tree).__qualname__}")


def _check(name: str, tensor: torch.Tensor) -> None:
    """Raise InvalidArgument for a tensor that is more than its elements in their order."""
    kind = "meta" if tensor.is_meta else str(tensor.layout).removeprefix("torch.")
    if tensor.is_quantized or tensor.is_nested:
        kind = "quantized" if tensor.is_quantized else "nested"
    if kind != "strided":
        raise _refused(name, f"is a {kind} tensor")
    if why := _why_no_memory(tensor):
        raise _refused(name, why)


def _why_no_memory(tensor: torch.Tensor) -> str:
    """A tensor that wraps others, or whose storage was shrunk, reads as memory of somebody else."""
    if tensor.numel() == 0:
        return ""
    try:
        storage = tensor.untyped_storage()
        there = storage.nbytes() if storage.data_ptr() else 0
    except (RuntimeError, ValueError):
        return f"is a {type(tensor).__qualname__} without memory of its own: give its local part"
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    last = tensor.storage_offset() + sum((size - 1) * stride for size, stride in steps)
    if there < (last + 1) * tensor.itemsize:
        return "has lost its memory (its storage was resized)"
    return ""


def _grown(node: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    if not isinstance(node, list):
        return node
    kind, inside = node
    if kind == "tensor":
        return tensors[inside]
    if kind == "dict":
        return {key: _grown(child, tensors) for key, child in inside}
    children = [_grown(child, tensors) for child in inside]
    return children if kind == "list" else tuple(children)


def _join(path: str, key: str | int) -> str:
    return f"{path}.{key}" if path else str(key)


def _refused(path: str, why: str) -> InvalidArgument:
    return InvalidArgument(
        f"'{path or 'the state'}' {why}",
        kind="transfer_not_a_tree",
        field="state",
        value=path,
        remedy="Give nested dicts, lists and tuples of dense tensors, numbers, strings, bools and "
        "None.",
    )


_VERSION = re.compile(r"@([0-9]+)\Z")
_SEAL_BYTES = len(',"seal":""}') + 32
# Manifests are read several times while their states move.
_MOST_KNOWN: Final = 8


def version_in(key: str) -> int:
    """`job/policy/weights@3` -> 3; -1 for a key without a version."""
    match = _VERSION.search(key)
    # 20 digits are more than any version may have (63 bits), and `int` refuses thousands of them.
    return int(match[1].lstrip("0")[:20] or "0") if match else -1


def stem_of(key: str) -> str:
    """`job/policy/weights@3` -> `job/policy/weights`."""
    return _VERSION.sub("", key)


@dataclass(frozen=True)
class Shard:
    """Where a tensor lies in the one that it is a part of: as many numbers as it has dimensions."""

    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]


@dataclass(frozen=True)
class TensorEntry:
    """One tensor: `nbytes` bytes from `offset` (bytes) in the data section."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    checksum: str
    # Of each `PIECE_BYTES`; none for a tensor that is a single piece.
    pieces: tuple[str, ...] = ()
    shard: Shard | None = None


@dataclass(frozen=True)
class Manifest:
    """The layout of one stored state.

    `checksum` names the content: equal content has an equal checksum whatever the order in
    which tensors were given. `version` is the number after '@' in the key, or -1. `nesting` is
    JSON of the tree around the tensors (`troupe.transfer.blob`), "" for a flat mapping.
    `base` is the key of a state that most of this one equals, "" for none.
    """

    key: str
    version: int
    checksum: str
    entries: tuple[TensorEntry, ...]
    metadata: Mapping[str, str] = field(default_factory=dict)
    nesting: str = ""
    base: str = ""

    def __post_init__(self) -> None:
        # Who has it may be one of several.
        object.__setattr__(self, "metadata", MappingProxyType(dict(self.metadata)))

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors, without padding."""
        return sum(entry.nbytes for entry in self.entries)

    @property
    def shards(self) -> dict[str, Shard]:
        """Of the tensors that are parts, by name."""
        return {entry.name: entry.shard for entry in self.entries if entry.shard}

    @property
    def end(self) -> int:
        """Length of the data section in bytes."""
        return max((entry.offset + entry.nbytes for entry in self.entries), default=0)

    def to_json(self) -> bytes:
        """Compact JSON, UTF-8, that ends with a checksum of itself: a state's does not cover its
        metadata, its base or where its parts lie. (`dataclasses.asdict` takes seconds for thousands
        of pieces.)"""
        made = {**vars(self), "entries": [_plain(entry) for entry in self.entries]}
        text = json.dumps(made, separators=(",", ":"), default=dict).encode()
        return text[:-1] + _seal(text)

    @staticmethod
    def from_json(data: bytes) -> Manifest:
        """Inverse of `to_json`; ValueError when `data` is no consistent manifest."""
        if (known := _known.get(data)) is not None:
            return known
        given = data
        data, seal = data[:-_SEAL_BYTES] + b"}", data[-_SEAL_BYTES:]
        try:
            if seal != _seal(data):
                raise ValueError("the manifest's own checksum does not match it")
            raw: dict[str, Any] = json.loads(data)
            manifest = Manifest(
                raw["key"],
                raw["version"],
                raw["checksum"],
                tuple(map(_entry, raw["entries"])),
                raw["metadata"],
                raw["nesting"],
                raw["base"],
            )
            for entry in manifest.entries:
                _check_entry(entry)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"not a manifest: {error!r}") from error
        parts = {
            entry.name: (entry.dtype, entry.shape, entry.checksum) for entry in manifest.entries
        }
        if combine(parts, manifest.nesting) != manifest.checksum:
            raise ValueError("the manifest's own checksum does not match its entries")
        _known[given] = manifest
        with contextlib.suppress(KeyError):  # other threads do so, too
            while len(_known) > _MOST_KNOWN:
                _known.popitem(last=False)
        return manifest


# The last few that were read, by their JSON.
_known: Final[OrderedDict[bytes, Manifest]] = OrderedDict()


def _seal(text: bytes) -> bytes:
    return b',"seal":"%s"}' % xxhash.xxh3_128_hexdigest(text).encode()


def _plain(entry: TensorEntry) -> dict[str, Any]:
    shard = entry.shard
    return {**vars(entry), "shard": shard and [shard.global_shape, shard.offsets]}


def _entry(raw: dict[str, Any]) -> TensorEntry:
    shard = raw["shard"] and Shard(*map(tuple, raw["shard"]))
    fields = {"shape": tuple(raw["shape"]), "pieces": tuple(raw["pieces"]), "shard": shard}
    return TensorEntry(**{**raw, **fields})


def _check_entry(entry: TensorEntry) -> None:
    if entry.nbytes != math.prod(entry.shape) * dtype_of(entry.dtype).itemsize:
        raise ValueError(f"{entry.name}: size does not follow from dtype and shape")
    if entry.offset < 0 or any(size < 0 for size in entry.shape):
        raise ValueError(f"{entry.name}: negative offset or shape")
    count = -(-entry.nbytes // PIECE_BYTES) if entry.nbytes > PIECE_BYTES else 0
    if len(entry.pieces) != count or (count and whole(entry.pieces) != entry.checksum):
        raise ValueError(f"{entry.name}: its pieces' checksums do not make its own")


def check_layout(key: str, manifest: Manifest, into: Mapping[str, torch.Tensor]) -> None:
    """Raise LayoutMismatch unless names, shapes and dtypes are the same, and all can be filled."""
    stored = {entry.name: entry for entry in manifest.entries}
    if stored.keys() != into.keys():
        missing = sorted(into.keys() - stored.keys())[:3]
        extra = sorted(stored.keys() - into.keys())[:3]
        raise LayoutMismatch(key, f"names differ: missing {missing}, unexpected {extra}")
    for name, target in into.items():
        entry = stored[name]
        if entry.shape != tuple(target.shape) or entry.dtype != dtype_name(target.dtype):
            have = f"{entry.dtype}{list(entry.shape)}"
            want = f"{dtype_name(target.dtype)}{list(target.shape)}"
            raise LayoutMismatch(key, f"'{name}' is stored as {have}, wanted {want}")
        if why := _why_not_filled(target):
            raise LayoutMismatch(key, f"'{name}' cannot be filled: {why}")
    _check_apart(key, stored, into)


def check_shards(tensors: Mapping[str, torch.Tensor], shards: Mapping[str, Shard]) -> None:
    """Raise InvalidArgument for a shard of no tensor, or one that lies beyond its whole."""
    for name, shard in shards.items() if isinstance(shards, Mapping) else [("", shards)]:
        if not isinstance(shard, Shard) or not all(map(_numbers, vars(shard).values())):
            raise InvalidArgument(
                f"of '{name}' is no Shard of whole numbers: {shard!r}",
                kind="transfer_shard_invalid",
                field="shards",
                value=name,
                remedy="Give a mapping from names to Shard(global_shape, offsets).",
            )
        shape = tuple(tensors[name].shape) if name in tensors else None
        ends = tuple(at + size for at, size in zip(shard.offsets, shape or (), strict=False))
        whole, sizes = shard.global_shape, {len(shard.global_shape), len(shard.offsets)}
        fits = shape is not None and sizes == {len(shape)} and min(shard.offsets, default=0) >= 0
        if not fits or any(end > size for end, size in zip(ends, whole, strict=True)):
            have = "no tensor" if shape is None else list(shape)
            raise InvalidArgument(
                f"'{name}' is {have}, no part of {list(whole)} at {list(shard.offsets)}",
                kind="transfer_shard_beyond",
                field="shards",
                value=name,
                remedy="Give each tensor that is a part its whole's shape and where it begins.",
            )


def fill(into: Mapping[str, torch.Tensor], tensors: Mapping[str, torch.Tensor]) -> None:
    """Copy `tensors` into those of the same name and layout (`check_layout`)."""
    on_device: dict[torch.device, list[tuple[torch.Tensor, torch.Tensor]]] = {}
    with torch.no_grad():
        for name, target in into.items():
            # Detached: who is a view of another parameter is filled like any other.
            target = target.detach()
            if target.device.type == "cuda" and target.is_contiguous():
                on_device.setdefault(target.device, []).append((target, tensors[name]))
            else:
                target.copy_(tensors[name])
    for pairs in on_device.values():
        upload(pairs)


def _why_not_filled(target: torch.Tensor) -> str:
    """Found before anything is copied: half of a state is worse than none."""
    if target.is_meta:
        return "it has no memory (device meta)"
    if target.is_inference() and not torch.is_inference_mode_enabled():
        return "it was made in inference mode"
    steps = zip(target.shape, target.stride(), strict=True)
    extent = 1 + sum((size - 1) * stride for size, stride in steps)
    if target.numel() > extent or torch._debug_has_internal_overlap(target) == 1:
        return "its elements share memory"
    if not _can_be_copied(target.dtype):
        return f"this torch copies no {dtype_name(target.dtype)}"
    return ""


@functools.cache
def _can_be_copied(dtype: torch.dtype) -> bool:
    try:
        torch.empty(1, dtype=dtype).copy_(torch.empty(1, dtype=dtype))
    except RuntimeError:
        return False
    return True


def _check_apart(
    key: str, stored: Mapping[str, TensorEntry], into: Mapping[str, torch.Tensor]
) -> None:
    """Raise LayoutMismatch when one target would be overwritten by another's content: those that
    are tied (the very same memory) must be stored with the same bytes."""
    by_storage: dict[tuple[str, int], list[str]] = {}
    for name, target in into.items():
        if target.numel() and target.is_contiguous():
            place = (str(target.device), target.untyped_storage().data_ptr())
            by_storage.setdefault(place, []).append(name)
    for names in by_storage.values():
        names.sort(key=lambda name: into[name].data_ptr())
        for before, after in itertools.pairwise(names):
            first, second = into[before], into[after]
            if second.data_ptr() >= first.data_ptr() + first.nbytes:
                continue
            tied = first.data_ptr() == second.data_ptr() and first.nbytes == second.nbytes
            if not tied or stored[before].checksum != stored[after].checksum:
                raise LayoutMismatch(
                    key, f"'{before}' and '{after}' share memory, and are stored with other bytes"
                )


def _numbers(sizes: object) -> bool:
    return isinstance(sizes, tuple | list) and all(type(size) is int for size in sizes)


@dataclass(frozen=True)
class ChecksumSpan:
    """Bytes of the data section with a checksum: a tensor, or a piece of a large one."""

    offset: int
    nbytes: int
    checksum: str
    name: str


@dataclass(frozen=True)
class Chunk:
    """What is sent, verified, and sent again at once: neighbouring spans, at most
    `PIECE_BYTES` of them together (and the padding between them)."""

    offset: int
    nbytes: int
    spans: tuple[ChecksumSpan, ...]

    def of(self, data: memoryview) -> memoryview:
        """Its bytes in the data section."""
        return data[self.offset : self.offset + self.nbytes]

    def damaged(self, data: memoryview) -> str:
        """Name of the first tensor in it whose bytes are not those that were set; "" for none."""
        check = Verification(self, data)
        check.upto(self.nbytes)
        return check.damaged


class Verification:
    """Verifies a chunk as its bytes come, in order: what has just come is still in the cache.

    `damaged`: name of the first tensor whose bytes are not those that were set; "" for none so far.
    """

    def __init__(self, chunk: Chunk, data: memoryview) -> None:
        self.damaged = ""
        self._data, self._begin, self._done = data, chunk.offset, chunk.offset
        self._spans = deque(chunk.spans)
        self._hash = hasher()

    def upto(self, nbytes: int) -> None:
        """The first `nbytes` of the chunk are there."""
        end = self._begin + nbytes
        while self._spans:
            span = self._spans[0]
            start, stop = max(self._done, span.offset), min(end, span.offset + span.nbytes)
            if start < stop:
                self._hash.update(self._data[start:stop])
                self._done = stop
            if stop < span.offset + span.nbytes:
                return
            if self._hash.hexdigest() != span.checksum:
                self.damaged = self.damaged or span.name
            self._hash = hasher()
            self._spans.popleft()


def messages_of(nbytes: int, message_bytes: int) -> Iterator[tuple[int, int]]:
    """Where each of the messages that a chunk comes in begins and ends; one for 0."""
    size = message_bytes or nbytes
    return ((at, min(at + size, nbytes)) for at in range(0, nbytes, size))


def spans_of(manifest: Manifest) -> Iterator[ChecksumSpan]:
    """Everything that has bytes, in the order of the data section."""
    for entry in manifest.entries:
        if not entry.pieces:
            if entry.nbytes:
                yield ChecksumSpan(entry.offset, entry.nbytes, entry.checksum, entry.name)
            continue
        for place, checksum in enumerate(entry.pieces):
            start = place * PIECE_BYTES
            size = min(PIECE_BYTES, entry.nbytes - start)
            yield ChecksumSpan(entry.offset + start, size, checksum, entry.name)


def chunks_of(manifest: Manifest) -> tuple[Chunk, ...]:
    """All bytes of a state."""
    made: list[Chunk] = []
    held: list[ChecksumSpan] = []
    for span in spans_of(manifest):
        if held and span.offset + span.nbytes - held[0].offset > PIECE_BYTES:
            made.append(_chunk(held))
            held = []
        held.append(span)
    if held:
        made.append(_chunk(held))
    return tuple(made)


def _chunk(spans: list[ChecksumSpan]) -> Chunk:
    offset, last = spans[0].offset, spans[-1]
    return Chunk(offset, last.offset + last.nbytes - offset, tuple(spans))


# The last byte is the format's number: 2 has checksums by pieces, 3 one of the manifest.
MAGIC: Final = b"TROUPE\x00\x03"
# Tensors start on cache lines, which every dtype's alignment divides.
ALIGN: Final = 64
_MAX_MANIFEST_BYTES: Final = 256 << 20
# A file is locked against readers for the moment between its rename and its unlocking.
_LOCKED_SECONDS: Final = 5.0
_NO_CHECKSUM: Final = "0" * 32

# What a state is written from.
Bytes = memoryview | DeviceBytes | DeferredBytes


def draft(
    key: str,
    tensors: Mapping[str, torch.Tensor],
    metadata: Mapping[str, str],
    *,
    nesting: str = "",
    base: str = "",
    shards: Mapping[str, Shard] | None = None,
) -> tuple[Manifest, list[Bytes]]:
    """The manifest of `tensors` with empty checksums, as long as it will be with them, and their
    bytes in the manifest's order (by name). Deferred tensors are not made for it."""
    deferred = deferred_bytes(tensors) if isinstance(tensors, DeferredTensors) else {}
    layout = tensors.layout if isinstance(tensors, DeferredTensors) else tensors
    check_shards(layout, shards or {})
    entries: list[TensorEntry] = []
    views: list[Bytes] = []
    offset = 0
    for name in sorted(layout):
        tensor = layout[name]
        view: Bytes
        if deferred:
            view = deferred[name]
        elif tensor.device.type == "cuda":
            view = DeviceBytes(tensor)
        else:
            view = host_bytes(tensor)
        shape = tuple(tensor.shape)
        count = -(-len(view) // PIECE_BYTES) if len(view) > PIECE_BYTES else 0
        pieces = (_NO_CHECKSUM,) * count
        shard = (shards or {}).get(name)
        entries.append(
            TensorEntry(
                name,
                dtype_name(tensor.dtype),
                shape,
                offset,
                len(view),
                _NO_CHECKSUM,
                pieces,
                shard,
            )
        )
        views.append(view)
        offset = _aligned(offset + len(view))
    made = Manifest(
        key, version_in(key), _NO_CHECKSUM, tuple(entries), dict(metadata), nesting, base
    )
    return made, views


def signed(manifest: Manifest, checksums: list[tuple[str, tuple[str, ...]]]) -> Manifest:
    """A draft with the checksums of its tensors and their pieces."""
    entries = tuple(
        replace(entry, checksum=checksum, pieces=pieces)
        for entry, (checksum, pieces) in zip(manifest.entries, checksums, strict=True)
    )
    parts = {e.name: (e.dtype, e.shape, e.checksum) for e in entries}
    return replace(manifest, checksum=combine(parts, manifest.nesting), entries=entries)


def prefix(manifest: Manifest) -> bytes:
    """All of a file before its tensors."""
    header = manifest.to_json()
    start = _aligned(len(MAGIC) + 8 + len(header))
    return (MAGIC + len(header).to_bytes(8, "little") + header).ljust(start, b"\0")


def read_manifest(path: Path) -> Manifest:
    """The manifest alone. FileNotFoundError, or ValueError when the file is damaged."""
    with leased(path) as file:
        return _read_header(file)[0]


def read(path: Path) -> tuple[Manifest, dict[str, torch.Tensor], tuple[int, int]]:
    """Map `path`: manifest, tensors over the mapping (no copy), and the file's identity.

    The mapping is copy-on-write: writing to a tensor changes neither the file nor what
    other readers see, and the file may be deleted or replaced meanwhile.
    FileNotFoundError, or ValueError when the file is damaged. Bytes are not verified.
    """
    manifest, mapping, start, status = _map(path)
    tensors = {entry.name: view(mapping, start, entry) for entry in manifest.entries}
    return manifest, tensors, identity_in(status)


def read_bytes(path: Path) -> tuple[Manifest, memoryview]:
    """Map `path` like `read`: manifest and the whole data section as bytes."""
    manifest, mapping, start, _ = _map(path)
    return manifest, memoryview(mapping)[start : start + manifest.end]


def damaged(entry: TensorEntry, tensor: torch.Tensor) -> bool:
    """Whether `tensor` does not hold the bytes that were set."""
    return bytes_checksum(host_bytes(tensor)) != entry.checksum


def identity(path: Path) -> tuple[int, int]:
    """Changes whenever the file under `path` is another one, or was written to or renamed."""
    return identity_in(path.stat())


def identity_in(status: os.stat_result) -> tuple[int, int]:
    """`identity` of a file that is open."""
    return status.st_ino, status.st_ctime_ns


def leased(path: Path) -> io.BufferedReader:
    """The file under `path`, which nobody uses again while it, or a mapping of it, is open.

    Raises FileNotFoundError, or ValueError for one that stays locked.
    """
    deadline = time.monotonic() + _LOCKED_SECONDS
    while True:
        file = open(path, "rb")  # noqa: SIM115
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            if os.fstat(file.fileno()).st_ino == path.stat().st_ino:
                return file
        except BlockingIOError:
            if time.monotonic() > deadline:
                file.close()
                raise ValueError(f"locked for {_LOCKED_SECONDS:g} s") from None
            time.sleep(0.001)
        except BaseException:
            file.close()
            raise
        file.close()


def opened(path: Path) -> tuple[Manifest, int, io.BufferedReader]:
    """Manifest, where the tensors begin, and the file, leased while it is open.

    Raises what `leased` does; ValueError also when the file is damaged.
    """
    file = leased(path)
    try:
        manifest, start = _read_header(file)
        size = os.fstat(file.fileno()).st_size
        if size != start + manifest.end:
            raise ValueError(f"{size} bytes long instead of {start + manifest.end}")
    except BaseException:
        file.close()
        raise
    return manifest, start, file


def _map(path: Path) -> tuple[Manifest, mmap.mmap, int, os.stat_result]:
    manifest, start, file = opened(path)
    with file:
        # The mapping keeps a duplicate of the descriptor, and with it the lease.
        mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        return manifest, mapping, start, os.fstat(file.fileno())


def _read_header(file: io.BufferedReader) -> tuple[Manifest, int]:
    prefix = file.read(len(MAGIC) + 8)
    if len(prefix) < len(MAGIC) + 8 or not prefix.startswith(MAGIC[:-1]):
        raise ValueError("not a state file")
    if not prefix.startswith(MAGIC):
        raise ValueError(
            f"written in format {prefix[len(MAGIC) - 1]} by another version of Troupe, this one "
            f"reads format {MAGIC[-1]}"
        )
    length = int.from_bytes(prefix[len(MAGIC) :], "little")
    if length > _MAX_MANIFEST_BYTES:
        raise ValueError(f"a manifest of {length} bytes is longer than allowed")
    return Manifest.from_json(file.read(length)), _aligned(len(prefix) + length)


def view(mapping: Any, start: int, entry: TensorEntry) -> torch.Tensor:
    """One tensor over the bytes of a file, whose tensors begin at `start`."""
    dtype = dtype_of(entry.dtype)
    if entry.nbytes == 0:
        return torch.empty(entry.shape, dtype=dtype)
    count = entry.nbytes // dtype.itemsize
    flat = torch.frombuffer(mapping, dtype=dtype, count=count, offset=start + entry.offset)
    return flat.reshape(entry.shape)


def _aligned(offset: int) -> int:
    return -(-offset // ALIGN) * ALIGN
