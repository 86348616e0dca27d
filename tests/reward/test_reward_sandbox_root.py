"""What of the host's files a sandbox shows, wherever the service itself lies."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from services.reward.sandbox import BUBBLEWRAP as LEVEL
from services.reward.sandbox import Cage
from tests.support.needs import BUBBLEWRAP
from tests.support.sandbox_root import shown_below_tmp

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
print(json.dumps({"prefix": sys.prefix, "tmp": tmp, "host": host, "written": written}))
"""


def test_what_lies_below_tmp_is_seen_and_imports_from_tmp_or_the_root_uncover_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shown = shown_below_tmp()
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        venv, program = Path(folder, "venv"), Path(folder, "imports", "program.py")
        subprocess.run(
            [sys.executable, "-m", "venv", "--without-pip", venv], check=True, timeout=60
        )
        program.parent.mkdir()
        program.write_text(_TELLS_WHAT_IT_SEES)
        monkeypatch.setattr(sys, "path", ["/", "/tmp", str(program.parent), *sys.path])
        monkeypatch.setattr(sys, "executable", str(venv / "bin" / "python"))
        monkeypatch.setattr(sys, "prefix", str(venv))
        command, environment = Cage(LEVEL, processes=8, disk_mib=8).wrap([str(program)])
        run = subprocess.run(
            command, env=environment, capture_output=True, text=True, check=True, timeout=60
        )
    seen = json.loads(run.stdout)
    assert seen["prefix"] == str(venv)
    assert set(seen["tmp"]) == {Path(folder).name} | shown
    assert seen["host"] is False
    assert seen["written"] == "EROFS"
