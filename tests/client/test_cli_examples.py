"""`troupe examples`: every example is listed, and its copy is whole where the user stands."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import troupe
from tests.client.conftest import Run

EXAMPLES = Path(troupe.__file__).parents[1] / "examples"
NAMES = sorted(path.parent.name for path in EXAMPLES.glob("*/__init__.py"))


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
