"""Gangs over several hosts, each of which has all weights: the numbers of one device, and little
between hosts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.ports import free_port
from tests.trainer.gang.test_gang import gang_spec
from tests.trainer.gang.test_gang_learners import CRITIC, LORA, OPTIMIZER
from troupe.job import JobSpec

HOSTS = 2


def found_by_ranks(spec: JobSpec, size: int, directory: Path) -> list[dict[str, Any]]:
    """Return the output of rank 0 of `size` ranks on two simulated hosts (`host_rank.py`)."""
    path = directory / "spec.json"
    path.write_text(spec.model_dump_json())
    places, port, ranks = size // HOSTS, free_port(), []
    for rank in range(size):
        where = {"RANK": rank, "LOCAL_RANK": rank % places, "LOCAL_WORLD_SIZE": places}
        where |= {"WORLD_SIZE": size, "OMP_NUM_THREADS": 1}
        meet = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        environment = os.environ | {name: str(value) for name, value in (where | meet).items()}
        command = [sys.executable, "-m", "tests.trainer.gang.host_rank", str(path)]
        command.append(str(directory / "states"))
        ranks.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
    outputs = [rank.communicate(timeout=550)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * size
    return [json.loads(line) for line in outputs[0].splitlines() if line.startswith("{")]


@pytest.mark.parametrize(
    ("size", "lora", "critic", "divided"),
    [
        (2, False, False, 1),
        pytest.param(4, False, True, 1, marks=pytest.mark.slow),
        pytest.param(4, True, False, 1, marks=pytest.mark.slow),
        # Ranks that divide passes, also across hosts.
        pytest.param(4, False, False, 4, marks=pytest.mark.slow),
    ],
)
def test_hosts_with_all_weights_learn_what_one_device_does(
    tokenizer: Path, tmp_path: Path, size: int, lora: bool, critic: bool, divided: int
) -> None:
    """Steps of one micro-batch and of three, a state that is saved, loaded by either kind of gang,
    suspended within a step, continued and resumed; replicas write nothing twice. What enters a host
    does not grow with the passes."""
    algorithm = {"kl_coefficient": 0.1} | (CRITIC if critic else {})
    values = gang_spec(tokenizer, size, algorithm=algorithm, optimizer=OPTIMIZER).model_dump()
    values["policies"]["solver"]["trainer"]["context_parallel"] = divided
    values["policies"]["solver"]["lora"] = LORA if lora else None
    plain, hosts = found_by_ranks(JobSpec.model_validate(values), size, tmp_path)
    for one in (plain, hosts):
        assert one["apart"] < 1e-6, one
        assert one["read"] == one["loaded"] == 0, one
        assert max(one["went_on"], one["resumed"]) < 1e-6, one
        assert one["went_on_same"], one
        assert one["resumed_same"], one
    assert hosts["files"] < plain["files"] + 0.1 * plain["bytes"]
    few, many = hosts["entering"]
    if divided == 1:
        assert few == many
        assert many * 3 < plain["entering"][1]
    else:  # keys and values of slices
        assert many - few < plain["entering"][1] - plain["entering"][0]
