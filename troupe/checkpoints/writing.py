"""Incremental writer of safetensors files, one group of tensors at a time.

The safetensors library needs all tensors at once. Weights in checkpoint format are converted group
by group (`troupe.checkpoints.format`), and a gang's ranks gather them so, to save memory.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch

from troupe.transfer.checksum import dtype_name, host_bytes
from troupe.transfer.deferred import DeferredTensors, Layout

_NAMES: Final = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}
# Longest file of a checkpoint before it is split, as in `save_pretrained`.
_MOST_FILE_BYTES: Final = 50 * 10**9

Write = Callable[[str, torch.Tensor], None]


@contextmanager
def safetensors_file(path: Path, layout: Layout) -> Iterator[Write]:
    """Open a new safetensors file at `path` for tensors of these names, shapes and dtypes.

    Yields a function that writes one tensor; call it once for each, in any order. Raises OSError.
    """
    prefix, offsets = _header(layout)
    with path.open("wb") as file:
        file.write(prefix)

        def write(name: str, tensor: torch.Tensor) -> None:
            file.seek(offsets[name])
            file.write(host_bytes(tensor))

        yield write


def write_checkpoint(folder: Path, tensors: DeferredTensors) -> None:
    """Write a checkpoint's weights into `folder`, with one group of tensors in memory at a time.

    Writes `model.safetensors`, or numbered files with an index if it would exceed 50 GB.
    """
    files = _files(tensors)
    if len(files) > 1:
        index: dict[str, Any] = {
            "metadata": {"total_size": tensors.nbytes},
            "weight_map": {name: file for file, layout in files.items() for name in layout},
        }
        place = folder / "model.safetensors.index.json"
        place.write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
    for file, layout in files.items():
        with safetensors_file(folder / file, layout) as write:
            for number in sorted({tensors.group_of(name) for name in layout}):
                for name, tensor in tensors.made(number).items():
                    write(name, tensor)


def _files(tensors: DeferredTensors) -> dict[str, dict[str, torch.Tensor]]:
    """Distribute the tensors over files: layout by file name; a group is never split."""
    parts: list[dict[str, torch.Tensor]] = [{}]
    size = 0
    for group in tensors.groups:
        nbytes = sum(tensor.nbytes for tensor in group.layout.values())
        if size and size + nbytes > _MOST_FILE_BYTES:
            parts.append({})
            size = 0
        parts[-1].update(group.layout)
        size += nbytes
    if len(parts) == 1:
        return {"model.safetensors": parts[0]}
    count = len(parts)
    return {
        f"model-{number:05d}-of-{count:05d}.safetensors": part
        for number, part in enumerate(parts, start=1)
    }


def _header(layout: Mapping[str, torch.Tensor]) -> tuple[bytes, dict[str, int]]:
    """The header of a safetensors file, and the offset in bytes at which each tensor begins.

    The header is its length (8 bytes), then JSON padded to a multiple of 8. Tensors are sorted by
    name.
    """
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    starts: dict[str, int] = {}
    start = 0
    for name in sorted(layout):
        tensor = layout[name]
        end = start + tensor.numel() * tensor.element_size()
        entries[name] = {
            "dtype": _NAMES[dtype_name(tensor.dtype)],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
        starts[name], start = start, end
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    prefix = len(text).to_bytes(8, "little") + text
    return prefix, {name: len(prefix) + at for name, at in starts.items()}
