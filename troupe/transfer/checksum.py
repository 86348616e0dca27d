"""Bytes and checksums of tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import xxhash


def dtype_name(dtype: torch.dtype) -> str:
    """`torch.float32` -> "float32"."""
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """Inverse of `dtype_name`; ValueError for a name that torch does not have."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"'{name}' is not a dtype")
    return dtype


def host_bytes(tensor: torch.Tensor) -> memoryview:
    """The C-order bytes of `tensor`; a view when it is contiguous in host memory, else a copy."""
    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    if flat.numel() == 0:
        return memoryview(b"")
    # bfloat16 has no numpy dtype: every tensor is seen as plain bytes.
    return memoryview(flat.view(torch.uint8).numpy().data)


def bytes_checksum(data: bytes | memoryview) -> str:
    """Hex xxh3-128 of `data`."""
    return xxhash.xxh3_128_hexdigest(data)


def combine(parts: Mapping[str, tuple[str, Sequence[int], str]]) -> str:
    """Hex xxh3-128 over (name, dtype, shape, checksum of bytes) in the order of names.

    Hashing the tensors' checksums instead of their bytes again lets a reader verify one
    tensor at a time, and costs one pass over the bytes.
    """
    digest = xxhash.xxh3_128()
    for name in sorted(parts):
        dtype, shape, checksum = parts[name]
        line = f"{name}\0{dtype}\0{','.join(map(str, shape))}\0{checksum}\n"
        digest.update(line.encode())
    return digest.hexdigest()


def checksum_of(tensors: Mapping[str, torch.Tensor]) -> str:
    """The checksum that names this content: equal iff names, dtypes, shapes and bytes are."""
    return combine(
        {
            name: (dtype_name(t.dtype), tuple(t.shape), bytes_checksum(host_bytes(t)))
            for name, t in tensors.items()
        }
    )
