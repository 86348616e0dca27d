"""Which changes of a job's split its cluster has nothing free for."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from services.orchestrator.pipeline.split_watch import (
    SplitWatch,
    StepTotals,
    idle_cores,
    lacking,
)
from services.orchestrator.placement.workers import WorkerHandle
from troupe.job import JobSpec
from troupe.rpc import ClientSettings
from troupe.twin.profile import JobProfile
from troupe.v1 import orchestrator_pb2 as orchestrator_pb
from troupe.v1 import rollout_pb2 as rollout_pb


def spec(**policy: Any) -> JobSpec:
    """A job of one policy."""
    return JobSpec.model_validate(
        {
            "name": "team",
            "workflow": "troupe.workflow.asking:ask",
            "tasks": {"source": "tests.support.workloads:Tasks"},
            "agents": {"player": {"policy": "solver"}},
            "policies": {"solver": {"model": {"path": "some/model"}, **policy}},
            "pipeline": {"steps": 2, "queries_per_step": 2},
        }
    )


def cpu(cores: float, busy: float, at: float) -> orchestrator_pb.HostCpu:
    return orchestrator_pb.HostCpu(cores=cores, busy_seconds=busy, at=at)


def rollout(holders: Sequence[str] = ()) -> WorkerHandle:
    """A rollout worker, with one device per text of `holders`; empty: nothing is on it."""
    beat = orchestrator_pb.HeartbeatRequest(
        worker_id="rollout-0",
        address="127.0.0.1:1",
        host_id="here",
        kind=orchestrator_pb.WORKER_KIND_ROLLOUT,
        devices=[
            orchestrator_pb.GivenDevice(index=i, device_class="H100", holders=[one] if one else [])
            for i, one in enumerate(holders)
        ],
    )
    return WorkerHandle(beat, ClientSettings(), 0.0)


def trainer(device: str = "cpu", ranks: int = 1) -> WorkerHandle:
    beat = orchestrator_pb.HeartbeatRequest(
        worker_id="trainer-0",
        address="127.0.0.1:2",
        host_id="here",
        kind=orchestrator_pb.WORKER_KIND_TRAINER,
        trainer=orchestrator_pb.TrainerDevice(device=device, ranks=ranks),
    )
    return WorkerHandle(beat, ClientSettings(), 0.0)


def node(*processes: str) -> orchestrator_pb.JoinNodeRequest:
    """A node with one device per process that has it; empty: none has it."""
    return orchestrator_pb.JoinNodeRequest(
        name="node",
        devices=[
            orchestrator_pb.NodeDevice(index=i, device_class="H100", process=one)
            for i, one in enumerate(processes)
        ],
    )


async def test_two_busy_cores_have_room_for_no_engine_and_no_trainer() -> None:
    workers = [rollout(), trainer()]
    busy = idle_cores([{"here": cpu(2, 100, 50)}, {"here": cpu(2, 119, 60)}])
    assert busy == {"here": pytest.approx(0.1)}
    found = lacking(spec(), workers, [], busy)
    assert found == {"engine/solver": "core", "trainer": "core", "gang/solver": "core"}


async def test_an_idle_core_has_room_for_one_more() -> None:
    idle = idle_cores([{"here": cpu(2, 100, 50)}, {"here": cpu(2, 110, 60)}])
    assert not lacking(spec(), [rollout(), trainer()], [], idle)


async def test_engines_that_policies_share_are_one_change() -> None:
    job = spec().model_dump()
    policy = {"model": {"path": "some/model"}, "lora": {}}
    job["policies"] = {"solver": policy, "critic": policy, "judge": {**policy, "lora": None}}
    job["agents"] = {name: {"policy": name} for name in job["policies"]}
    found = lacking(JobSpec.model_validate(job), [rollout(["other"]), trainer()], [], {})
    engines = {change: missing for change, missing in found.items() if "engine" in change}
    assert engines == {"engine/solver.critic": "device", "engine/judge": "device"}


async def test_cores_are_those_since_the_oldest_report_of_a_host() -> None:
    reports = [{"a": cpu(4, 0, 0)}, {"a": cpu(4, 9, 9)}, {"a": cpu(4, 10, 10), "b": cpu(2, 5, 3)}]
    assert idle_cores(reports) == {"a": pytest.approx(3.0)}


async def test_a_launched_server_needs_free_devices_whatever_the_cores_do() -> None:
    served = spec(engine={"kind": "sglang", "tensor_parallel": 2})
    full = [rollout(["j.solver.0", "j.solver.0"]), trainer("cuda")]
    idle = {"here": 60.0}
    assert lacking(served, full, [node("rollout-0", "trainer-0")], idle) == {
        "engine/solver": "device",
        "trainer": "device",
        "gang/solver": "device",
    }
    half = [rollout(["j.solver.0", "j.solver.0", ""]), trainer("cuda")]
    assert lacking(served, half, [], idle)["engine/solver"] == "device"
    free = [rollout(["j.solver.0", "j.solver.0", "", ""]), trainer("cuda", ranks=2)]
    assert lacking(served, free, [], idle) == {"trainer": "device"}
    # Devices of a node that no worker was given.
    assert not lacking(served, full, [node("rollout-0", "", "")], idle)


async def test_attached_servers_and_simulated_policies_need_nothing_of_the_cluster() -> None:
    workers = [rollout(), trainer()]
    attached = spec(engine={"kind": "sglang", "urls": ["http://elsewhere:30000"]})
    assert "engine/solver" not in lacking(attached, workers, [], {"here": 0.0})
    assert not lacking(spec(simulated={}), workers, [], {"here": 0.0})


async def test_steps_that_learn_from_rows_say_nothing_of_the_split() -> None:
    """Their engines have nothing to do, and their trainers, which have, are not idle."""
    busy = 0.0

    def workers() -> list[WorkerHandle]:
        found = [rollout(), trainer()]
        for one in found:
            one.beat.cpu.CopyFrom(cpu(4, busy, busy))
        return found

    job: Any = SimpleNamespace(
        spec=spec(),
        shared=SimpleNamespace(
            store=SimpleNamespace(live={"job": None}),
            workers=SimpleNamespace(all=workers),
            nodes=SimpleNamespace(alive=dict),
        ),
    )
    watch = SplitWatch(job, SimpleNamespace(counts={}), JobProfile.of_spec(job.spec))  # type: ignore[arg-type]
    values = {"step/seconds": 2.0, "solver/train/seconds": 1.9}
    for _ in range(6):
        busy += 2.0
        totals = StepTotals()
        totals.add(rollout_pb.TrajectoryEvent(trajectory_id="row", seconds=0.01))
        assert watch.metrics(totals, values) == {}
    assert not watch._steps
