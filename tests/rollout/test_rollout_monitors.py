"""What a trajectory says of its team, and trajectories in which an agent says nothing."""

from __future__ import annotations

from tests.rollout.house import House, evaluation, make_spec, training
from troupe.algorithms.team_monitors import GRAM
from troupe.v1 import common_pb2 as common_pb

SAID = "We add the numbers one after another. #4"


async def test_an_agent_that_is_left_out_says_nothing_and_the_others_speak_as_before(
    house: House,
) -> None:
    await house.prepare("team")
    whole = await house.run_one()
    tickets = [evaluation(1)[0] for _ in range(2)]
    tickets[0].left_out.append("checker")
    tickets[1].left_out.extend(["checker", "solver"])
    for number, ticket in enumerate(tickets):
        ticket.trajectory_id += f".{number}"
    ended = await house.run(tickets)
    silent, alone = (ended[ticket.trajectory_id] for ticket in tickets)

    assert {one.state for one in (whole, silent, alone)} == {common_pb.TRAJECTORY_STATE_COMPLETED}
    assert [turn.agent for turn in silent.turns] == ["solver", "checker", "solver"]
    assert [turn.response_tokens > 0 for turn in silent.turns] == [True, False, True]
    assert set(silent.start_versions) == {"big"}
    assert silent.metrics["length"] == silent.rewards["solver"] > 0
    # The solver's first turn has the same seed, and has seen nothing of the checker.
    drawn = [next(iter(one.turns)).response_tokens for one in (whole, silent)]
    assert drawn[0] == drawn[1]
    assert [turn.response_tokens for turn in alone.turns] == [0, 0, 0]
    assert not alone.start_versions
    assert alone.rewards["solver"] == 0


async def test_an_evaluation_says_who_copies_who_agrees_and_what_judges_accept(
    house: House,
) -> None:
    accepts = {"checker": "(?i)^we add", "solver": "never"}
    await house.prepare("judged", evaluation={"answer_pattern": r"#(\d+)", "judges": accepts})
    first, second = (await house.run(evaluation(2))).values()
    assert first.query_id == "h0"
    expected = {
        "copying/solver": 0,
        "copying/checker": 1,
        "agreement/solver": 1,
        "agreement/checker": 1,
        "accepts/solver": 0,
        "accepts/checker": 1,
    }
    assert {name: first.metrics.get(name) for name in expected} == expected
    differs = dict.fromkeys(expected, 0)
    assert {name: second.metrics.get(name) for name in expected} == differs


async def test_training_says_who_copies_and_nothing_that_needs_a_pattern(house: House) -> None:
    await house.prepare("judged", evaluation={"answer_pattern": r"#(\d+)"})
    await house.open_step(queries=1, group_size=1)
    [event] = (await house.run(training(1, 1))).values()
    assert len(SAID) > GRAM
    assert event.metrics["copying/checker"] == 1
    assert not [name for name in event.metrics if name.startswith(("agreement", "accepts"))]


async def test_an_agent_that_speaks_alone_agrees_with_nobody(house: House) -> None:
    await house.prepare("one_turn", evaluation={"answer_pattern": "(.*)"})
    event = await house.run_one()
    assert event.metrics["copying/solver"] == 0
    assert "copying/checker" not in event.metrics
    assert "agreement/solver" not in event.metrics


async def test_a_job_with_one_agent_has_no_monitors(house: House) -> None:
    spec = make_spec("one_turn", evaluation={"answer_pattern": "(.*)"})
    del spec["agents"]["checker"]
    await house.prepare_raw(spec)
    event = await house.run_one()
    assert event.state == common_pb.TRAJECTORY_STATE_COMPLETED
    assert "copying/solver" not in event.metrics


async def test_replies_that_are_no_text_are_not_compared(house: House) -> None:
    await house.prepare("edits_its_replies", evaluation={"answer_pattern": "(.*)"})
    event = await house.run_one()
    assert event.state == common_pb.TRAJECTORY_STATE_COMPLETED
    assert event.metrics["copying/solver"] == 0
