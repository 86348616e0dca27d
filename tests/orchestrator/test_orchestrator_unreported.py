"""Trajectories whose endings the store knows but no worker reports: no step waits for them
forever."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from services.orchestrator.crash_loops import SharedDeaths
from services.orchestrator.errors import Deadline
from services.orchestrator.pipeline import steps
from services.orchestrator.pipeline.dispatch import Dispatch, TicketBatch
from tests.orchestrator.test_orchestrator_redundant import number
from tests.orchestrator.test_orchestrator_rosters import finish, step_rows
from tests.support.cluster import Cluster, job_yaml
from tests.support.waiting import PATIENCE
from troupe.rpc import Unavailable
from troupe.v1 import common_pb2 as common_pb
from troupe.v1 import orchestrator_pb2 as orchestrator_pb
from troupe.v1 import rollout_pb2 as rollout_pb

IDS = [f"q0-t{number}" for number in range(4)]


@pytest.mark.parametrize(("mode", "redundant"), [("serial", 2), ("async", 2), ("sync", 0)])
async def test_a_stream_that_stays_and_says_nothing_holds_no_step(
    cluster: Cluster, mode: str, redundant: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second of each group ends in the store and is never told, while its worker is well."""
    monkeypatch.setattr(steps, "_REPORT_GRACE_SECONDS", 0.25)
    rollout = cluster.rollouts[0]
    rollout.script.slow = lambda ticket: (0.0, 0.05, 1000, 1000)[number(ticket)]
    rollout.script.late = lambda ticket: 1000 if number(ticket) == 1 else 0.0
    text = job_yaml(
        pipeline__mode=mode, pipeline__redundant_trajectories=redundant, pipeline__steps=1
    )
    job_id = await cluster.submit(text)
    await finish(cluster, job_id, 1)
    (row,) = await step_rows(cluster, job_id)
    assert row.values["solver/samples"] == 4, "they were trained all the same"
    assert row.values["trajectories/completed"] == 2
    # If the second came last, no worker reported that the redundant ones were withdrawn, either.
    assert 2 <= row.values["trajectories/unseen"] <= 2 + 2 * redundant
    tables = (await cluster.api.AuditJob(orchestrator_pb.AuditJobRequest(job_id=job_id))).tables
    assert tables.trajectories_by_state["COMPLETED"] == 4
    assert tables.trajectories_admitted == tables.trajectories_ended == 2 * (2 + redundant)


class Worker:
    """Says `events` in one stream; the stream breaks when `breaks` is set."""

    worker_id = "worker"
    alive = usable = True

    def __init__(self, *events: rollout_pb.TrajectoryEvent) -> None:
        self.rollout, self._events = self, events
        self.said, self.breaks = asyncio.Event(), asyncio.Event()
        self.aborted: set[str] = set()

    @asynccontextmanager
    async def while_alive(self) -> AsyncIterator[None]:
        yield

    async def RunQueries(
        self, request: Any, timeout: float
    ) -> AsyncIterator[rollout_pb.TrajectoryEvent]:
        for event in self._events:
            yield event
        self.said.set()
        await self.breaks.wait()
        raise Unavailable("the stream broke")

    async def AbortTrajectories(self, request: Any, timeout: float) -> None:
        self.aborted.update(request.trajectory_ids)


def ended(trajectory_id: str, **fields: Any) -> rollout_pb.TrajectoryEvent:
    return rollout_pb.TrajectoryEvent(
        query_id="q0",
        trajectory_id=trajectory_id,
        state=common_pb.TRAJECTORY_STATE_COMPLETED,
        **fields,
    )


class Play:
    """A dispatch with one batch of one query, whose four trajectories one worker runs."""

    def __init__(self, *events: rollout_pb.TrajectoryEvent) -> None:
        async def warn(text: str) -> None: ...

        job: Any = SimpleNamespace(
            job_id="job",
            spec=SimpleNamespace(
                limits=SimpleNamespace(max_concurrent_trajectories=16, worker_deaths=3),
                pipeline=SimpleNamespace(group_size=2),
            ),
            shared=SimpleNamespace(in_flight={}, workers=None, deaths=SharedDeaths()),
            warn=warn,
        )
        self.worker = Worker(*events)
        self._idle = asyncio.Event()
        engines: Any = SimpleNamespace(ready=lambda _: [self.worker], change=self._idle.wait)
        self.told: list[str] = []
        self.dispatch = Dispatch(job, engines)
        self.batch = self.add("q0", IDS)
        self._running: asyncio.Task[None] | None = None

    def add(self, query_id: str, ids: list[str]) -> TicketBatch:
        deadline = Deadline("a test", 30, "nothing")
        batch = TicketBatch(0, deadline, lambda event: self.told.append(event.trajectory_id))
        tickets = [rollout_pb.Ticket(query_id=query_id, trajectory_id=one) for one in ids]
        self.dispatch.add(batch, [tickets])
        batch.seal()
        return batch

    async def __aenter__(self) -> Play:
        self._running = asyncio.create_task(self.dispatch.run())
        await asyncio.wait_for(self.worker.said.wait(), PATIENCE)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._running is not None
        self._running.cancel()
        await asyncio.gather(self._running, return_exceptions=True)

    async def finished(self) -> None:
        await asyncio.wait_for(self.batch.finished(lambda: "waiting"), PATIENCE)


async def test_only_trajectories_that_the_store_ended_are_given_up() -> None:
    async with Play(ended(IDS[0])) as play:
        other = play.add("q1", ["q1-t0"])
        play.dispatch.end_unreported(play.batch, [IDS[0], IDS[1], IDS[2], "q1-t0"])
        assert (play.batch.open, play.batch.unseen) == (1, 2), "the fourth has not ended"
        assert (other.open, other.unseen) == (1, 0), "another step asks for itself"
        play.dispatch.end_unreported(play.batch, IDS)
        await play.finished()
        assert (play.batch.open, play.batch.unseen) == (0, 3)
        await asyncio.sleep(0)
        assert play.worker.aborted == set(IDS[1:]), "no work for nobody"
    assert play.told == [IDS[0]]


async def test_last_words_of_a_complete_group_are_given_up_too() -> None:
    """The group's last member says that it is complete; the other one is never told."""
    async with Play(ended(IDS[1], group_complete=True)) as play:
        assert play.batch.open == 0
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):  # deadline: the batch does not finish
                await play.batch.finished(lambda: "waiting")
        play.dispatch.end_unreported(play.batch, IDS)
        await play.finished()
    assert (play.told, play.batch.unseen) == ([IDS[1]], 3)


async def test_an_end_reported_after_it_was_given_up_counts_once() -> None:
    async with Play(ended(IDS[1], group_complete=True)) as play:
        play.dispatch.end_unreported(play.batch, IDS)
        for one in IDS:
            assert play.dispatch._handle_event(ended(one)), "it has ended"
    assert (play.told, play.batch.unseen) == ([IDS[1]], 3)


async def test_last_words_are_not_waited_for_while_a_worker_rests() -> None:
    """Its stream broke: no report will come. The worker pauses before it gets more work."""
    async with Play(ended(IDS[1], group_complete=True)) as play:
        play.worker.breaks.set()
        await play.finished()
        assert play.dispatch._backing_off == {play.worker}, "the step ended before the pause did"
    assert (play.told, play.batch.unseen) == ([IDS[1]], 3)
