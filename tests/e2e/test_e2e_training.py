"""The main job, end to end, on the embedded cluster."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections import Counter
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.e2e.conftest import House
from tests.support.tiny_team import job
from troupe.client import AsyncJobHandle
from troupe.v1 import orchestrator_pb2 as orchestrator_pb


async def test_two_policies_learn_and_leave_checkpoints(house: House, models: Path) -> None:
    handle = await house.client.submit(job(models, **{"pipeline.steps": 12}))
    record = await handle.wait(timeout=240)
    assert record.state == "succeeded", record
    assert record.versions == {"solver": 12, "checker": 12}
    assert record.after["team_success"] > record.before["team_success"] + 0.2
    assert record.problem is None
    assert all(0 < count <= 12 for count in record.signal_steps.values()), record.signal_steps

    rows = [json.loads(s) for s in (house.data_dir / handle.id / "metrics.jsonl").open()]
    logged = {name for row in rows for name in row}
    assert {"solver/loss/policy", "checker/grad_norm", "reward/mean"} <= logged
    for policy in ("solver", "checker"):
        checkpoints = [c for c in await handle.checkpoints() if c.policy == policy]
        assert [c.version for c in checkpoints] == [12]
        AutoModelForCausalLM.from_pretrained(checkpoints[0].path)
        AutoTokenizer.from_pretrained(checkpoints[0].path)

    # The tokens of one query per step are kept, with the trainers' values.
    request = orchestrator_pb.ListTrajectoriesRequest(job_id=handle.id, page_size=200, to_step=10)
    listed = (await handle._stub.ListTrajectories(request)).trajectories
    name = next(one.trajectory_id for one in listed if one.tokens_kept and not one.evaluation)
    wanted = orchestrator_pb.GetTrajectoryRequest(job_id=handle.id, trajectory_id=name, tokens=True)
    found = await handle._stub.GetTrajectory(wanted)
    assert {turn.policy for turn in found.turns} == {"solver", "checker"}
    for turn in found.turns:
        count = turn.response_tokens
        tokens = turn.tokens
        assert len(tokens.ids) == len(tokens.texts) == len(tokens.logprobs) == count
        assert len(tokens.advantages) == count
        # No gradient was computed where nothing is to be learned. On-policy ratios are one.
        assert len(tokens.ratios) == (count if any(tokens.advantages) else 0)
        assert list(tokens.ratios) == pytest.approx([1.0] * len(tokens.ratios), abs=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", [{}, {"kl_coefficient": 0.1, "entropy_coefficient": 0.01}])
async def test_equal_rewards_teach_nothing_and_the_job_says_so(
    house: House, models: Path, algorithm: dict[str, float]
) -> None:
    """Regularizers move the weights even so; they teach nothing of the task."""
    changes = {"workflow": "tests.support.tiny_team:shrug", "algorithm": algorithm}
    handle = await house.client.submit(job(models, **changes, **{"pipeline.steps": 3}))
    record = await handle.wait(timeout=240)
    assert record.state == "succeeded", record
    assert record.versions == {"solver": 3, "checker": 3}
    assert record.signal_steps == {"solver": 0, "checker": 0}
    assert record.problem is not None
    assert record.problem.kind == "nothing_learned"
    assert "0 of 3 steps had a signal" in record.problem.message


async def test_a_tree_is_trained_in_groups_of_siblings(house: House, models: Path) -> None:
    """Groups of different sizes, each of one prompt, every sample of which is trained once."""
    over = {
        "workflow": "tests.support.tiny_team:tree",
        "algorithm.group_by": "branch",
        "pipeline.steps": 2,
        "pipeline.queries_per_step": 2,
        "pipeline.group_size": 2,
        "evaluation.queries": 0,
    }
    handle = await house.client.submit(job(models, **over))
    record = await handle.wait(timeout=240)
    assert record.state == "succeeded", record
    assert record.versions == {"solver": 2, "checker": 2}

    samples = [s async for s in handle.samples("solver")]
    assert {s.state for s in samples} == {"trained"}
    assert len(samples) == 2 * 2 * 2 * (3 + 2)
    members: dict[str, list[str]] = {}
    for sample in samples:
        members.setdefault(sample.group_id, []).append(sample.trajectory_id)
    drafts = {name: who for name, who in members.items() if "/solver/0/" in name}
    finals = {name: who for name, who in members.items() if "/solver/1/" in name}
    # All drafts of a query answer the same prompt; the answers follow the earlier messages.
    assert [sorted(Counter(who).values()) for who in drafts.values()] == [[3, 3]] * 4
    assert {n for who in finals.values() for n in Counter(who).values()} == {2}
    assert len(drafts) + len(finals) == len(members)
    audit = await handle.audit()
    assert not audit.violations, audit


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["serial", "sync"])
async def test_the_other_modes_train_too(house: House, models: Path, mode: str) -> None:
    handle = await house.client.submit(job(models, **{"pipeline.mode": mode}))
    record = await handle.wait(timeout=240)
    assert record.state == "succeeded", record
    assert record.versions == {"solver": 6, "checker": 6}


@pytest.mark.slow
async def test_async_trains_within_its_bound(house: House, models: Path) -> None:
    """Steps overlap; no sample is older than the bound; every one is accounted for."""
    over = {"pipeline.mode": "async", "pipeline.alpha": 2, "pipeline.steps": 8}
    handle = await house.client.submit(job(models, **over))
    record = await handle.wait(timeout=240)
    assert record.state == "succeeded", record
    assert record.versions == {"solver": 8, "checker": 8}
    rows = [json.loads(s) for s in (house.data_dir / handle.id / "metrics.jsonl").open()]
    steps = [row for row in rows if "step/seconds" in row]
    assert [row["step"] for row in steps] == list(range(1, 9))
    assert 1 <= max(row["staleness/max"] for row in steps) <= 2
    audit = await handle.audit()
    assert not audit.violations, audit


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["sync", "micro_batch", "async"])
async def test_rosters_change_with_real_services(house: House, models: Path, mode: str) -> None:
    """Groups without signal are replaced, and the first to finish are taken."""
    over = {
        "pipeline.mode": mode,
        "pipeline.steps": 4,
        "pipeline.dynamic_sampling": True,
        "pipeline.over_sampling": 2,
    }
    handle = await house.client.submit(job(models, **over))
    record = await handle.wait(timeout=240)
    assert record.state == "succeeded", record
    rows = [json.loads(s) for s in (house.data_dir / handle.id / "metrics.jsonl").open()]
    steps = [row for row in rows if "step/seconds" in row]
    assert len(steps) == 4
    assert all(row["queries/trained"] > 0 for row in steps)
    audit = await handle.audit()
    assert not audit.violations, audit


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["serial", "sync", "micro_batch", "async"])
async def test_redundant_trajectories_with_real_services(
    house: House, models: Path, mode: str
) -> None:
    """Every group has as many members as it should, whoever was first."""
    over = {"pipeline.mode": mode, "pipeline.steps": 4, "pipeline.redundant_trajectories": 3}
    handle = await house.client.submit(job(models, **over))
    record = await handle.wait(timeout=240)
    assert record.state == "succeeded", record
    rows = [json.loads(s) for s in (house.data_dir / handle.id / "metrics.jsonl").open()]
    steps = [row for row in rows if "step/seconds" in row]
    assert len(steps) == 4
    for row in steps:
        # 8 of 11 trajectories per query count.
        assert row["trajectories/completed"] == 4 * 8
        assert row["redundancy/cancelled"] <= 4 * 3
        assert row["redundancy/kept_turns"] > 0
    audit = await handle.audit()
    assert not audit.violations, audit


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_every_service_may_be_killed_once(house: House, models: Path) -> None:
    steps = 60
    handle = await house.client.submit(job(models, **{"pipeline.steps": steps}))
    names = [service.name for service in house.cluster.state.services]
    assert len(names) >= 6  # Redis and the five
    for number, name in enumerate(names):
        await _reach_step(handle, 3 + 7 * number)
        os.kill(house.pid(name), signal.SIGKILL)
    record = await handle.wait(timeout=600)
    assert record.state == "succeeded", record
    assert record.step == steps
    # One version per step: none skipped, none repeated.
    assert record.versions == {"solver": steps, "checker": steps}


async def _reach_step(handle: AsyncJobHandle, step: int) -> None:
    async with asyncio.timeout(240):
        while True:
            record = await handle.info()
            assert not record.state.ended, record
            if record.step >= step:
                return
            await asyncio.sleep(0.1)
