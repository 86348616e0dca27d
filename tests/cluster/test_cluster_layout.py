"""The processes of a cluster and their ports: pure functions and real sockets."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.control_panel.access import PanelSettings, host_name
from troupe.cluster.embedded import FIRST_PORT, LAST_PORT, is_free, pick_ports, require_free
from troupe.cluster.errors import PortInUse
from troupe.cluster.layout import (
    ANYBODY,
    CORE,
    HeadAddresses,
    links,
    plan,
    port_names,
    python_path,
    service_names,
    thread_budget,
)
from troupe.cluster.settings import ClusterSettings
from troupe.cluster.supervisor import levels
from troupe.devices import find_devices
from troupe.rpc.addresses import is_loopback_host, is_wildcard_host


def _plan(settings: ClusterSettings, *, embedded: bool = True):  # type: ignore[no-untyped-def]
    devices = settings.shares(settings.inventory())
    ports = {name: 20_000 + i for i, name in enumerate(port_names(settings))}
    return plan(
        settings.resolved(),
        ports,
        devices,
        redis_url="redis://127.0.0.1:1/0",
        redis_command=("redis-server", "redis.conf") if embedded else (),
        cluster_id="abc",
        parent_pid=42,
        cores=8,
    )


def test_every_child_gets_its_ports_and_everybody_elses_addresses() -> None:
    specs = {s.name: s for s in _plan(ClusterSettings(rollouts=2, trainers=2))}

    assert set(specs) == {
        "redis", "experience_store", "reward", "orchestrator", "rollout-0", "rollout-1",
        "trainer-0", "trainer-1", "control_panel",
    }  # fmt: skip
    environment = specs["rollout-1"].environment
    assert environment["TROUPE_PORT"] == specs["rollout-1"].address.rpartition(":")[2]
    assert environment["TROUPE_ORCHESTRATOR_ADDRESS"] == specs["orchestrator"].address
    assert environment["TROUPE_EXPERIENCE_STORE_ADDRESS"] == specs["experience_store"].address
    assert environment["TROUPE_REWARD_ADDRESS"] == specs["reward"].address
    assert environment["TROUPE_PARENT_PID"] == "42"
    assert environment["TROUPE_WORKER_ID"] == "rollout-1-abc"
    assert specs["rollout-1"].command[-2:] == ("-m", "services.rollout")
    addresses = [s.address for s in specs.values()] + [s.metrics_address for s in specs.values()]
    used = [a for a in addresses if a]
    assert len(set(used)) == len(used)


def test_numerical_workers_share_the_cores_and_the_others_get_one_thread() -> None:
    specs = {s.name: s for s in _plan(ClusterSettings(rollouts=2, trainers=2))}

    assert specs["rollout-0"].environment["OMP_NUM_THREADS"] == "2"
    assert specs["trainer-1"].environment["TROUPE_THREADS"] == "2"
    assert specs["orchestrator"].environment["OMP_NUM_THREADS"] == "1"
    assert specs["orchestrator"].environment["MALLOC_ARENA_MAX"] == "2"
    assert specs["trainer-1"].environment["MALLOC_ARENA_MAX"] == "3"


def test_trainers_may_have_more_threads_than_their_share() -> None:
    specs = {s.name: s for s in _plan(ClusterSettings(threads=1, trainer_threads=4))}

    assert specs["rollout-0"].environment["OMP_NUM_THREADS"] == "1"
    assert specs["trainer-0"].environment["TROUPE_THREADS"] == "4"


@given(rollouts=st.integers(1, 64), trainers=st.integers(1, 64), cores=st.integers(1, 512))
def test_threads_never_exceed_the_cores_unless_there_are_more_workers_than_cores(
    rollouts: int, trainers: int, cores: int
) -> None:
    budget = thread_budget(ClusterSettings(), rollouts + trainers, cores)

    assert budget >= 1
    assert budget == 1 or budget * (rollouts + trainers) <= cores


def test_dependencies_start_first_and_redis_is_the_root() -> None:
    grouped = levels(_plan(ClusterSettings()))

    assert grouped[0] == ["redis", "reward"]
    assert set(grouped[1]) == {"experience_store", "orchestrator"}
    assert set(grouped[2]) == {"rollout-0", "trainer-0", "control_panel"}


def test_somebody_elses_redis_is_not_a_child() -> None:
    settings = ClusterSettings(redis_url="redis://elsewhere/0", panel=False)
    specs = _plan(settings, embedded=False)

    assert [s.name for s in specs] == service_names(settings)
    assert all("redis" not in s.after for s in specs)
    assert "redis" not in port_names(settings)


def test_a_route_changes_the_way_of_one_caller_only() -> None:
    settings = ClusterSettings(rollouts=2, panel=False)
    ports = {name: 20_000 + i for i, name in enumerate(port_names(settings))}
    url = f"redis://:secret@127.0.0.1:{ports['redis']}/0"
    specs = {
        s.name: s
        for s in plan(
            settings.resolved(),
            ports,
            settings.shares(()),
            redis_url=url,
            redis_command=("redis-server", "redis.conf"),
            cluster_id="abc",
            parent_pid=42,
            routes={
                ("rollout-0", "experience_store"): "127.0.0.1:1",
                ("experience_store", "redis"): "127.0.0.1:2",
                (ANYBODY, "trainer-0"): "127.0.0.1:3",
            },
        )
    }

    store = specs["experience_store"]
    assert specs["rollout-0"].environment["TROUPE_EXPERIENCE_STORE_ADDRESS"] == "127.0.0.1:1"
    assert specs["rollout-1"].environment["TROUPE_EXPERIENCE_STORE_ADDRESS"] == store.address
    assert store.environment["TROUPE_REDIS_URL"] == "redis://:secret@127.0.0.1:2/0"
    assert specs["orchestrator"].environment["TROUPE_REDIS_URL"] == url
    assert specs["trainer-0"].environment["TROUPE_ADVERTISE_ADDRESS"] == "127.0.0.1:3"
    assert "TROUPE_ADVERTISE_ADDRESS" not in specs["rollout-0"].environment
    # Probes go straight to the process: a partition is not a death.
    assert store.probe.target == store.address


def test_every_link_names_two_processes() -> None:
    settings = ClusterSettings(trainers=2)
    names = {"redis", *service_names(settings)}

    for caller, callee in links(settings):
        assert caller in names | {ANYBODY}
        assert callee in names
    assert (ANYBODY, "trainer-1") in links(settings)
    assert all(callee != "redis" for _, callee in links(ClusterSettings(redis_url="redis://x/0")))


def test_the_users_directory_comes_first_on_the_path() -> None:
    assert python_path(Path("/project"), f"/a{os.pathsep}{os.pathsep}/b").split(os.pathsep) == [
        "/project",
        "/a",
        "/b",
    ]


def test_picked_ports_are_distinct_free_and_below_the_ephemeral_range() -> None:
    ports = pick_ports([f"p{i}" for i in range(20)], fixed={"p3": 8765})

    assert ports["p3"] == 8765
    assert len(set(ports.values())) == 20
    others = [p for name, p in ports.items() if name != "p3"]
    assert all(FIRST_PORT <= p < LAST_PORT and is_free(p) for p in others)


def test_a_port_in_use_is_skipped_or_named_with_the_remedy() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]

        assert not is_free(port)
        with pytest.raises(PortInUse) as caught:
            require_free(port, field="panel_port", option="--panel-port")

    message = str(caught.value)
    assert f"panel_port = {port}" in message
    assert "--panel-port" in message


EIGHT = "8xH100-80GB"


def test_each_process_sees_its_own_devices_and_no_others() -> None:
    settings = ClusterSettings(devices=EIGHT, rollouts=2, devices_per_trainer=2)
    specs = {s.name: s for s in _plan(settings)}

    seen = {name: s.environment.get("CUDA_VISIBLE_DEVICES") for name, s in specs.items()}
    assert seen == {
        "redis": None,
        "experience_store": "",
        "reward": "",
        "orchestrator": "",
        "control_panel": "",
        "rollout-0": "0,1",
        "rollout-1": "2,3",
        "trainer-0": "4,5",
        "trainer-1": "6,7",
    }
    found = find_devices(specs["trainer-1"].environment)
    assert [(one.index, one.device_class) for one in found] == [(6, "H100"), (7, "H100")]
    assert specs["rollout-0"].environment["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"


def test_without_devices_no_variable_names_visible_ones() -> None:
    for spec in _plan(ClusterSettings(devices="")):
        assert "CUDA_VISIBLE_DEVICES" not in spec.environment


HEAD = HeadAddresses("head:50051", "head:7", "head:8")


def test_a_head_has_no_workers_and_a_node_has_only_workers() -> None:
    settings = ClusterSettings(role="head", host="0.0.0.0", advertise="head.example")
    specs = {s.name: s for s in _plan(settings)}
    assert set(specs) == {"redis", *CORE, "control_panel"}
    environment = specs["orchestrator"].environment
    # Nodes get the same values that the head's own services use.
    assert environment["TROUPE_REWARD_ADDRESS"] == specs["reward"].address
    assert specs["reward"].address.startswith("head.example:")
    assert environment["TROUPE_ADVERTISE_ADDRESS"] == specs["orchestrator"].address
    assert environment["TROUPE_HOST"] == "0.0.0.0"
    assert specs["orchestrator"].tls

    node = ClusterSettings(role="node", head="head:50051", host="10.0.0.7", devices="2x80GB")
    ports = {name: 20_000 + i for i, name in enumerate(port_names(node))}
    children = plan(
        node.resolved(),
        ports,
        node.shares(node.inventory()),
        head=HEAD,
        cluster_id="abc",
        parent_pid=42,
    )
    assert [s.name for s in children] == ["rollout-0", "trainer-0"]
    for child in children:
        assert child.after == ()
        assert child.environment["TROUPE_ORCHESTRATOR_ADDRESS"] == "head:50051"
        assert child.environment["TROUPE_EXPERIENCE_STORE_ADDRESS"] == "head:7"
        assert child.environment["TROUPE_NODE"] == node.name
        assert "TROUPE_REDIS_URL" not in child.environment


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "[::]", "", "*", "10.0.0.7", "fd00::7", "::1"])
@pytest.mark.parametrize("advertise", [None, "head.example", "[fd00::8]"])
def test_the_panel_of_a_head_answers_at_the_address_that_is_told(
    host: str, advertise: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = ClusterSettings(role="head", host=host, advertise=advertise)
    (spec,) = (s for s in _plan(settings) if s.name == "control_panel")
    for name, value in spec.environment.items():
        monkeypatch.setenv(name, value)
    name = host_name(spec.address)
    assert name in PanelSettings().host_names or is_loopback_host(name)
    assert not is_wildcard_host(name)


@pytest.mark.parametrize(
    ("changes", "given", "expected"),
    [
        ({"role": "node"}, None, "1"),
        ({"role": "node"}, "0", "0"),
        ({"role": "node", "jobs_dir": Path("/shared/jobs")}, None, None),
        ({"role": "all"}, None, None),
        ({"role": "all"}, "2", "2"),
    ],
)
def test_nodes_without_a_shared_disk_keep_copies_of_states(
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, Any],
    given: str | None,
    expected: str | None,
) -> None:
    monkeypatch.delenv("TROUPE_TRAINER_STATE_REPLICAS", raising=False)
    if given is not None:
        monkeypatch.setenv("TROUPE_TRAINER_STATE_REPLICAS", given)
    settings = ClusterSettings(**changes)
    specs = plan(
        settings.resolved(),
        dict.fromkeys(port_names(settings), 20000),
        settings.shares(()),
        head=HeadAddresses("h:1", "h:2", "h:3"),
        cluster_id="abc",
        parent_pid=42,
    )
    found = {s.environment.get("TROUPE_TRAINER_STATE_REPLICAS") for s in specs}
    assert found == {expected}


def test_a_host_with_an_ipv6_address_has_brackets_in_addresses() -> None:
    settings = ClusterSettings(host="::", advertise="fd00::17")
    [trainer] = [one for one in _plan(settings) if one.name == "trainer-0"]
    environment = trainer.environment
    assert trainer.address == f"[fd00::17]:{environment['TROUPE_PORT']}"
    assert trainer.address == environment["TROUPE_ADVERTISE_ADDRESS"]
    assert environment["TROUPE_ORCHESTRATOR_ADDRESS"].startswith("[fd00::17]:")
