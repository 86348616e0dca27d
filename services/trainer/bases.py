"""Frozen weights that the adapters of several policies share: each content once in a process."""

from __future__ import annotations

import copy
import itertools
import json
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from services.trainer.named import Tensors, distinct_tensors
from troupe.job import ModelSpec
from troupe.transfer import checksum_of

Source = tuple[str, ...]


class Base:
    """A model that is never trained, in the type that engines load, on one device."""

    def __init__(self, module: Any, checksum: str) -> None:
        self.module = module
        # Of `weights()`, which engines of every policy over it load once.
        self.checksum = checksum

    def weights(self) -> Tensors:
        """What engines load; not copies."""
        return distinct_tensors(self.module)

    def twin(self) -> Any:
        """A module of its own over the same tensors: what is put into it changes no other."""
        tensors = itertools.chain(self.module.parameters(), self.module.buffers())
        return copy.deepcopy(self.module, {id(tensor): tensor for tensor in tensors})


class Bases:
    """Bases that somebody uses. What nobody uses any more leaves memory."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_source: weakref.WeakValueDictionary[Source, Base] = weakref.WeakValueDictionary()
        self._by_content: weakref.WeakValueDictionary[Source, Base] = weakref.WeakValueDictionary()

    def get(
        self, model: ModelSpec, seed: int, device: torch.device, load: Callable[[], Any]
    ) -> Base:
        """The base that `load` makes of `model`, or the one that is here already.

        `seed` counts for random weights only. Raises what `load` raises.
        """
        source = (*_source(model, seed), model.dtype, str(device))
        with self._lock:
            known = self._by_source.get(source)
            if known is None:
                dtype = getattr(torch, model.dtype)
                module = load().to(device=device, dtype=dtype).requires_grad_(False)
                checksum = checksum_of(distinct_tensors(module))
                # Two paths may lead to the same weights.
                content = (checksum, _architecture(module), str(device))
                known = self._by_content.get(content)
                if known is None:
                    known = self._by_content[content] = Base(module, checksum)
                self._by_source[source] = known
            return known


def _source(model: ModelSpec, seed: int) -> Source:
    if model.path is not None:
        return "path", model.path, model.revision or "", *_files(Path(model.path))
    return "config", json.dumps(model.config, sort_keys=True), str(seed)


def _files(directory: Path) -> list[str]:
    """What changes when other weights are put where a base came from; nothing for a hub's id."""
    if not directory.is_dir():
        return []
    found = sorted((file.name, file.stat()) for file in directory.iterdir() if file.is_file())
    return [f"{name} {stat.st_size} {stat.st_mtime_ns}" for name, stat in found]


def _architecture(module: Any) -> str:
    """The configuration, but for where it came from."""
    config = {n: v for n, v in module.config.to_dict().items() if not n.startswith("_")}
    return json.dumps(config, sort_keys=True, default=str)


# One per process: the worker's policies are bound one by one.
BASES = Bases()
