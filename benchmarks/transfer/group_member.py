"""A process that stands in for the rank of an inference server in a process group with a trainer.

    python -m benchmarks.transfer.group_member

answers each line of its input once it has done what it says: `join HOST PORT GROUP RANK SIZE`
leaves the former group for another; `receive DTYPE COUNT` receives so many elements, and answers
with their number of bytes. It first says that it is ready.
"""

from __future__ import annotations

import sys
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore
from torch.distributed import distributed_c10d as c10d

_JOIN_SECONDS: Final = 300.0


def joined(host: str, port: int, name: str, rank: int, size: int) -> Any:
    """Return the gloo group that a trainer has made, as SGLang joins it."""
    limit = timedelta(seconds=_JOIN_SECONDS)
    store = TCPStore(host, port, size, is_master=False, timeout=limit)
    group, _ = c10d._new_process_group_helper(
        *(size, rank, [], dist.Backend("gloo"), c10d.PrefixStore(name, store)),
        group_name=name,  # type: ignore[arg-type]
        timeout=limit,
    )
    c10d._world.pg_group_ranks[group] = {one: one for one in range(size)}  # type: ignore[index]
    return group


def main() -> None:
    """Do what the input says, until it ends."""
    print("ready", flush=True)
    group: Any = None
    for line in sys.stdin:
        what, *arguments = line.split()
        if what == "join":
            host, port, name, rank, size = arguments
            group = joined(host, int(port), name, int(rank), int(size))
            print("joined", flush=True)
        else:
            dtype, count = arguments
            flat = torch.empty(int(count), dtype=getattr(torch, dtype))
            dist.broadcast(flat, 0, group)
            print(flat.nbytes, flush=True)


if __name__ == "__main__":
    main()
