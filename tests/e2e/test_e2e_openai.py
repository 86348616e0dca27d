"""An agent written for OpenAI's API learns on a whole cluster (`examples/existing_agent`)."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from examples.existing_agent import tiny
from tests.e2e.conftest import House

JOB = Path(tiny.__file__).with_name("job.yaml")


@pytest.mark.slow
async def test_an_existing_agent_learns_to_use_its_tool(house: House, tmp_path: Path) -> None:
    spec = yaml.safe_load(JOB.read_text())
    spec["policies"]["seeker"]["model"]["path"] = str(tiny.make(tmp_path / "model"))
    spec["logging"] = {"tensorboard": False}

    handle = await house.client.submit(yaml.safe_dump(spec))
    record = await handle.wait(timeout=540)

    assert record.state == "succeeded", record
    assert record.after["team_success"] > record.before["team_success"] + 0.2
    audit = await handle.audit()
    assert not audit.violations, audit
