"""The host's files that a sandbox shows, independent of the service's location."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.reward.sandboxes.profile import BUBBLEWRAP as LEVEL
from services.reward.sandboxes.profile import SandboxProfile
from tests.support.needs import BUBBLEWRAP
from tests.support.sandbox_root import shown_below_tmp
from tests.support.waiting import PATIENCE

pytestmark = BUBBLEWRAP

_TELLS_WHAT_IT_SEES = """
import errno, json, os, sys
try:
    open(os.path.join(os.path.dirname(__file__), "written"), "w")
    written = ""
except OSError as error:
    written = errno.errorcode[error.errno]
open("/tmp/mine", "w").close()
os.remove("/tmp/mine")
tmp, host = os.listdir("/tmp"), os.path.exists("/etc/passwd")
shared = os.listdir("/dev/shm")
print(
    json.dumps(
        {
            "prefix": sys.prefix,
            "tmp": tmp,
            "host": host,
            "written": written,
            "shared": shared,
        }
    )
)
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield Path(folder)


@pytest.fixture
def shared() -> Iterator[Path]:
    """A file in the host's shared memory."""
    with tempfile.NamedTemporaryFile(dir="/dev/shm") as file:
        yield Path(file.name)


@pytest.mark.parametrize(
    "outer", ["/", "//", "/tmp", "//tmp", "/tmp/", "/dev/shm", "//dev", "LINK"]
)
def test_imports_below_tmp_are_visible_and_uncover_nothing_else(
    outer: str, folder: Path, shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    below = shown_below_tmp()
    venv, program = folder / "venv", folder / "imports" / "program.py"
    subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", venv], check=True, timeout=PATIENCE
    )
    program.parent.mkdir()
    program.write_text(_TELLS_WHAT_IT_SEES)
    if outer == "LINK":
        outer = str(folder / "link")
        Path(outer).symlink_to("/tmp")
    monkeypatch.setattr(sys, "path", [outer, str(program.parent), *sys.path])
    monkeypatch.setattr(sys, "executable", str(venv / "bin" / "python"))
    monkeypatch.setattr(sys, "prefix", str(venv))
    profile = SandboxProfile(LEVEL, processes=8, disk_mib=8)
    command, environment = profile.wrap([str(program)])
    assert outer not in environment["PYTHONPATH"].split(os.pathsep)
    run = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=True, timeout=PATIENCE
    )
    seen = json.loads(run.stdout)
    assert seen["prefix"] == str(venv)
    assert set(seen["tmp"]) == {folder.name} | below
    assert seen["host"] is False
    assert seen["written"] in ("EROFS", "EACCES")
    assert shared.exists()
    assert seen["shared"] == []


@pytest.mark.parametrize("outer", ["/", "//tmp"])
def test_the_working_directory_of_the_service_grants_no_reads(
    outer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [outer, *sys.path])
    command, _ = SandboxProfile(reads=("/models",)).launch()
    reads, writes, lists = json.loads(command[-1].removeprefix("--landlock="))
    assert outer not in [*reads, *lists]
    assert sys.prefix in reads
    assert "/models" in reads
    assert writes == []
