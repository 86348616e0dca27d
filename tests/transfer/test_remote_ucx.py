"""States of another process through UCX. Needs the extra `ucx`, hence not in the default run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import SecretStr

from tests.support.waiting import PATIENCE
from tests.transfer.remote_host import KEY, OTHER, state
from troupe.rpc import ClientSettings
from troupe.transfer import Choice, Transfer, TransferTimeout, checksum_of
from troupe.transfer.blob import Verification
from troupe.transfer.checksum import PIECE_BYTES
from troupe.transfer.remote import Peer, lane, reading
from troupe.transfer.remote.serving import UCX_MESSAGE_BYTES

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(lane.missing()), reason=f"UCX cannot be used: {lane.missing()}"),
]
SETTINGS = ClientSettings(token=SecretStr("secret"))
BY_UCX = Choice("get", "ucx", "other_host")


@contextmanager
def host(root: Path, mib: int, *, ucx: bool = True) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Start another process with an owner; yield its address."""
    command = [sys.executable, "-m", "tests.transfer.remote_host"]
    with subprocess.Popen(
        [*command, str(root), "secret", str(int(ucx)), str(mib)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    ) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().strip(), process
        finally:
            process.kill()


@pytest.fixture(params=["near", "tcp", "tcp, a core to spare"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Through shared memory or TCP; of the latter chunks are verified by who receives them, unless
    there is a core for it."""
    way: str = request.param
    if way != "near":
        monkeypatch.setenv("UCX_TLS", "tcp,self")
        monkeypatch.setattr(reading, "_cores", lambda: 2 if way == "tcp" else 4)
    return way


@pytest.mark.usefixtures("way")
def test_two_processes_move_a_state_over_ucx(tmp_path: Path) -> None:
    with host(tmp_path / "there", 100) as (address, _):
        source = Peer(address, SETTINGS)
        here = Transfer(tmp_path / "here", peers=[source])
        for version in range(2):  # the owner serves more than one reader
            got, manifest = here.get(KEY, timeout=PATIENCE)
            assert manifest.checksum == checksum_of(got) == checksum_of(state(100))
            assert here.counters.moves() == {BY_UCX: version + 1}
            here.delete(KEY)
        assert not here.counters.retries()
        source.close()


def test_two_lanes_on_one_host_share_a_read_if_the_owner_supports_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[int] = []
    real, placed = lane.Lane.receive, Peer._place

    def receive(self: lane.Lane, into: memoryview, tag: int) -> Any:
        taken.append(id(self))
        return real(self, into, tag)

    monkeypatch.setattr(lane.Lane, "receive", receive)
    monkeypatch.setattr(reading, "_cores", lambda: 2)
    with host(tmp_path / "there", 100) as (address, _):
        source = Peer(address, SETTINGS)
        here = Transfer(tmp_path / "here", peers=[source])
        for lanes in (2, 1):
            got, manifest = here.get(KEY, timeout=PATIENCE)
            assert checksum_of(got) == manifest.checksum
            counts = Counter(taken).values()
            assert len(counts) == lanes
            assert max(counts) - min(counts) <= 1
            here.delete(KEY)
            taken.clear()

            def of_one_lane(self: Peer, *args: Any) -> Any:
                return replace(placed(self, *args), lanes=1)  # as of an older owner's answer

            monkeypatch.setattr(Peer, "_place", of_one_lane)
        assert not here.counters.retries()
        source.close()


def test_chunks_come_in_messages_if_the_receiver_verifies_and_the_owner_supports_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp,self")
    monkeypatch.setattr(reading, "_cores", lambda: 2)
    taken: list[int] = []
    real, placed = lane.Lane.receive, Peer._place

    def receive(self: lane.Lane, into: memoryview, tag: int) -> Any:
        taken.append(len(into))
        return real(self, into, tag)

    monkeypatch.setattr(lane.Lane, "receive", receive)
    with host(tmp_path / "there", 100) as (address, _):
        source = Peer(address, SETTINGS)
        here = Transfer(tmp_path / "here", peers=[source])
        for largest in (UCX_MESSAGE_BYTES, PIECE_BYTES):
            got, manifest = here.get(KEY, timeout=PATIENCE)
            assert checksum_of(got) == manifest.checksum
            assert max(taken) == largest
            assert sum(taken) >= 100 * 2**20
            here.delete(KEY)
            taken.clear()

            def in_one(self: Peer, *args: Any) -> Any:
                return replace(placed(self, *args), message_bytes=0)  # of an older owner's answer

            monkeypatch.setattr(Peer, "_place", in_one)
        assert not here.counters.retries()
        source.close()


def test_a_lane_that_fails_ends_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, failed = lane.Lane.wait, threading.Event()

    def wait(self: lane.Lane, *args: Any, **kwargs: Any) -> None:
        if threading.current_thread().name.startswith("transfer-check") and not failed.is_set():
            failed.set()
            raise lane.LaneBroken("as if the peer had gone")
        real(self, *args, **kwargs)

    monkeypatch.setattr(lane.Lane, "wait", wait)
    monkeypatch.setattr(reading, "_cores", lambda: 2)
    with host(tmp_path / "there", 100) as (address, _):
        source = Peer(address, SETTINGS)
        here = Transfer(tmp_path / "here", peers=[source])
        got, manifest = here.get(KEY, timeout=PATIENCE)
        assert failed.is_set()
        assert checksum_of(got) == manifest.checksum
        assert here.counters.retries() == {"broken_connection": 1}
        assert here.counters.moves() == {BY_UCX: 1}
        source.close()


def test_an_owner_without_ucx_serves_over_grpc(tmp_path: Path) -> None:
    with host(tmp_path / "there", 8, ucx=False) as (address, _):
        source = Peer(address, SETTINGS)
        here = Transfer(tmp_path / "here", peers=[source])
        assert torch.equal(here.get(KEY, timeout=PATIENCE)[0]["bias"], state(8)["bias"])
        assert here.counters.moves() == {Choice("get", "grpc", "ucx_not_there"): 1}
        source.close()


@pytest.mark.usefixtures("way")
def test_a_byte_that_changed_on_the_way_over_ucx_is_sent_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = Verification.upto, []

    def spoiled(self: Verification, nbytes: int) -> None:
        calls.append(nbytes)
        if len(calls) == 3:
            self._data[self._begin + nbytes - 5] ^= 1
        real(self, nbytes)

    monkeypatch.setattr(Verification, "upto", spoiled)
    with host(tmp_path / "there", 100) as (address, _):
        source = Peer(address, SETTINGS)
        here = Transfer(tmp_path / "here", peers=[source])
        assert checksum_of(here.get(KEY, timeout=PATIENCE)[0]) == checksum_of(state(100))
        assert here.counters.retries() == {"corrupt_chunk": 1}
        assert here.counters.moves() == {BY_UCX: 1}
        source.close()


@pytest.mark.usefixtures("way")
def test_an_owner_killed_half_way_fails_the_read_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = Verification.upto, []
    with host(tmp_path / "there", 200) as (address, process):

        def killing(self: Verification, nbytes: int) -> None:
            calls.append(nbytes)
            if len(calls) == 2:
                process.send_signal(signal.SIGKILL)
                process.wait()
            real(self, nbytes)

        monkeypatch.setattr(Verification, "upto", killing)
        source = Peer(address, SETTINGS)
        here = Transfer(tmp_path / "here", peers=[source])
        with pytest.raises(TransferTimeout, match="chunks are missing"):
            here.get(KEY, timeout=15)
        assert not here.keys()
        source.close()


SENDER = """
import sys
from troupe.transfer.remote import lane
data = memoryview(bytearray(160 << 20))
with lane.Lane(near=True) as sender:
    sender.connect(bytes.fromhex(sys.argv[1]))
    sent = [sender.send(data[n << 23 : n + 1 << 23], n) for n in range(20)]
    sender.wait(lambda: sent[-1].completed, idle=60)
"""
LEFT = """
import mmap, subprocess, sys
from troupe.transfer.remote import lane
mapped = mmap.mmap(-1, 160 << 20)
memory = memoryview(mapped)
for _ in range(4):
    left = lane.Lane(near=True)
    got = [left.receive(memory[n << 23 : n + 1 << 23], n) for n in range(8)]
    sender = subprocess.Popen([sys.executable, "-c", sys.argv[1], left.address.hex()])
    left.wait(lambda: got[1].completed, idle=60)
    sender.kill()
    sender.wait()
    left.abandon()
got.clear()
memory.release()
mapped.close()  # refused while anybody has it
"""


def test_a_killed_sender_on_the_same_host_does_not_kill_its_reader() -> None:
    subprocess.run([sys.executable, "-c", LEFT, SENDER], check=True, timeout=PATIENCE)


@pytest.mark.usefixtures("way")
def test_a_delayed_read_does_not_delay_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, began, other_is_here = Verification.upto, threading.Event(), threading.Event()

    def held_up(self: Verification, nbytes: int) -> None:
        if threading.current_thread().name.startswith(("transfer-check", "held")) and (
            not began.is_set()
        ):
            began.set()
            assert other_is_here.wait(PATIENCE)
        real(self, nbytes)

    monkeypatch.setattr(Verification, "upto", held_up)
    with host(tmp_path / "there", 32) as (address, _):
        source = Peer(address, SETTINGS)
        here = Transfer(tmp_path / "here", peers=[source])
        first = threading.Thread(target=here.fetch, args=[KEY], name="held")
        first.start()
        assert began.wait(PATIENCE)
        got, _ = here.get(OTHER, timeout=PATIENCE)
        assert not here.exists(KEY)
        other_is_here.set()
        first.join(PATIENCE)
        assert here.exists(KEY)
        assert torch.equal(got["bias"], state(32)["bias"])
        source.close()


def test_a_reader_gets_a_message_before_the_next_arrives() -> None:
    """The first message is verified while the second arrives."""
    begin = threading.Barrier(2)
    sent, got = bytearray(b"\1" * (32 << 20)), bytearray(32 << 20)
    parts = [slice(at, at + (8 << 20)) for at in range(0, 32 << 20, 8 << 20)]

    def send(address: bytes) -> None:
        with lane.Lane(near=True) as sender:
            sender.connect(address)
            requests = [sender.send(memoryview(sent)[p], n) for n, p in enumerate(parts)]
            begin.wait(PATIENCE)
            sender.wait(lambda: all(request.completed for request in requests), idle=60)

    with lane.Lane(near=True) as receiver:
        other = threading.Thread(target=send, args=[receiver.address])
        other.start()
        begin.wait(PATIENCE)
        requests = [receiver.receive(memoryview(got)[p], n) for n, p in enumerate(parts)]
        receiver.wait(lambda: requests[0].completed, idle=60)
        assert [request.completed for request in requests] == [True, False, False, False]
        receiver.wait(lambda: requests[-1].completed, idle=60)
        other.join(PATIENCE)
    assert got == sent


READER = """
import sys, pathlib, os, signal
from troupe.rpc import ClientSettings
from troupe.transfer import Transfer
from troupe.transfer.checksum import PIECE_BYTES
from troupe.transfer.blob import Verification
from troupe.transfer.remote import Peer
from tests.transfer.remote_host import KEY
real, calls = Verification.upto, []
def dying(self, nbytes):
    if nbytes == PIECE_BYTES:
        calls.append(1)
    if len(calls) == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    real(self, nbytes)
Verification.upto = dying
peer = Peer(sys.argv[1], ClientSettings(token="secret"))
Transfer(pathlib.Path(sys.argv[2]), peers=[peer]).get(KEY)
"""


def test_a_reader_that_is_killed_half_way_costs_the_owner_nothing(tmp_path: Path) -> None:
    with host(tmp_path / "there", 200) as (address, process):
        killed = subprocess.run(
            [sys.executable, "-c", READER, address, str(tmp_path / "first")], check=False
        )
        assert killed.returncode == -signal.SIGKILL
        source = Peer(address, SETTINGS)
        here = Transfer(tmp_path / "here", peers=[source])
        assert checksum_of(here.get(KEY, timeout=PATIENCE)[0]) == checksum_of(state(200))
        assert here.counters.moves() == {BY_UCX: 1}
        assert process.poll() is None
        source.close()
