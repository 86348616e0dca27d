"""Settings of a trainer worker."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal

from pydantic import Field

from services.chassis.settings import ServiceSettings
from services.trainer.gang.allocation import allocation

# SGLang's processes set it so, the ranks of an NCCL group must agree, and NCCL reads it once.
_NCCL: Final = {"NCCL_CUMEM_ENABLE": "0"}
# torch's allocator of pinned host memory rounds sizes up to powers of two and keeps what is freed:
# moments, copies of states and frozen weights there would take 1.15 (Qwen3-32B) to 1.46 (14B) times
# their size, for ever. Above this size it does neither.
_ALLOCATOR: Final = {"PYTORCH_ALLOC_CONF": "pinned_max_cached_size_mb:1"}
_ALLOCATORS: Final = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")


def process_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that a trainer's process or a rank needs in addition to `environment`,
    before it imports torch: what the operator sets stays."""
    found = {name: value for name, value in _NCCL.items() if name not in environment}
    if not any(name in environment for name in _ALLOCATORS):
        found |= _ALLOCATOR
    return found


def _gang_nodes() -> int:
    place = allocation()
    return place.nodes if place else 1


def _gang_endpoint(given: dict[str, Any]) -> str:
    place = allocation() if given.get("gang_nodes", 1) > 1 else None
    return place.endpoint if place else "127.0.0.1:0"


class TrainerSettings(ServiceSettings):
    """The settings of a trainer worker, read from `TROUPE_*` environment variables."""

    trainer_device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where policies are trained; `auto`: on the GPU if there is one."""
    trainer_slots: int = Field(default=0, ge=0)
    """Policies that this worker holds at once; 0: as many as it is given, which take turns by
    micro-batch and stay. With fewer slots than policies each is bound while it has work, and its
    training state waits in the transfer layer otherwise."""
    trainer_memory_bytes: int = Field(default=0, ge=0)
    """Bytes that policies may use of each device of this worker: training state, and what a pass
    needs in addition; 0: all that a GPU has, on a CPU not bounded. A policy that no worker has room
    for is refused."""
    trainer_lease_seconds: float = Field(default=30, gt=0)
    """How long claimed samples stay with a worker that no longer answers."""
    trainer_claim_wait_seconds: float = Field(default=2, gt=0)
    """How long one claim waits in the store before it is made again."""
    trainer_orphan_seconds: float = Field(default=120, gt=0)
    """How long a step continues without a watcher; then it is given up."""
    trainer_forward_tokens: int = Field(default=0, ge=0)
    """Tokens of one forward pass, padding included; 0: what suits the device."""
    trainer_share_prefixes: bool = True
    """Compute a prefix that several samples share (their prompt) once."""
    trainer_skip_zero_advantages: bool = True
    """Leave out samples whose gradient is exactly zero; they still count as tokens."""
    trainer_keep_states: int = Field(default=2, ge=1)
    """Versions of training state and published weights that are kept per policy."""
    trainer_state_wait_seconds: float = Field(default=60, ge=0)
    """How long a policy that moves here waits for a trainer that has its training state, where
    hosts share no data_dir."""
    trainer_state_replicas: int = Field(default=0, ge=0, le=8)
    """Trainers on other hosts that keep a copy of each committed state, where hosts share no
    data_dir; each step waits for them."""
    trainer_value_wait_seconds: float = Field(default=30, ge=0)
    """How long a micro-batch waits, where hosts share no transfer_dir, for values of samples that
    no host has; then the samples are dropped as "value_gone"."""
    trainer_sync_files: bool = True
    """Have the operating system confirm that training state is on the disk."""
    gang_ranks: int = Field(default=0, ge=0, le=64)
    """Ranks of a gang on this host; 0: one per GPU, or per core where there is none."""
    gang_nodes: int = Field(default_factory=_gang_nodes, ge=1, le=64)
    """Hosts of a gang, this one included; the others run `python -m services.trainer.gang`. As many
    as LeaderWorkerSet's or Slurm's variables say, else 1."""
    gang_endpoint: str = Field(default_factory=_gang_endpoint)
    """"host:port" at which the ranks of a gang meet: of the first host that those variables name,
    else "127.0.0.1:0". Port 0 takes a free one (one host only)."""
    gang_start_seconds: float = Field(default=180, gt=0)
    """How long a gang waits for all of its ranks."""
    gang_timeout_seconds: float = Field(default=120, gt=0)
    """How long a rank waits for the others in one operation, before the gang is given up."""
