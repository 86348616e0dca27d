"""Whole tensors of a sharded model in one file, with one of them in memory at a time."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from services.trainer.disk import in_memory
from services.trainer.gang.sharded_state import whole
from troupe.rpc import ResourceExhausted
from troupe.transfer.checksum import dtype_name, host_bytes

_NAMES = {
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


def gather(tensors: Mapping[str, torch.Tensor], path: Path | None) -> None:
    """All ranks call it with their parts of the same tensors; the one with a `path` writes there.

    In the order of names, each gathered, written and dropped before the next. Raises
    ResourceExhausted of kind "storage_full" there, once the others are through.
    """
    names = sorted(tensors)
    parts = iter([tensors[name] for name in names])
    try:
        if path is not None:
            with in_memory(path, "state"), path.open("wb") as file:
                file.write(_header(tensors, names))
                for part in parts:
                    file.write(host_bytes(whole(part)))
    except ResourceExhausted:
        _gather_rest(parts)
        raise
    _gather_rest(parts)


def _gather_rest(parts: Iterator[torch.Tensor]) -> None:
    """For those who write them."""
    for part in parts:
        whole(part)


def _header(tensors: Mapping[str, torch.Tensor], names: list[str]) -> bytes:
    """As safetensors has it: 8 bytes of length, then JSON padded to a multiple of 8."""
    entries: dict[str, object] = {}
    start = 0
    for name in names:
        tensor = tensors[name]
        end = start + tensor.numel() * tensor.element_size()
        entries[name] = {
            "dtype": _NAMES[dtype_name(tensor.dtype)],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
        start = end
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
