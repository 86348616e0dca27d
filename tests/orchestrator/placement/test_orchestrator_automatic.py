"""`replicas: auto` and `gang: auto` of a starting job: decided once, on the cluster's devices."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from services.orchestrator.placement.automatic import job_devices
from tests.support.cluster import Cluster, job_yaml
from troupe.devices import NODE_PROTOCOL
from troupe.job import JobSpec
from troupe.job.automatic import JobDevices
from troupe.v1 import common_pb2 as common_pb
from troupe.v1 import orchestrator_pb2 as orchestrator_pb

GIB = 1 << 30
RUNNING = (common_pb.JOB_STATE_RUNNING,)
ROLLOUT, TRAINER = orchestrator_pb.WORKER_KIND_ROLLOUT, orchestrator_pb.WORKER_KIND_TRAINER
SERVER = {"engine": {"kind": "sglang"}}


def node(*processes: str, device_class: str = "H100") -> orchestrator_pb.JoinNodeRequest:
    """A node's report of one device for each process named."""
    devices = [
        orchestrator_pb.NodeDevice(
            index=n, device_class=device_class, memory_bytes=80 * GIB, process=process
        )
        for n, process in enumerate(processes)
    ]
    return orchestrator_pb.JoinNodeRequest(
        name="n", instance="a", protocol=NODE_PROTOCOL, host="h", devices=devices
    )


def worker(kind: Any, *devices: orchestrator_pb.GivenDevice, at: str = "", **trainer: Any) -> Any:
    beat = orchestrator_pb.HeartbeatRequest(kind=kind, node=at, devices=devices)
    beat.trainer.CopyFrom(orchestrator_pb.TrainerDevice(**({"lends": True} | trainer)))
    return SimpleNamespace(kind=kind, worker_id=f"w{len(devices)}", beat=beat)


def device(index: int, *holders: str) -> orchestrator_pb.GivenDevice:
    return orchestrator_pb.GivenDevice(
        index=index, device_class="H100", memory_bytes=24 * GIB, holders=holders
    )


def test_a_job_s_devices_include_those_of_parked_trainers() -> None:
    report = node("rollout-0", "rollout-0", "rollout-0", "trainer-0", "trainer-0", "trainer-1")
    held = worker(ROLLOUT, device(0, "other.p.0@r"), device(1, "mine.p.0@r"), device(2), at="n")
    assert job_devices({"n": report}, [held], {"mine"}) == JobDevices(2, (1, 2), 80 * GIB)
    # The other job has ended, and releases its device.
    assert job_devices({"n": report}, [held], {"mine", "other"}).engines == 3
    # A device that two workers share; a device of no worker; declared CPUs.
    assert job_devices({"n": node("rollout-0, trainer-0", "reward", "")}, [], {"j"}) == JobDevices(
        1, (1,), 80 * GIB
    )
    assert job_devices({"n": node("trainer-0", device_class="cpu")}, [], {"j"}) == JobDevices(0, ())


def test_workers_that_no_node_started_say_what_they_have() -> None:
    workers = [
        worker(ROLLOUT, device(0, "other.p.0@r"), device(1)),
        worker(TRAINER, device(2), device(3), ranks=16, lends=False),
        worker(TRAINER),
    ]
    assert job_devices({}, workers, {"j"}) == JobDevices(1, (16,), 24 * GIB, joins=False)


def served(cluster: Cluster, job_id: str) -> tuple[dict[str, int], dict[str, int]]:
    """Engines and gangs of a job, as its rollout worker was told."""
    spec = cluster.rollouts[0].specs[job_id]
    return (
        {name: one.engine.replicas for name, one in spec.policies.items()},  # type: ignore[misc]
        {name: one.trainer.gang for name, one in spec.policies.items()},  # type: ignore[misc]
    )


async def test_numbers_are_decided_at_the_start_and_kept_by_the_next_orchestrator(
    cluster: Cluster,
) -> None:
    cluster.rollouts[0].script.seconds = 0.1
    cluster.trainers[0].script.ranks = 4
    await cluster.api.JoinNode(node(*["rollout-0"] * 3, *["trainer-0"] * 4))
    text = job_yaml(
        pipeline__steps=4, policies__solver__engine=SERVER["engine"],
        policies__checker__engine=SERVER["engine"],
    )  # fmt: skip
    job_id = await cluster.submit(text)
    await cluster.wait(job_id, RUNNING)
    decided = served(cluster, job_id)
    assert sum(decided[0].values()) == 3
    assert set(decided[1].values()) == {4}  # on the one trainer they take turns
    shown = {one.field: one for one in (await cluster.job(job_id)).resolved}
    gang = shown["policies.solver.trainer.gang"]
    assert gang.value == "4"
    assert gang.source.startswith("auto: 4 of 4 devices of trainers")
    assert shown["policies.solver.engine.replicas"].source.startswith("auto: ")
    await cluster.stop_orchestrator()
    await cluster.start_orchestrator()
    # Meanwhile the cluster has changed; the job goes on as it was.
    await cluster.api.JoinNode(node("rollout-0", *["trainer-0"] * 2))
    job = await cluster.wait(job_id)
    assert job.state == common_pb.JOB_STATE_SUCCEEDED, job.problem
    assert served(cluster, job_id) == decided
    assert {one.field for one in job.resolved} >= set(shown)
    assert len({one.spec_json for one in cluster.trainers[0].binds}) == 1
    # The stored job is the submitted one, so that submitting it again finds it.
    assert JobSpec.model_validate_json(job.spec_json).policies["solver"].trainer.gang == "auto"


async def test_a_resumed_job_is_decided_anew(cluster: Cluster) -> None:
    cluster.rollouts[0].script.seconds = 0.2
    cluster.trainers[0].script.ranks = 4
    await cluster.api.JoinNode(node(*["rollout-0"] * 2, *["trainer-0"] * 4))
    text = job_yaml(
        pipeline__steps=6, policies__solver__engine=SERVER["engine"],
        policies__checker__engine=SERVER["engine"],
    )  # fmt: skip
    job_id = await cluster.submit(text)
    await cluster.wait(job_id, RUNNING)
    assert served(cluster, job_id)[1] == {"solver": 4, "checker": 4}
    await cluster.pause(job_id)
    await cluster.wait(job_id, (common_pb.JOB_STATE_PAUSED,))
    await cluster.api.JoinNode(node(*["rollout-0"] * 5, *["trainer-0"] * 2))
    await cluster.resume(job_id)
    job = await cluster.wait(job_id)
    assert job.state == common_pb.JOB_STATE_SUCCEEDED, job.problem
    replicas, gangs = served(cluster, job_id)
    assert (sum(replicas.values()), gangs) == (5, {"solver": 2, "checker": 2})


async def test_policies_that_share_engines_are_told_and_shown(cluster: Cluster) -> None:
    model, lora = {"path": "/models/base"}, {"rank": 4}
    text = job_yaml(
        policies__solver__model=model, policies__solver__lora=lora,
        policies__checker__model=model, policies__checker__lora=lora,
    )  # fmt: skip
    job_id = await cluster.submit(text)
    job = await cluster.wait(job_id)
    assert job.state == common_pb.JOB_STATE_SUCCEEDED, job.problem
    shown = {one.field: one for one in job.resolved}
    share = shown["policies.checker.engine.share"]
    assert share.value == shown["policies.solver.engine.share"].value == "checker"
    told = "checker, solver share engines (1 base instead of 2)"
    assert share.source == f"auto: {told}"
    assert [one for one in await cluster.notices(job_id) if "share engines" in one] == [told]


async def test_idle_devices_are_told_when_the_job_starts(cluster: Cluster) -> None:
    await cluster.api.JoinNode(node(*["rollout-0"] * 4, "trainer-0"))
    engine = {"kind": "sglang", "replicas": 1}
    text = job_yaml(policies__solver__engine=engine, policies__checker__engine=engine)
    job_id = await cluster.submit(text)
    await cluster.wait(job_id)
    notices = await cluster.notices(job_id)
    assert any("2 of 4 devices of a rollout worker stay idle" in one for one in notices)
