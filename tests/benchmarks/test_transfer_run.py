"""The transfer benchmark from its command line to its object."""

from __future__ import annotations

import pytest

from benchmarks.transfer.__main__ import Rest, as_json
from benchmarks.transfer.gathers import gathers_per_version
from benchmarks.transfer.measure import Pair, Row
from tests.benchmarks.quick import quick_run


def row(mib: int, near: float | None, tcp: float | None) -> Row:
    """Ways by their ratio; all else took a second."""
    near_pair, tcp_pair = (
        None if ratio is None else Pair.of([1.0], [ratio]) for ratio in (near, tcp)
    )
    return Row(
        num_bytes=mib << 20,
        memcpy=1.0,
        checksum=1.0,
        set_fresh=1.0,
        set=1.0,
        get_in_process=1.0,
        get_shared=1.0,
        get_shared_verified=1.0,
        copied_fraction=0.0,
        one_reader=1.0,
        four_readers=1.0,
        grpc=None,
        near=near_pair,
        tcp=tcp_pair,
    )


def test_the_goal_is_compared_with_the_worst_ratio_of_all_sizes_and_ways() -> None:
    networks = {64 << 20: Pair.of([1.0], [0.7])}
    rest = Rest(networks, None, (0.1, 1.0, 1), "")
    found = as_json([row(64, 0.6, 0.8), row(4096, 0.95, None)], rest)
    assert (found["ucx_ratio"], found["ucx_ratio_of"]) == (0.6, "near, 64 MiB")
    ways = {"near": 0.6, "tcp": 0.8, "network": 0.7}
    assert found["ucx_ratios_by_mib"] == {"64": ways, "4096": {"near": 0.95}}


def test_without_ucx_the_ratio_is_none() -> None:
    found = as_json([row(64, None, None)], Rest({}, None, (0.1, 1.0, 1), "no ip"))
    assert found["ucx_ratio"] is None
    assert found["ucx_ratio_of"] is None


@pytest.mark.slow
def test_a_quick_run_measures_every_way_there_is() -> None:
    found = quick_run("transfer", seconds=300)
    assert found["shm_zero_copy"] is True
    assert found["four_readers_ratio"] > 0
    assert found["grpc_gib_s"] > 0
    assert found["exposed_fraction"] > 0
    # A missing measurement is null, not a number.
    assert (found["ucx_ratio"] is None) == (found["ucx_gib_s"] is None)


@pytest.mark.slow
def test_a_state_goes_from_one_process_device_to_anothers() -> None:
    found = quick_run("transfer", "--device", "cpu", "--mib", "16", seconds=120)
    assert found["gib"] == 16 / 1024
    ways = ("set_gib_s", "get_gib_s", "ipc_gib_s", "link_out_gib_s", "link_in_gib_s", "of_link")
    assert all(found[way] > 0 for way in ways)
    assert found["of_link_by_mib"] == {"16": found["of_link"]}


@pytest.mark.slow
async def test_a_gang_whose_versions_three_servers_load_gathers_each_of_them_once() -> None:
    assert await gathers_per_version() == 1
