"""A gloo rank of a gang in which one rank's disk takes longer than ranks otherwise wait.

Run as a module with torchrun's variables and the arguments SPEC.json DIRECTORY. Rank 0 prints the
names of the orders that the gang has carried out, one per line.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)
from torch.distributed.distributed_c10d import _set_pg_timeout

from services.chassis.settings import ServiceSettings
from services.trainer.gang import rank_learner
from services.trainer.gang.gang import Frame
from services.trainer.gang.rank import Rank
from tests.trainer.gang.ranks import join_ranks

# How long ranks wait for one another, and how long the slow disk takes.
USUAL, SLOW = 5.0, 9.0


def delayed(call: Callable[..., Any]) -> Callable[..., Any]:
    def called(*args: Any, **options: Any) -> Any:
        time.sleep(SLOW)
        return call(*args, **options)

    return called


def main() -> None:
    """Save and load, with a disk that all ranks share and without."""
    spec, directory = Path(sys.argv[1]).read_text(), Path(sys.argv[2])
    mesh, control = join_ranks()
    settings = ServiceSettings(data_dir=directory)
    rank = Rank(torch.device("cpu"), mesh, control, None, settings, USUAL)

    def order(name: str, **header: Any) -> None:
        answer = rank._carry_out(Frame({"order": name, "key": "policy", **header}))
        assert not answer.header.get("refused"), name
        if not dist.get_rank():
            print(name, flush=True)

    order("open", spec=spec, policy="solver", options={}, code="")
    rank._members["policy"]._trained.num_parameters = 250_000_000
    writer: Any = HuggingFaceStorageWriter
    reader: Any = HuggingFaceStorageReader
    if dist.get_rank():
        writer.write_data, reader.read_data = delayed(writer.write_data), delayed(reader.read_data)
    _set_pg_timeout(timedelta(seconds=USUAL), control)
    for place in ("shared", "own"):
        (directory / place).mkdir(exist_ok=True)
        order("save", directory=place)
        if place == "shared":
            order("load", directory=place)
            order("reference", directory=place)
        rank._group.shares_disk = False
        if not dist.get_rank():
            rank_learner.file_checksum = delayed(rank_learner.file_checksum)  # type: ignore[attr-defined]
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    os._exit(0)
