"""A rank's copy of its shards of a policy's training state, written while later steps run.

What `state/durability.py` does on one device: a private copy in host memory, one thread that writes
it. The ranks' threads write one state together (`write_shards`) over a process group of their own,
as collectives of orders must not mix with theirs. The lead asks now and then whether all are done,
and only then gives the directory its name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from services.trainer.gang.group import GangGroup
from services.trainer.gang.sharded_state import as_shard, write_shards
from services.trainer.state.durability import HostCopy, step_back
from services.trainer.state.training_state import reported
from troupe.adapters.merge import Tensors
from troupe.rpc import TroupeError, from_status, to_status

# How long ranks that have written wait for the slowest one.
_WRITE_SECONDS: Final = 6 * 3600.0


class ShardCopy:
    """Host memory for a rank's shards of one policy's state, and the thread that writes them.

    All ranks make it, and call its methods, in the same order.
    """

    def __init__(self, group: GangGroup, device: torch.device) -> None:
        self._group = group
        limit = timedelta(seconds=_WRITE_SECONDS)
        control = dist.new_group(backend="gloo", timeout=limit)
        assert control is not None, "all ranks are in it"
        self._control: dist.ProcessGroup = control
        self._memory = HostCopy(device, sharers=group.size // group.hosts)
        self._copied: Tensors = {}
        self._thread = ThreadPoolExecutor(1, "state", initializer=step_back)
        self._writing: Future[dict[str, str]] | None = None

    @property
    def busy(self) -> bool:
        """Whether a copy is being written, or was written and `files` not told yet."""
        return self._writing is not None

    def take(self, tensors: Mapping[str, torch.Tensor]) -> bool:
        """Copy this rank's shards of `tensors` in place of the last copy, which is written; False,
        and no copy, where a rank has no memory for it."""
        shards = {n: t.to_local() if isinstance(t, DTensor) else t for n, t in tensors.items()}
        mine = json.dumps(self._memory.fits(shards)).encode()
        if not all(json.loads(one) for one in self._group.gather(mine)):
            return False
        self._copied = self._memory.take(shards)
        for name, tensor in tensors.items():
            if isinstance(tensor, DTensor):
                self._copied[name] = as_shard(self._copied[name], tensor)
        return True

    def write(self, directory: Path) -> None:
        """Begin to write the copy into `directory`."""
        self._writing = self._thread.submit(self._write, directory)

    def files(self) -> dict[str, str] | None:
        """The checksums of all ranks' files once all have written; None before.

        Raises on all ranks the `TroupeError` of one that could not write.
        """
        assert self._writing is not None, "it was begun"
        said: dict[str, Any] = {"done": self._writing.done()}
        if said["done"]:
            try:
                said["files"] = self._writing.result()
            except TroupeError as error:
                said["problem"] = to_status(error).SerializeToString().hex()
        everyone = [json.loads(one) for one in self._group.gather(json.dumps(said).encode())]
        if not all(one["done"] for one in everyone):
            return None
        self._writing = None
        for one in everyone:
            if "problem" in one:
                raise from_status(bytes.fromhex(one["problem"]))
        return {name: checksum for one in everyone for name, checksum in one["files"].items()}

    def close(self) -> None:
        """Free the memory and end the thread; not while it is `busy`."""
        self._copied = {}
        self._memory.give_back()
        self._thread.shutdown()
        dist.destroy_process_group(self._control)

    def _write(self, directory: Path) -> dict[str, str]:
        with reported(directory, "training state"):
            return write_shards(directory, self._copied, self._control)
