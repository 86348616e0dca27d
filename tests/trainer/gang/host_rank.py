"""A gloo rank of a gang over hosts, as far as its variables say: weights on each host or over all.

Run as a module with torchrun's variables, with the arguments SPEC.json DIRECTORY. Rank 0 prints
one JSON object per way of sharding: how far weights and moments are from those of one device, the
bytes of weights and gradients that enter a host per step, and what was written.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.utils._python_dispatch import TorchDispatchMode

from services.chassis.settings import ServiceSettings
from services.chassis.telemetry import Telemetry
from services.chassis.transfer import HostTransfer
from services.trainer.gang.gang import Frame
from services.trainer.gang.gathering import whole
from services.trainer.gang.group import GangGroup
from services.trainer.gang.rank_learner import RankLearner
from services.trainer.gang.sharded_state import read_whole
from services.trainer.learning.learner import Learner
from services.trainer.learning.model import load_adapted, load_model
from services.trainer.learning.samples import Row
from services.trainer.state.parts import StoredParts
from tests.trainer.batches import Shape, random_rows
from tests.trainer.gang.ranks import join_ranks
from troupe.checkpoints.adapters import Tensors
from troupe.job import JobSpec
from troupe.transfer.checksum import bytes_checksum

CPU = torch.device("cpu")
PLAIN = {"forward_tokens": 64, "share_prefixes": False}
SHAPE = Shape(groups=2, members=2)


class Crossing(TorchDispatchMode):
    """Counts the bytes that collectives of other groups than `control` bring into this host: at
    least, as if ranks of a host shared what arrives."""

    def __init__(self, group: GangGroup) -> None:
        super().__init__()
        self.group, self.bytes = group, 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            self._count(func.__name__, args)
        return func(*args, **(kwargs or {}))

    def _count(self, name: str, args: Any) -> None:
        boxed = [one for one in args if isinstance(one, torch.ScriptObject | torch._C.ScriptObject)]
        groups = [one for one in boxed if "ProcessGroup" in str(one._type())]
        if groups:
            found = _resolve_process_group(dist.ProcessGroup.unbox(groups[0]).group_name)
        elif names := [one for one in args if isinstance(one, str) and one not in ("sum", "avg")]:
            found = _resolve_process_group(names[-1])
        else:
            return  # waits
        here = self.group.size // self.group.hosts
        hosts = [rank // here for rank in dist.get_process_group_ranks(found)]
        if found is self.group.control or len(set(hosts)) == 1:
            return
        first = args[0][0] if isinstance(args[0], list | tuple) else args[0]
        nbytes = max(t.nbytes for t in [first, *args[1:2]] if isinstance(t, torch.Tensor))
        share = 1 - 1 / len(set(hosts))
        times = 2 if "allreduce" in name or "all_reduce" in name else 1
        self.bytes += times * share * nbytes / hosts.count(self.group.host)


def rows_of(spec: JobSpec, seed: int) -> list[Row]:
    """Return rows of a micro-batch, the same on all ranks."""
    plain = spec.policies["solver"].model_copy(update={"lora": None})
    return random_rows(load_model("solver", plain, spec.seed), seed, SHAPE)


def step(learner: Any, batches: list[list[Row]], version: int) -> None:
    """One step of several micro-batches."""
    for rows in batches:
        learner.accumulate(rows)
    applied = learner.apply(version)
    assert applied.applied, applied.reason


def wholes(learner: RankLearner) -> Tensors:
    """Return all weights and moments."""
    state = learner.weights() | learner.moments()
    return {name: whole(tensor).clone() for name, tensor in state.items()}


def furthest(mine: Tensors, theirs: Tensors) -> float:
    """Return the largest difference, relative to values of 1."""
    assert set(mine) == set(theirs)
    gaps = [(mine[n] - t).abs() / (1 + t.abs()) for n, t in theirs.items() if t.numel()]
    return max(float(gap.max()) for gap in gaps)


def same_on_hosts(group: GangGroup, learner: RankLearner) -> bool:
    """Return whether the replicas of all hosts are equal, bit for bit."""
    digest = bytes_checksum(b"".join(t.numpy().tobytes() for t in wholes(learner).values()))
    return len(set(group.gather(digest.encode()))) == 1


def alone(spec: JobSpec) -> Learner:
    """Return the policy on one device, in float64."""
    own = spec.policies["solver"]
    made = load_model("solver", own, 0) if own.lora is None else None
    model = made or load_adapted("solver", own, spec.seed, CPU)
    return Learner(model.double(), spec, "solver", **PLAIN)


def run(
    spec: JobSpec, group: GangGroup, directory: Path, transfer: HostTransfer, *, replicas: int
) -> dict[str, Any]:
    """Train in steps of one and of three micro-batches; save, suspend within a step and resume."""
    one, first = alone(spec), group.rank == 0
    options: dict[str, Any] = {"double": True, "replicas": replicas, **PLAIN}
    learner = RankLearner(spec, "solver", group, CPU, **options)
    for each in (one, learner):
        if each.needs_reference:
            each.set_reference(each.weights())
    found: dict[str, Any] = {"replicas": replicas, "entering": []}
    for version, count in enumerate((1, 3)):
        batches = [rows_of(spec, 10 * version + i) for i in range(count)]
        step(one, batches, version)
        with Crossing(group) as crossing:
            step(learner, batches, version)
        (entering,) = group.summed(
            torch.tensor([crossing.bytes if group.host == 0 else 0.0])
        ).tolist()
        found["entering"].append(entering)
    found["apart"] = furthest(wholes(learner), dict(one.weights() | one.moments()))

    directory.mkdir(parents=True, exist_ok=True)
    dist.barrier(group.control)
    learner.save(directory)
    found["files"] = sum(file.stat().st_size for file in directory.glob("*.safetensors"))
    state = wholes(learner)
    found["bytes"] = sum(t.nbytes for t in state.values())
    # Read by one device, and by a gang that shards otherwise.
    read = {name: tensor for name, tensor in read_whole(directory).items() if name in state}
    found["read"] = furthest(read, state)
    options["replicas"] = group.hosts if replicas == 1 else 1
    other = RankLearner(spec, "solver", group, CPU, **options)
    if other.needs_reference:
        other.set_reference(other.weights())
    other.load_shards(directory)
    found["loaded"] = furthest(wholes(other), state)

    # Suspended within a step: it continues here, and is resumed elsewhere.
    before, after = rows_of(spec, 30), rows_of(spec, 31)
    for each in (one, learner):
        each.accumulate(before)
    mine, values = learner.suspend(transfer, f"job/{replicas}/state")
    told = group.broadcast(Frame({"values": values}, mine.encode()) if first else None)
    other.resume(transfer, StoredParts.decode(told.body), told.header["values"])
    one.accumulate(after)
    assert one.apply(2).applied
    expected = dict(one.weights() | one.moments())
    for name, each in (("went_on", learner), ("resumed", other)):
        each.accumulate(after)
        assert each.apply(2).applied
        found[name] = furthest(wholes(each), expected)
        found[f"{name}_same"] = same_on_hosts(group, each)
    dist.barrier(group.control)
    return found


def main() -> None:
    """Measure both ways of sharding, one after the other."""
    spec = JobSpec.model_validate_json(Path(sys.argv[1]).read_text())
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")
    mesh, control = join_ranks(300)
    directory = Path(sys.argv[2])
    group = GangGroup(mesh, control, lambda: False, directory)
    transfer = HostTransfer(ServiceSettings(transfer_dir=directory / "transfer"), Telemetry())
    for replicas in (1, group.hosts):
        found = run(spec, group, directory / str(replicas), transfer, replicas=replicas)
        if group.rank == 0:
            print(json.dumps(found), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    os._exit(0)
