"""The jobs that a worker is prepared for, without any engine."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from services.rollout.job_setup import computes_here
from services.rollout.jobs import JobTable
from troupe.job import parse_job
from troupe.v1 import common_pb2 as common_pb

SPEC = """
name: team
workflow: "team:solve"
tasks: {source: "tasks:Tasks"}
agents: {solver: {policy: solver}}
policies: {solver: {model: {path: /models/solver}}}
pipeline: {steps: 3, queries_per_step: 4}
"""


class Preparation:
    """Counts how many prepare one job at once."""

    def __init__(self) -> None:
        self.now = self.most = self.made = 0

    async def with_defaults(self, spec: Any) -> Any:
        return spec

    async def make(self, job_id: str, spec: Any, refs: Any, servers: Any) -> Any:
        self.now += 1
        self.most = max(self.most, self.now)
        await asyncio.sleep(0.001)
        self.now -= 1
        self.made += 1
        raise RuntimeError("no engine came up")


@pytest.mark.parametrize(
    ("policy", "here"),
    [
        ("{model: {path: /m}}", True),
        ("{model: {path: /m}, engine: {kind: sglang}}", False),
        ("{model: {path: /m}, simulated: {}}", False),
    ],
)
def test_the_process_stops_for_garbage_only_where_it_holds_models(policy: str, here: bool) -> None:
    spec = parse_job(SPEC.replace("{model: {path: /models/solver}}", policy))
    assert computes_here(spec) is here


async def test_one_job_is_prepared_once_at_a_time_and_costs_nothing_afterwards() -> None:
    preparation: Any = Preparation()
    table = JobTable(preparation, "worker")
    weights = [common_pb.WeightsRef(policy="solver")]
    asked = [table.prepare("one", parse_job(SPEC), weights) for _ in range(5)]
    ended = await asyncio.gather(*asked, return_exceptions=True)
    assert all(isinstance(error, RuntimeError) for error in ended), ended
    assert (preparation.most, preparation.made) == (1, 5)
    for number in range(100):
        await table.release(f"over-{number}")
    assert len(table._locks) == 0
