"""A deployed reward and the ready coding tool in a job (`examples/coding_agent`), on a cluster."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from examples.coding_agent import tiny
from tests.e2e.conftest import House
from tests.support.needs import BUBBLEWRAP

JOB = Path(tiny.__file__).with_name("job.yaml")
BONUS = """
import troupe

@troupe.reward(cores=0)
def bonus(query, turns, rewards) -> dict[str, float]:
    print("bonus for", turns[0]["agent"])
    return {"coder": 0.5}
"""


@pytest.mark.slow
@BUBBLEWRAP
async def test_a_coding_team_is_paid_by_tests_and_by_a_deployed_reward(
    house: House, tmp_path: Path
) -> None:
    source = tmp_path / "paying.py"
    source.write_text(BONUS)
    functions = house.client.functions
    (deployed,) = await functions.deploy(source)
    paid = await functions.invoke("bonus", {"query": {}, "turns": [{"agent": "x"}], "rewards": {}})
    assert paid == {"coder": 0.5}
    spec = yaml.safe_load(JOB.read_text())
    path = str(tiny.make(tmp_path / "model"))
    for policy in spec["policies"].values():
        policy["model"]["path"] = path
    spec["rewards"] = {"bonus": {"function": "bonus@1"}}
    spec["pipeline"] |= {"steps": 2, "queries_per_step": 2, "group_size": 2}
    spec["pipeline"]["micro_batch_samples"] = 4
    del spec["evaluation"]
    spec["logging"] = {"tensorboard": False}

    handle = await house.client.submit(yaml.safe_dump(spec))
    record = await handle.wait(timeout=540)

    assert record.state == "succeeded", record
    assert not (await handle.audit()).violations
    known = {one.name.rpartition("/")[2]: one for one in await functions.list()}
    assert known["bonus"].invocations == 1 + 2 * 2 * 2
    assert known["bonus"].source_sha256 == deployed.source_sha256
    tool = known["run_pytest"]
    assert (tool.kind, tool.costs["stateful"], tool.costs["max_cores"]) == ("tool", True, 2)
    assert tool.invocations >= 8
    assert tool.errors == 0
    rewards = [one.rewards["coder"] for one in await handle.trajectories()]
    assert set(rewards) <= {0.5, 1.5}
