"""Bytes and checksums of tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import torch
import xxhash

# Bytes that are hashed, sent, verified and sent again as one. Large against the cost of a request,
# small against a state: a reader's parts can be forwarded to the next reader while more arrive.
PIECE_BYTES: Final = 8 << 20
_ESCAPED: Final = str.maketrans({"\\": "\\\\", "\0": "\\0", "\n": "\\n"})


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype: `torch.float32` -> "float32"."""
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """Return the inverse of `dtype_name`; ValueError for a name that torch does not have."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"'{name}' is not a dtype")
    return dtype


def host_bytes(tensor: torch.Tensor) -> memoryview:
    """Return the C-order bytes of `tensor`; a view when it is contiguous in host memory, else a
    copy."""
    return memoryview(flat_bytes(tensor.to("cpu")).numpy().data)


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the C-order bytes of `tensor` as uint8 where it is; a view when it is contiguous."""
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    # bfloat16 has no numpy dtype: every tensor is seen as plain bytes.
    return flat.view(torch.uint8) if flat.numel() else flat.new_empty(0, dtype=torch.uint8)


def hasher() -> xxhash.xxh3_128:
    """Return the hasher for the checksum of at most `PIECE_BYTES`, fed in parts."""
    return xxhash.xxh3_128()


def piece_checksums(data: memoryview) -> tuple[str, ...]:
    """Return the hex xxh3-128 of every `PIECE_BYTES` of `data`; none for data that is a single
    piece."""
    if len(data) <= PIECE_BYTES:
        return ()
    return tuple(
        xxhash.xxh3_128_hexdigest(data[start : start + PIECE_BYTES])
        for start in range(0, len(data), PIECE_BYTES)
    )


def whole(pieces: Sequence[str]) -> str:
    """Return the hex xxh3-128 of a tensor of several pieces: the checksum of its pieces'
    checksums."""
    return xxhash.xxh3_128_hexdigest(bytes.fromhex("".join(pieces)))


def bytes_checksum(data: bytes | memoryview) -> str:
    """Return the hex xxh3-128 of `data`, by pieces when it is longer than one.

    So each piece can be verified alone as it arrives, with one pass over the bytes.
    """
    if len(data) <= PIECE_BYTES:
        return xxhash.xxh3_128_hexdigest(data)
    return whole(piece_checksums(memoryview(data)))


def combine(parts: Mapping[str, tuple[str, Sequence[int], str]]) -> str:
    """Return the hex xxh3-128 over (name, dtype, shape, checksum of bytes) in the order of names.

    Hashing the tensors' checksums instead of their bytes again lets a reader verify one
    tensor at a time, and costs one pass over the bytes.
    """
    digest = xxhash.xxh3_128()
    for name in sorted(parts):
        dtype, shape, checksum = parts[name]
        # No name may look like other tensors' lines.
        line = f"{name.translate(_ESCAPED)}\0{dtype}\0{','.join(map(str, shape))}\0{checksum}\n"
        digest.update(line.encode(errors="surrogatepass"))
    return digest.hexdigest()


def checksum_of(tensors: Mapping[str, torch.Tensor]) -> str:
    """Return the checksum that names this content: equal iff names, dtypes, shapes and bytes
    are."""
    return combine(
        {
            name: (dtype_name(t.dtype), tuple(t.shape), bytes_checksum(host_bytes(t)))
            for name, t in tensors.items()
        }
    )
