"""A gloo rank of a gang that suspends a policy within a step, or resumes what others suspended.

Run as a module with torchrun's variables and the arguments SPEC.json DIRECTORY NAME [STORED ...].
The rank resumes each stored state (`DIRECTORY/STORED.json`), and writes all of its tensors to
`STORED-resumed.safetensors`. Then it suspends the last one, or without any a step of its own, as
`NAME`, whose tensors it writes to `NAME.safetensors`. Rank 0 prints, for each of these, the bytes
that came to it: from the transfer layer, and from other ranks.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from services.chassis.settings import ServiceSettings
from services.chassis.telemetry import Telemetry
from services.chassis.transfer import HostTransfer
from services.trainer.gang.group import GangGroup
from services.trainer.gang.rank_learner import RankLearner, gather
from services.trainer.learning.model import load_model
from services.trainer.state.parts import StoredParts
from tests.trainer.batches import Shape, random_rows
from tests.trainer.gang.ranks import join_ranks
from troupe.job import JobSpec


class Received:
    """The bytes that this rank receives."""

    def __init__(self) -> None:
        self.read = self.exchanged = 0
        self.apart = False
        kept: Any = dist
        for name in ("all_gather", "all_reduce", "broadcast", "all_gather_into_tensor", "scatter"):
            setattr(kept, name, self._counted(getattr(dist, name)))
        tensor: Any = DTensor
        tensor.full_tensor = self._refused(DTensor.full_tensor)

    def _counted(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(output: Any, *args: Any, **options: Any) -> Any:
            found = output if isinstance(output, list) else [output]
            self.exchanged += sum(one.nbytes for one in found)
            return call(output, *args, **options)

        return counted

    def _refused(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def refused(*args: Any, **options: Any) -> Any:
            assert not self.apart, "a rank gathers a tensor"
            return call(*args, **options)

        return refused


class CountedTransfer(HostTransfer):
    """A transfer layer that counts mapped bytes."""

    received: Received

    def get(self, *args: Any, **options: Any) -> Any:
        tensors, manifest = super().get(*args, **options)
        self.received.read += manifest.num_bytes
        return tensors, manifest


def main() -> None:
    """Resume and suspend."""
    spec = JobSpec.model_validate_json(Path(sys.argv[1]).read_text())
    directory, name, stored_names = Path(sys.argv[2]), sys.argv[3], sys.argv[4:]
    mesh, control = join_ranks(400)
    group = GangGroup(mesh, control, lambda: False, Path(), timeout_seconds=400)
    received = Received()
    transfer = CountedTransfer(ServiceSettings(transfer_dir=directory / "transfer"), Telemetry())
    transfer.received = received

    def learner() -> RankLearner:
        return RankLearner(spec, "solver", group, torch.device("cpu"))

    def apart(call: Callable[..., Any], *args: Any) -> Any:
        received.read = received.exchanged = 0
        received.apart = True
        found = call(*args)
        received.apart = False
        if group.rank == 0:
            print(json.dumps([received.read, received.exchanged]), flush=True)
        return found

    def write(policy: RankLearner, file: str) -> None:
        path = directory / f"{file}.safetensors"
        gather(group, policy.suspended()[0], path if group.rank == 0 else None)

    policy = None
    for one in stored_names:
        described = json.loads((directory / f"{one}.json").read_text())
        stored = StoredParts.decode(json.dumps(described["stored"]).encode())
        policy = learner()
        apart(policy.resume, transfer, stored, described["values"])
        write(policy, f"{one}-resumed")
    if policy is None:
        policy = learner()
        rows = random_rows(load_model("solver", spec.policies["solver"], spec.seed), 1, SHAPE)
        policy.accumulate(rows)
        assert policy.apply(0).applied
        policy.accumulate(rows[:5])
    found, values = apart(policy.suspend, transfer, f"job/solver/training@{name}")
    write(policy, name)
    if group.rank == 0:
        described = {"stored": json.loads(found.encode()), "values": values}
        (directory / f"{name}.json").write_text(json.dumps(described))
        left = transfer.keys("job/solver/training@")
        assert left == sorted(found.keys), "what was resumed is deleted"
    dist.destroy_process_group()


SHAPE = Shape(groups=2, members=4)

if __name__ == "__main__":
    main()
    os._exit(0)
