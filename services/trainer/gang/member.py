"""One rank's part of a policy: the learner of a model that the gang holds together."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch.distributed.tensor import DTensor, distribute_tensor

from services.trainer.disk import reported
from services.trainer.fields import take_apart, under
from services.trainer.gang.gathering import gather, gather_checkpoint
from services.trainer.gang.group import Group
from services.trainer.gang.sharded_state import (
    owner_of,
    read_shards,
    room_for,
    split,
    write_shards,
)
from services.trainer.gang.sharding import shard
from services.trainer.learner import Learner
from services.trainer.named import Tensors
from services.trainer.policy_model import load_model
from services.trainer.residence import Lodger
from services.trainer.trained_model import TrainedModel
from troupe.algorithms import TokenStatistics
from troupe.job import JobSpec
from troupe.transfer.checksum import dtype_of

# Type and shape by name.
Described = Mapping[str, tuple[str, Sequence[int]]]


class Member(Learner):
    """A `Learner` on one rank. All ranks are given the same calls in the same order."""

    def __init__(
        self,
        spec: JobSpec,
        policy: str,
        group: Group,
        device: torch.device,
        *,
        double: bool = False,
        **options: Any,
    ) -> None:
        """`double`: in float64, for proofs; `options`: those of `Learner`."""
        self._group = group
        own = spec.policies[policy]

        def make() -> Any:
            model: Any = load_model(policy, own, spec.seed)
            if double:
                model = model.double()
            return shard(model, group.mesh, half=own.language_model.dtype == "bfloat16")

        def again() -> Any:
            # One after another on each host: of whole models one is in memory there.
            return group.in_turns(make)

        trained = ShardedModel(again(), device, getattr(torch, own.language_model.dtype), again)
        super().__init__(trained, spec, policy, device=device, peers=group, **options)
        self._lodger = Resident()

    def save(self, directory: Path) -> dict[str, str]:
        """Write this rank's part of the training state; checksums of its files.

        Raises ResourceExhausted of kind "storage_full" on all ranks.
        """
        with reported(directory, "training state"):
            return write_shards(directory, self.weights() | self.moments(), self._group.control)

    def load(self, directory: Path) -> None:
        """Take over the state that some gang or device wrote. Raises ValueError if it is another
        model's."""
        room = room_for(directory, self.weights())
        read_shards(directory, room, self._group.control)
        self.restore(*split(room))

    def receive(self, tensors: Described, path: Path | None) -> None:
        """Take over the state in a file that only rank 0 can read; all are told what is in it."""
        self.restore(*split(self._received(tensors, path)))

    def load_reference(self, directory: Path) -> None:
        """Keep a frozen model with the weights in `directory` for the divergence."""
        room, _ = split(room_for(directory, self.weights()))
        read_shards(directory, room, self._group.control)
        self.set_reference(room)

    def suspend(self, path: Path | None) -> dict[str, Any]:
        """Write what `resume` goes on from, in the middle of a step too; its plain values."""
        mine = self._sums.tokens = self._group.merged(self._sums.tokens)
        tensors, values = self.suspended()
        if self._group.rank:
            self._sums.tokens = type(mine)()  # rank 0 has them now
        gather(tensors, path)
        return values

    def resume(self, tensors: Described, values: dict[str, Any], path: Path | None) -> None:
        """Go on from what a gang or a single device has suspended."""
        found = self._received(tensors, path)
        if self._group.rank:
            fresh, told = take_apart(TokenStatistics())
            found = {n: t for n, t in found.items() if not n.startswith("tokens/")}
            found |= under("tokens", fresh)
            values = {**values, "tokens": told}
        self.adopt(found, values)

    def _received(self, tensors: Described, path: Path | None) -> Tensors:
        """This rank's parts; of whole tensors one at a time is in memory."""
        own, found = self._owners(), {}
        with contextlib.ExitStack() as stack:
            file = path and stack.enter_context(safe_open(path, framework="pt"))
            for name, (dtype, shape) in tensors.items():
                size = torch.Size(shape)
                owner = owner_of(name, size, own)
                full = file.get_tensor(name) if file else torch.empty(size, dtype=dtype_of(dtype))
                if owner is None:
                    dist.broadcast(full, 0, self._group.control)
                    found[name] = full
                else:
                    mesh = owner.device_mesh
                    full = full.to(mesh.device_type)
                    found[name] = distribute_tensor(full, mesh, owner.placements)
        return found

    def _owners(self) -> Tensors:
        """What tensors of a state are parts of, by the last of their names."""
        numbered = {str(i): p.detach() for i, p in enumerate(self._trained.parameters)}
        return self.weights() | under("gradients", numbered)

    def gather(self, what: Literal["published", "weights", "moments"], path: Path | None) -> None:
        """Write whole tensors to `path` on the rank that is given one."""
        if what == "published":
            gather_checkpoint(self._trained.format, self.weights(), path)
        else:
            gather(self.weights() if what == "weights" else self.moments(), path)


class ShardedModel(TrainedModel):
    """A model of which this rank has a part of every tensor."""

    def __init__(
        self,
        module: Any,
        device: torch.device,
        published_type: torch.dtype,
        make: Callable[[], Any],
    ) -> None:
        """`make`: another one like `module`; all ranks call it."""
        super().__init__(module, device, published_type)
        self._make = make

    def weights(self) -> Tensors:
        """Parts of parameters, and persistent buffers; not a copy."""
        named: Tensors = {name: p.detach() for name, p in self.module.named_parameters()}
        for name, tensor in self.module.state_dict().items():
            # What is tied to a parameter is sharded like it.
            if name not in named and not isinstance(tensor, DTensor):
                named[name] = tensor.detach()
        return named

    def frozen_copy(self, weights: Mapping[str, torch.Tensor]) -> Any:
        """A second sharded module with these weights, which no gradient reaches."""
        module = self._make().requires_grad_(False)
        module.load_state_dict(dict(weights), strict=False)
        return module


class Resident(Lodger):
    """Of a sharded model: FSDP keeps the memory that it made for the parts."""

    def __init__(self) -> None:
        super().__init__({}, [])

    def leave(self) -> list[torch.Tensor]:
        """Nothing: it goes with the model."""
        return []

    def enter(self, weights: Mapping[str, torch.Tensor]) -> Tensors:
        """All of them: they are copied."""
        return dict(weights)
