"""The file format of a state: safetensors, with Troupe's manifest in the header's metadata.

A state is one file, so that one rename makes either all of it visible or nothing. A reader holds a
shared lock while it has the file mapped; a file without name and readers may be refilled. Other
programs (an inference server) read the same file in place.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import math
import mmap
import os
import re
import time
from abc import ABC, abstractmethod
from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping, Sequence
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
from troupe.transfer.errors import UnknownCodec
from troupe.transfer.staging import DeviceBytes


def named_tensors(state: Any) -> dict[str, torch.Tensor]:
    """Return `state` if it maps names to dense tensors. Raises InvalidArgument."""
    if not isinstance(state, Mapping):
        raise _refused("", f"is a {type(state).__qualname__}")
    for name, tensor in state.items():
        if type(name) is not str:
            raise _refused("", f"has the key {name!r}; names are str")
        if not isinstance(tensor, torch.Tensor):
            raise _refused(name, f"is a {type(tensor).__qualname__}")
        _check(name, tensor)
    return dict(state)


def _check(name: str, tensor: torch.Tensor) -> None:
    """Raise InvalidArgument for a tensor that is not a dense array with its own memory."""
    kind = "meta" if tensor.is_meta else str(tensor.layout).removeprefix("torch.")
    if tensor.is_quantized or tensor.is_nested:
        kind = "quantized" if tensor.is_quantized else "nested"
    if kind != "strided":
        raise _refused(name, f"is a {kind} tensor")
    if why := _why_no_memory(tensor):
        raise _refused(name, why)


def _why_no_memory(tensor: torch.Tensor) -> str:
    """Return why a tensor's bytes cannot be read; "" if they can. Reading a tensor that wraps
    others, or whose storage was shrunk, would return memory of another object."""
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


def _refused(name: str, why: str) -> InvalidArgument:
    return InvalidArgument(
        f"'{name or 'the state'}' {why}",
        kind="transfer_not_tensors",
        field="state",
        value=name,
        remedy="Give a mapping from names to dense tensors.",
    )


_VERSION = re.compile(r"@([0-9]+)\Z")
_SEAL_BYTES = len(',"seal":""}') + 32
# Number of cached parsed manifests, which are read several times while their states move.
_MOST_KNOWN: Final = 8


def version_in(key: str) -> int:
    """Return the version in a key: `job/policy/weights@3` -> 3; -1 for a key without a version."""
    match = _VERSION.search(key)
    # 20 digits are more than any version may have (63 bits), and `int` refuses thousands of them.
    return int(match[1].lstrip("0")[:20] or "0") if match else -1


def stem_of(key: str) -> str:
    """Return a key without its version: `job/policy/weights@3` -> `job/policy/weights`."""
    return _VERSION.sub("", key)


class Codec(ABC):
    """How the stored bytes of a tensor become the tensor.

    Each tensor of a state has a dtype and a codec of its own. Checksums are of stored bytes.
    """

    @abstractmethod
    def nbytes(self, dtype: torch.dtype, shape: Sequence[int]) -> int:
        """Return the number of stored bytes of a tensor."""

    @abstractmethod
    def decode(
        self, data: Any, offset: int, dtype: torch.dtype, shape: Sequence[int]
    ) -> torch.Tensor:
        """Return the tensor that is stored in the buffer `data`, beginning at `offset` (bytes)."""


class RawCodec(Codec):
    """The codec of elements in C order, as in memory."""

    def nbytes(self, dtype: torch.dtype, shape: Sequence[int]) -> int:
        """See `Codec`."""
        return math.prod(shape) * dtype.itemsize

    def decode(
        self, data: Any, offset: int, dtype: torch.dtype, shape: Sequence[int]
    ) -> torch.Tensor:
        """See `Codec`. No copy is made: the tensor lies over `data`."""
        count = math.prod(shape)
        if count == 0:
            return torch.empty(tuple(shape), dtype=dtype)
        flat = torch.frombuffer(data, dtype=dtype, count=count, offset=offset)
        return flat.reshape(tuple(shape))


RAW: Final = "raw"
# Codecs that this release reads, by their names in manifests. It writes every tensor as `RAW`.
CODECS: Final[dict[str, Codec]] = {RAW: RawCodec()}


@dataclass(frozen=True)
class TensorEntry:
    """One tensor: `nbytes` bytes from `offset` (bytes) in the data section."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    checksum: str
    # Checksums of each `PIECE_BYTES`; none for a tensor that is a single piece.
    pieces: tuple[str, ...] = ()
    # Name of its `Codec`. Manifests leave out `RAW`, as before codecs existed.
    codec: str = RAW

    def to_fields(self) -> dict[str, Any]:
        """Return its fields in the manifest."""
        fields = dict(vars(self))
        if self.codec == RAW:
            del fields["codec"]
        return fields

    def decoded(self, data: Any) -> torch.Tensor:
        """Return the tensor, from the data section."""
        return CODECS[self.codec].decode(data, self.offset, dtype_of(self.dtype), self.shape)


@dataclass(frozen=True)
class Manifest:
    """The layout of one stored state.

    `checksum` names the content: equal content has an equal checksum, independent of the order of
    the given tensors. `version` is the number after '@' in the key, or -1. `base` is the key of a
    state with mostly equal content, "" for none.
    """

    key: str
    version: int
    checksum: str
    entries: tuple[TensorEntry, ...]
    metadata: Mapping[str, str] = field(default_factory=dict)
    base: str = ""

    def __post_init__(self) -> None:
        # Several callers may share one manifest.
        object.__setattr__(self, "metadata", MappingProxyType(dict(self.metadata)))

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors, without padding."""
        return sum(entry.nbytes for entry in self.entries)

    @property
    def end(self) -> int:
        """Length of the data section in bytes."""
        return max((entry.offset + entry.nbytes for entry in self.entries), default=0)

    def to_json(self) -> bytes:
        """Return compact JSON, UTF-8, that ends with its own checksum, since `checksum` does not
        cover metadata and base. (`dataclasses.asdict` takes seconds for thousands of pieces.)"""
        made = {**vars(self), "entries": [entry.to_fields() for entry in self.entries]}
        text = json.dumps(made, separators=(",", ":"), default=dict).encode()
        return text[:-1] + _seal(text)

    @staticmethod
    def from_json(data: bytes) -> Manifest:
        """Parse the result of `to_json`. Raises ValueError if `data` is not a consistent manifest,
        and UnknownCodec if a tensor of it cannot be read."""
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
                raw["base"],
            )
            for entry in manifest.entries:
                _check_entry(manifest.key, entry)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"not a manifest: {error!r}") from error
        parts = {
            entry.name: (entry.dtype, entry.shape, entry.checksum) for entry in manifest.entries
        }
        if combine(parts) != manifest.checksum:
            raise ValueError("the manifest's own checksum does not match its entries")
        _keep(_known, given, manifest)
        return manifest


# The most recently parsed manifests, by their JSON and by their header.
_known: Final[OrderedDict[bytes, Manifest]] = OrderedDict()
_headers: Final[OrderedDict[bytes, Manifest]] = OrderedDict()


def _keep(known: OrderedDict[bytes, Manifest], text: bytes, manifest: Manifest) -> None:
    known[text] = manifest
    with contextlib.suppress(KeyError):  # another thread may remove it first
        while len(known) > _MOST_KNOWN:
            known.popitem(last=False)


def _seal(text: bytes) -> bytes:
    return b',"seal":"%s"}' % xxhash.xxh3_128_hexdigest(text).encode()


def _entry(raw: dict[str, Any]) -> TensorEntry:
    fields = {"shape": tuple(raw["shape"]), "pieces": tuple(raw["pieces"])}
    return TensorEntry(**{**raw, **fields})


def _check_entry(key: str, entry: TensorEntry) -> None:
    codec = CODECS.get(entry.codec)
    if codec is None:
        known = ", ".join(CODECS)
        raise UnknownCodec(key, f"'{entry.name}' has the codec '{entry.codec}'; known: {known}")
    if entry.nbytes != codec.nbytes(dtype_of(entry.dtype), entry.shape):
        raise ValueError(f"{entry.name}: size does not follow from dtype and shape")
    if entry.offset < 0 or any(size < 0 for size in entry.shape):
        raise ValueError(f"{entry.name}: negative offset or shape")
    count = -(-entry.nbytes // PIECE_BYTES) if entry.nbytes > PIECE_BYTES else 0
    if len(entry.pieces) != count or (count and whole(entry.pieces) != entry.checksum):
        raise ValueError(f"{entry.name}: its pieces' checksums do not make its own")


@dataclass(frozen=True)
class ChecksumSpan:
    """Bytes of the data section with a checksum: a tensor, or a piece of a large tensor."""

    offset: int
    nbytes: int
    checksum: str
    name: str


@dataclass(frozen=True)
class Chunk:
    """The unit of sending, verifying and repeating: adjacent spans, at most `PIECE_BYTES` together
    (plus the padding between them)."""

    offset: int
    nbytes: int
    spans: tuple[ChecksumSpan, ...]

    def of(self, data: memoryview) -> memoryview:
        """Return bytes of the chunk in the data section."""
        return data[self.offset : self.offset + self.nbytes]

    def damaged(self, data: memoryview) -> str:
        """Return the name of the first tensor in it whose bytes differ from the original; "" for
        none."""
        check = Verification(self, data)
        check.upto(self.nbytes)
        return check.damaged


class Verification:
    """The verification of a chunk while its bytes arrive in order and are still in the cache.

    `damaged`: name of the first tensor whose bytes differ from the original; "" for none so far.
    """

    def __init__(self, chunk: Chunk, data: memoryview) -> None:
        self.damaged = ""
        self._data, self._begin, self._done = data, chunk.offset, chunk.offset
        self._spans = deque(chunk.spans)
        self._hash = hasher()

    def upto(self, nbytes: int) -> None:
        """Hash up to the first `nbytes` of the chunk, which have arrived."""
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
    """Return begin and end of each message of a chunk; one message for `message_bytes` 0."""
    size = message_bytes or nbytes
    return ((at, min(at + size, nbytes)) for at in range(0, nbytes, size))


def spans_of(manifest: Manifest) -> Iterator[ChecksumSpan]:
    """Yield the spans of all tensors that have bytes, in the order of the data section."""
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
    """Return all bytes of a state as chunks, cut the same way on every host."""
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


# The beginning of every header, with the number of Troupe's format.
_LEAD: Final = '{"__metadata__":{"format":"pt","troupe":"5","manifest":'
_OTHER: Final = re.compile(rb'\{"__metadata__":\{"format":"pt","troupe":"([0-9]+)"')
# The first bytes of format 4 and older ones, which were not safetensors.
_FORMER: Final = b"TROUPE\x00"
# Tensors of whole cache lines, which nearly all are, start on cache lines.
ALIGN: Final = 64
# Of the safetensors library.
_MAX_HEADER_BYTES: Final = 100_000_000
# Names of dtypes in safetensors, where other dtypes and tensors with a codec are bytes.
_SAFETENSORS: Final = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "complex64": "C64",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
}
# A file is briefly locked against readers, between its rename and its unlocking.
_LOCKED_SECONDS: Final = 5.0
_NO_CHECKSUM: Final = "0" * 32

# The bytes of one tensor, as `write` takes them.
Bytes = memoryview | DeviceBytes | DeferredBytes


def draft(
    key: str,
    tensors: Mapping[str, torch.Tensor],
    metadata: Mapping[str, str],
    *,
    base: str = "",
) -> tuple[Manifest, list[Bytes]]:
    """Return the manifest of `tensors` with empty checksums but its final length, and their bytes
    in the manifest's order: without gaps (safetensors), first tensors that keep their successors on
    cache lines, then tensors of wide dtypes. Deferred tensors are not made for it."""
    deferred = deferred_bytes(tensors) if isinstance(tensors, DeferredTensors) else {}
    layout = tensors.layout if isinstance(tensors, DeferredTensors) else tensors
    entries: list[TensorEntry] = []
    views: list[Bytes] = []
    offset = 0
    order = {
        name: (tensor.nbytes % ALIGN != 0, -tensor.itemsize, name)
        for name, tensor in layout.items()
    }
    for name in sorted(layout, key=order.__getitem__):
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
        dtype = dtype_name(tensor.dtype)
        entries.append(TensorEntry(name, dtype, shape, offset, len(view), _NO_CHECKSUM, pieces))
        views.append(view)
        offset += len(view)
    made = Manifest(key, version_in(key), _NO_CHECKSUM, tuple(entries), dict(metadata), base)
    return made, views


def signed(manifest: Manifest, checksums: list[tuple[str, tuple[str, ...]]]) -> Manifest:
    """Return a draft with the checksums of its tensors and their pieces."""
    entries = tuple(
        replace(entry, checksum=checksum, pieces=pieces)
        for entry, (checksum, pieces) in zip(manifest.entries, checksums, strict=True)
    )
    parts = {e.name: (e.dtype, e.shape, e.checksum) for e in entries}
    return replace(manifest, checksum=combine(parts), entries=entries)


def prefix(manifest: Manifest) -> bytes:
    """Return the bytes of a file before its tensors: length and header of safetensors."""
    parts = [_LEAD, json.dumps(manifest.to_json().decode()), "}"]
    for entry in manifest.entries:
        dtype, shape = _SAFETENSORS.get(entry.dtype), list(entry.shape)
        if dtype is None or entry.codec != RAW:
            dtype, shape = "U8", [entry.nbytes]
        where = f"[{entry.offset},{entry.offset + entry.nbytes}]"
        parts.append(
            f',{json.dumps(entry.name)}:{{"dtype":"{dtype}","shape":{shape},"data_offsets":{where}}}'
        )
    parts.append("}")
    header = "".join(parts).encode()
    length = _aligned(8 + len(header)) - 8
    return length.to_bytes(8, "little") + header.ljust(length)


def read_manifest(path: Path) -> Manifest:
    """Return only the manifest. Raises FileNotFoundError, or ValueError if the file is damaged."""
    with leased(path) as file:
        return _read_header(file)[0]


@dataclass(frozen=True)
class MappedState:
    """A state file that is mapped. Its bytes are not verified."""

    manifest: Manifest
    # The data section, a buffer of bytes. It keeps the lease of the file.
    data: Any
    # `identity` of the file.
    identity: tuple[int, int]

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors by name; raw ones lie over the mapping, without a copy."""
        return {entry.name: entry.decoded(self.data) for entry in self.manifest.entries}


def read(path: Path) -> MappedState:
    """Map `path`.

    The mapping is copy-on-write: writing to a tensor changes neither the file nor what other
    readers see, and the file may be deleted or replaced meanwhile. Raises FileNotFoundError,
    ValueError if the file is damaged, or UnknownCodec.
    """
    manifest, start, file = opened(path)
    with file:
        # The mapping keeps a duplicate of the descriptor, and with it the lease.
        mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        data = memoryview(mapping)[start : start + manifest.end]
        return MappedState(manifest, data, identity_in(os.fstat(file.fileno())))


def damaged(entry: TensorEntry, data: Any) -> bool:
    """Return whether a tensor's bytes in the data section differ from the original."""
    stored = memoryview(data)[entry.offset : entry.offset + entry.nbytes]
    return bytes_checksum(stored) != entry.checksum


def identity(path: Path) -> tuple[int, int]:
    """Return inode and time of the last write, which differ after the file at `path` was replaced
    or written to. (The change time is unsuitable, since a further name of a file changes it.)"""
    return identity_in(path.stat())


def identity_in(status: os.stat_result) -> tuple[int, int]:
    """Return the `identity` of an open file."""
    return status.st_ino, status.st_mtime_ns


def leased(path: Path) -> io.BufferedReader:
    """Open the file at `path`, which is not refilled while it, or a mapping of it, is open.

    Raises FileNotFoundError, or ValueError if the file stays locked.
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
    """Return manifest, offset of the tensors, and the file, leased while it is open.

    Raises the errors of `leased`, and ValueError if the file is damaged.
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


def _read_header(file: io.BufferedReader) -> tuple[Manifest, int]:
    """Return the manifest, and where the tensors begin. ValueError unless every byte before them is
    what was written: other programs read the rest of the header."""
    first = file.read(8)
    if first.startswith(_FORMER) and len(first) == 8:
        raise _other_format(first[-1])
    length = int.from_bytes(first, "little")
    if len(first) < 8 or length > _MAX_HEADER_BYTES:
        raise ValueError("not a state file")
    header = file.read(length)
    if not header.startswith(_LEAD.encode()):
        other = _OTHER.match(header)
        raise _other_format(int(other[1])) if other else ValueError("not a state file")
    manifest = _headers.get(header)
    if manifest is None:
        text, _ = json.JSONDecoder().raw_decode(header.decode(), len(_LEAD))
        if not isinstance(text, str):
            raise ValueError("its manifest is no text")
        manifest = Manifest.from_json(text.encode())
        if prefix(manifest) != first + header:
            raise ValueError("the header does not match the manifest in it")
        _keep(_headers, header, manifest)
    return manifest, 8 + length


def _other_format(number: int) -> ValueError:
    return ValueError(
        f"written in format {number} by another version of Troupe, this one reads format 5"
    )


def _aligned(offset: int) -> int:
    return -(-offset // ALIGN) * ALIGN
