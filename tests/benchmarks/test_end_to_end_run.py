"""The benchmarks against TRL from their command line to their object, on real services."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.end_to_end.__main__ import ratios
from benchmarks.parity import compare
from benchmarks.references import TRL, ReferenceUnavailable, reference_python
from tests.benchmarks.quick import quick_run


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("trl")
    try:
        return reference_python([TRL], directory).parent.parent
    except ReferenceUnavailable as error:
        pytest.skip(str(error))


def run(module: str, reference: Path) -> dict[str, Any]:
    found: dict[str, Any] = quick_run(
        module, seconds=1200, environment={"TROUPE_REFERENCE_DIR": str(reference)}
    )
    return found


@pytest.mark.slow
def test_a_quick_run_compares_training_with_trl(reference: Path) -> None:
    found = run("end_to_end", reference)
    # A busy machine says little about speed; that all of it is there, it does.
    assert found["over_trl"] > 0
    assert found["two_policies_over_trl_twice"] > 0
    assert all(rate > 0 for rate in found["samples_per_second"].values())
    assert found["dtype"] in ("float32", "bfloat16")


@pytest.mark.slow
def test_a_quick_run_compares_what_is_learned(reference: Path) -> None:
    found = run("parity", reference)
    assert found["seeds"] == 2
    assert {len(curve) for curves in found["curves"].values() for curve in curves} == {4}


def test_ratios_are_of_the_same_round() -> None:
    # The machine was twice as fast in the second round.
    rates = {"trl": [100.0, 200.0, 100.0], "trl_beside": [110.0, 220.0, 110.0]}
    rates |= {"one": [120.0, 240.0, 120.0], "one_async": [150.0, 300.0, 150.0]}
    rates["two"] = [165.0, 330.0, 165.0]
    found = ratios(rates)
    assert found["over_trl"] == 1.2
    assert found["two_policies_over_trl_twice"] == 1.65
    assert found["two_policies_over_trl_beside"] == 1.5


def test_parity_is_denied_to_different_and_to_noisy_curves() -> None:
    def curves(*finals: float) -> list[list[float]]:
        return [[0.1, final] for final in finals]

    alike = compare(curves(0.30, 0.31, 0.32, 0.30), curves(0.31, 0.30, 0.32, 0.31))
    assert alike["parity"]
    better = compare(curves(0.40, 0.41, 0.42, 0.40), curves(0.31, 0.30, 0.32, 0.31))
    assert not better["parity"]
    noisy = compare(curves(0.1, 0.5, 0.3, 0.2), curves(0.2, 0.6, 0.1, 0.3))
    assert noisy["p"] > 0.05
    assert not noisy["parity"]
