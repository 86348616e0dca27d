"""The transfer benchmark from its command line to its object."""

from __future__ import annotations

import pytest

from tests.benchmarks.quick import quick_run


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_quick_run_measures_every_way_there_is() -> None:
    found = quick_run("transfer", seconds=300)
    assert found["shm_zero_copy"] is True
    assert found["four_readers_ratio"] > 0
    assert found["grpc_gib_s"] > 0
    assert found["exposed_fraction"] > 0
    # What is not measured is null, not a number.
    assert (found["ucx_ratio"] is None) == (found["ucx_gib_s"] is None)


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_state_goes_from_one_process_device_to_anothers() -> None:
    found = quick_run("transfer", "--device", "cpu", "--mib", "16", seconds=120)
    assert found["gib"] == 16 / 1024
    ways = ("set_gib_s", "get_gib_s", "ipc_gib_s", "link_out_gib_s", "link_in_gib_s", "of_link")
    assert all(found[way] > 0 for way in ways)
    assert found["of_link_by_mib"] == {"16": found["of_link"]}
