"""Commands against the orchestrator double, in this process: output, errors, exit statuses."""

from __future__ import annotations

import errno
import json
import os
import re
import subprocess
import sys
import uuid
from dataclasses import replace
from pathlib import Path

import fsspec
import pytest
import yaml

from tests.client.conftest import Run, Stage
from tests.client.project import JOB_YAML
from tests.support.fake_orchestrator import S
from tests.support.waiting import PATIENCE
from troupe.checkpoints.verifying import Lineage, digests
from troupe.client.cli import export
from troupe.client.cli.failures import explain
from troupe.client.cli.train import TrainPlan
from troupe.job import JobSpec


def test_listing_and_showing(run: Run, cluster: Stage) -> None:
    status, out, err = run("jobs", "list")
    assert (status, err) == (0, "")
    assert re.search(r"mine +running +micro_batch +0 +1/3 +0\.500 ", out)
    assert run("jobs", "list", "--state", "paused")[1] == "no jobs\n"
    assert json.loads(run("jobs", "list", "--json")[1])[0]["id"] == "mine"

    cluster.fake.jobs["mine"].activity = "step 2: rolling out"
    field, value = "policies.solver.model.dtype", "bfloat16"
    cluster.fake.jobs["mine"].resolved.add(field=field, value=value, source="checkpoint")
    job = cluster.fake.jobs["mine"]
    job.early_end.field, job.early_end.text = "stop", "reward/mean = 0.9 after step 1"
    job.best.metric, job.best.value, job.best.step = "reward/mean", 0.9, 1
    job.best.versions["solver"] = 3
    status, out, _ = run("jobs", "show", "mine")
    assert status == 0
    assert "before its last step: reward/mean = 0.9 after step 1" in out
    assert re.search(r"best +solver@3 of step 1: reward/mean = 0.9", out)
    assert f"setting      {field} = {value} (checkpoint)" in out
    assert "mine running after 1 of 3 steps" in out
    assert "step 2: rolling out" in out
    assert "/data/mine/checkpoints/solver/v3" in out
    shown = json.loads(run("jobs", "show", "mine", "--json")[1])
    assert shown["spec"]["pipeline"]["steps"] == 3
    assert shown["early_end"]["field"] == "stop"
    assert shown["best"]["versions"] == {"solver": 3}
    assert shown["resolved"] == [{"field": field, "value": value, "source": "checkpoint"}]


def test_steering(run: Run, cluster: Stage) -> None:
    assert run("jobs", "pause", "mine") == (0, "mine is paused\n", "")
    assert run("jobs", "resume", "mine") == (0, "mine is submitted\n", "")
    assert run("jobs", "pause", "mine")[0] == 0
    cluster.fake.jobs["mine"].history.add(step=2).fields.add(
        field="pipeline.steps", old="3", new="6"
    )
    changes = ("--set", "pipeline.steps=6", "--set", "policies.solver.optimizer={lr: 0.1}")
    assert run("jobs", "resume", "mine", *changes)[0] == 0
    assert dict(cluster.fake.requests("ResumeJob")[-1].overrides) == {
        "pipeline.steps": "6",
        "policies.solver.optimizer": '{"lr": 0.1}',
    }
    assert "changed      after step 2: pipeline.steps: 3 -> 6" in run("jobs", "show", "mine")[1]
    assert run("jobs", "cancel", "mine", "--reason", "enough") == (0, "mine is cancelled\n", "")
    status, _, err = run("jobs", "pause", "mine")
    assert (status, err) == (1, "error: job_id = mine: the job is cancelled.\n")


def test_tags_notes_and_the_job_s_own_file(run: Run, cluster: Stage) -> None:
    cluster.fake.given["mine"] = "# The baseline.\nname: mine\n"
    status, out, _ = run("jobs", "annotate", "mine", "--tag", "a", "--tag", "b", "--notes", "first")
    assert (status, out) == (0, "tags         a b\nnotes        first\n")
    assert "tags         b" in run("jobs", "annotate", "mine", "--remove-tag", "a")[1]
    assert re.search(r"mine +running +micro_batch +b +0 +1/3", run("jobs", "list")[1])
    assert "notes        first" in run("jobs", "show", "mine")[1]
    assert json.loads(run("jobs", "show", "mine", "--json")[1])["tags"] == ["b"]
    status, _, err = run("jobs", "annotate", "mine")
    assert (status, err) == (
        2,
        "error: --tag: give at least one of --tag, --remove-tag and --notes\n",
    )
    assert run("jobs", "spec", "mine") == (0, "# The baseline.\nname: mine\n", "")
    assert "\n  steps: 3\n" in run("jobs", "spec", "mine", "--resolved")[1]


def test_watching_to_the_end(run: Run, cluster: Stage) -> None:
    async def end(fake) -> None:  # type: ignore[no-untyped-def]
        await fake.step("mine", 2, reward__solver__mean=0.75)
        await fake.move("mine", S.JOB_STATE_SUCCEEDED)

    cluster.play(end)
    status, out, _ = run("jobs", "watch", "mine")
    assert status == 0
    assert "step 1/3 | reward solver 0.500" in out
    assert "step 2/3 | reward solver 0.750" in out
    assert re.search(r"solver +0\.500 +0\.750 +\+0\.250", out)


def test_generating(run: Run, cluster: Stage) -> None:
    arguments = ("generate", "mine", "solver", "2+2=", "--system", "Be brief.")
    assert run(*arguments, "--temperature", "0") == (0, "four\n", "")
    request = cluster.fake.requests("GeneratePolicy")[0]
    assert [(m.role, m.content) for m in request.messages] == [
        ("system", "Be brief."),
        ("user", "2+2="),
    ]
    assert json.loads(run(*arguments, "--json")[1])["output_ids"] == [7, 8]


def test_exporting(run: Run, cluster: Stage, tmp_path: Path) -> None:
    cluster.fake.files = {"config.json": b"{}"}
    target = tmp_path / "out"
    assert run("export", "mine", str(target), "--policy", "solver")[0] == 0
    assert (target / "config.json").read_bytes() == b"{}"
    status, _, err = run("export", "mine", str(target), "--policy", "solver")
    assert status == 1
    assert "is not empty" in err


def test_a_forgotten_jobs_checkpoint_is_exported_while_the_cluster_runs(
    run: Run, running: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = running / "gone/checkpoints/solver/v3"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    Lineage("gone", "it", "solver", 3, 2, "c" * 32, "", files=digests(folder)).write(folder)
    here = ("--data-dir", str(running))
    # A named cluster may have another directory.
    status, _, err = run("export", "gone", str(tmp_path / "named"), *here)
    assert status != 0
    assert "gone" in err
    monkeypatch.delenv("TROUPE_ORCHESTRATOR_ADDRESS")
    assert run("export", "gone", str(tmp_path / "out"), *here)[0] == 0
    assert (tmp_path / "out/config.json").read_text() == "{}"
    assert run("export", "never", str(tmp_path / "never"), *here)[0] != 0


def test_a_running_clusters_older_export_is_not_uploaded_in_place_of_the_newest(
    run: Run, cluster: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uploaded = []

    class Repository:
        def __init__(self, name: str) -> None:
            pass

        def upload(self, folder: Path, label: str) -> str:
            uploaded.append(label)
            return "the hub"

    monkeypatch.setattr(export, "HubRepository", Repository)
    for version in (2, 3):  # the cluster has 3
        folder = tmp_path / f"v{version}"
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        lineage = Lineage("mine", "it", "solver", version, version - 1, "c" * 32, "")
        replace(lineage, files=digests(folder)).write(folder)
        (folder / "README.md").write_text("the card")
        status, _, err = run("export", "mine", str(folder), "--push-to-hub", "me/model")
        assert status == (0 if version == 3 else 1), err
    assert uploaded == ["it: solver @ 3"]


def test_an_export_to_a_url_is_uploaded(run: Run, cluster: Stage) -> None:
    cluster.fake.files = {"config.json": b"{}", "deep/a.bin": b"1"}
    url = f"memory://{uuid.uuid4().hex}/out"
    arguments = ("export", "mine", url, "--policy", "solver")
    status, out, _ = run(*arguments)
    assert status == 0
    assert f"exported solver to {url}" in out
    system, root = fsspec.core.url_to_fs(url)
    assert {found.removeprefix(root) for found in system.find(root)} == {
        "/config.json",
        "/deep/a.bin",
    }
    status, _, err = run(*arguments)
    assert status == 1
    assert f"DIR = {url}: the target exists" in err
    status, _, err = run(*arguments, "--push-to-hub", "me/model")
    assert status == 2
    assert "must be a directory on this host" in err


def test_an_export_that_fails_leaves_nothing_in_the_way(
    run: Run, cluster: Stage, tmp_path: Path
) -> None:
    cluster.fake.files = {"config.json": b"{}"}
    target = tmp_path / "out"
    arguments = ("export", "mine", str(target), "--policy", "solver")
    status, _, err = run(*arguments, "--adapter")
    assert status == 1
    assert "--adapter: the policy trained all weights" in err
    assert list(tmp_path.glob("*out*")) == []
    assert run(*arguments)[0] == 0


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (("jobs", "show", "nope"), 2, r"job_id = nope: no such job\. `troupe jobs list`"),
        (("jobs", "list", "--cluster", "x"), 2, r"address = x: is not an address"),
        (("jobs", "list", "--bogus"), 2, r"No such option: --bogus.*See `troupe jobs list --help`"),
        (("frobnicate",), 2, r"No such command 'frobnicate'"),
        (("jobs", "list", "--state", "happy"), 2, r"Invalid value for '--state'"),
        (("train",), 2, r"JOB\.yaml: give either a job file or --resume"),
        (("train", "--resume", "j", "--tag", "k"), 2, r"--tag = k: applies to a new job"),
        (("jobs", "resume", "mine", "--set", "a"), 2, r"--set = 'a': is not of the form key\.path"),
        (("train", "--resume", "j", "--job-id", "k"), 2, r"--job-id = k: applies to a new job"),
        (("export", "mine", "/tmp/x", "--base", "b"), 2, r"--base = b: needs --merged"),
        (("train", "nowhere.yaml"), 2, r"nowhere\.yaml: cannot be read.*Check the path"),
        (("up", "--panel-port", "70000"), 2, r"--panel-port = 70000: .*65535"),
    ],
)
def test_a_mistake_is_one_line_with_the_remedy(
    run: Run, cluster: Stage, arguments: tuple[str, ...], status: int, message: str
) -> None:
    code, out, err = run(*arguments)
    assert (code, out) == (status, "")
    assert re.fullmatch(rf"error: .*{message}.*\n", err)
    assert "Traceback" not in err


def test_every_fault_of_a_job_file_is_a_line(run: Run, job_yaml: str, tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(job_yaml.replace("steps: 3", "step: 3, group_size: 0"))
    for command in (("job", "validate"), ("train",)):
        status, _, err = run(*command, str(path))
        lines = err.splitlines()
        assert status == 2
        assert "error: pipeline.step = 3: there is no such field. Did you mean" in err
        assert any("pipeline.group_size = 0" in line for line in lines)
        assert any("pipeline.steps" in line for line in lines)


def test_a_quantized_checkpoint_is_a_fault(run: Run, job_yaml: str, tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(job_yaml)
    (tmp_path / "model").mkdir()
    config = {"model_type": "gpt_oss", "quantization_config": {"quant_method": "mxfp4"}}
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    model = json.dumps({"path": str(tmp_path / "model")})
    given = ["--set", f"policies.solver.model={model}"]
    status, _, err = run("job", "validate", str(path), *given)
    assert status == 2
    assert f"policies.solver.model.path = {tmp_path}/model: its weights are quantized" in err
    assert "dequantize" in err


def test_experts_that_ranks_cannot_divide_are_a_fault(
    run: Run, job_yaml: str, tmp_path: Path
) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(job_yaml)
    (tmp_path / "model").mkdir()
    config = {"model_type": "qwen3_moe", "num_experts": 60}
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    model = json.dumps({"path": str(tmp_path / "model")})
    trainer = json.dumps({"gang": 8, "expert_parallel": 8})
    given = [
        "--set",
        f"policies.solver.model={model}",
        "--set",
        f"policies.solver.trainer={trainer}",
    ]
    status, _, err = run("job", "validate", str(path), *given)
    assert status == 2
    assert "policies.solver.trainer.expert_parallel = 8: 8 of 8 ranks cannot divide the 60" in err
    assert "Choose a divisor of both: 1, 2, 4; or `auto`" in err


def test_a_hostile_chat_template_is_a_fault(run: Run, job_yaml: str, tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(job_yaml)
    (tmp_path / "model").mkdir()
    file = tmp_path / "model" / "chat_template.jinja"
    model = json.dumps({"path": str(tmp_path / "model")})
    given = ["--set", f"policies.solver.model={model}"]
    file.write_text("{{ 'x'|center(3000000000) }}")
    status, _, err = run("job", "validate", str(path), *given)
    assert status == 2
    assert f"policies.solver.model.path = {file}: the chat template exceeds a bound" in err
    file.write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    assert run("job", "validate", str(path), *given)[0] == 0


def test_memory_that_a_job_needs_is_shown_for_devices(
    run: Run, job_yaml: str, tmp_path: Path
) -> None:
    """The parts on each device, and the smallest gang that fits; 1 if a policy fits nowhere."""
    path = tmp_path / "job.yaml"
    path.write_text(job_yaml)
    eight = {"model_type": "qwen3", "num_hidden_layers": 36, "hidden_size": 4096}
    eight |= {"intermediate_size": 12_288, "num_key_value_heads": 8}
    model = {"config": eight, "tokenizer": "any", "dtype": "bfloat16"}
    given = ["--set", f"policies.solver.model={json.dumps(model)}"]
    given += ["--set", "policies.solver.trainer.activation_checkpointing=true"]
    status, out, err = run("job", "validate", str(path), *given, "--devices", "8xH100-80GB")
    assert (status, err) == (1, "")
    assert "8.19 B parameters, all weights" in out
    words = " ".join(out.split())
    assert "gang" in words
    assert "4" in words
    given += ["--set", "policies.solver.trainer.gang=4"]
    assert run("job", "validate", str(path), *given, "--devices", "8xH100-80GB")[0] == 0
    assert run("job", "validate", str(path), *given, "--devices", "2xH100-80GB")[0] == 1
    status, _, err = run("job", "validate", str(path), "--devices", "8xH100")
    assert status == 2
    assert "--devices = 8xH100: '8xH100' is not COUNTxCLASS-MEMORY" in err


def test_set_changes_fields_before_validation(run: Run, job_yaml: str, tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(job_yaml)
    good = ("--set", "pipeline.steps=7", "--set", "agents.solver.sampling.temperature=0.5")
    status, out, _ = run("job", "validate", str(path), *good)
    assert (status, out) == (
        0,
        f"{path} is a valid job: 2 agents, trains checker, solver, 7 steps; "
        "--imports checks that its code can be imported\n",
    )
    status, out, _ = run("job", "validate", str(path), *good, "--set", "pipeline.alpha=3")
    assert (status, out.count("\n")) == (0, 2)
    assert out.splitlines()[1].startswith("note: pipeline.alpha = 3: without effect in mode `")
    for assignment, message in (
        ("pipeline.stps=7", "pipeline.stps = 7: there is no such field"),
        ("pipeline", "--set = 'pipeline': is not of the form key.path=value"),
        ("name.first=x", "`name` is a value, not a section"),
        ("pipeline.steps=[", "its value is not YAML"),
    ):
        status, _, err = run("job", "validate", str(path), "--set", assignment)
        assert status == 2
        assert message in err


def test_schema_and_reference_cover_every_field(run: Run, tmp_path: Path) -> None:
    schema = json.loads(run("job", "schema")[1])
    assert set(schema["properties"]) == set(JobSpec.model_fields)
    out = tmp_path / "reference.md"
    assert run("job", "reference", "--out", str(out)) == (0, "", "")
    page = out.read_text()
    assert "## `policies.<name>.model`" in page
    assert "| `lr` | number, > 0, ≤ 1000 | `1e-05` | Peak learning rate. |" in page
    assert "| `kind` | `embedded` or `sglang` or `vllm` | `embedded` |" in page
    for definition in schema["$defs"].values():
        for field in definition["properties"]:
            assert f"| `{field}` |" in page


def test_version_and_help(run: Run) -> None:
    assert run("--version")[1].startswith("troupe ")
    status, out, _ = run("--help")
    assert status == 0
    for command in ("train", "up", "down", "status", "jobs", "generate", "export", "job"):
        assert command in out


def test_a_fault_of_ours_is_a_line_too(monkeypatch: pytest.MonkeyPatch) -> None:
    lines, status = explain(KeyError("x"))
    assert status == 1
    assert lines == [
        "error: unexpected KeyError: 'x'. This is a bug of Troupe; TROUPE_TRACEBACK=1 shows where."
    ]
    assert explain(KeyboardInterrupt()) == (["error: interrupted."], 130)
    monkeypatch.setenv("TROUPE_TRACEBACK", "1")
    assert "KeyError" in "".join(explain(KeyError("x"))[0])


def test_errors_of_the_users_files_are_not_reported_as_bugs() -> None:
    with pytest.raises(FileNotFoundError) as caught:
        Path("/proc/samples.parquet").write_text("")  # not even root can write there
    lines, status = explain(caught.value)
    assert lines == ["error: /proc/samples.parquet: No such file or directory. Check the path."]
    assert status == 1
    full = OSError(errno.ENOSPC, "No space left on device")
    assert explain(full)[0] == [
        "error: No space left on device. Make room on its disk, or choose another."
    ]
    assert "This is a bug" in explain(OSError(errno.EBADF, "Bad file descriptor"))[0][0]


@pytest.mark.parametrize(
    "command",
    [
        ("up",),
        ("down",),
        ("status",),
        ("jobs", "list"),
        ("jobs", "forget", "x"),
        ("jobs", "watch", "x"),
    ],
)
def test_a_data_directory_that_nothing_can_name_is_refused(
    run: Run, tmp_path: Path, command: tuple[str, ...]
) -> None:
    bad = tmp_path / os.fsdecode(b"caf\xe9")
    bad.mkdir()
    status, _, err = run(*command, "--data-dir", str(bad))
    assert status == 2
    assert err.count("\n") == 1
    assert "caf\\xe9: its name is not UTF-8. Rename it" in err


IMPORTS_A_COMMAND = """
import gc, sys, typer
from troupe.client.cli.app import app
commands = typer.main.get_command(app).commands
collections = []
gc.callbacks.append(lambda phase, info: collections.append(phase))
commands["up"]
assert "troupe.cluster.embedded" in sys.modules
print(len(collections), gc.isenabled())
"""


def test_a_command_is_imported_without_garbage_collections() -> None:
    command = [sys.executable, "-c", IMPORTS_A_COMMAND]
    printed = subprocess.check_output(command, text=True, timeout=PATIENCE)
    assert printed.split() == ["0", "True"]


def test_the_cluster_that_resumes_a_job_suits_it(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans: list[TrainPlan] = []

    async def note(plan: TrainPlan, console: object) -> int:
        plans.append(plan)
        return 0

    monkeypatch.setattr("troupe.client.cli.train.run", note)
    monkeypatch.setenv("TROUPE_DEVICES", "8xH100-80GB")
    directory = tmp_path / "data" / "mine"
    directory.mkdir(parents=True)
    spec = yaml.safe_load(JOB_YAML)
    spec["policies"]["solver"]["trainer"] = {"gang": 2}
    for colocate in (False, True):
        spec["pipeline"] |= {"mode": "sync", "colocate": colocate}
        (directory / "job.yaml").write_text(yaml.safe_dump(spec))
        assert run("train", "--resume", "mine")[0] == 0
    gang = "policies.solver.trainer.gang=4"
    assert run("train", "--resume", "mine", "--set", gang)[0] == 0
    found = [(one.settings.colocate, one.settings.devices_per_trainer) for one in plans]
    assert found == [(False, 2), (True, 2), (True, 4)]
    # What cannot be read here is left to the cluster, and so is a job that is not here.
    (directory / "job.yaml").write_text("name: [")
    for job_id in ("mine", "other"):
        assert run("train", "--resume", job_id)[0] == 0
        assert not plans[-1].settings.colocate
