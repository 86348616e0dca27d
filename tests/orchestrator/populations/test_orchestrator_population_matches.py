"""Rounds of matches alone: allowed failures, seating, and the results of an aborted round."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from services.orchestrator.pipeline.dispatch import TicketBatch
from services.orchestrator.populations.population import Matches
from services.orchestrator.populations.state import SETTLED, FrozenMember, PopulationState
from services.orchestrator.state.job_store import Superseded
from services.orchestrator.state.redis import StateUnavailable
from tests.support.cluster import job_yaml
from tests.support.waiting import PATIENCE, until
from troupe.job import JobSpec, parse_job
from troupe.populations.payoffs import PayoffTable
from troupe.rpc import FailedPrecondition, ResourceExhausted, TroupeError
from troupe.v1 import common_pb2 as common_pb
from troupe.v1 import orchestrator_pb2 as orchestrator_pb
from troupe.v1 import rollout_pb2 as rollout_pb

COMPLETED, FAILED = common_pb.TRAJECTORY_STATE_COMPLETED, common_pb.TRAJECTORY_STATE_FAILED
NETWORKS = Path(__file__).parents[3] / "examples" / "poker_networks" / "psro.yaml"
AGENTS = {"alice": {"policy": "player"}, "bob": {"policy": "player"}}


def job_of(**over: Any) -> JobSpec:
    """A symmetric game of two."""
    changes: dict[str, Any] = {"agents": AGENTS, "population": {"matches": {"least": 4}}}
    return parse_job(job_yaml(policies=["player"], **(changes | over)))


class Table:
    """Everything around the matches of two members; `play` says how each ends, if it does."""

    def __init__(
        self,
        spec: JobSpec,
        play: Callable[[rollout_pb.Ticket], rollout_pb.TrajectoryEvent | None],
        seconds: float = 60,
    ) -> None:
        self.play, self.kept = play, dict[str, orchestrator_pb.Match]()
        self.separate_match_slots = True
        # Errors of the next writes.
        self.faults: list[TroupeError] = []
        names = [f"player@{n}" for n in range(2)]
        members = {
            name: FrozenMember(name, "player", "main", n, "", n, n, "", SETTLED, 0, 0.0)
            for n, name in enumerate(names)
        }
        self.state = PopulationState({"all": names}, PayoffTable([2, 2], True), members)
        recent = SimpleNamespace(add=lambda event: None, flush=self.flush)
        shared = SimpleNamespace(
            trajectories=SimpleNamespace(buffer=lambda *a, **k: recent),
            settings=SimpleNamespace(activity_seconds=seconds),
        )
        job: Any = SimpleNamespace(spec=spec, job_id="job", epoch=1, shared=shared)
        around: Any = self
        store: Any = SimpleNamespace(matches=self.known, add_matches=self.add_matches)
        self.matches = Matches(job, around, store, around, self.state)

    # The dispatch's methods.
    def add(self, batch: TicketBatch, groups: list[list[rollout_pb.Ticket]]) -> None:
        batch.add([ticket.trajectory_id for (ticket,) in groups])
        self.batch = batch
        for (ticket,) in groups:
            self.last = ticket
            if (event := self.play(ticket)) is not None:
                batch.end(event)

    def withdraw(self, batch: TicketBatch, queries: list[str], reason: str) -> None: ...

    # The slots' methods.
    async def load_matches(self, *_: Any) -> None: ...

    def places(self) -> dict[tuple[str, str], str]:
        return {("all", f"player@{n}"): f"all--{n}" for n in range(2)}

    def match_floors(self) -> None: ...

    # The stores' methods.
    async def known(self, job_id: str, names: list[str]) -> dict[str, orchestrator_pb.Match]:
        return {name: self.kept[name] for name in names if name in self.kept}

    async def add_matches(
        self, job_id: str, epoch: int, found: dict[str, orchestrator_pb.Match]
    ) -> None:
        if self.faults:
            raise self.faults.pop(0)
        self.kept |= found

    async def flush(self) -> None: ...

    async def fill(self) -> int:
        """Play until nothing is due: how many rounds that took."""
        rounds = 0
        while plan := self.matches.due():
            await self.matches.play(plan)
            rounds += 1
        return rounds


def ended(ticket: rollout_pb.Ticket, *, failed: bool = False) -> rollout_pb.TrajectoryEvent:
    event = rollout_pb.TrajectoryEvent(trajectory_id=ticket.trajectory_id, state=COMPLETED)
    if failed:
        event.state, event.reason = FAILED, "the game broke"
    else:
        first, second = sorted(ticket.cast)
        event.rewards.update({first: 1.0, second: -1.0})
    return event


@pytest.mark.parametrize("limit", [0.5, 1.0])
async def test_few_failures_are_few_of_the_iteration(limit: float) -> None:
    """The rounds after the first are of those that failed: one of one is not half of all."""
    broken = {"m0x1-t1", "m0x1-t4", "m0x1-t5"}
    spec = job_of(limits={"step_seconds": PATIENCE, "max_failed_fraction": limit})
    table = Table(spec, lambda one: ended(one, failed=one.trajectory_id in broken))
    assert await table.fill() == 4
    assert {cell.matches for cell in table.state.table.cells.values()} == {4}
    assert (table.state.planned, table.state.failed) == (15, 3)


@pytest.mark.parametrize(("limit", "most"), [(0.4, 4), (1.0, 16)])
async def test_a_cell_that_never_fills_ends_the_round(limit: float, most: int) -> None:
    played = []

    def play(ticket: rollout_pb.Ticket) -> rollout_pb.TrajectoryEvent:
        if failed := ticket.trajectory_id.startswith("m0x1"):
            played.append(ticket.trajectory_id)
        return ended(ticket, failed=failed)

    spec = job_of(limits={"step_seconds": PATIENCE, "max_failed_fraction": limit})
    with pytest.raises(ResourceExhausted, match="the game broke") as caught:
        await Table(spec, play).fill()
    assert caught.value.kind == "too_many_failed_matches"
    assert len(played) == 4 + most


async def test_a_match_without_a_payoff_for_every_player_is_refused() -> None:
    def play(ticket: rollout_pb.Ticket) -> rollout_pb.TrajectoryEvent:
        event = ended(ticket)
        del event.rewards["bob"]
        return event

    with pytest.raises(FailedPrecondition, match="no reward to 'bob'") as caught:
        await Table(job_of(), play).fill()
    assert (caught.value.kind, caught.value.field) == ("match_without_payoff", "workflow")


async def test_failures_before_a_resume_do_not_end_the_round() -> None:
    spec = job_of(limits={"step_seconds": PATIENCE, "max_failed_fraction": 0.25})
    left = ["m1x1-t2", "m1x1-t3"]

    def broken(ticket: rollout_pb.Ticket) -> rollout_pb.TrajectoryEvent | None:
        return None if ticket.trajectory_id in left else ended(ticket, failed=True)

    table = Table(spec, broken)
    with pytest.raises(ResourceExhausted):
        await table.fill()
    resumed = Table(spec, lambda one: ended(one, failed=one.trajectory_id in left[:1]))
    resumed.kept = table.kept
    await resumed.fill()
    assert {cell.matches for cell in resumed.state.table.cells.values()} == {4}
    assert (resumed.state.planned, resumed.state.failed) == (12 + 11, 11)


@pytest.mark.parametrize("least", [2, 3])
async def test_networks_change_seats_from_match_to_match(least: int) -> None:
    """They keep their cast seats, whatever the query: the first seat wins, and no member is
    better."""
    spec = yaml.safe_load(NETWORKS.read_text())
    spec["population"] = {"matches": {"least": least}}
    table = Table(parse_job(yaml.safe_dump(spec)), ended)
    await table.fill()
    cells = table.state.table.cells.values()
    assert {cell.matches for cell in cells} == {2 * math.ceil(least / 2)}
    assert [cell.mean.tolist() for cell in cells] == [[0.0, 0.0]] * 3


async def test_others_change_seats_out_of_step_with_workflows_that_do() -> None:
    cast = {}

    def play(ticket: rollout_pb.Ticket) -> rollout_pb.TrajectoryEvent:
        cast[ticket.trajectory_id] = ticket.cast["alice"]
        return ended(ticket)

    await Table(job_of(), play).fill()
    older, newer = "all--0", "all--1"
    assert [cast[f"m0x1-t{n}"] for n in range(4)] == [older, older, newer, newer]


LAST = "m1x1-t3"


def all_but_the_last(ticket: rollout_pb.Ticket) -> rollout_pb.TrajectoryEvent | None:
    return None if ticket.trajectory_id == LAST else ended(ticket)


async def test_ended_matches_are_kept_when_a_round_is_stopped() -> None:
    table = Table(job_of(), all_but_the_last)
    playing = asyncio.create_task(table.matches.play(table.matches.due()))
    await asyncio.sleep(0.01)
    assert not table.kept
    playing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await playing
    assert len(table.kept) == 11


@pytest.mark.parametrize("faults", [[], [StateUnavailable("away")]])
async def test_ended_matches_are_kept_when_a_round_fails(faults: list[TroupeError]) -> None:
    """If it can be written; the error is the reason of the round's failure."""

    def play(ticket: rollout_pb.Ticket) -> rollout_pb.TrajectoryEvent:
        event = ended(ticket)
        if ticket.trajectory_id == LAST:
            event.rewards.clear()
        return event

    table = Table(job_of(), play)
    table.faults = list(faults)
    with pytest.raises(FailedPrecondition, match="gave no reward"):
        await table.matches.play(table.matches.due())
    assert len(table.kept) == (0 if faults else 11)


async def test_a_write_that_fails_is_made_up_for() -> None:
    table = Table(job_of(), all_but_the_last, seconds=0.001)
    table.faults = [StateUnavailable("away")]
    playing = asyncio.create_task(table.matches.play(table.matches.due()))
    await until(lambda: table.kept)
    assert (len(table.kept), table.faults) == (11, [])
    table.batch.end(ended(table.last))
    await playing
    assert LAST in table.kept


async def test_an_orchestrator_that_lost_the_job_stops_its_matches() -> None:
    table = Table(job_of(), all_but_the_last, seconds=0.001)
    table.faults = [Superseded("another one has it")] * 2
    async with asyncio.timeout(PATIENCE):
        with pytest.raises(Superseded):
            await table.matches.play(table.matches.due())
