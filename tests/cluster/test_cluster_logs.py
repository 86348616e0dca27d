"""Logs of processes that print endlessly: bounded while they run, with a note about the cut."""

from __future__ import annotations

import errno
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.cluster.test_cluster_supervisor import SERVER, spec
from tests.support.waiting import until
from troupe.cluster import logs
from troupe.cluster.embedded import pick_ports
from troupe.cluster.supervisor import Supervisor

LIMIT = 1 << 20
LINES = re.compile(rb"line (\d+) x+")
# The last lines come after a pause, since lines written during the truncation are lost.
PRINTER = """
import sys, time
count = int(sys.argv[1])
for number in range(count):
    if number == count - 1000:
        sys.stdout.flush()
        time.sleep(0.5)
    sys.stdout.write(f"line {number} " + "x" * 200 + "\\n")
"""


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "ROTATE_BYTES", LIMIT)


def numbers(path: Path) -> list[int]:
    """Return the numbers in the complete lines of a log."""
    return [int(found) for found in LINES.findall(path.read_bytes())]


@pytest.mark.slow
def test_a_log_is_rotated_while_its_process_writes(tmp_path: Path) -> None:
    path, older, count = tmp_path / "noisy.log", tmp_path / "noisy.log.1", 60_000
    most = 0
    with logs.open_log(path, "noisy start 1") as file:
        process = subprocess.Popen([sys.executable, "-c", PRINTER, str(count)], stdout=file)
        while process.poll() is None:
            logs.rotate(path)
            most = max(most, older.stat().st_size if older.exists() else 0)
            time.sleep(0.002)
    assert process.returncode == 0
    assert most < 3 * LIMIT
    logs.rotate(path)
    kept = numbers(older) + numbers(path)
    assert kept == sorted(kept)
    assert kept[-1] == count - 1, "the newest is there"
    assert len(kept) < count, "60,000 lines have 12 MB"
    assert path.stat().st_size <= LIMIT
    assert b"earlier lines are in noisy.log.1" in path.read_bytes() + older.read_bytes()
    assert logs.last_line(path).startswith(f"line {count - 1}")


def test_the_newest_lines_are_kept_whatever_comes_during_the_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, older = tmp_path / "noisy.log", tmp_path / "noisy.log.1"
    path.write_bytes(b"".join(b"line %d xxx\n" % n for n in range(100_000)))
    real, bursts = os.fstat, [60_000, 300_000, 500, 1]

    def written_meanwhile(descriptor: int) -> os.stat_result:
        if bursts:  # a process that has the processor while this one waits for it
            with path.open("ab") as log:
                first = next_number[0]
                next_number[0] += (count := bursts.pop(0))
                log.write(b"".join(b"line %d xxx\n" % n for n in range(first, first + count)))
        return real(descriptor)

    next_number = [100_000]
    monkeypatch.setattr(logs.os, "fstat", written_meanwhile)
    logs.rotate(path)
    kept = numbers(older)
    assert not bursts
    assert kept == list(range(kept[0], 460_501))
    assert LIMIT // 2 < older.stat().st_size <= 2 * LIMIT + 100
    assert b"bytes between were cut" not in path.read_bytes()


def test_a_rotated_log_counts_the_bytes_that_were_cut(tmp_path: Path) -> None:
    path = tmp_path / "noisy.log"
    line = b"line 7 " + b"x" * 92 + b"\n"
    path.write_bytes(line * 30_000)
    logs.rotate(path)
    older = (tmp_path / "noisy.log.1").read_bytes()
    first, _, rest = older.partition(b"\n")
    cut = int(first.split()[1].replace(b",", b""))
    assert first.endswith(b"bytes before this were cut ---")
    assert cut + len(rest) == 3_000_000
    assert len(rest) <= LIMIT
    assert logs.last_line(path) == line.decode().strip(), "a log that was just begun anew"


def test_a_disk_without_room_makes_some(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "noisy.log"
    path.write_bytes(b"line\n" * 400_000)
    (tmp_path / "noisy.log.1").write_bytes(b"old")

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(logs, "_move_end", full)
    logs.rotate(path)
    assert path.stat().st_size < 1000
    assert b"2,000,000 bytes were cut" in path.read_bytes()
    assert not (tmp_path / "noisy.log.1").exists()


def test_a_log_that_cannot_be_rotated_does_not_keep_others_from_it(tmp_path: Path) -> None:
    path = tmp_path / "noisy.log"
    path.write_bytes(b"x" * (2 * LIMIT))
    with pytest.raises(IsADirectoryError):
        logs.rotate_all([tmp_path, path])
    assert path.stat().st_size < LIMIT


async def test_the_supervisor_rotates_what_its_children_print(tmp_path: Path) -> None:
    noisy = SERVER.replace(
        "http.server.HTTPServer(",
        "for number in range(40_000): print('line', number, 'x' * 200)\n"
        "sys.stdout.flush(); http.server.HTTPServer(",
    )
    (port,) = pick_ports(["noisy"]).values()
    supervisor = Supervisor([spec("noisy", port, noisy)], tmp_path)
    path, older = tmp_path / "noisy.log", tmp_path / "noisy.log.1"
    try:
        await supervisor.start()
        await until(lambda: older.exists() and path.stat().st_size <= LIMIT)
    finally:
        await supervisor.stop()
    assert (numbers(older) + numbers(path))[-1] == 39_999
    assert older.stat().st_size < 3 * LIMIT
