"""Incremental writer of safetensors files, one group of tensors at a time.

The safetensors library needs all tensors at once. Weights in checkpoint format are converted group
by group (`troupe.checkpoints.format`), and a gang's ranks gather them so, to save memory.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

import torch

from troupe.checkpoints.reading import DTYPE_NAMES, INDEX
from troupe.transfer.checksum import bytes_checksum, combine, dtype_name, host_bytes
from troupe.transfer.deferred import DeferredTensors, Layout

# Largest file of a checkpoint, unless one tensor alone is larger: small enough for a hub, and for
# repeating after a failure.
_MOST_FILE_BYTES: Final = 5 * 10**9

# Writes one tensor; returns its bytes.
Write = Callable[[str, torch.Tensor], memoryview]


@contextmanager
def safetensors_file(path: Path, layout: Layout) -> Iterator[Write]:
    """Open a new safetensors file at `path` for tensors of these names, shapes and dtypes.

    Yields a function that writes one tensor; call it once per tensor, in any order. Raises OSError.
    """
    prefix, offsets = _header(layout)
    with path.open("wb") as file:
        file.write(prefix)

        def write(name: str, tensor: torch.Tensor) -> memoryview:
            data = host_bytes(tensor)
            file.seek(offsets[name])
            file.write(data)
            return data

        yield write


def write_checkpoint(
    folder: Path, tensors: DeferredTensors, progress: Callable[[int], None] = lambda nbytes: None
) -> str:
    """Write a checkpoint's weights into `folder`, with one group of tensors in memory at a time.

    Writes `model.safetensors`, or numbered files of at most 5 GB with an index. `progress` gets the
    bytes of each written tensor. Returns the checksum of the tensors.
    """
    files = _files(tensors)
    if len(files) > 1:
        index: dict[str, Any] = {
            "metadata": {
                "total_parameters": sum(t.numel() for t in tensors.layout.values()),
                "total_size": tensors.nbytes,
            },
            "weight_map": {name: file for file, layout in files.items() for name in layout},
        }
        text = json.dumps(index, indent=2, sort_keys=True) + "\n"
        (folder / INDEX).write_text(text, encoding="utf-8")
    with ExitStack() as stack:
        writers: dict[str, Write] = {}
        for file, layout in files.items():
            write = stack.enter_context(safetensors_file(folder / file, layout))
            writers |= dict.fromkeys(layout, write)
        parts: dict[str, tuple[str, tuple[int, ...], str]] = {}
        for number in range(len(tensors.groups)):
            parts |= _write_group(tensors, number, writers, progress)
    return combine(parts)


def _write_group(
    tensors: DeferredTensors,
    number: int,
    writers: Mapping[str, Write],
    progress: Callable[[int], None],
) -> dict[str, tuple[str, tuple[int, ...], str]]:
    """Write one group, which is freed before the next is made; return dtypes, shapes and
    checksums."""
    parts = {}
    for name, tensor in tensors.made(number).items():
        data = writers[name](name, tensor)
        parts[name] = (dtype_name(tensor.dtype), tuple(tensor.shape), bytes_checksum(data))
        progress(len(data))
    return parts


def _files(tensors: DeferredTensors) -> dict[str, dict[str, torch.Tensor]]:
    """Distribute the tensors over files: layout by file name."""
    parts: list[dict[str, torch.Tensor]] = [{}]
    size = 0
    for group in tensors.groups:
        for name, tensor in group.layout.items():
            if size and size + tensor.nbytes > _MOST_FILE_BYTES:
                parts.append({})
                size = 0
            parts[-1][name] = tensor
            size += tensor.nbytes
    if len(parts) == 1:
        return {"model.safetensors": parts[0]}
    count = len(parts)
    return {
        f"model-{number:05d}-of-{count:05d}.safetensors": part
        for number, part in enumerate(parts, start=1)
    }


def _header(layout: Mapping[str, torch.Tensor]) -> tuple[bytes, dict[str, int]]:
    """Return the header of a safetensors file, and the offset in bytes at which each tensor begins.

    The header is its length (8 bytes), then JSON padded to a multiple of 8. Tensors are sorted by
    the size of their values, the largest first, so that each is aligned; then by name.
    """
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    starts: dict[str, int] = {}
    start = 0
    for name in sorted(layout, key=lambda name: (-layout[name].element_size(), name)):
        tensor = layout[name]
        end = start + tensor.numel() * tensor.element_size()
        entries[name] = {
            "dtype": DTYPE_NAMES[dtype_name(tensor.dtype)],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
        starts[name], start = start, end
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    prefix = len(text).to_bytes(8, "little") + text
    return prefix, {name: len(prefix) + at for name, at in starts.items()}
