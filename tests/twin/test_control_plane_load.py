"""Results of `benchmarks.papers.twin.control` for one orchestrator, one store and one Redis."""

from __future__ import annotations

import math

import pytest

from benchmarks.papers.twin import control, mechanisms

_LOAD = control.ControlLoad(64, 400.0, 160_000.0, 80_000.0, 4000)


def test_the_measured_load_of_turns_needs_the_measured_cores_and_bytes() -> None:
    """docs/benchmarks/scale.md: 64 GPUs, 0.9 cores, 0.7 of them for rollout, 1.1 MB/s."""
    cores = _LOAD.cores()
    assert sum(cores.values()) == pytest.approx(0.9, abs=0.05)
    assert cores["rollout"] == pytest.approx(0.7, abs=0.05)
    assert _LOAD.bytes == pytest.approx(1.07e6, rel=0.01)


def test_four_times_the_devices_ask_four_times_the_cores_and_are_full_at_the_same_size() -> None:
    large = control.ControlLoad(256, 1600.0, 640_000.0, 320_000.0, 4000)
    for rates in (control.QUIET, control.BUSY):
        small = _LOAD.cores(rates)
        assert large.cores(rates) == pytest.approx({n: 4 * one for n, one in small.items()})
        assert large.full_at(rates) == pytest.approx(_LOAD.full_at(rates))
    assert large.rollout_workers() == 4 > _LOAD.rollout_workers() == 2


def test_longer_turns_load_only_services_that_carry_their_bytes() -> None:
    longer = control.ControlLoad(64, 400.0, 1_600_000.0, 80_000.0, 4000)
    more = {n for n, one in longer.cores().items() if one > _LOAD.cores()[n]}
    assert more == {"rollout", "store", "redis"}


def test_the_first_process_to_be_full_has_a_core_at_that_size() -> None:
    found = _LOAD.full_at()
    first, devices = next(iter(found.items()))
    assert devices == min(found.values())
    assert devices / 64 * _LOAD.cores()[first] == pytest.approx(1.0)
    assert set(found).isdisjoint(control.MANY)
    assert _LOAD.full_at(load=0.5)[first] == pytest.approx(devices / 2)


def test_rates_come_from_the_steps_of_the_job() -> None:
    job = mechanisms.job(64, frozenset(mechanisms.MECHANISMS), queries_per_device=0.1)
    load = control.load_of(job, 64, steps=1)
    assert load.tokens > load.response_tokens > load.turns > 0
    assert load.conversations == job.in_flight


@pytest.mark.parametrize("field", ["devices", "turns", "tokens", "conversations"])
@pytest.mark.parametrize("value", [0, -1, math.nan, math.inf])
def test_an_impossible_load_is_refused_by_field(field: str, value: float) -> None:
    given = {
        "devices": 64,
        "turns": 1.0,
        "tokens": 400.0,
        "response_tokens": 200.0,
        "conversations": 8,
    }
    with pytest.raises(ValueError, match=f"{field} = "):
        control.ControlLoad(**given | {field: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("load", [0.0, -1.0, 1.5])
def test_a_process_has_one_core(load: float) -> None:
    with pytest.raises(ValueError, match="load = "):
        _LOAD.full_at(load=load)
