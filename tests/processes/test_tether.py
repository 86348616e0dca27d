"""Tethered processes: their commands, and their end with their parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from troupe.processes import tether
from troupe.processes.tether import tethered

SECONDS = 60.0
# A parent that starts a tethered process, prints its id, and then does nothing.
PARENT = """
import subprocess, sys, time
from troupe.processes.tether import tethered
print(subprocess.Popen(tethered(sys.argv[1:])).pid, flush=True)
time.sleep(600)
"""


def test_a_tethered_command_keeps_arguments_environment_and_exit_status() -> None:
    done = subprocess.run(
        tethered(["/bin/sh", "-c", 'echo "$1 $WORD"; exit 7', "sh", "--one two"]),
        env={"WORD": "three"},
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert (done.returncode, done.stdout) == (7, "--one two three\n")


def test_a_program_that_is_not_found_is_refused_by_name() -> None:
    with pytest.raises(FileNotFoundError, match="/no/such/program"):
        tethered(["/no/such/program"])


def test_a_program_that_cannot_be_run_exits_with_127_and_the_reason(tmp_path: Path) -> None:
    program = tmp_path / "program"
    program.write_bytes(b"\x7fELF")
    program.chmod(0o700)
    command = tethered([str(program)])
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 127
    assert done.stderr == f"cannot run {program}: Exec format error\n"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_tethered_process_ends_when_its_parent_is_killed(number: signal.Signals) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, "sleep", "600"], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        parent.send_signal(number)
    _, alive = psutil.wait_procs([child], timeout=SECONDS)
    assert not alive


def test_a_process_whose_parent_has_ended_already_ends_at_once() -> None:
    ended = subprocess.Popen(["true"])
    ended.wait(SECONDS)
    command = tethered(["sleep", "600"])
    command[command.index(str(os.getpid()))] = str(ended.pid)
    assert subprocess.run(command, timeout=SECONDS).returncode == -signal.SIGTERM


def test_the_script_loads_no_module_but_light_ones_of_the_standard_library() -> None:
    code = (
        "import runpy, sys\n"
        f"runpy.run_path({tether.__file__!r})\n"
        "print(*{name.partition('.')[0] for name in sys.modules})"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, timeout=SECONDS
    )
    assert not {"troupe", "asyncio", "subprocess", "psutil"} & set(done.stdout.split())
