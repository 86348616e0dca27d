"""`troupe workflow try`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.client.conftest import Run
from tests.support.waiting import PATIENCE
from tests.workflow.stage import CHARACTERS, make_tokenizer

PLAYS = "tests/workflow/plays.py"
ONE = ("--query", '{"question": "3+4", "answer": "7"}', "--group-size", "1")
JOB = """
name: trial
workflow: "tests.workflow.plays:solve"
tasks: {source: "tests.workflow.plays:Sums"}
agents:
  solver: {policy: solver, sampling: {max_new_tokens: 8, stop: ["END"]}}
  checker: {policy: checker, sampling: {max_new_tokens: 8}}
policies:
  solver: {model: {path: /nowhere/solver}}
  checker: {model: {path: /nowhere/checker}}
tools: {score: {entrypoint: "tests.workflow.plays:score"}}
rewards: {brevity: {entrypoint: "tests.workflow.plays:brevity"}}
algorithm: {group_by: branch}
pipeline: {steps: 3, queries_per_step: 4}
"""


@pytest.fixture(autouse=True)
def _these_plays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other directories of tests also have a `plays.py`, and pytest puts them on the path."""
    monkeypatch.syspath_prepend(str(Path(PLAYS).parent.resolve()))
    monkeypatch.delitem(sys.modules, "plays", raising=False)


@pytest.fixture
def job(tmp_path: Path) -> str:
    path = tmp_path / "job.yaml"
    path.write_text(JOB)
    return str(path)


def test_a_job_is_played_as_it_would_be_stored(run: Run, job: str, tmp_path: Path) -> None:
    script = tmp_path / "replies.yaml"
    script.write_text('solver: ["4"]\nchecker: ["yes", "no!!"]\n')
    arguments = ("workflow", "try", job, "--script", str(script), "--queries", "1")
    status, out, err = run(*arguments, "--group-size", "2")
    assert (status, err) == (0, "")
    assert "note: policies.solver.model: there is no directory /nowhere/solver" in out
    assert "user: 0+4" in out
    assert "checker[1] (2 of 2)" in out
    assert "rewards: solver 0.500  team 1.000  checker 3.500" in out
    assert "2 trajectories, 0 failed; turns: checker 4, solver 2" in out
    # The draft's prompt and the verdicts' are the same in both, since the draft is.
    assert "6 samples in 2 groups: 1 of 2, 1 of 4" in out

    record = json.loads(run(*arguments, "--json")[1])
    turn = record["trajectories"][0]["turns"][1]
    assert (turn["agent"], turn["response"], turn["reward"]) == ("checker", "yes", 3.0)
    assert turn["sample"]["group_id"].startswith("q0/checker/0/")
    assert record["trajectories"][0]["rewards"] == {"solver": 0.5, "checker": 3.5, "team": 1.0}
    assert sorted(record["groups"].values()) == [2, 4]
    assert record["failed"] == 0


def test_a_tokenizer_that_is_there_is_used(run: Run, tmp_path: Path) -> None:
    make_tokenizer().save_pretrained(tmp_path / "tokenizer")
    spec = yaml.safe_load(JOB)
    model = {
        "tokenizer": str(tmp_path / "tokenizer"),
        "config": {"model_type": "qwen3", "vocab_size": 128},
    }
    spec["policies"] = {name: {"model": model} for name in ("solver", "checker")}
    spec["agents"]["solver"]["sampling"]["stop"] = ["!"]
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(spec))
    status, out, _ = run("workflow", "try", str(tmp_path / "job.yaml"), "--json")
    assert status == 0
    record = json.loads(out)
    assert record["notes"] == []
    turns = [turn for one in record["trajectories"] for turn in one["turns"]]
    assert {turn["finish_reason"] for turn in turns} == {"stop", "length"}
    assert set("".join(turn["response"] for turn in turns)) <= set(CHARACTERS)
    # ChatML, a token per character: `<|im_start|>user\n0+4<|im_end|>\n<|im_start|>assistant\n`.
    assert turns[0]["prompt_tokens"] == 1 + len("user\n0+4") + 2 + 1 + len("assistant\n")

    spec["policies"]["checker"]["engine"] = {"max_context": 16}
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(spec))
    status, out, _ = run("workflow", "try", str(tmp_path / "job.yaml"), "--queries", "1")
    assert status == 1
    assert "FAILED after 1 turns: context_overflow" in out
    assert "note: agent checker was never asked" in out


@pytest.mark.parametrize(
    ("job", "groups"),
    [
        # Two trajectories of three turns, compared turn by turn.
        ("job", [2, 2, 2]),
        # Four candidates per turn; the first turn's candidates answer the same prompt in both.
        ("tree", [4, 4, 4, 4, 8]),
    ],
)
def test_the_examples_play(run: Run, job: str, groups: list[int]) -> None:
    path = f"troupe/demo/{job}.yaml"
    status, out, _ = run("workflow", "try", path, "--queries", "1", "--json")
    assert status == 0
    record = json.loads(out)
    assert sorted(record["groups"].values()) == groups
    assert record["trajectories"][0]["rewards"].keys() == {"solver", "checker", "team"}
    # The examined agent has one try.
    options = ("--split", "held_out", "--group-size", "1", "--queries", "1")
    _, out, _ = run("workflow", "try", path, *options, "--json")
    assert len(json.loads(out)["trajectories"][0]["turns"]) == 3


def test_random_echo_and_seeds(run: Run) -> None:
    def said(*options: str) -> list[str]:
        status, out, _ = run("workflow", "try", f"{PLAYS}:fails", *ONE, "--json", *options)
        assert status == 1
        return [turn["response"] for turn in json.loads(out)["trajectories"][0]["turns"]]

    assert said("--policy", "echo") == ["begin"]
    assert said("--seed", "1") == said("--seed", "1") != said("--seed", "2")


def test_an_error_of_the_workflow_is_shown_with_its_own_frames(run: Run) -> None:
    status, out, err = run("workflow", "try", f"{PLAYS}:fails", *ONE)
    assert (status, err) == (1, "")
    assert "FAILED after 1 turns: workflow_raised" in out
    assert "ZeroDivisionError: division by zero" in out
    assert "in _deeper" in out
    assert "in fails" in out
    assert "troupe/workflow" not in out
    assert "asyncio" not in out


@pytest.mark.parametrize(
    ("workflow", "query", "expected"),
    [
        ("solve", {}, "has no 'question'; it has: "),
        ("solve", {"question": "1", "answer": "1"}, "the job has no tool 'score'"),
        ("sleeps", {}, "not done within 0.5 s, after 1 turns"),
        ("exits", {}, "SystemExit: 3"),
        ("cancels_itself", {}, "CancelledError"),
        ("refuses_to_end", {}, "it blocked the event loop, or refused to end, after 2.5 s"),
        ("blocks", {}, "it blocked the event loop, or refused to end, after 2.5 s"),
    ],
)
def test_workflows_that_fail(run: Run, workflow: str, query: object, expected: str) -> None:
    given = ("--query", json.dumps(query), "--group-size", "1", "--timeout", "0.5")
    status, out, _ = run("workflow", "try", f"{PLAYS}:{workflow}", *given)
    assert status == 1
    assert expected in out


def test_a_file_is_found_wherever_it_lies(run: Run, tmp_path: Path) -> None:
    package = tmp_path / "my_pack"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "words.py").write_text("HELLO = 'hello'\n")
    (package / "play.py").write_text(
        "from .words import HELLO\n"
        "async def only(query, agents, tools):\n"
        "    await agents['a'].chat(HELLO)\n"
        "    return {'a': 1.0}\n"
    )
    try:
        status, out, err = run("workflow", "try", str(package / "play.py"), *ONE)
        assert (status, err) == (0, "")
        assert "user: hello" in out
        assert "1 groups have one sample" in out
    finally:
        sys.path.remove(str(tmp_path))


GAMES = """
from troupe.workflow.environments import GameWorkflow
workflow = GameWorkflow("tests.workflow.environments.zoo:Nim", hosted=True)
"""


def test_a_game_is_a_workflow_that_ends_its_processes(tmp_path: Path, job: str) -> None:
    (tmp_path / "my_games.py").write_text(GAMES)
    given = ("--query", '{"seed": 1}', "--job", job, "--json")
    # In a separate process, which reports leftovers of the event loop at its end.
    program = "from troupe.client.cli.app import main; main()"
    path = str(tmp_path / "my_games.py")
    done = subprocess.run(
        [sys.executable, "-c", program, "workflow", "try", path, *given],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["workflow"] == "my_games:workflow"


BROKEN = {
    "raises.py": "def f():\n    return 1 / 0\nf()\n",
    "exits.py": "raise SystemExit(3)\n",
    "several.py": "async def a(q, w, e): ...\nasync def b(q, w, e): ...\n",
    "nothing.py": "x = 1\n",
    "plain.py": "def workflow(q, w, e): ...\n",
    "json.py": "async def a(q, w, e): ...\n",
}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nowhere.py",), "FILE = nowhere.py: there is no such file"),
        (("nowhere.yaml",), "nowhere.yaml: cannot be read"),
        (("nonsense",), "FILE = nonsense: this does not name a workflow"),
        (("no.such.module:x",), "module 'no.such.module' does not exist here"),
        (("{}/raises.py",), "importing 'raises' failed: ZeroDivisionError"),
        (("{}/exits.py",), "importing 'exits' failed: SystemExit"),
        (("{}/several.py",), "several workflows: a, b"),
        (("{}/nothing.py",), "the file has no workflow"),
        (("{}/plain.py:workflow",), "a workflow must be an async function"),
        (("{}/json.py",), "`import json` finds"),
        ((f"{PLAYS}:solve",), "needs a query to play"),
        ((f"{PLAYS}:solve", "--query", "{"), "--query = {: is not JSON"),
        ((f"{PLAYS}:solve", "--query", "[1]"), "is a list, not an object"),
        ((f"{PLAYS}:solve", *ONE, "--script", "{}/none.yaml"), "cannot be read: No such file"),
        ((f"{PLAYS}:solve", *ONE, "--script", "{}/bad.yaml"), "replies.solver"),
        ((f"{PLAYS}:solve", *ONE, "--policy", "script"), "--script requires"),
        ((f"{PLAYS}:solve", *ONE, "--policy", "echo", "--script", "x"), "--script requires"),
        ((f"{PLAYS}:solve", *ONE, "--split", "dev"), "is not a split"),
        ((f"{PLAYS}:solve", *ONE, "--group-size", "0"), "--group-size"),
        ((f"{PLAYS}:solve", *ONE, "--timeout", "inf"), "--timeout"),
    ],
)
def test_bad_input_is_one_line(
    run: Run, tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    for name, text in BROKEN.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "bad.yaml").write_text("solver: 4\n")
    path = list(sys.path)
    try:
        status, out, err = run(
            "workflow", "try", *(argument.replace("{}", str(tmp_path)) for argument in arguments)
        )
    finally:
        sys.path[:] = path
        for name in BROKEN:
            if name != "json.py":
                sys.modules.pop(name.removesuffix(".py"), None)
    assert (status, out) == (2, "")
    *own, last = err.splitlines()
    assert last.startswith("error: ")
    assert message in last
    # Only the user's module may add its own frames.
    assert bool(own) == any(name in arguments[0] for name in ("raises.py", "exits.py"))
    assert "troupe/workflow" not in err


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited")
def test_turns_that_nobody_awaits_are_said(run: Run, tmp_path: Path) -> None:
    (tmp_path / "forgets.py").write_text(
        "async def play(query, agents, tools):\n"
        "    await agents['solver'].chat('1')\n"
        "    agents['solver'].chat('2')\n"
        "    return {'solver': 1.0}\n"
    )
    status, out, _ = run("workflow", "try", str(tmp_path / "forgets.py"), *ONE)
    assert status == 0
    assert "1 turns were requested and never awaited" in out
    _, out, _ = run("workflow", "try", str(tmp_path / "forgets.py"), *ONE, "--json")
    assert json.loads(out)["trajectories"][0]["metrics"]["unawaited_turns"] == 1


DEBUGGED = """
import pdb

async def solve(query, agents, tools):
    reply = await agents["solver"].chat("x")
    breakpoint()
    return {"solver": await tools.call("score", text=reply.text)}

def score(text):
    pdb.set_trace()
    return 0.25
"""
DEBUGGED_JOB = """
name: debugged
workflow: "debugged:solve"
tasks: {source: "tests.workflow.plays:Sums"}
agents: {solver: {policy: solver}}
policies: {solver: {model: {path: /nowhere/solver}}}
tools: {score: {entrypoint: "debugged:score", timeout_seconds: 1}}
pipeline: {steps: 3, queries_per_step: 4}
"""
# The debugger's input in the order of its output, each after a pause longer than all time limits.
TYPIST = """
import pty, os, sys, time
pid, terminal = pty.fork()
if not pid:
    os.execv(sys.executable, [sys.executable, "-m", "troupe.client.cli", *sys.argv[1:]])
shown = b""
for typed in (b"p 'looked ' + str(6 * 7)\\n", b"c\\n", b"p 'at ' + str(20 + 2)\\n", b"c\\n"):
    while not shown.endswith(b"(Pdb) "):
        shown += os.read(terminal, 4096)
    time.sleep(1.5)
    os.write(terminal, typed)
    while not shown.endswith(b"\\n"):
        shown += os.read(terminal, 1)
while True:
    try:
        part = os.read(terminal, 4096)
    except OSError:
        break
    if not part:
        break
    shown += part
print(shown.decode())
sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


def test_breakpoints_of_a_workflow_and_a_tool_work_and_lift_time_limits(tmp_path: Path) -> None:
    (tmp_path / "debugged.py").write_text(DEBUGGED)
    (tmp_path / "job.yaml").write_text(DEBUGGED_JOB)
    arguments = ["workflow", "try", "job.yaml", "--queries", "1", "--group-size", "1"]
    done = subprocess.run(
        [sys.executable, "-c", TYPIST, *arguments, "--timeout", "1"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path.cwd()), "TERM": "dumb"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert "looked 42" in done.stdout
    assert "at 22" in done.stdout
    assert "rewards: solver 0.250" in done.stdout


def test_quitting_the_debugger_ends_the_command(tmp_path: Path) -> None:
    (tmp_path / "debugged.py").write_text(DEBUGGED)
    done = subprocess.run(
        [sys.executable, "-m", "troupe.client.cli", "workflow", "try", "debugged.py", *ONE],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path.cwd())},
        input="q\n",
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 130, done.stderr
    assert done.stdout.count("(Pdb)") == 1
