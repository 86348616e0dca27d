"""The documentation builds as a site without a warning; its links out of docs/ lead somewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def test_every_page_is_in_the_navigation() -> None:
    named = set(re.findall(r": ([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.M))
    pages = {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")}
    assert named == pages


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "-d", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
    )
    assert (done.returncode, done.stdout) == (0, "")
    assert (tmp_path / "tutorials/first-team/index.html").is_file()
    # A README outside of docs/, and a module, from where pages link to them.
    assert (tmp_path / "repository/examples/reasoning_team/index.html").is_file()
    page = (tmp_path / "data/index.html").read_text()
    link = re.search(r'href="(\.\./repository/troupe/workflow/asking[^"]*)"', page)
    assert link is not None
    assert (tmp_path / "data" / link[1] / "index.html").resolve().is_file()
