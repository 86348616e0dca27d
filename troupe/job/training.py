"""How a policy's trainer computes: what it trades for memory, nothing of what is learned."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from troupe.job.section import Section


class TrainerSpec(Section):
    """How a policy's gradients are computed."""

    activation_checkpointing: bool = False
    """Keep only what goes into each layer for the backward pass and compute the rest again:
    roughly a third more computation, for activations of one layer instead of all."""
    compile: Literal["auto", "on", "off"] = "auto"
    """Whether torch.compile fuses the layers. `auto`: where it was measured to pay (a GPU, and no
    deterministic mode); `on` is refused by a worker that has no compiler."""
    forward_tokens: int | None = Field(default=None, ge=1)
    """Tokens of one forward pass, which a micro-batch is cut into; a longer sequence is a pass of
    its own. Default: what suits the device (1024 on a CPU, 16384 on a GPU)."""
    gang: int = Field(default=1, ge=1, le=4096)
    """Devices that share the policy's weights, gradients and optimizer (FSDP2), each computing its
    part of every micro-batch. 1: one device holds all of it. Sums of several devices round in
    another order: not with `pipeline.deterministic`. A resumed job may have another size."""
