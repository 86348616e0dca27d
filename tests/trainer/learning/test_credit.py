"""The reward of a turn, from the workflow to the advantage: by hand, and on Kuhn poker."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from services.rollout.trajectories.records import LargeColumns, samples_of
from services.trainer.learning.critic import chained_advantages
from services.trainer.learning.samples import Row, parse_rows, response_lengths
from tests.support.waiting import PATIENCE
from tests.workflow.environments.zoo import Nim, Pennies
from troupe.v1 import experience_store_pb2 as store_pb
from troupe.v1 import rollout_pb2 as rollout_pb
from troupe.workflow import ScriptedPolicy, play
from troupe.workflow.environments import GameWorkflow, IllegalRule, PlayRules
from troupe.workflow.environments.adapters.openspiel import OpenSpiel
from troupe.workflow.environments.game import Credit
from troupe.workflow.trying import Played


class NoShelf(LargeColumns):
    """A store of columns none of which is large enough to be kept elsewhere."""

    def __init__(self) -> None:
        pass

    def columns_of(self, sample_id: str, columns: Any) -> dict[str, store_pb.Column]:
        assert not columns
        return {}


def rows_of(played: Played) -> list[Row]:
    """Return rows as the trainer gets them, from messages of the wire, in the order of turns."""
    ticket = rollout_pb.Ticket(query_id="q", trajectory_id="t")
    samples = samples_of(played.samples, ticket=ticket, shelf=NoShelf())
    sent = [store_pb.Sample.FromString(sample.SerializeToString()) for sample in samples]
    claimed = [store_pb.ClaimedSample(sample=sample) for sample in sent]
    return sorted(parse_rows(claimed, 10_000, columns=()), key=lambda row: row.turn)


def to_go(rows: list[Row], gamma: float = 1.0, *, first: bool = True) -> list[float]:
    """gae with values of zero and lambda 1: the return from each turn's first (last) token."""
    values = torch.zeros(sum(response_lengths(rows)))
    found = chained_advantages(rows, values, gamma=gamma, gae_lambda=1.0)
    parts = torch.split(found, response_lengths(rows))
    return [float(part[0 if first else -1]) for part in parts]


async def played_by(workflow: Any, agents: tuple[str, ...] = ("x",), **options: Any) -> Played:
    options.setdefault("policy", lambda prompt: "hm")
    return await play(workflow, {}, agents=agents, seconds=PATIENCE, **options)


# (rewards of the turns, of the agent) -> the values that groups compare, the sums of gae.
TABLE: list[tuple[list[float | None], float | None, list[float], list[float]]] = [
    ([None, None, None], 5.0, [5, 5, 5], [5, 5, 5]),
    # The final reward counts although every turn has its own.
    ([1.0, 2.0, 4.0], 10.0, [1, 2, 4], [17, 16, 14]),
    ([1.0, 2.0, 4.0], None, [1, 2, 4], [7, 6, 4]),
    ([1.0, None, None], 10.0, [1, 10, 10], [11, 10, 10]),
    ([None, None, 4.0], 10.0, [10, 10, 4], [14, 14, 14]),
    ([0.0, 0.0, 0.0], -1.0, [0, 0, 0], [-1, -1, -1]),
]


@pytest.mark.parametrize(("own", "final", "compared", "earned"), TABLE)
async def test_turns_and_their_agent_are_rewarded(
    own: list[float | None], final: float | None, compared: list[float], earned: list[float]
) -> None:
    async def workflow(query: Any, agents: Any, tools: Any) -> dict[str, float]:
        for reward in own:
            reply = await agents["x"].chat([{"role": "user", "content": "go"}])
            reply.reward = reward
        return {} if final is None else {"x": final}

    rows = rows_of(await played_by(workflow))
    assert [row.reward for row in rows] == compared
    assert to_go(rows) == earned
    # A lost row loses its turn's reward, never its agent's.
    without = sum(reward or 0.0 for reward in own[:2]) + (final or 0.0)
    if final is not None or own[1] is not None:
        assert to_go(rows[:2])[0] == without


async def test_candidates_of_one_call_are_separate_episodes() -> None:
    async def workflow(query: Any, agents: Any, tools: Any) -> dict[str, float]:
        await agents["x"].chat([{"role": "user", "content": "go"}])
        for i, reply in enumerate(await agents["x"].chat([{"role": "user", "content": "on"}], n=3)):
            reply.reward = float(i)
        return {"x": 10.0}

    rows = rows_of(await played_by(workflow))
    assert [row.reward for row in rows] == [10.0, 0.0, 1.0, 2.0]
    assert to_go(rows) == [10.0, 10.0, 11.0, 12.0]


async def test_sides_that_a_workflow_names_are_separate_episodes() -> None:
    async def workflow(query: Any, agents: Any, tools: Any) -> dict[str, float]:
        for side in ("white", "black", "white"):
            reply = await agents["x"].chat([{"role": "user", "content": side}])
            reply.chain, reply.reward = side, {"white": 1.0, "black": -1.0}[side]
            reply.earned = 0.0
        reply.earned = 1.0
        return {}

    rows = rows_of(await played_by(workflow))
    assert to_go(rows) == [1.0, 0.0, 1.0]


@pytest.mark.parametrize("credit", ["episode", "to_go"])
async def test_turns_of_a_game_earn_the_remaining_or_the_whole_reward(credit: Credit) -> None:
    """Pennies pays 1, 0, 1: the remaining reward from each turn on, never the sum of these."""
    answers = {"x": ["heads"] * 3, "y": ["heads", "tails", "heads"]}
    workflow = GameWorkflow(Pennies, permute=False, credit=credit)
    played = await played_by(workflow, ("x", "y"), policy=ScriptedPolicy(answers))
    rows = [row for row in rows_of(played) if row.agent == "x"]
    by_turn = [2.0, 1.0, 1.0]
    assert [row.reward for row in rows] == (by_turn if credit == "to_go" else [2.0] * 3)
    assert to_go(rows) == (by_turn if credit == "to_go" else [2.0] * 3)
    # Discounted: later rewards are worth less.
    length = rows[0].response_length
    assert {row.response_length for row in rows} == {length}
    second, last = 0.5**length, 0.5 ** (2 * length)
    wanted = 1.0 + last if credit == "to_go" else 2.0 * last
    assert to_go(rows, 0.5, first=False)[0] == pytest.approx(wanted)
    assert second > last


@pytest.mark.parametrize("credit", ["episode", "to_go"])
@pytest.mark.parametrize("agents", [("x",), ("x", "y")])
async def test_an_agent_that_plays_itself_has_a_chain_for_each_seat(
    credit: Credit, agents: tuple[str, ...]
) -> None:
    """Nim with a heap of five, one taken each time: the first to move wins."""
    workflow = GameWorkflow(Nim, permute=False, credit=credit)
    options: dict[str, Any] = {"agents": agents, "seconds": 20, "policy": lambda prompt: "1"}
    rows = rows_of(await play(workflow, {"seed": 1}, **options))
    assert [row.reward for row in rows] == [1.0, -1.0, 1.0, -1.0, 1.0]
    assert to_go(rows) == [1.0, -1.0, 1.0, -1.0, 1.0]
    if len(agents) == 1:
        assert len({row.chain for row in rows}) == 2


RULES: list[tuple[IllegalRule, list[float], list[float]]] = [
    # (rule, the comparison of x's turns, their remaining rewards)
    ("lose", [-1.0], [-1.0]),
    ("resample", [-1.0] * 3, [-3.0, -2.0, -1.0]),
]


@pytest.mark.parametrize(("rule", "compared", "earned"), RULES)
@pytest.mark.parametrize("credit", ["episode", "to_go"])
async def test_an_illegal_answer_costs_once(
    rule: IllegalRule, compared: list[float], earned: list[float], credit: Credit
) -> None:
    """The game sets the reward of the last illegal answer; each earlier one costs as much."""
    rules = PlayRules(illegal=rule)
    workflow = GameWorkflow(Nim, permute=False, credit=credit, rules=rules)
    options: dict[str, Any] = {"agents": ("x", "y"), "seconds": 20, "policy": lambda prompt: "hm"}
    rows = [
        row for row in rows_of(await play(workflow, {"seed": 1}, **options)) if row.agent == "x"
    ]
    assert [row.reward for row in rows] == compared
    assert to_go(rows) == earned


@pytest.mark.parametrize("credit", ["episode", "to_go"])
@pytest.mark.parametrize("agents", [("x",), ("x", "y")])
async def test_every_turn_of_kuhn_poker_earns_its_seats_winnings(
    credit: Credit, agents: tuple[str, ...]
) -> None:
    """Every turn earns its own seat's winnings, regardless of the agent there and of the last
    mover."""
    seen = set()
    for seed, choice in itertools.product(range(6), ("first", "last")):

        def policy(prompt: Any, choice: str = choice) -> str:
            legal = prompt.messages[-1][1].rpartition("Legal moves:")[2].strip(" .").split(", ")
            return str(legal[0 if choice == "first" else -1])

        workflow = GameWorkflow(lambda: OpenSpiel("kuhn_poker"), permute=False, credit=credit)
        played = await play(
            workflow, {"seed": seed}, agents=agents, policy=policy, seconds=PATIENCE
        )
        rows = rows_of(played)
        winnings = [played.metrics[name] for name in sorted(played.metrics) if "return_" in name]
        assert sum(winnings) == 0
        assert abs(winnings[0]) in (1.0, 2.0)
        wanted = [winnings[i % 2] for i in range(len(rows))]
        assert to_go(rows) == wanted
        assert [row.reward for row in rows] == wanted
        seen.add((len(rows), winnings[0]))
    assert len(seen) > 2
