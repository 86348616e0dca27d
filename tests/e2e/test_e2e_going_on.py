"""Going on from a job with real services: more steps, and new jobs that begin with its weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import House
from tests.support.tiny_team import job
from tests.support.waiting import PATIENCE
from troupe.client import AsyncJobHandle

pytestmark = pytest.mark.slow
POLICIES = ("checker", "solver")
EXACT: dict[str, Any] = {
    "pipeline.mode": "sync",
    "pipeline.deterministic": True,
    "algorithm.group_by": "turn",
}


def states(house: House, job_id: str, version: int) -> dict[str, dict[str, str]]:
    """The checksums of the training states of a version, by policy."""
    found = {}
    for policy in POLICIES:
        (path,) = (house.data_dir / job_id / "state" / policy).glob(f"v{version}-*/state.json")
        values = json.loads(path.read_text())
        found[policy] = {part: values[part] for part in ("weights", "optimizer", "random")}
    return found


async def succeeded(handle: AsyncJobHandle) -> None:
    record = await handle.wait(timeout=PATIENCE)
    assert record.state == "succeeded", record.problem
    assert not (await handle.audit()).violations


async def test_more_steps_end_with_the_bits_of_a_job_that_had_them_from_the_start(
    house: House, models: Path
) -> None:
    """The order of tasks, weights, moments and random generators go on where they were."""
    whole = await house.client.submit(job(models, **EXACT, **{"pipeline.steps": 4}))
    await succeeded(whole)
    short = await house.client.submit(job(models, **EXACT, **{"pipeline.steps": 2}))
    await succeeded(short)
    await short.resume(overrides={"pipeline.steps": 4})
    await succeeded(short)
    assert states(house, short.id, 4) == states(house, whole.id, 4)
    record = await short.info()
    [change] = record.history
    assert str(change) == "after step 2: pipeline.steps: 2 -> 4"
    assert record.versions == {"checker": 4, "solver": 4}
    queries = [
        {one.query_id for one in await each.trajectories(None) if not one.evaluation}
        for each in (short, whole)
    ]
    assert queries[0] == queries[1]


@pytest.mark.parametrize("adapter", [False, True])
@pytest.mark.parametrize("optimizer", [False, True])
async def test_a_new_job_begins_with_what_another_one_has_learned(
    house: House, models: Path, optimizer: bool, adapter: bool
) -> None:
    own = {f"policies.{name}.lora": {"rank": 4} for name in POLICIES} if adapter else {}
    exact = EXACT | own
    first = await house.client.submit(job(models, **exact, **{"pipeline.steps": 2}))
    await succeeded(first)
    learned = {name: (await first.versions(name))[-1].checksum for name in POLICIES}
    kept = states(house, first.id, 2)
    given = {"job": first.id, "optimizer": optimizer}
    begins = {f"policies.{name}.init_from": given for name in POLICIES}
    second = await house.client.submit(job(models, **exact, **begins, **{"pipeline.steps": 1}))
    # Nothing of the first job is needed any more.
    shutil.rmtree(house.data_dir / first.id)
    await succeeded(second)
    for name in POLICIES:
        versions = await second.versions(name)
        assert versions[0].checksum == learned[name]
        assert versions[-1].checksum != learned[name]
    record = await second.info()
    what = "weights and optimizer" if optimizer else "weights"
    assert str(record.origins["solver"]) == f"{what} of {first.id}/solver@2"
    (path,) = (house.data_dir / second.id / "state" / "solver").glob("v0-*/state.json")
    mine = json.loads(path.read_text())
    assert mine["weights"] == kept["solver"]["weights"]
    assert (mine["optimizer"] == kept["solver"]["optimizer"]) == optimizer
    assert not (house.data_dir / second.id / "init" / "state" / "solver").exists()
    # More steps load the model from the checkpoint that was kept.
    await second.resume(overrides={"pipeline.steps": 2})
    await succeeded(second)
