"""Claims in the documentation about other systems and about Troupe's speed have a source."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).resolve().parents[2]
COMPARE: Final = ROOT / "docs" / "compare.md"
MONTH: Final = re.compile(r"20\d\d-(0[1-9]|1[0-2])")

Row = dict[str, str]


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def tables(text: str) -> Iterator[list[Row]]:
    """Yield the rows of each Markdown table, keyed by header (a nameless column: by position)."""
    for block in re.findall(r"(?:^\|.*\n)+", text, re.M):
        header, _, *lines = block.splitlines()
        names = [name or str(place) for place, name in enumerate(_cells(header))]
        yield [dict(zip(names, _cells(line), strict=True)) for line in lines]


def compared() -> list[Row]:
    return [row for table in tables(COMPARE.read_text()) for row in table]


def claims() -> list[Row]:
    section = (ROOT / "README.md").read_text().split("## What Troupe adds\n")[1].split("\n## ")[0]
    return [row for table in tables(section) for row in table]


def test_every_row_of_the_comparison_has_a_source_and_a_month() -> None:
    rows = compared()
    assert rows
    for row in rows:
        assert re.search(r"`[^`]+`|\]\(|#\d+|README|documentation", row["Source"]), row
        assert MONTH.fullmatch(row["Checked"]), row


def test_every_compared_system_states_the_commit_or_version_that_was_read() -> None:
    read, teams, _, general, _ = tables(COMPARE.read_text())
    states = {row["System"]: row["Source"] for row in read}
    for source in states.values():
        assert re.search(r"at [0-9a-f]{7,}|package `\w+` \d", source), source
    named = {row["System"] for row in teams} | (general[0].keys() - {"0", "Source", "Checked"})
    assert named - {"Troupe"} <= states.keys()


def test_the_readme_has_claims_with_a_month_each() -> None:
    rows = claims()
    assert len(rows) > 5
    for row in rows:
        assert MONTH.search(" ".join(row.values())), row


@pytest.mark.parametrize("row", claims(), ids=lambda row: next(iter(row.values()))[:30])
def test_each_figure_of_a_readme_claim_is_on_a_page_it_links(row: Row) -> None:
    *_, links = row.values()
    pages = [ROOT / link for link in re.findall(r"\]\(([^)#]+)", links)]
    assert pages
    text = " ".join(page.read_text() for page in pages)
    figures = re.findall(r"\d[\d.,]*\d|\d", row.get("measured") or row["simulated"])
    absent = [it for it in figures if not re.search(rf"(?<![\d.,]){re.escape(it)}(?![\d])", text)]
    assert absent == []
