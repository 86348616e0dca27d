"""The frozen base under adapters, which the policies of a process share: each content is there
once.

It stays on its device while a policy that is bound there uses it. Otherwise it is in host memory
once others need the device: another base's policies (`occupy`), or other processes
(`leave_unused_bases`).
"""

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

from services.trainer.state.parameter_memory import MovableParameters
from troupe.checkpoints.adapters import distinct_tensors
from troupe.checkpoints.format import CheckpointFormat, cast
from troupe.job import ModelSpec
from troupe.transfer import DeferredTensors, checksum_of

Source = tuple[str, ...]
_LOCK: Final = threading.Lock()
# The bases that policies have; weak, so that others are freed.
_BY_SOURCE: Final = weakref.WeakValueDictionary[Source, "FrozenBase"]()
_BY_CONTENT: Final = weakref.WeakValueDictionary[Source, "FrozenBase"]()
# By learner that is bound to the device.
_IN_USE: Final = weakref.WeakKeyDictionary[object, "FrozenBase"]()


class AdaptedBase(Protocol):
    """The frozen weights under an adapter, on this device or elsewhere."""

    @property
    def module(self) -> Any:
        """Their model, which may be on the meta device."""

    @property
    def checksum(self) -> str:
        """Checksum of `weights`."""

    def weights(self) -> DeferredTensors:
        """Return the tensors that engines load, in checkpoint format."""

    def rounded(self) -> DeferredTensors:
        """Return the same values by the names of the model."""


class FrozenBase:
    """A model that is never trained, in the published dtype, on one device."""

    def __init__(self, module: Any) -> None:
        self.module = module
        self._movable = MovableParameters(module.parameters(), frozen=True)
        self._format = CheckpointFormat(module, next(module.parameters()).dtype)
        # Cache of `weights()`.
        self.checksum = checksum_of(self.weights())

    def weights(self) -> DeferredTensors:
        """Return the tensors that engines load, in checkpoint format; converted when they are
        read."""
        return self._format.of(distinct_tensors(self.module))

    def rounded(self) -> DeferredTensors:
        """Return the same values by the names of the model."""
        return self._format.rounded(distinct_tensors(self.module))

    def arrive(self) -> None:
        """Move to the device, unless it is there."""
        self._movable.arrive()

    def leave(self) -> None:
        """Move to host memory, where the weights can be read."""
        self._movable.leave()

    def twin(self) -> Any:
        """Return a module over the same tensors; layers put into it do not change other twins."""
        tensors = itertools.chain(self.module.parameters(), self.module.buffers())
        return copy.deepcopy(self.module, {id(tensor): tensor for tensor in tensors})


def frozen_base(
    model: ModelSpec, seed: int, device: torch.device, load: Callable[[], Any]
) -> FrozenBase:
    """Return the base of `model` on `device`, made by `load` if no policy uses it yet.

    `seed` matters only for random weights. Raises the errors of `load`.
    """
    source = base_source(model, seed, str(device))
    with _LOCK:
        known = _BY_SOURCE.get(source)
        if known is None:
            _leave_unused()
            fresh = FrozenBase(
                cast(load(), getattr(torch, model.weight_dtype), device).requires_grad_(False)
            )
            # Two paths may have the same weights, so also look up the content.
            content = (fresh.checksum, _architecture(fresh.module), str(device))
            known = _BY_SOURCE[source] = _BY_CONTENT.setdefault(content, fresh)
        return known


def occupy(user: object, base: AdaptedBase | None) -> None:
    """Let `user` compute on the device until `vacate`, with `base` if it has one; bases that no
    user has leave the device."""
    with _LOCK:
        if isinstance(base, FrozenBase):
            _IN_USE[user] = base
        _leave_unused()
        if isinstance(base, FrozenBase):
            base.arrive()


def vacate(user: object) -> None:
    """End `occupy`. The base stays for the next user, which often is another policy of its team."""
    with _LOCK:
        _IN_USE.pop(user, None)


def leave_unused_bases() -> None:
    """Move bases that no user has to host memory: other processes need the device."""
    with _LOCK:
        _leave_unused()


def _leave_unused() -> None:
    used = {id(base) for base in _IN_USE.values()}
    for base in set(_BY_CONTENT.values()):
        if id(base) not in used:
            base.leave()


def base_source(model: ModelSpec, seed: int, device: str) -> Source:
    """Return the unique key of the base of `model` on a device."""
    kept = model.weight_dtype, device
    if model.path is not None:
        return "path", model.path, model.revision or "", *_files(Path(model.path)), *kept
    return "config", json.dumps(model.config, sort_keys=True), str(seed), *kept


def _files(directory: Path) -> list[str]:
    """Return the names, sizes and times of a directory's files, to notice a change; empty for a hub
    id."""
    if not directory.is_dir():
        return []
    found = sorted((file.name, file.stat()) for file in directory.iterdir() if file.is_file())
    return [f"{name} {stat.st_size} {stat.st_mtime_ns}" for name, stat in found]


def _architecture(module: Any) -> str:
    """Return the configuration without private fields, such as the path it came from."""
    config = {n: v for n, v in module.config.to_dict().items() if not n.startswith("_")}
    return json.dumps(config, sort_keys=True, default=str)
