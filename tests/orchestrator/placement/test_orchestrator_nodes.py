"""Nodes at the orchestrator: names, protocol, liveness, and devices that a job asks for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from services.orchestrator.placement.nodes import NodeRegistry, check_devices
from services.orchestrator.settings import OrchestratorSettings
from troupe.devices import NODE_PROTOCOL
from troupe.job import JobSpec
from troupe.rpc import AlreadyExists, FailedPrecondition, InvalidArgument
from troupe.v1 import orchestrator_pb2 as orchestrator_pb


def report(name: str = "n1", instance: str = "a", **fields: Any) -> orchestrator_pb.JoinNodeRequest:
    given = {"protocol": NODE_PROTOCOL, "host": "host-1"} | fields
    return orchestrator_pb.JoinNodeRequest(name=name, instance=instance, **given)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_node_joins_and_learns_where_the_services_are() -> None:
    settings = OrchestratorSettings(experience_store_address="h:1", reward_address="h:2")
    nodes = NodeRegistry(settings)
    answer = nodes.join(report(devices=[orchestrator_pb.NodeDevice(index=3, device_class="H100")]))
    assert (answer.experience_store_address, answer.reward_address) == ("h:1", "h:2")
    assert 0 < answer.next_seconds <= settings.heartbeat_seconds
    beat = SimpleNamespace(
        node="n1", devices=[orchestrator_pb.GivenDevice(index=3, holders=["job/policy"])]
    )
    (status,) = nodes.statuses([SimpleNamespace(alive=True, beat=beat)])  # type: ignore[list-item]
    assert status.alive
    assert [(one.index, list(one.holders)) for one in status.devices] == [(3, ["job/policy"])]
    # A dead worker's devices compute no longer.
    (status,) = nodes.statuses([SimpleNamespace(alive=False, beat=beat)])  # type: ignore[list-item]
    assert not status.devices[0].holders


def test_two_living_nodes_of_one_name_are_refused_and_a_dead_ones_name_is_free() -> None:
    clock = Clock()
    settings = OrchestratorSettings(heartbeat_seconds=1, lost_after_beats=5)
    nodes = NodeRegistry(settings, clock)
    nodes.join(report(instance="a"))
    with pytest.raises(AlreadyExists) as refused:
        nodes.join(report(instance="b"))
    assert (refused.value.kind, refused.value.field, refused.value.value) == (
        "node_exists", "name", "n1",
    )  # fmt: skip
    nodes.join(report(instance="a"))  # the node that has the name continues
    clock.now += 6
    assert not nodes.statuses([])[0].alive
    nodes.join(report(instance="b"))
    assert nodes.statuses([])[0].alive
    # A node that leaves gives its name back at once.
    nodes.join(report(instance="b", leaving=True))
    nodes.join(report(instance="c"))


@pytest.mark.parametrize(
    ("fields", "error", "field"),
    [
        ({"protocol": NODE_PROTOCOL - 1}, FailedPrecondition, "protocol"),
        ({"protocol": NODE_PROTOCOL + 1}, FailedPrecondition, "protocol"),
        ({"name": ""}, InvalidArgument, "name"),
        ({"name": "x" * 300}, InvalidArgument, "name"),
        ({"instance": ""}, InvalidArgument, "instance"),
    ],
)
def test_a_bad_report_is_refused(fields: dict[str, Any], error: type, field: str) -> None:
    nodes = NodeRegistry(OrchestratorSettings())
    with pytest.raises(error) as refused:
        nodes.join(report(**fields))
    assert refused.value.field == field
    assert refused.value.remedy
    assert nodes.statuses([]) == []


def job(replicas: int, tensor_parallel: int, **engine: Any) -> JobSpec:
    model = {"config": {"model_type": "qwen3"}, "tokenizer": "t"}
    engine = {"kind": "sglang", "replicas": replicas, "tensor_parallel": tensor_parallel} | engine
    return JobSpec.model_validate(
        {
            "name": "team",
            "agents": {"solver": {"policy": "solver"}},
            "policies": {"solver": {"model": model, "engine": engine}},
            "workflow": "a:b",
            "tasks": {"source": "a:b"},
            "pipeline": {"steps": 1, "queries_per_step": 1},
        }
    )


def worker(*holders: list[str]) -> Any:
    devices = [
        orchestrator_pb.GivenDevice(index=i, device_class="H100", holders=one)
        for i, one in enumerate(holders)
    ]

    class Handle(SimpleNamespace):
        def __str__(self) -> str:
            return "rollout worker r"

    return Handle(beat=SimpleNamespace(devices=devices))


FREE: list[str] = []


@pytest.mark.parametrize(
    ("spec", "workers"),
    [
        (job(2, 2), [worker(FREE, FREE, FREE, FREE)]),
        (job(2, 2), [worker()]),  # it does not report its devices
        (job(2, 2), []),  # nodes may come later
        (job(2, 1), [worker(FREE, ["other.p.0@r"], FREE)]),
    ],
)
def test_a_job_that_finds_its_devices_is_taken(spec: JobSpec, workers: list[Any]) -> None:
    check_devices(spec, workers)


def test_devices_of_ended_jobs_and_of_the_job_itself_are_free() -> None:
    """Those of an ended job are released when the next one starts; a submission is repeated with
    the same id while the job's own engines are up."""
    full = [worker(*([f"{name}.p.0@r"] for name in ("mine", "ended", "mine", "ended")))]
    check_devices(job(2, 2), full, leaving={"mine", "ended"})
    with pytest.raises(FailedPrecondition, match="2 are free; held by ended"):
        check_devices(job(2, 2), full, leaving={"mine"})


def test_a_job_that_waits_in_the_queue_needs_devices_that_exist() -> None:
    full = [worker(*(["other.p.0@r"] for _ in range(4)))]
    check_devices(job(2, 2), full, queued=True)
    with pytest.raises(FailedPrecondition, match="4 x H100, of which 4 are free"):
        check_devices(job(3, 2), full, queued=True)


def test_a_refusal_names_the_devices_and_their_holders() -> None:
    with pytest.raises(FailedPrecondition) as refused:
        check_devices(job(2, 2), [worker(FREE, FREE, ["other.p.0@r"], ["other.p.0@r"])])
    error = refused.value
    assert (error.kind, error.field, str(error.value)) == (
        "devices_missing", "policies.solver.engine.replicas", "4",
    )  # fmt: skip
    for said in ("4 x H100", "2 are free", "other (2)", "solver 4"):
        assert said in str(error)
    assert "cancel" in str(error.remedy)
