"""Hosts that fetch for their processes, and pass chunks on to others, through gRPC."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import SecretStr

from tests.support.processes import runs
from tests.support.waiting import PATIENCE, block_until
from troupe.rpc import ClientSettings, InvalidArgument, TroupeError, Unavailable
from troupe.transfer import (
    Choice,
    Corrupt,
    KeyNotFound,
    Transfer,
    TransferTimeout,
    checksum_of,
)
from troupe.transfer.remote import HostOwner, OwnerProcess, Peer, TransferOwner, process, serving

KEY = "job/solver/weights@3"
TOKEN = SecretStr("secret")
SETTINGS = ClientSettings(token=TOKEN)
MIB = 2**20


def state(mib: int = 0, value: int = 0) -> dict[str, torch.Tensor]:
    large = torch.arange(mib * MIB // 4, dtype=torch.int32) + value
    return {"a": torch.randn(5, 2), "large": large}


class Host:
    """An owner and its store."""

    def __init__(self, root: Path) -> None:
        self.transfer = Transfer(root)
        self.owner = TransferOwner(self.transfer, token=TOKEN, use_ucx=False)

    def reach(self, *others: Host) -> Transfer:
        """Return a transfer of this host that reaches `others` through its owner."""
        addresses = [other.owner.address for other in others]
        source = HostOwner(self.owner.address, SETTINGS, locate=lambda key, expected: addresses)
        return Transfer(self.transfer.roots[0], peers=[source])


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[list[Host]]:
    hosts = [Host(tmp_path / str(number)) for number in range(5)]
    yield hosts
    for host in hosts:
        host.owner.stop(0)


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Record the chunks and offsets that any owner sends."""
    sent: list[tuple[int, int]] = []
    real = serving._message

    def message(chunk: int, offset: int, data: memoryview) -> Any:
        sent.append((chunk, offset))
        return real(chunk, offset, data)

    monkeypatch.setattr(serving, "_message", message)
    return sent


def test_processes_of_one_host_fetch_once(hosts: list[Host], sent: list[tuple[int, int]]) -> None:
    manifest = hosts[0].transfer.set(KEY, state(20))
    readers = [hosts[1].reach(hosts[0]) for _ in range(4)]
    got: list[Any] = []
    threads = [threading.Thread(target=lambda r=r: got.append(r.get(KEY))) for r in readers]  # type: ignore[misc]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert [checksum_of(tensors) for tensors, _ in got] == [manifest.checksum] * 4
    assert len(sent) == len(set(sent))
    moves = [next(iter(reader.counters.moves())) for reader in readers]
    assert sorted(move.transport for move in moves)[0] == "grpc"
    assert {move.reason for move in moves} <= {"ucx_not_here", "same_host", "root_on_disk"}


def test_readers_hand_chunks_on_to_later_readers(
    hosts: list[Host], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = hosts[0].transfer.set(KEY, state(64))
    served: list[str] = []
    real = serving.Servicer._source

    def source(self: Any, request: Any) -> Any:
        served.append(next(h.owner.address for h in hosts if h.transfer is self._transfer))
        time.sleep(0.05)
        return real(self, request)

    monkeypatch.setattr(serving.Servicer, "_source", source)
    readers = [host.reach(hosts[0]) for host in hosts[1:]]
    threads = [threading.Thread(target=reader.get, args=[KEY]) for reader in readers]
    for number, thread in enumerate(threads, 1):
        thread.start()
        block_until(lambda: len(served) >= number)  # noqa: B023 - within this turn
    for thread in threads:
        thread.join(PATIENCE)
    assert {r.manifest(KEY).checksum for r in readers} == {manifest.checksum}
    # Nine chunks: chains of two. The owner sends half of what its readers get.
    assert served.count(hosts[0].owner.address) == 2
    assert len(served) == 4


def test_a_reader_that_dies_is_routed_around(
    hosts: list[Host], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "_PATIENCE_SECONDS", 0.5)
    manifest = hosts[0].transfer.set(KEY, state(64))
    inner, outer = hosts[1].reach(hosts[0]), hosts[2].reach(hosts[0])
    real, count = serving._message, 0

    def message(chunk: int, offset: int, data: memoryview) -> Any:
        nonlocal count
        count += 1
        if count == 12:  # the third chunk: the inner reader has handed on two
            threading.Thread(target=hosts[1].owner.stop, args=[0]).start()
        time.sleep(0.02)
        return real(chunk, offset, data)

    monkeypatch.setattr(serving, "_message", message)
    first = threading.Thread(target=lambda: _quietly(inner.get, KEY))
    first.start()
    block_until(lambda: count)
    got, _ = outer.get(KEY, timeout=PATIENCE)
    assert checksum_of(got) == manifest.checksum
    first.join(PATIENCE)


def _quietly(act: Any, *args: Any) -> None:
    with contextlib.suppress(TroupeError):
        act(*args)


def test_only_what_changed_is_moved(hosts: list[Host], sent: list[tuple[int, int]]) -> None:
    old = {f"layer{i}": torch.full((3 * MIB,), float(i)) for i in range(4)}
    new = {**old, "layer2": old["layer2"] + 100}
    here = hosts[1].reach(hosts[0])
    hosts[0].transfer.set("job/solver/weights@1", old)
    here.get("job/solver/weights@1")
    whole = len(sent)
    manifest = hosts[0].transfer.set("job/solver/weights@2", new, base="job/solver/weights@1")
    got, _ = here.get("job/solver/weights@2")
    assert checksum_of(got) == manifest.checksum
    assert len(sent) - whole == whole / 4
    # The reader asks for it instead.
    hosts[0].transfer.set("job/solver/weights@5", {**new, "layer0": old["layer0"] + 9})
    before = len(sent)
    here.get("job/solver/weights@5", base="job/solver/weights@2")
    assert len(sent) - before == whole / 4


def test_state_with_another_checksum_does_not_hide_the_right_one(hosts: list[Host]) -> None:
    wrong, right, here = hosts[0], hosts[1], hosts[2].reach(hosts[0], hosts[1])
    wrong.transfer.set(KEY, state(value=1))
    manifest = right.transfer.set(KEY, state(value=2))
    got, _ = here.get(KEY, expected_checksum=manifest.checksum)
    assert checksum_of(got) == manifest.checksum
    # The state here is replaced, too; and kept when no host has the other.
    newer = right.transfer.set(KEY, state(value=3))
    assert here.get(KEY, expected_checksum=newer.checksum)[1].checksum == newer.checksum
    with pytest.raises(Corrupt, match="expected"):
        here.get(KEY, expected_checksum="0" * 32)
    assert here.manifest(KEY) == newer


def test_a_deleted_version_stays_for_its_readers(
    hosts: list[Host], monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = hosts[0].transfer.set(KEY, state(24))
    real, count = serving._message, 0

    def message(chunk: int, offset: int, data: memoryview) -> Any:
        nonlocal count
        count += 1
        if count == 5:
            hosts[0].transfer.delete(KEY)
            raise Unavailable("the connection broke")
        return real(chunk, offset, data)

    monkeypatch.setattr(serving, "_message", message)
    got, _ = hosts[1].reach(hosts[0]).get(KEY)
    assert checksum_of(got) == manifest.checksum
    # It had the whole state: now it is gone.
    with pytest.raises(KeyNotFound):
        hosts[2].reach(hosts[0]).get(KEY)


def test_a_state_fetched_ahead_is_forgotten_on_request(hosts: list[Host]) -> None:
    hosts[0].transfer.set(KEY, state(2))
    here = hosts[1].reach(hosts[0])
    here.set("job/solver/own@1", state())
    manifest, choice = here.fetch(KEY)
    assert (manifest.key, choice.transport) == (KEY, "grpc")
    assert here.fetch(KEY)[1].transport in ("shared_memory", "file")
    # Another process of the host names the states that came from elsewhere.
    assert Transfer(here.roots[0]).forget_fetched("job/") == 1
    assert here.keys() == ["job/solver/own@1"]
    with pytest.raises(TransferTimeout):
        here.fetch("job/solver/weights@9", timeout=0.3)


def test_values_without_a_version_are_deleted_from_another_host(hosts: list[Host]) -> None:
    there, peer = hosts[0].transfer, Peer(hosts[0].owner.address, SETTINGS)
    there.set("job/column", state())
    with pytest.raises(InvalidArgument, match="has a version"):
        peer.delete(["job/column", KEY])
    assert peer.delete(["job/column", "job/none"]) == 1
    assert not there.exists("job/column")
    peer.close()


def test_only_its_own_host_has_an_owner_fetch() -> None:
    assert serving.from_here("ipv4:127.0.0.1:5000")
    assert serving.from_here("ipv6:%5B::1%5D:5000")
    assert serving.from_here("unix:/tmp/x")
    assert not serving.from_here("ipv4:10.0.0.7:5000")
    assert not serving.from_here("ipv6:%5Bfe80::1%5D:5000")


@pytest.mark.slow
def test_an_owner_process_that_is_killed_comes_back_at_its_port(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    there = Transfer(tmp_path / "there")
    manifest = there.set(KEY, state(1))
    remote = OwnerProcess(there.roots, settings=SETTINGS, use_ucx=False)
    near = OwnerProcess([tmp_path / "here"], settings=SETTINGS, use_ucx=False)
    try:
        addresses = [remote.address]
        source = HostOwner(near.local, SETTINGS, locate=lambda key, expected: addresses)
        here = Transfer(tmp_path / "here", peers=[source])
        for victim in (remote, near):
            before = victim.pid
            os.kill(before, signal.SIGSEGV)
            # The fetch waits for any host that is away.
            got, _ = here.get(KEY, timeout=PATIENCE)
            assert checksum_of(got) == manifest.checksum
            here.delete(KEY)
            assert (victim.restarts, victim.pid != before) == (1, True)
        assert here.counters.moves() == {Choice("get", "grpc", "ucx_not_here"): 2}
        stolen = Peer(remote.address, ClientSettings(token=SecretStr("wrong")))
        with pytest.raises(TroupeError, match="bearer token"):
            stolen.delete(["job/state"])
    finally:
        near.close()
        remote.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", remote.port), timeout=PATIENCE)


@pytest.mark.slow
def test_an_owner_process_reports_a_port_in_use(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(Unavailable) as caught:
        OwnerProcess([tmp_path], port=taken.getsockname()[1], settings=SETTINGS)
    assert caught.value.field == "port"


PARENT = """
import sys, pathlib, time
from troupe.transfer.remote import OwnerProcess
print(OwnerProcess([pathlib.Path(sys.argv[1])], use_ucx=False).pid, flush=True)
time.sleep(600)
"""


@pytest.mark.slow
def test_an_owner_process_ends_with_its_parent(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PARENT, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        parent.kill()
    block_until(lambda: not runs(pid))
