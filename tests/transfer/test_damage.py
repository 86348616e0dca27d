"""Stored bytes that change: refused, never half applied, fetched again from others."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.waiting import PATIENCE
from tests.transfer.conftest import TOKEN
from troupe.rpc import ClientSettings
from troupe.rpc.retry import RetryPolicy
from troupe.transfer import Corrupt, Transfer, blob, checksum_of
from troupe.transfer.remote import HostOwner, Peer, TransferOwner

KEY = "job/solver/weights@3"
SETTINGS = ClientSettings(token=TOKEN, retry=RetryPolicy(max_attempts=1))


def state(mib: int = 2) -> dict[str, torch.Tensor]:
    return {"a": torch.arange(50.0), "large": torch.arange(mib * 2**18, dtype=torch.int32)}


def spoil(path: Path, place: int) -> None:
    """Change the byte at `place` (from the end if negative), as a failing disk or memory does."""
    with open(path, "r+b") as file:
        file.seek(place, os.SEEK_SET if place >= 0 else os.SEEK_END)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 0x10]))


@pytest.fixture(params=["peer", "owner of this host"])
def here(request: Any, tmp_path: Path, owner: TransferOwner) -> Iterator[Transfer]:
    """Return a transfer that reaches `owner` by itself, or through its own owner as services do."""
    root = tmp_path / "here"
    if request.param == "peer":
        peer = Peer(owner.address, SETTINGS, deadline_seconds=PATIENCE)
        yield Transfer(root, peers=[peer])
        peer.close()
        return
    near = TransferOwner(Transfer(root), token=TOKEN, use_ucx=False)
    source = HostOwner(near.address, SETTINGS, locate=lambda key, expected: [owner.address])
    yield Transfer(root, peers=[source])
    source.close()
    near.stop(0)


def test_a_change_of_any_byte_of_a_file_is_noticed(tmp_path: Path) -> None:
    """Also of bytes that no tensor's checksum covers: metadata and base, but not padding."""
    transfer = Transfer(tmp_path)
    tensors = {"a": torch.arange(20, dtype=torch.uint8), "b": torch.ones(3)}
    manifest = transfer.set(KEY, tensors, metadata={"step": "9"}, base="job/solver/weights@2")
    path = tmp_path / KEY
    whole = path.read_bytes()
    header = start = len(blob.prefix(manifest))
    spans = [range(start + e.offset, start + e.offset + e.nbytes) for e in manifest.entries]
    for place in (*range(0, header, 5), *(at for span in spans for at in span[::3])):
        data = bytearray(whole)
        data[place] ^= 0x04
        path.write_bytes(data)
        with pytest.raises(Corrupt):
            transfer.get(KEY)
    path.write_bytes(whole)
    assert transfer.get(KEY)[1] == manifest


@pytest.mark.parametrize("place", [-5, 200, 3], ids=["tensor", "manifest", "magic"])
def test_a_fetched_copy_that_was_damaged_is_fetched_again(
    there: Transfer, here: Transfer, place: int
) -> None:
    manifest = there.set(KEY, state())
    here.get(KEY)
    for expected in (None, manifest.checksum):
        spoil(here.roots[0] / KEY, place)
        got, _ = here.get(KEY, expected_checksum=expected)
        assert checksum_of(got) == manifest.checksum
        # Permanently, and for the other processes of this host.
        assert checksum_of(Transfer(here.roots[0]).get(KEY)[0]) == manifest.checksum


def test_damaged_state_without_another_copy_is_refused_and_kept(
    there: Transfer, here: Transfer
) -> None:
    manifest = there.set(KEY, state())
    here.get(KEY)
    there.delete(KEY)
    spoil(here.roots[0] / KEY, -5)
    for _ in range(2):
        with pytest.raises(Corrupt):
            here.get(KEY)
    # Until it is published again, there or here.
    there.set(KEY, state())
    assert here.get(KEY)[1].checksum == manifest.checksum


def test_a_damaged_owner_refetches_state_from_its_reader(tmp_path: Path) -> None:
    """Any host may be the last one with a good copy."""
    there = Transfer(tmp_path / "there")
    first = TransferOwner(there, token=TOKEN, use_ucx=False)
    reader = Transfer(tmp_path / "reader", peers=[Peer(first.address, SETTINGS)])
    manifest = there.set(KEY, state())
    reader.get(KEY)
    second = TransferOwner(Transfer(tmp_path / "reader"), token=TOKEN, use_ucx=False)
    spoil(there.roots[0] / KEY, -5)
    again = Transfer(there.roots[0], peers=[Peer(second.address, SETTINGS)])
    assert checksum_of(again.get(KEY, expected_checksum=manifest.checksum)[0]) == manifest.checksum
    first.stop(0)
    second.stop(0)


def test_a_copy_handed_on_damaged_is_fetched_from_the_owner(tmp_path: Path) -> None:
    """The owner sends later readers to earlier ones, one of which has lost a byte since."""
    there = Transfer(tmp_path / "there")
    first = TransferOwner(there, token=TOKEN, use_ucx=False)
    manifest = there.set(KEY, state(64))  # long enough to be handed on
    hosts = []
    for name in ("inner", "outer"):
        transfer = Transfer(tmp_path / name)
        near = TransferOwner(transfer, token=TOKEN, use_ucx=False)
        source = HostOwner(near.address, SETTINGS, locate=lambda key, expected: [first.address])
        hosts.append((Transfer(transfer.roots[0], peers=[source]), near))
    (inner, inner_owner), (outer, outer_owner) = hosts
    inner.fetch(KEY)
    spoil(inner.roots[0] / KEY, -5)
    got, _ = outer.get(KEY)
    assert checksum_of(got) == manifest.checksum
    assert outer.counters.retries()["corrupt_chunk"] == 3
    for near in (first, inner_owner, outer_owner):
        near.stop(0)
