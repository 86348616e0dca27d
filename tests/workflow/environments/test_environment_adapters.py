"""Games of the real libraries, through the whole conformance test and by known figures."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from pettingzoo.utils import parallel_to_aec

from tests.networks.worlds import HERE, Cast, Part
from tests.workflow.environments.zoo import Nim
from troupe.workflow import EntrypointError
from troupe.workflow.environments import (
    Environment,
    EnvironmentContractError,
    IllegalMoveError,
    MissingLibraryError,
    Observation,
    hosted,
)
from troupe.workflow.environments.adapters.gymnasium import Gymnasium
from troupe.workflow.environments.adapters.openspiel import OpenSpiel
from troupe.workflow.environments.adapters.pettingzoo import Aec, Parallel
from troupe.workflow.environments.adapters.spaces import numbers
from troupe.workflow.environments.adapters.textarena import TextArena
from troupe.workflow.environments.conformance import check, legal_mover, play_randomly

ROCK = ("rock", "paper", "scissors")


def rps(**declared: Any) -> Parallel:
    return Parallel(
        "pettingzoo.classic.rps_v2:parallel_env",
        make_args={"max_cycles": 3},
        moves=ROCK,
        declared={"zero_sum": True, "symmetric": True, "max_steps": 3, **declared},
    )


def push(seen: Observation, draw: random.Random, seat: str) -> list[float]:
    return [draw.uniform(-2, 2)]


def text_move(seen: Observation, draw: random.Random, seat: str) -> str:
    return draw.choice(["[check]", "[bet]", "[call]", "[fold]", "hm"])


@pytest.mark.parametrize(
    ("make", "move"),
    [
        (lambda: OpenSpiel("kuhn_poker"), legal_mover),
        (lambda: OpenSpiel("leduc_poker"), legal_mover),
        (lambda: OpenSpiel("tic_tac_toe"), legal_mover),
        (lambda: OpenSpiel("goofspiel(num_cards=4)"), legal_mover),  # chance, then at once
        (lambda: OpenSpiel("tiny_hanabi"), legal_mover),  # cooperative
        (lambda: OpenSpiel("kuhn_poker(players=3)"), legal_mover),
        (lambda: OpenSpiel("repeated_game(stage_game=matrix_pd(),num_repetitions=3)"), legal_mover),
        (lambda: Gymnasium("FrozenLake-v1"), legal_mover),
        (lambda: Gymnasium("CartPole-v1"), legal_mover),
        (lambda: Gymnasium("Pendulum-v1", max_steps=20), push),  # a space of vectors
        (rps, legal_mover),
        (lambda: Aec("pettingzoo.classic.tictactoe_v3:env"), legal_mover),
        (
            lambda: Aec("pettingzoo.classic.leduc_holdem_v4:env", declared={"zero_sum": True}),
            legal_mover,
        ),
        (lambda: TextArena("KuhnPoker-v0", declared={"zero_sum": True}), text_move),
        (lambda: TextArena("GuessTheNumber-v0", players=1), legal_mover),
    ],
)
def test_games_conform(make: Callable[[], Environment], move: Any) -> None:
    report = check(make, seeds=(0, 1, 2), move=move)
    assert report.ok, report


def test_openspiel_declares_what_its_games_are() -> None:
    kuhn = OpenSpiel("kuhn_poker").properties
    assert (kuhn.zero_sum, kuhn.simultaneous, kuhn.illegal_reward) == (True, False, -2.0)
    assert OpenSpiel("tiny_hanabi").properties.cooperative
    assert OpenSpiel("matrix_pd").properties.simultaneous


def test_kuhn_poker_pays_as_kuhn_wrote() -> None:
    """Kuhn 1950: a bet that is passed on wins the ante, one that is called the higher card."""
    seen = set()
    for seed in range(40):
        game = OpenSpiel("kuhn_poker")
        cards = [int(game.reset(seed).obs[seat].text) for seat in ("p0", "p1")]
        assert game.step({"p0": 1}).current == ("p1",)
        called = game.step({"p1": 1})
        winner = "p0" if cards[0] > cards[1] else "p1"
        loser = "p1" if winner == "p0" else "p0"
        assert called.rewards == {winner: 2.0, loser: -2.0}
        game.reset(seed)
        game.step({"p0": 1})
        assert game.step({"p1": 0}).rewards == {"p0": 1.0, "p1": -1.0}
        seen.add(tuple(cards))
    assert len(seen) == 6  # all deals


def test_a_player_sees_its_own_card_only() -> None:
    for seed in range(20):
        reset = OpenSpiel("kuhn_poker").reset(seed)
        assert reset.obs["p0"].text != reset.obs["p1"].text
        assert len(reset.obs["p0"].text) == 1


def test_a_repeated_game_pays_every_round() -> None:
    game = OpenSpiel("repeated_game(stage_game=matrix_pd(),num_repetitions=3)")
    game.reset(0)
    steps = [game.step({"p0": 0, "p1": 1}) for _ in range(3)]
    assert [step.rewards for step in steps] == [{"p0": 0.0, "p1": 10.0}] * 3
    assert steps[-1].current == ()


def test_pettingzoo_parallel_by_hand() -> None:
    game = rps()
    reset = game.reset(0)
    assert reset.obs["player_0"].legal == {"rock": 0, "paper": 1, "scissors": 2}
    step = game.step({"player_0": 0, "player_1": 1})
    assert step.rewards == {"player_0": -1.0, "player_1": 1.0}
    assert step.obs["player_0"].text == "1"  # the other one's action


def test_pettingzoo_aec_by_hand() -> None:
    game = Aec("pettingzoo.classic.tictactoe_v3:env")
    (seat,) = game.reset(0).current
    for move in (0, 3, 1, 4):
        step = game.step({seat: move})
        assert not any(step.rewards.values())
        (seat,) = step.current
    step = game.step({seat: 2})
    assert step.rewards == {"player_1": 1.0, "player_2": -1.0}
    assert step.current == ()


def test_pettingzoo_masks_moves() -> None:
    game = Aec("pettingzoo.classic.tictactoe_v3:env")
    game.reset(0)
    legal = game.step({"player_1": 4}).obs["player_2"].legal
    assert legal is not None
    assert set(legal.values()) == set(range(9)) - {4}


def test_gymnasium_by_hand() -> None:
    game = Gymnasium(
        "FrozenLake-v1",
        make_args={"is_slippery": False},
        moves=["left", "down", "right", "up"],
    )
    reset = game.reset(0)
    assert reset.obs["player"].text == "[S]FFF\nFHFH\nFFFH\nHFFG"
    assert reset.obs["player"].legal == {"left": 0, "down": 1, "right": 2, "up": 3}
    for move in (1, 1, 2, 1, 2):
        step = game.step({"player": move})
        assert step.current == ("player",)
    step = game.step({"player": 2})
    assert (step.rewards, step.terminations, step.current) == (
        {"player": 1.0},
        {"player": True},
        (),
    )


def test_gymnasium_is_cut_at_its_limit() -> None:
    game = Gymnasium("Pendulum-v1", max_steps=3)
    game.reset(0)
    steps = [game.step({"player": [0.0]}) for _ in range(3)]
    assert [step.truncations["player"] for step in steps] == [False, False, True]
    assert steps[0].obs["player"].arrays["observation"].shape == (3,)


def test_textarena_does_not_touch_anybodys_chance() -> None:
    random.seed(7)
    np.random.seed(7)
    wanted = random.random(), np.random.random()
    random.seed(7)
    np.random.seed(7)
    play_randomly(TextArena("KuhnPoker-v0"), 3, text_move)
    assert (random.random(), np.random.random()) == wanted


def test_textarena_judges_by_itself() -> None:
    game = TextArena("TicTacToe-v0")
    assert game.reset(0).current == ("p0",)
    step = game.step({"p0": "no move"})
    assert step.current == ("p0",)
    assert "attempted an invalid move" in step.obs["p0"].text
    step = game.step({"p0": "still none"})
    assert (step.current, step.rewards) == ((), {"p0": -1.0, "p1": 1.0})


def test_a_reward_that_is_a_text_is_refused() -> None:
    """TextArena's Countdown gives its reason as the reward."""
    report = check(lambda: TextArena("Countdown-v0", players=1), seeds=(0,))
    assert "rewards_finite" in {finding.name for finding in report.broken}


@pytest.mark.parametrize(
    ("make", "package"),
    [
        (lambda: OpenSpiel("kuhn_poker"), "pyspiel"),
        (lambda: Gymnasium("CartPole-v1"), "gymnasium"),
        (lambda: rps(), "pettingzoo"),
        (lambda: TextArena("KuhnPoker-v0"), "textarena"),
    ],
)
def test_a_library_that_is_not_installed_is_named(
    make: Callable[[], Environment], package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingLibraryError, match="pip install") as caught:
        make()
    assert caught.value.value in ("open_spiel", "gymnasium", "pettingzoo", "textarena")


@pytest.mark.parametrize(
    "make",
    [
        lambda: OpenSpiel("no_such_game"),
        lambda: OpenSpiel("mfg_crowd_modelling"),
        lambda: Gymnasium("NoSuchGame-v0"),
        lambda: TextArena("NoSuchGame-v0"),
        lambda: TextArena("UsedCar-v0-balanced"),  # registered, but not in the package
        lambda: Parallel("pettingzoo.classic.no_such_game:parallel_env"),
    ],
)
def test_a_game_that_does_not_exist_is_named(
    make: Callable[[], Environment], capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(EntrypointError):
        make()
    assert len(capfd.readouterr().err.splitlines()) <= 3, "the library says all that it knows"


async def test_an_adapter_is_hosted_by_name() -> None:
    game = hosted(
        "troupe.workflow.environments.adapters.openspiel:OpenSpiel", {"game": "kuhn_poker"}
    )
    reset = await game.reset(4)
    here = OpenSpiel("kuhn_poker").reset(4)
    assert reset.obs["p0"].text == here.obs["p0"].text
    for name, array in here.obs["p0"].arrays.items():
        np.testing.assert_array_equal(reset.obs["p0"].arrays[name], array)
    with pytest.raises(IllegalMoveError):
        await game.step({"p0": 5})
    await game.close()


def test_a_game_without_declared_length_is_not_cut_short() -> None:
    """A declaration that is too short is reported, not silently truncated."""
    with pytest.raises(EnvironmentContractError, match="longer than the environment declares"):
        play_randomly(rps(max_steps=1), 0)
    assert play_randomly(Nim(), 0).steps[-1].current == ()


def company(kind: Any = Parallel, **parts: Part) -> Any:
    def make(**args: Any) -> Any:
        return Cast(**args) if kind is Parallel else parallel_to_aec(Cast(**args))

    return kind(make, make_args={"parts": parts}, declared={"max_steps": 40})


@pytest.mark.parametrize("kind", [Parallel, Aec])
def test_seats_that_leave_early_do_not_end_the_episode_of_the_others(kind: Any) -> None:
    steps = play_randomly(company(kind, a=Part(leaves=4), b=Part(leaves=1)), 0).steps
    assert len(steps) == (4 if kind is Parallel else 1 + 1 + 3)
    assert "b" not in steps[-1].current + steps[-2].current
    assert sum(step.rewards.get("a", 0.0) for step in steps) == 4


def test_seats_may_join_an_episode_late_or_never() -> None:
    parts = {"a": Part(leaves=5), "b": Part(joins=2, leaves=4), "c": Part(joins=50)}
    steps = play_randomly(company(**parts), 0).steps
    assert [step.current for step in steps] == [("a",), ("a", "b"), ("a", "b"), ("a",), ()]
    assert check(lambda: company(**parts), seeds=(0,)).ok


@pytest.mark.parametrize(
    ("kind", "make", "remedy"),
    [
        (Parallel, "pettingzoo.classic.tictactoe_v3:env", "`Aec`"),
        (Aec, "pettingzoo.classic.rps_v2:parallel_env", "`Parallel`"),
    ],
)
def test_a_pettingzoo_environment_of_the_other_kind_names_its_adapter(
    kind: Any, make: str, remedy: str
) -> None:
    with pytest.raises(EntrypointError, match=remedy) as refused:
        kind(make)
    assert refused.value.field == "make"


@pytest.mark.parametrize(
    "mask",
    [
        [1],
        [1, 1, 1, 1],
        [[1, 1, 1]],
        "110",
        {1},
        [np.nan, 0, 1],
        [0, 255, 0],
        [0.5, 1, 0],
        [None, 1, 0],
        ["a", "b", "c"],
    ],
)
def test_a_mask_that_is_not_one_number_for_each_action_breaks_the_contract(mask: Any) -> None:
    game = company(a=Part(), b=Part(masks={1: mask}))
    with pytest.raises(EnvironmentContractError, match="action_mask has ") as broken:
        play_randomly(game, 0)
    assert broken.value.field == "action_mask"


@pytest.mark.parametrize("names", [("left",), ("left", "right", "up")])
def test_names_of_moves_are_one_for_each_action(names: Any) -> None:
    with pytest.raises(EnvironmentContractError, match="has 2 actions"):
        Gymnasium("CartPole-v1", moves=names).reset(0)


NESTED = spaces.Dict({"a": spaces.Tuple([spaces.Discrete(3, start=5), spaces.Text(2)])})


@pytest.mark.parametrize(
    ("moves", "right", "wrong"),
    [
        (spaces.Discrete(3, start=10), 12, 2),
        (spaces.MultiBinary(2), [0, 1], [0, 2]),
        (spaces.MultiDiscrete([[2, 3]], start=[[1, 0]]), [[2, 2]], [[0, 2]]),
        (spaces.Box(0, 255, (2,), np.uint8), [3, 255], [3, 300]),
        (spaces.Box(0, 9, (1,), np.int64), [3], [3.5]),
        (spaces.Box(-1, 1, (2,)), [0.5, -1], [0.5, -1.5]),
        (spaces.Box(-np.inf, np.inf, (1,)), [1e30], [1e39]),  # infinite as float32
        (spaces.Box(-np.inf, np.inf, (1,), np.float64), [1e39], [np.inf]),
        (NESTED, {"a": [6, "ab"]}, {"a": [6, "abc"]}),
        (NESTED, {"a": [6, "ab"]}, {"a": [6]}),
        (NESTED, {"a": [6, "ab"]}, {"a": [6, "ab"], "b": 1}),
        (spaces.Sequence(spaces.Discrete(2)), [0, 1, 1], [0, 2]),
        (spaces.OneOf([spaces.Discrete(2), spaces.Text(3)]), [1, "ab"], [0, "ab"]),
        (spaces.OneOf([spaces.Discrete(2), spaces.Text(3)]), [0, 1], [2, 1]),
    ],
    ids=str,
)
def test_json_actions_are_elements_of_any_space(moves: Any, right: Any, wrong: Any) -> None:
    game = Gymnasium(f"{HERE}:Solo-v0", make_args={"moves": moves}, max_steps=3)
    game.reset(0)
    assert game.step({"player": right}).current == ("player",)
    for action in (wrong, None, "x" * 9, {"z": 1}):
        with pytest.raises(IllegalMoveError):
            game.step({"player": action})
    game.step({"player": right})


def test_words_are_no_numbers_of_an_action() -> None:
    assert numbers("nan of [0.5, -1e3] goes to infinity: 1e999") == [0.5, -1e3]


@pytest.mark.parametrize(
    ("parts", "text"),
    [
        ({"observation": 1}, "1"),
        ({"obs": 1}, "obs: 1"),
        ({"board": 1, "hand": 0}, "board: 1\nhand: 0"),
        ({"observation": 1, "hand": 0}, "hand: 0\nobservation: 1"),
    ],
)
def test_a_mask_among_parts_of_an_observation_takes_none_of_them_away(
    parts: dict[str, int], text: str
) -> None:
    single = {name: spaces.Discrete(1, start=value) for name, value in parts.items()}
    mask = spaces.Box(np.array([0, 1]), np.array([0, 1]), dtype=np.int8)
    seen = spaces.Dict({**single, "action_mask": mask})
    game = Gymnasium(f"{HERE}:Solo-v0", make_args={"seen": seen}, max_steps=3)
    shown = game.reset(0).obs["player"]
    assert shown.text == text
    assert shown.legal == {"1": 1}
    assert len(shown.arrays) == len(parts)


def test_an_empty_mask_of_an_info_leaves_the_mask_of_the_observation() -> None:
    mask = spaces.Box(np.array([0, 1]), np.array([0, 1]), dtype=np.int8)
    seen = spaces.Dict({"observation": spaces.Discrete(2), "action_mask": mask})
    game = Gymnasium(f"{HERE}:Unmasked-v0", make_args={"seen": seen}, max_steps=3)
    assert game.reset(0).obs["player"].legal == {"1": 1}


@pytest.mark.parametrize("nested", [False, True])
def test_an_action_space_without_json_values_is_refused_by_name(nested: bool) -> None:
    graph = spaces.Graph(spaces.Box(-1, 1, (2,)), None)
    moves = spaces.Tuple([graph]) if nested else graph
    with pytest.raises(EntrypointError, match=r"'player' has the action space Graph"):
        Gymnasium(f"{HERE}:Solo-v0", make_args={"moves": moves})
