"""Every link of the documentation leads somewhere."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    page
    for pattern in ("*.md", "docs/**/*.md", "examples/**/*.md", "deploy/**/*.md")
    for page in ROOT.glob(pattern)
)
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_HEADING = re.compile(r"(?m)^#+ (.*)$")


def anchors(page: Path) -> set[str]:
    """Return the anchors of its headings, in GitHub's form."""
    found = _HEADING.findall(page.read_text())
    return {re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-") for text in found}


def broken(page: Path) -> Iterator[str]:
    for link in _LINK.findall(page.read_text()):
        if ":" in link:  # elsewhere
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        missing = not target.exists()
        if missing or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
            yield link


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    assert not list(broken(page))


def test_paths_of_the_map_exist() -> None:
    paths = re.findall(r"`([\w./-]+/[\w./-]*)`", (ROOT / "docs/where.md").read_text())
    assert len(paths) > 40
    assert not [path for path in paths if not (ROOT / path).exists()]


def test_the_map_has_a_line_for_each_common_change() -> None:
    rows = re.findall(r"(?m)^\| (?!-)(.+?) \|", (ROOT / "docs/where.md").read_text())
    changes = [row for row in rows if row not in ("change", "question", "part", "---")]
    assert len(changes) >= 25
    assert len(changes) == len(set(changes))
