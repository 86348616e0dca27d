"""Fetches that are interrupted half way: arrived chunks stay for the next attempt."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.support.waiting import PATIENCE, block_until
from tests.transfer.conftest import SETTINGS, TOKEN
from tests.transfer.sent import KEY, corrupting, leftovers, state
from troupe.transfer import Transfer, TransferTimeout, checksum_of
from troupe.transfer.remote import Peer, TransferOwner
from troupe.transfer.remote.partial_state import PartialState


def arriving(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record the chunks that arrive at readers of this process, in order."""
    came: list[int] = []
    note = PartialState.arrived

    def arrived(part: PartialState, index: int) -> None:
        note(part, index)
        came.append(index)

    monkeypatch.setattr(PartialState, "arrived", arrived)
    return came


def test_a_broken_connection_continues_where_it_was(
    there: Transfer, here: Transfer, owner: TransferOwner, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = there.set(KEY, state(mib=26))
    again: list[TransferOwner] = []
    port = int(owner.address.rpartition(":")[2])

    def restart() -> None:
        owner.stop(0)
        again.append(TransferOwner(there, port=port, token=TOKEN, use_ucx=False))

    restarter = threading.Thread(target=restart)
    came = arriving(monkeypatch)

    def spoil(nth: int, data: bytearray) -> None:
        if nth == 3:
            block_until(lambda: 0 in came)
            restarter.start()
            # The connection breaks while this chunk is being sent.
            block_until(lambda: here.counters.retries().get("broken_connection"))

    sent = corrupting(monkeypatch, spoil)
    assert checksum_of(here.get(KEY)[0]) == manifest.checksum
    restarter.join()
    assert here.counters.retries()["broken_connection"] >= 1
    assert sent[:3] == [0, 1, 2]
    assert 0 not in sent[3:]  # what had arrived is not sent again
    again[0].stop(0)


def test_an_owner_that_stays_away_fails_the_read(
    there: Transfer, owner: TransferOwner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there.set(KEY, state(mib=26))
    stopper = threading.Thread(target=owner.stop, args=[0])
    timed_out = threading.Event()

    def spoil(nth: int, data: bytearray) -> None:
        if nth == 3:
            stopper.start()
        if nth >= 3:
            timed_out.wait(PATIENCE)  # not the whole state, however slowly the owner stops

    corrupting(monkeypatch, spoil)
    source = Peer(owner.address, SETTINGS)
    here = Transfer(tmp_path / "here", peers=[source])
    for seconds in (2, 20, PATIENCE):
        with pytest.raises(TransferTimeout, match="chunks are missing"):
            here.get(KEY, timeout=seconds)
        if stopper.ident is not None:
            break  # unless the machine was too busy for the read to come half way
    timed_out.set()
    stopper.join()
    assert not here.keys()
    # Arrived chunks stay for the next attempt.
    assert [path.suffix for path in leftovers(here)] == [".part"]
    source.close()


def test_parts_that_a_killed_reader_had_are_not_fetched_again(
    there: Transfer, owner: TransferOwner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there.set(KEY, state(mib=26))
    killed = threading.Event()

    def spoil(nth: int, data: bytearray) -> None:
        if nth == 3:
            killed.wait(PATIENCE)  # not the whole state, however slow the reader is

    sent = corrupting(monkeypatch, spoil)
    root = tmp_path / "here"
    # The reader names the chunks that it has: those sent to it may not have arrived.
    code = (
        "import sys, pathlib\n"
        "from troupe.rpc import ClientSettings\n"
        "from troupe.transfer import Transfer\n"
        "from troupe.transfer.remote import Peer\n"
        "from troupe.transfer.remote.partial_state import PartialState\n"
        "note = PartialState.arrived\n"
        "def arrived(part, index):\n"
        "    note(part, index)\n"
        "    print(index, flush=True)\n"
        "PartialState.arrived = arrived\n"
        "peer = Peer(sys.argv[1], ClientSettings(token='secret'))\n"
        "Transfer(pathlib.Path(sys.argv[2]), peers=[peer]).get(sys.argv[3])\n"
    )
    command = [sys.executable, "-c", code, owner.address, str(root), KEY]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as reader:
        assert reader.stdout is not None
        first = reader.stdout.readline()
        reader.send_signal(signal.SIGKILL)
    killed.set()
    assert first == "0\n"
    assert [path.suffix for path in leftovers(Transfer(root))] == [".part"]
    assert not Transfer(root).keys()  # invisible
    began = len(sent)
    source = Peer(owner.address, SETTINGS)
    got, manifest = Transfer(root, peers=[source]).get(KEY)
    assert checksum_of(got) == manifest.checksum
    # The arrived chunks were verified again, and found whole.
    assert 0 not in sent[began:]
    assert [path.name for path in leftovers(Transfer(root))] == ["weights@3"]
    source.close()


def test_parts_that_nobody_continues_are_removed(
    there: Transfer, here: Transfer, tmp_path: Path
) -> None:
    manifest = there.set(KEY, state())
    part = here.roots[0] / "job/solver" / f".weights@3.{manifest.checksum}.part"
    part.parent.mkdir(parents=True)
    part.write_bytes(b"of another size, of no use")
    old = part.with_name(".weights@1.0000.part")
    old.write_bytes(b"half")
    os.utime(old, (1.0, 1.0))
    here.get(KEY)
    assert [path.name for path in leftovers(here)] == ["weights@3"]
