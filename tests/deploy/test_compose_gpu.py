"""docker-compose.gpu.yml over docker-compose.yml, as docker-compose merges them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from troupe.doctor import interpreters

ROOT = Path(__file__).parents[2]
DOCKERFILE = (ROOT / "deploy/docker/Dockerfile").read_text()
PROGRAM = ["docker-compose"] if shutil.which("docker-compose") else ["docker", "compose"]
HAS_COMPOSE = not (
    shutil.which(PROGRAM[0]) is None
    or subprocess.run([*PROGRAM, "version"], capture_output=True, check=False).returncode
)

compose = pytest.mark.skipif(not HAS_COMPOSE, reason="docker-compose is not installed")


def _merged(*files: str, **env: str) -> dict[str, Any]:
    """Return the files' configuration according to docker-compose."""
    chosen = [part for file in files for part in ("-f", file)]
    done = subprocess.run(
        [*PROGRAM, *chosen, "config"],
        cwd=ROOT,
        env={name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ} | env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = yaml.safe_load(done.stdout)["services"]
    return found


def _bytes(size: object) -> int:
    text = str(size)
    return int(text[:-1]) << 30 if text.endswith("g") else int(text)


@compose
def test_rollout_and_trainer_get_devices_and_the_rest_stays() -> None:
    files = "docker-compose.yml", "docker-compose.gpu.yml"
    plain, gpu = _merged(files[0]), _merged(*files)
    assert plain.keys() == gpu.keys()
    for name in plain.keys() - {"rollout", "trainer"}:
        image = {"image": "troupe-trainer-gpu"} if name == "models" else {}
        assert gpu[name] == plain[name] | image
    for name, device in (("rollout", "0"), ("trainer", "1")):
        one, before = gpu[name], plain[name]
        (devices,) = one["deploy"]["resources"]["reservations"]["devices"]
        assert devices["driver"] == "nvidia"
        # "all" is -1 for newer releases.
        assert str(devices["count"]) in ("all", "-1")
        assert {"gpu", "compute", "utility"} == set(devices["capabilities"])
        assert str(one["environment"]["CUDA_VISIBLE_DEVICES"]) == device
        assert before["environment"].items() <= one["environment"].items()
        assert _bytes(one["shm_size"]) == 16 << 30 > _bytes(before["shm_size"])
        assert one["image"] == f"{before['image']}-gpu"
        arguments = one["build"]["args"]
        assert arguments["SERVICE"] == name
        assert arguments["COMPILER"] == "1"
        # Only the image that launches servers has CUDA's tools, which compile their kernels.
        assert ("SGLANG" in arguments) == ("CUDA_IMAGE" in arguments) == (name == "rollout")
        # Two copies of one service would use the same devices.
        assert 1 in (one.get("scale"), one.get("deploy", {}).get("replicas"))
        for kept in ("cap_drop", "security_opt", "user", "volumes", "healthcheck", "depends_on"):
            assert one[kept] == before[kept]


@compose
def test_devices_and_memory_are_chosen_by_the_environment() -> None:
    services = _merged(
        "docker-compose.yml",
        "docker-compose.gpu.yml",
        TROUPE_ROLLOUT_DEVICES="0,1,2,3",
        TROUPE_TRAINER_DEVICES="4,5,6,7",
        TROUPE_SHM_SIZE="64g",
        TROUPE_SGLANG_VERSION="0.5.20",
        TROUPE_GPU_BASE_IMAGE="example/cuda:13",
    )
    rollout, trainer = services["rollout"], services["trainer"]
    assert rollout["environment"]["CUDA_VISIBLE_DEVICES"] == "0,1,2,3"
    assert trainer["environment"]["CUDA_VISIBLE_DEVICES"] == "4,5,6,7"
    assert _bytes(trainer["shm_size"]) == 64 << 30
    assert rollout["build"]["args"]["SGLANG"] == "0.5.20"
    assert {one["build"]["args"]["BASE_IMAGE"] for one in (rollout, trainer)} == {"example/cuda:13"}


def test_nvcc_comes_from_a_devel_image_of_torchs_cuda_to_where_servers_look(
    tmp_path: Path,
) -> None:
    services = yaml.safe_load((ROOT / "docker-compose.gpu.yml").read_text())["services"]
    image = services["rollout"]["build"]["args"]["CUDA_IMAGE"]
    release = re.fullmatch(
        r"\$\{TROUPE_CUDA_IMAGE:-nvidia/cuda:(\d+)\.[\d.]+-devel-\w+[\d.]*\}", image
    )
    assert release is not None
    extra = (ROOT / "pyproject.toml").read_text()
    assert f"ucxx-cu{release[1]}==" in extra  # the CUDA that torch's build of the lock has
    step = next(line for line in DOCKERFILE.splitlines() if line.startswith("RUN mkdir -p /cuda"))
    for nvcc in (True, False):
        root = tmp_path / str(nvcc)
        (root / "usr/local/cuda-13.0/bin").mkdir(parents=True)
        (root / "usr/local/cuda").symlink_to("cuda-13.0")
        if nvcc:
            (root / "usr/local/cuda-13.0/bin/nvcc").write_text("#!/bin/sh\n")
            (root / "usr/local/cuda-13.0/bin/nvcc").chmod(0o755)
        command = step.removeprefix("RUN ").replace(" /", f" {root}/")
        subprocess.run(["sh", "-ec", command], check=True)
        found = interpreters.nvcc({"CUDA_HOME": str(root / "cuda"), "PATH": ""})
        assert (found == str(root / "cuda/bin/nvcc")) == nvcc
    # The image has it where the doctor, as SGLang, looks without a variable.
    assert "COPY --from=cuda /cuda /usr/local/cuda" in DOCKERFILE


def test_the_image_knows_every_argument_and_builds_nothing_more_without_them() -> None:
    services = yaml.safe_load((ROOT / "docker-compose.gpu.yml").read_text())["services"]
    known = dict(re.findall(r"^ARG (\w+)=?(.*)$", DOCKERFILE, re.M))
    for service in services.values():
        assert known.keys() >= service.get("build", {}).get("args", {}).keys()
    for name in ("COMPILER", "SGLANG"):
        assert known[name] == '""'
        (step,) = (
            part
            for part in re.split(r"\n(?=RUN |COPY |ARG )", DOCKERFILE)
            if f'"${name}" ]' in part
        )
        assert step.startswith(f'RUN if [ -n "${name}" ]; then')
        command = step.removeprefix("RUN ").split("\n\n")[0].replace("\\\n", " ")
        done = subprocess.run(["sh", "-ec", command], env={name: ""}, check=False)
        assert done.returncode == 0
