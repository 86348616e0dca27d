"""How policies share devices: everything is given away, in proportion to the work."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from troupe.scheduling.filling import fill_engines, fill_gangs

WORK = st.dictionaries(st.sampled_from("abcd"), st.floats(0.1, 100), min_size=1)


@given(work=WORK, devices=st.integers(0, 64), width=st.integers(1, 4))
def test_engines_take_all_devices_and_wait_for_nobody_much_longer(
    work: dict[str, float], devices: int, width: int
) -> None:
    engines = fill_engines(dict.fromkeys(work, width), work, devices)
    if devices < width * len(work):
        assert engines == {}
        return
    assert devices - width < sum(engines.values()) * width <= devices
    slowest = max(work[name] / engines[name] for name in work)
    for name, count in engines.items():
        # Nobody with more than one engine could give one to the slowest and not be slower.
        assert count == 1 or work[name] / (count - 1) >= slowest


@given(work=WORK, devices=st.integers(1, 64))
def test_gangs_take_all_devices_that_their_sizes_allow(
    work: dict[str, float], devices: int
) -> None:
    every = {name: range(1, 65) for name in work}
    filled = fill_gangs(every, lambda name, size: work[name] / size, devices)
    assert sum(filled.values()) == max(devices, len(work))
    doubled = {name: [2, 4, 8, 16] for name in work}
    filled = fill_gangs(doubled, lambda name, size: work[name] / size, devices)
    assert all(filled[name] in doubled[name] for name in work)
    assert sum(filled.values()) <= max(devices, 2 * len(work))


def test_engines_that_must_be_there_come_first() -> None:
    widths, work = {"a": 1, "b": 2}, {"a": 100.0, "b": 1.0}
    assert fill_engines(widths, work, 8, {"b": 2}) == {"a": 4, "b": 2}
    assert fill_engines(widths, work, 4, {"b": 2}) == {}
