"""A launched server: its log, its end, and that it does not outlive us."""

# ruff: noqa: ASYNC220, ASYNC240 - these tests watch processes and files

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from services.rollout.engines.server_process import ServerProcess, free_port
from tests.support.processes import runs
from tests.support.waiting import PATIENCE, until

STUBBORN = "trap '' TERM; echo up; sleep 600 & echo $!; wait; sleep 600"


async def until_written(log: Path, lines: int) -> list[str]:
    await until(lambda: log.exists() and len(log.read_text().splitlines()) >= lines)
    return log.read_text().splitlines()


async def test_log_exit_code_and_tail(tmp_path: Path) -> None:
    process = ServerProcess(["/bin/sh", "-c", "seq 20; echo oops >&2; exit 7"], tmp_path / "l/log")
    assert process.exit_code is None
    await process.start()
    await until(lambda: not process.running)
    assert process.exit_code == 7
    assert process.tail().splitlines()[-1] == "oops"
    assert len(process.tail().splitlines()) == 8
    await process.stop()


async def test_stop_ends_the_whole_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.rollout.engines.server_process.TERM_SECONDS", 0.2)
    process = ServerProcess(["/bin/sh", "-c", STUBBORN], tmp_path / "log")
    await process.start()
    child = int((await until_written(tmp_path / "log", 2))[1])
    assert runs(child)
    await process.stop()
    assert not process.running
    await until(lambda: not runs(child))


async def test_a_server_dies_with_the_rollout_process(tmp_path: Path) -> None:
    log = tmp_path / "log"
    owner = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import asyncio, pathlib\n"
            "from services.rollout.engines.server_process import ServerProcess\n"
            "async def main():\n"
            f"    command = ['/bin/sh', '-c', 'echo $$; exec sleep 600']\n"
            f"    await ServerProcess(command, pathlib.Path({str(log)!r})).start()\n"
            "    await asyncio.sleep(600)\n"
            "asyncio.run(main())\n",
        ]
    )
    try:
        server = int((await until_written(log, 1))[0])
        assert runs(server)
    finally:
        os.kill(owner.pid, signal.SIGKILL)
        owner.wait(PATIENCE)
    await until(lambda: not runs(server))


def test_free_ports_differ() -> None:
    assert len({free_port() for _ in range(20)}) > 10


async def test_a_log_does_not_grow_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.rollout.engines.server_process._LOG_BYTES", 8000)
    script = "seq 10000 19999; read go < go; seq 20000 20009; sleep 600"
    os.mkfifo(tmp_path / "go")
    process = ServerProcess(["/bin/sh", "-c", f"cd {tmp_path}; {script}"], tmp_path / "log")
    process.trim_log()  # there is none yet
    await process.start()
    await until_written(tmp_path / "log", 10_000)
    process.trim_log()
    assert (tmp_path / "log").stat().st_size == 1000
    (tmp_path / "go").write_text("go\n")
    lines = await until_written(tmp_path / "log", 177)  # the first one is cut
    assert [int(line) for line in lines[1:]] == list(range(19834, 20010))
    assert process.tail().splitlines()[-1] == "20009"
    process.trim_log()
    assert len((tmp_path / "log").read_text().splitlines()) == len(lines)
    await process.stop()
