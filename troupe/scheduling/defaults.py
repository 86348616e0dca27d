"""Defaults of settings that depend on a policy's checkpoint or on the device that computes it.

Trainer and rollout workers know their device and the checkpoint, a job's author often knows neither
when the job is written. The numbers and their reasons are a table in docs/training.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

_GIB: Final = 1 << 30
# Longest context by default. Models of 131,072 positions and more exist: keys and values of one
# such turn fill a GPU (19 GB for Qwen3-8B), and few trajectories are that long.
LONGEST_CONTEXT: Final = 32_768
# The embedded engine's context by default, where its cache has no room for longer ones.
EMBEDDED_CONTEXT: Final = 2048
# A CPU's default of `trainer.forward_tokens` is the fastest size rather than the largest that fits.
# Sequences up to this many times longer get their own pass, since cutting costs up to a third more.
CPU_UNCUT: Final = 4
# Hidden size from which half of a CPU's tokens are nearly as fast: steps of SmolLM2-135M (576) took
# 4 % longer, with three quarters of the memory.
_WIDE: Final = 512
# Devices of a host with GPUs, as they are sold.
_HOST_DEVICES: Final = 8


@dataclass(frozen=True, slots=True)
class DeviceDefaults:
    """Settings of one class of devices."""

    forward_tokens: int
    """`trainer.forward_tokens`: enough to keep the device busy, few enough for the activations.
    With activation checkpointing, an 8 B model's are about 0.3 MB per token (36 layers of
    4,096 numbers in half precision): 4.8 GB for 16,384 tokens."""
    max_running: int
    """`engine.max_running`. Keys and values of an 8 B model are 147 KB per token: an 80 GB device
    that also has the weights holds 350,000 tokens, 256 turns of 1,400. Turns that turn out longer
    wait in the engine."""
    turn_seconds: float
    """`limits.turn_seconds`. A GPU serves real models, whose responses of 16,384 tokens take five
    to ten minutes in a full batch: as long as `limits.trajectory_seconds`."""
    activation_checkpointing: bool
    """`trainer.activation_checkpointing`. A GPU's memory is what limits models and sequences; the
    models of CPUs are small, and a third more computation hurts."""

    def tokens_of(self, hidden: int) -> int:
        """Return `trainer.forward_tokens` for a model with hidden size `hidden`; 0: unknown."""
        return self.forward_tokens // (2 if self == CPU and hidden >= _WIDE else 1)


CPU: Final = DeviceDefaults(1024, 64, 120.0, False)
# By the least memory of the class, a little below what is sold as 40, 80 and 141 GB.
_GPUS: Final = (
    (0, DeviceDefaults(4096, 64, 600.0, True)),
    (36 * _GIB, DeviceDefaults(8192, 128, 600.0, True)),
    (72 * _GIB, DeviceDefaults(16_384, 256, 600.0, True)),
    (128 * _GIB, DeviceDefaults(16_384, 512, 600.0, True)),
)


def defaults_of(memory: int | None) -> DeviceDefaults:
    """Return the defaults on a GPU with `memory` bytes, 0 if that is unknown; None: on a CPU."""
    if memory is None:
        return CPU
    return next(own for least, own in reversed(_GPUS) if memory >= least)


def described_device(memory: int | None) -> str:
    """Return the class of devices that `defaults_of` means, for people."""
    if memory is None:
        return "CPU"
    least = next(least for least, _ in reversed(_GPUS) if memory >= least)
    return f"GPU of {least // _GIB} GiB or more" if least else "GPU"


def expert_ranks(wanted: int | Literal["auto"], gang: int, experts: int) -> int:
    """Return the ranks of a gang that divide a layer's experts (`trainer.expert_parallel`).

    `auto`: as many as divide both the gang and the `experts` evenly, at most the devices of one
    host, between which tokens travel fast.
    """
    if wanted != "auto":
        return wanted
    fits = range(1, min(gang, _HOST_DEVICES) + 1)
    return max(n for n in fits if gang % n == 0 and experts % n == 0)


def division_problem(ranks: int, gang: int | None, experts: int) -> tuple[str, str]:
    """Return why `ranks` of a gang cannot divide a layer's experts, and what to do; empty texts if
    they can. `gang`: None while it is not decided (`auto`), which makes it a multiple of `ranks`;
    `experts`: 0 for a dense model."""
    if not experts:
        return "the model has no experts", "Leave it at its default of 1."
    size = gang or ranks
    if not experts % ranks and not size % ranks:
        return "", ""
    fits = [n for n in range(1, size + 1) if not experts % n and (gang is None or not gang % n)]
    of = "" if gang is None else f" of {gang}"
    return (
        f"{ranks}{of} ranks cannot divide the {experts} experts of a layer evenly",
        f"Choose a divisor of both: {', '.join(map(str, fits))}; or `auto`."
        if gang
        else f"Choose a divisor of the experts, such as {fits[-1]}; or `auto`.",
    )


def floating_type(checkpoint: str) -> Literal["float32", "bfloat16"]:
    """Return the type of weights that are published for a checkpoint whose own type is
    `checkpoint`.

    Half precision is bfloat16: gradients in float16 would need their loss scaled. Types that are
    unknown or not given count as float32, as in transformers.
    """
    half = checkpoint.removeprefix("torch.") in ("bfloat16", "float16", "half")
    return "bfloat16" if half else "float32"


def context_of(asked: int | None, positions: int, room: int = LONGEST_CONTEXT) -> int:
    """Return the tokens of prompt and response that an engine serves.

    `asked`: `engine.max_context`; None: `positions`, at most `room`. `positions`: those that the
    model has, which bound what is asked, too; 0: unknown.
    """
    wanted = min(room, LONGEST_CONTEXT) if asked is None else asked
    return min(wanted, positions or wanted)
