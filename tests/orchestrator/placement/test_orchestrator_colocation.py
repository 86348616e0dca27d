"""Engines and trainers of a colocated job take turns on the devices despite failures."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.cluster import Cluster, job_yaml
from tests.support.fake_rollout import FakeRollout
from tests.support.fake_trainer import FakeTrainer
from tests.support.waiting import until
from troupe.job import JobSpecError, parse_job
from troupe.rpc import FailedPrecondition, NotFound
from troupe.v1 import common_pb2 as common_pb
from troupe.v1 import orchestrator_pb2 as orchestrator_pb

BOTH = ["solver", "checker"]


def job(name: str = "job", **over: Any) -> str:
    return job_yaml(name, **{"pipeline.mode": "sync", "pipeline.colocate": True, **over})


def watched(cluster: Cluster, policies: list[str] = BOTH) -> list[str]:
    """Clashes of engines and trainers of `policies` on the devices, from now on."""
    clashes: list[str] = []

    def awake(worker: FakeRollout) -> list[str]:
        return [
            f"{policy} of {job_id}"
            for job_id, versions in worker.versions.items()
            for policy in versions
            if policy in policies and policy not in worker.asleep.get(job_id, ())
        ]

    def trainer_comes() -> None:
        clashes.extend(f"bound beside {one}" for w in cluster.rollouts for one in awake(w))

    def engine_comes() -> None:
        for trainer in cluster.trainers:
            clashes.extend(f"awake beside {p}" for _, p in trainer.bound if p in policies)

    for worker in cluster.rollouts:
        worker.script.on_devices = engine_comes
    for trainer in cluster.trainers:
        trainer.script.on_device = trainer_comes
    return clashes


async def called(worker: FakeRollout | FakeTrainer, name: str) -> None:
    """Wait for a call of a worker."""
    await until(lambda: worker.calls[name])


async def values_of(cluster: Cluster, job_id: str) -> dict[str, float]:
    """The values that the last step logged."""
    logged = [e.metrics for e in await cluster.events(job_id) if e.WhichOneof("event") == "metrics"]
    return dict(next(row.values for row in reversed(logged) if "step/seconds" in row.values))


@pytest.mark.parametrize("mode", ["sync", "serial"])
async def test_no_engine_is_awake_while_a_policy_is_on_the_device(
    cluster: Cluster, mode: str
) -> None:
    clashes = watched(cluster)
    over = {"pipeline.mode": mode, "pipeline.steps": 3, "checkpoint.every": 2}
    job_id = await cluster.submit(job(**over))
    await cluster.wait(job_id, [common_pb.JOB_STATE_SUCCEEDED])
    await cluster.check_accounts(job_id, 3, BOTH)
    assert clashes == []
    [worker] = cluster.rollouts
    # Three steps, two checkpoints; engines serve when the job has ended.
    assert worker.calls["SleepEngines"] == 5
    assert not worker.asleep[job_id]
    values = await values_of(cluster, job_id)
    assert {f"colocate/{what}_seconds" for what in ("sleep", "offload", "wake")} <= values.keys()


async def test_a_policy_can_be_left_out(cluster: Cluster) -> None:
    clashes = watched(cluster, ["solver"])
    job_id = await cluster.submit(job(**{"policies.checker.colocate": False}))
    await cluster.wait(job_id, [common_pb.JOB_STATE_SUCCEEDED])
    assert clashes == []
    [trainer] = cluster.trainers
    # The start, two steps and a checkpoint; the checker stays where it is.
    assert trainer.calls["Suspend"] == 4


async def test_a_worker_that_comes_back_waits_for_its_turn(cluster: Cluster) -> None:
    [worker], [trainer] = cluster.rollouts, cluster.trainers
    trainer.script.seconds = 1.0
    clashes = watched(cluster)
    job_id = await cluster.submit(job())
    await called(trainer, "RunStep")
    await worker.down()
    cluster.rollouts.remove(worker)
    await cluster.add_rollout(worker.script)
    await cluster.wait(job_id, [common_pb.JOB_STATE_SUCCEEDED])
    await cluster.check_accounts(job_id, 2, BOTH)
    assert clashes == []


async def test_another_orchestrator_finds_engines_awake_and_puts_them_to_sleep(
    cluster: Cluster,
) -> None:
    [worker] = cluster.rollouts
    worker.script.seconds = 1.0
    clashes = watched(cluster)
    job_id = await cluster.submit(job())
    await cluster.wait(job_id, [common_pb.JOB_STATE_RUNNING])
    await cluster.stop_orchestrator()
    worker.script.seconds = 0.002
    await cluster.start_orchestrator()
    await cluster.wait(job_id, [common_pb.JOB_STATE_SUCCEEDED])
    await cluster.check_accounts(job_id, 2, BOTH)
    assert clashes == []


async def test_weights_that_are_gone_when_engines_wake_are_published_again(
    cluster: Cluster,
) -> None:
    [worker] = cluster.rollouts
    gone = NotFound("no host has it", kind="weights_not_found", field="solver")
    worker.script.wake_errors = [gone]
    clashes = watched(cluster)
    job_id = await cluster.submit(job())
    await cluster.wait(job_id, [common_pb.JOB_STATE_SUCCEEDED])
    await cluster.check_accounts(job_id, 2, BOTH)
    assert worker.script.wake_errors == []
    assert clashes == []


async def test_a_worker_that_is_lost_as_it_wakes_is_prepared_again(cluster: Cluster) -> None:
    [worker], [trainer] = cluster.rollouts, cluster.trainers
    trainer.script.seconds = 0.5
    job_id = await cluster.submit(job())
    await called(trainer, "RunStep")
    lost = FailedPrecondition("it was restarted", kind="job_not_prepared", field="job_id")
    worker.script.wake_errors = [lost]
    await cluster.wait(job_id, [common_pb.JOB_STATE_SUCCEEDED])
    await cluster.check_accounts(job_id, 2, BOTH)
    assert worker.script.wake_errors == []
    assert worker.calls["PrepareJob"] >= 2


async def test_an_engine_that_keeps_its_memory_fails_the_job_and_says_why(
    cluster: Cluster,
) -> None:
    [worker] = cluster.rollouts
    worker.script.sleep_error = FailedPrecondition(
        "the server cannot free its memory",
        kind="engine_cannot_sleep",
        field="policies.solver.engine.urls",
        remedy="Start it with --enable-memory-saver.",
    )
    job_id = await cluster.submit(job())
    ended = await cluster.wait(job_id, [common_pb.JOB_STATE_FAILED])
    assert ended.problem.kind == "engine_cannot_sleep"
    assert "--enable-memory-saver" in ended.problem.remedy


async def test_on_devices_a_colocated_job_is_alone(cluster: Cluster) -> None:
    [worker] = cluster.rollouts
    worker.script.seconds = 1000
    worker.script.devices = [
        orchestrator_pb.GivenDevice(index=0, device_class="H100", memory_bytes=80 << 30)
    ]

    async def is_reported() -> bool:
        picture = await cluster.api.GetCluster(orchestrator_pb.GetClusterRequest())
        return any(one.devices for one in picture.workers)

    await until(is_reported)
    first = await cluster.submit(job("first"))
    await cluster.wait(first, [common_pb.JOB_STATE_RUNNING])
    for text in (job("second"), job_yaml("second")):
        with pytest.raises(FailedPrecondition, match=f"{first} runs") as info:
            await cluster.submit(text)
        assert (info.value.kind, info.value.field) == ("devices_missing", "pipeline.colocate")
        assert "pause or cancel it" in info.value.remedy
    # Submitting the same job again makes no second job.
    assert await cluster.submit(job("first"), first) == first
    await cluster.cancel(first)
    await cluster.wait(first, [common_pb.JOB_STATE_CANCELLED])
    worker.script.seconds = 0.002
    await cluster.wait(await cluster.submit(job("second")), [common_pb.JOB_STATE_SUCCEEDED])


@pytest.mark.parametrize(
    ("over", "field"),
    [
        ({"pipeline.mode": "micro_batch"}, "pipeline.colocate"),
        ({"pipeline.mode": "async"}, "pipeline.colocate"),
        (
            {
                "pipeline.mode": "async",
                "pipeline.colocate": False,
                "policies.solver.colocate": True,
            },
            "policies.solver.colocate",
        ),
        ({"pipeline.early_start": True}, "pipeline.early_start"),
    ],
)
def test_colocation_is_refused_where_engines_and_trainers_overlap(
    over: dict[str, Any], field: str
) -> None:
    with pytest.raises(JobSpecError, match=field):
        parse_job(job(**over))


def test_a_policy_follows_the_job_unless_it_says_otherwise() -> None:
    assert sorted(parse_job(job()).colocated) == sorted(BOTH)
    assert parse_job(job(**{"policies.solver.colocate": False})).colocated == ["checker"]
    alone = {"pipeline.colocate": False, "policies.solver.colocate": True}
    assert parse_job(job(**alone)).colocated == ["solver"]
