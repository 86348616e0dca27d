"""Reads through UCX that begin before their contents are known. Needs the extra `ucx`."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from tests.support.waiting import PATIENCE, block_until
from tests.transfer.remote_host import KEY, state
from tests.transfer.test_remote_ucx import READER, SETTINGS, host
from troupe.rpc.channel import connect_sync
from troupe.transfer import Choice, KeyNotFound, Transfer, checksum_of
from troupe.transfer.remote import Peer, TransferOwner, lane, reading
from troupe.v1 import transfer_pb2 as transfer_pb
from troupe.v1 import transfer_pb2_grpc as transfer_grpc

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(lane.missing()), reason=f"UCX cannot be used: {lane.missing()}"),
]
BY_UCX = Choice("get", "ucx", "other_host")
MIB = 40


class Counting:
    """A stub that counts its calls by name."""

    def __init__(self, stub: transfer_grpc.TransferOwnerStub) -> None:
        self._stub, self.calls = stub, list[str]()

    def __getattr__(self, name: str) -> Any:
        self.calls.append(name)
        return getattr(self._stub, name)


@pytest.fixture(params=["near", "tcp", "tcp, a core to spare"])
def source(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[tuple[Peer, Counting]]:
    """Yield an owner that has been read from once, and the calls that ask for its contents."""
    if request.param != "near":
        monkeypatch.setenv("UCX_TLS", "tcp,self")
    monkeypatch.setattr(reading, "_cores", lambda: 4 if "spare" in request.param else 2)
    with host(tmp_path / "there", MIB) as (address, _):
        peer = Peer(address, SETTINGS)
        first = Transfer(tmp_path / "first", peers=[peer])
        first.get(KEY, timeout=PATIENCE)
        assert first.counters.moves() == {BY_UCX: 1}
        counting = Counting(peer._stub)
        peer._describer._stub = counting  # type: ignore[assignment]
        yield peer, counting
        peer.close()


def whole(here: Transfer, **how: Any) -> bool:
    return checksum_of(here.get(KEY, timeout=PATIENCE, **how)[0]) == checksum_of(state(MIB))


def idle(peer: Peer) -> list[lane.Lane]:
    """Return the kept lanes, including those of the last read (its stream ends a little later)."""
    block_until(lambda: any(peer._lanes._idle.values()))
    return [lane for kept in peer._lanes._idle.values() for lane in kept]


def test_a_read_needs_no_description_first(tmp_path: Path, source: tuple[Peer, Counting]) -> None:
    peer, counting = source
    here = Transfer(tmp_path / "here", peers=[peer])
    for _ in range(3):
        assert whole(here)
        here.delete(KEY)
    assert counting.calls == []
    assert here.counters.moves() == {BY_UCX: 3}
    assert not here.counters.retries()


def test_a_missing_key_occupies_no_lane(tmp_path: Path, source: tuple[Peer, Counting]) -> None:
    peer, counting = source
    here = Transfer(tmp_path / "here", peers=[peer])
    kept = idle(peer)
    with pytest.raises(KeyNotFound):
        here.get("job/solver/weights@7")
    with pytest.raises(KeyNotFound):
        here.get(KEY, expected_checksum="0" * 32)
    assert idle(peer) == kept != []
    assert whole(here)
    assert counting.calls == []


def test_only_the_missing_part_is_sent_again(
    tmp_path: Path, source: tuple[Peer, Counting], monkeypatch: pytest.MonkeyPatch
) -> None:
    peer, _ = source
    left = tmp_path / "left"
    killed = subprocess.run([sys.executable, "-c", READER, peer.address, str(left)], check=False)
    assert killed.returncode == -signal.SIGKILL
    came: list[int] = []
    real = lane.Lane.receive

    def receive(self: lane.Lane, into: memoryview, tag: int) -> Any:
        came.append(len(into))
        return real(self, into, tag)

    monkeypatch.setattr(lane.Lane, "receive", receive)
    here = Transfer(left, peers=[peer])
    assert whole(here)
    assert 0 < sum(came) < MIB * 2**20
    assert not here.counters.retries()


def test_a_reader_with_a_base_asks_for_the_difference(
    tmp_path: Path, source: tuple[Peer, Counting]
) -> None:
    peer, counting = source
    here = Transfer(tmp_path / "here", peers=[peer])
    here.set("job/solver/base", state(MIB))
    assert whole(here, base="job/solver/base")
    assert counting.calls == ["DescribeState"]


def test_an_owner_that_is_away_for_a_moment_is_waited_for(tmp_path: Path) -> None:
    there = Transfer(tmp_path / "there")
    there.set(KEY, state(MIB))
    owners = [TransferOwner(there, token=SETTINGS.token)]
    peer = Peer(owners[0].address, SETTINGS)
    here = Transfer(tmp_path / "here", peers=[peer])
    assert whole(here)
    here.delete(KEY)
    owners[0].stop(0)

    def come_back() -> None:
        owners.append(TransferOwner(there, port=owners[0].port, token=SETTINGS.token))

    later = threading.Timer(0.5, come_back)
    later.start()
    assert checksum_of(here.get(KEY)[0]) == checksum_of(state(MIB))
    later.join()
    assert here.counters.moves() == {BY_UCX: 2}
    peer.close()
    owners[-1].stop(0)


def test_a_reader_sent_to_another_source_takes_nothing_from_the_owner(tmp_path: Path) -> None:
    there = Transfer(tmp_path / "there")
    there.set(KEY, state(MIB))
    owner = TransferOwner(there, token=SecretStr("secret"))
    second = TransferOwner(Transfer(tmp_path / "second"), token=SecretStr("secret"))
    peer = Peer(owner.address, SETTINGS, serves_at="127.0.0.1:1")
    here = Transfer(tmp_path / "here", peers=[peer])
    assert whole(here)
    there.set(KEY, state(MIB + 8))
    with connect_sync(owner.address, SETTINGS) as channel:
        # Another host asks first; this one is told to read from that host, which never gets it.
        asked = transfer_pb.DescribeStateRequest(key=KEY, reader=second.address)
        assert (
            not transfer_grpc.TransferOwnerStub(channel)
            .DescribeState(asked, timeout=PATIENCE)
            .source
        )
    here.delete(KEY)
    got, manifest = here.get(KEY, timeout=PATIENCE)
    assert checksum_of(got) == manifest.checksum == checksum_of(state(MIB + 8))
    assert here.counters.moves() == {BY_UCX: 2}
    peer.close()
    for each in (owner, second):
        each.stop(0)
