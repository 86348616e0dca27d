"""Waves in which the engines of a policy load new weights."""

from __future__ import annotations

from dataclasses import replace

import hypothesis.strategies as st
from hypothesis import given

from troupe.scheduling.routing import UpdatingEngine, next_wave

one_engine = st.builds(
    UpdatingEngine,
    engine_id=st.uuids().map(str),
    devices=st.frozensets(st.sampled_from("abcdef"), max_size=2),
    serves=st.booleans(),
    waits=st.just(True),
    turns=st.integers(0, 50),
)
fleets = st.lists(one_engine, max_size=12, unique_by=lambda one: one.engine_id)


def waves(engines: list[UpdatingEngine], fails: frozenset[str]) -> list[tuple[str, ...]]:
    """All waves of an update; engines in `fails` serve nothing after theirs."""
    made = []
    while wave := next_wave(engines):
        made.append(wave)
        engines = [
            replace(one, waits=False, serves=one.engine_id not in fails)
            if one.engine_id in wave
            else one
            for one in engines
        ]
        assert len(made) <= 64
    return made


@given(engines=fleets, data=st.data())
def test_an_update_reaches_every_engine_once_and_the_policy_goes_on(
    engines: list[UpdatingEngine], data: st.DataObject
) -> None:
    ids = [one.engine_id for one in engines]
    fails = data.draw(st.frozensets(st.sampled_from(ids))) if ids else frozenset()
    by_id = {one.engine_id: one for one in engines}
    made = waves(engines, fails)
    assert sorted(name for wave in made for name in wave) == sorted(ids)
    serving = {one.engine_id for one in engines if one.serves}
    for wave in made:
        held = [device for name in wave for device in by_id[name].devices]
        assert len(held) == len(set(held)), "two engines of one device load at once"
        left = serving - set(wave)
        assert len(left) >= (len(serving) // 2 if len(serving) > 1 else 0)
        serving = left | {name for name in wave if name not in fails}


@given(count=st.integers(1, 64), shared=st.booleans())
def test_engines_on_devices_of_their_own_take_two_loads(count: int, shared: bool) -> None:
    engines = [
        UpdatingEngine(str(n), frozenset({"a" if shared else str(n)}), True, True)
        for n in range(count)
    ]
    assert len(waves(engines, frozenset())) == (count if shared else min(count, 2))


def test_idle_engines_and_those_that_serve_nothing_load_first() -> None:
    none: frozenset[str] = frozenset()
    fleet = [
        UpdatingEngine("busy", none, True, True, 9),
        UpdatingEngine("idle", none, True, True, 0),
        UpdatingEngine("stale", none, False, True, 0),
    ]
    assert next_wave(fleet) == ("stale", "idle")


@given(engines=fleets, overlapping=st.booleans())
def test_engines_that_load_from_the_trainers_device_load_in_one_wave(
    engines: list[UpdatingEngine], overlapping: bool
) -> None:
    none: frozenset[str] = frozenset()
    together = [replace(one, devices=none, together=True) for one in engines]
    others = [UpdatingEngine(f"other{n}", none, True, True) for n in range(3)]
    wave = next_wave([*others, *together], overlapping=overlapping)
    assert {one.engine_id for one in together} <= set(wave)


@given(engines=fleets)
def test_between_steps_that_do_not_overlap_engines_without_turns_load_at_once(
    engines: list[UpdatingEngine],
) -> None:
    wave = next_wave(engines, overlapping=False)
    if any(one.turns for one in engines):
        assert wave == next_wave(engines)
        return
    taken = {device for one in engines if one.engine_id in wave for device in one.devices}
    left = [one for one in engines if one.engine_id not in wave]
    assert all(one.devices & taken for one in left), "it could have loaded, too"
