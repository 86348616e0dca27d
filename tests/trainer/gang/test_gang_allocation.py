"""Places of ranks, from variables as LeaderWorkerSet and Slurm 22.05 set them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.trainer.gang.__main__ import FollowerSettings
from services.trainer.gang.allocation import Allocation, allocation, first_host
from services.trainer.settings import TrainerSettings
from troupe.rpc import InvalidArgument

LWS = {
    "LWS_LEADER_ADDRESS": "t-trainer-big-0.t-trainer-big.agents",
    "LWS_GROUP_SIZE": "4",
    "LWS_WORKER_INDEX": "2",
}
# `srun -N3`, on its third host.
SRUN = {
    "SLURMD_NODENAME": "n3",
    "SLURM_JOB_ID": "4711",
    "SLURM_JOB_NODELIST": "n[1-3]",
    "SLURM_JOB_NUM_NODES": "3",
    "SLURM_NNODES": "3",
    "SLURM_NODEID": "2",
    "SLURM_PROCID": "2",
    "SLURM_STEP_NODELIST": "n[1-3]",
    "SLURM_STEP_NUM_NODES": "3",
}
# A script of `sbatch -N3`, and a step of it: `srun --relative=1 -N2`, on its second host.
BATCH = {
    "SLURM_JOB_ID": "3",
    "SLURM_JOB_NODELIST": "n[1-3]",
    "SLURM_NNODES": "3",
    "SLURM_NODEID": "0",
}
STEP = {
    **BATCH,
    "SLURM_NNODES": "2",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NODELIST": "n[2-3]",
    "SLURM_STEP_NUM_NODES": "2",
}


@pytest.mark.parametrize(
    ("variables", "place"),
    [
        (LWS, Allocation(2, 4, "t-trainer-big-0.t-trainer-big.agents:29500")),
        (LWS | {"LWS_GROUP_SIZE": "1", "LWS_WORKER_INDEX": "0"}, None),
        (SRUN, Allocation(2, 3, "n1:24711")),
        (BATCH, Allocation(0, 3, "n1:20003")),
        (STEP, Allocation(1, 2, "n2:20003")),
        # A shell of `salloc` runs on none of the hosts.
        ({k: v for k, v in BATCH.items() if k != "SLURM_NODEID"}, None),
        ({}, None),
        # Pods of Kubernetes on hosts that Slurm gave, as with Slinky.
        (SRUN | LWS, Allocation(2, 4, "t-trainer-big-0.t-trainer-big.agents:29500")),
    ],
)
def test_a_process_finds_its_place_in_an_allocation(
    variables: dict[str, str], place: Allocation | None
) -> None:
    assert allocation(variables) == place


# As printed by `scontrol show hostnames`.
@pytest.mark.parametrize(
    ("hosts", "first"),
    [
        ("n[1-3]", "n1"),
        ("rack[01-04,07]", "rack01"),
        ("tux[0-5,12],host3", "tux0"),
        ("gpu[1-2]-[3-4],x9", "gpu1-3"),
        ("a,b[1-2]", "a"),
        ("gpu-a100-0001", "gpu-a100-0001"),
    ],
)
def test_the_first_host_of_a_list_is_found(hosts: str, first: str) -> None:
    assert first_host(hosts) == first


@given(
    st.from_regex(r"[a-z][a-z0-9-]{0,9}", fullmatch=True),
    st.lists(st.integers(0, 999), min_size=1, max_size=5),
    st.integers(1, 4),
)
def test_leading_zeros_of_host_numbers_are_kept(
    prefix: str, numbers: list[int], width: int
) -> None:
    names = [f"{number:0{width}}" for number in numbers]
    assert first_host(f"{prefix}[{','.join(names)}],other") == prefix + names[0]


@pytest.mark.parametrize(
    ("variable", "value"),
    [("LWS_WORKER_INDEX", "4"), ("LWS_WORKER_INDEX", "-1"), ("LWS_GROUP_SIZE", "")],
)
def test_invalid_variables_of_an_allocation_are_refused_by_name(variable: str, value: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        allocation(LWS | {variable: value})
    assert refused.value.field == variable
    assert refused.value.remedy


def test_settings_come_from_the_allocation_unless_given(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = TrainerSettings()
    assert (alone.gang_nodes, alone.gang_endpoint) == (1, "127.0.0.1:0")
    for name, value in STEP.items():
        monkeypatch.setenv(name, value)
    follower = FollowerSettings()
    assert (follower.gang_node, follower.gang_nodes) == (1, 2)
    assert follower.gang_endpoint == "n2:20003"
    # An embedded cluster's trainer leads no gang over the hosts of its job.
    monkeypatch.setenv("TROUPE_GANG_NODES", "1")
    assert TrainerSettings().gang_endpoint == "127.0.0.1:0"
    monkeypatch.setenv("TROUPE_GANG_NODES", "3")
    monkeypatch.setenv("TROUPE_GANG_NODE", "2")
    monkeypatch.setenv("TROUPE_GANG_ENDPOINT", "lead:7")
    given = FollowerSettings()
    assert (given.gang_node, given.gang_nodes, given.gang_endpoint) == (2, 3, "lead:7")
