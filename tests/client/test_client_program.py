"""Jobs made of the running program: what is sent, and that it runs elsewhere."""

from __future__ import annotations

import gzip
import json
import linecache
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.waiting import PATIENCE
from troupe.client.program import ProgramJob, job_of_program
from troupe.functions.sources import check_files, digest
from troupe.job import JobSpec, JobSpecError
from troupe.rpc.errors import InvalidArgument

ROOT = Path(__file__).resolve().parents[2]
FIELDS = """dict(
    name="x", workflow=solve, tasks=[{"question": "a?"}], agents={"solver": "only"},
    policies={"only": "/models/only"}, tools={"score": score},
    pipeline={"steps": 1, "queries_per_step": 1},
)"""
# Writes the files of a job into a folder.
WRITE = f"""
import pathlib, sys
from troupe.client.program import job_of_program
job = job_of_program({FIELDS})
for file in job.files:
    path = pathlib.Path(sys.argv[1], file.path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(file.content)
print(job.spec.workflow, job.spec.tools["score"].entrypoint)
"""
# Calls the tool of a job whose files are in the working directory.
CALL = """
import pathlib
from troupe.functions.shipped import open_shipped
from troupe.functions import shipped
from troupe.workflow.loading import load_attribute, load_workflow
with shipped.using(open_shipped("0" * 64, pathlib.Path.cwd())):
    load_workflow("troupe_main:solve")
    print(load_attribute("troupe_main:score", "tools.score")(text="caab"))
"""


def python(code: str, *arguments: str, cwd: Path) -> str:
    done = subprocess.run(
        [sys.executable, *arguments] if not code else [sys.executable, "-c", code, *arguments],
        cwd=cwd,
        env={"PATH": "", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def sent(program: str, tmp_path: Path, modules: Mapping[str, str] = {}) -> tuple[str, Path]:
    """Run a program that writes its job's files; return what it prints, and their folder."""
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    (here / "program.py").write_text(program + WRITE)
    for name, text in modules.items():
        path = here / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return python("", "program.py", str(there), cwd=here), there


SOLVE = """
async def solve(query, agents, tools):
    return {"solver": 1.0}
"""


def test_functions_of_the_main_file_run_where_the_file_is_not(tmp_path: Path) -> None:
    program = (
        """
from __future__ import annotations
import collections.abc, functools, re, sys
import os.path as paths
print("only here", file=sys.stderr)
FACTORS = {"a": [1, 2]}
PATTERN = re.compile("a+")
class Base:
    kinds: collections.abc.Sequence[int] = ()
class Rule(Base):
    def __init__(self):
        self.found = longest("caab")
    def __call__(self, text: str) -> float:
        return self.found * FACTORS["a"][1] + len(paths.basename(text))
@functools.cache
def longest(text):
    return max(map(len, PATTERN.findall(text)))
RULE = Rule()
def score(text):
    return float(RULE(text))
"""
        + SOLVE
    )
    printed, there = sent(program, tmp_path)

    assert printed == "troupe_main:solve troupe_main:score\n"
    assert {one.name for one in there.iterdir()} == {"troupe_main.py", "troupe_rows.jsonl.gz"}
    assert "only here" not in (there / "troupe_main.py").read_text()
    assert python(CALL, cwd=there) == "8.0\n"


def test_modules_are_sent_with_what_they_import(tmp_path: Path) -> None:
    modules = {
        "team/__init__.py": "",
        "team/scores.py": "import json\nfrom far import FACTOR\n"
        "def score(text):\n    from late import PLUS\n    return text.count('a') * FACTOR + PLUS\n",
        "far.py": "FACTOR = 3\n",
        "late.py": "PLUS = 1\n",
        "unused.py": "",
    }
    printed, there = sent("from team.scores import score\n" + SOLVE, tmp_path, modules)

    assert printed == "troupe_main:solve team.scores:score\n"
    files = {path.relative_to(there).as_posix() for path in there.rglob("*.py")}
    assert files == {"far.py", "late.py", "team/__init__.py", "team/scores.py", "troupe_main.py"}
    call = CALL.replace("troupe_main:score", "team.scores:score")
    assert python(call, cwd=there) == "7\n"


def notebook(*cells: str) -> dict[str, Any]:
    """The names of a notebook's program after these cells, as IPython keeps them."""
    shell = SimpleNamespace(transform_cell=lambda cell: cell.replace("%time ", ""))
    names: dict[str, Any] = {"__name__": "__main__", "get_ipython": lambda: shell, "In": [""]}
    for number, cell in enumerate(cells):
        names["In"].append(cell)
        text = shell.transform_cell(cell)
        file = f"<ipython-input-{number}>"
        linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
        exec(compile(text, file, "exec"), names)
    return names


def test_functions_of_a_notebook_are_those_of_their_newest_cells(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = notebook(
        "class Factor:\n    value = 2",
        "class Factor:\n    value = 3\n%time x = 1",
        "def score(text):\n    return text.count('a')",
        "def score(text):\n    return Factor.value * text.count('a')",
        SOLVE,
    )
    monkeypatch.setitem(sys.modules, "__main__", SimpleNamespace(**names))  # type: ignore[arg-type]
    job = job_of_program(eval(FIELDS, names))
    assert isinstance(job, ProgramJob)
    for file in job.files:
        (tmp_path / file.path).write_bytes(file.content)
    assert python(CALL, cwd=tmp_path) == "6\n"


def fields(**changes: Any) -> dict[str, Any]:
    return {
        "name": "x",
        "workflow": "team:solve",
        "tasks": [{"question": "a?"}, {"question": "b?"}],
        "agents": {"solver": {"policy": "only"}},
        "policies": {"only": "/models/only"},
        "pipeline": {"steps": 1, "queries_per_step": 1},
        **changes,
    }


def rows_of(job: JobSpec | ProgramJob) -> Mapping[str, list[Any]]:
    assert isinstance(job, ProgramJob)
    check_files(job.files)
    assert job.spec.code is not None
    assert job.spec.code.sha256 == digest(job.files)
    return {
        file.path: [json.loads(row) for row in gzip.decompress(file.content).splitlines()]
        for file in job.files
    }


def test_equal_rows_are_equal_files_and_held_out_rows_another() -> None:
    job = job_of_program(fields())
    again = job_of_program(fields())
    assert rows_of(job) == {"troupe_rows.jsonl.gz": [{"question": "a?"}, {"question": "b?"}]}
    assert isinstance(job, ProgramJob)
    assert job == again

    tasks = {"rows": [{"question": "a?"}], "held_out": [{"question": "c?"}]}
    apart = job_of_program(fields(tasks=tasks))
    assert rows_of(apart)["troupe_rows_held_out.jsonl.gz"] == [{"question": "c?"}]
    assert isinstance(apart, ProgramJob)
    assert apart.spec.tasks is not None
    assert apart.spec.tasks.held_out == "troupe_rows_held_out.jsonl.gz"


def test_a_job_of_names_and_paths_sends_nothing() -> None:
    job = job_of_program(fields(tasks="words.jsonl", rewards={"right": {"ready": "exact"}}))
    assert isinstance(job, JobSpec)
    assert job.code is None
    assert job.tasks is not None
    assert job.tasks.dataset == "words.jsonl"


def outer() -> Any:
    def inner(text: str) -> float:
        return 1.0

    return inner


@pytest.mark.parametrize(
    ("changes", "field", "message"),
    [
        ({"tools": {"score": outer()}}, "tools.score.entrypoint", "inside another function"),
        ({"tools": {"score": lambda text: 1}}, "tools.score.entrypoint", "a name of its own"),
        ({"tasks": [{"question": object()}]}, "tasks.rows.0", "not a mapping of JSON"),
        ({"tasks": []}, "tasks.rows", "is empty"),
        ({"tasks": 3}, "tasks", "neither rows nor a class"),
        ({"code": {"include": ["x.py"], "sha256": "0" * 64}}, "code.sha256", "of this program"),
    ],
)
def test_what_cannot_be_sent_is_refused_with_its_field(
    changes: dict[str, Any], field: str, message: str
) -> None:
    with pytest.raises(InvalidArgument, match=message) as caught:
        job_of_program(fields(**changes))
    assert caught.value.field == field
    assert caught.value.remedy


def test_a_main_program_without_source_is_refused_with_the_name(tmp_path: Path) -> None:
    code = "def score(text):\n    return 1\n" + SOLVE + WRITE
    with pytest.raises(AssertionError, match="whose source cannot be found"):
        python(code, str(tmp_path), cwd=tmp_path)


def test_a_fault_of_the_job_is_reported_as_in_a_file() -> None:
    with pytest.raises(JobSpecError, match=r"pipeline\.stepz"):
        job_of_program(fields(pipeline={"stepz": 1, "queries_per_step": 1}))
