"""`troupe examples`: every example is listed, and its copy is whole where the user stands."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

import troupe
from tests.client.conftest import Run

EXAMPLES = Path(troupe.__file__).parents[1] / "examples"
RECIPES = sorted(f"papers/{path.parent.name}" for path in EXAMPLES.glob("papers/*/recipe.py"))
NAMES = sorted(
    {one.parent.name for one in EXAMPLES.glob("*/__init__.py")} - {"papers"} | set(RECIPES)
)


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))


def test_examples_are_listed_with_descriptions(run: Run) -> None:
    status, out, _ = run("examples", "list")
    lines = out.splitlines()
    assert status == 0
    assert [line.split()[0] for line in lines] == NAMES
    assert all(len(line.split(maxsplit=1)[1]) > 20 for line in lines)


@pytest.mark.parametrize("name", NAMES)
def test_a_copy_is_whole(run: Run, name: str) -> None:
    status, out, err = run("examples", "copy", name)
    assert (status, err) == (0, "")
    copied = Path("examples", name)
    assert out.splitlines()[0] == f"copied to examples/{name}"
    own = {path.name for path in (EXAMPLES / name).iterdir() if path.name != "__pycache__"}
    assert own <= {path.name for path in copied.iterdir()}
    for job in copied.glob("*.yaml"):
        assert run("job", "validate", str(job))[0] == 0
        assert str(job) in out
    assert run("examples", "copy", name)[0] == 2  # changed files are not overwritten
    assert all((folder / "__init__.py").exists() for folder in copied.parents[:-1])


def test_the_copy_of_the_demo_is_code_of_its_own(run: Run) -> None:
    assert run("examples", "copy", "reasoning_team")[0] == 0
    texts = [path.read_text() for path in Path("examples/reasoning_team").iterdir()]
    assert not [text for text in texts if "troupe.demo" in text or "troupe/demo" in text]
    assert Path("examples/reasoning_team/warm_start.py").exists()


def test_an_unknown_example_is_refused_with_the_known_names(run: Run) -> None:
    status, _, err = run("examples", "copy", "reasoning")
    assert status == 2
    assert "NAME = reasoning: there is no example of this name; there are " in err
    assert "reasoning_team" in err


def test_an_example_that_is_no_recipe_is_not_run_and_recipes_are_named(run: Run) -> None:
    status, _, err = run("examples", "run", "starter")
    assert status == 2
    assert "papers/NAME = starter: is an example, but no recipe" in err
    assert all(name in err for name in RECIPES)


def test_results_of_other_jobs_are_not_added_to(run: Run, tmp_path: Path) -> None:
    [name, *_] = RECIPES
    values = {"name": "other", "jobs": "", "parameters": 1, "quick": False, "seeds": []}
    (tmp_path / "results.json").write_text(json.dumps(values))
    status, _, err = run("examples", "run", name, "--out", str(tmp_path))
    assert status == 2
    assert "has the results of other jobs" in err
    assert not (tmp_path / "data").exists(), "no cluster was started for it"
