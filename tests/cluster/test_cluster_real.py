"""The embedded cluster with the real services: up, status, every process killed, down."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
from pathlib import Path

import httpx
import psutil
import pytest

from tests.support.ports import free_port
from tests.support.redis_server import RedisServer
from tests.support.waiting import PATIENCE, block_until, until
from troupe.client import AsyncClient, Client
from troupe.client.cli.app import main
from troupe.cluster.embedded import EmbeddedCluster
from troupe.cluster.layout import CORE
from troupe.cluster.probes import inspect
from troupe.cluster.settings import ClusterSettings
from troupe.cluster.state import ClusterState, is_alive, running_state
from troupe.rpc.addresses import has_ipv6, join_address, local_host, split_address

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]


def test_up_status_kill_each_and_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    options = ("--data-dir", str(tmp_path))

    def status() -> tuple[int, dict[str, dict[str, object]]]:
        capsys.readouterr()
        code = main(["status", "--json", *options])
        return code, {s["name"]: s for s in json.loads(capsys.readouterr().out)["services"]}

    assert main(["up", "--detach", "--rollouts", "2", "--trainers", "2", *options]) == 0
    try:
        code, services = status()
        assert code == 0
        assert list(services) == [
            "redis", "experience_store", "reward", "orchestrator", "rollout-0", "rollout-1",
            "trainer-0", "trainer-1", "control_panel",
        ]  # fmt: skip
        first = running_state(tmp_path)
        assert first is not None
        block_until(lambda: _workers(first) == 4)

        for name, service in services.items():
            os.kill(int(str(service["pid"])), signal.SIGKILL)
            block_until(lambda name=name: _restarts(tmp_path, name) == 1)
        block_until(lambda: status()[0] == 0)
        _, again = status()
        assert [s["address"] for s in again.values()] == [s["address"] for s in services.values()]
        assert all(again[name]["pid"] != services[name]["pid"] for name in services)
        # The restarted workers are new workers to the restarted orchestrator.
        block_until(lambda: _workers(first) == 4)
        last = running_state(tmp_path)
        assert last is not None
    finally:
        assert main(["down", *options]) == 0
    assert not any(is_alive(s.pid, s.created) for s in last.services)
    assert running_state(tmp_path) is None
    assert not last.transfer_dir.exists()


def _workers(state: ClusterState) -> int:
    with Client(state.orchestrator_address) as client:
        return sum(worker.alive for worker in client.cluster().workers)


def _restarts(data_dir: Path, name: str) -> int:
    state = running_state(data_dir)
    assert state is not None
    serving = (s.restarts for s in state.services if s.name == name and s.state == "serving")
    return next(serving, -1)


MACHINE = socket.gethostname()


@pytest.mark.parametrize(
    ("host", "shown"),
    [
        ("::1", "[::1]"),
        ("0.0.0.0", MACHINE),
        ("[::1]", "[::1]"),
        ("::", MACHINE),
        ("", MACHINE),
        ("localhost", "localhost"),
    ],
)
async def test_a_head_at_any_host_serves_its_services_its_panel_and_its_metrics(
    tmp_path: Path, host: str, shown: str
) -> None:
    if ":" in host and not has_ipv6():
        pytest.skip("this machine has no IPv6 loopback")
    settings = ClusterSettings(data_dir=tmp_path, role="head", host=host, port=free_port())
    async with EmbeddedCluster(settings) as cluster:
        state = cluster.state
        reports = await inspect(state, timeout=PATIENCE)
        assert [(one.record.name, one.reason) for one in reports if not one.healthy] == []
        for one in reports:
            if one.record.name in CORE:
                # Pages that it shares with the process that it was forked from count in part.
                resident = psutil.Process(one.record.pid).memory_info().rss
                assert 2**20 < one.memory_bytes < 0.75 * resident
        assert all(
            one.record.address.startswith(f"{shown}:")
            for one in reports
            if one.record.name != "redis"
        )
        # This user's programs find the token by the port at loopback.
        here = join_address(local_host(host), split_address(state.orchestrator_address)[1])
        async with AsyncClient(here) as client:
            services = {one.name: one for one in (await client.cluster()).services}
        assert all(one.serving for one in services.values()), services
        async with httpx.AsyncClient(timeout=PATIENCE) as web:
            assert (await web.get(f"{state.panel_url}/healthz")).status_code == 200
            for one in reports:
                if one.record.name in CORE:
                    url = f"http://{one.record.metrics_address}/metrics"
                    assert (await web.get(url)).status_code == 200


async def test_status_says_that_redis_has_become_unfit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "redis").mkdir()
    server = RedisServer(tmp_path / "redis", durable=True)
    server.start()
    command = ["status", "--data-dir", str(tmp_path / "data")]
    settings = ClusterSettings(
        data_dir=tmp_path / "data", role="head", host="127.0.0.1", port=free_port(),
        redis_url=server.url, panel=False,
    )  # fmt: skip

    async def says(code: int, text: str, *options: str) -> bool:
        # Asked again: a busy process may answer its health check too late.
        capsys.readouterr()
        ended = await asyncio.to_thread(main, [*command, *options])
        return ended == code and text in " ".join(capsys.readouterr().out.split())

    async with EmbeddedCluster(settings):
        await until(lambda: says(0, "ready"))
        with server.client() as plain:
            plain.config_set("maxmemory", "1gb")
            plain.config_set("maxmemory-policy", "allkeys-lru")
        await until(lambda: says(1, "CONFIG SET maxmemory-policy noeviction"))
        await until(lambda: says(1, "allkeys-lru", "--json"))
    server.stop()
