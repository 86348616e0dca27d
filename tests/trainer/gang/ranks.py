"""The gloo group of the rank modules in this folder."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


def join_ranks(seconds: float = 120) -> tuple[DeviceMesh, dist.ProcessGroup]:
    """Join the ranks that torchrun's variables name, with one thread and a timeout of `seconds`;
    return the mesh of all ranks, and the group of their control messages."""
    torch.set_num_threads(1)
    timeout = timedelta(seconds=seconds)
    dist.init_process_group("gloo", timeout=timeout)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    control = dist.new_group(backend="gloo", timeout=timeout)
    assert control is not None
    return mesh, control
