"""The benchmark of device placement, from its command line to its object."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from benchmarks.placement import cluster, devices_used, readme_job, requests, violations
from tests.benchmarks.quick import quick_run
from tests.support.tutorials import code_blocks
from troupe.devices import parse_devices
from troupe.job import parse_job
from troupe.job.automatic import with_values
from troupe.scheduling.devices import plan


@pytest.mark.slow
def test_a_quick_run_plans_without_violations() -> None:
    found = quick_run("placement", seconds=120)
    assert found.pop("plan_seconds") < 1
    assert found == {
        "devices": 32,
        "requests": found["requests"],
        "violations": 0,
        "readme_job_devices_used": 8,
    }


def test_the_readmes_job_uses_all_devices_of_a_host() -> None:
    job = readme_job()
    assert devices_used(job, parse_devices("8xH100-80GB")) == set(range(8))
    # Numbers of the author's stay as they are.
    given = {f"policies.{name}.engine.replicas": 1 for name in job.policies}
    given |= {f"policies.{name}.trainer.gang": 1 for name in job.policies}
    assert len(devices_used(with_values(job, given), parse_devices("8xH100-80GB"))) == 4


def test_the_tutorials_job_uses_all_devices_of_its_machine() -> None:
    page = Path(__file__).parents[2] / "docs" / "tutorials" / "gpu.md"
    (block,) = [one for one in code_blocks(page) if one.name == "gpu.yaml"]
    job = parse_job(block.text)
    for count in (2, 3, 8):
        devices = parse_devices(f"{count}xH100-80GB")
        assert devices_used(job, devices) == set(range(count))
    turns = job.model_copy(
        update={"pipeline": job.pipeline.model_copy(update={"mode": "sync", "colocate": True})}
    )
    assert devices_used(turns, parse_devices("4xH100-80GB")) == set(range(4))


def test_violations_are_counted() -> None:
    hosts, asked = cluster(4), requests(32)
    up = {host.name for host in hosts}
    found = plan(hosts, asked)
    assert violations(asked, found, {}, up) == 0
    # A gang on another's devices, a member that was moved, a host that is gone.
    trainers = [one.name for one in asked if one.kind == "trainer"]
    stolen = {trainers[1]: found.members[trainers[0]]}
    twice = dataclasses.replace(found, members={**found.members, **stolen})
    assert violations(asked, twice, {}, up) >= len(found.members[trainers[0]])
    moved = {trainers[0]: tuple(found.members[trainers[1]])}
    assert violations(asked, found, moved, up) > 0
    assert violations(asked, found, {}, up - {found.members[trainers[0]][0].host}) > 0
