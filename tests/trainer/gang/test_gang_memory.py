"""A gang of which one rank runs out of memory alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from services.trainer.gang.gang import Gangs
from services.trainer.settings import TrainerSettings
from tests.support.ports import free_port
from tests.trainer.gang.short_rank import PLACES
from tests.trainer.gang.test_gang import alone, assert_close, gang_spec, rows_of, together
from troupe.job import JobSpec

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.mark.parametrize("checkpointing", [True, False])
def test_no_rank_is_left_in_a_collective(
    tokenizer: Path, tmp_path: Path, checkpointing: bool
) -> None:
    """Wherever in a pass it happens: forward or backward, in the policy or in the reference. The
    micro-batch is repeated by both ranks, as if passes had been smaller, bit for bit."""
    values = gang_spec(tokenizer, algorithm={"kl_coefficient": 0.05}).model_dump()
    values["policies"]["solver"]["trainer"]["activation_checkpointing"] = checkpointing
    path = tmp_path / "spec.json"
    path.write_text(JobSpec.model_validate(values).model_dump_json())
    port, ranks = free_port(), []
    for rank in range(2):
        where = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
        meet = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        environment = os.environ | {name: str(value) for name, value in (where | meet).items()}
        command = [sys.executable, "-m", "tests.trainer.gang.short_rank", str(path)]
        ranks.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
    outputs = [rank.communicate(timeout=280)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0]
    found = [json.loads(line) for line in outputs[0].splitlines() if line.startswith("{")]
    assert len(found) == PLACES
    for one in found:
        assert one["same"], one
        assert one["times"] == 1


def test_moments_of_ranks_in_host_memory(tokenizer: Path) -> None:
    """Each rank's shards; a gang without offload goes on from them, and the other way round."""
    plain = gang_spec(tokenizer)
    values = plain.model_dump()
    values["policies"]["solver"]["trainer"]["offload"] = "optimizer"
    spec = JobSpec.model_validate(values)
    gangs = Gangs(TrainerSettings(trainer_device="cpu", gang_ranks=2, gang_timeout_seconds=60))
    try:
        gang, one = together(gangs, spec), alone(plain)
        for version in range(3):
            rows = rows_of(spec, 7, version)
            for learner in (gang, one):
                learner.accumulate(rows)
                assert learner.apply(version).applied
            assert_close(gang, one)
            if version == 1:
                weights, moments = gang.weights(), gang.moments()
                gang.release()
                gang = together(gangs, plain)
                gang.restore(weights, moments)
    finally:
        gangs.close()
