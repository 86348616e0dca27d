"""Placement of models on the GPUs of a host, and eviction of resident models.

Devices form *cells* of 1, 2, 4 or 8 neighbours, each half of the next size (ARL-Tangram, section 3:
GPUs near each other stay together). A model takes one cell as a whole. `place` finds cells for
several models at once such that the evicted models are worth least and, among equals, the largest
cells stay free: a dynamic programme over the tree of cells. The paper names the programme without
giving it; this one is ours.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import permutations
from typing import Final, TypeAlias

SIZES: Final = (1, 2, 4, 8)


@dataclass(frozen=True, slots=True, order=True)
class DeviceCell:
    """Devices `first .. first + size - 1`; `first` is a multiple of `size`."""

    first: int
    size: int

    def __post_init__(self) -> None:
        if self.size not in SIZES or self.first < 0 or self.first % self.size:
            raise ValueError(f"{self.first}+{self.size} is not a cell: sizes are {SIZES}, aligned")

    @property
    def devices(self) -> range:
        """Indices of the cell's devices."""
        return range(self.first, self.first + self.size)

    def holds(self, other: DeviceCell) -> bool:
        """Return whether `other` is part of it, or equal."""
        return self.first <= other.first and other.first + other.size <= self.first + self.size


@dataclass(frozen=True, slots=True)
class PlacedModel:
    """A resident model. `worth`: the cost of its eviction; None: it must stay."""

    cell: DeviceCell
    worth: int | None = 0


@dataclass(frozen=True, slots=True)
class Placement:
    """`cells[i]` is for the i-th requested model; `evicted` are the names of the models to
    remove."""

    cells: tuple[DeviceCell, ...]
    evicted: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Wish:
    """A model to place: on any cell of `size`, or on `home` only."""

    size: int
    home: DeviceCell | None = None

    def __post_init__(self) -> None:
        if self.size not in SIZES:
            raise ValueError(f"a model takes {SIZES} devices, not {self.size}")
        if self.home is not None and self.home.size != self.size:
            raise ValueError(f"its home has {self.home.size} devices, it takes {self.size}")


Counts: TypeAlias = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Option:
    """One way to fill a cell: its cost, what stays free, which models go, which cells are used."""

    worth: int
    # Negative sum of the squared sizes of the largest free cells, since less is better.
    whole: int
    empty: bool = False
    evicted: frozenset[str] = frozenset()
    used: tuple[DeviceCell, ...] = field(default=())

    @property
    def rank(self) -> tuple[int, int, tuple[DeviceCell, ...]]:
        return self.worth, self.whole, self.used


_Options: TypeAlias = dict[Counts, _Option]


def place(
    devices: int, residents: Mapping[str, PlacedModel], wishes: Sequence[Wish]
) -> Placement | None:
    """Return the cells for all of `wishes` on a host with `devices` devices; None if there are
    none.

    Cells are disjoint from each other and from cells of residents that stay. Minimises the sum of
    evicted `worth`, then maximises the sum of squared sizes of free cells. Raises ValueError for
    residents that overlap or lie outside.
    """
    homes = [wish.home for wish in wishes if wish.home is not None]
    if any(one.holds(other) for one, other in permutations(homes, 2)):
        return None
    tree = _Tree(devices, residents, wishes)
    total = {(0,) * len(SIZES): _Option(0, 0)}
    for root in roots(devices):
        total = _joined(total, tree.options(root))
    best = total.get(tree.asked)
    if best is None:
        return None
    free = {size: [c for c in best.used if c.size == size] for size in SIZES}
    for cell in tree.homes:
        free[cell.size].remove(cell)
    cells = [wish.home or free[wish.size].pop(0) for wish in wishes]
    return Placement(tuple(cells), best.evicted)


def roots(devices: int) -> list[DeviceCell]:
    """Return the largest cells of a host: of eight devices, and smaller ones for the rest."""
    cells, first = [], 0
    for size in reversed(SIZES):
        while devices - first >= size:
            cells.append(DeviceCell(first, size))
            first += size
    return cells


def fits(devices: int, wish: Wish) -> bool:
    """Return whether the model could be placed on an empty host."""
    return place(devices, {}, [wish]) is not None


class _Tree:
    """The dynamic programme: for each cell, every useful way to place models in it."""

    def __init__(
        self, devices: int, residents: Mapping[str, PlacedModel], wishes: Sequence[Wish]
    ) -> None:
        self._residents = {r.cell: (name, r.worth) for name, r in residents.items()}
        taken = [device for r in residents.values() for device in r.cell.devices]
        if len(set(taken)) < len(taken) or (taken and max(taken) >= devices):
            raise ValueError(f"{dict(residents)} overlap, or are not on {devices} devices")
        self.homes = [wish.home for wish in wishes if wish.home is not None]
        self.asked = tuple(sum(wish.size == size for wish in wishes) for size in SIZES)

    def options(self, cell: DeviceCell) -> _Options:
        """Return the best option by the number of used cells of each size."""
        resident = self._residents.get(cell)
        if resident is None:
            return self._inside(cell)
        name, worth = resident
        kept: _Options = {(0,) * len(SIZES): _Option(0, 0)}
        if any(cell.holds(home) for home in self.homes):
            kept = {}
        if worth is None:
            return kept
        for counts, option in self._inside(cell).items():
            gone = _Option(
                option.worth + worth,
                option.whole,
                option.empty,
                option.evicted | {name},
                option.used,
            )
            _keep(kept, counts, gone)
        return kept

    def _inside(self, cell: DeviceCell) -> _Options:
        """Return the options without a resident of exactly this cell."""
        parts: _Options = {}
        if cell not in self.homes and cell.size > 1:
            half = cell.size // 2
            left, right = DeviceCell(cell.first, half), DeviceCell(cell.first + half, half)
            for counts, option in _joined(self.options(left), self.options(right)).items():
                if option.empty:
                    option = _Option(option.worth, -(cell.size**2), True, option.evicted)
                if all(n <= asked for n, asked in zip(counts, self.asked, strict=True)):
                    _keep(parts, counts, option)
        elif cell not in self.homes:
            parts[(0,) * len(SIZES)] = _Option(0, -1, True)
        whole = tuple(int(size == cell.size) for size in SIZES)
        inner_home = any(cell.holds(home) and home != cell for home in self.homes)
        if self.asked[SIZES.index(cell.size)] and not inner_home:
            worth, evicted = self._cleared(cell)
            if worth is not None:
                _keep(parts, whole, _Option(worth, 0, False, evicted, (cell,)))
        return parts

    def _cleared(self, cell: DeviceCell) -> tuple[int | None, frozenset[str]]:
        """Return the cost of emptying the cell (None: a model must stay), and the evicted
        models."""
        inside = [
            resident
            for other, resident in self._residents.items()
            if cell.holds(other) and other != cell
        ]
        total = 0
        for _, worth in inside:
            if worth is None:
                return None, frozenset()
            total += worth
        return total, frozenset(name for name, _ in inside)


def _joined(left: _Options, right: _Options) -> _Options:
    """Return the combinations of both halves."""
    joined: _Options = {}
    for ours, option in left.items():
        for theirs, other in right.items():
            _keep(
                joined,
                tuple(a + b for a, b in zip(ours, theirs, strict=True)),
                _Option(
                    option.worth + other.worth,
                    option.whole + other.whole,
                    option.empty and other.empty,
                    option.evicted | other.evicted,
                    option.used + other.used,
                ),
            )
    return joined


def _keep(options: _Options, counts: Counts, option: _Option) -> None:
    """Keep the better option."""
    known = options.get(counts)
    if known is None or option.rank < known.rank:
        options[counts] = option


@dataclass(frozen=True, slots=True)
class Model:
    """A model service as the scheduler sees it. `last`: time of its last use (any clock);
    `running`: its current calls, of at most `concurrency`."""

    name: str
    size: int
    cell: DeviceCell | None = None
    home: DeviceCell | None = None
    last: float = 0.0
    running: int = 0
    concurrency: int = 1

    @property
    def wish(self) -> Wish:
        """The devices that the model needs: how many, and where it was last."""
        return Wish(self.size, self.home)


@dataclass(frozen=True, slots=True)
class CellPlan:
    """`room`: further calls that each model may begin now. `cells`: where models go that are not
    resident yet, once `evicted` are gone."""

    room: Mapping[str, int]
    cells: Mapping[str, DeviceCell]
    evicted: frozenset[str]


def plan(devices: int, models: Collection[Model], wanted: Sequence[str]) -> CellPlan:
    """Plan which of the models that calls wait for (`wanted`, in queue order, each once) are or can
    become resident now.

    The least recently used are evicted: rather any number of older ones than one younger. A model
    without room yet reserves a cell: its residents get no further calls, so it becomes free, and
    later wishes go elsewhere or wait.
    """
    known = {model.name: model for model in models}
    by_age = sorted(models, key=lambda model: (model.last, model.name))
    draft = _Draft(devices, models, {model.name: 1 << age for age, model in enumerate(by_age)})
    for name in wanted:
        draft.add(known[name])
    cells = dict(zip(draft.placed, draft.found.cells, strict=True))
    gone = draft.found.evicted | draft.closed
    room = {
        model.name: max(0, model.concurrency - model.running)
        for model in models
        if model.name in cells or (model.cell is not None and model.name not in gone)
    }
    return CellPlan(room, cells, draft.found.evicted)


class _Draft:
    """A plan while it is made."""

    def __init__(self, devices: int, models: Collection[Model], worth: Mapping[str, int]) -> None:
        self._devices, self._worth = devices, worth
        self._models = [model for model in models if model.cell is not None]
        self._staying = {model.name for model in models if model.running}
        self._seen: set[str] = set()
        # Cells reserved for models without room yet.
        self._reserved: list[DeviceCell] = []
        self.closed: set[str] = set()
        self.placed: list[str] = []
        self._wishes: list[Wish] = []
        self.found = Placement(())

    def add(self, model: Model) -> None:
        """Add a model that a call waits for."""
        self._seen.add(model.name)
        if model.name in self.closed:
            return
        if model.cell is not None:
            self._staying.add(model.name)
            if model.name in self.found.evicted:
                other = self._place(self._wishes)
                if other is None:  # an earlier wish takes its cell
                    self._staying.discard(model.name)
                else:
                    self.found = other
            return
        wishes = [*self._wishes, model.wish]
        if (found := self._place(wishes)) is not None:
            self.placed, self._wishes, self.found = [*self.placed, model.name], wishes, found
            return
        # Reserve a cell: where the models that stay are least in its way.
        settled = [Wish(cell.size, cell) for cell in self.found.cells]
        if (later := self._place([*settled, model.wish], later=True)) is None:
            return
        cell = later.cells[-1]
        self._reserved.append(cell)
        # Calls that came before it may still begin.
        inside = {other.name for other in self._models if meet(other.cell, cell)}
        self.closed |= inside - self._seen

    def _place(self, wishes: Sequence[Wish], *, later: bool = False) -> Placement | None:
        most = 2 * sum(self._worth.values()) + 1
        residents: dict[str, PlacedModel] = {}
        for model in self._models:
            assert model.cell is not None
            if any(
                meet(cell, model.cell) if later else cell.holds(model.cell)
                for cell in self._reserved
            ):
                continue  # it leaves that cell, or one that a part is reserved of, for who waits
            worth: int | None = self._worth[model.name]
            if model.name in self.closed:
                worth = None
            elif model.name in self._staying:
                worth = most if later else None
            residents[model.name] = PlacedModel(model.cell, worth)
        taken = [resident.cell for resident in residents.values()]
        for place_of, cell in enumerate(self._reserved):
            if not any(meet(other, cell) for other in taken):
                residents[f"\0{place_of}"] = PlacedModel(cell, None)
        return place(self._devices, residents, wishes)


def meet(one: DeviceCell | None, other: DeviceCell | None) -> bool:
    """Return whether two cells share devices; None shares none."""
    return one is not None and other is not None and (one.holds(other) or other.holds(one))
