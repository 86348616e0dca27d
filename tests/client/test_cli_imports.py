"""`troupe job validate --imports`: the code that a job names."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.client.conftest import Run


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Modules of the working directory, for this test only."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    for name in [name for name in sys.modules if name.startswith("imported_")]:
        del sys.modules[name]


def job(job_yaml: str, **code: str) -> Path:
    """The job's file, next to its own modules."""
    for name, text in code.items():
        Path(f"imported_{name}.py").write_text(text)
    path = Path("job.yaml")
    text = job_yaml.replace("team:solve", "imported_team:solve")
    path.write_text(text.replace("tasks:Tasks", "imported_tasks:Tasks"))
    return path


def check(result: tuple[int, str, str], field: str, said: str | None) -> None:
    """The command named the field and said why; None: it found no fault."""
    status, _, err = result
    if said is None:
        assert (status, err) == (0, "")
        return
    assert status == 2
    assert err.startswith(f"error: {field}")
    assert said in err


def test_validation_names_the_code_that_can_be_imported(run: Run, job_yaml: str) -> None:
    team = "async def solve(query, agents, tools): ..."
    path = job(job_yaml, team=team, tasks="class Tasks: ...")
    status, out, err = run("job", "validate", str(path), "--imports")
    assert (status, err) == (0, "")
    assert out.endswith("3 steps; workflow, tasks.source can be imported\n")


def test_everything_that_cannot_be_imported_is_a_line(run: Run, job_yaml: str) -> None:
    path = job(job_yaml, team="def solve(query, agents, tools): ...", tasks="import no_such_thing")
    assert run("job", "validate", str(path))[0] == 0
    missing = ("--set", "tools.score={entrypoint: 'imported_nowhere:score'}")
    value = ("--set", "rewards.fair={entrypoint: 'sys:path'}")
    status, out, err = run("job", "validate", str(path), *missing, *value, "--imports")
    assert (status, out) == (2, "")
    told = dict(line.removeprefix("error: ").split(" = ", 1) for line in err.splitlines())
    assert "must be an async function" in told["workflow"]
    assert "ModuleNotFoundError: No module named 'no_such_thing'" in told["tasks.source"]
    assert "does not exist here" in told["tools.score.entrypoint"]
    assert "cannot be called" in told["rewards.fair.entrypoint"]
    assert len(told) == 4


def test_data_sets_are_read_and_what_is_dropped_is_noted(
    run: Run, job_yaml: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    Path("rows.jsonl").write_text('{"q": "a"}\n{"q": ""}\n{"q": "b"}\n{"q": "a"}\n')
    path = job(job_yaml, team="async def solve(query, agents, tools): ...")
    text = path.read_text().replace('{source: "imported_tasks:Tasks"}', "{dataset: rows.jsonl}")
    path.write_text(text)
    status, out, err = run(
        *("job", "validate", str(path), "--imports", "--set", "tasks.held_out=0.5"),
        *("--set", "evaluations.own={tasks: {dataset: rows.jsonl, columns: {question: q}}}"),
    )
    assert (status, err) == (0, "")
    assert (
        "note: rows.jsonl: 2 of 4 rows, dropped: 1 empty (row 1); 1 duplicates (row 3); 1 of" in out
    )
    assert "note: rows.jsonl: 2 of 4 rows, dropped: 1 empty (row 1); 1 duplicates (row 3)\n" in out
    Path("again.json").write_text('[{"q": "b"}]')
    check(
        run("job", "validate", str(path), "--imports", "--set", "tasks.held_out=again.json"),
        "tasks.held_out",
        "all 1 of again.json are also rows of rows.jsonl",
    )
    status, _, err = run("job", "validate", str(path), "--imports", "--set", "tasks.dataset=no.csv")
    assert status == 2
    assert err.startswith("error: tasks.dataset = no.csv: there is no such file or folder")


@pytest.mark.parametrize(
    ("reward", "rows", "said"),
    [
        ("{ready: exact}", '{"q": "a", "answer": "1"}\n{"q": "b", "answer": null}\n', "is missing"),
        ("{ready: exact}", '{"q": "a", "answer": {"text": "1"}}\n', "not a single value"),
        ("{ready: exact}", '{"q": "a"}\n', "no field 'answer'"),
        (r"{ready: math, arguments: {answer_pattern: '#(.*)'}}", '{"answer": "7"}\n', "not found"),
        ("{ready: math}", '{"answer": ["7", ""]}\n', "not a mathematical expression"),
        (
            "{ready: json_schema, arguments: {field: s}}",
            '{"s": "{}"}\n{"s": "x"}\n',
            "not a JSON schema",
        ),
        ("{ready: tests}", '{"q": "a", "tests": ["assert f(1) == 2"]}\n', "neither text nor files"),
        (
            "{ready: tests}",
            '{"q": "a", "tests": {"../test_a.py": "def test_a(): ..."}}\n',
            "out of",
        ),
        ("{ready: exact}", '{"q": "a", "answer": 1}\n', None),
        ("{ready: math}", '{"q": "a", "answer": "1/2"}\n', None),
        ("{ready: tests}", '{"q": "a", "tests": "def test_a(): ..."}\n', None),
    ],
)
def test_references_that_a_ready_reward_cannot_use_are_named(
    run: Run,
    job_yaml: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    reward: str,
    rows: str,
    said: str | None,
) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    Path("rows.jsonl").write_text(rows)
    path = job(job_yaml, team="async def solve(query, agents, tools): ...")
    text = path.read_text().replace('{source: "imported_tasks:Tasks"}', "{dataset: rows.jsonl}")
    path.write_text(text)
    more = ("--set", f"rewards.right={reward}")
    check(run("job", "validate", str(path), "--imports", *more), "rewards.right.arguments.", said)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ('{"q": "a"}', "has no question"),
        ('{"question": " ", "id": 1}', "has no question"),
        ('{"prompt": [{"role": "assistant", "content": "a"}]}', "has no question"),
        ('{"prompt": ["a"]}', "message 0 needs `role` and `content`"),
        ('{"messages": [{"role": "user", "content": 7}]}', "must be text"),
        ('{"messages": [{"role": "user", "content": "a"}]}', None),
        ('{"question": "a"}', None),
    ],
)
def test_rows_that_the_ready_workflow_cannot_ask_are_named(
    run: Run,
    job_yaml: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    row: str,
    said: str | None,
) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    Path("rows.jsonl").write_text(row + "\n")
    text = job_yaml.replace("team:solve", "troupe.workflow.asking:ask")
    path = job(text.replace('{source: "tasks:Tasks"}', "{dataset: rows.jsonl}"))
    check(run("job", "validate", str(path), "--imports"), "tasks.columns", said)
