"""The sources to which readers of a state are sent."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from services.orchestrator.cluster import locate
from services.orchestrator.placement.workers import WorkerRegistry
from services.orchestrator.settings import OrchestratorSettings
from troupe.v1 import common_pb2 as common_pb
from troupe.v1 import orchestrator_pb2 as orchestrator_pb
from troupe.v1 import rollout_pb2 as rollout_pb
from troupe.v1 import trainer_pb2 as trainer_pb


@pytest.fixture
async def registry() -> AsyncIterator[WorkerRegistry]:
    registry = WorkerRegistry(OrchestratorSettings())
    yield registry
    await registry.close()


def rollout(
    number: int, owner: str, version: int | None, *, policy: str = "solver", job: str = "j"
) -> orchestrator_pb.HeartbeatRequest:
    engine = rollout_pb.EngineStatus(job_id=job, policy=policy, version=version)
    return orchestrator_pb.HeartbeatRequest(
        worker_id=f"r{number}",
        kind=orchestrator_pb.WORKER_KIND_ROLLOUT,
        address=f"r{number}:1",
        transfer_address=owner,
        engines=[engine],
    )


def trainer(
    number: int, owner: str, version: int, state: int = common_pb.BINDING_STATE_IDLE
) -> orchestrator_pb.HeartbeatRequest:
    binding = trainer_pb.BindingStatus(job_id="j", policy="solver", version=version, state=state)
    return orchestrator_pb.HeartbeatRequest(
        worker_id=f"t{number}",
        kind=orchestrator_pb.WORKER_KIND_TRAINER,
        address=f"t{number}:1",
        transfer_address=owner,
        bindings=[binding],
    )


async def test_likely_holders_come_first_and_the_dead_not_at_all(registry: WorkerRegistry) -> None:
    beats = [
        rollout(0, "h0:9", 3, job="another"),
        rollout(1, "h1:9", 4, policy="checker"),
        rollout(2, "h2:9", 3),
        rollout(3, "h3:9", 4),
        rollout(4, "h4:9", 4),
        rollout(5, "", 4),  # its host serves no other host
        trainer(1, "h3:9", 4),  # on one host with r3
        trainer(2, "h6:9", 4, common_pb.BINDING_STATE_RELEASED),
    ]
    for one in beats:
        registry.beat(one)
    gone = next(worker for worker in registry.all() if worker.worker_id == "r4")
    gone.lose()
    found = locate("j/solver/weights@4", registry.all())
    assert list(found.owners) == ["h3:9", "h2:9", "h1:9", "h0:9", "h6:9"]
    assert list(found.trainers) == ["t1:1", "t2:1"]


async def test_a_key_without_policy_or_version_has_an_answer(registry: WorkerRegistry) -> None:
    registry.beat(rollout(0, "h0:9", 1, job="another"))
    registry.beat(rollout(1, "h1:9", 1))
    assert list(locate("j/columns/q_0_t/images", registry.all()).owners) == ["h1:9", "h0:9"]
    assert list(locate("loose", registry.all()).owners) == ["h0:9", "h1:9"]
    assert not locate("loose", []).owners
