"""A real vLLM server for slow tests, when the environment names one.

- `TROUPE_VLLM_PYTHON`: a Python with vLLM installed;
- or `TROUPE_VLLM_CPU_TOOL`, a script with the verbs `setup DIR` and `serve DIR ARGS...` that runs
  vLLM on a CPU, and `TROUPE_VLLM_CPU_DIR`, where its environment lies or shall lie.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from tests.rollout.engines.models import CONFIG

START_SECONDS = 600.0
# Its kernels for CPUs have no heads of 8.
TINY: dict[str, Any] = {**CONFIG, "hidden_size": 64, "head_dim": 32}


def make_model(seed: int) -> PreTrainedModel:
    """The tiny model with random weights of `seed`."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(AutoConfig.for_model(**TINY))
    return model.eval()


def interpreter(directory: Path, site: str = "") -> str:
    """The command that takes `-m vllm.entrypoints.cli.main serve ARGS`; without it, skips the test.

    `site`: the code of a `sitecustomize` module of the server's processes.
    """
    python = os.environ.get("TROUPE_VLLM_PYTHON")
    if python:
        return python
    tool, place = os.environ.get("TROUPE_VLLM_CPU_TOOL"), os.environ.get("TROUPE_VLLM_CPU_DIR")
    if not tool or not place:
        pytest.skip(
            "no vLLM: set TROUPE_VLLM_PYTHON, or TROUPE_VLLM_CPU_TOOL and TROUPE_VLLM_CPU_DIR"
        )
    subprocess.run([tool, "setup", place], check=True, timeout=900, stdout=subprocess.DEVNULL)
    (directory / "site").mkdir()
    (directory / "site/sitecustomize.py").write_text(site)
    wrapper = directory / "python"
    wrapper.write_text(
        f'#!/bin/sh\n[ "$1" = -m ] || exec "{place}/bin/python" "$@"\nshift 3\n'
        f'PYTHONPATH="{directory}/site" exec "{tool}" serve "{place}" "$@"\n'
    )
    wrapper.chmod(0o755)
    return str(wrapper)


# The tool keeps weights of linear layers loadable. As vLLM's CPU build is made, it packs them and
# drops the originals, so that a reload does not reach them.
PACKED = """
import importlib.abc, importlib.machinery, sys

NAME = "vllm.model_executor.layers.utils"

class Packing(importlib.abc.MetaPathFinder, importlib.machinery.SourceFileLoader):
    def __init__(self):
        pass

    def find_spec(self, name, path=None, target=None):
        if name != NAME:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        super().__init__(name, spec.origin)
        spec.loader = self
        return spec

    def get_code(self, name):
        text = open(self.path).read()
        head, kept, rest = text.partition("    if layer.weight.ndim == 2:  # keep the weights")
        assert kept
        return compile(head + rest.split("return\\n", 1)[1], self.path, "exec")

sys.meta_path.insert(0, Packing())
"""
