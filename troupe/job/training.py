"""How a policy's trainer computes: what it trades for memory, nothing of what is learned."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from troupe.job.section import Seconds, SecondsOrNone, Section, Tokens


class TrainerSpec(Section):
    """How a policy's gradients are computed."""

    activation_checkpointing: bool = False
    """Keep only what goes into each layer for the backward pass and compute the rest again:
    roughly a third more computation, for activations of one layer instead of all."""
    compile: Literal["auto", "on", "off"] = "auto"
    """Whether torch.compile fuses what lies between matrix products. `on` is refused by a worker
    without a compiler, and with `pipeline.deterministic`. `auto`: where it was measured to pay,
    which is nowhere yet: 5 % on a CPU after half a minute of compiling, no GPU measured."""
    kernels: Literal["auto", "off"] = "auto"
    """Whether RMSNorm and rotary embedding are computed by functions of the trainer's own. `auto`:
    where that was measured to pay, on a CPU, and in models where they are tried out to give what
    the model's own give, value and gradient, within 1e-5 in float32. `off`: never."""
    forward_tokens: Tokens | None = None
    """Tokens of one forward pass, which a micro-batch is cut into; a longer sequence is a pass of
    its own. Default: what suits the device (1024 on a CPU, 16384 on a GPU)."""
    gang: int = Field(default=1, ge=1, le=4096)
    """Devices that share the policy's weights, gradients and optimizer (FSDP2), each computing its
    part of every micro-batch. 1: one device holds all of it. Sums of several devices round in
    another order: not with `pipeline.deterministic`. A resumed job may have another size."""
    quantum_seconds: SecondsOrNone = 1.0
    """Where policies outnumber the trainers' slots: a policy with work keeps its device so long
    before one with older work may take its place. Larger: fewer swaps, longer waits."""
    idle_seconds: Seconds = 600
    """A policy that has no step to train for so long gives its device and memory back, so that
    trainers can be scaled to zero; the next step loads it again."""
