"""Files that people and forges expect at the root: they exist and are correct."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
import yaml

from scripts import house

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_the_citation_is_of_this_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == PROJECT["version"]
    assert citation["license"] == PROJECT["license"]
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()


def test_the_workflow_runs_what_ci_runs() -> None:
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
    [job] = workflow["jobs"].values()
    assert [step for step in job["steps"] if step.get("run") == ".ci/run"]
    asked = next(step["with"] for step in job["steps"] if "setup-python" in step.get("uses", ""))
    assert f">={asked['python-version']}" == PROJECT["requires-python"]
    assert (ROOT / asked["cache-dependency-path"]).is_file()


@pytest.mark.parametrize("name", ["bug", "feature"])
def test_a_form_for_issues_has_what_the_forge_asks_for(name: str) -> None:
    form = yaml.safe_load((ROOT / f".github/ISSUE_TEMPLATE/{name}.yml").read_text())
    assert {"name", "description", "body"} <= form.keys()
    for field in form["body"]:
        assert field["type"] == "textarea"
        assert field["attributes"]["label"]


def test_targets_of_make_that_people_are_told_exist() -> None:
    made = set(re.findall(r"(?m)^([a-z-]+):", (ROOT / "Makefile").read_text()))
    pages = ("README.md", "CONTRIBUTING.md", ".github/PULL_REQUEST_TEMPLATE.md", "AGENTS.md")
    for page in (*pages, "docs/contributing.md"):
        text = (ROOT / page).read_text()
        told = re.findall(r"(?m)(?:^    |`)make ([a-z-]+)", text)
        assert set(told) <= made, page


def test_circles_of_imports_are_found(tmp_path: Path) -> None:
    """Also circles of imports within functions, and circles that a package's own imports close."""
    files = {
        "troupe/one/__init__.py": "from troupe.one.app import main",
        "troupe/one/app.py": "from troupe.two import demo",
        "troupe/one/options.py": "",
        "troupe/two.py": "from troupe.one import options",
        "troupe/three.py": "def f():\n    import troupe.four",
        "troupe/four.py": "import troupe.three",
        "troupe/five.py": "def f():\n    from troupe.one import options",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    product = house.modules(tmp_path)

    def circles(loading: bool) -> list[list[str]]:
        named = product.items()
        return house.circles({n: house.imports(m, product, loading=loading) for n, m in named})

    assert circles(loading=False) == [["troupe.four", "troupe.three"]]
    assert circles(loading=True) == [["troupe.one", "troupe.one.app", "troupe.two"]]
