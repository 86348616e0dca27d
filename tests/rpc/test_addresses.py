"""Addresses: their passwords are never shown, and the cluster's own need no proxy."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import textwrap
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.chassis.app import serve
from services.chassis.settings import ServiceSettings
from tests.chassis.echo_service import Echo
from tests.support.waiting import PATIENCE
from troupe.client.cli.failures import explain
from troupe.cluster.redis import require_redis
from troupe.functions.library.judge import ChatError, complete
from troupe.job import JobSpecError, parse_job
from troupe.rpc import (
    ClientSettings,
    FailedPrecondition,
    InvalidArgument,
    TroupeError,
    Unavailable,
    connect,
    connect_sync,
)
from troupe.rpc.addresses import (
    bypass_proxy,
    host_of,
    is_loopback_host,
    join_address,
    split_address,
    without_secrets,
)
from troupe.v1 import reward_pb2 as reward_pb
from troupe.v1 import reward_pb2_grpc as reward_grpc

ROOT = Path(__file__).resolve().parents[2]


# --- secrets ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("redis://:secret@h:1/0", "redis://***@h:1/0"),
        ("redis://user:secret@h", "redis://***@h"),
        ("rediss://:p@ss@h:1", "rediss://***@h:1"),
        ("redis://:pa/ss?w#d@h:1/0", "redis://***@h:1/0"),
        ("redis://:12/34@h", "redis://***@h"),
        ("redis-cluster://:a@h:1,h2:2", "redis-cluster://***@h:1,h2:2"),
        ("http://h:80/x,redis://:secret@h2", "http://h:80/x,redis://***@h2"),
        ("redis://:a'b\"c@h", "redis://***@h"),
        ("redis://:a://b@h", "redis://***@h"),
        ("https://u:secret@[::1]:8/v1 failed", "https://***@[::1]:8/v1 failed"),
        ("https://to%ken,x'y@host/x", "https://***@host/x"),
        ("https://token@host/x", "https://***@host/x"),
        ("['http://u:a@g:1', 'http://u:b@g:2']", "['http://***@g:1', 'http://***@g:2']"),
        ("redis://h?password=secret&db=1", "redis://h?password=***&db=1"),
        ("http://h/v1?api_key=secret", "http://h/v1?api_key=***"),
        ("http://h:80/jobs/x?member=player@5", "http://h:80/jobs/x?member=player@5"),
        ("http://[::1]:80/t/solver@2/v1", "http://[::1]:80/t/solver@2/v1"),
        ("mail me@example.org, see a://b", "mail me@example.org, see a://b"),
        ("no address at all", "no address at all"),
    ],
)
def test_addresses_are_shown_without_secrets(text: str, shown: str) -> None:
    assert without_secrets(text) == shown
    error = InvalidArgument(f"{text} x", field="f", value=text, remedy=text)
    again = TroupeError.from_problem(error.to_problem())
    for told in (error, again):
        assert told.value == shown
        assert str(told) == f"f = {shown}: {shown} x. {shown}"


@given(
    st.sampled_from(["redis", "rediss", "http", "https", "postgres+x"]),
    st.text(st.characters(exclude_categories=["Z", "C"]), min_size=4),
)
def test_no_password_is_shown(scheme: str, password: str) -> None:
    secret = f"%{password}%"  # so that it is in nothing else
    for user in (f"user:{secret}", f":{secret}", f"x{secret}"):
        text = f"cannot reach {scheme}://{user}@host:80/x: refused"
        assert secret not in without_secrets(text)
        assert secret not in str(InvalidArgument(text, value=text))


def test_hiding_takes_time_in_proportion() -> None:
    def seconds(count: int) -> float:
        text = "a://" + "a" * count + "?key=" * count + "://" * count + "@" * count
        started = time.thread_time()
        without_secrets(text)
        return time.thread_time() - started

    seconds(1000)
    small, large = (min(seconds(n) for _ in range(3)) for n in (4_000, 32_000))
    assert large < 8 * 6 * small + 0.2


async def test_errors_show_no_passwords() -> None:
    with pytest.raises(Unavailable) as caught:
        await require_redis("redis://:hush@127.0.0.1:1/0", timeout=2.0)
    assert "hush" not in "".join(explain(caught.value)[0])
    with pytest.raises(FailedPrecondition) as caught:
        await require_redis("nonsense://:hush@h", timeout=2.0)
    assert "hush" not in str(caught.value)
    assert "hush" not in "".join(explain(RuntimeError("at http://u:hush@h"))[0])
    spec = """
    name: x
    workflow: "m:w"
    tasks: {source: "m:T"}
    agents: {a: {policy: p}}
    policies: {p: {model: {path: x}, engine: {kind: sglang, urls: ["ftp://u:hush@gpu:1"]}}}
    pipeline: {steps: 1, queries_per_step: {x: "http://u:hush@aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"}}
    """
    with pytest.raises(JobSpecError) as wrong:
        parse_job(spec)
    assert "hush" not in str(wrong.value)
    assert not any("hush" in str(one) for one in wrong.value.problems)
    with pytest.raises(ChatError) as refused:
        next(complete("http://u:hush@127.0.0.1:1/v1", {}, attempts=1, seconds=5))
    assert "hush" not in str(refused.value)


def test_logs_show_no_passwords() -> None:
    script = textwrap.dedent(
        """
        import logging, sys, structlog
        from services.chassis import logs
        logs.configure("s", "info", sys.argv[1])
        structlog.get_logger("x").info("redis", url="redis://:hush@h:1/0")
        logging.getLogger("lib").warning("at %s", "http://u:hush@h")
        try:
            raise ValueError("of redis://:hush@h")
        except ValueError:
            structlog.get_logger("x").exception("failed")
        """
    )
    for style in ("json", "console"):
        done = subprocess.run(
            [sys.executable, "-c", script, style], capture_output=True, text=True, cwd=ROOT
        )
        assert done.stderr.count("***@h") >= 3
        assert "hush" not in done.stderr


# --- proxies ----------------------------------------------------------------------------------


class RecordingProxy:
    """Takes connections, answers 502 and remembers the first line of each."""

    def __init__(self) -> None:
        self._server = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._server.getsockname()[1]}"
        self.asked: list[str] = []
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._server.accept()
                with connection:
                    connection.settimeout(2)
                    with contextlib.suppress(OSError):
                        self.asked.append(connection.recv(4096).split(b"\r\n")[0].decode())
                        connection.sendall(b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 0\r\n\r\n")

    def close(self) -> None:
        self._server.close()


VARIABLES = ["http_proxy", "https_proxy", "all_proxy", "grpc_proxy"]
VARIABLES += [name.upper() for name in VARIABLES]


@pytest.fixture
def proxy(monkeypatch: pytest.MonkeyPatch) -> Iterator[RecordingProxy]:
    proxy = RecordingProxy()
    for name in VARIABLES:
        monkeypatch.setenv(name, proxy.url)
    for name in ("no_proxy", "NO_PROXY", "no_grpc_proxy", "TROUPE_PROXY"):
        monkeypatch.setenv(name, "")  # so that the settings below are undone
        monkeypatch.delenv(name)
    yield proxy
    proxy.close()


async def test_calls_between_services_pass_no_proxy(proxy: RecordingProxy) -> None:
    async with serve(Echo(), ServiceSettings()) as server:
        port = server.address.rpartition(":")[2]
        for host in ("127.0.0.1", "localhost"):
            async with connect(f"{host}:{port}") as channel:
                await channel.unary_unary("/grpc.health.v1.Health/Check")(b"", timeout=PATIENCE)
            with connect_sync(f"{host}:{port}") as plain:
                call = plain.unary_unary("/grpc.health.v1.Health/Check")
                await asyncio.to_thread(call, b"", timeout=PATIENCE)
        probe = [sys.executable, "-m", "services.chassis.probe", server.address]
        done = await asyncio.to_thread(subprocess.run, probe, cwd=ROOT, timeout=PATIENCE)
        assert done.returncode == 0
    async with connect("no-such-host.invalid:1", _hasty()) as channel:
        with pytest.raises(TroupeError):
            await reward_grpc.RewardStub(channel).ListFunctions(reward_pb.ListFunctionsRequest())
    assert proxy.asked == []


def _hasty(**more: bool) -> ClientSettings:
    return ClientSettings(deadline_seconds=3, **more)


async def test_other_hosts_are_reached_through_a_proxy_when_told(proxy: RecordingProxy) -> None:
    async with connect("no-such-host.invalid:1", _hasty(proxy=True)) as channel:
        with pytest.raises(TroupeError):
            await reward_grpc.RewardStub(channel).ListFunctions(reward_pb.ListFunctionsRequest())
    assert any("no-such-host.invalid:1" in line for line in proxy.asked)
    async with connect("127.0.0.1:1", _hasty(proxy=True)) as channel:
        with pytest.raises(TroupeError):
            await reward_grpc.RewardStub(channel).ListFunctions(reward_pb.ListFunctionsRequest())
    assert not any("CONNECT 127.0.0.1" in line for line in proxy.asked)


def test_http_clients_reach_the_cluster_without_a_proxy(
    proxy: RecordingProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("no_proxy", "of.mine, .lab")
    settings = ServiceSettings(
        orchestrator_address="head:50051", redis_url="redis://:x@store.cluster:1/0"
    )
    bypass_proxy(settings.cluster_addresses)
    listed = os.environ["no_proxy"].split(",")
    assert listed == os.environ["NO_PROXY"].split(",")
    assert {"of.mine", ".lab", "head", "store.cluster", "127.0.0.1", "localhost"} <= set(listed)
    bypass_proxy(settings.cluster_addresses)
    assert os.environ["no_proxy"].split(",") == listed  # repeatable
    assert urllib.request.proxy_bypass("127.0.0.1:8")
    assert urllib.request.proxy_bypass("head")
    assert not urllib.request.proxy_bypass("example.org")
    with httpx.Client() as client:
        for url in ("http://127.0.0.1:1/", "http://localhost:1/", "http://[::1]:1/"):
            with pytest.raises(httpx.ConnectError):
                client.get(url)
        assert proxy.asked == []
        assert client.get("http://example.invalid/").status_code == 502
    assert len(proxy.asked) == 1
    # Told to use it: only loopback is still reached straight.
    monkeypatch.setenv("TROUPE_PROXY", "1")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name)
    bypass_proxy(settings.cluster_addresses)
    assert os.environ["no_proxy"] == "localhost,127.0.0.1,::1"


def test_a_judge_on_this_machine_is_asked_without_a_proxy(proxy: RecordingProxy) -> None:
    with pytest.raises(ChatError, match=r"127\.0\.0\.1:1"):
        next(complete("http://127.0.0.1:1/v1", {}, attempts=1, seconds=5))
    assert proxy.asked == []
    with pytest.raises(ChatError):
        next(complete("http://judge.invalid/v1", {}, attempts=1, seconds=5))
    assert proxy.asked


def test_hosts_of_addresses() -> None:
    assert host_of("[::1]:8") == "::1"
    assert host_of("redis://:x@h:1/0") == "h"
    assert host_of("head:50051") == "head"
    assert host_of("") == ""
    assert host_of("http://user:pass@[FD00::7]:80/path@x") == "fd00::7"
    for vague in (
        "[127.0.0.1]evil:1",
        "[::1]evil",
        "localhost:80@",
        "h:1:2",
        "[h]:1",
        "http://h:x",
    ):
        assert host_of(vague) == "", vague
    assert host_of("localhost:80@evil:1") == "evil"
    assert is_loopback_host("127.9.9.9")
    assert is_loopback_host("[::1]")
    assert not is_loopback_host("[::1")
    assert not is_loopback_host("127.0.0.1]")
    assert not is_loopback_host("[127.0.0.1]")
    assert not is_loopback_host("localhost.evil.example")


@pytest.mark.parametrize(
    ("host", "address"),
    [
        ("n1", "n1:80"),
        ("127.0.0.1", "127.0.0.1:80"),
        ("fd00::1", "[fd00::1]:80"),
        ("::", "[::]:80"),
    ],
)
def test_addresses_of_hosts(host: str, address: str) -> None:
    assert join_address(host, 80) == address == join_address(*split_address(address))
    assert split_address(address) == (host, "80")


def test_a_pod_with_an_ipv6_address_is_reached_at_it() -> None:
    settings = ServiceSettings(advertise_address="fd00::1:50051")
    assert settings.address == "[fd00::1]:50051"
    assert ServiceSettings(advertise_address="pod:50051").address == "pod:50051"
    assert ServiceSettings(advertise_address="[fd00::1]:5").address == "[fd00::1]:5"
