"""Devices of launched servers: disjoint, linked, and named to the server alone."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from services.rollout.engines.errors import EngineStartFailed
from services.rollout.engines.server_process import EngineDevices, ServerProcess
from services.rollout.engines.servers.interface import Launch
from services.rollout.engines.sglang.server import SglangServer
from tests.rollout.engines.real_server import interpreter
from tests.support.waiting import PATIENCE
from troupe.devices import Device, parse_devices
from troupe.job import PolicySpec


def indices(devices: tuple[Device, ...] | None) -> list[int]:
    return [one.index for one in devices or ()]


def test_no_two_servers_get_one_device_and_a_restart_gets_the_same() -> None:
    devices = EngineDevices(parse_devices("4xH100-80GB"))
    first = devices.assign("a.p.0@w", "p", 2)
    second = devices.assign("a.p.1@w", "p", 1)
    assert len(indices(first)) == 2
    assert not set(indices(first)) & set(indices(second))
    assert devices.assign("a.p.0@w", "p", 2) == first
    held = devices.holders()
    assert {i for i, names in held.items() if names == ["a.p.0@w"]} == set(indices(first))
    with pytest.raises(EngineStartFailed) as refused:
        devices.assign("b.q.0@w", "q", 2)
    assert refused.value.field == "policies.q.engine.tensor_parallel"
    assert "a.p.0@w (2)" in str(refused.value)
    devices.release("a.p.0@w")
    assert devices.assign("b.q.0@w", "q", 2) is not None
    devices.release("nobody")


def test_a_group_is_linked_where_it_can_be() -> None:
    """Two pairs of linked devices, one device of the first pair taken: the second pair is whole."""
    pairs = [Device(i, "A", 1 << 30, links=(i ^ 1,)) for i in range(4)]
    devices = EngineDevices(pairs)
    (one,) = indices(devices.assign("single", "p", 1))
    group = indices(devices.assign("group", "p", 2))
    assert group[0] ^ 1 == group[1]
    assert one not in group


def test_engines_of_this_process_take_devices_in_turn() -> None:
    """Numbers are CUDA's in this process, whatever the devices' indices on the host are."""
    devices = EngineDevices(parse_devices("8xH100-80GB")[5:])
    assert [devices.share(f"a.p.{i}@w") for i in range(4)] == [0, 1, 2, 0]
    assert devices.share("a.p.1@w") == 1
    assert devices.holders()[5] == ["a.p.0@w", "a.p.3@w"]
    devices.release("a.p.2@w")
    # A server gets the device that has no engine, and the next engine none of a server's.
    assert indices(devices.assign("b.q.0@w", "q", 1)) == [7]
    assert [devices.share(f"c.p.{i}@w") for i in range(2)] == [1, 2]
    with pytest.raises(EngineStartFailed):
        devices.assign("b.q.1@w", "q", 1)
    assert EngineDevices().share("a.p.0@w") == 0


def test_a_worker_without_devices_says_nothing_to_its_servers() -> None:
    devices = EngineDevices()
    assert devices.assign("a.p.0@w", "p", 8) is None
    assert devices.holders() == {}


async def test_a_server_sees_its_devices_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    names = ["CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"]
    out = tmp_path / "seen"
    program = (
        "import json, os, sys; open(sys.argv[1], 'w').write("
        f"json.dumps([os.environ.get(n) for n in {names}]))"
    )
    for devices, expected in (
        (parse_devices("4x80GB")[2:], ["2,3", "PCI_BUS_ID"]),
        (None, ["0,1,2,3", None]),
    ):
        command = [sys.executable, "-c", program, str(out)]
        process = ServerProcess(command, tmp_path / "log", devices)
        await process.start()
        assert process._process is not None
        assert await process._process.wait() == 0, process.tail()
        assert json.loads(out.read_text()) == expected


async def test_a_server_inherits_neither_import_paths_nor_secrets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its interpreter has other packages, and it needs nothing of the cluster."""
    (tmp_path / "sitecustomize.py").write_text("raise SystemExit('a package of another program')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("TROUPE_TOKEN", "secret-1")
    monkeypatch.setenv("TROUPE_REDIS_URL", "redis://:secret-2@127.0.0.1/0")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    out = tmp_path / "seen"
    program = "import json, os, sys; open(sys.argv[1], 'w').write(json.dumps(dict(os.environ)))"
    process = ServerProcess([sys.executable, "-c", program, str(out)], tmp_path / "log")
    await process.start()
    assert process._process is not None
    assert await process._process.wait() == 0, process.tail()
    seen = json.loads(out.read_text())
    assert "secret-" not in json.dumps(seen)
    assert "PYTHONPATH" not in seen
    assert seen["HF_HOME"] == str(tmp_path / "hub")


def policy(**engine: object) -> PolicySpec:
    model = {"path": "Qwen/Qwen3-0.6B", "dtype": "bfloat16"}
    return PolicySpec.model_validate({"model": model, "engine": {"kind": "sglang", **engine}})


def test_the_launch_line_of_a_replica() -> None:
    spec = policy(tensor_parallel=2, launch=["--nccl-port", "{port}", "--log-prefix", "r{replica}"])
    command = SglangServer.command(Launch(spec, "m", 30_000, 2048, replica=3))
    assert command[command.index("--tp-size") + 1] == "2"
    assert command[command.index("--nccl-port") + 1] == "30000"
    assert command[-1] == "r3"
    assert "--tp-size" not in SglangServer.command(Launch(policy(), "m", 1, 64))
    saver = "--enable-memory-saver"
    assert saver in SglangServer.command(Launch(spec, "m", 1, 64, memory=True))
    assert saver not in command


def test_the_cuda_graphs_of_a_server_reach_to_its_limit_and_sleep_with_it() -> None:
    """As 0.5.21 reads them (arg_groups/cuda_graph_hook.py, runner_backend)."""
    spec = policy(max_running=96)
    awake = Launch(spec, "m", 1, 64, release=(0, 5, 21), gpu=True)
    command = SglangServer.command(awake)
    assert command[command.index("--cuda-graph-max-bs-decode") + 1] == "96"
    assert "--cuda-graph-backend-prefill" not in command
    assert SglangServer.variables(awake) == {}
    sleepy = replace(awake, memory=True)
    command = SglangServer.command(sleepy)
    # The default prefill graphs refuse to start together with releasable ones.
    assert command[command.index("--cuda-graph-backend-prefill") + 1] == "disabled"
    assert SglangServer.variables(sleepy) == {"SGLANG_MEMORY_SAVER_CUDA_GRAPH": "true"}
    for other in (
        replace(sleepy, release=(0, 5, 13)),  # does not know the options
        replace(sleepy, release=()),
        replace(sleepy, gpu=False),  # no graphs
    ):
        assert not [part for part in SglangServer.command(other) if "graph" in part]
        assert SglangServer.variables(other) == {}


@pytest.mark.slow
def test_a_real_sglang_knows_every_option_of_the_launch_line(tmp_path: Path) -> None:
    launch = Launch(
        policy(tensor_parallel=2), "m", 1, 64, name="n", deterministic=True, memory=True,
        routed_experts=True, release=(0, 5, 21), gpu=True,
    )  # fmt: skip
    done = subprocess.run(
        [interpreter(tmp_path), "-m", "sglang.launch_server", "--help"],
        capture_output=True,
        text=True,
        timeout=4 * PATIENCE,
        check=True,
    )
    known = set(re.findall(r"--[\w-]+", done.stdout))
    assert {part for part in SglangServer.command(launch) if part.startswith("--")} <= known


@pytest.mark.parametrize("devices", [parse_devices("80GB"), None])
async def test_a_servers_threads_are_its_own_on_gpus_and_the_workers_share_on_cpus(
    devices: tuple[Device, ...] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    out = tmp_path / "seen"
    program = "import os, sys; open(sys.argv[1], 'w').write(os.environ['OMP_NUM_THREADS'])"
    process = ServerProcess([sys.executable, "-c", program, str(out)], tmp_path / "log", devices)
    await process.start()
    assert process._process is not None
    assert await process._process.wait() == 0, process.tail()
    assert out.read_text() == ("1" if devices else "7")


@pytest.mark.parametrize(
    "engine",
    [
        {"launch": ["--tp", "2"]},
        {"launch": ["--tensor-parallel-size=2"]},
        {"launch": ["--base-gpu-id", "1"]},
        {"tensor_parallel": 2, "urls": ["http://h:1"]},
        {"tensor_parallel": 2, "kind": "embedded"},
        {"tensor_parallel": 0},
        {"tensor_parallel": 65},
    ],
)
def test_ways_around_the_assignment_are_refused(engine: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="tensor_parallel"):
        policy(**engine)
