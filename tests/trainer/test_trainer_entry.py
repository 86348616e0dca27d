"""Variables that the trainer's processes need before they import torch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from services.trainer.gang import gang
from services.trainer.gang.gang import RankSettings
from services.trainer.settings import TrainerSettings, process_variables

DEFAULTS = {"NCCL_CUMEM_ENABLE": "0", "PYTORCH_ALLOC_CONF": "pinned_max_cached_size_mb:1"}


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({}, DEFAULTS),
        ({"NCCL_CUMEM_ENABLE": "1"}, DEFAULTS | {"NCCL_CUMEM_ENABLE": "1"}),
        # torch heeds only the first of these that is set.
        (
            {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
            {"NCCL_CUMEM_ENABLE": "0", "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
        ),
    ],
    ids=["none", "nccl", "allocator"],
)
def test_ranks_get_the_variables_unless_the_operator_sets_them(
    given: dict[str, str],
    wanted: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    started: list[dict[str, str]] = []

    def popen(command: list[str], env: dict[str, str]) -> Any:
        started.append(env)

    monkeypatch.setattr(subprocess, "Popen", popen)
    for name in (*DEFAULTS, "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    before = dict(os.environ)
    settings = TrainerSettings(data_dir=tmp_path)
    terms = RankSettings.of(settings, 1, str(tmp_path / "channel"))
    gang.launch(terms, ranks=1, nodes=1, node=0, address="127.0.0.1", port=1)
    [environment] = started
    ours = {n: v for n, v in environment.items() if n.startswith(("NCCL_", "PYTORCH_"))}
    assert {name: ours.get(name) for name in wanted} == wanted
    assert set(ours) - set(wanted) <= set(before)
    assert dict(os.environ) == before


def test_torch_knows_the_allocators_setting() -> None:
    """It ignores unknown ones, and refuses values of those that it knows."""
    program = (
        "import sys, torch\n"
        "use = torch._C._accelerator_setAllocatorSettings\n"
        "use(sys.argv[1])\n"
        "try:\n"
        "    use(sys.argv[1].partition(':')[0] + ':many')\n"
        "except ValueError:\n"
        "    print('known')\n"
    )
    setting = process_variables({})["PYTORCH_ALLOC_CONF"]
    done = subprocess.run(
        [sys.executable, "-c", program, setting],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.stdout == "known\n", done.stderr
