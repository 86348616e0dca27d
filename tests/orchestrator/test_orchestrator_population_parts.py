"""Parts of populations alone: whose turn a match is, and who is asked for a member's weights."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from services.orchestrator.batch import Batch
from services.orchestrator.dispatch import Dispatch
from services.orchestrator.faults import Patience
from services.orchestrator.populations.pool import MemberWeights
from services.orchestrator.populations.state import SETTLED, Member
from troupe.rpc import NotFound
from troupe.v1 import common_pb2 as pb
from troupe.v1 import orchestrator_pb2 as orch
from troupe.v1 import rollout_pb2 as ro
from troupe.v1 import trainer_pb2 as tr


def patience() -> Patience:
    return Patience("a test", 30, "nothing")


def test_matches_beside_training_wait_for_what_is_trained() -> None:
    limits = SimpleNamespace(max_concurrent_trajectories=4)
    job: Any = SimpleNamespace(spec=SimpleNamespace(limits=limits))
    engines: Any = None
    dispatch = Dispatch(job, engines)
    for name, step, aside in (("match", 2, True), ("train", 5, False), ("older", 4, False)):
        batch = Batch(step, patience(), lambda event: None, aside=aside)
        dispatch.add(batch, [[ro.Ticket(query_id=name, trajectory_id=name)]])
    assert [group[0].query_id for group in dispatch._waiting] == ["older", "train", "match"]


class Host:
    """A trainer worker that has some members' files, or is away."""

    def __init__(self, *, files: bool, usable: bool = True) -> None:
        self.kind, self.usable, self._files = orch.WORKER_KIND_TRAINER, usable, files
        self.trainer = self

    async def PublishMember(
        self, request: tr.PublishMemberRequest, timeout: float
    ) -> tr.PublishMemberResponse:
        if not self._files:
            raise NotFound("gone", kind="member_gone")
        return tr.PublishMemberResponse(weights=pb.WeightsRef(version=request.version))

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


MEMBER = Member("player@3", "player", "main", 3, "c", 3, 1, "", SETTLED, 0, 0.0)


async def test_a_member_whose_host_is_away_is_not_gone() -> None:
    """Hosts share no files here: who is there does not know what others have."""
    hosts = Hosts(Host(files=False), Host(files=True, usable=False))
    asked = asyncio.create_task(weights_of(hosts, 30).publish(MEMBER, patience()))
    await asyncio.sleep(0.01)
    assert not asked.done()
    hosts.hosts[1].usable = True
    hosts.changed.set()
    async with asyncio.timeout(10):
        assert (await asked).version == 3


@pytest.mark.parametrize("away", [[], [Host(files=True, usable=False)]])
async def test_a_member_that_nobody_brings_back_is_gone(away: list[Host]) -> None:
    hosts = Hosts(Host(files=False), *away)
    with pytest.raises(NotFound):
        await weights_of(hosts, 0.0).publish(MEMBER, patience())
