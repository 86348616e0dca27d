"""The gradients of one policy between two steps: summed, then divided and clipped once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed.tensor import DTensor

from services.trainer.exact_sum import ExactSum, NotSummable


class Gradients:
    """Sums in the parameters' own `.grad`, or exact ones beside them (exact_sum.py)."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        self._parameters = list(parameters)
        # Made with the first unit: a frozen policy and an ordinary step need none.
        self._exact: ExactSum | None = None

    def settle(self) -> str:
        """Move what backward passes left in `.grad` into the exact sums; why not, if it cannot."""
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
        """Divide the sums by `total`, clip them; returns their L2 norm before the clip."""
        for parameter in self._parameters:
            if parameter.grad is None:
                # Every sample of the step had advantage zero: a step of size zero.
                parameter.grad = torch.zeros_like(parameter)
        grads = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        if self._exact is not None:
            self._exact.write(grads, float(total))
        else:
            torch._foreach_div_(grads, float(total))
        return _whole(torch.nn.utils.clip_grad_norm_(self._parameters, max_norm, foreach=True))

    @torch.no_grad()
    def weights_norm(self) -> float:
        """L2 norm of the parameters themselves: not finite where one is not, or is beyond 1e19."""
        return _whole(torch.nn.utils.get_total_norm(self._parameters, foreach=True))

    def discard(self) -> None:
        """Back to nothing."""
        self._drop()
        if self._exact is not None:
            self._exact.clear()

    def state(self) -> tuple[dict[str, torch.Tensor], list[int]]:
        """What has accumulated: tensors, not copied, and the bounds of exact sums, if any."""
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
        """Take over what `state` gave, without copying it."""
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


def _whole(norm: torch.Tensor) -> float:
    # Of a sharded model: this rank's term of it.
    return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
