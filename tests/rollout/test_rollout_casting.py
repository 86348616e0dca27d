"""Tickets that assign policies to agents."""

from __future__ import annotations

import pytest

from tests.rollout.house import House, evaluation, training
from troupe.rpc import InvalidArgument
from troupe.v1 import rollout_pb2 as rollout_pb


async def test_a_cast_decides_whose_engines_draw_a_turn(house: House) -> None:
    await house.prepare("team")
    tickets = evaluation(2)
    tickets[1].cast.update({"solver": "small", "checker": "big"})
    ended = await house.run(tickets)
    own, other = (ended[ticket.trajectory_id] for ticket in tickets)
    assert [turn.policy for turn in own.turns] == ["big", "small", "big"]
    assert [turn.policy for turn in other.turns] == ["small", "big", "small"]
    assert set(own.start_versions) == set(other.start_versions) == {"big", "small"}


async def test_rows_are_those_of_trained_policies_that_learn(house: House) -> None:
    await house.prepare("team", policies={"small": {"trainable": False}})
    await house.open_step(queries=3, group_size=1)
    tickets = training(queries=3, group_size=1)
    # A frozen policy in the place of the trained one; both seats by the trained one; no learner.
    tickets[0].cast.update({"solver": "small", "checker": "big"})
    tickets[1].cast.update({"checker": "big"})
    tickets[2].learners[:] = ["small"]
    await house.run(tickets)
    found = {(row.query_id, row.agent) for row in await house.samples("big")}
    assert found == {("q0", "checker"), ("q1", "checker"), ("q1", "solver")}


async def test_a_cast_of_strangers_is_refused(house: House) -> None:
    await house.prepare("team")
    for cast, value in (({"judge": "big"}, "judge"), ({"solver": "huge"}, "huge")):
        ticket = evaluation()[0]
        ticket.cast.update(cast)
        with pytest.raises(InvalidArgument) as caught:
            await house.run([ticket])
        assert (caught.value.field, caught.value.value) == ("tickets[0].cast", value)


async def test_matches_are_sampled_as_in_training(house: House) -> None:
    await house.prepare("one_turn", evaluation={"temperature": 0.0})
    drawn = {}
    for purpose in (rollout_pb.Ticket.PURPOSE_MATCH, rollout_pb.Ticket.PURPOSE_EVALUATE):
        tickets = evaluation(6)
        for ticket in tickets:
            # The same question to all.
            ticket.index, ticket.purpose = 0, purpose
        events = (await house.run(tickets)).values()
        drawn[purpose] = {event.turns[0].response for event in events}
    assert len(drawn[rollout_pb.Ticket.PURPOSE_EVALUATE]) == 1
    assert len(drawn[rollout_pb.Ticket.PURPOSE_MATCH]) > 1
