"""Optimizer parts: order-independent gradient sums, clipping, random generators, AdamW, schedule.

`ExactSum` adds in integers, so that a sum is the same bit for bit in any order. The learning rate
is a function of the version, so there is no scheduler state to keep.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from services.trainer.memory.offload import OffloadedAdamW
from troupe.job import OptimizerSpec
from troupe.job.policy import Offload

# Fixed-point precision of exact sums: a quantum is 2^-40.
FRACTION_BITS = 40
_SCALE = float(1 << FRACTION_BITS)
_LIMIT = 1 << 63
# Elements converted at a time: few enough to stay in a CPU's caches.
_BLOCK = {"cpu": 1 << 18, "cuda": 1 << 26}
Generators = dict[str, torch.Tensor]
NAMES = frozenset({"torch", "numpy", "numpy_gauss", "cuda"})
# Between the slot and the parameter in the name of a moment: `{slot}/{parameter}`.
SEPARATOR = "/"
Moments = dict[str, torch.Tensor]


def is_moment(name: str) -> bool:
    """Whether a tensor of training state is a moment, by its name; else it is a weight."""
    return SEPARATOR in name


class NotSummable(ArithmeticError):
    """A gradient is not finite, or the exact sum may overflow."""


class ExactSum:
    """Order-independent element-wise sums of tensors, in int64 fixed point."""

    def __init__(self, like: Sequence[torch.Tensor]) -> None:
        """Begin with zeros in the shapes and on the devices of `like`."""
        self._sums = [torch.zeros(t.numel(), dtype=torch.int64, device=t.device) for t in like]
        # Per tensor, a bound on the magnitude of every element in quanta (exact Python integers).
        self._bounds = [0] * len(self._sums)

    def add(self, term: Sequence[torch.Tensor | None]) -> None:
        """Add a tensor, or None for nothing, to each sum.

        Raises NotSummable, whatever the order of terms; the sums are then invalid until `clear`.
        """
        present = [i for i, t in enumerate(term) if t is not None and t.numel()]
        tensors = [t.detach() for i in present if (t := term[i]) is not None]
        if not tensors:
            return
        for i, peak in zip(present, _peaks(tensors), strict=True):
            if not math.isfinite(peak):
                raise NotSummable(f"a gradient is {peak}")
            self._bounds[i] += int(peak * _SCALE) + 1
            if self._bounds[i] >= _LIMIT:
                raise NotSummable(
                    f"the summed gradient may exceed 2^{63 - FRACTION_BITS}, which deterministic "
                    "mode cannot add exactly"
                )
        for i, tensor in zip(present, tensors, strict=True):
            flat, total = tensor.reshape(-1), self._sums[i]
            # Multiplying by a power of two rounds nothing, in single precision too.
            size = _BLOCK.get(flat.device.type, len(flat))
            for start in range(0, len(flat), size):
                part = flat[start : start + size] * _SCALE
                total[start : start + size] += part.round_().to(torch.int64)

    def write(self, into: Sequence[torch.Tensor], divisor: float) -> None:
        """Write every sum, divided by `divisor`, into the tensor of `into` at its index."""
        for total, tensor in zip(self._sums, into, strict=True):
            quotient = total.to(torch.float64).div_(_SCALE * divisor)
            tensor.copy_(quotient.view_as(tensor))

    def state(self) -> tuple[list[torch.Tensor], list[int]]:
        """The sums in quanta (int64), not copied, and their bounds."""
        return self._sums, list(self._bounds)

    @staticmethod
    def resumed(sums: Sequence[torch.Tensor], bounds: Sequence[int]) -> ExactSum:
        """An exact sum that continues from `state`, in the same tensors."""
        found = ExactSum([])
        found._sums, found._bounds = list(sums), list(bounds)
        return found

    def clear(self) -> None:
        """Set all sums to zero."""
        for total in self._sums:
            total.zero_()
        self._bounds = [0] * len(self._sums)


def _peaks(tensors: list[torch.Tensor]) -> list[float]:
    """Largest magnitude of each tensor, or NaN. Synchronizes with the device once."""
    extremes = [torch.stack(torch.aminmax(t)).abs().amax().to(torch.float64) for t in tensors]
    return [float(value) for value in torch.stack(extremes).tolist()]


class Gradients:
    """The gradient sums of a step: in the parameters' `.grad`, or exact ones (`ExactSum`)."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        self._parameters = list(parameters)
        # Made on first use: only deterministic jobs need it.
        self._exact: ExactSum | None = None

    def accumulate_exact(self) -> str:
        """Move `.grad` into the exact sums; returns the reason if it cannot, else an empty text."""
        if self._exact is None:
            self._exact = ExactSum(self._parameters)
        problem = ""
        try:
            self._exact.add([parameter.grad for parameter in self._parameters])
        except NotSummable as error:
            problem = str(error)
        self._drop()
        return problem

    def finish(self, total: int, max_norm: float) -> float:
        """Divide the sums by `total` and clip them in `.grad`; returns their L2 norm before."""
        for parameter in self._parameters:
            if parameter.grad is None:
                # Every sample of the step had advantage zero: a step of size zero.
                parameter.grad = torch.zeros_like(parameter)
        grads = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        if self._exact is not None:
            self._exact.write(grads, float(total))
        else:
            torch._foreach_div_(grads, float(total))
        return _full_norm(torch.nn.utils.clip_grad_norm_(self._parameters, max_norm, foreach=True))

    @torch.no_grad()
    def weights_norm(self) -> float:
        """L2 norm of the parameters; not finite if one is not, or exceeds 1e19."""
        return _full_norm(torch.nn.utils.get_total_norm(self._parameters, foreach=True))

    def discard(self) -> None:
        """Forget all gradients."""
        self._drop()
        if self._exact is not None:
            self._exact.clear()

    def state(self) -> tuple[dict[str, torch.Tensor], list[int]]:
        """Gradients and exact sums, not copied, and the bounds of exact sums, if any."""
        found = {
            f"{i}": parameter.grad
            for i, parameter in enumerate(self._parameters)
            if parameter.grad is not None
        }
        if self._exact is None:
            return found, []
        sums, bounds = self._exact.state()
        return found | {f"exact/{i}": total for i, total in enumerate(sums)}, bounds

    def restore(self, tensors: dict[str, torch.Tensor], bounds: list[int]) -> None:
        """Continue from `state`, in the same tensors."""
        self._drop()
        for i, parameter in enumerate(self._parameters):
            parameter.grad = tensors.get(f"{i}")
        self._exact = None
        if bounds:
            self._exact = ExactSum.resumed(
                [tensors[f"exact/{i}"] for i in range(len(bounds))], bounds
            )

    def _drop(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None


def _full_norm(norm: torch.Tensor) -> float:
    # The norm of a sharded model is a DTensor.
    return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)


def capture(device: torch.device) -> Generators:
    """A copy of the states of torch's generators (CPU and `device`) and numpy's."""
    _, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    numbers = np.concatenate([np.asarray(keys, np.int64), [position, has_gauss]])
    found = {
        "torch": torch.get_rng_state(),
        "numpy": torch.from_numpy(numbers),
        "numpy_gauss": torch.tensor(gauss, dtype=torch.float64),
    }
    if device.type == "cuda":
        found["cuda"] = torch.cuda.get_rng_state(device)
    return found


def restore(generators: Mapping[str, torch.Tensor], device: torch.device) -> None:
    """Inverse of `capture`; generators that are missing from it stay as they are."""
    if "torch" in generators:
        torch.set_rng_state(generators["torch"])
    if "numpy" in generators:
        numbers = generators["numpy"].numpy()
        gauss = float(generators["numpy_gauss"])
        keys, (position, has_gauss) = numbers[:-2].astype(np.uint32), map(int, numbers[-2:])
        np.random.set_state(("MT19937", keys, position, has_gauss, gauss))
    if "cuda" in generators and device.type == "cuda":
        torch.cuda.set_rng_state(generators["cuda"], device)


def seeded(value: int, device: torch.device) -> Generators:
    """Generators seeded with `value`; those of the process stay as they are."""
    before = capture(device)
    try:
        torch.manual_seed(value)
        np.random.seed(value % (1 << 32))
        return capture(device)
    finally:
        restore(before, device)


class Randomness:
    """The random generators of one policy: at the committed version, and in the current step."""

    def __init__(self, generators: Mapping[str, torch.Tensor], device: torch.device) -> None:
        self._device = device
        self.committed: Generators = dict(generators)
        self.now: Generators = dict(generators)

    @contextlib.contextmanager
    def drawing(self) -> Iterator[None]:
        """Context in which torch and numpy draw from this policy's generators.

        For the compute thread, since it replaces the states of the process's generators.
        """
        before = capture(self._device)
        restore(self.now, self._device)
        try:
            yield
        finally:
            self.now = capture(self._device)
            restore(before, self._device)

    def commit(self) -> None:
        """Keep the generators' states of the step, which was committed."""
        self.committed = self.now

    def rewind(self) -> None:
        """Restore the generators' states of the committed version, as the step was given up."""
        self.now = self.committed


def learning_rate(spec: OptimizerSpec, applied: int, total: int) -> float:
    """The learning rate of the step after `applied` steps of at most `total`."""
    if applied < spec.warmup_steps:
        return spec.lr * (applied + 1) / spec.warmup_steps
    span = max(1, total - 1 - spec.warmup_steps)
    progress = min(1.0, (applied - spec.warmup_steps) / span)
    floor = spec.final_lr_fraction
    if spec.schedule == "linear":
        return spec.lr * (1.0 - (1.0 - floor) * progress)
    if spec.schedule == "cosine":
        return spec.lr * (floor + (1.0 - floor) * 0.5 * (1.0 + math.cos(math.pi * progress)))
    return spec.lr


def make_optimizer(
    model: torch.nn.Module, spec: OptimizerSpec, offload: Offload = "none"
) -> torch.optim.AdamW:
    """AdamW over trained parameters; weight decay for matrices only, not norms and biases.

    `offload`: unless "none", with moments in host memory.
    """
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    groups = [
        {"params": [p for _, p in named if p.ndim >= 2], "weight_decay": spec.weight_decay},
        {"params": [p for _, p in named if p.ndim < 2], "weight_decay": 0.0},
    ]
    kind = torch.optim.AdamW if offload == "none" else OffloadedAdamW
    return kind(
        [group for group in groups if group["params"]],
        lr=spec.lr,
        betas=spec.betas,
        eps=spec.eps,
        fused=True,
    )


def export_moments(model: torch.nn.Module, optimizer: torch.optim.AdamW) -> Moments:
    """The optimizer's state by `{slot}/{parameter}`, not copied; empty before the first step."""
    return {
        f"{slot}/{name}": value
        for name, parameter in model.named_parameters()
        for slot, value in optimizer.state.get(parameter, {}).items()
    }


def import_moments(
    model: torch.nn.Module,
    optimizer: torch.optim.AdamW,
    moments: Mapping[str, torch.Tensor],
    *,
    copy: bool = True,
) -> None:
    """Inverse of `export_moments`; replaces the optimizer's state.

    Without `copy` the optimizer uses the tensors themselves where they are on its device.
    """
    parameters = dict(model.named_parameters())
    optimizer.state.clear()
    for key, value in moments.items():
        slot, _, name = key.partition("/")
        parameter = parameters[name]
        # AdamW keeps `step` in float32, the moments in the parameter's type.
        if isinstance(optimizer, OffloadedAdamW):
            found = optimizer.on_host(value, parameter)
        else:
            found = value.to(parameter.device, copy=copy)
        optimizer.state.setdefault(parameter, {})[slot] = found
