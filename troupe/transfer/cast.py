"""States whose floating-point tensors are wanted in a smaller dtype."""

from __future__ import annotations

import functools
from typing import Any

import torch

from troupe.rpc.errors import InvalidArgument
from troupe.transfer.blob import flatten, stem_of, unflatten, version_in
from troupe.transfer.checksum import dtype_name, dtype_of

# Where a cast state says what it was made of.
CAST_OF = "cast_of"


def cast_key(key: str, dtype: torch.dtype | str | None) -> str:
    """Where `key` in `dtype` (or what is called so) lies: `job/policy/weights=bfloat16@3`, itself
    where none is wanted. A version stays last."""
    if dtype is None:
        return key
    if isinstance(dtype, str):
        dtype = dtype_of(dtype)
    version = version_in(key)
    suffix = "" if version < 0 else f"@{version}"
    return f"{stem_of(key)}={dtype_name(dtype)}{suffix}"


def check_cast(dtype: Any) -> torch.dtype:
    """The floating-point dtype `dtype`, or called that. Raises InvalidArgument."""
    name = dtype_name(dtype) if isinstance(dtype, torch.dtype) else str(dtype)
    try:
        found = dtype_of(name)
        if _can_be_cast_to(found):
            return found
    except ValueError:
        pass
    raise InvalidArgument(
        f"'{name}' is no floating-point dtype",
        field="cast",
        value=name,
        remedy="Name one of torch's, for example bfloat16.",
    )


@functools.cache
def _can_be_cast_to(dtype: torch.dtype) -> bool:
    try:
        torch.zeros(1).to(dtype)
    except RuntimeError:  # of two numbers in a byte there is no single one
        return False
    return dtype.is_floating_point


def cast(state: Any, dtype: torch.dtype) -> Any:
    """A tree like `state`, its floating-point tensors in `dtype`."""
    tensors, nesting = flatten(state)
    made = {n: t.to(dtype) if t.is_floating_point() else t for n, t in tensors.items()}
    return unflatten(made, nesting)
