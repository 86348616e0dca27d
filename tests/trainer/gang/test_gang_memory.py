"""A gang of which only one rank runs out of memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from services.trainer.gang.gang import Gangs
from services.trainer.gang.learner import GangLearner
from services.trainer.settings import TrainerSettings
from tests.support.ports import free_port
from tests.support.training import tiny_config
from tests.trainer.gang.test_gang import assert_equal, gang_spec, rows_of, together
from tests.trainer.gang.test_gang_steps import ranks
from troupe.job import JobSpec

pytestmark = pytest.mark.slow


def output_of_ranks(size: int, module: str, *arguments: object) -> str:
    """Return the output of rank 0 of a gang whose ranks run a module of this folder."""
    statuses, output = ends_of_ranks(size, module, *arguments)
    assert statuses == [0] * size
    return output


def ends_of_ranks(size: int, module: str, *arguments: object) -> tuple[list[int], str]:
    """Return the exit status of each rank, and the output of rank 0."""
    port, ranks = free_port(), []
    for rank in range(size):
        where = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
        meet = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        environment = os.environ | {name: str(value) for name, value in (where | meet).items()}
        command = [sys.executable, "-m", f"tests.trainer.gang.{module}", *map(str, arguments)]
        ranks.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
    outputs = [rank.communicate(timeout=550)[0] for rank in ranks]
    return [rank.returncode for rank in ranks], outputs[0]


@pytest.mark.parametrize(
    ("size", "divided", "checkpointing", "algorithm", "experts"),
    [
        (2, 1, True, {}, 0),
        (2, 1, False, {}, 0),
        # Ranks that divide experts have exchanged the numbers of rows that they send.
        (2, 1, True, {}, 2),
        (2, 1, False, {}, 2),
        (4, 1, True, {}, 2),
        # Ranks that divide passes wait for one another in attention, too, and where a loss couples
        # the tokens of a row, for its scores.
        (2, 2, True, {}, 0),
        (2, 2, False, {"loss": "gspo", "normalize": "sequence"}, 0),
        (4, 2, False, {}, 0),
        (4, 4, True, {"loss": "gspo", "normalize": "sequence"}, 0),
    ],
)
def test_no_rank_is_left_in_a_collective(
    tokenizer: Path,
    tmp_path: Path,
    size: int,
    divided: int,
    checkpointing: bool,
    algorithm: dict[str, Any],
    experts: int,
) -> None:
    """Wherever in a pass it happens: forward or backward, in the policy or in the reference. The
    micro-batch is repeated by all ranks, as if passes had been smaller, bit for bit."""
    mixture = {"model_type": "qwen3_moe", "moe_intermediate_size": 16, "num_experts": 4}
    config = tiny_config() | (mixture | {"num_experts_per_tok": 2} if experts else {})
    model = {"config": config, "tokenizer": str(tokenizer)}
    algorithm = {"kl_coefficient": 0.05} | algorithm
    values = gang_spec(tokenizer, model=model, algorithm=algorithm).model_dump()
    values["policies"]["solver"]["trainer"] |= {
        "gang": size,
        "context_parallel": divided,
        "expert_parallel": experts or 1,
        "activation_checkpointing": checkpointing,
    }
    budget = 96 if divided == 1 else 600
    # Most operations of a small mixture are in its experts, between two exchanges.
    places = 3 if size == 4 else 12 if experts else 6
    path = tmp_path / "spec.json"
    path.write_text(JobSpec.model_validate(values).model_dump_json())
    output = output_of_ranks(size, "short_rank", path, budget, places)
    found = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    assert len(found) == places
    for one in found:
        assert one["same"], one
        assert one["times"] == 1


@pytest.mark.parametrize(
    ("offload", "lora"), [("optimizer", None), ("all", None), ("all", {"rank": 2, "alpha": 4})]
)
def test_ranks_with_state_in_host_memory_learn_what_one_device_does(
    tokenizer: Path, offload: str, lora: dict[str, Any] | None
) -> None:
    """Each rank's shards, the numbers of one device. A gang without offload goes on from them, and
    the other way round; one that is suspended within a step is resumed."""
    full = gang_spec(tokenizer)
    values = full.model_dump()
    values["policies"]["solver"]["lora"] = lora
    plain = JobSpec.model_validate(values)
    values["policies"]["solver"]["trainer"]["offload"] = offload
    spec = JobSpec.model_validate(values)
    gangs = Gangs(TrainerSettings(trainer_device="cpu", gang_ranks=2, gang_timeout_seconds=60))
    try:
        gang, one = together(gangs, spec), together(gangs, plain, key="job/other")
        for version in range(4):
            rows = rows_of(full, 7, version)
            for learner in (gang, one):
                learner.accumulate(rows)
            if version == 3:
                tensors, suspended = gang.suspended()
                gang.release()
                gang = together(gangs, spec)
                gang.adopt(tensors, suspended)
            for learner in (gang, one):
                assert learner.apply(version).applied
            assert_equal(gang.published(), one.published())
            for kind in ("weights", "moments"):
                assert_equal(getattr(gang, kind)(), getattr(one, kind)())
            if version in (1, 2):
                weights, moments = gang.weights(), gang.moments()
                gang.release()
                gang = together(gangs, plain if version == 1 else spec)
                gang.restore(weights, moments)
    finally:
        gangs.close()


def test_ranks_free_a_policy_that_left(tokenizer: Path) -> None:
    """Compare the memory of a rank after several loads; the first one imports its modules."""
    model = {"config": tiny_config(hidden_size=256, vocab_size=60_000), "tokenizer": str(tokenizer)}
    spec = gang_spec(tokenizer, model=model)
    gangs = Gangs(TrainerSettings(trainer_device="cpu", gang_ranks=2, gang_timeout_seconds=60))
    held: list[list[int]] = []
    try:
        for _ in range(5):
            learner = GangLearner(gangs, "job/solver", spec, "solver", {})
            shards = 4 * learner.num_parameters // 2
            learner.release()
            held.append([one.memory_info().rss for one in ranks(os.getpid())])
    finally:
        gangs.close()
    assert [len(some) for some in held] == [2] * 5
    for second, last in zip(held[1], held[-1], strict=True):
        assert last - second < shards, (held, shards)


def test_ranks_wait_for_a_slow_disk_by_the_bytes_of_the_state(
    tokenizer: Path, tmp_path: Path
) -> None:
    """Of one rank among several that write or read their parts, or of the first, which does so for
    hosts that share no disk."""
    path = tmp_path / "spec.json"
    path.write_text(gang_spec(tokenizer).model_dump_json())
    output = output_of_ranks(2, "slow_disk", path, tmp_path)
    assert output.split() == ["open", "save", "load", "reference", "save"]
