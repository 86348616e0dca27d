"""What a trainer worker can be told besides what every service is told."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from services.chassis.settings import ServiceSettings


class TrainerSettings(ServiceSettings):
    """Read from `TROUPE_*` environment variables."""

    trainer_device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where policies are trained; `auto`: on the GPU if there is one."""
    trainer_lease_seconds: float = Field(default=30, gt=0)
    """How long claimed samples stay with a worker that no longer answers."""
    trainer_claim_wait_seconds: float = Field(default=2, gt=0)
    """How long one claim waits in the store before it is made again."""
    trainer_orphan_seconds: float = Field(default=120, gt=0)
    """How long a step goes on although nobody watches it; then it is given up."""
    trainer_forward_tokens: int = Field(default=0, ge=0)
    """Tokens of one forward pass, padding included; 0: what suits the device."""
    trainer_share_prefixes: bool = True
    """Compute a prefix that several samples share (their prompt) once."""
    trainer_skip_zero_advantages: bool = True
    """Leave out samples whose gradient is exactly zero; they still count as tokens."""
    trainer_keep_states: int = Field(default=2, ge=1)
    """Versions of training state and published weights that are kept per policy."""
    trainer_sync_files: bool = True
    """Have the operating system confirm that training state is on the disk."""
