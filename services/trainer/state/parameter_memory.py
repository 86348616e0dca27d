"""The memory of a model's parameters: on their device, in host memory, or released.

Parameters are in host memory between the steps of a policy with `trainer.offload: all`. Frozen ones
(a reference, a teacher, the base under adapters) are there while nobody on their device computes
with them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from troupe.checkpoints.adapters import Tensors
from troupe.checkpoints.tensors import TensorsDoNotFit, difference
from troupe.job.sections.policy import Offload


def is_host(device: torch.device) -> bool:
    """Return whether the memory of `device` is the host's."""
    return device.type == "cpu"


def can_pin(device: torch.device) -> bool:
    """Return whether copies of tensors on `device` in host memory are pinned."""
    # torch has no pinned memory without a GPU, as where tests only pretend to have one.
    return device.type == "cuda" and torch.cuda.is_available()


class MovableParameters:
    """Parameters of one device that can be in host memory for a while, where they can be read."""

    def __init__(self, parameters: Iterable[torch.nn.Parameter], *, frozen: bool = False) -> None:
        """`frozen`: the values never change. Then only the first departure copies them, and host
        memory keeps them; on a CPU they stay."""
        self._parameters = list({id(p): p for p in parameters}.values())
        self._device = next((p.device for p in self._parameters), torch.device("cpu"))
        self._frozen = frozen
        self._host: list[torch.Tensor] = []
        self._away = False

    def leave(self) -> None:
        """Move the parameters to host memory until `arrive`."""
        if self._away or (self._frozen and is_host(self._device)):
            return
        if not (self._frozen and self._host):
            self._copy()
        for parameter, there in zip(self._parameters, self._host, strict=True):
            parameter.data = there
        self._away = True

    def _copy(self) -> None:
        pinned = can_pin(self._device)
        if not self._host:
            self._host = [
                torch.empty(p.shape, dtype=p.dtype, pin_memory=pinned) for p in self._parameters
            ]
        for parameter, there in zip(self._parameters, self._host, strict=True):
            there.copy_(parameter.detach(), non_blocking=True)
        if pinned:
            torch.cuda.synchronize(self._device)

    def arrive(self) -> None:
        """Move the parameters back to the device; copies from pinned memory go on while the first
        layers compute."""
        if self._away:
            for parameter, there in zip(self._parameters, self._host, strict=True):
                parameter.data = there.to(self._device, copy=True, non_blocking=True)
            self._away = False

    def forget(self) -> None:
        """Free the host memory: the parameters get other memory."""
        self._host, self._away = [], False


class PooledParameters:
    """The trained parameters of one model, whose device memory can be released and attached
    again."""

    def __init__(self, named: Mapping[str, torch.nn.Parameter], offload: Offload = "none") -> None:
        """`named`: by the names of the weights in a state. `offload`: with "all" the parameters are
        in host memory between steps."""
        self._named = dict(named)
        self._leaves = offload == "all"
        self._device = next((p.device for p in named.values()), torch.device("cpu"))
        self._movable = MovableParameters(named.values())

    def leave(self) -> None:
        """Move the parameters to host memory until `arrive`, if they are to be there: a step has
        ended. They can be read there."""
        if self._leaves:
            self._movable.leave()

    def arrive(self) -> None:
        """Move the parameters back to the device, on which a step begins."""
        self._movable.arrive()

    def release(self) -> list[torch.Tensor]:
        """Return the parameters' memory; the model cannot compute before `attach`."""
        left = []
        for parameter in self._named.values():
            left.append(parameter.data)
            parameter.data = torch.empty(0, dtype=parameter.dtype, device=self._device)
        self._movable.forget()
        return left

    def attach(self, weights: Mapping[str, torch.Tensor]) -> Tensors:
        """Use `weights` as the parameters' memory; returns those that are not parameters.

        Raises ValueError when a parameter is missing; then nothing has changed.
        """
        if wrong := difference(self._named.keys() - weights.keys(), ()):
            raise TensorsDoNotFit(f"weights of the model are missing: {wrong}")
        for name, parameter in self._named.items():
            parameter.data = weights[name]
        self._movable.forget()
        return {name: t for name, t in weights.items() if name not in self._named}
