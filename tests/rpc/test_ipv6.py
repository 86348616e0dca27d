"""IPv6: addresses as text, and services, clients and tools at `::1`."""

from __future__ import annotations

import asyncio
import ipaddress
import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import grpc
import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import SecretStr

from services.chassis.app import serve
from services.chassis.redis import RedisClient
from services.chassis.settings import ServiceSettings
from tests.chassis.echo_service import Echo
from tests.support.fake_orchestrator import FakeOrchestrator
from tests.support.fake_orchestrator import serve as serve_orchestrator
from tests.support.redis_server import RedisServer
from tests.support.waiting import PATIENCE
from tests.workflow.stage import Script, make_agents, make_chat
from troupe.client import AsyncClient
from troupe.client.cli.app import main
from troupe.cluster.embedded import is_free, pick_ports
from troupe.cluster.redis import require_redis
from troupe.cluster.settings import ClusterSettings
from troupe.endpoint.server import EndpointServer
from troupe.job.sections.policy import EngineSpec
from troupe.rpc import NO_RETRY, ClientSettings, InvalidArgument, TroupeError, connect
from troupe.rpc.addresses import (
    has_ipv6,
    host_of,
    http_url,
    is_loopback_host,
    is_wildcard_host,
    join_address,
    local_host,
    reachable_host,
    split_address,
)
from troupe.rpc.redis import shown
from troupe.transfer.remote.process import OwnerProcess
from troupe.transfer.remote.serving import from_here

ROOT = Path(__file__).resolve().parents[2]
needs_ipv6 = pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6 loopback")
ADDRESSES = st.ip_addresses().map(str)
PORTS = st.integers(1, 65535)
WILDCARDS = ("", "*", "0", "0.0.0.0", "::", "[::]", "0:0:0:0:0:0:0:0")


# --- as text ----------------------------------------------------------------------------------


@given(ADDRESSES, PORTS)
def test_joined_addresses_split_into_the_same_parts(host: str, port: int) -> None:
    assert split_address(join_address(host, port)) == (host, str(port))
    assert host_of(join_address(host, port)) == host_of(http_url(host, port))
    assert ipaddress.ip_address(host_of(http_url(host, port))) == ipaddress.ip_address(host)
    assert httpx.URL(http_url(host, port)).host == host
    assert join_address(f"[{host}]" if ":" in host else host, port) == join_address(host, port)


def test_a_port_or_a_host_may_be_missing() -> None:
    assert split_address("[::1]") == ("::1", "")
    assert split_address("50051") == ("", "50051")
    assert split_address("fd00::1:50051") == ("fd00::1", "50051")


@pytest.mark.parametrize("host", WILDCARDS)
def test_a_wildcard_address_is_advertised_as_the_host_s_name(host: str) -> None:
    assert is_wildcard_host(host)
    assert reachable_host(host) == socket.gethostname()
    assert is_loopback_host(local_host(host))
    assert not is_wildcard_host(local_host(host))


@given(ADDRESSES)
def test_an_address_of_one_interface_is_told_as_it_is(host: str) -> None:
    if not is_wildcard_host(host):
        assert local_host(host) == reachable_host(host) == host


@pytest.mark.parametrize("host", ["::1", "[::1]", "127.0.0.1", "::ffff:127.0.0.1", "localhost"])
def test_loopback_is_known_in_every_form(host: str) -> None:
    assert is_loopback_host(host)


@pytest.mark.parametrize(
    ("peer", "near"),
    [
        ("ipv6:%5B::1%5D:4711", True),
        ("ipv6:[::1]:4711", True),
        ("ipv6:%5B::ffff:127.0.0.1%5D:4711", True),
        ("ipv4:127.0.0.1:4711", True),
        ("unix:", True),
        ("ipv6:%5Bfd00::1%5D:4711", False),
        ("ipv4:10.0.0.1:4711", False),
    ],
)
def test_callers_of_this_host_are_known_by_their_peer(peer: str, near: bool) -> None:
    assert from_here(peer) is near


@pytest.mark.parametrize("host", WILDCARDS)
def test_a_service_on_all_interfaces_advertises_the_name_of_its_machine(host: str) -> None:
    settings = ServiceSettings(host=host, port=80)
    assert settings.address == f"{socket.gethostname()}:80"
    assert ClusterSettings(host=host).reachable_host == socket.gethostname()


def test_a_service_on_one_interface_advertises_that() -> None:
    assert ServiceSettings(host="fd00::5", port=80).address == "[fd00::5]:80"
    assert ClusterSettings(host="fd00::5").reachable_host == "fd00::5"
    assert ClusterSettings(host="10.0.0.5").reachable_host == "10.0.0.5"
    assert ClusterSettings(host="10.0.0.5", advertise="h").reachable_host == "h"


def test_a_redis_at_an_ipv6_address_is_shown_with_brackets() -> None:
    assert shown("redis://:secret@[fd00::1]:6380/2") == "[fd00::1]:6380/2"
    assert shown("redis-cluster://:x@[fd00::1]:1,[fd00::2]:2") == "[fd00::1]:1,[fd00::2]:2"


def test_a_host_of_another_machine_cannot_be_listened_on() -> None:
    for host in ("192.0.2.1", "2001:db8::1", "no-such-host.invalid"):
        with pytest.raises(TroupeError, match="cannot listen") as caught:
            pick_ports(["a"], host=host)
        assert "--host" in str(caught.value)


# --- at ::1 -----------------------------------------------------------------------------------


@needs_ipv6
async def test_a_service_is_called_probed_and_measured_at_ipv6_loopback() -> None:
    async with serve(Echo(), ServiceSettings(host="::1")) as server:
        assert server.address == f"[::1]:{server.settings.port}"
        async with connect(server.address, ClientSettings(retry=NO_RETRY)) as channel:
            await channel.unary_unary("/grpc.health.v1.Health/Check")(b"", timeout=PATIENCE)
        probe = [sys.executable, "-m", "services.chassis.probe", server.address]
        done = await asyncio.to_thread(subprocess.run, probe, cwd=ROOT, timeout=PATIENCE)
        assert done.returncode == 0
        async with httpx.AsyncClient() as client:
            metrics = await client.get(http_url("::1", server.metrics_port) + "/metrics")
        assert metrics.status_code == 200


@needs_ipv6
@pytest.mark.parametrize(
    "host",
    [
        "::1",
        "[::1]",
        "::",
        "[::]",
        "127.0.0.1",
        "0.0.0.0",
        "",
        "*",
        "localhost",
    ],
)
async def test_the_endpoint_is_reached_at_the_address_that_it_tells(host: str) -> None:
    chat = make_chat()
    script = Script(lambda agent, prompt, sampling: [*chat.encode("hello"), 2])
    server = EndpointServer(host)
    try:
        _, endpoint = server.open(make_agents(script, chat)["solver"])
        hosts = {httpx.URL(endpoint.base_url).host}
        if host in ("::", ""):
            hosts.add("127.0.0.1")
        body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
        async with httpx.AsyncClient() as client:
            for one in hosts:
                url = httpx.URL(endpoint.base_url + "/chat/completions").copy_with(host=one)
                assert (await client.post(url, json=body, timeout=PATIENCE)).status_code == 200
    finally:
        await server.stop()
    if host == "::":
        assert hosts == {"::1", "127.0.0.1"}


def test_an_invalid_endpoint_host_names_its_setting() -> None:
    with pytest.raises(TroupeError, match="TROUPE_ENDPOINT_HOST"):
        EndpointServer("192.0.2.1").listen()


@needs_ipv6
@pytest.mark.parametrize("host", ["::1", "::", "0.0.0.0"])
def test_the_transfer_owner_is_reached_at_the_address_that_it_tells(
    tmp_path: Path, host: str
) -> None:
    settings = ClientSettings(token=SecretStr("secret"))
    owner = OwnerProcess([tmp_path], host=host, settings=settings, use_ucx=False)
    try:
        near, _ = split_address(owner.local)
        assert is_loopback_host(near)
        far, _ = split_address(owner.address)
        assert far == reachable_host(host)
        with grpc.insecure_channel(owner.local) as channel:
            grpc.channel_ready_future(channel).result(timeout=PATIENCE)
    finally:
        owner.close()


def test_inference_servers_may_be_at_ipv6_addresses() -> None:
    urls = ["http://[::1]:30000", "http://[fd00::1]:30000"]
    assert EngineSpec(kind="sglang", urls=urls).urls == urls


@pytest.fixture
def redis_at_ipv6(tmp_path: Path) -> Iterator[str]:
    server = RedisServer(tmp_path, extra=("--bind", "127.0.0.1", "::1"))
    server.start()
    yield f"redis://[::1]:{server.port}/0"
    server.stop()


@needs_ipv6
async def test_redis_is_reached_at_ipv6_loopback(redis_at_ipv6: str) -> None:
    client = RedisClient(
        redis_at_ipv6, {}, name="test", retries=NO_RETRY, timeout=PATIENCE, patience=PATIENCE
    )
    await client.wait_ready()
    await client.ping()
    assert client.address.startswith("[::1]:")
    await client.close()
    await require_redis(redis_at_ipv6, timeout=PATIENCE)


@needs_ipv6
async def test_the_client_and_the_command_call_an_orchestrator_at_ipv6_loopback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async with serve_orchestrator(FakeOrchestrator(), host="::1") as address:
        assert address.startswith("[::1]:")
        async with AsyncClient(address) as client:
            jobs = await client.jobs()
        monkeypatch.setenv("TROUPE_ORCHESTRATOR_ADDRESS", address)
        assert await asyncio.to_thread(main, ["jobs", "list", "--json"]) == 0
        assert len(json.loads(capsys.readouterr().out)) == len(jobs)


def test_a_client_refuses_an_ipv6_address_without_brackets() -> None:
    with pytest.raises(InvalidArgument, match=r"\[::1\]:50051"):
        AsyncClient("::1:50051")


@needs_ipv6
def test_a_port_that_is_taken_at_one_family_is_free_at_the_other() -> None:
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as taken:
        port = taken.getsockname()[1]
        assert not is_free(port, "::1")
