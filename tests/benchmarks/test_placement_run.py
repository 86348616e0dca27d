"""The benchmark of device placement, from its command line to its object."""

from __future__ import annotations

import dataclasses

import pytest

from benchmarks.placement import cluster, requests, violations
from tests.benchmarks.quick import quick_run
from troupe.scheduling.devices import plan


@pytest.mark.slow
def test_a_quick_run_plans_without_violations() -> None:
    found = quick_run("placement", seconds=120)
    assert found.pop("plan_seconds") < 1
    assert found == {"devices": 32, "requests": found["requests"], "violations": 0}


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
