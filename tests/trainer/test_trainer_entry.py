"""The trainer's processes agree with inference servers on how NCCL allocates memory."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from services.trainer.gang import gang
from services.trainer.gang.gang import RankSettings
from services.trainer.settings import NCCL_VARIABLES, TrainerSettings


@pytest.mark.parametrize("given", [None, "1"])
def test_ranks_get_the_variables_of_nccl_unless_the_operator_sets_them(
    given: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    started: list[dict[str, str]] = []

    def popen(command: list[str], env: dict[str, str]) -> Any:
        started.append(env)

    monkeypatch.setattr(subprocess, "Popen", popen)
    monkeypatch.delenv("NCCL_CUMEM_ENABLE", raising=False)
    if given is not None:
        monkeypatch.setenv("NCCL_CUMEM_ENABLE", given)
    settings = TrainerSettings(data_dir=tmp_path)
    terms = RankSettings.of(settings, 1, str(tmp_path / "channel"))
    gang.launch(terms, ranks=1, nodes=1, node=0, address="127.0.0.1", port=1)
    [environment] = started
    assert environment["NCCL_CUMEM_ENABLE"] == (given or NCCL_VARIABLES["NCCL_CUMEM_ENABLE"])
    assert os.environ.get("NCCL_CUMEM_ENABLE") == given
