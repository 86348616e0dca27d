"""Memory of a device that policies take turns in.

Fresh pages cost a host several times what copying into used ones does, and a GPU's allocator keeps
what was freed for the same reason: the memory of a policy that left serves the next.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence

import torch

from troupe.checkpoints.tensors import TensorsDoNotFit, difference
from troupe.transfer import brought

Tensors = dict[str, torch.Tensor]


class Residence:
    """Tensors of one device that nobody uses, by shape; at most `limit` bytes of them.

    Of a GPU none: its caching allocator does the same. Safe to use from several threads.
    """

    def __init__(self, device: torch.device, limit: int = 8 << 30) -> None:
        self.device = device
        self._limit = limit if device.type == "cpu" else 0
        self._free: dict[tuple[torch.Size, torch.dtype], list[torch.Tensor]] = {}
        self._bytes = 0
        self._lock = threading.Lock()

    def give_back(self, tensors: Iterable[torch.Tensor]) -> None:
        """Nobody uses these any more, nor views of them."""
        with self._lock:
            for tensor in tensors:
                size = tensor.nbytes
                whole = size and size == tensor.untyped_storage().nbytes()
                if not whole or self._bytes + size > self._limit or not tensor.is_contiguous():
                    continue
                self._free.setdefault((tensor.shape, tensor.dtype), []).append(tensor)
                self._bytes += size

    def bring(self, tensors: Mapping[str, torch.Tensor]) -> Tensors:
        """Copies of `tensors`, host memory, on the device; complete when this returns."""
        if self.device.type != "cpu":
            return brought(tensors, self.device)
        return {name: self._place(t).copy_(t) for name, t in tensors.items()}

    def _place(self, like: torch.Tensor) -> torch.Tensor:
        with self._lock:
            if found := self._free.get((like.shape, like.dtype)):
                self._bytes -= like.nbytes
                return found.pop()
        return torch.empty(like.shape, dtype=like.dtype)


class Lodger:
    """The parameters of one model, which can leave the device and come back."""

    def __init__(
        self, weights: Mapping[str, torch.Tensor], parameters: Sequence[torch.nn.Parameter]
    ) -> None:
        """`weights` lie over the memory of `parameters`; what does not (buffers) stays."""
        places = {p.data_ptr(): p for p in parameters if p.numel()}
        self._named = {
            name: places[t.data_ptr()] for name, t in weights.items() if t.data_ptr() in places
        }

    def leave(self) -> list[torch.Tensor]:
        """Take the memory from under the model; it cannot compute before `enter`."""
        left = []
        for parameter in self._named.values():
            left.append(parameter.data)
            parameter.data = parameter.data.new_empty(0)
        return left

    def enter(self, weights: Mapping[str, torch.Tensor]) -> Tensors:
        """Lay the model over these tensors; returns those that are no parameters.

        Raises ValueError when a parameter is missing; then nothing has changed.
        """
        if wrong := difference(self._named.keys() - weights.keys(), ()):
            raise TensorsDoNotFit(f"weights of the model are missing: {wrong}")
        for name, parameter in self._named.items():
            parameter.data = weights[name]
        return {name: t for name, t in weights.items() if name not in self._named}
