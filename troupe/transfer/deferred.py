"""Named tensors that are made when they are read, one group at a time.

A large model is often stored, published or written in another form: another dtype, other names,
experts one by one. The whole model in that form would not fit into memory in addition to the model
itself. Therefore names, shapes and dtypes are known immediately, but values exist only while they
are copied.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from troupe.transfer.checksum import PIECE_BYTES, host_bytes
from troupe.transfer.staging import DeviceBytes

Layout = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class TensorGroup:
    """Tensors that are made together. `layout`: tensors on the meta device by name; `make` returns
    just these names, with these shapes and dtypes."""

    layout: Layout
    make: Callable[[], Mapping[str, torch.Tensor]]


class DeferredTensors(Mapping[str, torch.Tensor]):
    """A mapping of names to tensors whose values are made group by group, on every reading.

    Iteration goes through the groups one after another and keeps one of them in memory.
    """

    def __init__(self, groups: Sequence[TensorGroup], *, on_device: bool = False) -> None:
        """Create the mapping. `on_device`: tensors are made on a GPU. Raises ValueError for a name
        in two groups."""
        self.groups, self.on_device = tuple(groups), on_device
        self.layout: dict[str, torch.Tensor] = {}
        self._group_of: dict[str, int] = {}
        for number, group in enumerate(self.groups):
            for name, shape in group.layout.items():
                if name in self.layout:
                    raise ValueError(f"'{name}' is made twice")
                self.layout[name], self._group_of[name] = shape, number
        self._lock = threading.Lock()
        self._last: tuple[int, Mapping[str, torch.Tensor]] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.layout.values())

    def group_of(self, name: str) -> int:
        """Return the number of the group that `name` belongs to."""
        return self._group_of[name]

    def made(self, number: int) -> Mapping[str, torch.Tensor]:
        """Return the tensors of a group. Raises ValueError when they do not fit its layout."""
        group = self.groups[number]
        with torch.no_grad():
            tensors = group.make()
        for name, expected in group.layout.items():
            tensor = tensors[name]
            if tensor.shape != expected.shape or tensor.dtype != expected.dtype:
                raise ValueError(
                    f"'{name}' was made as {tensor.dtype} {list(tensor.shape)} instead of "
                    f"{expected.dtype} {list(expected.shape)}"
                )
        return tensors

    def __getitem__(self, name: str) -> torch.Tensor:
        number = self._group_of[name]
        with self._lock:
            if self._last is None or self._last[0] != number:
                self._last = None  # freed before the next one is made
                self._last = number, self.made(number)
            return self._last[1][name]

    def __contains__(self, name: object) -> bool:
        return name in self.layout  # the default of `Mapping` would read the tensor

    def __iter__(self) -> Iterator[str]:
        yield from self.layout
        with self._lock:
            self._last = None

    def __len__(self) -> int:
        return len(self.layout)


class DeferredBytes:
    """The C-order bytes of one tensor of `DeferredTensors`, for a writer that takes each piece of
    `PIECE_BYTES` of each tensor once; afterwards its group is freed."""

    def __init__(self, source: _DeferredReading, name: str) -> None:
        self._source, self._name = source, name
        self.on_device = source.tensors.on_device
        self._length = source.tensors.layout[name].nbytes

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, where: slice) -> memoryview:
        return self._source.piece(self._name, where)


class _DeferredReading:
    """One pass over deferred tensors: groups in memory, and the remaining pieces of each tensor."""

    def __init__(self, tensors: DeferredTensors) -> None:
        self.tensors = tensors
        self._locks = [threading.Lock() for _ in tensors.groups]
        # The tensors of each started group that were not read to the end.
        self._views: dict[int, dict[str, memoryview | DeviceBytes]] = {}
        self._left: dict[str, int] = {}

    def piece(self, name: str, where: slice) -> memoryview:
        """Return a range of bytes of a tensor, whose group is made unless it is in memory."""
        number = self.tensors.group_of(name)
        with self._locks[number]:
            views = self._views.get(number)
            if views is None or name not in views:  # a writer begins, or restarts
                made = self.tensors.made(number)
                views = self._views[number] = {n: _bytes(made[n]) for n in made}
                self._left |= {n: _pieces(made[n]) for n in made}
            view = views[name]
            self._left[name] -= 1
            # Small odd tensors are read long after their neighbours, which are freed by then.
            if not self._left[name]:
                del views[name]
            if not views:
                del self._views[number]
        return view[where]


def deferred_bytes(tensors: DeferredTensors) -> dict[str, DeferredBytes]:
    """Return the bytes of all tensors, to be read in one pass."""
    reading = _DeferredReading(tensors)
    return {name: DeferredBytes(reading, name) for name in tensors.layout}


def _pieces(tensor: torch.Tensor) -> int:
    return max(-(-tensor.nbytes // PIECE_BYTES), 1)


def _bytes(tensor: torch.Tensor) -> memoryview | DeviceBytes:
    return DeviceBytes(tensor) if tensor.device.type == "cuda" else host_bytes(tensor)
