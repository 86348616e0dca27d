"""`troupe job validate --imports`: the code that a job names."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.client.conftest import Run

TASKS = """
class Tasks:
    def __init__(self, split): ...
    def __len__(self): return 3
    def __getitem__(self, index): return {"question": str(index)}
"""


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
    # Ids on the hub, which are not looked up.
    text = job_yaml.replace("/models/", "models/").replace("team:solve", "imported_team:solve")
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
    path = job(job_yaml, team=team, tasks=TASKS)
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


CARELESS = """
async def solve(query, agents, tools):
    await agents["solver"].chat(query["question"])
    if query.index == 0:
        await agents["slover"].chat("?")
    await tools.call("scores", text="a")
"""


def problems_of(err: str) -> dict[str, str]:
    """The messages by field and value."""
    lines = [line.removeprefix("error: ") for line in err.splitlines()]
    return dict(line.split(": ", 1) for line in lines)


def test_problems_of_the_workflow_s_trial_and_of_models_are_listed_together(
    run: Run, job_yaml: str, tmp_path: Path
) -> None:
    path = job(job_yaml, team=CARELESS, tasks=TASKS)
    (tmp_path / "checker").mkdir()
    (tmp_path / "checker/config.json").write_text('{"model_type": "gpt2", "n_layer": 1}')
    more = (
        "policies.solver.model.path=./nowhere",
        f"policies.checker={{model: {{path: '{tmp_path}/checker'}}, lora: {{target_modules: "
        "[q_proj, c_attn]}}",
        "tools.score={entrypoint: 'math:sqrt'}",
    )
    options = [part for one in more for part in ("--set", one)]
    status, _, err = run("job", "validate", str(path), *options, "--imports")
    assert status == 2
    told = problems_of(err)
    assert told.keys() == {
        "policies.solver.model.path = ./nowhere",
        "policies.checker.lora.target_modules = q_proj",
        "agents = slover",
        "tools = scores",
    }
    assert "no such directory on this machine" in told["policies.solver.model.path = ./nowhere"]
    assert (
        "Choose among: c_attn, c_fc, c_proj"
        in (told["policies.checker.lora.target_modules = q_proj"])
    )
    assert "known: checker, solver" in told["agents = slover"]
    assert "known: score" in told["tools = scores"]


@pytest.mark.parametrize("dataset", [True, False])
def test_a_column_that_the_workflow_reads_and_rows_lack_is_named(
    run: Run, job_yaml: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dataset: bool
) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    team = """
async def solve(query, agents, tools):
    query.get("hint")
    await agents["solver"].chat(query["question"])
    return {"solver": float(query["answer"] == "1")}
"""
    path = job(job_yaml, team=team, tasks=TASKS)
    if dataset:
        Path("rows.jsonl").write_text('{"question": "a", "solution": "1"}\n')
        text = path.read_text().replace('{source: "imported_tasks:Tasks"}', "{dataset: rows.jsonl}")
        path.write_text(text)
    status, _, err = run("job", "validate", str(path), "--imports")
    assert status == 2
    ((field, said),) = problems_of(err).items()
    assert field == ("tasks.columns" if dataset else "tasks.source") + " = answer"
    assert "the workflow reads this column" in said
    assert ("question, solution" if dataset else "they have question") in said


def test_a_workflow_that_fails_for_the_replies_or_hangs_is_valid(
    run: Run, job_yaml: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("troupe.workflow.trying.preflight._SECONDS", 0.5)
    team = """
import asyncio

async def solve(query, agents, tools):
    reply = await agents["solver"].chat(query["question"])
    if query.index == 0:
        return {"solver": float(reply.text)}
    await asyncio.Event().wait()
"""
    path = job(job_yaml, team=team, tasks=TASKS)
    assert run("job", "validate", str(path), "--imports")[0] == 0


def test_tasks_that_cannot_be_made_are_named(run: Run, job_yaml: str) -> None:
    team = "async def solve(query, agents, tools): ..."
    path = job(job_yaml, team=team, tasks="class Tasks: ...")
    check(run("job", "validate", str(path), "--imports"), "tasks.source", "Tasks")
