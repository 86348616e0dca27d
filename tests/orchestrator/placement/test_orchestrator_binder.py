"""More policies than trainer slots: every policy gets its turn despite failures."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from services.orchestrator.placement.trainer_scheduler import ready_work
from tests.support.cluster import Cluster, job_yaml
from tests.support.fake_rollout import RolloutScript
from tests.support.fake_trainer import FakeTrainer, TrainerScript
from tests.support.waiting import PATIENCE, until
from troupe.job import JobSpec
from troupe.rpc import FailedPrecondition
from troupe.scheduling import binding
from troupe.scheduling.binding import ReadyOrder
from troupe.v1 import common_pb2 as common_pb
from troupe.v1 import experience_store_pb2 as store_pb
from troupe.v1 import orchestrator_pb2 as orchestrator_pb
from troupe.v1 import rollout_pb2 as rollout_pb

POLICIES = ("alice", "bob", "carol")
SUCCEEDED = common_pb.JOB_STATE_SUCCEEDED


@pytest.fixture
async def house(empty_redis: str, tmp_path: Path) -> AsyncIterator[Cluster]:
    """A started cluster with a rollout worker and no trainer."""
    cluster = Cluster(empty_redis, tmp_path)
    await cluster.open()
    await cluster.add_rollout()
    yield cluster
    await cluster.close()


def job(**over: object) -> str:
    quick = {f"policies.{name}.trainer.quantum_seconds": 0.05 for name in POLICIES}
    return job_yaml(policies=POLICIES, **quick, **over)


async def audited(cluster: Cluster, job_id: str) -> None:
    audit = await cluster.store.AuditTables(store_pb.AuditTablesRequest(job_id=job_id))
    assert list(audit.violations) == []
    assert {one.trained for one in audit.policies} == {8}


async def test_policies_share_one_slot_and_all_of_them_train(house: Cluster) -> None:
    trainer = await house.add_trainer(TrainerScript(slots=1))
    job_id = await house.submit(job())
    ended = await house.wait(job_id)
    assert ended.state == SUCCEEDED, ended.problem
    assert dict(ended.versions) == dict.fromkeys(POLICIES, 2)
    # One comes while another leaves, whose call may be the later of the two.
    assert trainer.most <= 2
    assert trainer.calls["Suspend"] >= 2
    assert trainer.calls["Resume"] >= 2
    swaps = [ended.metrics.get(f"{name}/train/swaps", 0.0) for name in POLICIES]
    assert max(swaps) > 0
    await audited(house, job_id)


async def test_the_binder_knows_what_the_last_swap_of_a_policy_cost(
    house: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, set[float]] = {}

    def recorded(rules: object, policies: list[binding.Policy], *rest: object) -> object:
        for one in policies:
            seen.setdefault(one.policy.rpartition("/")[2], set()).add(one.swap)
        return decide(rules, policies, *rest)  # type: ignore[arg-type]

    decide = binding.decide
    monkeypatch.setattr(binding, "decide", recorded)
    await house.add_trainer(TrainerScript(slots=1))
    ended = await house.wait(await house.submit(job()))
    assert ended.state == SUCCEEDED, ended.problem
    # The trainer says 0.25 s of each suspension and of each resumption.
    assert all(0.0 in costs for costs in seen.values())
    assert {0.25, 0.5} <= set().union(*seen.values()) <= {0.0, 0.25, 0.5}


async def test_two_trainers_with_two_slots_each_hold_three_policies_without_suspensions(
    house: Cluster,
) -> None:
    trainers = [await house.add_trainer(TrainerScript(slots=2)) for _ in range(2)]
    job_id = await house.submit(job())
    ended = await house.wait(job_id)
    assert ended.state == SUCCEEDED, ended.problem
    assert sum(one.calls["Suspend"] for one in trainers) == 0
    assert sum(one.calls["Bind"] for one in trainers) == 3
    assert sorted(one.most for one in trainers) == [1, 2]


async def test_a_suspended_state_that_is_gone_costs_nothing_but_a_load(house: Cluster) -> None:
    trainer = await house.add_trainer(TrainerScript(slots=1, lose_suspended=True))
    job_id = await house.submit(job())
    ended = await house.wait(job_id)
    assert ended.state == SUCCEEDED, ended.problem
    assert not trainer.script.lose_suspended
    assert trainer.calls["Bind"] > 3
    await audited(house, job_id)


async def test_a_gang_that_is_gone_when_it_is_suspended_keeps_nobody_waiting(
    house: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.orchestrator.placement.suspension._STUCK_SECONDS", 1000.0)
    trainer = await house.add_trainer(TrainerScript(slots=1, lose_gang=True))
    job_id = await house.submit(job())
    ended = await house.wait(job_id)
    assert ended.state == SUCCEEDED, ended.problem
    assert not trainer.script.lose_gang
    await audited(house, job_id)


async def test_a_policy_that_could_not_be_suspended_is_asked_again(
    house: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.orchestrator.placement.suspension._STUCK_SECONDS", 0.5)
    trainer = await house.add_trainer(TrainerScript(slots=1, full_suspensions=2))
    job_id = await house.submit(job())
    ended = await house.wait(job_id)
    assert ended.state == SUCCEEDED, ended.problem
    assert not trainer.script.full_suspensions
    await audited(house, job_id)


async def test_a_trainer_that_dies_with_suspended_policies_is_replaced(house: Cluster) -> None:
    trainer = await house.add_trainer(TrainerScript(slots=1, seconds=0.3))
    job_id = await house.submit(job())
    await until(lambda: trainer.calls["Suspend"])
    await house.add_trainer(TrainerScript(slots=1))
    await trainer.down()
    ended = await house.wait(job_id)
    assert ended.state == SUCCEEDED, ended.problem
    assert dict(ended.versions) == dict.fromkeys(POLICIES, 2)
    await audited(house, job_id)


@pytest.mark.parametrize("cancelled", [False, True])
async def test_a_job_that_is_over_leaves_nothing_with_any_trainer(
    house: Cluster, cancelled: bool
) -> None:
    """Nor on workers that have had its policies, or expected them."""
    trainers = [await house.add_trainer(TrainerScript(slots=1, seconds=0.1)) for _ in range(2)]
    job_id = await house.submit(job(**{"pipeline.steps": 8 if cancelled else 3}))
    if cancelled:
        await until(lambda: sum(one.calls["Suspend"] for one in trainers) >= 4)
        await house.cancel(job_id)
    ended = await house.wait(job_id)
    assert ended.state == (common_pb.JOB_STATE_CANCELLED if cancelled else SUCCEEDED), ended.problem
    assert [one.traces for one in trainers] == [set(), set()]


async def one_that_waits_for_another(house: Cluster, trainer: FakeTrainer) -> str:
    """A job that waits for the only slot, whose holder is cancelled."""
    # A policy without work, or whose quantum is over, leaves for the second job's, which then never
    # waits.
    quantum = {"policies.alice.trainer.quantum_seconds": 10 * PATIENCE}
    first = await house.submit(job_yaml("first", policies=("alice",), **quantum))
    await until(lambda: "alice" in trainer.computing)
    shared = house.orchestrator.service._at.shared  # type: ignore[union-attr]
    leases = shared.trainer_scheduler._leases
    # The store tells the orchestrator of that work a moment later.
    await until(lambda: all(one.scheduling_view(time.monotonic()).work for one in leases.values()))
    second = await house.submit(job_yaml("second", policies=("bob",)))
    await house.until(second, lambda one: "waits for its turn" in one.activity)
    [known] = shared.workers.usable(orchestrator_pb.WORKER_KIND_TRAINER)
    await until(
        lambda: (first, "alice") in known.holds
    )  # as the last heartbeat before the end says
    await house.cancel(first)
    return second


async def test_a_device_that_an_ended_job_held_is_the_next_ones(house: Cluster) -> None:
    """A heartbeat reports its end: nothing else makes the binder decide again."""
    trainer = await house.add_trainer(TrainerScript(slots=1, slow={"alice": 60.0}))
    second = await one_that_waits_for_another(house, trainer)
    ended = await house.wait(second)
    assert ended.state == SUCCEEDED, ended.problem


async def test_a_trainer_that_was_deaf_when_a_job_ended_is_asked_again(house: Cluster) -> None:
    """Also if no other job begins: one waits already."""
    trainer = await house.add_trainer(TrainerScript(slots=1, slow={"alice": 60.0}, deaf_releases=1))
    second = await one_that_waits_for_another(house, trainer)
    ended = await house.wait(second)
    assert ended.state == SUCCEEDED, ended.problem
    assert trainer.calls["Release"] >= 2


async def test_a_copy_that_nobody_will_resume_is_let_go_before_the_next_job(
    house: Cluster,
) -> None:
    trainer = await house.add_trainer()
    trainer.fetched.add(("forgotten", "alice"))

    async def is_shown() -> bool:
        return bool((await house.api.GetCluster(orchestrator_pb.GetClusterRequest())).bindings)

    await until(is_shown)
    ended = await house.wait(await house.submit(job()))
    assert ended.state == SUCCEEDED, ended.problem
    assert not trainer.fetched


async def test_a_policy_that_is_too_large_for_every_trainer_is_refused_at_once(
    house: Cluster,
) -> None:
    refusal = FailedPrecondition(
        "no room",
        kind="policy_too_large",
        field="policies.alice.model",
        value=10**12,
        remedy="Use a smaller model.",
    )
    for _ in range(2):
        await house.add_trainer(TrainerScript(slots=1, bind_error=refusal))
    job_id = await house.submit(job_yaml(policies=("alice",)))
    ended = await house.wait(job_id)
    assert ended.state == common_pb.JOB_STATE_FAILED
    assert ended.problem.kind == "policy_too_large"
    assert ended.problem.field == "policies.alice.model"
    assert ended.problem.value
    assert ended.problem.remedy


@pytest.mark.parametrize(("gang", "fits"), [(1, False), (4, False), (8, True)])
async def test_a_policy_is_judged_by_what_each_device_of_its_gang_needs(
    house: Cluster, gang: int, fits: bool
) -> None:
    """The whole state is far larger than a device, for every gang; a rank's share may not be. The
    check does not load the policy."""
    trainer = await house.add_trainer(TrainerScript(memory=80 << 30))
    large = job_yaml(policies=("alice",), **{"policies.alice.trainer.gang": gang})
    ended = await house.wait(await house.submit(large))
    if fits:
        assert ended.state == SUCCEEDED, ended.problem
        return
    assert ended.problem.kind == "policy_too_large"
    assert ended.problem.field == "policies.alice.model"
    assert int(ended.problem.value) > 80 << 30
    assert not trainer.calls["Bind"]


@pytest.mark.parametrize(
    ("memory", "tokens", "wish", "sent"),
    [
        (80 << 30, 0, "auto", "auto"),  # the trainer knows whether the model's layers can do it
        (4000 << 30, 0, "auto", False),
        (4000 << 30, 10**6, "auto", "auto"),  # the worker was set up for larger passes
        (0, 0, "auto", "auto"),  # unknown: the trainer decides
        (4000 << 30, 0, True, True),
    ],
)
async def test_activation_checkpointing_is_decided_by_what_the_worker_has_room_for(
    house: Cluster, memory: int, tokens: int, wish: bool | str, sent: bool | str
) -> None:
    """The trainer gets it with the specification; users see its origin."""
    field = "policies.alice.trainer.activation_checkpointing"
    source = "GPU" if sent == "auto" else "given"  # of a trainer that was sent this
    said = common_pb.ResolvedSetting(field=field, value="said", source=source)
    script = TrainerScript(memory=memory, forward_tokens=tokens, device="cuda", resolved=(said,))
    trainer = await house.add_trainer(script)
    values = {"policies.alice.trainer.gang": 8, field: wish}
    job_id = await house.submit(job_yaml(policies=("alice",), **values))
    ended = await house.wait(job_id)
    assert ended.state == SUCCEEDED, ended.problem
    bound = JobSpec.model_validate_json(trainer.binds[0].spec_json)
    assert bound.policies["alice"].trainer.activation_checkpointing == sent
    decided = wish == "auto" and sent != "auto"
    sources = {one.source for one in ended.resolved if one.field == field}
    assert sources == {"memory model" if decided else source}


async def test_a_gang_goes_where_there_are_devices_for_it(house: Cluster) -> None:
    small = FailedPrecondition(
        "this worker leads gangs of at most 2 ranks", kind="gang_too_large", value=4
    )
    first = await house.add_trainer(TrainerScript(slots=1, bind_error=small))
    second = await house.add_trainer(TrainerScript(slots=1))
    job_id = await house.submit(job_yaml(policies=("alice",)))
    ended = await house.wait(job_id)
    assert ended.state == SUCCEEDED, ended.problem
    assert first.calls["Bind"] <= 1
    assert second.calls["Bind"] == 1


@pytest.mark.parametrize("told_by_worker", [True, False])
async def test_a_large_policy_waits_for_a_large_trainer_that_was_just_lost(
    house: Cluster, told_by_worker: bool
) -> None:
    """Whether the trainer that is left says that it is too small, or its memory shows it."""
    refusal = FailedPrecondition("no room", kind="policy_too_large", value=10**12)
    small = TrainerScript(memory=0 if told_by_worker else 1 << 10, bind_error=refusal)
    left = await house.add_trainer(small)
    large = await house.add_trainer(TrainerScript())
    workers = house.orchestrator.service._at.shared.workers  # type: ignore[union-attr]
    trainer = orchestrator_pb.WORKER_KIND_TRAINER
    await until(lambda: len(workers.usable(trainer)) == 2)
    await large.fall_silent()
    await until(lambda: len(workers.usable(trainer)) == 1)
    job_id = await house.submit(job_yaml(policies=("alice",)))
    if told_by_worker:
        await until(lambda: left.calls["Bind"])
    await house.until(job_id, lambda job: "trainer worker" in job.activity)
    await large.speak()
    ended = await house.wait(job_id)
    assert ended.state == SUCCEEDED, ended.problem
    assert large.calls["Bind"] == 1


async def test_idle_trainers_scale_to_zero_and_come_back(empty_redis: str, tmp_path: Path) -> None:
    """During a long evaluation nothing is trained: devices are returned, no trainer is wanted, and
    the last one may leave. The next step requests one again and continues from the commit."""
    evaluating = asyncio.Event()

    def slow(ticket: rollout_pb.Ticket) -> float:
        if ticket.purpose != rollout_pb.Ticket.PURPOSE_EVALUATE or trainer.calls["RunStep"] < len(
            POLICIES
        ):
            return 0.0
        first = not evaluating.is_set()
        evaluating.set()
        return 2.0 if first else 0.0

    cluster = Cluster(empty_redis, tmp_path)
    await cluster.open()
    await cluster.add_rollout(RolloutScript(slow=slow))
    trainer = await cluster.add_trainer(TrainerScript(slots=3))
    try:
        quick = {f"policies.{name}.trainer.idle_seconds": 0.3 for name in POLICIES}
        evaluation = {"evaluation.queries": 1, "evaluation.every": 1}
        job_id = await cluster.submit(job(**quick, **evaluation))
        async with asyncio.timeout(PATIENCE):
            await evaluating.wait()
            while trainer.bound:
                assert (await cluster.job(job_id)).state == common_pb.JOB_STATE_RUNNING
                await asyncio.sleep(0.02)
            # More where a busy machine left them idle before the evaluation, too.
            assert trainer.calls["Release"] >= len(POLICIES)
            view = await cluster.api.GetCluster(orchestrator_pb.GetClusterRequest())
            assert view.wanted_trainers == 0
            await trainer.down()
            while not view.wanted_trainers:
                view = await cluster.api.GetCluster(orchestrator_pb.GetClusterRequest())
                await asyncio.sleep(0.02)
        again = await cluster.add_trainer(TrainerScript(slots=3))
        ended = await cluster.wait(job_id)
        assert ended.state == SUCCEEDED, ended.problem
        assert dict(ended.versions) == dict.fromkeys(POLICIES, 2)
        assert again.calls["Bind"] == len(POLICIES)
        await audited(cluster, job_id)
    finally:
        await cluster.close()


async def test_a_job_that_finds_no_trainer_wants_one(empty_redis: str, tmp_path: Path) -> None:
    """Starters of trainers on demand are notified before the job's policies have places."""
    cluster = Cluster(empty_redis, tmp_path)
    await cluster.open()
    await cluster.add_rollout(RolloutScript())

    async def wants(count: int) -> None:
        async with asyncio.timeout(PATIENCE):
            while True:
                view = await cluster.api.GetCluster(orchestrator_pb.GetClusterRequest())
                if view.wanted_trainers == count:
                    return
                await asyncio.sleep(0.02)

    try:
        await wants(0)
        job_id = await cluster.submit(job())
        await wants(1)
        await cluster.add_trainer(TrainerScript(slots=3))
        assert (await cluster.wait(job_id)).state == SUCCEEDED
        await wants(0)
    finally:
        await cluster.close()


def status(*, ready: int = 0, claimed: int = 0, pending: int = 0, sealed: bool = False) -> object:
    counts = store_pb.PolicyCounts(policy="p", ready=ready, claimed=claimed, pending=pending)
    return store_pb.TableStatus(sealed=sealed, counts=[counts])


@pytest.mark.parametrize(
    ("told", "accumulated", "work"),
    [
        (None, 0, 0),
        (status(ready=3, pending=9), 0, 0),
        (status(ready=4, pending=9), 0, 1),
        (status(ready=9, pending=9), 0, 2),
        (status(claimed=8, pending=1), 4, 1),
        (status(claimed=8, pending=1), 8, 0),
        (status(ready=1, sealed=True), 0, 2),
        (status(claimed=8, sealed=True), 8, 1),
        (status(ready=1, pending=1, sealed=True), 0, 0),
    ],
)
def test_ready_work_counts_micro_batches_that_can_be_claimed(
    told: store_pb.TableStatus | None, accumulated: int, work: int
) -> None:
    assert ready_work(told, "p", 4, accumulated) == work
    assert ready_work(told, "other", 4, accumulated) == 0


@pytest.mark.parametrize(("others", "work"), [((), 1), ((True,), 1), ((False, True), 0)])
def test_joint_pairs_that_wait_for_other_policies_are_no_work(
    others: tuple[bool, ...], work: int
) -> None:
    """Or two policies would wait for each other on one device."""
    given = {"p": True} | {f"other-{n}": there for n, there in enumerate(others)}
    told = store_pb.TableStatus(
        sealed=True,
        counts=[
            store_pb.PolicyCounts(policy=name, claimed=8, pair_sums=there)
            for name, there in given.items()
        ],
    )
    assert ready_work(told, "p", 4, 8) == work
    # Those that are waited for have work.
    for name, there in given.items():
        assert there or ready_work(told, name, 4, 0) == 3


def test_the_oldest_micro_batch_is_computed_first() -> None:
    arrivals = ReadyOrder()
    assert arrivals.oldest is None
    arrivals.note(2, 1.0)
    arrivals.note(3, 2.0)
    arrivals.note(1, 3.0)
    assert arrivals.oldest == 2.0
    arrivals.note(0, 4.0)
    assert arrivals.oldest is None
