"""Trees of tensors and plain values, as named tensors and back.

A tree is nested dicts (keys: str or int), lists and tuples; its leaves are tensors, None, bool,
int, float and str. No pickle: what is none of these is refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch

from troupe.rpc.errors import InvalidArgument

_PLAIN = (bool, int, float, str)
# Containers inside each other: readers go down as many steps as writers did.
_DEEPEST = 100


def is_flat(tree: Any) -> bool:
    """Whether `tree` is a mapping from names to tensors, which needs no nesting."""
    return isinstance(tree, Mapping) and all(
        type(name) is str and isinstance(leaf, torch.Tensor) for name, leaf in tree.items()
    )


def flatten(tree: Any) -> tuple[dict[str, torch.Tensor], str]:
    """Tensors by their path ("optimizer.0.step"), and the JSON of what is around them.

    "" for a flat mapping, whose names stay as they are. Raises InvalidArgument.
    """
    if is_flat(tree):
        for name, tensor in tree.items():
            _check(name, tensor)
        return dict(tree), ""
    tensors: dict[str, torch.Tensor] = {}
    skeleton = _skeleton(tree, "", tensors, 0)
    try:
        return tensors, json.dumps(skeleton, separators=(",", ":"))
    except ValueError as error:  # an integer of thousands of digits
        raise _refused("", f"holds a number that cannot be written: {error}") from None


def unflatten(tensors: Mapping[str, torch.Tensor], nesting: str) -> Any:
    """Inverse of `flatten`. Raises ValueError when the two do not belong together."""
    if not nesting:
        return dict(tensors)
    try:
        return _grown(json.loads(nesting), tensors)
    except (KeyError, TypeError, IndexError) as error:
        raise ValueError(f"the tree does not fit its tensors: {error!r}") from error


def _skeleton(tree: Any, path: str, tensors: dict[str, torch.Tensor], depth: int) -> Any:
    """Containers as [kind, ...]; a plain value stands for itself."""
    if isinstance(tree, torch.Tensor):
        _check(path, tree)
        # Two paths may read the same ({"a.b": x, "a": {"b": y}}).
        name, count = path, len(tensors)
        while name in tensors:
            name, count = f"{path}#{count}", count + 1
        tensors[name] = tree
        return ["tensor", name]
    if tree is None or type(tree) in _PLAIN:
        return tree
    if depth == _DEEPEST:
        raise _refused(path, f"is nested more than {_DEEPEST} deep, or contains itself")
    if isinstance(tree, Mapping):
        items = []
        for key, child in tree.items():
            if type(key) not in (str, int):
                raise _refused(path, f"has the key {key!r}; keys are str or int")
            items.append([key, _skeleton(child, _join(path, key), tensors, depth + 1)])
        return ["dict", items]
    if type(tree) in (list, tuple):
        kind = "list" if type(tree) is list else "tuple"
        under = [_skeleton(c, _join(path, i), tensors, depth + 1) for i, c in enumerate(tree)]
        return [kind, under]
    raise _refused(path, f"is a {type(tree).__qualname__}")


def _check(name: str, tensor: torch.Tensor) -> None:
    """Raise InvalidArgument for a tensor that is more than its elements in their order."""
    kind = "meta" if tensor.is_meta else str(tensor.layout).removeprefix("torch.")
    if tensor.is_quantized or tensor.is_nested:
        kind = "quantized" if tensor.is_quantized else "nested"
    if kind != "strided":
        raise _refused(name, f"is a {kind} tensor")
    if why := _why_no_memory(tensor):
        raise _refused(name, why)


def _why_no_memory(tensor: torch.Tensor) -> str:
    """A tensor that wraps others, or whose storage was shrunk, reads as memory of somebody else."""
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


def _grown(node: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    if not isinstance(node, list):
        return node
    kind, inside = node
    if kind == "tensor":
        return tensors[inside]
    if kind == "dict":
        return {key: _grown(child, tensors) for key, child in inside}
    children = [_grown(child, tensors) for child in inside]
    return children if kind == "list" else tuple(children)


def _join(path: str, key: str | int) -> str:
    return f"{path}.{key}" if path else str(key)


def _refused(path: str, why: str) -> InvalidArgument:
    return InvalidArgument(
        f"'{path or 'the state'}' {why}",
        kind="transfer_not_a_tree",
        field="state",
        value=path,
        remedy="Give nested dicts, lists and tuples of dense tensors, numbers, strings, bools and "
        "None.",
    )
