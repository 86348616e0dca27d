"""Messages between a game and its players are checked against the interface."""

from __future__ import annotations

import contextlib
import math
from dataclasses import asdict, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.workflow.environments.zoo import Nim, Pennies
from troupe.workflow.environments import (
    EnvironmentContractError,
    EpisodeOverError,
    IllegalMoveError,
    Observation,
    ObservationTooLargeError,
    Reset,
    RewardNotFiniteError,
    Seating,
    SeatingError,
    Step,
    UnknownPlayerError,
    child,
    legal_help,
    read_move,
)
from troupe.workflow.environments.conformance import plain_step, play_randomly
from troupe.workflow.environments.contract import Contract


def begun(seed: int = 0) -> tuple[Contract, Nim]:
    game = Nim()
    contract = Contract(game.properties)
    contract.began(game.reset(seed))
    return contract, game


def step(**changes: Any) -> Step:
    seen = {"left": Observation("?"), "right": Observation("?")}
    sound = Step(seen, {"left": 0.0}, {}, {}, ("right",))
    return replace(sound, **changes)


def test_only_seats_whose_turn_it_is_move() -> None:
    contract, _ = begun()
    contract.moves({"left": 1})
    for strange in ({}, {"right": 1}, {"left": 1, "right": 1}, {"nobody": 1}):
        with pytest.raises(UnknownPlayerError, match="it is the turn of 'left'"):
            contract.moves(strange)


def test_a_move_that_is_not_listed_never_reaches_the_game() -> None:
    contract, _ = begun()
    with pytest.raises(IllegalMoveError, match="'left' cannot do 3") as caught:
        contract.moves({"left": 3})
    assert caught.value.remedy == "Legal: 1, 2."


def test_nothing_moves_before_the_beginning_or_after_the_end() -> None:
    contract = Contract(Nim.declared)
    with pytest.raises(EpisodeOverError):
        contract.moves({"left": 1})
    contract, _ = begun()
    both = {"left": True, "right": True}
    contract.went(step(current=(), terminations=both))
    with pytest.raises(EpisodeOverError):
        contract.moves({"left": 1})


@pytest.mark.parametrize("reward", [math.nan, math.inf, "1", None, True])
def test_a_reward_is_a_finite_number(reward: Any) -> None:
    contract, _ = begun()
    with pytest.raises(RewardNotFiniteError) as caught:
        contract.went(step(rewards={"left": reward}))
    assert caught.value.field == "step.rewards.left"


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"obs": {"stranger": Observation("?")}}, "step.obs"),
        ({"rewards": {"stranger": 1.0}}, "step.rewards"),
        ({"terminations": {"stranger": True}}, "step.terminations"),
        ({"current": ("stranger",)}, "step.current"),
        ({"current": ()}, "step.current"),
        ({"current": ("right", "right")}, "step.current"),
        ({"current": ("left", "right")}, "step.current"),
        ({"truncations": {"right": True}}, "step.current"),
        ({"obs": {}}, "step.obs"),
        ({"obs": {"right": "a text"}}, "step.obs.right"),
        ({"obs": ["a text"]}, "step.obs"),
        ({"rewards": [1.0, -1.0]}, "step.rewards"),
        ({"terminations": None}, "step.terminations"),
        ({"obs": {"right": Observation("?", {})}}, "step.obs.right.legal"),
    ],
)
def test_a_malformed_step_names_what_is_wrong(changes: dict[str, Any], field: str) -> None:
    contract, _ = begun()
    with pytest.raises(EnvironmentContractError) as caught:
        contract.went(step(**changes))
    assert caught.value.field == field


@pytest.mark.parametrize("given", [None, 5, ({}, {}, {}, {}, ())])
def test_an_invalid_step_or_reset_is_named(given: Any) -> None:
    contract, _ = begun()
    with pytest.raises(EnvironmentContractError, match=r"^step is .* Return a `Step`") as caught:
        contract.went(given)
    assert caught.value.field == "step"
    with pytest.raises(EnvironmentContractError, match=r"^reset is .* Return a `Reset`"):
        contract.began(given)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"agents": ("left", "stranger")}, "reset.agents"),
        ({"agents": ()}, "reset.agents"),
        ({"agents": ("left", "left")}, "reset.agents"),
        ({"current": ()}, "reset.current"),
        ({"obs": {}}, "reset.obs"),
    ],
)
def test_a_malformed_reset_names_what_is_wrong(changes: dict[str, Any], field: str) -> None:
    sound = Reset(("left", "right"), ("left",), {"left": Observation("?")})
    with pytest.raises(EnvironmentContractError) as caught:
        Contract(Nim.declared).began(replace(sound, **changes))
    assert caught.value.field == field


def test_a_seat_that_is_done_does_not_come_back() -> None:
    contract = Contract(replace(Nim.declared, seats=("left", "right", "third")))
    seen = {seat: Observation("?") for seat in ("left", "right", "third")}
    contract.began(Reset(("left", "right", "third"), ("left",), seen))
    contract.went(Step(seen, {}, {"left": True}, {}, ("right",)))
    with pytest.raises(EnvironmentContractError, match="seats move that have ended"):
        contract.went(Step(seen, {}, {}, {}, ("left",)))


def test_an_episode_longer_than_declared_is_refused() -> None:
    contract = Contract(replace(Nim.declared, max_steps=2))
    contract.began(Nim().reset(0))
    contract.went(step())
    with pytest.raises(EnvironmentContractError, match="longer than the environment declares"):
        contract.went(step())


def test_an_observation_larger_than_declared_is_refused() -> None:
    contract = Contract(replace(Nim.declared, max_observation_chars=3))
    with pytest.raises(ObservationTooLargeError, match="'left' sees 6 characters; 3 are declared"):
        contract.began(Nim().reset(0))


@pytest.mark.parametrize("make", [Nim, Pennies])
@pytest.mark.parametrize("seed", range(3))
def test_records_survive_their_encoding(make: type[Nim | Pennies], seed: int) -> None:
    record = play_randomly(make(), seed)

    def travelled(message: dict[str, Any]) -> dict[str, Any]:
        return child.unpack(child.pack(message))

    assert child.to_properties(travelled(asdict(make.declared))) == make.declared
    steps = [child.to_step(travelled(child.from_step(step))) for step in record.steps]
    assert [plain_step(s) for s in steps] == [plain_step(s) for s in record.steps]


CARDS = Observation("", {"Pass": 0, "Bet": 1, "Bet 2": 2, "x(0,1)": 3, "-1": 4, "1": 5})


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("Bet", 1),
        ("  bet ", 1),
        ("bet  2", 2),
        ("[Pass]", 0),
        ("I could [bet], but I [pass]", 0),
        ("I think about a bet. No: pass.", 0),
        ("pass or bet 2", 2),
        ("x(0,1)!", 3),
        ("my move: -1", 4),
        ("my move: 1", 5),
    ],
)
def test_a_move_is_read_from_what_was_said(text: str, action: int) -> None:
    assert read_move(text, CARDS) == action


@pytest.mark.parametrize("text", ["", "fold", "alphabet", "passport", "[]", "11"])
def test_text_that_names_no_move_is_illegal(text: str) -> None:
    with pytest.raises(IllegalMoveError) as caught:
        read_move(text, CARDS, "p0")
    assert caught.value.seat == "p0"
    assert caught.value.remedy == "Legal moves: Pass, Bet, Bet 2, x(0,1), -1, 1."


def test_where_no_moves_are_listed_the_text_is_the_move() -> None:
    assert read_move(" any text ", Observation("")) == "any text"
    assert legal_help(Observation("")) == ""


@given(st.text(), st.dictionaries(st.text(), st.integers(), max_size=5))
def test_reading_gives_a_legal_move_or_the_one_error(text: str, legal: dict[str, int]) -> None:
    with contextlib.suppress(IllegalMoveError):
        assert read_move(text, Observation("", legal)) in legal.values()


@given(st.integers(1, 5), st.integers(0, 10**12))
def test_consecutive_seeds_give_every_agent_every_seat_equally_often(n: int, first: int) -> None:
    seats = [f"seat{i}" for i in range(n)]
    agents = [f"agent{i}" for i in range(n)]
    count = math.factorial(n)
    seatings = [Seating.of(seats, agents, permutation=first + k) for k in range(count)]
    assert len({tuple(s.agent_of.values()) for s in seatings}) == count
    for seat in seats:
        held = [s.agent_of[seat] for s in seatings]
        assert {held.count(agent) for agent in agents} == {count // n}


def test_agents_are_seated_as_said() -> None:
    seats = ("a", "b", "c")
    assert Seating.of(seats, ["solo"]).seats_of("solo") == seats
    team = Seating.of(seats, {"a": "x", "b": "y", "c": "x"}, permutation=0)
    assert (team.seats_of("x"), team.agents) == (("a", "c"), ("x", "y"))
    for agents in (["x", "y"], ["w", "x", "y", "z"], {"a": "x"}):
        with pytest.raises(SeatingError, match="do not match"):
            Seating.of(seats, agents)
