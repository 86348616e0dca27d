"""Play through text, enumerated: questions, illegal-move rules, exact values."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from open_spiel.python.algorithms.exploitability import nash_conv as their_nash_conv
from open_spiel.python.policy import TabularPolicy

from examples.games.kuhn import kuhn, workflow
from tests.support.waiting import PATIENCE
from troupe.populations.enumerated import FORFEIT, Enumeration, probabilities, score_request
from troupe.populations.tree import agent_nash_conv, agent_values, mixed
from troupe.v1 import rollout_pb2 as rollout_pb
from troupe.workflow import play
from troupe.workflow.environments import GameWorkflow, IllegalRule, PlayRules
from troupe.workflow.environments.adapters.openspiel import OpenSpiel


def drawn(game: Enumeration, seed: int, legal: float = 1.0) -> list[dict[int, float]]:
    """Random probabilities of moves that add up to `legal`."""
    rng = random.Random(seed)
    found = []
    for question in game.questions:
        weights = [rng.random() + 0.05 for _ in question.moves]
        shares = [legal * weight / sum(weights) for weight in weights]
        found.append(dict(zip(question.moves.values(), shares, strict=True)))
    return found


def test_every_information_state_is_asked_as_in_a_match() -> None:
    game = Enumeration.of(kuhn(), workflow.rules)
    assert len(game.questions) == 12
    asked = {(one.player, one.state): one for one in game.questions}
    [message] = asked[0, "1pb"].messages
    assert message["content"].startswith("Kuhn poker.")
    assert "You hold the queen. You: pass. They: bet." in message["content"]
    assert message["content"].endswith("Legal moves: Pass, Bet.")
    assert asked[0, "1pb"].moves == {"Pass": 0, "Bet": 1}


def test_earlier_answers_stand_in_the_conversation_where_seats_remember() -> None:
    game = Enumeration.of(kuhn(), PlayRules(illegal="random_legal"))
    [one] = [one for one in game.questions if one.state == "2pb"]
    roles = [message["role"] for message in one.messages]
    assert roles == ["user", "assistant", "user"]
    assert one.messages[1]["content"] == "Pass"
    assert "Kuhn poker." not in one.messages[2]["content"], "the rules are told once"


def test_values_and_nash_conv_are_openspiels() -> None:
    game = Enumeration.of(kuhn(), workflow.rules)
    behaviours = game.behaviours(drawn(game, 1))
    plans = game.plans(behaviours)
    theirs = TabularPolicy(kuhn().game)
    for player, behaviour in enumerate(behaviours):
        for state, chances in behaviour.items():
            assert theirs.states_per_player[player].count(state) == 1
            theirs.policy_for_key(state)[:] = [chances[0], chances[1]]
    assert game.form.nash_conv(plans) == pytest.approx(their_nash_conv(kuhn().game, theirs))
    assert agent_nash_conv(game.form, [plans, plans]) == pytest.approx(game.form.nash_conv(plans))
    assert agent_values(game.form, [plans, plans]) == pytest.approx([0.0, 0.0])


def test_a_mixture_of_members_is_the_mean_of_whole_games() -> None:
    game = Enumeration.of(kuhn(), workflow.rules)
    members = [game.plans(game.behaviours(drawn(game, seed))) for seed in range(3)]
    shares = [0.5, 0.3, 0.2]
    mixture = mixed(members, shares)
    versus = [agent_values(game.form, [one, members[0]])[0] for one in members]
    expected = float(np.dot(shares, versus))
    assert agent_values(game.form, [mixture, members[0]])[0] == pytest.approx(expected)
    with pytest.raises(ValueError, match="cannot be mixed"):
        mixed(members, [1.0])
    with pytest.raises(ValueError, match="cannot be computed"):
        agent_nash_conv(game.form, [members[0], members[1], members[2]])


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ("random_legal", {0: 0.1 + 0.35, 1: 0.2 + 0.35}),
        ("lose", {0: 0.1, 1: 0.2, FORFEIT: 0.7}),
        # Asked again twice: 0.7 ** 3 is lost.
        ("resample", {0: 0.657 / 3, 1: 2 * 0.657 / 3, FORFEIT: 0.343}),
    ],
)
def test_probability_of_illegal_answers_goes_where_the_rule_says(
    rule: IllegalRule, expected: Mapping[int, float]
) -> None:
    game = Enumeration.of(kuhn(), workflow.rules, rule=rule)
    for behaviour in game.behaviours([{0: 0.1, 1: 0.2}] * 12):
        for chances in behaviour.values():
            assert chances == pytest.approx(expected)


@pytest.mark.parametrize("rule", ["random_legal", "lose", "resample"])
async def test_the_mean_of_played_matches_approaches_the_enumerated_value(
    rule: IllegalRule,
) -> None:
    """The probabilities of a player whose answers do not depend on the prompt."""
    rng = random.Random(0)
    answers = {"pass": 0.5, "bet": 0.2, "hum": 0.3}
    game = Enumeration.of(kuhn(), workflow.rules, rule=rule)
    plans = game.plans(game.behaviours([{0: 0.5, 1: 0.2}] * 12))
    expected = game.form.values(plans)[0]
    rules = PlayRules(history="latest", illegal=rule)
    matches = GameWorkflow(kuhn, rules=rules, permute=False)

    def say(*_: Any) -> str:
        return rng.choices(list(answers), list(answers.values()))[0]

    got = []
    for seed in range(200):
        played = await play(
            matches, {"seed": seed}, policy=say, agents=("a", "b"), seconds=PATIENCE
        )
        got.append(played.metrics["return_p0"])
    error = np.std(got) / math.sqrt(len(got))
    assert abs(np.mean(got) - expected) < 4 * error, (np.mean(got), expected)


def test_a_player_that_never_moves_loses_at_once() -> None:
    game = Enumeration.of(kuhn(), workflow.rules, rule="lose")
    plans = game.plans(game.behaviours([{0: 0.0, 1: 0.0}] * 12))
    assert game.form.values(plans) == pytest.approx([-2.0, 2.0])


def test_invalid_probabilities_are_refused() -> None:
    game = Enumeration.of(kuhn(), workflow.rules)
    for bad in ({0: 0.9, 1: 0.9}, {0: -0.1, 1: 0.5}, {0: 0.5}, {0: math.nan, 1: 0.5}):
        with pytest.raises(ValueError, match="no probabilities"):
            game.behaviours([bad] * 12)


def test_text_that_shows_the_others_cards_is_found() -> None:
    environment = OpenSpiel("kuhn_poker", describe=lambda state, player: str(state.history()))
    with pytest.raises(ValueError, match="two different texts in the information state"):
        Enumeration.of(environment, workflow.rules)
    with pytest.raises(ValueError, match="move simultaneously"):
        Enumeration.of(OpenSpiel("matrix_rps"), workflow.rules)


def test_questions_go_out_and_come_back() -> None:
    game = Enumeration.of(kuhn(), workflow.rules)
    request = score_request(game.questions, "j", "player", version=3)
    assert (request.version, len(request.prompts)) == (3, 12)
    assert [one.text for one in request.prompts[0].continuations] == ["Pass", "Bet"]
    said = [rollout_pb.ScoredContinuation(logprob=math.log(p)) for p in (0.25, 0.5)]
    answer = rollout_pb.ScoreResponse(prompts=[rollout_pb.ScoredPrompt(continuations=said)] * 12)
    assert probabilities(game.questions, answer) == [pytest.approx({0: 0.25, 1: 0.5})] * 12
