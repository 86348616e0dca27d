"""Directories in host memory are removed with their process, however it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.support.waiting import PATIENCE
from troupe.disks import Scratch


def test_scratch_is_removed_after_a_killed_process_and_kept_for_a_living_one(
    tmp_path: Path,
) -> None:
    code = (
        "import os, pathlib\n"
        "from troupe.disks import Scratch\n"
        f"path = Scratch('mine-', pathlib.Path({str(tmp_path)!r})).path\n"
        "(path / 'state').write_bytes(b'x')\n"
        "print(path, flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE
    )
    left = Path(ended.stdout.strip())
    assert (left / "state").is_file()
    with Scratch("others-", tmp_path):
        assert left.is_dir()
    first, second = Scratch("mine-", tmp_path), Scratch("mine-", tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted([first.path, second.path])
    for scratch in (first, second, second):
        scratch.close()
    assert not list(tmp_path.iterdir())


def test_a_sweep_leaves_directories_that_are_being_made(tmp_path: Path) -> None:
    made: list[Scratch] = []

    def make() -> None:
        made.extend(Scratch("mine-", tmp_path) for _ in range(50))

    threads = [threading.Thread(target=make) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert sorted(tmp_path.iterdir()) == sorted(scratch.path for scratch in made)
    assert len(made) == 200
    for scratch in made:
        scratch.close()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_terminated_benchmark_removes_its_files(number: signal.Signals) -> None:
    code = (
        "import time\n"
        "from benchmarks.command import run_program, scratch\n"
        "def main():\n"
        "    with scratch() as directory:\n"
        "        print(directory, flush=True)\n"
        "        time.sleep(600)\n"
        "run_program(main)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    with subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=environment,
        # A suite that nohup started ignores SIGHUP, and so would its children.
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),
    ) as process:
        assert process.stdout is not None
        directory = Path(process.stdout.readline().strip())
        assert directory.is_dir()
        process.send_signal(number)
        assert process.wait(PATIENCE) == 128 + number
    assert not directory.exists()
