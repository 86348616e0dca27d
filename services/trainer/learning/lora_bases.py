"""Frozen base models that LoRA policies share: each content is held once in a process."""

from __future__ import annotations

import copy
import itertools
import json
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, Protocol

import torch

from troupe.adapters.merge import distinct_tensors
from troupe.checkpoints.format import CheckpointFormat, cast
from troupe.job import ModelSpec
from troupe.transfer import DeferredTensors, checksum_of

Source = tuple[str, ...]
_LOCK: Final = threading.Lock()
# The bases in use; weak, so that unused ones are freed.
_BY_SOURCE: Final = weakref.WeakValueDictionary[Source, "FrozenBase"]()
_BY_CONTENT: Final = weakref.WeakValueDictionary[Source, "FrozenBase"]()


class AdaptedBase(Protocol):
    """The frozen weights under an adapter, whoever holds them."""

    @property
    def module(self) -> Any:
        """The model that they are of, which may be on the meta device."""

    @property
    def checksum(self) -> str:
        """That of `weights`."""

    def weights(self) -> DeferredTensors:
        """The tensors that engines load, in checkpoint format."""


class FrozenBase:
    """A model that is never trained, in the published dtype, on one device."""

    def __init__(self, module: Any) -> None:
        self.module = module
        self._format = CheckpointFormat(module, next(module.parameters()).dtype)
        # Cache of `weights()`.
        self.checksum = checksum_of(self.weights())

    def weights(self) -> DeferredTensors:
        """The tensors that engines load, in checkpoint format; converted when they are read."""
        return self._format.of(distinct_tensors(self.module))

    def twin(self) -> Any:
        """A module over the same tensors; layers put into it do not change other twins."""
        tensors = itertools.chain(self.module.parameters(), self.module.buffers())
        return copy.deepcopy(self.module, {id(tensor): tensor for tensor in tensors})


def frozen_base(
    model: ModelSpec, seed: int, device: torch.device, load: Callable[[], Any]
) -> FrozenBase:
    """The base of `model` on `device`, made by `load` if no policy uses it yet.

    `seed` matters for random weights only. Raises what `load` raises.
    """
    source = base_source(model, seed, str(device))
    with _LOCK:
        known = _BY_SOURCE.get(source)
        if known is None:
            fresh = FrozenBase(
                cast(load(), getattr(torch, model.weight_dtype), device).requires_grad_(False)
            )
            # Two paths may have the same weights, so also look up the content.
            content = (fresh.checksum, _architecture(fresh.module), str(device))
            known = _BY_SOURCE[source] = _BY_CONTENT.setdefault(content, fresh)
        return known


def base_source(model: ModelSpec, seed: int, device: str) -> Source:
    """Key of the base of `model` on a device, which no other base has."""
    kept = model.weight_dtype, device
    if model.path is not None:
        return "path", model.path, model.revision or "", *_files(Path(model.path)), *kept
    return "config", json.dumps(model.config, sort_keys=True), str(seed), *kept


def _files(directory: Path) -> list[str]:
    """Names, sizes and times of a directory's files, to notice a change; empty for a hub id."""
    if not directory.is_dir():
        return []
    found = sorted((file.name, file.stat()) for file in directory.iterdir() if file.is_file())
    return [f"{name} {stat.st_size} {stat.st_mtime_ns}" for name, stat in found]


def _architecture(module: Any) -> str:
    """The configuration without private fields, such as the path it came from."""
    config = {n: v for n, v in module.config.to_dict().items() if not n.startswith("_")}
    return json.dumps(config, sort_keys=True, default=str)
