"""The program on the README's first page runs as it is, and its team learns."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
_BLOCK = re.compile(r'(?s)```python title="(?P<name>[\w.]+)"\n(?P<text>.*?)\n```')


def test_the_readme_begins_with_a_program_of_a_screen() -> None:
    text = (ROOT / "README.md").read_text()
    found = _BLOCK.search(text)
    assert found is not None
    assert text.index("```") == found.start()  # nothing to copy comes before it
    assert len([line for line in found["text"].splitlines() if line.strip()]) <= 25


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_readme_program_learns(tmp_path: Path) -> None:
    found = _BLOCK.search((ROOT / "README.md").read_text())
    assert found is not None
    (tmp_path / found["name"]).write_text(found["text"])
    variables = {k: v for k, v in os.environ.items() if not k.startswith("TROUPE_")}
    variables["PYTHONPATH"] = str(ROOT)

    def python(*arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, *arguments],
            cwd=tmp_path,
            env=variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=1800,  # deadline: minutes of training on two cores
        )
        assert done.returncode == 0, done.stdout[-4000:]
        return done.stdout

    python("-m", "troupe.demo.warm_start", "--out", "runs/models/reasoning_team-0")
    printed = python(found["name"]).splitlines()[-1]
    before, after = (
        dict(re.findall(r"'([\w/]+)': ([\d.]+)", part))
        for part in printed.replace("} {", "}\n{").splitlines()
    )
    assert before.keys() == after.keys() >= {"team_success", "reward/writer"}
    assert float(after["reward/writer"]) > float(before["reward/writer"]) + 0.2
    assert float(after["team_success"]) > float(before["team_success"]) + 0.1
