"""Files that are refilled, and conditions that prevent it."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.support.waiting import PATIENCE
from troupe.disks import Scratch
from troupe.transfer import Corrupt, Manifest, Transfer, segments
from troupe.transfer import segments as shelf_module
from troupe.transfer.blob import chunks_of
from troupe.transfer.segments import Lease, Mappings

STEM = "job/solver/weights"
# More than is worth keeping.
COUNT = 2 * 2**20

pytestmark = pytest.mark.skipif(not os.access("/dev/shm", os.W_OK), reason="no shared memory here")


@pytest.fixture
def root() -> Iterator[Path]:
    with Scratch("troupe-test-") as root:
        yield root


def state(value: int) -> dict[str, torch.Tensor]:
    return {"w": torch.full((COUNT,), float(value))}


def holds(manifest: Manifest, lease: Lease) -> bool:
    """Return whether all bytes have the value that was set."""
    return not any(chunk.damaged(lease.data) for chunk in chunks_of(manifest))


def inode(transfer: Transfer, version: int) -> int:
    return (transfer.roots[0] / f"{STEM}@{version}").stat().st_ino


def test_deleted_versions_give_their_files_to_new_ones(root: Path) -> None:
    transfer = Transfer(root)
    inodes = []
    for version in range(5):
        transfer.set(f"{STEM}@{version}", state(version))
        transfer.delete(f"{STEM}@{version - 1}")
        inodes.append(inode(transfer, version))
        assert float(transfer.get(f"{STEM}@{version}")[0]["w"][-1]) == version
    assert len(set(inodes)) == 2
    spare = list((root / ".spare").iterdir())
    assert len(spare) == 2
    transfer.close()
    assert not list((root / ".spare").iterdir())
    assert Transfer(root).keys() == [f"{STEM}@4"]  # states stay


def test_memory_of_versions_deleted_together_is_free_at_once(root: Path) -> None:
    transfer = Transfer(root)
    for version in range(6):
        transfer.set(f"{STEM}@{version}", state(version))
    for key in [f"{STEM}@{version}" for version in range(6)]:
        transfer.delete(key)
    left = [file.stat().st_size for file in (root / ".spare").iterdir()]
    assert len(left) == 2
    held, _ = transfer.get(transfer.set(f"{STEM}@7", state(7)).key)
    transfer.delete(f"{STEM}@7")
    assert float(held["w"].min()) == 7


def test_leftovers_of_a_dead_writer_are_swept_from_every_folder(root: Path) -> None:
    transfer = Transfer(root)
    transfer.set(f"{STEM}@0", state(0))
    left, young = (root / f"job/solver/.weights@{n}.0123456789abcdef.tmp" for n in (1, 2))
    for file in (left, young):
        file.write_bytes(b"half")
    os.utime(left, (0, 0))
    Transfer(root).sweep()
    assert not left.exists()
    assert young.exists()  # its writer may be about to lock it
    assert transfer.keys() == [f"{STEM}@0"]


def test_a_file_that_somebody_reads_is_not_filled_again(root: Path) -> None:
    transfer, reader = Transfer(root), Transfer(root)
    transfer.set(f"{STEM}@0", state(0))
    held, _ = reader.get(f"{STEM}@0")
    first = inode(transfer, 0)
    transfer.delete(f"{STEM}@0")
    for version in (1, 2, 3):
        transfer.set(f"{STEM}@{version}", state(version))
        assert inode(transfer, version) != first
        transfer.delete(f"{STEM}@{version}")
    assert float(held["w"].sum()) == 0


READER = """
import sys, pathlib
from troupe.transfer import Transfer
got, _ = Transfer(pathlib.Path(sys.argv[1])).get(sys.argv[2])
print("reads", flush=True)
sys.stdin.readline()
print(float(got["w"].sum()), flush=True)
"""


def test_a_reader_in_another_process_keeps_its_version(root: Path) -> None:
    transfer = Transfer(root)
    transfer.set(f"{STEM}@1", state(1))
    command = [sys.executable, "-c", READER, str(root), f"{STEM}@1"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as reader:
        assert reader.stdout is not None
        assert reader.stdout.readline() == "reads\n"
        for version in range(2, 5):
            transfer.delete(f"{STEM}@{version - 1}")
            transfer.set(f"{STEM}@{version}", state(version))
        assert reader.communicate("\n", timeout=PATIENCE)[0] == f"{float(COUNT)}\n"


def test_unused_spare_segments_free_their_memory(root: Path) -> None:
    writer, other = Transfer(root), Transfer(root)
    writer.set(f"{STEM}@0", state(0))
    writer.delete(f"{STEM}@0")
    for spares in other._segments.pools.values():
        spares.sweep(0)  # one of another process that has waited long enough
    assert not list((root / ".spare").iterdir())
    # The process that kept it notices.
    writer.set(f"{STEM}@1", state(1))
    assert float(writer.get(f"{STEM}@1")[0]["w"].sum()) == COUNT


def test_a_host_verifies_content_once(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = Transfer(root)
    writer.set(f"{STEM}@0", state(3))
    verified = []
    real = shelf_module._verify

    def counting(mapped, *how):  # type: ignore[no-untyped-def]
        verified.append(mapped.manifest.key)
        real(mapped, *how)

    monkeypatch.setattr(shelf_module, "_verify", counting)
    readers = [threading.Thread(target=Transfer(root).get, args=[f"{STEM}@0"]) for _ in range(4)]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join(PATIENCE)
    assert verified == [f"{STEM}@0"]
    # Until a process writes to it.
    with open(root / f"{STEM}@0", "r+b") as file:
        file.seek(-3, os.SEEK_END)
        file.write(b"\x01\x02\x03")
    for _ in range(2):
        with pytest.raises(Corrupt, match="'w'"):
            Transfer(root).get(f"{STEM}@0")
    assert len(verified) == 3


def test_a_held_lock_excludes_others(tmp_path: Path) -> None:
    path = tmp_path / "state"
    with segments.alone(path, 0.0), pytest.raises(TimeoutError), segments.alone(path, 0.0):
        pass
    with segments.alone(path, 0.0):
        pass
    assert not list(tmp_path.iterdir())


def test_waiters_of_a_lock_return_once_the_work_is_done(tmp_path: Path) -> None:
    path = tmp_path / "state"
    done, told = threading.Event(), []

    def wait() -> None:
        with segments.alone(path, time.monotonic() + PATIENCE, unless=done.is_set) as first:
            told.append(first)

    with segments.alone(path, 0.0, unless=done.is_set) as first:
        assert first
        waiting = [threading.Thread(target=wait) for _ in range(3)]
        for one in waiting:
            one.start()
        done.set()
        for one in waiting:
            one.join(PATIENCE)
        assert told == [False] * 3, "although the lock is still held"
    done.clear()
    wait()
    assert told[-1]


def test_readers_of_verified_state_do_not_wait_for_the_lock(root: Path) -> None:
    transfer = Transfer(root)
    transfer.set(f"{STEM}@0", state(0))
    Transfer(root).get(f"{STEM}@0")
    with segments.alone(root / f"{STEM}@0", 0.0):
        assert Transfer(root).get(f"{STEM}@0", timeout=0.0)


def test_an_owner_keeps_the_mapping_of_a_file_that_is_filled_again(root: Path) -> None:
    transfer, mappings = Transfer(root), Mappings()
    transfer.set(f"{STEM}@0", state(0))
    first, lease = mappings.lease(transfer.opened(f"{STEM}@0"))
    mapping = lease.data.obj
    assert holds(first, lease)
    transfer.delete(f"{STEM}@0")
    # It is leased: the next version gets another file.
    transfer.set(f"{STEM}@1", state(1))
    assert holds(first, lease)
    del lease
    transfer.delete(f"{STEM}@1")
    transfer.set(f"{STEM}@2", state(2))
    transfer.set(f"{STEM}@3", state(3))
    leases = [mappings.lease(transfer.opened(f"{STEM}@{version}")) for version in (2, 3)]
    assert any(lease.data.obj is mapping for _, lease in leases)
    for manifest, lease in leases:
        assert holds(manifest, lease)


def test_released_memory_is_free_although_an_owner_has_it_mapped(root: Path) -> None:
    transfer, mappings = Transfer(root), Mappings()
    transfer.set(f"{STEM}@0", state(0))
    lease = mappings.lease(transfer.opened(f"{STEM}@0"))[1]
    with open(lease.file.name, "rb") as file:
        del lease
        transfer.delete(f"{STEM}@0")
        transfer.close()
        status = os.fstat(file.fileno())
        assert (status.st_nlink, status.st_size) == (0, 0)
    mappings.sweep()
    assert not mappings._kept


def test_a_kept_mapping_shows_the_present_state(root: Path) -> None:
    transfer, other = Transfer(root), Transfer(root)
    for version in range(4):
        checksum = transfer.set(f"{STEM}@{version}", state(version)).checksum
        for reader in (transfer, other):
            got, manifest = reader.get(f"{STEM}@{version}", lasting=True)
            assert manifest.checksum == checksum
            assert (float(got["w"][0]), float(got["w"][-1])) == (version, version)
        # Its reader still has it, so the file is not refilled.
        transfer.delete(f"{STEM}@{version}")
        transfer.set(f"{STEM}@{version + 10}", state(99))
        assert float(got["w"][-1]) == version
        del got
        transfer.delete(f"{STEM}@{version + 10}")
    # The same few files.
    assert 1 <= len(transfer._mappings._kept) <= 2
