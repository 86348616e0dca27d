"""The devices of a host: as people write them, as variables select them, as NVML reports them."""

from __future__ import annotations

import contextlib
import types
from pathlib import Path

import psutil
import pynvml
import pytest
from hypothesis import given
from hypothesis import strategies as st

import troupe.devices
from troupe.devices import (
    GIB,
    Device,
    class_of,
    device_use,
    find_devices,
    host_memory,
    parse_devices,
    visible,
)
from troupe.rpc import InvalidArgument


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("80GB", [("gpu", 80 * GIB)]),
        ("2x24GB", [("gpu", 24 * GIB)] * 2),
        ("8xH100-80GB", [("H100", 80 * GIB)] * 8),
        ("A100-SXM4-40GiB", [("A100-SXM4", 40 * GIB)]),
        ("cpu-512MB", [("cpu", GIB // 2)]),
        ("1xRTX-4090-23.5gb + 2xL4-24GB", [("RTX-4090", 47 * GIB // 2)] + [("L4", 24 * GIB)] * 2),
    ],
)
def test_devices_are_read_from_text(text: str, expected: list[tuple[str, int]]) -> None:
    """Count, class and memory; count and class may be left out; kinds are joined by +."""
    devices = parse_devices(text)
    assert [(one.device_class, one.memory) for one in devices] == expected
    assert [one.index for one in devices] == list(range(len(expected)))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "8",
        "8xH100",
        "H100",
        "0xH100-80GB",
        "8xH100-0GB",
        "8xH100-80",
        "80GB+",
        "65537x1GB",
        "-1x80GB",
        "8x-80GB",
        "80GB,24GB",
        "8 x H100-80GB",
        "²x80GB",
        "40000x1GB+40000x1GB",
        '[{"index": 0}]',
        '[{"index": 0, "device_class": "a", "memory": 1}, {"index": 0, "device_class": "a", '
        '"memory": 1}]',
        "[1]",
        '{"index": 0}',
    ],
)
def test_an_invalid_list_of_devices_is_refused(text: str) -> None:
    """The error names the field, the whole text and what to write instead."""
    with pytest.raises(InvalidArgument) as refused:
        parse_devices(text, "TROUPE_DEVICES")
    assert refused.value.field == "TROUPE_DEVICES"
    assert refused.value.value == text
    assert refused.value.remedy


@given(st.text(max_size=40))
def test_no_text_breaks_the_reader(text: str) -> None:
    """Any text gives devices or the typed error."""
    with contextlib.suppress(InvalidArgument):
        assert parse_devices(text)


FOUR = {"TROUPE_DEVICES": "4xH100-80GB"}


@pytest.mark.parametrize(
    ("selection", "indices"),
    [
        (None, [0, 1, 2, 3]),
        ("", []),
        ("-1", []),
        ("NoDevFiles", []),
        ("2", [2]),
        ("3,1", [3, 1]),
        (" 0 , 2 ", [0, 2]),
        ("0,9,1", [0]),  # CUDA ignores what follows a name that there is none of
        ("1,1", [1]),
        ("0,-1,2", [0]),
    ],
)
def test_cuda_visible_devices_selects(selection: str | None, indices: list[int]) -> None:
    environment = FOUR if selection is None else FOUR | {"CUDA_VISIBLE_DEVICES": selection}
    assert [one.index for one in find_devices(environment)] == indices


@given(st.sets(st.integers(0, 3)))
def test_a_process_finds_the_devices_that_it_was_given(indices: set[int]) -> None:
    devices = tuple(one for one in find_devices(FOUR) if one.index in indices)
    assert find_devices(visible(devices)) == devices
    # A child may be given a part of what its parent was given, and no more.
    every = {**visible(devices), "CUDA_VISIBLE_DEVICES": "0,1,2,3"}
    assert set(find_devices(every)) <= set(devices)


def test_a_machine_without_a_driver_has_no_devices() -> None:
    with contextlib.suppress(pynvml.NVMLError):
        pynvml.nvmlInit()
        pytest.skip("this machine has a driver")
    assert find_devices({}) == ()
    assert find_devices({"CUDA_VISIBLE_DEVICES": "0"}) == ()
    assert device_use(find_devices(FOUR)) == {}


def test_answers_of_the_driver_become_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """NVML's answers become devices; the library is the real one, its driver is not here."""
    monkeypatch.setattr(troupe.devices, "_driver", troupe.devices._Driver())
    opened: list[str] = []
    memory = types.SimpleNamespace(total=79 * GIB, used=GIB)

    def linked(one: int, other: int, kind: int) -> int:
        if 3 in (one, other):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return int(pynvml.NVML_P2P_STATUS_OK if one // 2 == other // 2 else 1)

    answers = {
        "nvmlInit": lambda: opened.append("init"),
        "nvmlShutdown": lambda: opened.append("shutdown"),
        "nvmlDeviceGetCount": lambda: 4,
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetMemoryInfo": lambda handle: memory,
        "nvmlDeviceGetName": lambda handle: "NVIDIA H100 80GB HBM3",
        "nvmlDeviceGetUUID": lambda handle: f"GPU-{handle}{handle}",
        "nvmlDeviceGetP2PStatus": linked,
        "nvmlDeviceGetPciInfo": lambda handle: types.SimpleNamespace(
            busId=f"00000000:0{handle}:00.0"
        ),
        "nvmlDeviceGetUtilizationRates": lambda handle: types.SimpleNamespace(gpu=25),
    }
    for name, answer in answers.items():
        monkeypatch.setattr(pynvml, name, answer)
    devices = find_devices({})
    assert devices[0] == Device(0, "H100", 79 * GIB, (1,), devices[0].numa_node, "GPU-00")
    assert [one.links for one in devices] == [(1,), (0,), (), ()]
    assert [one.index for one in find_devices({"CUDA_VISIBLE_DEVICES": "GPU-22,GPU-0"})] == [2, 0]
    assert device_use(devices[1:2])[1].utilization == 0.25
    assert opened == ["init"]

    def lost(handle: int) -> types.SimpleNamespace:
        if handle == 2:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
        return types.SimpleNamespace(gpu=50)

    monkeypatch.setattr(pynvml, "nvmlDeviceGetUtilizationRates", lost)
    # A lost device is left out, and the driver is asked again next time.
    assert set(device_use(devices)) == {0, 1, 3}
    assert opened == ["init", "shutdown"]
    assert set(device_use(devices[:2])) == {0, 1}
    assert opened == ["init", "shutdown", "init"]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA A100 80GB PCIe", "A100"),
        ("NVIDIA GeForce RTX 4090", "RTX-4090"),
        ("Tesla T4", "T4"),
        ("", "gpu"),
    ],
)
def test_the_class_of_a_device_is_what_people_call_it(name: str, expected: str) -> None:
    assert class_of(name) == expected


@pytest.mark.parametrize(
    ("line", "folder", "names"),
    [
        ("0::/pods/one", "sys/fs/cgroup/pods/one", ("max", "current", "inactive_file")),
        # A container whose group is the top of its view.
        ("0::/", "sys/fs/cgroup", ("max", "current", "inactive_file")),
        # A parent's limit.
        ("0::/pods/one/deeper", "sys/fs/cgroup/pods", ("max", "current", "inactive_file")),
        (
            "5:cpu:/\n4:memory:/one\n0::/",
            "sys/fs/cgroup/memory/one",
            ("limit_in_bytes", "usage_in_bytes", "total_inactive_file"),
        ),
        # The container's path is the host's, which it does not see.
        (
            "4:hugetlb,memory:/kubepods/one",
            "sys/fs/cgroup/memory",
            ("limit_in_bytes", "usage_in_bytes", "total_inactive_file"),
        ),
    ],
)
def test_the_memory_of_a_process_is_what_its_control_groups_leave(
    tmp_path: Path, line: str, folder: str, names: tuple[str, str, str]
) -> None:
    limit, use, idle = names
    group = tmp_path / folder
    group.mkdir(parents=True)
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(line + "\n")
    (group / f"memory.{use}").write_text(f"{700 << 20}\n")
    (group / "memory.stat").write_text(f"anon 5\n{idle} {100 << 20}\nslab 7\n")
    (group / f"memory.{limit}").write_text("max\n")
    whole = psutil.virtual_memory().total
    assert host_memory(tmp_path)[0] == whole
    (group / f"memory.{limit}").write_text(f"{900 << 20}\n")
    assert host_memory(tmp_path) == (900 << 20, 300 << 20)


def test_the_memory_of_a_process_without_limits_is_the_hosts(tmp_path: Path) -> None:
    assert host_memory(tmp_path)[0] == psutil.virtual_memory().total
    total, free = host_memory()
    assert 0 < free <= total <= psutil.virtual_memory().total
