"""Checks of Python environments: what their metadata says, and what follows for the host."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.interpreters import environment
from troupe.client.cli.app import main
from troupe.doctor import interpreters
from troupe.doctor.findings import Verdict
from troupe.doctor.interpreters import Environment, NoEnvironment

OWN = Environment(
    "/own/python",
    "3.11.7",
    {"torch": "2.13.0", "nvidia-nccl-cu13": "2.29.7"},
    cuda="13.0",
    devices=8,
    arches=("sm_80", "sm_90a"),
    capability=(9, 0),
)


async def test_an_environment_is_read_from_its_metadata(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packages = {"sglang": "0.5.23", "torch": "2.14.1", "nvidia-nccl-cu13": "2.30.7"}
    environment(tmp_path, packages, body="raise RuntimeError('nobody asked for me')")
    monkeypatch.setenv("HOME", str(tmp_path))
    found = await interpreters.read_environment("~/python")
    assert found.interpreter == str(tmp_path / "python")
    assert found.packages == packages
    assert found.nccl == "2.30.7"
    assert not found.error


async def test_torch_is_asked_for_devices_and_its_error_is_kept(tmp_path: Path) -> None:
    body = """
import types
print("a library that prints", end="")
version = types.SimpleNamespace(cuda="13.0")
def init(): raise RuntimeError("driver too old")
cuda = types.SimpleNamespace(init=init)
"""
    python = environment(tmp_path, {"torch": "2.13.0"}, body)
    found = await interpreters.read_environment(python, with_devices=True)
    assert (found.cuda, found.devices) == ("13.0", 0)
    assert found.error == "RuntimeError: driver too old"
    judged = interpreters.torch_of(found, devices=2, driver_cuda=(13, 0))
    assert judged.verdict is Verdict.PROBLEM
    assert "driver too old" in judged.text


@pytest.mark.parametrize("wrong", ["absent", "fails", "no program"])
async def test_an_interpreter_that_does_not_run_is_told(tmp_path: Path, wrong: str) -> None:
    program = tmp_path / "python"
    if wrong != "absent":
        program.write_text("#!/bin/sh\necho broken >&2\nexit 1\n" if wrong == "fails" else "what")
        program.chmod(0o755)
    with pytest.raises(NoEnvironment) as caught:
        await interpreters.read_environment(str(program))
    assert str(program) in str(caught.value)
    [found] = await interpreters.servers({"sglang": str(program)}, OWN, devices=8)
    assert found.verdict is Verdict.PROBLEM


@pytest.mark.parametrize(
    ("own", "driver", "verdict", "said"),
    [
        (OWN, (13, 0), Verdict.GOOD, "CUDA 13.0, NCCL 2.29.7"),
        (OWN, None, Verdict.GOOD, "2.13.0"),
        (OWN, (12, 8), Verdict.PROBLEM, "driver runs up to 12.8"),
        (replace(OWN, devices=0), (13, 0), Verdict.PROBLEM, "sees none"),
        (replace(OWN, capability=(12, 0)), (13, 0), Verdict.PROBLEM, "no kernels"),
        (replace(OWN, capability=(8, 6)), (13, 0), Verdict.GOOD, "CUDA"),
        (
            replace(OWN, packages={"torch": "2.13.0+cpu"}, cuda=None),
            (13, 0),
            Verdict.PROBLEM,
            "a build for the CPU",
        ),
        (replace(OWN, packages={}), (13, 0), Verdict.PROBLEM, "not installed"),
    ],
)
def test_torch_is_judged_by_the_devices_of_the_host(
    own: Environment, driver: tuple[int, int] | None, verdict: Verdict, said: str
) -> None:
    found = interpreters.torch_of(own, 8, driver)
    assert found.verdict is verdict
    assert said in found.text
    assert bool(found.remedy) == (verdict is Verdict.PROBLEM)


def test_a_server_with_another_nccl_is_a_problem_where_there_are_devices(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(interpreters, "nvcc", lambda: "/usr/local/cuda/bin/nvcc")
    packages = {"sglang": "0.5.23", "torch": "2.14.1", "nvidia-nccl-cu13": "2.30.7"}
    server = Environment("/sglang/python", "3.11.7", packages)
    first = interpreters.server_of("sglang", server, OWN, devices=8)[0]
    assert first.verdict is Verdict.PROBLEM
    assert "2.30.7" in first.text
    assert "2.29.7" in first.text
    assert interpreters.server_of("sglang", server, OWN, devices=0)[0].verdict is Verdict.GOOD
    same = replace(server, packages={**packages, "nvidia-nccl-cu13": "2.29.7"})
    found = interpreters.server_of("sglang", same, OWN, devices=8)
    assert {one.verdict for one in found} == {Verdict.GOOD}
    missing = replace(server, packages={"torch": "2.14.1"})
    assert interpreters.server_of("sglang", missing, OWN, devices=8)[0].verdict is Verdict.PROBLEM


def test_servers_need_a_compiler_where_there_are_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interpreters, "nvcc", lambda: None)
    server = Environment("/sglang/python", "3.11.7", {**OWN.packages, "sglang": "0.5.21"})
    compiler = interpreters.server_of("sglang", server, OWN, devices=8)[1]
    assert (compiler.subject, compiler.verdict) == ("nvcc", Verdict.PROBLEM)
    assert len(interpreters.server_of("sglang", server, OWN, devices=0)) == 1


def test_a_server_outside_of_process_groups_may_have_any_nccl_and_no_compiler(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(interpreters, "nvcc", lambda: None)
    packages = {"vllm": "0.32.0", "torch": "2.11.0", "nvidia-nccl-cu13": "2.28.9"}
    server = Environment("/vllm/python", "3.11.7", packages)
    found = interpreters.server_of("vllm", server, OWN, devices=8)
    assert [(one.subject, one.verdict) for one in found] == [("vllm", Verdict.GOOD)]


def test_the_compiler_is_looked_for_where_servers_look(tmp_path: Path) -> None:
    for place in ("home/bin", "path"):
        program = tmp_path / place / "nvcc"
        program.parent.mkdir(parents=True)
        program.write_text("#!/bin/sh\n")
        program.chmod(0o755)
    path, home = str(tmp_path / "path"), str(tmp_path / "home")
    assert interpreters.nvcc({"PATH": path}) == f"{path}/nvcc"
    assert interpreters.nvcc({"PATH": path, "CUDA_HOME": home}) == f"{home}/bin/nvcc"
    assert interpreters.nvcc({"PATH": path, "CUDA_HOME": "/nowhere"}) == f"{path}/nvcc"


def test_the_command_prints_findings_and_fails_for_a_problem(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TROUPE_REDIS_URL", raising=False)
    python = environment(tmp_path, {"sglang": "0.5.21", "torch": "2.13.0"})
    main(["doctor", "--json", "--server", f"sglang={python}"])
    found = {one["subject"]: one for one in json.loads(capsys.readouterr().out)}
    assert {"torch", "sglang", "memory", "network", "Redis"} <= set(found)
    assert found["sglang"]["text"].startswith("0.5.21")
    monkeypatch.setenv("TROUPE_SGLANG_PYTHON", str(tmp_path / "absent"))
    assert main(["doctor"]) == 1
    assert "there is no interpreter" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("text", ["sglang", "sglang=", "embedded=/bin/python", "what=/bin/python"])
def test_the_command_refuses_a_server_that_it_does_not_know(
    text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", "--server", text]) == 2
    assert "KIND=PYTHON" in capsys.readouterr().err
