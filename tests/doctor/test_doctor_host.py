"""Checks of a host: each state that a machine may be in, with its remedy."""

from __future__ import annotations

import resource
import types
from pathlib import Path

import psutil
import pynvml
import pytest

import troupe.devices
from tests.support.ports import free_port
from tests.support.redis_server import RedisServer
from troupe.devices import GIB
from troupe.doctor import host
from troupe.doctor.findings import Finding, Verdict

GOOD, NOTE, PROBLEM = Verdict.GOOD, Verdict.NOTE, Verdict.PROBLEM


def only(findings: list[Finding], subject: str) -> Finding:
    [found] = [one for one in findings if one.subject == subject]
    return found


@pytest.fixture
def no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", absent)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> types.SimpleNamespace:
    """NVML's answers of a host with two devices; the second is half full."""
    monkeypatch.setattr(troupe.devices, "_driver", troupe.devices._Driver())
    used = {0: 0, 1: 40 * GIB}
    answers = {
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlSystemGetDriverVersion": lambda: "580.1",
        "nvmlSystemGetCudaDriverVersion": lambda: 13010,
        "nvmlDeviceGetCount": lambda: 2,
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetMemoryInfo": lambda handle: types.SimpleNamespace(
            total=80 * GIB, used=used[handle]
        ),
        "nvmlDeviceGetName": lambda handle: "NVIDIA H100 80GB HBM3",
        "nvmlDeviceGetUUID": lambda handle: f"GPU-{handle}",
        "nvmlDeviceGetP2PStatus": lambda one, other, kind: pynvml.NVML_P2P_STATUS_OK,
        "nvmlDeviceGetPciInfo": lambda handle: types.SimpleNamespace(busId=f"0000:0{handle}:00.0"),
        "nvmlDeviceGetUtilizationRates": lambda handle: types.SimpleNamespace(gpu=0),
    }
    for name, answer in answers.items():
        monkeypatch.setattr(pynvml, name, answer)
    return types.SimpleNamespace(used=used)


def test_a_host_without_hardware_computes_on_the_cpu(no_driver: None, tmp_path: Path) -> None:
    [found] = host.devices({}, tmp_path)
    assert found.verdict is NOTE
    assert "CPU" in found.text


def test_hardware_without_a_driver_is_a_problem(no_driver: None, tmp_path: Path) -> None:
    for number, (vendor, kind) in enumerate([("0x8086", "0x030000"), ("0x10de", "0x030200")]):
        device = tmp_path / f"sys/bus/pci/devices/0000:0{number}:00.0"
        device.mkdir(parents=True)
        (device / "vendor").write_text(vendor + "\n")
        (device / "class").write_text(kind + "\n")
    [found] = host.devices({}, tmp_path)
    assert (found.subject, found.verdict) == ("driver", PROBLEM)
    assert "nvidia-smi" in found.remedy


def test_devices_and_memory_that_others_hold_are_named(driver: types.SimpleNamespace) -> None:
    findings = host.devices({})
    assert only(findings, "driver").text == "580.1, for CUDA up to 13.1"
    listed, held = [one for one in findings if one.subject == "devices"]
    assert (listed.verdict, listed.text) == (GOOD, "2x H100 of 80 GiB")
    assert held.verdict is NOTE
    assert "device 1 has 40.0 of 80 GiB in use" in held.text
    assert host.driver_cuda() == (13, 1)


def test_a_selection_that_hides_every_device_is_a_problem(driver: types.SimpleNamespace) -> None:
    found = only(host.devices({"CUDA_VISIBLE_DEVICES": ""}), "devices")
    assert found.verdict is PROBLEM
    assert "CUDA_VISIBLE_DEVICES" in found.remedy


@pytest.mark.parametrize(("declared", "verdict"), [("8xH100-80GB", NOTE), ("eight", PROBLEM)])
def test_declared_devices_are_shown_or_refused(declared: str, verdict: Verdict) -> None:
    [found] = host.devices({"TROUPE_DEVICES": declared})
    assert found.verdict is verdict
    assert declared in str(found)


def test_little_and_missing_shared_memory_are_told_apart(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert only(host.memory(tmp_path), "shared memory").verdict is NOTE
    (tmp_path / "dev/shm").mkdir(parents=True)
    usage = types.SimpleNamespace(total=64 << 20, used=0, free=64 << 20)
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage)
    little = only(host.memory(tmp_path), "shared memory")
    assert little.verdict is PROBLEM
    assert "--shm-size" in little.remedy
    usage.free = 16 * GIB
    assert only(host.memory(tmp_path), "shared memory").verdict is GOOD


@pytest.mark.parametrize(
    ("files", "verdict"),
    [(1024, PROBLEM), (20_000, NOTE), (1 << 20, GOOD), (resource.RLIM_INFINITY, GOOD)],
)
def test_the_limit_of_open_files_is_judged(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, files: int, verdict: Verdict
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (files, files))
    findings = host.limits(tmp_path)
    assert only(findings, "open files").verdict is verdict
    assert not any(one.subject == "locked memory" for one in findings)


@pytest.mark.parametrize(
    ("locked", "verdict"), [(64 << 10, PROBLEM), (resource.RLIM_INFINITY, GOOD)]
)
def test_the_limit_of_locked_memory_counts_where_there_is_rdma(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, locked: int, verdict: Verdict
) -> None:
    (tmp_path / "sys/class/infiniband/mlx5_0").mkdir(parents=True)
    monkeypatch.setattr(resource, "getrlimit", lambda which: (locked, locked))
    found = only(host.limits(tmp_path), "locked memory")
    assert found.verdict is verdict
    if verdict is PROBLEM:
        assert "mlx5_0" in found.text


def up(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    address = types.SimpleNamespace(family=2)
    monkeypatch.setattr(
        psutil, "net_if_stats", lambda: {one: types.SimpleNamespace(isup=True) for one in names}
    )
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: {one: [address] for one in names})


@pytest.mark.parametrize(
    ("interfaces", "environment", "verdict", "said"),
    [
        (("lo",), {}, NOTE, "works alone"),
        (("lo", "docker0", "veth12"), {}, NOTE, "works alone"),
        (("lo", "eth0"), {}, GOOD, "eth0 is up"),
        (("lo", "eth0", "ib0"), {}, NOTE, "take the first"),
        (("lo", "eth0", "ib0"), {"NCCL_SOCKET_IFNAME": "ib"}, GOOD, "eth0, ib0"),
        (("lo", "eth0"), {"NCCL_SOCKET_IFNAME": "ib"}, PROBLEM, "matches no interface"),
        (("lo", "eth0"), {"NCCL_SOCKET_IFNAME": "=eth"}, PROBLEM, "matches no interface"),
        (("lo", "eth0"), {"NCCL_SOCKET_IFNAME": "^docker"}, GOOD, "eth0"),
        (("lo", "eth0"), {"GLOO_SOCKET_IFNAME": "eth1"}, PROBLEM, "GLOO_SOCKET_IFNAME"),
    ],
)
def test_interfaces_between_hosts_are_judged(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    interfaces: tuple[str, ...],
    environment: dict[str, str],
    verdict: Verdict,
    said: str,
) -> None:
    up(monkeypatch, *interfaces)
    [found] = host.network(environment, tmp_path)
    assert found.verdict is verdict
    assert said in found.text


async def test_redis_is_asked(tmp_path: Path) -> None:
    assert (await host.redis(""))[0].verdict is GOOD
    [away] = await host.redis(f"redis://127.0.0.1:{free_port()}/0")
    assert away.verdict is PROBLEM
    [wrong] = await host.redis("http://somewhere")
    assert wrong.verdict is PROBLEM
    assert wrong.remedy
    server = RedisServer(tmp_path)
    server.start()
    try:
        assert (await host.redis(server.url))[0].verdict is GOOD
        with server.client() as plain:
            plain.config_set("maxmemory", "1gb")
            plain.config_set("maxmemory-policy", "allkeys-lru")
        [unfit] = await host.redis(server.url)
        assert unfit.verdict is PROBLEM
        assert "noeviction" in unfit.remedy
    finally:
        server.stop()
