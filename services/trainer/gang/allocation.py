"""The place of a process among the hosts allocated by a scheduler: LeaderWorkerSet or Slurm.

Both set environment variables in every process that they start. Ranks of gangs read their number,
the number of hosts and the address of the first host there, so users need not number them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from troupe.rpc.addresses import join_address
from troupe.rpc.errors import InvalidArgument

# torch.distributed's own default. A pod has all ports to itself.
_POD_PORT: Final = 29500
# Jobs that share a host need different ports, below the range that the kernel gives to clients.
_SLURM_PORTS: Final = range(20_000, 30_000)


@dataclass(frozen=True)
class Allocation:
    """Hosts that belong together, and this one among them."""

    # This host's number, from 0.
    node: int
    nodes: int
    # "host:port" of host 0, free there.
    endpoint: str


def allocation(environment: Mapping[str, str] = os.environ) -> Allocation | None:
    """Return the allocation that a scheduler's variables describe; None for a single host.

    LeaderWorkerSet: `LWS_LEADER_ADDRESS`, `LWS_GROUP_SIZE`, `LWS_WORKER_INDEX`. Slurm: the step's
    variables (`SLURM_STEP_NODELIST`, `SLURM_STEP_NUM_NODES`) if `srun` started the process, else
    the job's (`SLURM_JOB_NODELIST`, `SLURM_NNODES`), and `SLURM_NODEID`. Raises InvalidArgument
    that names the variable if it is not a number or out of range.
    """
    if leader := environment.get("LWS_LEADER_ADDRESS"):
        return _placed(
            environment, "LWS_WORKER_INDEX", "LWS_GROUP_SIZE", join_address(leader, _POD_PORT)
        )
    step = environment.get("SLURM_STEP_NODELIST")
    hosts = step or environment.get("SLURM_JOB_NODELIST")
    # A shell of `salloc` has a job, but is not on its hosts.
    if not hosts or "SLURM_NODEID" not in environment:
        return None
    job = _number(environment, "SLURM_JOB_ID")
    port = _SLURM_PORTS[job % len(_SLURM_PORTS)]
    nodes = "SLURM_STEP_NUM_NODES" if step else "SLURM_NNODES"
    return _placed(environment, "SLURM_NODEID", nodes, f"{first_host(hosts)}:{port}")


def first_host(hosts: str) -> str:
    """Return the first name of a Slurm host list: "gpu[01-04,07],x9" -> "gpu01".

    A host list is separated by commas; brackets hold numbers and ranges, and may occur repeatedly.
    """
    entry = re.match(r"(?:[^,\[\]]|\[[^\]]*\])*", hosts)
    assert entry is not None
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", entry[0])


def _placed(
    environment: Mapping[str, str], node_variable: str, nodes_variable: str, endpoint: str
) -> Allocation | None:
    node, nodes = _number(environment, node_variable), _number(environment, nodes_variable)
    if nodes <= 1:
        return None
    if node >= nodes:
        raise InvalidArgument(
            f"is not below {nodes_variable}={nodes}",
            field=node_variable,
            value=node,
            remedy="The scheduler sets both. Unset them, or remove the setting that overwrites "
            "them.",
        )
    return Allocation(node, nodes, endpoint)


def _number(environment: Mapping[str, str], variable: str) -> int:
    text = environment.get(variable, "")
    if not text.isdecimal():
        raise InvalidArgument(
            "is not a number from the scheduler",
            field=variable,
            value=text or None,
            remedy="Set TROUPE_GANG_NODES, TROUPE_GANG_NODE and TROUPE_GANG_ENDPOINT instead, and "
            "unset LWS_LEADER_ADDRESS or SLURM_NODEID.",
        )
    return int(text)
