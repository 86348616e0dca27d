"""What is stored under a key: names, dtypes, shapes, places, checksums."""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final

import xxhash

from troupe.transfer.checksum import PIECE_BYTES, combine, dtype_of, whole

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
class Entry:
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
    JSON of the tree around the tensors (`troupe.transfer.nesting`), "" for a flat mapping.
    `base` is the key of a state that most of this one equals, "" for none.
    """

    key: str
    version: int
    checksum: str
    entries: tuple[Entry, ...]
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
                _check(entry)
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


def _plain(entry: Entry) -> dict[str, Any]:
    shard = entry.shard
    return {**vars(entry), "shard": shard and [shard.global_shape, shard.offsets]}


def _entry(raw: dict[str, Any]) -> Entry:
    shard = raw["shard"] and Shard(*map(tuple, raw["shard"]))
    fields = {"shape": tuple(raw["shape"]), "pieces": tuple(raw["pieces"]), "shard": shard}
    return Entry(**{**raw, **fields})


def _check(entry: Entry) -> None:
    if entry.nbytes != math.prod(entry.shape) * dtype_of(entry.dtype).itemsize:
        raise ValueError(f"{entry.name}: size does not follow from dtype and shape")
    if entry.offset < 0 or any(size < 0 for size in entry.shape):
        raise ValueError(f"{entry.name}: negative offset or shape")
    count = -(-entry.nbytes // PIECE_BYTES) if entry.nbytes > PIECE_BYTES else 0
    if len(entry.pieces) != count or (count and whole(entry.pieces) != entry.checksum):
        raise ValueError(f"{entry.name}: its pieces' checksums do not make its own")
