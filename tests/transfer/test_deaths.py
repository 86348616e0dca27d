"""Readers and writers that are killed half way, readers during a publication, many versions: others
go on, and all memory comes back."""

from __future__ import annotations

import contextlib
import os
import signal
import stat
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import SecretStr

from tests.support.waiting import PATIENCE
from troupe.disks import Scratch
from troupe.rpc import ClientSettings
from troupe.transfer import Transfer, segments
from troupe.transfer.remote import Peer, TransferOwner, serving
from troupe.transfer.remote.serving import PinnedStates
from troupe.transfer.segments import Mappings

KEY = "job/solver/weights@1"
COUNT = 2 << 20  # of float32: large enough to be verified once per host and filled again
MIB = 2**20


@pytest.fixture
def root() -> Iterator[Path]:
    if not os.access("/dev/shm", os.W_OK):
        pytest.skip("no shared memory here")
    with Scratch("troupe-test-") as root:
        yield root


def state(value: float) -> dict[str, torch.Tensor]:
    return {"w": torch.full((COUNT,), float(value)), "b": torch.full((5,), float(value))}


def start(code: str, *args: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, args)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def taken(root: Path) -> int:
    """Return the bytes of all files under `root`, each counted once."""
    files = (path.stat() for path in root.rglob("*") if path.is_file())
    return sum({status.st_ino: status.st_blocks * 512 for status in files}.values())


def nameless() -> int:
    """Return the bytes of unnamed files that this process has open (mapped files count as open)."""
    sizes: dict[int, int] = {}
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            status = os.fstat(int(descriptor))
            if status.st_nlink == 0 and stat.S_ISREG(status.st_mode):
                sizes[status.st_ino] = status.st_blocks * 512
    return sum(sizes.values())


def test_readers_never_see_a_mixture_of_publications(root: Path) -> None:
    """Two trainers replace one key, in files that are filled again, while three readers get it."""
    failures: list[BaseException] = []
    Transfer(root).set(KEY, state(0))
    over = threading.Event()

    def guarded(work: Any, *args: Any) -> None:
        try:
            work(*args)
        except BaseException as error:
            failures.append(error)

    def publish(trainer: int) -> None:
        transfer = Transfer(root)
        for turn in range(12):
            transfer.set(KEY, state(trainer * 100 + turn))
        transfer.close()

    def read(lasting: bool) -> None:
        transfer = Transfer(root)
        while not over.is_set():
            got, _ = transfer.get(KEY, lasting=lasting)
            values = {float(got["w"].min()), float(got["w"].max()), float(got["b"][0])}
            assert len(values) == 1

    writers = [threading.Thread(target=guarded, args=[publish, number]) for number in range(2)]
    readers = [threading.Thread(target=guarded, args=[read, bool(number)]) for number in range(3)]
    for thread in (*readers, *writers):
        thread.start()
    for thread in writers:
        thread.join(PATIENCE)
    over.set()
    for thread in readers:
        thread.join(PATIENCE)
    assert not failures


VERIFIES = """
import sys, pathlib, time
from troupe.transfer import Transfer, blob
real = blob.damaged
def slow(manifest, tensors):
    print("verifies", flush=True)
    time.sleep(600)
blob.damaged = slow
Transfer(pathlib.Path(sys.argv[1])).get(sys.argv[2])
"""


def test_a_killed_reader_releases_all_its_leases(root: Path) -> None:
    writer = Transfer(root)
    writer.set(KEY, state(3))
    inode = (root / KEY).stat().st_ino
    got: list[float] = []
    with start(VERIFIES, root, KEY) as reader:
        assert reader.stdout is not None
        assert reader.stdout.readline() == "verifies\n"
        # Another reader waits for it, since only one verifies.
        other = threading.Thread(
            target=lambda: got.append(
                float(Transfer(root).get(KEY, timeout=PATIENCE)[0]["w"].sum())
            )
        )
        other.start()
        time.sleep(0.1)  # the other reader waits for the lock, however long this takes
        assert not got
        reader.send_signal(signal.SIGKILL)
        reader.wait(PATIENCE)
    other.join(PATIENCE)
    assert got == [3.0 * COUNT]
    # Its lease went with it: the file is filled again.
    writer.delete(KEY)
    writer.set("job/solver/weights@2", state(4))
    assert (root / "job/solver/weights@2").stat().st_ino == inode


REFILLS = """
import sys, pathlib, time, torch
import numpy as np
from troupe.transfer import Transfer, segments
transfer, stem = Transfer(pathlib.Path(sys.argv[1])), sys.argv[2].rpartition("@")[0]
state = lambda value: {"w": torch.full((int(sys.argv[3]),), float(value))}
transfer.set(f"{stem}@0", state(0))
transfer.delete(f"{stem}@0")
real, calls = np.copyto, []
def dying(*args):
    calls.append(1)
    real(*args)
    if len(calls) == 5:
        print("half", flush=True)
        time.sleep(600)
np.copyto = dying
transfer.set(sys.argv[2], state(9))
"""


def test_a_writer_killed_while_it_refills_a_file_leaves_the_former_state(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    transfer = Transfer(root)
    transfer.set(KEY, state(1))
    with start(REFILLS, root, KEY, COUNT) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "half\n"
        writer.send_signal(signal.SIGKILL)
        writer.wait(PATIENCE)
    # The former state is there, and its readers never saw a byte of the other.
    assert float(Transfer(root).get(KEY)[0]["w"].max()) == 1
    assert taken(root) > 2 * COUNT * 4 - MIB
    monkeypatch.setattr(segments, "_TEMP_GRACE_SECONDS", -1.0)
    transfer.sweep()
    for spares in transfer._segments.pools.values():
        spares.sweep(0)
    assert taken(root) < COUNT * 4 + MIB
    assert transfer.set(KEY, state(2)).num_bytes


def test_an_owner_releases_the_states_of_a_killed_reader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    transfer, kept = Transfer(tmp_path), PinnedStates()
    transfer.set(KEY, {"w": torch.ones(3)})
    manifest, lease = Mappings().lease(transfer.opened(KEY))
    alive = weakref.ref(lease)
    kept.pin(manifest, lease)
    del lease
    kept.sweep()
    assert alive() is not None  # it may still arrive
    monkeypatch.setattr(serving, "_PIN_SECONDS", 0.0)
    kept.find(KEY, manifest.checksum)
    time.sleep(0.01)
    kept.sweep()
    assert alive() is None


def test_an_owner_releases_a_state_once_it_has_arrived(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not half a minute later, although it is slow to notice that its reader has everything."""
    real = serving.messages

    def slow(index: int, data: memoryview) -> Iterator[Any]:
        yield from real(index, data)
        time.sleep(0.2)

    monkeypatch.setattr(serving, "messages", slow)
    there = Transfer(tmp_path / "there")
    owner = TransferOwner(there, token=SecretStr("secret"), use_ucx=False)
    peer = Peer(owner.address, ClientSettings(token=SecretStr("secret")))
    there.set(KEY, {"w": torch.ones(3)})
    Transfer(tmp_path / "here", peers=[peer]).get(KEY)
    assert not owner._held._pins
    peer.close()
    owner.stop(0)


READS = """
import sys, pathlib, torch
from troupe.rpc import ClientSettings
from troupe.transfer import Transfer
from troupe.transfer.remote import Peer
torch.set_num_threads(1)
peer = Peer(sys.argv[1], ClientSettings(token="secret"), use_ucx=False)
transfer = Transfer(pathlib.Path(sys.argv[2]), peers=[peer])
own = torch.zeros(int(sys.argv[3]))
for line in sys.stdin:
    version = int(line)
    got, _ = transfer.get(f"job/solver/weights@{version}", timeout=60, lasting=version % 2 == 1)
    own.copy_(got.pop("w"))
    assert float(own.min()) == float(own.max()) == version
    print(open("/proc/self/status").read().split("RssAnon:")[1].split()[0], flush=True)
"""


@pytest.mark.slow
def test_memory_is_bounded_over_many_versions(root: Path) -> None:
    """200 versions of 64 MiB to another process, as if it were another host, on both sides."""
    count, size = 16 * MIB, 64 * MIB
    transfer = Transfer(root / "there")
    owner = TransferOwner(transfer, token=SecretStr("secret"), use_ucx=False)
    weights = torch.zeros(count)
    anonymous: list[tuple[int, int]] = []
    with start(READS, owner.address, root / "here", count) as reader:
        assert reader.stdin is not None
        assert reader.stdout is not None
        for version in range(200):
            transfer.set(f"job/solver/weights@{version}", {"w": weights.fill_(version)})
            transfer.delete(f"job/solver/weights@{version - 2}" if version >= 2 else "none")
            reader.stdin.write(f"{version}\n")
            reader.stdin.flush()
            theirs = int(reader.stdout.readline())
            ours = Path("/proc/self/status").read_text().split("RssAnon:")[1].split()[0]
            anonymous.append((int(ours), theirs))
            assert taken(root / "there") < 5 * size
            assert taken(root / "here") < 3 * size
            # Nor does memory stay that is mapped but no longer has a name.
            assert nameless() < 3 * size
        reader.stdin.close()
        reader.wait(PATIENCE)
    owner.stop(0)
    transfer.close()
    # The lowest of twenty: buffers of a transfer that has just ended may stay for a moment.
    for side in (0, 1):
        settled, last = (
            min(one[side] for one in part) for part in (anonymous[20:40], anonymous[-20:])
        )
        assert last - settled < size / 1024
