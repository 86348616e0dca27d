"""The benchmark of router replay, from its command line to its object."""

from __future__ import annotations

import pytest

from tests.benchmarks.quick import quick_run


@pytest.mark.slow
def test_replay_takes_mismatch_away() -> None:
    found = quick_run("router_replay", seconds=540)
    assert found["differing_routes"] > 0.01
    # A third is left where the engine rounds to bfloat16; without a difference there would be none.
    assert found["k3_kl_with"] < found["k3_kl_without"] / 2
    assert found["bytes_of_32k_tokens"] == 32_767 * 48 * 8
