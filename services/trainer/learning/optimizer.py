"""Optimizer parts: order-independent gradient sums, clipping, random generators, AdamW, schedule.

`ExactSum` adds in integers, so that a sum is the same bit for bit in any order. The learning rate
is a function of the version, so there is no scheduler state to keep.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

from services.trainer.learning.ranks import RankGroup
from services.trainer.state.parameter_memory import can_pin
from troupe.contracts import metric_names
from troupe.job import JobSpec, OptimizerSpec
from troupe.job.sections.policy import Offload
from troupe.scheduling.memory import OFFLOADED_PART

# Fixed-point precision of exact sums: a quantum is 2^-40.
FRACTION_BITS = 40
_SCALE = float(1 << FRACTION_BITS)
_LIMIT = 1 << 63
# Elements converted at a time: few enough to stay in a CPU's caches.
_BLOCK = {"cpu": 1 << 18, "cuda": 1 << 26}
T = TypeVar("T", bound=torch.Tensor)
Generators = dict[str, torch.Tensor]
NAMES = frozenset({"torch", "numpy", "numpy_gauss", "cuda"})
# Between the kind and the parameter in the name of a moment: `{kind}/{parameter}`.
SEPARATOR = "/"
Moments = dict[str, torch.Tensor]


def is_moment(name: str) -> bool:
    """Return whether a tensor of training state is a moment, by its name; else it is a weight."""
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
        """Return the sums in quanta (int64), not copied, and their bounds."""
        return self._sums, list(self._bounds)

    @staticmethod
    def resumed(sums: Sequence[torch.Tensor], bounds: Sequence[int]) -> ExactSum:
        """Return an exact sum that continues from `state`, in the same tensors."""
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
    """The gradient sums of a step: in the parameters' `.grad`, or exact ones (`ExactSum`).

    Where each host of a gang has a replica of the weights, passes add to the sums of their host,
    which are merged once: for the update, or for a state that is suspended.
    """

    def __init__(
        self, parameters: Sequence[torch.nn.Parameter], ranks: RankGroup | None = None
    ) -> None:
        self._parameters = list(parameters)
        self._ranks = ranks or RankGroup()
        # Whether `.grad` has the sums over all replicas.
        self._merged = False
        # Made on first use: only deterministic jobs need it.
        self._exact: ExactSum | None = None

    def open(self) -> None:
        """Let passes add to the sums; of merged ones only the first replica keeps them."""
        if self._merged and self._ranks.replica:
            for parameter in self._parameters:
                if parameter.grad is not None:  # not dropped: all ranks go on alike
                    parameter.grad.zero_()
        self._merged = False

    def _merge(self) -> None:
        if not self._merged and self._ranks.replicas > 1:
            grads = [parameter.grad for parameter in self._parameters]
            self._ranks.sum_over_replicas([local_part(one) for one in grads if one is not None])
        self._merged = True

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
        self._merge()
        grads = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        if self._exact is not None:
            self._exact.write(grads, float(total))
        else:
            for some in by_mesh(grads):
                torch._foreach_div_(some, float(total))
        norm = _total_norm(grads)
        if self._ranks.replicas > 1:
            # Hosts may add up the norm in different orders, and replicas must stay equal.
            norm.fill_(self._ranks.agreed(float(norm)))
        for own in by_mesh(self._parameters):
            torch.nn.utils.clip_grads_with_norm_(own, max_norm, norm, foreach=True)
        return float(norm)

    @torch.no_grad()
    def weights_norm(self) -> float:
        """L2 norm of the parameters; not finite if one is not, or exceeds 1e19."""
        return float(_total_norm(self._parameters))

    def discard(self) -> None:
        """Forget all gradients."""
        self._drop()
        if self._exact is not None:
            self._exact.clear()

    def state(self) -> tuple[dict[str, torch.Tensor], list[int]]:
        """Return gradients and exact sums, not copied, and the bounds of exact sums, if any.

        All ranks call it: replicas merge their sums.
        """
        self._merge()
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
        self._merged = True  # every replica has all of it
        self._exact = None
        if bounds:
            self._exact = ExactSum.resumed(
                [tensors[f"exact/{i}"] for i in range(len(bounds))], bounds
            )

    def _drop(self) -> None:
        self._merged = False
        for parameter in self._parameters:
            parameter.grad = None


def by_mesh(tensors: Sequence[T]) -> list[list[T]]:
    """Group tensors by the mesh that they are sharded over: operators on several tensors require
    one mesh. Divided experts may have a mesh of their own (gang/experts.py)."""
    found: dict[Any, list[T]] = {}
    for tensor in tensors:
        mesh = tensor.device_mesh if isinstance(tensor, DTensor) else None
        found.setdefault(mesh, []).append(tensor)
    return list(found.values())


def _total_norm(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the L2 norm of all elements, a plain tensor."""
    norms = [torch.nn.utils.get_total_norm(some, foreach=True) for some in by_mesh(tensors)]
    plain = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
    return plain[0] if len(plain) == 1 else torch.linalg.vector_norm(torch.stack(plain))


def capture(device: torch.device) -> Generators:
    """Return a copy of the states of torch's generators (CPU and `device`) and numpy's."""
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
    """Return generators seeded with `value`; the generators of the process are unchanged."""
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
    """Return the learning rate of the step after `applied` steps of at most `total`."""
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


def learning_rates(job: JobSpec, policy: str, version: int, step: int) -> dict[str, float]:
    """Return the learning rates of a policy's `step`, counted from 0, from `version`, by their
    metrics.

    A schedule counts versions, as a step that is not applied does not use up its rate. In a job
    that first learns from rows it counts steps: a policy without rows there has made no version
    when the other steps begin.
    """
    optimizer, steps, done = job.policies[policy].optimizer, job.pipeline.steps, version
    offline = job.offline
    if offline is not None and job.is_offline(step):
        optimizer = optimizer.model_copy(update={"lr": offline.lr or optimizer.lr})
        steps, done = offline.steps, step
    elif offline is not None:
        steps, done = steps - offline.steps, step - offline.steps
    rates = {metric_names.LEARNING_RATE: learning_rate(optimizer, done, steps)}
    if (critic := job.algorithm.value_function) is not None:
        rate = learning_rate(critic.optimizer, done, steps)
        rates[metric_names.CRITIC_LEARNING_RATE] = rate
    return rates


def make_optimizer(
    model: torch.nn.Module, spec: OptimizerSpec, offload: Offload = "none"
) -> torch.optim.AdamW:
    """AdamW over trained parameters; weight decay for matrices only, not norms and biases.

    `offload`: unless "none", with moments in host memory.
    """
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    decays = ([p for _, p in named if p.ndim >= 2], spec.weight_decay)
    kept = ([p for _, p in named if p.ndim < 2], 0.0)
    groups = [
        {"params": some, "weight_decay": decay}
        for parameters, decay in (decays, kept)
        for some in by_mesh(parameters)
    ]
    kind = torch.optim.AdamW if offload == "none" else OffloadedAdamW
    return kind(
        groups,
        lr=spec.lr,
        betas=spec.betas,
        eps=spec.eps,
        fused=True,
    )


def export_moments(model: torch.nn.Module, optimizer: torch.optim.AdamW) -> Moments:
    """Return the optimizer's state by `{kind}/{parameter}`, not copied; empty before the first
    step."""
    return {
        f"{kind}/{name}": value
        for name, parameter in model.named_parameters()
        for kind, value in optimizer.state.get(parameter, {}).items()
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
        kind, _, name = key.partition("/")
        parameter = parameters[name]
        # AdamW keeps `step` in float32, the moments in the parameter's type.
        if isinstance(optimizer, OffloadedAdamW):
            found = optimizer.on_host(value, parameter)
        else:
            found = value.to(parameter.device, copy=copy)
        optimizer.state.setdefault(parameter, {})[kind] = found


_MOMENT_KINDS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class _Slice:
    """Elements `start` to `end` of a trained tensor: flat views of all that a step changes."""

    parameter: torch.Tensor
    gradient: torch.Tensor
    # On the host.
    moments: tuple[torch.Tensor, torch.Tensor]
    # Steps before this one.
    steps: float


class _Buffer:
    """Device memory of the moments of one part."""

    def __init__(self, elements: int, like: torch.Tensor) -> None:
        self._memory = [
            torch.empty(elements, dtype=like.dtype, device=like.device) for _ in _MOMENT_KINDS
        ]
        # When what was computed here is on the host.
        self.left: torch.cuda.Event | None = None

    def views(self, slices: Sequence[_Slice]) -> list[list[torch.Tensor]]:
        """Return views of the size of each slice, by moment."""
        sizes = [one.parameter.numel() for one in slices]
        return [list(torch.split(memory[: sum(sizes)], sizes)) for memory in self._memory]


class OffloadedAdamW(torch.optim.AdamW):
    """AdamW with its moments in host memory (`trainer.offload`); its updates equal torch's fused
    AdamW's.

    Moments are twice as large as the weights, and needed once per step. A step brings them to the
    device one part after another: while one part is computed, the next is copied in and the one
    before is copied out, on streams of their own and from pinned memory. On a CPU the same code
    copies plain memory. ZeRO-Offload (Ren et al. 2021, arXiv 2101.06840) computes the update on the
    CPU instead; here the device computes it, so that every element is what AdamW without offload
    makes of it.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient."""
        assert closure is None, "the trainer has none"
        parts = [(group, part) for group in self.param_groups for part in self._parts(group)]
        if not parts:
            return
        first = parts[0][1][0].parameter
        largest = max(sum(one.parameter.numel() for one in part) for _, part in parts)
        buffers = itertools.cycle([_Buffer(largest, first) for _ in range(min(2, len(parts)))])
        streams = _Streams(first.device)
        for group, part in parts:
            buffer = next(buffers)
            on_device = buffer.views(part)
            with streams.inward(buffer):
                for views, index in zip(on_device, (0, 1), strict=True):
                    for view, one in zip(views, part, strict=True):
                        view.copy_(one.moments[index], non_blocking=True)
            streams.compute()
            _update(group, part, on_device)
            with streams.outward(buffer):
                for views, index in zip(on_device, (0, 1), strict=True):
                    for view, one in zip(views, part, strict=True):
                        one.moments[index].copy_(view, non_blocking=True)
        streams.finish()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.state[parameter]["step"] += 1

    def _parts(self, group: dict[str, Any]) -> Iterator[list[_Slice]]:
        """Yield slices of the group's tensors that together have at most `OFFLOADED_PART`
        elements."""
        part: list[_Slice] = []
        room = OFFLOADED_PART
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            if not (state := self.state[parameter]):
                state["step"] = torch.zeros(())
                for kind in _MOMENT_KINDS:
                    state[kind] = self.on_host(parameter.detach(), parameter, empty=True)
            flat = local_part(parameter.detach()).view(-1)
            gradient = local_part(parameter.grad).contiguous().view(-1)
            first, second = (local_part(state[kind]).view(-1) for kind in _MOMENT_KINDS)
            start = 0
            while start < len(flat):
                end = min(len(flat), start + room)
                here = slice(start, end)
                moments = (first[here], second[here])
                part.append(_Slice(flat[here], gradient[here], moments, float(state["step"])))
                room -= end - start
                start = end
                if not room:
                    yield part
                    part, room = [], OFFLOADED_PART
        if part:
            yield part

    @staticmethod
    def on_host(
        tensor: torch.Tensor, parameter: torch.Tensor, *, empty: bool = False
    ) -> torch.Tensor:
        """Return a copy of the moment of a parameter in host memory, pinned if the parameter is on
        a GPU; `empty`: zeros."""
        local = local_part(tensor)
        pinned = can_pin(parameter.device) and local.ndim > 0
        found = torch.zeros(local.shape, dtype=local.dtype, pin_memory=pinned)
        if not empty:
            found.copy_(local)
        if isinstance(tensor, DTensor):  # as FSDP2 does with its own offload
            return DTensor(found, tensor._spec, requires_grad=False)  # type: ignore[no-untyped-call]
        return found


def _update(
    group: dict[str, Any], part: Sequence[_Slice], moments: Sequence[list[torch.Tensor]]
) -> None:
    device = part[0].parameter.device
    beta1, beta2 = group["betas"]
    first, second = moments
    adamw(
        [one.parameter for one in part],
        [one.gradient for one in part],
        first,
        second,
        [],
        [torch.full((), one.steps, device=device) for one in part],
        fused=True,
        amsgrad=False,
        beta1=beta1,
        beta2=beta2,
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=False,
    )


class _Streams:
    """The order of copies and updates on a GPU; on a CPU one follows the other."""

    def __init__(self, device: torch.device) -> None:
        self._there = device.type == "cuda" and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        if self._there:
            self._main = torch.cuda.current_stream(device)
            stream: Any = torch.cuda.Stream
            self._in, self._out = stream(device), stream(device)
            self._in.wait_stream(self._main)

    @contextlib.contextmanager
    def inward(self, buffer: _Buffer) -> Iterator[None]:
        """Copies of moments to the device, once the buffer is free."""
        if not self._there:
            yield
            return
        if buffer.left is not None:
            self._in.wait_event(buffer.left)
        with torch.cuda.stream(self._in):
            yield

    def compute(self) -> None:
        """Makes the main stream wait until the state has been copied in."""
        if self._there:
            self._main.wait_stream(self._in)

    @contextlib.contextmanager
    def outward(self, buffer: _Buffer) -> Iterator[None]:
        """Copies back to the host, once they are computed."""
        if not self._there:
            yield
            return
        self._out.wait_stream(self._main)
        with torch.cuda.stream(self._out):
            yield
        buffer.left = self._out.record_event()

    def finish(self) -> None:
        """Wait until everything is on the host; buffers may then be freed."""
        if self._there:
            self._out.synchronize()


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a sharded tensor; of another, all of it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
