"""Whole updates of Qwen3-0.6B, 4B, 14B and 30B-A3B under `FakeTensorMode` on "cuda": no tensor on a
wrong device, and as many bytes as the memory model says."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainer.peak import case
from troupe.job import JobSpec
from troupe.job.sizing import read_shape, setup_of
from troupe.scheduling.memory import RankMemory, rank_memory
from troupe.twin.costs import model_config

# Tolerances: of all tensors, and of those of a pass or an update.
ERROR = 0.1
# Tokens of a pass, the default of a device of 80 GB, in rows of this length.
TOKENS, LENGTH = 16_384, 2048
MEMORY = 80 << 30
MEBIBYTE = 1 << 20
CHECKPOINTED = {"activation_checkpointing": True}
KEPT = {"activation_checkpointing": False}
HALF = CHECKPOINTED | {"kernels": "auto"}
# Lengths and offsets of rows, of which the device gets copies: all that passes make on the host.
ON_HOST = {
    "services/trainer/learning/sequences/packing.py:cumulative",
    "troupe/algorithms/expert_load.py:__init__",
}
# Places where the host waits for the device: once per pass, or once per step.
WAITS = {
    "services/trainer/learning/learner.py:apply",
    "services/trainer/learning/optimizer.py:finish",
    "services/trainer/learning/optimizer.py:weights_norm",
    "services/trainer/learning/ranks.py:_settle",
    "services/trainer/learning/pass_budget.py:_copied",
    "troupe/algorithms/expert_load.py:load_metrics",
    "troupe/algorithms/statistics.py:_routing_metrics",
    "troupe/algorithms/statistics.py:metrics",
}


def values(model: str, layers: int = 0, **changes: Any) -> dict[str, Any]:
    """Return a job that trains `model`, with fewer `layers` if they are given."""
    config = model_config(model) | ({"num_hidden_layers": layers} if layers else {})
    source = {"config": config, "tokenizer": "/nowhere", "dtype": "bfloat16"}
    trainer = {"forward_tokens": TOKENS, **changes.pop("trainer", CHECKPOINTED)}
    return case(model=source, trainer=trainer, length=LENGTH, **changes)


def predicted(job: dict[str, Any]) -> RankMemory:
    spec = JobSpec.model_validate(job)
    shape = read_shape(spec.policies["solver"].language_model)
    assert shape is not None
    return rank_memory(shape, setup_of(spec, "solver", shape, device="cuda", memory=MEMORY))


@pytest.fixture(scope="session")
def fake_cuda(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the library that stands in for CUDA's device guard."""
    if torch.cuda.is_available():
        pytest.skip("there is a GPU: benchmarks.gpu measures it")
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("there is no g++ to compile fake_cuda.cpp")
    root, source = Path(torch.__file__).parent, Path(__file__).with_name("fake_cuda.cpp")
    made = tmp_path_factory.mktemp("fake_cuda") / "libfake_cuda.so"
    command = [compiler, "-shared", "-fPIC", "-std=c++20", "-O0", str(source), "-o", str(made)]
    command += [f"-I{root / 'include'}", f"-L{root / 'lib'}", f"-Wl,-rpath,{root / 'lib'}"]
    done = subprocess.run(
        [*command, "-lc10", "-ltorch_cpu"], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return made


def step(job: dict[str, Any], library: Path, directory: Path, *what: str) -> dict[str, Any]:
    """Return the needs of a step of the job (`fake_step.step`), from a separate process; `what`:
    arguments of `fake_step.main`."""
    path = directory / "case.json"
    path.write_text(json.dumps(job))
    command = [sys.executable, "-m", "tests.trainer.memory.fake_step", str(path), *what]
    environment = os.environ | {"LD_PRELOAD": str(library)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=1500, env=environment)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def check(name: str, job: dict[str, Any], library: Path, directory: Path) -> dict[str, Any]:
    """Run a step, and check its devices and bytes."""
    found, model = step(job, library, directory), predicted(job)
    tensors = model.total - model.overhead
    whole = tensors / found["cuda"] - 1
    working = (tensors - model.state) / (found["cuda"] - found["state"]) - 1
    print(f"{name}: predicted {tensors:,}, measured {found['cuda']:,}, {whole:+.1%}")
    print(f"  while it computes: {working:+.1%}\n  {model.parts}\n  {found}")
    assert {each.partition(": ")[2] for each in found["host"]} <= ON_HOST
    assert {each.partition(": ")[2] for each in found["waits"]} <= WAITS
    assert found["state"] == pytest.approx(model.state, rel=0.001)
    assert abs(whole) <= ERROR
    assert abs(working) <= ERROR
    return found


def test_a_step_on_a_gpu_needs_the_predicted_memory(fake_cuda: Path, tmp_path: Path) -> None:
    """Two layers of Qwen3-0.6B."""
    check("0.6B, 2 layers", values("Qwen3-0.6B", 2), fake_cuda, tmp_path)


def test_weights_are_cast_once_per_update(fake_cuda: Path, tmp_path: Path) -> None:
    """After the first pass of an update none is, inputs of layers side by side are cast once, and
    gradients of weights not at all: casts read two thirds of the bytes. Copies stay across passes,
    and the memory model counts them."""
    by_autocast = step(values("Qwen3-0.6B", 2), fake_cuda, tmp_path)["casts"]
    job = values("Qwen3-0.6B", 2, trainer=HALF)
    found, model = step(job, fake_cuda, tmp_path), predicted(job)
    casts = found["casts"]
    assert sum(casts.values()) < 0.7 * sum(by_autocast.values()), (casts, by_autocast)
    assert not any(name.endswith("half.py:of") for name in casts), casts
    copies = found["state"] - model.state
    linears = 2 * (2 * 1024 * 2048 + 2 * 1024 * 1024 + 3 * 1024 * 3072) + 151_936 * 1024
    assert copies == pytest.approx(2 * linears, rel=0.01)
    assert (model.total - model.overhead) / found["cuda"] - 1 == pytest.approx(0, abs=ERROR)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("trainer", [CHECKPOINTED, KEPT], ids=["checkpointed", "kept"])
@pytest.mark.parametrize("model", ["Qwen3-0.6B", "Qwen3-4B", "Qwen3-14B", "Qwen3-30B-A3B"])
def test_a_step_of_a_whole_model_needs_the_predicted_memory(
    model: str, trainer: dict[str, Any], fake_cuda: Path, tmp_path: Path
) -> None:
    """All layers, although no device has room for them."""
    check(model, values(model, trainer=trainer), fake_cuda, tmp_path)


VARIANTS = {
    "lora": values("Qwen3-4B", 4, lora={"rank": 8}),
    "lora-kept": values("Qwen3-4B", 4, trainer=KEPT, lora={"rank": 8}),
    "offload": values("Qwen3-4B", 4, trainer=CHECKPOINTED | {"offload": "optimizer"}),
    # There is no room for copies of its weights, which are made for each use.
    "half": values("Qwen3-4B", trainer=HALF),
    "half-checkpointed": values("Qwen3-4B", 4, trainer={"activation_checkpointing": 2}),
    "coupled-tokens": values("Qwen3-4B", 4, algorithm={"loss": "gspo"}),
    "mixture-lora": values("Qwen3-30B-A3B", 2, lora={"rank": 8}),
    "mixture-balanced": values("Qwen3-30B-A3B", 2, algorithm={"router_aux_loss": 0.001}),
}


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", VARIANTS)
def test_every_way_to_train_on_a_gpu_needs_the_predicted_memory(
    name: str, fake_cuda: Path, tmp_path: Path
) -> None:
    """Adapters, moments in host memory, losses over sequences, auxiliary losses of routers."""
    found = check(name, VARIANTS[name], fake_cuda, tmp_path)
    if name == "offload":  # both moments, and a copy of the gradients
        assert found["cpu"] >= 2 * predicted(values("Qwen3-4B", 4)).weights


SUSPENDED = {
    "reference": {"algorithm": {"kl_coefficient": 0.01}},
    "adapter": {"algorithm": {"kl_coefficient": 0.01}, "lora": {"rank": 8}},
    "half": {"trainer": HALF, "algorithm": {"kl_coefficient": 0.01}},
    "teacher": {
        "algorithm": {"distillation": {"teachers": {"solver": "teacher"}, "divergence": "full"}}
    },
}


@pytest.mark.parametrize("name", SUSPENDED)
def test_a_suspended_policy_leaves_its_device(name: str, fake_cuda: Path, tmp_path: Path) -> None:
    """Also its reference, its teachers and copies of its weights; the base under an adapter stays
    for policies that share it until other processes need the device."""
    job = values("Qwen3-0.6B", 2, **SUSPENDED[name])
    if name == "teacher":
        teacher = {**job["policies"]["solver"], "trainable": False}
        del teacher["trainer"]
        job["policies"]["teacher"] = teacher
    found = step(job, fake_cuda, tmp_path, "suspension")
    shape = read_shape(JobSpec.model_validate(job).policies["solver"].language_model)
    assert shape is not None
    base = 2 * shape.parameters if name == "adapter" else 0
    assert found["bound"] >= 2 * shape.parameters
    assert found["suspended"] == pytest.approx(base, abs=MEBIBYTE)
    assert found["free"] <= MEBIBYTE
    # Copies of weights in half precision are made again by the next pass.
    gone = 2 * shape.parameters if name == "half" else 0
    assert found["bound"] - gone - MEBIBYTE <= found["resumed"] <= found["bound"]


def test_tensors_on_two_devices_are_found(fake_cuda: Path, tmp_path: Path) -> None:
    """A step that multiplies a tensor of the device by one of the host fails here as on a GPU."""
    program = (
        "import torch\n"
        "from tests.trainer.memory.fake_step import FakeCuda, pretending\n"
        "mode = FakeCuda()\n"
        "with mode, pretending(mode):\n"
        "    torch.ones(3, device='cuda') * torch.ones(3)\n"
    )
    environment = os.environ | {"LD_PRELOAD": str(fake_cuda)}
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=300,
        env=environment,
    )
    assert done.returncode != 0
    assert "at least two devices, cuda:0 and cpu" in done.stderr, done.stderr
