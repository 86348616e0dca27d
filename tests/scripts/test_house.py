"""The counts of `scripts.house`: circles of imports, names of classes."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scripts.house import circles, imports, modules, shared_class_names, unexcused

TYPES = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    "
GRAPHS = st.dictionaries(
    st.sampled_from("abcdefgh"), st.sets(st.sampled_from("abcdefgh")), max_size=8
)


def circles_of(root: Path, *, loading: bool = False, **texts: str) -> list[list[str]]:
    """The circles of a product whose package `troupe` has these modules."""
    for folder in ("troupe", "services"):
        (root / folder).mkdir()
    for name, text in texts.items():
        (root / "troupe" / f"{name}.py").write_text(text)
    product = modules(root)
    return circles({n: imports(m, product, loading=loading) for n, m in product.items()})


@pytest.mark.parametrize("back", ["", TYPES, "def late():\n    "])
@pytest.mark.parametrize("statement", ["from troupe.a import x", "from troupe import a"])
def test_circles_two_modules_import_each_other_anywhere_are_one(
    tmp_path: Path, back: str, statement: str
) -> None:
    there = "import troupe.b"
    assert circles_of(tmp_path, a=there, b=f"{back}{statement}") == [["troupe.a", "troupe.b"]]


def test_circles_chain_of_imports_has_none(tmp_path: Path) -> None:
    chain = {"a": "import troupe.b", "b": f"{TYPES}import troupe.c", "c": "import json"}
    assert circles_of(tmp_path, **chain) == []


@pytest.mark.parametrize("back", [TYPES, "def late():\n    "])
def test_circles_while_loading_ignore_imports_that_do_not_run(tmp_path: Path, back: str) -> None:
    texts = {"a": "import troupe.b", "b": f"{back}import troupe.a"}
    assert circles_of(tmp_path, loading=True, **texts) == []


@given(GRAPHS)
def test_circles_any_graph_are_the_modules_that_reach_each_other(
    graph: dict[str, set[str]],
) -> None:
    graph = {name: graph.get(name, set()) - {name} for name in "abcdefgh"}

    def reached(start: str) -> set[str]:
        found: set[str] = set()
        while more := {two for one in found | {start} for two in graph[one]} - found:
            found |= more
        return found

    wanted = {
        frozenset({one, *(two for two in reached(one) if one in reached(two))})
        for one in graph
        if one in reached(one)
    }
    assert {frozenset(ring) for ring in circles(graph)} == wanted


def test_unexcused_part_of_an_excused_circle_is_excused() -> None:
    excused = {frozenset("abc"): "being removed", frozenset("xy"): "gone"}
    rings = [["a", "b"], ["c", "d"]]
    assert unexcused(rings, excused) == ([["c", "d"]], [["x", "y"]])


def test_shared_class_names_are_counted_by_package(tmp_path: Path) -> None:
    for folder in ("troupe/job", "troupe/job/inner", "services/trainer"):
        (tmp_path / folder).mkdir(parents=True)
    for file in ("troupe/job/a", "troupe/job/inner/b", "services/trainer/c"):
        (tmp_path / f"{file}.py").write_text("class Turn:\n    pass\n")
    shared = shared_class_names(modules(tmp_path))
    assert {name: [str(path) for path in paths] for name, paths in shared.items()} == {
        "troupe/job: Turn": ["troupe/job/a.py", "troupe/job/inner/b.py"]
    }
