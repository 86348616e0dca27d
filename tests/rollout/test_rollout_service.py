"""The rollout service with a real store, real engines and a real reward service."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.rollout.house import House, evaluation, training
from troupe import tensors
from troupe.rpc import InvalidArgument
from troupe.states import OFFLINE
from troupe.v1 import common_pb2 as common_pb

COMPLETED = common_pb.TRAJECTORY_STATE_COMPLETED


async def test_a_step_of_two_policies_ends_as_rows_in_the_store(house: House) -> None:
    prepared = await house.prepare("team")
    assert {e.state for e in prepared.engines} == {common_pb.ENGINE_STATE_HEALTHY}
    assert {e.policy: e.version for e in prepared.engines} == {"big": 0, "small": 0}
    await house.open_step()

    ended = await house.run(training())

    assert [e.state for e in ended.values()] == [COMPLETED] * 4
    step = await house.step()
    assert step.sealed
    assert sorted(step.ended_trajectory_ids) == sorted(ended)
    event = ended["q1-s0-t0"]
    assert event.rewards.keys() == {"solver", "checker", "team"}
    assert event.metrics["turns"] == 3
    assert "length" in event.metrics
    assert [(t.agent, t.policy, t.turn) for t in event.turns] == [
        ("solver", "big", 0),
        ("checker", "small", 1),
        ("solver", "big", 2),
    ]
    assert event.turns[0].messages[0].content == "1+4"
    last = event.turns[2]
    assert (last.shared_turn, last.shared_messages) == (0, 1)
    assert last.messages[0].role == "assistant"

    rows = {s.sample_id: s for s in await house.samples("big")}
    assert len(rows) == 8
    first, last = rows["q1_0_q1-s0-t0"], rows["q1_2_q1-s0-t0"]
    assert first.reward == last.reward == event.rewards["solver"]
    assert first.group_id == "q1/solver"
    assert first.temperature == 1.0
    prompt, response = ids(first.prompt_ids), ids(first.response_ids)
    # Token ids end to end: the second prompt begins with the generated ids, unchanged.
    assert ids(last.prompt_ids)[: len(prompt + response)] == prompt + response
    assert len(tensors.from_proto(first.logprobs)) == len(response)
    assert [(v.version, v.start, v.end) for v in first.versions] == [(0, 0, len(response))]
    assert len(await house.samples("small")) == 4


async def test_the_same_seed_plays_the_same_trajectory(house: House) -> None:
    await house.prepare("team")
    once = await house.run(evaluation(3, seed=5))
    again = await house.run(evaluation(3, seed=5))
    other = await house.run(evaluation(3, seed=50))

    def said(events: object) -> list[list[str]]:
        return [[t.response for t in e.turns] for _, e in sorted(events.items())]  # type: ignore[attr-defined]

    assert said(once) == said(again)
    assert said(once) != said(other)


async def test_turn_rewards_and_groups_per_turn(house: House) -> None:
    await house.prepare("branches", algorithm={"group_by": "turn"})
    await house.open_step(queries=1, group_size=1)
    [event] = (await house.run(training(1, 1))).values()
    assert event.state == COMPLETED, event.reason
    assert event.rewards["solver"] == 1.5  # the mean of its turns, to be shown
    rows = sorted(await house.samples("big"), key=lambda s: s.turn)
    assert [s.reward for s in rows] == [0, 1, 2, 3]
    assert [s.group_id for s in rows] == [f"q0/solver/{n}" for n in range(4)]


async def test_a_critic_of_a_team_gets_all_turns_of_a_query_in_one_group(house: House) -> None:
    critic = {"advantage": "gae", "critic": {"episodes": "team", "values": "turn"}}
    await house.prepare("tree", algorithm=critic)
    await house.open_step(queries=1, group_size=2)
    ended = await house.run(training(1, 2))
    assert {e.state for e in ended.values()} == {COMPLETED}, ended
    rows = await house.samples("big")
    assert {row.agent for row in rows} == {"solver", "checker"}
    assert {row.group_id for row in rows} == {"q0/*"}


async def test_siblings_of_a_branch_are_a_group_across_trajectories_of_one_prompt(
    house: House,
) -> None:
    await house.prepare("tree", algorithm={"group_by": "branch"})
    await house.open_step(queries=1, group_size=2)
    ended = await house.run(training(1, 2))
    assert {e.state for e in ended.values()} == {COMPLETED}, ended
    rows = sorted(await house.samples("big"), key=lambda s: (s.trajectory_id, s.turn))
    # Numbered branch after branch, regardless of speed.
    assert [(row.agent, row.turn) for row in rows[:6]] == [
        *(("solver", turn) for turn in range(5)),
        ("checker", 5),
    ]
    groups: dict[str, list[common_pb.Tensor]] = {}
    for row in rows:
        groups.setdefault(row.group_id, []).append(row.prompt_ids)
    # Two and three drafts in each of two trajectories, which were asked the same.
    assert {name.rpartition("/")[0]: len(members) for name, members in groups.items()} == {
        "q0/solver/0:0": 4,
        "q0/solver/1:0": 6,
        "q0/checker": 2,
    }
    # Turns drawn alone are compared with the same turn of the other trajectory.
    del groups["q0/checker/1:0"]
    for members in groups.values():
        assert len({tuple(ids(prompt)) for prompt in members}) == 1
    assert all(row.HasField("reward") for row in rows)


async def test_samples_of_a_frozen_policy_are_not_stored(house: House) -> None:
    await house.prepare("team", policies={"small": {"trainable": False}})
    await house.open_step()
    await house.run(training())
    assert len(await house.samples("big")) == 8
    assert await house.samples("small") == []


async def test_evaluation_stores_nothing_and_can_be_greedy(house: House) -> None:
    await house.prepare("team", evaluation={"queries": 4, "temperature": 0.0})
    one = await house.run(evaluation(2, seed=1))
    two = await house.run(evaluation(2, seed=2))
    for key, event in one.items():
        assert [t.response for t in event.turns] == [t.response for t in two[key].turns]
    assert event.turns[0].messages[0].content.startswith("101")


async def test_a_repeated_preparation_follows_the_given_versions(house: House) -> None:
    first = await house.prepare("team")
    second = await house.prepare("team")
    assert [e.engine_id for e in first.engines] == [e.engine_id for e in second.engines]
    assert {e.restarts for e in second.engines} == {0}


def ids(tensor: common_pb.Tensor) -> list[int]:
    return [int(i) for i in tensors.from_proto(tensor)]


@pytest.mark.parametrize(
    ("section", "row", "kind"),
    [
        ("supervised", {"messages": [{"role": "user", "content": "hi"}]}, "bad_demonstration"),
        ("preferences", {"prompt": "hi", "chosen": "yes"}, "bad_preference"),
    ],
)
async def test_rows_that_cannot_be_learned_end_the_job_before_it_starts(
    house: House, tmp_path: Path, section: str, row: dict[str, Any], kind: str
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"agent": "solver", **row}) + "\n")
    with pytest.raises(InvalidArgument, match=f"the row is .*{next(iter(row))}") as refused:
        await house.prepare("one_turn", **{section: {"tasks": {"dataset": str(path)}, "steps": 1}})
    assert (refused.value.kind, refused.value.field) == (kind, f"{section}.tasks")


async def test_a_joint_pair_becomes_one_group_in_the_tables_of_all_its_policies(
    house: House, tmp_path: Path
) -> None:
    pair = {"prompt": "1+4", "chosen": "5", "rejected": "6"}
    rows = [{"agents": {"solver": pair, "checker": pair}}, {"agents": {"solver": pair}}]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    pairs = {"tasks": {"dataset": str(path)}, "steps": 1, "joint": True}
    await house.prepare("team", preferences=pairs)
    await house.open_step(group_size=1)
    tickets = training(2, 1)
    for ticket in tickets:
        ticket.split = OFFLINE
    ended = await house.run(tickets)
    assert {event.state for event in ended.values()} == {COMPLETED}, ended
    found = [*await house.samples("big"), *await house.samples("small")]
    by_row: dict[str, list[tuple[str, float, int]]] = {}
    for one in sorted(found, key=lambda sample: (sample.query_id, sample.turn)):
        assert (one.group_id, one.preference) == (f"{one.query_id}/*/pair", True)
        by_row.setdefault(one.query_id, []).append((one.policy, one.reward, one.joint_policies))
    alone = [("big", 1.0, 1), ("big", 0.0, 1)]
    team = [("big", 1.0, 2), ("big", 0.0, 2), ("small", 1.0, 2), ("small", 0.0, 2)]
    # Rows are drawn in an order of their own.
    assert sorted(by_row.values(), key=len) == [alone, team]
