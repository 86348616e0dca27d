"""Whole tensors of a sharded model in one file, with one group of them in memory at a time."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch

from services.trainer.disk import in_memory
from services.trainer.gang.sharded_state import whole
from troupe.checkpoints.format import CheckpointFormat, Conversion, Read
from troupe.checkpoints.writing import safetensors_file
from troupe.rpc import ResourceExhausted
from troupe.transfer.deferred import Layout


def gather(tensors: Mapping[str, torch.Tensor], path: Path | None) -> None:
    """All ranks call it with their parts of the same tensors; the one with a `path` writes there.

    Each tensor is gathered, written and dropped before the next. Raises ResourceExhausted of kind
    "storage_full" there, once the others are through.
    """
    as_they_are = (Conversion.unchanged(name, tensors[name]) for name in sorted(tensors))
    _gather(as_they_are, tensors.__getitem__, tensors, path)


def gather_checkpoint(
    form: CheckpointFormat, weights: Mapping[str, torch.Tensor], path: Path | None
) -> None:
    """As `gather`, of what a checkpoint with these weights consists of: each of its groups is
    converted once it is whole."""
    # In the type that goes out before it is gathered: half as much to move.
    _gather(form.conversions, functools.partial(form.read, weights), form.layout, path)


def _gather(
    conversions: Iterable[Conversion], part: Read, layout: Layout, path: Path | None
) -> None:
    left = iter(conversions)
    try:
        if path is not None:
            with in_memory(path, "state"), safetensors_file(path, layout) as write:
                for one in left:
                    sources = {name: whole(part(name)) for name in one.sources}
                    for name, tensor in one.convert(sources.__getitem__).items():
                        write(name, tensor)
    except ResourceExhausted:
        _help(left, part)
        raise
    _help(left, part)


def _help(left: Iterable[Conversion], part: Read) -> None:
    """Take part for those who write."""
    for one in left:
        for name in one.sources:
            whole(part(name))
