"""AdamW whose moments are in host memory (`trainer.offload`).

Moments are twice as large as the weights, and needed once per step. A step brings them to the
device one part after another: while one part is computed, the next is copied in and the one before
is copied out, on streams of their own and from pinned memory. On a CPU the same code copies plain
memory. ZeRO-Offload (Ren et al. 2021, arXiv 2101.06840) computes the update on the CPU instead;
here the device computes it, so that every element is what AdamW without offload makes of it.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

from troupe.scheduling.memory import OFFLOADED_PART

_SLOTS = ("exp_avg", "exp_avg_sq")


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
        self._memory = [torch.empty(elements, dtype=like.dtype, device=like.device) for _ in _SLOTS]
        # When what was computed here is on the host.
        self.left: torch.cuda.Event | None = None

    def views(self, slices: Sequence[_Slice]) -> list[list[torch.Tensor]]:
        """Views of the size of each slice, by moment."""
        sizes = [one.parameter.numel() for one in slices]
        return [list(torch.split(memory[: sum(sizes)], sizes)) for memory in self._memory]


class OffloadedAdamW(torch.optim.AdamW):
    """AdamW with moments on the host; updates are those of torch's fused AdamW."""

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
        """Slices of the group's tensors that together have at most `OFFLOADED_PART` elements."""
        part: list[_Slice] = []
        room = OFFLOADED_PART
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            if not (state := self.state[parameter]):
                state["step"] = torch.zeros(())
                for slot in _SLOTS:
                    state[slot] = self.on_host(parameter.detach(), parameter, empty=True)
            flat = _local(parameter.detach()).view(-1)
            gradient = _local(parameter.grad).contiguous().view(-1)
            first, second = (_local(state[slot]).view(-1) for slot in _SLOTS)
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
        """A copy of the moment of a parameter in host memory, pinned if the parameter is on a GPU;
        `empty`: zeros."""
        local = _local(tensor)
        # torch has no pinned memory without a GPU, as where tests only pretend to have one.
        pinned = parameter.device.type == "cuda" and torch.cuda.is_available() and local.ndim > 0
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
        """What follows on the main stream needs what was copied in."""
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


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
