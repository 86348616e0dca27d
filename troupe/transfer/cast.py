"""States whose floating-point tensors are wanted in a smaller dtype."""

from __future__ import annotations

from typing import Any

import torch

from troupe.rpc.errors import InvalidArgument
from troupe.transfer.checksum import dtype_name, dtype_of
from troupe.transfer.manifest import stem_of, version_in
from troupe.transfer.nesting import flatten, unflatten

# Where a cast state says what it was made of.
CAST_OF = "cast_of"


def cast_key(key: str, dtype: torch.dtype) -> str:
    """Where `key` in `dtype` lies: `job/policy/weights=bfloat16@3`. A version stays last."""
    version = version_in(key)
    suffix = "" if version < 0 else f"@{version}"
    return f"{stem_of(key)}={dtype_name(dtype)}{suffix}"


def check_cast(name: str) -> torch.dtype:
    """The floating-point dtype called `name`. Raises InvalidArgument."""
    try:
        dtype = dtype_of(name)
        if dtype.is_floating_point:
            return dtype
    except ValueError:
        pass
    raise InvalidArgument(
        f"'{name}' is no floating-point dtype",
        field="cast",
        value=name,
        remedy="Name one of torch's, for example bfloat16.",
    )


def cast(state: Any, dtype: torch.dtype) -> Any:
    """A tree like `state`, its floating-point tensors in `dtype`."""
    tensors, nesting = flatten(state)
    made = {n: t.to(dtype) if t.is_floating_point() else t for n, t in tensors.items()}
    return unflatten(made, nesting)
