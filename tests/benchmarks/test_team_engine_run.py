"""The benchmark of a team on one engine, from its command line to its object."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest

from benchmarks.team_engine.servers import find
from tests.benchmarks.quick import quick_run


@pytest.mark.slow
def test_a_team_shares_one_base_without_a_wrong_version() -> None:
    found = quick_run("team_engine", "--only", "embedded")["embedded"]
    # Several bases of this size would not show next to the libraries; the engines' tests do.
    assert set(found["memory_over_one_base"]) == {"2", "4", "6"}
    assert found["tokens_over_one_policy"].keys() == found["per_cpu_second"].keys()
    assert found["turns_during_updates"] >= found["updates"] == 6
    assert found["wrong_versions"] == 0
    assert found["lost_turns"] == 0


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", ["sglang", "vllm"])
def test_a_team_shares_one_real_server_without_a_wrong_version(
    kind: Literal["sglang", "vllm"], tmp_path: Path
) -> None:
    if find(kind, tmp_path) is None:
        pytest.skip(f"no {kind} in the environment")
    # deadline: servers import for minutes on a busy machine
    found = quick_run("team_engine", "--only", kind, seconds=3000)[kind]
    for figure in ("memory_over_one_base", "memory_apart", "tokens_shared_over_apart"):
        assert set(found[figure]) == {"2"}
        assert found[figure]["2"] > 0
    # Two servers hold what is not the model twice, too.
    assert found["memory_over_one_base"]["2"] < found["memory_apart"]["2"]
    assert found["turns_during_updates"] >= found["updates"] == 6
    assert found["wrong_versions"] == 0
    assert found["lost_turns"] == 0
