"""A reader of safetensors files that reads one tensor at a time, without mapping files into memory.

The safetensors library maps whole files, and mapped pages count as memory of the process while they
are in use. This reader needs only one tensor's memory for a checkpoint of 64 GB.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

import torch

from troupe.transfer.checksum import PIECE_BYTES, dtype_of, flat_bytes
from troupe.yaml_input import each_once

# The format's names of dtypes, by torch's.
DTYPE_NAMES: Final = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}
_DTYPES: Final = {name: dtype_of(dtype) for dtype, name in DTYPE_NAMES.items()}
_LENGTH_BYTES: Final = 8
# The longest header that the format allows.
_MOST_HEADER_BYTES: Final = 100_000_000
# Larger than any memory, and far below the overflow of sizes.
_MOST_BYTES: Final = 1 << 56
SINGLE: Final = "model.safetensors"
INDEX: Final = "model.safetensors.index.json"
# Where torch.distributed.checkpoint keeps the offsets of a rank's part of each tensor.
_SHARDING: Final = "DCP_SHARDING_INFO"


@dataclass(frozen=True)
class _StoredPart:
    """A part of one tensor in a file: a box at byte `start`, with this shape, at `offsets` in the
    tensor."""

    path: Path
    start: int
    shape: tuple[int, ...]
    offsets: tuple[int, ...]


class StoredTensors(Mapping[str, torch.Tensor]):
    """The tensors in safetensors files, read from disk on every access.

    The files may form a checkpoint, or come from ranks with parts of each tensor, as
    `torch.distributed.checkpoint` writes them. `layout`: the tensors on the meta device.
    """

    def __init__(self, files: Iterable[Path]) -> None:
        """Read the files' headers. Raises OSError, or ValueError for a malformed one."""
        self._parts: dict[str, list[_StoredPart]] = {}
        dtypes: dict[str, torch.dtype] = {}
        for path in files:
            for name, dtype, part in _header_of(path):
                if dtypes.setdefault(name, dtype) != dtype:
                    raise ValueError(f"'{name}' has another dtype in {path.name}")
                self._parts.setdefault(name, []).append(part)
        self.layout: dict[str, torch.Tensor] = {}
        for name, parts in self._parts.items():
            ends = ([o + n for o, n in zip(p.offsets, p.shape, strict=True)] for p in parts)
            shape = [max(sizes) for sizes in zip(*ends, strict=True)]
            if math.prod(shape) != sum(math.prod(part.shape) for part in parts):
                raise ValueError(f"'{name}' is incomplete: a part is missing or duplicated")
            self.layout[name] = torch.empty(shape, dtype=dtypes[name], device="meta")

    @classmethod
    def of_checkpoint(cls, folder: Path) -> StoredTensors:
        """Return the weights of a checkpoint, in one file or several. Raises the errors of the
        constructor."""
        return cls(weight_files(folder))

    def only(self, names: Iterable[str]) -> StoredTensors:
        """Return only the tensors with the given names."""
        wanted = set(names)
        found = StoredTensors(())
        found._parts = {name: parts for name, parts in self._parts.items() if name in wanted}
        found.layout = {name: tensor for name, tensor in self.layout.items() if name in wanted}
        return found

    def read(
        self, name: str, dtype: torch.dtype | None = None, rows: range | None = None
    ) -> torch.Tensor:
        """Return one tensor in host memory, cast to `dtype` while it is read; `rows`: only these
        rows of its first dimension.

        Raises OSError, or ValueError for a file that ends early.
        """
        stored = self.layout[name]
        shape = list(stored.shape)
        begin, end = 0, shape[0] if shape else 1
        if rows is not None:
            begin, end, shape[0] = rows.start, rows.stop, len(rows)
        into = torch.empty(shape, dtype=dtype or stored.dtype)
        cast = into.dtype != stored.dtype
        buffer = torch.empty(PIECE_BYTES // stored.itemsize if cast else 0, dtype=stored.dtype)
        for part in self._parts[name]:
            where = [slice(o, o + n) for o, n in zip(part.offsets, part.shape, strict=True)]
            start = part.start
            if where:
                own = where[0]
                first, last = max(begin, own.start), min(end, own.stop)
                if first >= last:
                    continue
                where[0] = slice(first - begin, last - begin)
                row = math.prod(part.shape[1:]) * stored.element_size()
                start += (first - own.start) * row
            with part.path.open("rb") as file:
                file.seek(start)
                _fill(into[tuple(where)], file, buffer)
        return into

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.read(name)

    def __contains__(self, name: object) -> bool:
        return name in self.layout  # the default of `Mapping` would read the tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self.layout)

    def __len__(self) -> int:
        return len(self.layout)


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files of a model's checkpoint: `model.safetensors` if there is one (as
    transformers chooses), else the files in its index.

    Raises OSError, or ValueError for a malformed index, including one that names files outside the
    directory.
    """
    single, index = folder / SINGLE, folder / INDEX
    if single.is_file() or not index.is_file():
        return [single]
    try:
        text = index.read_text(encoding="utf-8")
        names = set(json.loads(text, object_pairs_hook=each_once)["weight_map"].values())
        for name in names:
            if Path(name).name != name or not name.endswith(".safetensors"):
                raise ValueError(f"{name!r} does not name a safetensors file next to it")
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        reason = str(error) if isinstance(error, ValueError) else repr(error)
        raise ValueError(f"{INDEX} is not an index of a checkpoint: {reason}") from error
    if not names:
        raise ValueError(f"{INDEX} is not an index of a checkpoint: it does not name a file")
    return [folder / name for name in sorted(names)]


def checkpoint_folder(source: str | Path, revision: str | None = None) -> Path:
    """Return the directory of a checkpoint: `source` itself, or the local copy of the hub's files.

    Missing files are fetched. Raises the errors of `huggingface_hub`.
    """
    if Path(source).is_dir():
        return Path(source)
    from huggingface_hub import snapshot_download

    kept = snapshot_download(
        str(source), revision=revision, allow_patterns=["*.json", "*.safetensors"]
    )
    return Path(kept)


def _fill(into: torch.Tensor, file: BinaryIO, buffer: torch.Tensor) -> None:
    """Fill `into`, which may be strided, in C order; through `buffer`, which has the file's dtype,
    unless `buffer` is empty."""
    if not into.numel():
        return
    if not into.is_contiguous():
        for row in into:
            _fill(row, file, buffer)
        return
    if not len(buffer):
        _read_into(file, flat_bytes(into))
        return
    for target in torch.split(into.reshape(-1), len(buffer)):
        piece = buffer[: len(target)]
        _read_into(file, flat_bytes(piece))
        target.copy_(piece)


def _read_into(file: BinaryIO, into: torch.Tensor) -> None:
    data = memoryview(into.numpy().data)
    while data:
        count = file.readinto(data)  # type: ignore[attr-defined]  # at most 2 GiB at once
        if not count:
            raise ValueError(f"{file.name} ends early")
        data = data[count:]


def _header_of(path: Path) -> Iterator[tuple[str, torch.dtype, _StoredPart]]:
    """Yield (name, dtype, part) of each tensor in a file.

    Raises ValueError for a header that breaks the format's rules: each name denotes one tensor, and
    every byte after the header belongs to exactly one tensor.
    """
    with path.open("rb") as file:
        length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        begin, size = _LENGTH_BYTES + length, path.stat().st_size
        if not 0 < length <= _MOST_HEADER_BYTES or begin > size:
            raise ValueError(
                f"{path.name} is not a safetensors file: its header ends outside the file"
            )
        text = file.read(length)
    try:
        entries: dict[str, Any] = json.loads(text, object_pairs_hook=each_once)
        about = entries.pop("__metadata__", None) or {}
        known = json.loads(about.get(_SHARDING, "{}"), object_pairs_hook=each_once)
        found = [
            _entry(path, begin, name, entry, known.get(name)) for name, entry in entries.items()
        ]
        end = begin
        for name, dtype, part in sorted(found, key=_by_place):
            if part.start != end:
                raise ValueError(f"'{name}' leaves a gap, or overlaps another tensor")
            end += math.prod(part.shape) * dtype.itemsize
            if end > size:
                raise ValueError(f"'{name}' is not within the file")
        if end < size:
            raise ValueError(f"{size - end:,} bytes at its end do not belong to a tensor")
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        reason = str(error) if isinstance(error, ValueError) else repr(error)
        raise ValueError(f"{path.name} is not a safetensors file: {reason}") from error
    yield from found


def _by_place(one: tuple[str, torch.dtype, _StoredPart]) -> tuple[int, int]:
    return one[2].start, math.prod(one[2].shape)  # tensors without values before the next one


def _entry(
    path: Path, begin: int, name: str, entry: Mapping[str, Any], sharding: Mapping[str, Any] | None
) -> tuple[str, torch.dtype, _StoredPart]:
    """Return the tensor that a header describes by `entry`: name, dtype and place. Raises
    ValueError, KeyError or TypeError."""
    if (dtype := _DTYPES.get(entry["dtype"])) is None:
        raise ValueError(f"'{name}' has the unknown dtype {entry['dtype']!r}")
    shape: tuple[int, ...] = tuple(entry["shape"])
    start, end = entry["data_offsets"]
    at = tuple(sharding["saved_offsets"]) if sharding else (0,) * len(shape)
    if any(type(number) is not int or number < 0 for number in (*shape, start, end, *at)):
        raise ValueError(f"'{name}' has a shape or offset that is not a whole number of at least 0")
    # Even with empty dimensions, torch multiplies the others.
    if math.prod(max(1, n) for n in (*shape, *at)) >= _MOST_BYTES:
        raise ValueError(f"'{name}' has a shape of too many values: {list(shape)}")
    if end - start != math.prod(shape) * dtype.itemsize:
        raise ValueError(
            f"'{name}' has {end - start:,} bytes, which do not match its shape and dtype"
        )
    return name, dtype, _StoredPart(path, begin + start, shape, at[: len(shape)])
