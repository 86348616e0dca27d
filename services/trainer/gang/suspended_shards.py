"""Shards of a suspended state: each rank stores its own, in parallel, and takes back its own.

A shard goes from the rank's device into the shared memory of its host, as a state of the transfer
layer. A gang with as many ranks on the same hosts finds each shard where it is needed; others read
boxes of several shards (`services.trainer.state.parts`), also from other hosts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from services.chassis.transfer import HostTransfer
from services.trainer.gang.group import GangGroup
from services.trainer.gang.loads import LoadProgress, together
from services.trainer.gang.sharded_state import as_shard, owner_of
from services.trainer.state.parts import Box, PartsReader, StoredPart, StoredParts, store_part
from services.trainer.state.suspension import found_intact
from troupe.checkpoints.adapters import Tensors
from troupe.transfer import brought
from troupe.transfer.checksum import dtype_of


def store_shards(
    group: GangGroup, transfer: HostTransfer, key: str, tensors: Mapping[str, torch.Tensor]
) -> StoredParts:
    """Store this rank's shards of `tensors` under `{key}.{rank}`, and on rank 0 what is not sharded
    under `{key}.rest`. All ranks must call this. Return on rank 0 the description of all parts,
    elsewhere of this rank's parts.

    Raises StorageFull of any rank on all of them, and then leaves nothing.
    """
    made: dict[str, tuple[Tensors, dict[str, Box]]] = {}
    shards = {n: t for n, t in tensors.items() if isinstance(t, DTensor) and _is_first_copy(t)}
    made[f"{key}.{group.rank}"] = (
        {name: tensor.to_local() for name, tensor in shards.items()},
        {name: box_of(tensor) for name, tensor in shards.items()},
    )
    if group.rank == 0:
        rest = {n: t for n, t in tensors.items() if not isinstance(t, DTensor)}
        made[f"{key}.rest"] = rest, {name: Box.whole(t.shape) for name, t in rest.items()}

    def store(progress: LoadProgress) -> list[StoredPart]:
        progress.total = sum(t.nbytes for mine, _ in made.values() for t in mine.values())
        stored = []
        for name, (mine, boxes) in made.items():
            stored.append(store_part(transfer, name, mine, boxes))
            progress.add(stored[-1].num_bytes)
        return stored

    try:
        mine = together(group, "suspending", store)
    except BaseException:
        for name in made:
            transfer.delete(name)
        raise
    everyone = group.gather(json.dumps([part.to_fields() for part in mine]).encode())
    if group.rank == 0:
        mine = [StoredPart.of_fields(fields) for one in everyone for fields in json.loads(one)]
    return StoredParts.of(tensors, mine)


def bring_shards(
    group: GangGroup,
    transfer: HostTransfer,
    stored: StoredParts,
    sharded: Mapping[str, torch.Tensor],
    device: torch.device,
) -> Tensors:
    """Return this rank's shards of a stored state on `device`, laid out as `sharded` (`owner_of`),
    and in host memory what is not sharded. All ranks must call this; the parts are then deleted on
    their hosts.

    Raises ValueError for the state of another model, NotFound of kind "suspended_state_gone", or
    DataLoss of kind "suspended_state_changed".
    """
    owners = {
        name: owner_of(name, torch.Size(shape), sharded)
        for name, (_, shape) in stored.tensors.items()
    }

    def read(progress: LoadProgress) -> Tensors:
        boxes = {
            name: Box.whole(shape) if (owner := owners[name]) is None else box_of(owner)
            for name, (_, shape) in stored.tensors.items()
        }
        for name, box in boxes.items():
            progress.total += box.count * dtype_of(stored.tensors[name][0]).itemsize
        reader = PartsReader(transfer, stored)
        with found_intact(stored.parts[0].key, stored.parts[0].checksum):
            here = {name: reader.read(name, box) for name, box in boxes.items()}
        shards = {name: t for name, t in here.items() if owners[name] is not None}
        if device.type == "cpu":
            found = {name: tensor.clone() for name, tensor in shards.items()}
        else:
            found = brought(shards, device)
        for name, owner in owners.items():
            found[name] = here[name].clone() if owner is None else as_shard(found[name], owner)
        progress.add(progress.total)
        return found

    found = together(group, "resuming", read)
    if group.local == 0:
        for key in stored.keys:
            transfer.delete(key)
    return found


def box_of(tensor: DTensor) -> Box:
    """Return the box that is this rank's shard of a tensor."""
    size, offset = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    return Box(tuple(offset), tuple(size))


def _is_first_copy(tensor: DTensor) -> bool:
    """Return whether this is the first of the ranks with an equal shard."""
    place = tensor.device_mesh.get_coordinate()
    assert place is not None, "this rank has a shard"
    pairs = zip(place, tensor.placements, strict=True)
    return all(at == 0 for at, placement in pairs if placement.is_replicate())
