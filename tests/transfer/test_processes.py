"""A writer in one process, a reader in another; writers that die half way."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.support.waiting import PATIENCE
from troupe.disks import Scratch
from troupe.transfer import Transfer, checksum_of, segments

KEY = "job/solver/weights@1"

WRITER = """
import sys, pathlib, torch
torch.set_num_threads(1)
from troupe.transfer import Transfer
torch.manual_seed(5)
tensors = {"w": torch.randn(1000, 50), "b": torch.randn(7).to(torch.bfloat16)}
print(Transfer(pathlib.Path(sys.argv[1])).set(sys.argv[2], tensors).checksum)
"""

DYING_WRITER = """
import sys, pathlib, time, torch
from troupe.transfer import Transfer, segments
real = segments._write_all
def slow(descriptor, view, offset):
    real(descriptor, view[: len(view) // 2], offset)
    print("half", flush=True)
    time.sleep(60)
segments._write_all = slow
Transfer(pathlib.Path(sys.argv[1])).set(sys.argv[2], {"w": torch.ones(100_000)})
"""


def start(code: str, root: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code, str(root), KEY],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


@pytest.mark.skipif(not os.access("/dev/shm", os.W_OK), reason="no shared memory here")
def test_a_state_is_read_from_shared_memory_by_another_process() -> None:
    with Scratch("troupe-test-") as root:
        transfer = Transfer(root)
        with start(WRITER, root) as writer:
            # It waits while the other process starts.
            got, manifest = transfer.get(KEY, timeout=PATIENCE)
            assert writer.stdout is not None
            assert writer.stdout.read().strip() == manifest.checksum == checksum_of(got)
        assert transfer.last_transport == "shared_memory"
        assert got["w"].shape == (1000, 50)
        # No copy: the tensors lie in the mapped file.
        assert str(root / KEY) in Path("/proc/self/maps").read_text()
        transfer.set(KEY, got)
        transfer.get(KEY)
        assert transfer.last_transport == "in_process"


def test_a_writer_that_dies_half_way_is_never_visible(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    transfer = Transfer(tmp_path)
    with start(DYING_WRITER, tmp_path) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "half\n"
        directory = (tmp_path / KEY).parent
        assert len(list(directory.iterdir())) == 1  # only the temporary file
        assert not transfer.exists(KEY)
        assert transfer.keys() == []
        # Old enough to be swept, but its writer lives.
        monkeypatch.setattr(segments, "_TEMP_GRACE_SECONDS", -1.0)
        segments.sweep(directory)
        assert len(list(directory.iterdir())) == 1
        writer.send_signal(signal.SIGKILL)
        writer.wait(PATIENCE)
    time.sleep(0.01)
    transfer.set(KEY, {"w": torch.zeros(3)})
    assert [p.name for p in directory.iterdir()] == ["weights@1"]
    assert torch.equal(transfer.get(KEY)[0]["w"], torch.zeros(3))
