"""Protection of a cluster from other users of the machine: loopback is not a boundary."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import stat
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.stub_services import write_stub_services
from tests.support.waiting import PATIENCE
from troupe.client import AsyncClient, Client
from troupe.client.cli.app import main
from troupe.client.discovery import settings_for
from troupe.cluster import ClusterSettings, EmbeddedCluster
from troupe.cluster.daemon import start_detached, stop_running
from troupe.cluster.errors import NotPrivate, TransferDirNotWritable
from troupe.cluster.state import (
    close_to_others,
    read_state,
    require_token,
    running_state,
    sign_in_link,
    token_path,
)
from troupe.disks import Scratch, memory_root, private_directory
from troupe.rpc.errors import InvalidArgument, Unauthenticated
from troupe.rpc.tokens import ClusterRecord, local_token, read_token
from troupe.transfer import Transfer

ROOT = Path(__file__).resolve().parents[2]
NOBODY = 65534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ClusterSettings]:
    write_stub_services(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.delenv("TROUPE_TOKEN", raising=False)
    yield ClusterSettings(data_dir=tmp_path / "runs", start_seconds=90, stop_seconds=10)
    if running_state(tmp_path / "runs"):
        stop_running(tmp_path / "runs")


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


async def test_only_the_user_can_read_the_files_of_a_cluster(settings: ClusterSettings) -> None:
    data_dir = settings.data_dir
    data_dir.mkdir(mode=0o755)
    for name in ("redis/appendonly.aof", "logs/reward.log"):  # of a cluster of an older release
        (data_dir / name).parent.mkdir(mode=0o755)
        (data_dir / name).touch(mode=0o644)
    before = os.umask(0o022)
    try:
        async with EmbeddedCluster(settings) as cluster:
            state = cluster.state
            assert mode(data_dir) == mode(state.transfer_dir) == 0o700
            for path in data_dir.rglob("*"):
                assert mode(path) & 0o077 == 0, path
            token = read_token(token_path(data_dir))
            assert token is not None
            assert len(token.get_secret_value()) >= 43
            told = [json.loads(one.read_text()) for one in data_dir.glob("told-*.json")]
            assert {one["TROUPE_TOKEN"] for one in told} == {token.get_secret_value()}
            # Found by the address alone, and only while the cluster lives.
            for service in state.services:
                expected = None if service.name == "redis" else token
                assert local_token(service.address) == expected, service.name
            port = state.orchestrator_address.rpartition(":")[2]
            assert local_token(f"localhost:{port}") == token
            assert local_token(f"other.host:{port}") is None
            assert local_token("127.0.0.1:1") is None
            assert "/session?code=" in sign_in_link(state)
    finally:
        os.umask(before)
    assert local_token(state.orchestrator_address) is None
    # The next cluster of the directory has the same token, so that clients stay connected.
    assert require_token(data_dir, {}) == token


async def test_a_token_that_is_given_is_kept(
    settings: ClusterSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TROUPE_TOKEN", "of-the-environment")
    data_dir = settings.data_dir
    assert require_token(data_dir, {}).get_secret_value() == "of-the-environment"
    assert require_token(data_dir, {"TROUPE_TOKEN": "own"}).get_secret_value() == "own"
    monkeypatch.delenv("TROUPE_TOKEN")
    assert require_token(data_dir, {}).get_secret_value() == "own"
    monkeypatch.setenv("TROUPE_TOKEN", "not sendable ")
    with pytest.raises(InvalidArgument, match="TROUPE_TOKEN"):
        require_token(data_dir, {})


def test_passwords_are_on_no_command_line(settings: ClusterSettings) -> None:
    named = settings.model_copy(update={"environment": {"SECRET": "hush-hush"}, "panel": False})
    state = start_detached(named)
    pids = [state.supervisor_pid, *(service.pid for service in state.services)]
    lines = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in pids]
    assert all(lines)
    token = read_token(token_path(settings.data_dir))
    assert token is not None
    for secret in ("hush-hush", token.get_secret_value(), state.redis_url.split("@")[0]):
        assert not any(secret.encode() in line for line in lines)


def test_a_record_is_believed_while_its_supervisor_lives(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.touch(mode=0o600)
    path.write_text("secret\n")
    script = textwrap.dedent(
        f"""
        import time
        from pathlib import Path
        from troupe.rpc.tokens import ClusterRecord
        record = ClusterRecord("test-{os.getpid()}", Path({str(path)!r}), ["127.0.0.1:7"])
        print("ready", flush=True)
        time.sleep(60)
        """
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, cwd=ROOT) as one:
        assert one.stdout is not None
        one.stdout.readline()
        found = local_token("127.0.0.1:7")
        assert found is not None
        assert found.get_secret_value() == "secret"
        path.chmod(0o640)  # a file that others may read holds no secret
        assert local_token("127.0.0.1:7") is None
        path.chmod(0o600)
        one.send_signal(signal.SIGKILL)
    assert local_token("127.0.0.1:7") is None
    left = memory_root() / f"troupe-{os.geteuid()}-clusters" / f"test-{os.getpid()}.json"
    assert left.exists()
    ClusterRecord(f"next-{os.getpid()}", path, []).close()
    assert not left.exists()


# --- what another user made before ------------------------------------------------------------


@needs_root
async def test_a_data_directory_of_another_user_is_refused(settings: ClusterSettings) -> None:
    data_dir = settings.data_dir
    data_dir.mkdir()
    os.chown(data_dir, NOBODY, NOBODY)
    with pytest.raises(NotPrivate, match="uid 65534"):
        await EmbeddedCluster(settings).start()
    with pytest.raises(NotPrivate, match="chown"):
        start_detached(settings)
    os.chown(data_dir, 0, 0)
    (data_dir / ".troupe").mkdir()
    planted = data_dir / ".troupe" / "token"
    planted.write_text("known")
    os.chown(planted, NOBODY, NOBODY)
    with pytest.raises(NotPrivate, match="token"):
        close_to_others(data_dir)
    assert read_token(planted) is None


def made_by(owner: int, path: Path, permissions: int) -> None:
    path.mkdir()
    path.chmod(permissions)
    os.chown(path, owner, owner)


def linked(path: Path) -> None:
    target = path.with_name(f"{path.name}-target")
    target.mkdir(mode=0o700)
    path.symlink_to(target)


PLANTED: dict[str, Callable[[Path], None]] = {
    "another user's": lambda path: made_by(NOBODY, path, 0o700),
    "writable by all": lambda path: made_by(0, path, 0o777),
    "writable by a group": lambda path: made_by(0, path, 0o770),
    "a link": linked,
    "a file": lambda path: path.touch(),
}


@needs_root
@pytest.mark.parametrize("how", PLANTED)
async def test_a_foreseeable_directory_that_may_be_anothers_is_refused(
    settings: ClusterSettings, how: str
) -> None:
    shared = settings.data_dir.parent / "shm"
    shared.mkdir()
    shared.chmod(0o1777)
    path = shared / "troupe-0-mark"
    PLANTED[how](path)
    with pytest.raises((PermissionError, NotADirectoryError)):
        private_directory(path)
    with pytest.raises(InvalidArgument, match="cannot be used") as caught:
        Transfer(path)
    assert caught.value.kind == "transfer_root_unusable"
    with pytest.raises(InvalidArgument, match="cannot be used"):
        Transfer(shared.parent / "own", fallback=path)
    given = settings.model_copy(update={"transfer_dir": path, "panel": False})
    with pytest.raises(TransferDirNotWritable, match="TROUPE_TRANSFER_DIR"):
        await EmbeddedCluster(given).start()


def test_an_own_directory_is_made_or_closed(tmp_path: Path) -> None:
    made = private_directory(tmp_path / "a")
    assert mode(made) == 0o700
    made.chmod(0o755)
    assert mode(private_directory(made)) == 0o700


@needs_root
def test_a_sweep_keeps_other_users_directories_and_targets_of_links(tmp_path: Path) -> None:
    made_by(NOBODY, tmp_path / "troupe-x-theirs", 0o700)
    precious = tmp_path / "precious"
    precious.mkdir()
    (tmp_path / "troupe-x-link").symlink_to(precious)
    with Scratch("troupe-x-", tmp_path):
        assert (tmp_path / "troupe-x-theirs").is_dir()
        assert precious.is_dir()


# --- real services, a real other user ---------------------------------------------------------

INTRUDER = textwrap.dedent(
    """
    import json, os, sys, urllib.error, urllib.request
    from pathlib import Path
    import encodings.idna, http.client, ssl  # what a user without our files could not load later
    import grpc
    from troupe.v1 import orchestrator_pb2 as orchestrator_pb
    from troupe.v1 import orchestrator_pb2_grpc as orchestrator_grpc
    from troupe.v1 import reward_pb2 as reward_pb
    from troupe.v1 import reward_pb2_grpc as reward_grpc
    addresses, data_dir, panel, transfer_dir = json.load(sys.stdin)
    os.setgroups([]); os.setgid(65534); os.setuid(65534)
    came_through = []
    def attempt(name, call):
        try:
            call()
        except grpc.RpcError as error:
            if error.code().name not in ("UNAUTHENTICATED", "UNIMPLEMENTED"):
                came_through.append(f"{name}: {error.code().name}")
        except urllib.error.HTTPError as error:
            if error.code != 401:
                came_through.append(f"{name}: {error.code}")
        except PermissionError:
            pass
        else:
            came_through.append(name)
    for address in addresses:
        channel = grpc.insecure_channel(address, [("grpc.enable_http_proxy", 0)])
        jobs = orchestrator_grpc.OrchestratorStub(channel)
        functions = reward_grpc.RewardStub(channel)
        spec = reward_pb.FunctionSpec(name="evil", version="1", entrypoint="subprocess:run")
        attempt(f"{address} list", lambda: jobs.ListJobs(
            orchestrator_pb.ListJobsRequest(), timeout=10))
        attempt(f"{address} submit", lambda: jobs.SubmitJob(
            orchestrator_pb.SubmitJobRequest(spec="x"), timeout=10))
        attempt(f"{address} deploy", lambda: functions.RegisterFunction(
            reward_pb.RegisterFunctionRequest(function=spec), timeout=10))
        attempt(f"{address} call", lambda: functions.Invoke(
            reward_pb.InvokeRequest(name="evil", arguments_json="{}"), timeout=10))
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    for path in ("/api/jobs", "/api/functions", "/api/cluster", "/api/cluster/events"):
        attempt(f"GET {path}", lambda: opener.open(panel + path, timeout=10).read(1))
    post = urllib.request.Request(panel + "/api/jobs", data=b"name: x", method="POST",
                                  headers={"Content-Type": "application/yaml"})
    attempt("POST /api/jobs", lambda: opener.open(post, timeout=10))
    for place in (data_dir, transfer_dir, data_dir + "/logs", data_dir + "/.troupe/token",
                  data_dir + "/.troupe/cluster.json", data_dir + "/redis/redis.conf"):
        attempt(place, lambda: os.listdir(place) if Path(place).is_dir() else open(place).read())
    print(json.dumps(came_through))
"""
)


@pytest.mark.slow
@needs_root
async def test_another_user_reaches_no_file_and_no_service(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.delenv("TROUPE_TOKEN", raising=False)
    monkeypatch.setenv("TROUPE_DATA_DIR", str(tmp_path / "runs"))
    for directory in [tmp_path, *list(tmp_path.parents)[:2]]:  # pytest closes them
        directory.chmod(0o755)
    settings = ClusterSettings(data_dir=tmp_path / "runs")
    async with EmbeddedCluster(settings) as cluster:
        state = cluster.state
        addresses = [s.address for s in state.services if s.name not in ("redis", "control_panel")]
        given = [addresses, str(state.data_dir), state.panel_url, str(state.transfer_dir)]
        done = await asyncio.to_thread(
            subprocess.run,
            [sys.executable, "-c", INTRUDER],
            input=json.dumps(given),
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout) == []
        # Its own user needs to be told nothing.
        async with AsyncClient() as client:
            assert await client.jobs() == []
        async with AsyncClient(state.orchestrator_address) as client:
            assert await client.jobs() == []
        async with AsyncClient(state.orchestrator_address, token="wrong") as client:
            with pytest.raises(Unauthenticated):
                await client.jobs()
        assert settings_for(state.orchestrator_address).token == local_token(
            state.orchestrator_address
        )


@pytest.mark.slow
def test_the_command_line_needs_to_be_told_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("TROUPE_DATA_DIR", str(tmp_path / "runs"))
    # Neither is a dead proxy.
    for name in ("http_proxy", "https_proxy", "all_proxy", "grpc_proxy"):
        for variable in (name, name.upper()):
            monkeypatch.setenv(variable, "http://127.0.0.1:1")
    assert main(["up", "--detach"]) == 0
    try:
        said = capsys.readouterr().out
        assert "/session?code=" in said
        assert main(["status"]) == 0
        assert "trainers wanted" in capsys.readouterr().out
        assert main(["jobs", "list"]) == 0
        # A token of another cluster in the environment is not in the way.
        monkeypatch.setenv("TROUPE_TOKEN", "of-another-cluster")
        assert main(["jobs", "list"]) == 0
        with Client() as client:
            assert client.jobs() == []
        state = read_state(tmp_path / "runs")
        assert state is not None
        assert main(["jobs", "list", "--cluster", state.orchestrator_address]) == 0
    finally:
        assert main(["down"]) == 0
