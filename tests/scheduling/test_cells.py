"""Placement of models on cells of devices, against every placement that there is."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from troupe.scheduling.elastic.cells import (
    SIZES,
    DeviceCell,
    Model,
    PlacedModel,
    Placement,
    Wish,
    fits,
    place,
    plan,
    roots,
)


def cells_of(devices: int) -> list[DeviceCell]:
    whole = roots(devices)
    every = [
        DeviceCell(first, size) for size in SIZES for first in range(0, devices - size + 1, size)
    ]
    return [cell for cell in every if any(root.holds(cell) for root in whole)]


def whole_after(devices: int, taken: set[int]) -> int:
    """Sum of squares of the sizes of the largest free cells."""
    free = [c for c in cells_of(devices) if taken.isdisjoint(c.devices)]
    largest = [c for c in free if not any(o != c and o.holds(c) for o in free)]
    return sum(c.size**2 for c in largest)


def brute(
    devices: int, residents: Mapping[str, PlacedModel], wishes: Sequence[Wish]
) -> tuple[int, int] | None:
    """Least (worth, -whole) over all placements."""
    best: tuple[int, int] | None = None
    options = [
        [wish.home] if wish.home else [c for c in cells_of(devices) if c.size == wish.size]
        for wish in wishes
    ]
    for cells in itertools.product(*options):
        used = [device for cell in cells for device in cell.devices]
        if len(set(used)) < len(used):
            continue
        gone = {n for n, r in residents.items() if not set(used).isdisjoint(r.cell.devices)}
        if any(residents[name].worth is None for name in gone):
            continue
        worth = sum(residents[name].worth or 0 for name in gone)
        kept = {d for n, r in residents.items() if n not in gone for d in r.cell.devices}
        rank = (worth, -whole_after(devices, kept | set(used)))
        best = rank if best is None else min(best, rank)
    return best


@st.composite
def instances(draw: st.DrawFn) -> tuple[int, dict[str, PlacedModel], list[Wish]]:
    devices = draw(st.sampled_from([1, 2, 3, 4, 6, 8]))
    cells = cells_of(devices)
    residents: dict[str, PlacedModel] = {}
    taken: set[int] = set()
    for cell in draw(st.lists(st.sampled_from(cells), max_size=6)):
        if taken.isdisjoint(cell.devices):
            taken |= set(cell.devices)
            # No eviction is useless.
            worth = draw(st.one_of(st.none(), st.integers(1, 9)))
            residents[f"m{len(residents)}"] = PlacedModel(cell, worth)
    wishes = draw(
        st.lists(
            st.one_of(
                st.sampled_from(SIZES).map(Wish),
                st.sampled_from(cells).map(lambda cell: Wish(cell.size, cell)),
            ),
            max_size=3,
        )
    )
    return devices, residents, wishes


def valid(
    devices: int, residents: Mapping[str, PlacedModel], wishes: Sequence[Wish], found: Placement
) -> tuple[int, int]:
    """Check it, and return its (worth, -whole)."""
    used: set[int] = set()
    for wish, cell in zip(wishes, found.cells, strict=True):
        assert cell.size == wish.size
        assert wish.home in (None, cell)
        assert used.isdisjoint(cell.devices)
        assert cell in cells_of(devices)
        used |= set(cell.devices)
    for name, resident in residents.items():
        if name in found.evicted:
            assert resident.worth is not None
        else:
            assert used.isdisjoint(resident.cell.devices)
            used |= set(resident.cell.devices)
    return (
        sum(residents[name].worth or 0 for name in found.evicted),
        -whole_after(devices, used),
    )


@settings(max_examples=150, deadline=None)
@given(instances())
def test_the_placement_is_the_best_there_is(
    instance: tuple[int, dict[str, PlacedModel], list[Wish]],
) -> None:
    best, found = brute(*instance), place(*instance)
    assert (found is None) == (best is None)
    if found is not None:
        assert valid(*instance, found) == best


def test_neighbours_are_filled_before_a_whole_cell_is_broken() -> None:
    found = place(8, {"a": PlacedModel(DeviceCell(4, 1), None)}, [Wish(1), Wish(2)])
    assert found is not None
    assert found.cells == (DeviceCell(5, 1), DeviceCell(6, 2))


def test_wishes_that_fit_no_cell_are_refused() -> None:
    assert not fits(6, Wish(8))
    assert fits(6, Wish(4))
    with pytest.raises(ValueError, match="takes"):
        Wish(3)


def test_the_least_recently_used_makes_room() -> None:
    models = [
        Model("old", 1, DeviceCell(0, 1), last=1.0),
        Model("young", 1, DeviceCell(1, 1), last=2.0),
        Model("new", 1),
    ]
    made = plan(2, models, ["new"])
    assert (made.cells, made.evicted) == ({"new": DeviceCell(0, 1)}, {"old"})


def test_models_that_an_earlier_call_needs_are_not_evicted() -> None:
    models = [Model("a", 1, DeviceCell(0, 1), last=1.0), Model("b", 1, DeviceCell(1, 1), last=2.0)]
    made = plan(2, [*models, Model("c", 1)], ["a", "c"])
    assert (made.cells, made.evicted) == ({"c": DeviceCell(1, 1)}, {"b"})
    # Nor one that a later call needs, if there is another.
    made = plan(2, [*models, Model("c", 1)], ["c", "a"])
    assert (made.cells, made.evicted) == ({"c": DeviceCell(1, 1)}, {"b"})


def test_a_large_model_gets_its_cell_whatever_small_ones_are_wanted() -> None:
    models = [
        Model("a", 1, DeviceCell(0, 1), running=1, concurrency=8),
        Model("b", 1, DeviceCell(2, 1), last=1.0),
        Model("large", 4),
        Model("c", 1),
    ]
    made = plan(4, models, ["large", "a", "b", "c"])
    # Only the service that waits for all four devices begins on them.
    assert made.cells == {}
    assert made.room == {}
    # If there is another place, they continue.
    made = plan(8, models, ["large", "a", "b", "c"])
    assert made.cells["large"] == DeviceCell(4, 4)
    assert made.room == {"large": 1, "a": 7, "b": 1, "c": 1}
    # Earlier calls still begin.
    assert plan(4, models, ["a", "large", "b"]).room == {"a": 7}


def test_a_cell_that_is_a_part_of_a_running_model_s_is_reserved_once() -> None:
    """One of four devices waits for a running one of eight, then one of eight waits, too: the first
    reservation lies within the second one's cell, which is not reserved again."""
    models = [
        Model("running", 8, DeviceCell(0, 8), running=1),
        Model("four", 4),
        Model("eight", 8),
        Model("small", 1),
    ]
    made = plan(8, models, ["running", "four", "eight", "small"])
    assert (made.cells, made.evicted, made.room) == ({}, frozenset(), {"running": 0})
    # With another cell to go to, they do.
    made = plan(13, models, ["running", "four", "eight", "small"])
    assert made.cells == {"four": DeviceCell(8, 4), "small": DeviceCell(12, 1)}


@st.composite
def crowds(draw: st.DrawFn) -> tuple[list[Model], list[str]]:
    cells = cells_of(8)
    models: list[Model] = []
    taken: set[int] = set()
    for i in range(draw(st.integers(1, 9))):
        cell = draw(st.sampled_from(cells))
        there = draw(st.booleans()) and taken.isdisjoint(cell.devices)
        if there:
            taken |= set(cell.devices)
        running = draw(st.integers(0, 2)) if there else 0
        last = draw(st.floats(0, 9))
        models.append(
            Model(f"m{i}", cell.size, cell if there else None, None, last, running, concurrency=2)
        )
    wanted = draw(st.permutations([model.name for model in models]))
    return models, wanted[: draw(st.integers(0, len(models)))]


@settings(max_examples=150, deadline=None)
@given(crowds())
def test_property_a_plan_keeps_running_models_and_always_makes_progress(
    crowd: tuple[list[Model], list[str]],
) -> None:
    models, wanted = crowd
    made = plan(8, models, wanted)
    busy = {model.name for model in models if model.running}
    assert not busy & made.evicted
    taken = [
        device
        for model in models
        if model.cell is not None and model.name not in made.evicted
        for device in model.cell.devices
    ]
    taken += [device for cell in made.cells.values() for device in cell.devices]
    assert len(set(taken)) == len(taken)
    for model in models:
        assert made.room.get(model.name, 0) <= model.concurrency - model.running
    # The first that is wanted runs, or waits for something that runs.
    if wanted:
        assert made.room.get(wanted[0], 0) or busy
    # Every service with room is there, or will be.
    for name in made.room:
        model = next(model for model in models if model.name == name)
        assert name in made.cells or (model.cell and name not in made.evicted)
