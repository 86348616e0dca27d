"""Pages say each thing once: no line stands twice with a word changed, as after a wrong merge."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Written by programs: lists of fields resemble each other.
GENERATED = {"sdk.md", "job-reference.md", "chaos-report.md"}
PAGES = sorted(
    page
    for page in (*(ROOT / "docs").rglob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md")
    if page.name not in GENERATED
)
# Lines this near to each other, of at least so many characters, with so much in common.
WITHIN, CHARACTERS, ALIKE = 8, 45, 0.78


def prose(text: str) -> Iterator[tuple[int, str]]:
    """Yield the numbered lines of paragraphs and tables."""
    fenced = False
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("```"):
            fenced = not fenced
        elif not fenced and not line.startswith(("    ", "![")):
            yield number, line.strip()


def repeated(text: str) -> list[str]:
    """Return the lines that nearly stand twice, and rows of a table with two equal first cells."""
    lines = [(n, line) for n, line in prose(text) if len(line) >= CHARACTERS]
    found = []
    for i, (first, a) in enumerate(lines):
        words = set(re.findall(r"\w+", a))
        for second, b in lines[i + 1 : i + 1 + WITHIN]:
            others = set(re.findall(r"\w+", b))
            if second - first > WITHIN or a.startswith(("|", "- ")):
                break
            # Cheap, for nearly all pairs.
            if len(words & others) < 0.6 * min(len(words), len(others)):
                continue
            if difflib.SequenceMatcher(None, a, b, autojunk=False).ratio() >= ALIKE:
                found.append(f"lines {first} and {second}: {a}")
    seen: dict[tuple[str, ...], int] = {}
    for number, line in prose(text):
        cells = tuple(cell.strip() for cell in line.split("|")[1:3])
        if not line.startswith("|"):
            seen.clear()
        elif cells in seen and all(re.search(r"[a-z]|^:?-+:?$", cell) for cell in cells):
            found.append(f"rows {seen[cells]} and {number}: {' | '.join(cells)}")
        else:
            seen[cells] = number
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_says_each_thing_once(page: Path) -> None:
    assert not repeated(page.read_text(encoding="utf-8"))


def test_a_merge_that_kept_both_sides_is_found() -> None:
    text = (
        "Servers get each bucket while the trainer publishes the same tensors.\n"
        "Servers take each bucket while the trainer publishes the same tensors.\n"
        "\n"
        "| engine | weights |\n|---|---|\n|---|---|\n| new | in place |\n| new | in place |\n"
    )
    assert [found.partition(":")[0] for found in repeated(text)] == [
        "lines 1 and 2",
        "rows 5 and 6",
        "rows 7 and 8",
    ]
