"""The pictures of docs/benchmarks/twin.md: drawn from the kept figures, and up to date."""

from __future__ import annotations

import json
from xml.etree import ElementTree

import pytest

from benchmarks.papers.twin.pictures import FOLDER, drawn, picture

_PAGE = FOLDER.parent / "benchmarks" / "twin.md"


def test_pictures_are_those_of_the_kept_figures_and_shown() -> None:
    figures = json.loads((FOLDER / "figures.json").read_text(encoding="utf-8"))
    page = _PAGE.read_text(encoding="utf-8")
    for name, svg in drawn(figures).items():
        assert (FOLDER / f"{name}.svg").read_text(encoding="utf-8") == svg, (
            f"{name}: run python -m benchmarks.papers.twin.pictures"
        )
        assert f"(../twin/{name}.svg)" in page


def test_a_bar_is_as_high_as_its_value() -> None:
    panel = {
        "title": "a",
        "x": ["one", "two"],
        "series": {"here": [1.0, 4.0], "there": [2.0, None]},
    }
    root = ElementTree.fromstring(picture("p", {"kind": "bars", "panels": [panel]}))
    bars = [one for one in root.iter("{http://www.w3.org/2000/svg}rect") if one.get("fill")]
    first, second, third = (float(one.get("height", "0")) for one in bars)
    assert second == pytest.approx(4 * first, rel=0.01)
    assert third == pytest.approx(2 * first, rel=0.01)


def test_lines_leave_out_what_is_not_known_and_grow_evenly_on_a_logarithmic_axis() -> None:
    panel = {
        "title": "a",
        "axis": "workers",
        "logarithmic": True,
        "x": [1, 4, 16],
        "series": {"here": [1, 4, 16], "there": [1, None, 4]},
    }
    root = ElementTree.fromstring(picture("p", {"kind": "lines", "panels": [panel]}))
    here, there = (
        [tuple(map(float, point.split(","))) for point in one.get("points", "").split()]
        for one in root.iter("{http://www.w3.org/2000/svg}polyline")
    )
    assert len(here) == 3
    assert len(there) == 2
    assert here[0][1] - here[1][1] == pytest.approx(here[1][1] - here[2][1], abs=0.2)
    assert here[1][0] - here[0][0] == pytest.approx(here[2][0] - here[1][0], abs=0.2)


def test_a_series_with_too_few_values_is_named() -> None:
    panel = {"title": "a", "x": ["one", "two"], "series": {"here": [1.0]}}
    with pytest.raises(ValueError, match=r"mine\.here: 1 values for 2 points"):
        picture("mine", {"kind": "bars", "panels": [panel]})
