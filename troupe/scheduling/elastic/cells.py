"""Where models go on the GPUs of a host, and which of those that are there make room.

Devices form *cells* of 1, 2, 4, 8 neighbours, halves of one another (ARL-Tangram, section 3: GPUs
near each other stay together). A model takes one cell as a whole. `place` finds, for several models
at once, cells such that what is evicted is worth least, and of these the placement that leaves the
largest cells whole: a dynamic programme over the tree of cells. The paper names the programme and
does not give it; this one is ours.
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
            raise ValueError(f"{self.first}+{self.size} is no cell: {SIZES}, aligned")

    @property
    def devices(self) -> range:
        """The devices in it."""
        return range(self.first, self.first + self.size)

    def holds(self, other: DeviceCell) -> bool:
        """Whether `other` is part of it, or all of it."""
        return self.first <= other.first and other.first + other.size <= self.first + self.size


@dataclass(frozen=True, slots=True)
class PlacedModel:
    """A model that is on `cell`. `worth` is what its eviction costs, None: it must stay."""

    cell: DeviceCell
    worth: int | None = 0


@dataclass(frozen=True, slots=True)
class Placement:
    """`cells[i]` is for the i-th model asked for; `evicted` are the names of those that go."""

    cells: tuple[DeviceCell, ...]
    evicted: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Wish:
    """A model that is to be placed: on any cell of `size`, or on `home` only."""

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
    """One way to fill a cell: what it costs, what stays whole, who goes, what is used."""

    worth: int
    # Sum of the squares of the sizes of the largest free cells; negative, since least is best.
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
    """Cells for all of `wishes` on a host of so many devices, or None where there are none.

    Cells are disjoint, of each other and of those of residents that stay. Least sum of `worth`
    evicted, then most left whole (largest sum of squared sizes of free cells). Raises ValueError
    for residents that overlap or a cell outside.
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
    """The largest cells of a host: of eight devices, and smaller ones of what is left."""
    cells, first = [], 0
    for size in reversed(SIZES):
        while devices - first >= size:
            cells.append(DeviceCell(first, size))
            first += size
    return cells


def fits(devices: int, wish: Wish) -> bool:
    """Whether it could be placed on a host that is empty."""
    return place(devices, {}, [wish]) is not None


class _Tree:
    """The programme: for each cell, every useful way to place models in it."""

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
        """By how many cells of each size are used in `cell`."""
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
        """Without a resident that has just this cell."""
        if cell not in self.homes:
            parts: _Options = {}
            if cell.size > 1:
                half = cell.size // 2
                left, right = DeviceCell(cell.first, half), DeviceCell(cell.first + half, half)
                for counts, option in _joined(self.options(left), self.options(right)).items():
                    if option.empty:
                        option = _Option(option.worth, -(cell.size**2), True, option.evicted)
                    if all(n <= asked for n, asked in zip(counts, self.asked, strict=True)):
                        _keep(parts, counts, option)
            else:
                parts[(0,) * len(SIZES)] = _Option(0, -1, True)
        else:
            parts = {}
        whole = tuple(int(size == cell.size) for size in SIZES)
        if self.asked[SIZES.index(cell.size)] and not self._houses(cell):
            worth, evicted = self._cleared(cell)
            if worth is not None:
                _keep(parts, whole, _Option(worth, 0, False, evicted, (cell,)))
        return parts

    def _houses(self, cell: DeviceCell) -> bool:
        """Whether a smaller part of it is somebody's only place."""
        return any(cell.holds(home) and home != cell for home in self.homes)

    def _cleared(self, cell: DeviceCell) -> tuple[int | None, frozenset[str]]:
        """What it costs that nobody is in it (None: somebody must stay), and who goes."""
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
    """Both halves side by side."""
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
    """The better of the two."""
    known = options.get(counts)
    if known is None or option.rank < known.rank:
        options[counts] = option


@dataclass(frozen=True, slots=True)
class Model:
    """A model service as the scheduler sees it. `last` is when it was used last (any clock);
    `running` its calls now, of at most `concurrency`."""

    name: str
    size: int
    cell: DeviceCell | None = None
    home: DeviceCell | None = None
    last: float = 0.0
    running: int = 0
    concurrency: int = 1

    @property
    def wish(self) -> Wish:
        """What it needs to be resident."""
        return Wish(self.size, self.home)


@dataclass(frozen=True, slots=True)
class CellPlan:
    """`room`: how many more calls each model may begin now. `cells`: where those go that are not
    there yet, once `evicted` are gone."""

    room: Mapping[str, int]
    cells: Mapping[str, DeviceCell]
    evicted: frozenset[str]


def plan(devices: int, models: Collection[Model], wanted: Sequence[str]) -> CellPlan:
    """Which of the models that calls wait for (`wanted`, in the order of the queue, each once)
    are or can be resident now.

    The least recently used are evicted: rather any number of older ones than one younger. A model
    for which there is no room yet closes the cell that will be its own: what is there takes no
    further calls, so it comes free, and what is wanted after it goes elsewhere or waits.
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
        # Cells of those for which there is no room yet.
        self._reserved: list[DeviceCell] = []
        self.closed: set[str] = set()
        self.placed: list[str] = []
        self._wishes: list[Wish] = []
        self.found = Placement(())

    def add(self, model: Model) -> None:
        """A call waits for it."""
        self._seen.add(model.name)
        if model.name in self.closed:
            return
        if model.cell is not None:
            self._staying.add(model.name)
            if model.name in self.found.evicted:
                other = self._place(self._wishes)
                if other is None:  # what was wanted before it takes its place
                    self._staying.discard(model.name)
                else:
                    self.found = other
            return
        wishes = [*self._wishes, model.wish]
        if (found := self._place(wishes)) is not None:
            self.placed, self._wishes, self.found = [*self.placed, model.name], wishes, found
            return
        # Later: where those that stay are least in its way.
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
            if any(cell.holds(model.cell) for cell in self._reserved):
                continue  # it only leaves that cell to who waits for it
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
    """Whether they have devices in common; no cell has none."""
    return one is not None and other is not None and (one.holds(other) or other.holds(one))
