"""The environments of a job's servers, as `troupe job validate` and `troupe train` look at them."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from tests.support.cluster import job_yaml
from tests.support.interpreters import SGLANG, environment
from troupe.client.cli.app import main
from troupe.doctor import interpreters
from troupe.doctor.examination import quick_checks


def job(place: Path, python: str | None, **engine: object) -> str:
    """The file of a job whose policy `solver` is served by SGLang."""
    own = {"kind": "sglang", **({} if python is None else {"python": python}), **engine}
    file = place / "job.yaml"
    file.write_text(job_yaml(policies=("solver",), policies__solver__engine=own))
    assert yaml.safe_load(file.read_text())
    return str(file)


@pytest.fixture(autouse=True)
def _nothing_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TROUPE_SGLANG_PYTHON", "TROUPE_DEVICES", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("lacks", ["interpreter", "package", "default"])
def test_validate_refuses_a_job_without_sglang_on_a_machine_with_devices(
    lacks: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    python = {
        "interpreter": str(tmp_path / "absent"),
        "package": environment(tmp_path, {"torch": "2.13.0"}),
        "default": None,
    }[lacks]
    file = job(tmp_path, python)
    # Where no device is, it may be a machine from which jobs are submitted.
    assert main(["job", "validate", file]) == 0
    assert "note: on this machine, policies.solver.engine.python" in capsys.readouterr().out
    # So it is where devices of another machine are declared on the command line.
    main(["job", "validate", file, "--devices", "2xH100-80GB"])
    assert "engine.python" not in capsys.readouterr().err
    monkeypatch.setenv("TROUPE_DEVICES", "2xH100-80GB")
    assert main(["job", "validate", file]) == 2
    said = capsys.readouterr().err
    assert "policies.solver.engine.python" in said
    assert 'pip install "sglang==0.5.21"' in said


def test_an_interpreter_that_several_policies_have_is_named_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    python = environment(tmp_path, {"torch": "2.13.0"})
    own = {"kind": "sglang", "python": python}
    file = tmp_path / "job.yaml"
    names = ("solver", "checker", "judge")
    file.write_text(job_yaml(policies=names, **{f"policies__{n}__engine": own for n in names}))
    assert main(["job", "validate", str(file)]) == 0
    (note,) = (one for one in capsys.readouterr().out.splitlines() if "engine.python" in one)
    assert all(name in note for name in names)


def test_validate_warns_of_a_server_that_takes_no_broadcast_or_cannot_compile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TROUPE_DEVICES", "2xH100-80GB")
    monkeypatch.setattr(interpreters, "nvcc", lambda: None)
    python = environment(tmp_path, SGLANG | {"nvidia-nccl-cu13": "2.30.7"})
    assert main(["job", "validate", job(tmp_path, python)]) == 0
    said = capsys.readouterr().out
    assert "NCCL 2.30.7" in said
    assert "nvcc: not found" in said


def test_attached_servers_are_not_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TROUPE_DEVICES", "2xH100-80GB")
    assert main(["job", "validate", job(tmp_path, None, urls=["http://h:1"])]) == 0


def test_train_refuses_before_it_starts_a_cluster(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = job(tmp_path, str(tmp_path / "absent"))
    assert main(["train", file, "--data-dir", str(tmp_path / "runs")]) == 2
    assert "there is no interpreter" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_the_start_of_workers_tells_of_a_server_that_is_not_there(tmp_path: Path) -> None:
    named = {"TROUPE_SGLANG_PYTHON": str(tmp_path / "absent")}
    (told,) = [
        one
        for one in quick_checks(named | {"TROUPE_DEVICES": "2xH100-80GB"})
        if one.subject == "sglang"
    ]
    assert "there is no interpreter" in told.text
    # Without devices it may be used for nothing.
    assert not [one for one in quick_checks(named) if one.subject == "sglang"]
