"""Which model is meant to be on which devices: what the scheduler sees of a host's models."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Final

from troupe.scheduling.elastic.cells import Cell, Model, Plan, meet, plan

PREFIX: Final = "model:"


class Board:
    """The models of one host; changed when a call begins or ends, and by nothing else."""

    def __init__(
        self, gpus: int, models: Iterable[Model], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.gpus = gpus
        self.models = {model.name: model for model in models}
        self._clock = clock
        self._plan = Plan({}, {}, frozenset())

    def room(self, wanted: Sequence[str]) -> dict[str, int]:
        """Calls that could begin now, by resource, when calls wait for `wanted` in that order.

        What `begin` does is what was found here last.
        """
        known = list(dict.fromkeys(name for name in wanted if name in self.models))
        self._plan = plan(self.gpus, list(self.models.values()), known)
        return {PREFIX + name: self._plan.room.get(name, 0) for name in self.models}

    def capacity(self) -> dict[str, int]:
        """Calls at once, by resource."""
        return {PREFIX + model.name: model.concurrency for model in self.models.values()}

    def begin(self, name: str) -> Cell:
        """A call begins: the model is, or is put, on the cell that is returned."""
        model = self.models[name]
        if model.cell is None:
            if name not in self._plan.cells:
                self.room([name])
            cell = self._plan.cells.get(name)
            if cell is None:
                raise ValueError(f"no cell for {name}: everything is in use")
            for other in list(self.models.values()):
                if meet(other.cell, cell):
                    if other.running:
                        raise ValueError(f"no cell for {name}: {other.name} is in use")
                    self.put(other.name, None)
            model = replace(model, cell=cell)
        self.models[name] = replace(model, running=model.running + 1, last=self._clock())
        assert model.cell is not None
        return model.cell

    def end(self, name: str) -> None:
        """It has ended."""
        model = self.models[name]
        self.models[name] = replace(model, running=model.running - 1, last=self._clock())

    def put(self, name: str, cell: Cell | None) -> None:
        """It is on `cell` now, or on none."""
        self.models[name] = replace(self.models[name], cell=cell)

    def see(self, residents: Mapping[str, int]) -> None:
        """Of models elsewhere: the first device of each that is on devices there. What calls use
        or wait for is where it was put here, which the host only has yet to do."""
        for name, model in list(self.models.items()):
            first = residents.get(name)
            cell = None if first is None else Cell(first, model.size)
            taken = [m.cell for m in self.models.values() if m.cell and m.name != name]
            if not model.running and not any(meet(other, cell) for other in taken):
                self.put(name, cell)

    def settle(self, name: str, home: Cell) -> None:
        """It cannot be anywhere else from now on."""
        self.models[name] = replace(self.models[name], home=home)
