"""Cost models: device classes, models, and times of engines and trainers.

Peaks and bandwidths are the makers' published figures (dense bfloat16, without sparsity);
`Efficiency` states the fraction that programs reach. A decoding step reads all weights that the
batch touches and every turn's keys and values once, so its time is linear in the running turns;
prefill and training are bound by arithmetic (Kaplan et al. 2020, arXiv 2001.08361, section 2.1: two
operations per parameter and token forward, four backward; plus attention).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Final

from troupe.job.hub import model_config as model_config
from troupe.job.sizing import shape_of_config
from troupe.rpc import InvalidArgument
from troupe.scheduling.memory import ModelShape

GIB: Final = 1 << 30
_HALF: Final = 2  # bytes of a weight or key in bfloat16
_STATE: Final = 16  # bytes per trained parameter: weights, gradients and two moments in float32


@dataclass(frozen=True, slots=True)
class EngineRates:
    """The cost model of one engine (`engine_rates`)."""

    prefill_tokens_per_second: float
    decode_seconds: float
    decode_seconds_per_turn: float
    load_seconds: float = 0.0
    """Seconds in which new weights block the engine."""
    fetch_seconds: float = 0.0
    """Seconds of the transfer of new weights to the engine's host, which still serves meanwhile."""
    start_seconds: float = 0.0
    """Seconds of a start, with another model or after a fault."""


@dataclass(frozen=True, slots=True)
class TrainerRates:
    """The cost model of a policy's gang (`trainer_rates`)."""

    backward_tokens_per_second: float
    """Tokens of forward and backward passes per second, over the whole gang."""
    step_seconds: float
    """Seconds of an optimizer step, after which the new weights are published."""
    swap_seconds: float = 0.0
    """Seconds of moving the training state off the devices, or onto them."""
    micro_batch_seconds: float = 0.0
    """Fixed seconds per micro-batch: launches, collectives, fetching rows."""


@dataclass(frozen=True, slots=True)
class Efficiency:
    """Fractions of the published figures that programs reach.

    Troupe's own kernels reach 25 % in training a 0.5B model on an H100 (docs/benchmarks/gpu.md);
    for models of 7B and more, 35 to 45 % are reported (FSDP, Megatron-LM). Decoding reads memory at
    60 to 70 % of its bandwidth, prefill computes at about half of the peak.
    """

    prefill: float = 0.5
    bandwidth: float = 0.6
    decode: float = 0.35
    training: float = 0.35


@dataclass(frozen=True, slots=True)
class DeviceCosts:
    """One class of device. Rates per second, of one device."""

    name: str
    flops: float
    """Dense bfloat16 operations."""
    bandwidth: float
    """Bytes of its memory."""
    memory: int
    """Bytes."""
    link: float
    """Bytes to the other devices of its host, both directions combined."""
    host_link: float = 25e9
    """Bytes to host memory, each direction."""
    network: float = 20e9
    """Bytes to other hosts."""
    efficiency: Efficiency = Efficiency()


_T: Final = 1e12
DEVICES: Final = {
    one.name: one
    for one in (
        DeviceCosts("H100", 989.4 * _T, 3.35 * _T, 80 * GIB, 900e9, 50e9, 40e9),
        DeviceCosts("H800", 989.4 * _T, 3.35 * _T, 80 * GIB, 400e9, 50e9, 40e9),
        DeviceCosts("H200", 989.4 * _T, 4.8 * _T, 141 * GIB, 900e9, 50e9, 40e9),
        DeviceCosts("H20", 148 * _T, 4.0 * _T, 96 * GIB, 900e9, 50e9, 40e9),
        DeviceCosts("A100", 312 * _T, 2.04 * _T, 80 * GIB, 600e9),
        DeviceCosts("A800", 312 * _T, 2.04 * _T, 80 * GIB, 400e9),
        DeviceCosts("L40S", 362 * _T, 0.864 * _T, 48 * GIB, 64e9, 25e9),
        DeviceCosts("L4", 121 * _T, 0.3 * _T, 24 * GIB, 32e9, 12e9),
        DeviceCosts(
            "910B", 376 * _T, 1.6 * _T, 64 * GIB, 392e9, 25e9, 20e9, Efficiency(0.4, 0.5, 0.3, 0.3)
        ),
    )
}
"""Device classes by name; memory as sold in the usual form."""


def device_costs(
    name: str,
    *,
    memory: int = 0,
    tflops: float = 0.0,
    gigabytes_per_second: float = 0.0,
    field: str = "devices",
) -> DeviceCosts:
    """Return the costs of a device class; `tflops` and `gigabytes_per_second` replace or supply its
    peak and memory bandwidth, `memory` its bytes.

    Raises InvalidArgument that names `field` for an unknown class without all three, and for rates
    that are not positive.
    """
    for rate, value in (("tflops", tflops), ("gigabytes_per_second", gigabytes_per_second)):
        if value < 0 or not math.isfinite(value):
            raise InvalidArgument(
                f"a device's {rate} must be above 0",
                field=rate,
                value=value,
                remedy="Give its maker's published figures: dense bfloat16, and memory bandwidth.",
            )
    known = DEVICES.get(name.upper())
    if known is None:
        if not (tflops and gigabytes_per_second and memory):
            raise InvalidArgument(
                f"device class {name!r} is unknown",
                field=field,
                value=name,
                remedy="Give its peak and its memory's bandwidth (--tflops, --gigabytes-per-second)"
                f" and its memory (8x{name}-80GB), or name one of "
                f"{', '.join(sorted(DEVICES))}, as in 8xH100-80GB.",
            )
        known = DeviceCosts(name, tflops * _T, gigabytes_per_second * 1e9, memory, 64e9)
    return replace(
        known,
        flops=tflops * _T or known.flops,
        bandwidth=gigabytes_per_second * 1e9 or known.bandwidth,
        memory=memory or known.memory,
    )


def model_shape(name: str) -> ModelShape:
    """Return the shape of a Qwen3 model by its name. Raises InvalidArgument for another one."""
    shape = shape_of_config(model_config(name))
    assert shape is not None  # an architecture known to the reader
    return shape


def cache_bytes(shape: ModelShape) -> int:
    """Return the bytes of the keys and values of one token."""
    return 2 * _HALF * shape.layers * shape.kv_heads * shape.head_dim


def _attention(shape: ModelShape, context: float) -> float:
    """Return the operations of a token's attention over `context` tokens, forward."""
    return 4.0 * shape.layers * shape.heads * shape.head_dim * context


# Seconds of one all-reduce of a decoding step between devices of a host, two per layer; and of a
# step's launches and sampling.
_REDUCE_SECONDS: Final = 8e-6
_STEP_SECONDS: Final = 1.5e-3
# Fraction of a device's memory that an engine may use, and bytes of its buffers.
_ENGINE_MEMORY: Final = 0.88
_ENGINE_BUFFERS: Final = 3 * GIB
# Loading weights includes repacking, not only the transfer.
_LOAD_PART: Final = 0.5
_START_SECONDS: Final = 30.0


def engine_rates(
    shape: ModelShape,
    device: DeviceCosts,
    *,
    tensor_parallel: int = 1,
    context: float = 2048.0,
    running: float = 64.0,
    adapter: int = 0,
) -> EngineRates:
    """Return the times of an engine. `context`: mean tokens of a turn in the cache; `running`:
    turns that usually run at once, from which the touched experts of a mixture follow; `adapter`:
    parameters of a LoRA adapter, of which alone a version then consists."""
    part, count = device.efficiency, tensor_parallel
    active = shape.active_parameters
    prefill = device.flops * count * part.prefill / (2 * active + _attention(shape, context / 2))
    touched = float(shape.parameters - (0 if shape.tied else shape.embedding))
    if shape.experts:
        experts = shape.layers * shape.experts * 3.0 * shape.hidden * shape.intermediate
        missed = (1 - shape.active_experts / shape.experts) ** max(1.0, running)
        touched -= experts * missed
    bandwidth = device.bandwidth * count * part.bandwidth
    reduce = 2 * shape.layers * _REDUCE_SECONDS if count > 1 else 0.0
    per_turn = cache_bytes(shape) * context / bandwidth
    per_turn += (2 * active + _attention(shape, context)) / (device.flops * count * part.decode)
    load, first = (
        float(loaded * _HALF) / (device.network * _LOAD_PART)
        for loaded in (adapter or shape.parameters, shape.parameters)
    )
    return EngineRates(
        prefill_tokens_per_second=prefill,
        decode_seconds=touched * _HALF / bandwidth + reduce + _STEP_SECONDS,
        decode_seconds_per_turn=per_turn,
        load_seconds=load,
        start_seconds=_START_SECONDS + first,
    )


def engine_turns(
    shape: ModelShape,
    device: DeviceCosts,
    *,
    tensor_parallel: int,
    context: float,
    most: int = 512,
    adapters: int = 0,
) -> int:
    """Return how many turns of `context` tokens an engine can hold keys and values of, at most
    `most`; 0: the weights do not fit. `adapters`: parameters of all adapters that it serves."""
    room = tensor_parallel * (_ENGINE_MEMORY * device.memory - _ENGINE_BUFFERS)
    # Of an adapter, the next version is loaded while turns still use the former one.
    room -= (shape.parameters + 2 * adapters) * _HALF
    return max(0, min(most, int(room / (cache_bytes(shape) * max(1.0, context)))))


def trainer_rates(
    shape: ModelShape,
    device: DeviceCosts,
    *,
    ranks: int,
    context: float = 2048.0,
    recomputed: float = 1.0,
    adapter: int = 0,
) -> TrainerRates:
    """Return the times of a gang of `ranks` devices. `context`: mean tokens of a row; `recomputed`:
    share of the layers that the backward pass computes again; `adapter`: trained parameters of a
    LoRA adapter, 0: all are trained."""
    active = shape.active_parameters
    passes = 3.0 if not adapter else 2.0  # forward, inputs' gradients, and weights' gradients
    passes += recomputed
    work = passes * (2 * active + _attention(shape, context / 2))
    speed = device.flops * ranks * device.efficiency.training
    trained = adapter or shape.parameters
    # The moments and weights are read and written once; then the new weights leave the devices.
    update = 2.0 * _STATE * trained / ranks / (device.bandwidth * device.efficiency.bandwidth)
    hosts = max(1, ranks // 8)
    publish = (adapter or shape.parameters) * _HALF / (device.network * _LOAD_PART * hosts)
    return TrainerRates(
        backward_tokens_per_second=speed / work,
        step_seconds=update + publish,
        swap_seconds=_STATE * trained / ranks / device.host_link,
        micro_batch_seconds=_LAUNCH_SECONDS,
    )


# Claiming rows, packing them and launching the layers of a micro-batch.
_LAUNCH_SECONDS: Final = 0.2
