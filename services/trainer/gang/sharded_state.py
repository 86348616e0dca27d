"""Sharded training state: written by all ranks at once, read by a gang of any size.

Uses torch.distributed.checkpoint in its safetensors layout: one file per rank, whose header says
which part of each tensor it has; nothing is pickled. Tensor names are the same as in a single
device's state (state/training_state.py), so either can read what the other wrote. Where the hosts
of a gang share no disk, rank 0 writes and reads whole tensors for all of them.
"""

from __future__ import annotations

import mmap
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as load_state
from torch.distributed.checkpoint.state_dict_saver import save as save_state
from torch.distributed.tensor import DTensor, distribute_tensor

from services.trainer.gang.gathering import in_lockstep, nbytes_of
from services.trainer.gang.group import GangGroup
from services.trainer.learning.optimizer import NAMES as GENERATORS
from services.trainer.learning.optimizer import SEPARATOR, Moments, is_moment
from troupe.checkpoints.adapters import Tensors
from troupe.checkpoints.tensors import TensorsDoNotFit, difference
from troupe.transfer.checksum import bytes_checksum

if TYPE_CHECKING:
    from services.trainer.gang.group import GangGroup


def write_shards(
    directory: Path, tensors: Mapping[str, torch.Tensor], control: dist.ProcessGroup
) -> dict[str, str]:
    """Write this rank's shards of `tensors` into `directory`, and return its files' checksums.

    All ranks must call it. A tensor that is not a DTensor is equal on all ranks and written once.
    An error on one rank, such as OSError, is raised on all.
    """
    writer = HuggingFaceStorageWriter(str(directory), save_distributed=True)
    try:
        save_state(dict(tensors), storage_writer=writer, process_group=control)
    except CheckpointException as error:
        # By rank; the same on all of them.
        raise next(iter(error.failures.values()))[0] from error
    mine = f"shard-{dist.get_rank(control) + 1:05d}-"
    return {file.name: file_checksum(file) for file in sorted(directory.glob(f"{mine}*"))}


def read_shards(
    directory: Path, into: Mapping[str, torch.Tensor], control: dist.ProcessGroup
) -> None:
    """Fill `into` (DTensors or whole tensors) with the tensors of the same names in `directory`.

    All ranks must call it; each reads only the bytes of its own shards.
    """
    reader = HuggingFaceStorageReader(str(directory))
    load_state(dict(into), storage_reader=reader, process_group=control)


def described(directory: Path) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Return the shapes and dtypes of the whole tensors in `directory`, by name."""
    metadata = HuggingFaceStorageReader(str(directory)).read_metadata()
    found = {}
    for name, one in metadata.state_dict_metadata.items():
        assert isinstance(one, TensorStorageMetadata)  # safetensors holds nothing else
        found[name] = (one.size, one.properties.dtype)
    return found


def read_whole(directory: Path) -> Tensors:
    """Read all weights and moments in `directory` as whole tensors, in this process alone."""
    found = {
        name: torch.empty(size, dtype=dtype)
        for name, (size, dtype) in described(directory).items()
        if name not in GENERATORS
    }
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        reader = HuggingFaceStorageReader(str(directory))
        load_state(found, storage_reader=reader, no_dist=True)
    return found


def split(tensors: Mapping[str, torch.Tensor]) -> tuple[Tensors, Moments]:
    """Split tensors into weights and moments, whose names begin with their kind."""
    return (
        {name: tensor for name, tensor in tensors.items() if not is_moment(name)},
        {name: tensor for name, tensor in tensors.items() if is_moment(name)},
    )


def read_one(directory: Path, name: str, size: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """Read one whole tensor in `directory`, in this process alone."""
    into = {name: torch.empty(size, dtype=dtype)}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        load_state(into, storage_reader=HuggingFaceStorageReader(str(directory)), no_dist=True)
    return into[name]


def scatter_state(directory: Path | None, room: Tensors, group: GangGroup) -> None:
    """Fill `room` (`empty_state`) with the tensors that rank 0, which has a `directory`, reads.

    All ranks must call it. One whole tensor at a time is in memory.
    """
    with in_lockstep(group, sorted(room), lambda name: nbytes_of(room[name])) as names:
        for name in names:
            tensor = room[name]
            if directory is None:
                full = torch.empty(tensor.shape, dtype=tensor.dtype)
            else:
                full = read_one(directory, name, tensor.shape, tensor.dtype)
            if isinstance(tensor, DTensor):
                mesh = tensor.device_mesh
                full = group.bring_to_replicas(full.to(mesh.device_type))
                room[name] = distribute_tensor(full, mesh, tensor.placements)
            else:
                dist.broadcast(full, 0, group.control)
                room[name] = full


def empty_state(
    known: Mapping[str, tuple[torch.Size, torch.dtype]],
    weights: Mapping[str, torch.Tensor],
    sharded: Mapping[str, torch.Tensor],
) -> Tensors:
    """Return empty tensors for weights and moments as `described`, laid out as `sharded`
    (`owner_of`).

    Raises ValueError for another model's.
    """
    room: Tensors = {}
    for name, (size, dtype) in known.items():
        if name in GENERATORS:
            continue
        owner = owner_of(name, size, sharded)
        if owner is None:
            room[name] = torch.empty(size, dtype=dtype)
        else:
            room[name] = torch.empty_like(owner.detach(), dtype=dtype)
    if wrong := difference(set(weights) - set(room), set(split(room)[0]) - set(weights)):
        raise TensorsDoNotFit(f"the weights are not the model's: {wrong}")
    return room


def owner_of(name: str, size: torch.Size, sharded: Mapping[str, torch.Tensor]) -> DTensor | None:
    """Return the sharded parameter that a tensor of a state is, or is a gradient or moment of; None
    if it is not sharded. `sharded`: parameters by name, a critic's by
    `critic/weight/{name}`, and by number below `gradients/` and `critic/gradients/`.

    Raises ValueError if the shapes differ.
    """
    path, _, leaf = name.rpartition(SEPARATOR)
    parts = path.split(SEPARATOR)
    if not size:  # AdamW counts its steps in scalars
        return None
    if parts[-1] == "gradients":
        leaf = f"gradients/{leaf}"
        leaf = f"critic/{leaf}" if "critic" in parts else leaf
    elif "critic" in parts:
        leaf = f"critic/weight/{leaf}"
    owner = sharded.get(leaf)
    if owner is not None and owner.shape != size:
        raise ValueError(f"{name} has shape {list(size)}, expected {list(owner.shape)}")
    return owner if isinstance(owner, DTensor) else None


def file_checksum(path: Path) -> str:
    """Return the hex xxh3-128 of a file's bytes."""
    with path.open("rb") as file:
        if not path.stat().st_size:
            return bytes_checksum(b"")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data, memoryview(data) as view:
            return bytes_checksum(view)


def as_shard(local: torch.Tensor, of: DTensor) -> DTensor:
    """Return the DTensor like `of` whose shard on this rank is `local`, as FSDP makes them:
    `from_local` takes three times as long, and moves `local` to the mesh's device. `local` may have
    another dtype."""
    spec = of._spec
    if spec.tensor_meta is not None and local.dtype != spec.tensor_meta.dtype:
        spec = replace(spec, tensor_meta=spec.tensor_meta._replace(dtype=local.dtype))
    return DTensor(local, spec, requires_grad=False)  # type: ignore[no-untyped-call]
