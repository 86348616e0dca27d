"""The GPU benchmarks tested without a GPU: the command, its parts, and the time they are given."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import psutil
import pytest
from packaging.requirements import Requirement
from rich.console import Console

from benchmarks.gpu.__main__ import PARTS, PLANS, no_group, no_server, summary, table_of
from benchmarks.gpu.parts import Outcome, Part, Status, limit_of, run, run_all
from benchmarks.gpu.readme_job import block, engines_for, job_of
from benchmarks.gpu.readme_tasks import Tasks, score
from benchmarks.workloads.tokenizer import save_word_tokenizer
from tests.benchmarks.quick import quick_run
from tests.support.readme import ROOT
from tests.support.waiting import PATIENCE

# Variables that name an SGLang on this machine.
_SGLANG = {"TROUPE_SGLANG_PYTHON", "TROUPE_SGLANG_CPU_DIR"}


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_acceptance_runs_to_its_end_on_a_cpu() -> None:
    found = quick_run("gpu", "acceptance", "--device", "cpu", "--minutes", "55", seconds=3500)
    parts = found["parts"]
    assert list(parts) == list(PLANS["acceptance"])
    skipped = set() if _SGLANG & os.environ.keys() else {"weights_ipc", "weights_broadcast"}
    ended = {name: one["status"] for name, one in parts.items()}
    assert ended == {name: "skipped" if name in skipped else "passed" for name in parts}, parts
    figures = {name: one["figures"] for name, one in parts.items()}
    for name in ("weights_in_place", "weights_ipc", "weights_broadcast"):
        if name not in skipped:
            assert figures[name]["of_former_version"] > 5 * figures[name]["mismatch"]
    for name in ("job_colocated", "job_split", "killed_server"):
        assert len(figures[name]["step_seconds"]) == 3
        assert figures[name]["samples"] == 3 * 2 * 4 * 3  # steps, queries, group, turns
    assert figures["job_colocated"]["sleep_seconds"]
    assert figures["killed_server"]["recovery_seconds"] > 0
    assert 0 < figures["update"]["mfu"] < 2
    assert figures["suspension"]["suspend_gb_s"] > 0


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_figures_that_acceptance_does_not_take_come_from_a_cpu_too() -> None:
    names = [name for name in PLANS["figures"] if name not in PLANS["acceptance"]]
    options = ("--device", "cpu", "--minutes", "28", "--only", *names)
    parts = quick_run("gpu", "figures", *options, seconds=1700)["parts"]
    assert {name: one["status"] for name, one in parts.items()} == dict.fromkeys(names, "passed")
    assert parts["copies"]["figures"]["of_link"] > 0
    assert parts["transfer"]["figures"]["device"] == "cpu"
    assert parts["swap"]["figures"]["memcpy_ratio"] > 0


_PART = """
import subprocess, sys, time
kind = sys.argv[1]
print("begins", file=sys.stderr, flush=True)
print("more than the object")
if kind == "hangs":
    child = subprocess.Popen(["sleep", "600"], start_new_session=True)
    print('{"child": %d}' % child.pid, flush=True)
    time.sleep(600)
if kind == "leaves":
    child = subprocess.Popen(["sleep", "600"], start_new_session=True, stderr=subprocess.DEVNULL)
    print('{"child": %d}' % child.pid, flush=True)
    time.sleep(3)
if kind == "fails":
    sys.exit("no memory")
if kind == "works":
    print('{"seconds": 1.5}')
if kind == "half":
    print('{"seconds": 1.5, "problems": {"audit": "one sample lost"}}')
"""


@pytest.fixture
def said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """A part named `made_part` can be run; what it says on its way goes here."""
    (tmp_path / "made_part.py").write_text(_PART)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return io.StringIO()


def made(said: io.StringIO, kind: str, seconds: float = PATIENCE) -> Outcome:
    """Return the result of the part that the test has made."""
    return run(kind, ["made_part", kind], seconds, Console(file=said))


def test_output_of_a_part_is_shown_while_it_runs(said: io.StringIO) -> None:
    found = made(said, "works")
    assert (found.status, found.figures) == (Status.PASSED, {"seconds": 1.5})
    assert "begins" in said.getvalue()


@pytest.mark.parametrize(
    ("kind", "reason", "figures"),
    [
        ("fails", "begins | no memory", {}),
        ("babbles", "it printed no JSON object", {}),
        ("half", "audit: one sample lost", {"seconds": 1.5}),
    ],
)
def test_a_part_without_success_says_why(
    said: io.StringIO, kind: str, reason: str, figures: dict[str, float]
) -> None:
    found = made(said, kind)
    assert (found.status, found.reason, found.figures) == (Status.FAILED, reason, figures)


def test_part_at_its_deadline_ends_with_its_children_and_keeps_what_it_said(
    said: io.StringIO,
) -> None:
    found = made(said, "hangs", 8)  # deadline: the part must reach it
    assert found.status is Status.FAILED
    assert found.reason.startswith("took over 8 s")
    assert not psutil.pid_exists(found.figures["child"])


def test_process_that_a_part_leaves_behind_ends_with_it(said: io.StringIO) -> None:
    found = made(said, "leaves")
    assert found.status is Status.PASSED
    assert not psutil.pid_exists(found.figures["child"])


def test_parts_after_a_failed_one_and_a_hanging_one_run(said: io.StringIO) -> None:
    kinds = {"fails": 1.0, "hangs": 1.0, "works": 30.0}
    parts = {kind: Part(("made_part", kind), seconds, "") for kind, seconds in kinds.items()}
    found = list(run_all(parts, PATIENCE, Console(file=said)))
    assert [(one.name, one.status.value) for one in found] == [
        ("fails", "failed"),
        ("hangs", "failed"),
        ("works", "passed"),
    ]


def test_part_for_which_too_little_time_is_left_is_skipped_and_a_shorter_one_runs(
    said: io.StringIO,
) -> None:
    parts = {
        "long": Part(("made_part", "works"), 10 * PATIENCE, ""),
        "works": Part(("made_part", "works"), 1.0, ""),
    }
    long, short = run_all(parts, PATIENCE, Console(file=said))
    assert (long.status, short.status) == (Status.SKIPPED, Status.PASSED)
    assert "s are left; it takes about" in long.reason


def test_part_may_take_its_share_of_the_time_or_twice_what_it_needs() -> None:
    minute, two = Part((), 60, ""), Part((), 120, "")
    assert limit_of(minute, [two], 1800) == 600
    assert limit_of(minute, [two], 200) == 120
    assert limit_of(minute, [two], 40) == 40
    assert limit_of(minute, [two], 29) is None


_COMMAND = """
import sys
import benchmarks.gpu.__main__ as command
from benchmarks.gpu.parts import Part
command.PARTS = {kind: Part(("made_part", kind), 60, "") for kind in ("works", "hangs")}
command.PLANS = {"acceptance": ("works", "hangs")}
sys.argv = ["gpu", "acceptance", "--json", "--device", "cpu", "--minutes", "60"]
command.run_program(command.main)
"""


def test_run_that_is_cut_short_has_told_of_the_parts_that_ended(said: io.StringIO) -> None:
    process = subprocess.Popen([sys.executable, "-c", _COMMAND], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        first = json.loads(process.stdout.readline())
        assert (first["part"], first["status"]) == ("works", "passed")
        process.terminate()
        assert process.wait(PATIENCE) == 128 + 15
    finally:
        process.kill()


def test_table_and_summary_tell_of_all_parts() -> None:
    outcomes = [
        Outcome("doctor", Status.FAILED, 3.0, 40.0, "devices: none"),
        Outcome("update", Status.PASSED, 41.0, 90.0, figures={"mfu": 0.4, "seconds": 3.4}),
        Outcome("update_4b", Status.SKIPPED, reason="20 s are left"),
    ]
    console = Console(file=io.StringIO(), width=120)
    console.print(table_of(outcomes))
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert all(word in text for word in ("devices: none", "mfu 0.4", "20 s are left"))
    found = summary(outcomes)
    assert (found["passed"], found["failed"], found["skipped"]) == (1, 1, 1)
    assert found["parts"]["update"]["figures"]["seconds"] == 3.4


def test_every_part_of_a_plan_is_known() -> None:
    assert {name for plan in PLANS.values() for name in plan} == PARTS.keys()


@pytest.mark.parametrize(
    ("gpus", "sharing", "kinds"),
    [
        (0, "split", "sglang"),
        (1, "colocated", "embedded"),
        (2, "colocated", "sglang"),
        (2, "split", "embedded"),
        (8, "split", "sglang"),
        (8, "colocated", "sglang"),
    ],
)
def test_job_of_the_readme_fits_the_devices(
    tmp_path: Path, gpus: int, sharing: str, kinds: str
) -> None:
    python = engines_for(sys.executable, sharing, gpus, policies=2)
    spec = job_of(sharing, tmp_path, 9, gpus=gpus, quick=gpus == 0, python=python)
    assert spec.workflow == "team:solve"
    assert {one.engine.kind for one in spec.policies.values()} == {kinds}
    assert spec.pipeline.colocate is (sharing == "colocated")
    assert spec.pipeline.steps == 3


def test_readme_without_the_block_is_an_error_that_names_it() -> None:
    with pytest.raises(ValueError, match=r"job\.yaml"):
        block("job.yaml", "```yaml\nname: other\n```\n")


def test_score_of_the_readme_job_differs_between_answers(tmp_path: Path) -> None:
    words = save_word_tokenizer(tmp_path, 256)
    entry = Tasks("train", words)[0]["entry"]
    assert score(entry, f"w0 w1 <unk> w{words - 1} w{words - 2}") == 0.5
    assert score(entry, "w1") == 1.0
    assert score(entry, "") == 0.0


def test_word_tokenizer_reads_as_many_tokens_as_it_wrote(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    save_word_tokenizer(tmp_path, 256)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    ids = [3, 255, 17, 17]
    assert len(tokenizer) == 256
    assert tokenizer(tokenizer.decode(ids))["input_ids"] == ids


def test_packages_to_carry_are_those_that_the_services_need_in_versions_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [*project["dependencies"], "liger-kernel>=0"]
    for extra in ("orchestrator", "experience-store", "rollout", "trainer", "reward", "embedded"):
        lines += project["optional-dependencies"][extra]
    needed = {one.name: one for one in map(Requirement, lines)}
    text = (ROOT / "benchmarks/gpu/carried.txt").read_text()
    carried = dict(line.split("==") for line in text.splitlines() if not line.startswith("#"))
    # As the file says; torch brings two more, and the job does without TensorBoard.
    own = "torch numpy pyyaml httpx psutil aiohttp uvloop tokenizers safetensors accelerate"
    others = "jinja2 fsspec tensorboard"
    assert needed.keys() - carried.keys() <= {*own.split(), *others.split()}
    assert all(name.casefold() in text.casefold() for name in own.split())
    wrong = {
        name: carried[name]
        for name, one in needed.items()
        if name in carried and not one.specifier.contains(carried[name])
    }
    assert not wrong


def test_line_that_the_recipe_deletes_for_an_older_torch_is_the_call_of_its_kernel() -> None:
    recipe = (ROOT / "docs/benchmarks/gpu.md").read_text()
    (found,) = re.findall(r"sed -i '/(.*)/d' (\S+)", recipe)
    pattern, name = found
    lines = (ROOT / name).read_text().splitlines()
    (number,) = [number for number, line in enumerate(lines) if pattern in line]
    call = next(line for line in reversed(lines[:number]) if line.endswith("("))
    assert call.strip() == "output = varlen_attn("


def test_ways_that_the_machine_cannot_try_are_skipped(
    said: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in _SGLANG:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TROUPE_DEVICES", "1xH100-80GB")
    part = Part(("made_part", "fails"), 1.0, "", reason_to_skip=no_group)
    (found,) = run_all({"broadcast": part}, PATIENCE, Console(file=said), "cuda")
    assert (found.status, found.seconds) == (Status.SKIPPED, 0.0)
    assert "no SGLang" in found.reason
    monkeypatch.setenv("TROUPE_SGLANG_PYTHON", sys.executable)
    assert "one GPU" in no_group("cuda")
    assert not no_server("cuda")
    monkeypatch.setenv("TROUPE_DEVICES", "2xH100-80GB")
    assert not no_group("cuda")
