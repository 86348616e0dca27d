"""Parts of populations alone: the turn of each match, and the source of a member's weights."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager, nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from services.orchestrator.crash_loops import SharedDeaths
from services.orchestrator.errors import Deadline
from services.orchestrator.jobs.runner import JobRunner
from services.orchestrator.pipeline.dispatch import Dispatch, TicketBatch
from services.orchestrator.populations import slots
from services.orchestrator.populations.slots import MemberWeights, Slots, unpublish_members
from services.orchestrator.populations.state import SETTLED, FrozenMember, PopulationState
from services.orchestrator.state.job_store import Superseded
from tests.support.waiting import PATIENCE
from troupe.populations.payoffs import PayoffTable
from troupe.rpc import Internal, NotFound
from troupe.v1 import common_pb2 as common_pb
from troupe.v1 import orchestrator_pb2 as orchestrator_pb
from troupe.v1 import rollout_pb2 as rollout_pb
from troupe.v1 import trainer_pb2 as trainer_pb


def deadline() -> Deadline:
    return Deadline("a test", 30, "nothing")


def test_matches_during_training_yield_to_training_trajectories() -> None:
    limits = SimpleNamespace(max_concurrent_trajectories=4)
    job: Any = SimpleNamespace(spec=SimpleNamespace(limits=limits))
    engines: Any = None
    dispatch = Dispatch(job, engines)
    for name, step, low_priority in (("match", 2, True), ("train", 5, False), ("older", 4, False)):
        batch = TicketBatch(step, deadline(), lambda event: None, low_priority=low_priority)
        dispatch.add(batch, [[rollout_pb.Ticket(query_id=name, trajectory_id=name)]])
    assert [group[0].query_id for group in dispatch._waiting] == ["older", "train", "match"]


class Host:
    """A trainer worker that has some members' files, or is away."""

    def __init__(self, *, files: bool, usable: bool = True) -> None:
        self.kind, self.usable, self._files = orchestrator_pb.WORKER_KIND_TRAINER, usable, files
        self.trainer = self
        self.beat = SimpleNamespace(engines=[], bindings=[])

    async def PublishMember(
        self, request: trainer_pb.PublishMemberRequest, timeout: float
    ) -> trainer_pb.PublishMemberResponse:
        if not self._files:
            raise NotFound("gone", kind="member_gone")
        return trainer_pb.PublishMemberResponse(
            weights=common_pb.WeightsRef(version=request.version)
        )

    @asynccontextmanager
    async def while_alive(self):  # type: ignore[no-untyped-def]
        yield


class Hosts:
    def __init__(self, *hosts: Host) -> None:
        self.hosts, self.changed = list(hosts), asyncio.Event()

    def all(self) -> list[Host]:
        return self.hosts

    def usable(self, kind: int) -> list[Host]:
        return [one for one in self.hosts if one.usable]

    def change(self) -> Any:
        return self.changed.wait()


def weights_of(hosts: Hosts, seconds: float) -> MemberWeights:
    settings = SimpleNamespace(workers_timeout_seconds=seconds)
    job: Any = SimpleNamespace(
        job_id="job", shared=SimpleNamespace(workers=hosts, settings=settings)
    )
    trainers: Any = None
    return MemberWeights(job, trainers)


MEMBER = FrozenMember("player@3", "player", "main", 3, "c", 3, 1, "", SETTLED, 0, 0.0)


async def test_a_member_whose_host_is_away_is_not_gone() -> None:
    """Hosts share no files here: a worker does not know the others' files."""
    hosts = Hosts(Host(files=False), Host(files=True, usable=False))
    asked = asyncio.create_task(weights_of(hosts, 30).publish(MEMBER, deadline()))
    await asyncio.sleep(0.01)
    assert not asked.done()
    hosts.hosts[1].usable = True
    hosts.changed.set()
    async with asyncio.timeout(PATIENCE):
        assert (await asked).version == 3


@pytest.mark.parametrize("away", [[], [Host(files=True, usable=False)]])
async def test_a_member_that_nobody_brings_back_is_gone(away: list[Host]) -> None:
    hosts = Hosts(Host(files=False), *away)
    with pytest.raises(NotFound):
        await weights_of(hosts, 0.0).publish(MEMBER, deadline())


class Record:
    """The durable record of a job: how it is, and who may say so."""

    def __init__(self, epoch: int) -> None:
        self.epoch, self.state, self.problem = (
            epoch,
            common_pb.JOB_STATE_RUNNING,
            common_pb.Problem(),
        )

    async def with_states(self) -> list[str]:
        return []

    async def get(self, job_id: str) -> Any:
        return self

    async def check_epoch(self, job_id: str, epoch: int) -> None:
        if epoch != self.epoch:
            raise Superseded("another orchestrator has it")

    async def move(self, job_id: str, target: Any, epoch: int, problem: common_pb.Problem) -> None:
        self.state, self.problem = target, problem


def populated(record: Record, dropped: list[int]) -> Any:
    """The context of a job, taken over as number 1, with three members on one worker."""

    async def drop(request: trainer_pb.DropMemberRequest, timeout: float) -> None:
        dropped.append(request.version)
        if request.version == 1:
            record.epoch = max(record.epoch, 2)  # meanwhile

    host = Host(files=True)
    host.DropMember = drop  # type: ignore[attr-defined]
    names = {f"player@{n}": replace(MEMBER, version=n, member_id=f"player@{n}") for n in range(3)}

    async def load(job_id: str) -> Any:
        return SimpleNamespace(slots={}, members=names)

    shared = SimpleNamespace(
        store=record,
        populations=SimpleNamespace(load=load),
        workers=Hosts(host),
        settings=SimpleNamespace(cleanup_seconds=PATIENCE),
        log=SimpleNamespace(forget=lambda job_id: None),
        deaths=SharedDeaths(),
    )
    spec = SimpleNamespace(population=SimpleNamespace())
    return SimpleNamespace(job_id="job", epoch=1, spec=spec, shared=shared)


async def test_members_of_a_job_that_was_taken_over_stay_where_they_are() -> None:
    dropped: list[int] = []
    with pytest.raises(Superseded):
        await unpublish_members(populated(Record(epoch=2), dropped))
    assert dropped == []
    with pytest.raises(Superseded):
        await unpublish_members(populated(Record(epoch=1), dropped))
    assert dropped == [0, 1], "it was taken over while members were let go"


@pytest.mark.parametrize(
    ("trouble", "state"),
    [
        (ValueError("unreadable"), common_pb.JOB_STATE_FAILED),
        (Superseded("gone"), common_pb.JOB_STATE_RUNNING),
    ],
)
async def test_members_that_stay_do_not_hide_how_a_job_ended(
    monkeypatch: pytest.MonkeyPatch, trouble: Exception, state: int
) -> None:
    async def fails(job: Any) -> None:
        raise trouble

    monkeypatch.setattr(slots, "unpublish_members", fails)
    record = Record(epoch=1)
    runner = JobRunner(populated(record, []).shared, "job")
    runner._job, runner._epoch = populated(record, []), 1
    with nullcontext() if state == common_pb.JOB_STATE_FAILED else pytest.raises(Superseded):
        await runner._end_failed(Internal("the first trouble"))
    assert record.state == state
    assert ("the first trouble" in record.problem.message) == (state == common_pb.JOB_STATE_FAILED)


class Published(set[str]):
    """Members whose weights engines find; saving the slots takes a while."""

    async def publish(self, member: FrozenMember, deadline: Deadline) -> common_pb.WeightsRef:
        await asyncio.sleep(0)
        self.add(member.member_id)
        return common_pb.WeightsRef(policy=member.learner, version=member.version)

    async def drop(self, member: FrozenMember, *, files: bool) -> None:
        self.discard(member.member_id)

    async def save_slots(
        self, job_id: str, epoch: int, state: PopulationState, loaded: dict[str, tuple[str, int]]
    ) -> None:
        await asyncio.sleep(0.01 if "match--0" in loaded else 0)
        state.slots = state.slots | loaded


async def test_steps_do_not_drop_a_member_that_is_being_loaded_for_a_match() -> None:
    names = [f"player@{n}" for n in range(3)]
    members = {one: replace(MEMBER, version=n, member_id=one) for n, one in enumerate(names)}
    state = PopulationState({"all": names}, PayoffTable([3], True), members)
    state.slots = {"step--0": ("player@1", 4), "match--0": ("player@0", 2)}
    found: Any = Published(["player@0", "player@1"])
    spec = SimpleNamespace(population=SimpleNamespace(), pools=SimpleNamespace())
    job: Any = SimpleNamespace(job_id="job", epoch=1, spec=spec)
    slots = Slots(job, found, found, state)
    slots.engines = SimpleNamespace(update=lambda ref, deadline: asyncio.sleep(0))  # type: ignore[assignment]
    await asyncio.gather(
        slots._load({"match--0": "player@1"}, deadline()),
        slots._load({"step--0": "player@2"}, deadline()),
    )
    assert state.slots == {"step--0": ("player@2", 5), "match--0": ("player@1", 3)}
    assert found == {"player@1", "player@2"}, "what is in slots, and no more"
