"""Sums and rows as tensors and plain values, so that a half-finished step can be moved.

Plain values are what JSON keeps exactly: Python writes floats such that the same bits are read.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from services.trainer.rows import Row

Tensors = dict[str, torch.Tensor]
Values = dict[str, Any]


def take_apart(sums: Any) -> tuple[Tensors, Values]:
    """The fields of a flat dataclass: tensors, not copied, and plain values."""
    tensors: Tensors = {}
    values: Values = {}
    for field in dataclasses.fields(sums):
        value = getattr(sums, field.name)
        if isinstance(value, torch.Tensor):
            tensors[field.name] = value
        else:
            values[field.name] = value
    return tensors, values


def put_together(sums: Any, tensors: Tensors, values: Values) -> None:
    """Inverse of `take_apart`, into a dataclass of the same type. Raises KeyError, TypeError."""
    for field in dataclasses.fields(sums):
        name = field.name
        setattr(sums, name, tensors[name] if name in tensors else values[name])


def rows_apart(rows: Sequence[Row]) -> tuple[Tensors, list[Values]]:
    """Arrays of all rows, joined by column; and per row its plain values and lengths of arrays."""
    joined: dict[str, list[np.ndarray[Any, Any]]] = {}
    described: list[Values] = []
    for row in rows:
        values: Values = {}
        lengths: dict[str, int] = {}
        for field in dataclasses.fields(row):
            value = getattr(row, field.name)
            if isinstance(value, np.ndarray):
                joined.setdefault(field.name, []).append(value)
                lengths[field.name] = len(value)
            else:
                values[field.name] = value
        described.append({"values": values, "lengths": lengths})
    return {n: torch.from_numpy(np.concatenate(parts)) for n, parts in joined.items()}, described


def rows_together(tensors: Tensors, described: Sequence[Values]) -> list[Row]:
    """Inverse of `rows_apart`; copies."""
    arrays = {name: tensor.cpu().numpy().copy() for name, tensor in tensors.items()}
    begins = dict.fromkeys(arrays, 0)
    rows = []
    for one in described:
        fields: Values = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in one["values"].items()
        }
        for name, length in one["lengths"].items():
            begin = begins[name]
            fields[name] = arrays[name][begin : begin + length]
            begins[name] = begin + length
        rows.append(Row(**fields))
    return rows


def on_host(tensors: Tensors) -> Tensors:
    """What a suspended policy brought along to a device and does not compute with there."""
    return {name: tensor.cpu() for name, tensor in tensors.items()}


def under(prefix: str, tensors: Tensors) -> Tensors:
    """Named `{prefix}/{name}`."""
    return {f"{prefix}/{name}": tensor for name, tensor in tensors.items()}


def below(prefix: str, tensors: Tensors) -> Tensors:
    """Inverse of `under`: of all `tensors`, those that have the prefix."""
    start = f"{prefix}/"
    return {n.removeprefix(start): t for n, t in tensors.items() if n.startswith(start)}
