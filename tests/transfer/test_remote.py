"""States of another host, through gRPC: fetched, verified, refused."""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import SecretStr

from tests.support.waiting import PATIENCE
from tests.transfer.conftest import SETTINGS, TOKEN
from tests.transfer.sent import KEY, corrupting, leftovers, state
from troupe.rpc import ClientSettings, TroupeError, Unauthenticated, Unavailable, connect_sync
from troupe.transfer import (
    Choice,
    Corrupt,
    InvalidKey,
    KeyNotFound,
    StorageFull,
    Transfer,
    TransferTimeout,
    checksum_of,
)
from troupe.transfer import segments as room_module
from troupe.transfer.checksum import PIECE_BYTES
from troupe.transfer.remote import Peer, TransferOwner
from troupe.transfer.remote import owner as owner_module
from troupe.v1 import transfer_pb2 as transfer_pb
from troupe.v1 import transfer_pb2_grpc as transfer_grpc


def test_a_state_is_fetched_from_another_host(
    there: Transfer, here: Transfer, caplog: pytest.LogCaptureFixture
) -> None:
    tensors = state(mib=26)  # several chunks, the last one short
    manifest = there.set(KEY, tensors, metadata={"step": "9"})
    got, read = here.get(KEY, expected_checksum=manifest.checksum)
    assert read == manifest
    assert checksum_of(got) == manifest.checksum
    assert got["a"].dtype is torch.bfloat16
    # The slow way logs a warning and is counted with its reason.
    assert here.counters.moves() == {Choice("get", "grpc", "ucx_not_there"): 1} or (
        here.counters.moves() == {Choice("get", "grpc", "ucx_not_here"): 1}
    )
    assert any("through gRPC" in r.message for r in caplog.records if r.levelname == "WARNING")
    # From now on it is here, for every process of this host.
    there.delete(KEY)
    again = Transfer(here.roots[0])
    assert checksum_of(again.get(KEY)[0]) == manifest.checksum


def test_a_state_without_bytes_is_fetched(there: Transfer, here: Transfer) -> None:
    there.set(KEY, {"empty": torch.empty(0, 3)})
    assert here.get(KEY)[0]["empty"].shape == (0, 3)
    there.set("nothing", {})
    assert here.get("nothing")[0] == {}


def test_a_reader_without_the_token_is_refused(
    there: Transfer, owner: TransferOwner, tmp_path: Path
) -> None:
    there.set(KEY, state())
    for token in (None, SecretStr("wrong")):
        source = Peer(owner.address, ClientSettings(token=token, retry=SETTINGS.retry))
        transfer = Transfer(tmp_path / "here", peers=[source])
        with pytest.raises(Unauthenticated, match="bearer token"):
            transfer.get(KEY)
        source.close()
    assert not leftovers(Transfer(tmp_path / "here"))


def test_a_key_that_no_peer_has_is_not_found(here: Transfer) -> None:
    with pytest.raises(KeyNotFound, match="neither here nor at"):
        here.get(KEY)
    with pytest.raises(TransferTimeout, match="did not appear within"):
        here.get(KEY, timeout=0.4)


def test_a_key_above_or_below_a_local_state_is_refused(there: Transfer, here: Transfer) -> None:
    there.set("job/solver/weights@1", state())
    here.set("job/solver", state())
    with pytest.raises(InvalidKey, match="lies under another state"):
        here.get("job/solver/weights@1")
    there.set("other", state())
    here.set("other/weights", state())
    with pytest.raises(InvalidKey, match="a directory of other states"):
        here.get("other")


def test_a_key_that_appears_at_a_peer_is_fetched_by_a_waiting_reader(
    there: Transfer, here: Transfer
) -> None:
    timer = threading.Timer(0.3, there.set, [KEY, state()])
    timer.start()
    assert (
        checksum_of(here.get(KEY, timeout=PATIENCE)[0])
        == there.get(KEY, timeout=PATIENCE)[1].checksum
    )
    timer.join()


def test_an_absent_owner_is_reported_as_unavailable(
    here: Transfer, owner: TransferOwner, tmp_path: Path
) -> None:
    owner.stop(0)
    with pytest.raises(Unavailable):
        here.get(KEY)


def test_the_next_peer_is_asked_when_one_is_away(
    there: Transfer, owner: TransferOwner, tmp_path: Path
) -> None:
    there.set(KEY, state())
    empty = TransferOwner(Transfer(tmp_path / "empty"), token=TOKEN, use_ucx=False)
    sources = [Peer(o.address, SETTINGS) for o in (empty, owner)]
    transfer = Transfer(tmp_path / "here", peers=sources)
    assert torch.equal(transfer.get(KEY)[0]["b"], state()["b"])
    empty.stop(0)
    for source in sources:
        source.close()


def test_content_replaced_at_the_peer_is_fetched_again(there: Transfer, here: Transfer) -> None:
    there.set(KEY, state())
    old, _ = here.get(KEY)
    new = there.set(KEY, {"b": torch.ones(3)})
    assert here.get(KEY)[1].checksum != new.checksum  # no other was asked for
    assert torch.equal(here.get(KEY, expected_checksum=new.checksum)[0]["b"], torch.ones(3))
    assert torch.equal(old["b"], state()["b"])


def test_fetched_versions_are_freed(there: Transfer, here: Transfer) -> None:
    for version in (3, 4):
        there.set(f"job/solver/weights@{version}", {"w": torch.tensor(version)})
        there.set(f"job/critic/weights@{version}", {"w": torch.tensor(version)})
    got, _ = here.get(KEY)
    here.get("job/critic/weights@3")
    here.get("job/solver/weights@4")
    assert here.keys() == ["job/critic/weights@3", "job/solver/weights@4"]
    assert got["w"].item() == 3  # a reader that has it mapped keeps it


def test_a_byte_that_changed_on_the_way_is_sent_again(
    there: Transfer, here: Transfer, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = there.set(KEY, state(mib=26))

    def spoil(nth: int, data: bytearray) -> None:
        if nth == 2:
            data[77] ^= 1

    sent = corrupting(monkeypatch, spoil)
    assert checksum_of(here.get(KEY)[0]) == manifest.checksum
    assert here.counters.retries() == {"corrupt_chunk": 1}
    assert sent == [0, 1, 2, 3, 1]  # only that one


@pytest.mark.parametrize("fault", ["changed", "short", "long"])
def test_bytes_that_always_change_are_refused(
    there: Transfer, here: Transfer, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    there.set(KEY, state(mib=3))

    def spoil(nth: int, data: bytearray) -> None:
        if fault == "changed":
            data[0] ^= 1
        elif fault == "short":
            del data[-1]
        else:
            data.append(0)

    corrupting(monkeypatch, spoil)
    with pytest.raises(Corrupt, match="damaged 3 times"):
        here.get(KEY)
    assert not leftovers(here)


def test_a_state_that_is_corrupt_at_its_owner_is_refused(there: Transfer, here: Transfer) -> None:
    there.set(KEY, state(mib=3))
    with open(there.roots[0] / KEY, "r+b") as file:
        file.seek(-5, os.SEEK_END)
        file.write(b"\xff\x00\xff\x00\xff")
    with pytest.raises(Corrupt, match="'a'"):
        here.get(KEY)
    with open(there.roots[0] / KEY, "r+b") as file:
        file.write(b"nonsense")
    with pytest.raises(Corrupt, match="not a state file"):
        here.get(KEY)
    assert not leftovers(here)


def test_a_full_disk_at_the_reader_is_reported(
    there: Transfer, here: Transfer, monkeypatch: pytest.MonkeyPatch
) -> None:
    there.set(KEY, state())

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(room_module.os, "posix_fallocate", full)
    with pytest.raises(StorageFull):
        here.get(KEY)
    assert not leftovers(here)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"chunk_bytes": 0}, "chunk_bytes"),
        ({"chunk_bytes": PIECE_BYTES + 1}, "chunk_bytes"),
        ({"chunks": [0, 1]}, "chunks"),
        ({"lanes": [transfer_pb.UcxLane()] * 3}, "lanes"),
        ({"lanes": [transfer_pb.UcxLane(message_bytes=1)]}, "message_bytes"),
        ({"lanes": [transfer_pb.UcxLane(message_bytes=PIECE_BYTES - 1)]}, "message_bytes"),
        (
            {"lanes": [transfer_pb.UcxLane(message_bytes=PIECE_BYTES), transfer_pb.UcxLane()]},
            "message_bytes",
        ),
        ({"checksum": "0" * 32}, "checksum"),
        ({"key": "../../etc/passwd"}, "key"),
        ({"key": ""}, "key"),
    ],
)
def test_invalid_requests_are_refused_by_field(
    there: Transfer, owner: TransferOwner, change: dict[str, Any], field: str
) -> None:
    manifest = there.set(KEY, state())
    fields = {"key": KEY, "checksum": manifest.checksum, "chunk_bytes": PIECE_BYTES, "chunks": [0]}
    with connect_sync(owner.address, SETTINGS) as channel:
        stub = transfer_grpc.TransferOwnerStub(channel)
        with pytest.raises(TroupeError) as caught:
            list(stub.ReadState(transfer_pb.ReadStateRequest(**fields | change), timeout=PATIENCE))
    assert caught.value.field == field


def test_a_port_in_use_is_reported(there: Transfer, owner: TransferOwner) -> None:
    with pytest.raises(Unavailable) as caught:
        TransferOwner(there, port=int(owner.address.rpartition(":")[2]), token=TOKEN, use_ucx=False)
    assert caught.value.kind == "port_taken"


def test_an_owner_without_a_token_on_all_interfaces_logs_a_warning(
    there: Transfer, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger=owner_module.__name__):
        TransferOwner(there, host="0.0.0.0", use_ucx=False).stop(0)
    assert "TROUPE_TOKEN" in caplog.text
