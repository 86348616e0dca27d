"""The benchmark against CoMLRL: its figures, and a quick run on real services."""

from __future__ import annotations

import pytest

from benchmarks.comlrl.__main__ import COMLRL, WARM, Window, ratios
from benchmarks.comlrl.workload import team_reward
from benchmarks.references import ReferenceUnavailable, reference_python
from tests.benchmarks.quick import quick_run


def test_the_team_earns_the_letters_of_each_half() -> None:
    assert team_reward("abcdefgh", ["a" * 16, "h" * 16]) == 1.0
    assert team_reward("abcdefgh", ["h" * 16, "a" * 16]) == 0.0
    assert team_reward("abcdefgh", ["a" * 8 + "z" * 8, "z" * 16]) == 0.25


def test_figures_of_a_window_count_the_steps_after_the_warm_up() -> None:
    ends = [10.0, 12.0, 13.0, 14.0, 15.5]
    window = Window(4.0, 1, samples=100, ends=ends, rewards=[], cpu_warm=3.0, cpu=4.5)
    assert len(ends) - WARM == 3
    assert window.figures == {
        "samples_per_second": 100.0,
        "cpu_ms_per_sample": 5.0,
        "memory_mib": 0.0,
        "first_step_seconds": 6.0,
    }


def test_ratios_compare_troupe_with_comlrl_in_the_same_window() -> None:
    def windows(*rates: float) -> list[dict[str, float]]:
        return [
            {
                "samples_per_second": rate,
                "cpu_ms_per_sample": 1000 / rate,
                "memory_mib": 500.0,
                "first_step_seconds": 5.0,
            }
            for rate in rates
        ]

    # The machine was twice as fast in the second window.
    found = ratios(
        {
            "troupe": windows(300, 600, 300),
            "comlrl": windows(100, 200, 100),
            "comlrl_defaults": windows(50, 100, 50),
        }
    )
    assert found["samples_ratio"] == 3.0
    assert found["cpu_ratio"] == 0.333
    assert found["memory_ratio"] == found["first_step_ratio"] == 1.0
    assert found["absolute"]["comlrl_defaults"]["samples_per_second"] == 50.0


@pytest.mark.slow
def test_a_quick_run_compares_a_team_with_comlrl(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    directory = tmp_path_factory.mktemp("comlrl")
    try:
        reference_python([COMLRL], directory, "comlrl")
    except ReferenceUnavailable as error:
        pytest.skip(str(error))
    found = quick_run("comlrl", seconds=1800, environment={"TROUPE_REFERENCE_DIR": str(directory)})
    # A busy machine says little about speed; that everything was measured, it does.
    assert found["samples_ratio"] > 0
    assert found["cpu_ratio"] > 0
    for figures in found["absolute"].values():
        assert all(value > 0 for value in figures.values())
    curves = found["learning"]["curves"]
    assert {len(curve) for seeds in curves.values() for curve in seeds} == {3}
    assert isinstance(found["learning_equal"], bool)
