"""A real server for slow tests, when the environment names one: SGLang, or vLLM (`real_vllm.py`).

- `TROUPE_SGLANG_PYTHON`: a Python with SGLang installed (and whatever it needs on this machine);
- or `TROUPE_SGLANG_CPU_TOOL`, a script with the verbs `setup DIR` and `serve DIR ARGS...` that
  runs SGLang on a CPU, and `TROUPE_SGLANG_CPU_DIR`, where its environment lies or shall lie.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import httpx
import pytest
from transformers import PreTrainedModel

from services.rollout.engines.server_process import free_port
from services.rollout.engines.servers.interface import AdapterNeeds, InferenceServer, Launch
from services.rollout.engines.servers.managed import write_config
from services.rollout.engines.sglang.server import SglangServer
from services.rollout.engines.vllm.server import VllmServer
from tests.rollout.engines import real_vllm
from tests.rollout.engines.models import make_model, policy_spec
from troupe.processes.ending import stop_process

START_SECONDS = 240.0
# SGLang's LoRA and routed experts ask for pinned memory, which there is none of without a GPU.
_UNPINNED = """
import torch

def plain(make):
    def made(*args, **kwargs):
        kwargs.pop("pin_memory", None)
        return make(*args, **kwargs)
    return made

for name in ("tensor", "empty", "zeros", "ones", "full", "arange", "empty_like"):
    setattr(torch, name, plain(getattr(torch, name)))
torch.Tensor.pin_memory = lambda tensor, *_args, **_kwargs: tensor

class Unregistered:
    cudaHostRegister = cudaHostUnregister = staticmethod(lambda *_args: 0)

torch.cuda.cudart = Unregistered
"""


@dataclass(frozen=True)
class RealServer:
    """Where it listens, and what runs it in place of a Python interpreter."""

    url: str
    python: str
    # All of its processes.
    group: int

    def pause(self) -> None:
        """Stop its processes while no test needs it: without work it would keep a core busy."""
        os.killpg(self.group, signal.SIGSTOP)

    def resume(self) -> None:
        """Somebody does again."""
        os.killpg(self.group, signal.SIGCONT)


def interpreter(directory: Path) -> str:
    """The command that takes `-m sglang.launch_server ARGS`; without one, skips the test."""
    python = os.environ.get("TROUPE_SGLANG_PYTHON")
    if python:
        return python
    tool = os.environ.get("TROUPE_SGLANG_CPU_TOOL")
    place = os.environ.get("TROUPE_SGLANG_CPU_DIR")
    if not tool or not place:
        pytest.skip(
            "no SGLang: set TROUPE_SGLANG_PYTHON, or TROUPE_SGLANG_CPU_TOOL and "
            "TROUPE_SGLANG_CPU_DIR"
        )
    subprocess.run([tool, "setup", place], check=True, timeout=900)
    shim = directory / "shim"
    shim.mkdir(exist_ok=True)
    (shim / "sitecustomize.py").write_text(_UNPINNED)
    wrapper = directory / "python"
    wrapper.write_text(
        f'#!/bin/sh\n[ "$1" = -m ] || exec "{place}/bin/python" "$@"\nshift 2\n'
        f'PYTHONPATH="{shim}" exec "{tool}" serve "{place}" "$@"\n'
    )
    wrapper.chmod(0o755)
    return str(wrapper)


@dataclass(frozen=True)
class _Kind:
    server: type[InferenceServer]
    interpreter: Callable[[Path], str]
    # Answers once it serves.
    page: str


_KINDS = {
    "sglang": _Kind(SglangServer, interpreter, "/health_generate"),
    "vllm": _Kind(VllmServer, real_vllm.interpreter, "/health"),
}


@contextmanager
def running(
    directory: Path,
    load_format: str = "dummy",
    model: PreTrainedModel | None = None,
    launch: Sequence[str] = (),
    *,
    kind: Literal["sglang", "vllm"] = "sglang",
    adapters: AdapterNeeds | None = None,
) -> Iterator[RealServer]:
    """Launch a server of the tiny model, or of `model`, with random weights; ends it afterwards.

    `load_format` "auto": with the weights that lie in `directory/model`. `launch`: further
    arguments. `adapters`: it is started for such adapters.
    """
    directory.mkdir(parents=True, exist_ok=True)
    described = _KINDS[kind]
    python = described.interpreter(directory)
    model = model or make_model(0)
    config = directory / "model"
    if load_format == "dummy":
        write_config(model.config, type(model).__name__, config)
    port = free_port()
    spec = policy_spec(kind=kind, python=python, launch=["--load-format", load_format, *launch])
    wanted = Launch(spec, str(config), port, 256, adapters=adapters)
    command, variables = described.server.command(wanted), described.server.variables(wanted)
    with (directory / "server.log").open("wb") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=log, start_new_session=True, env={**os.environ, **variables}
        )
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + START_SECONDS
        while not _serves(url + described.page):
            if process.poll() is not None or time.monotonic() > deadline:
                tail = (directory / "server.log").read_text(errors="replace")[-3000:]
                pytest.fail(f"{described.server.product} did not start:\n{tail}")
            time.sleep(0.5)
        yield RealServer(url, python, process.pid)
    finally:
        os.killpg(process.pid, signal.SIGCONT)
        stop_process(process, 15, group=True)


def _serves(page: str) -> bool:
    try:
        return httpx.get(page, timeout=25).status_code == 200
    except httpx.TransportError:
        return False
