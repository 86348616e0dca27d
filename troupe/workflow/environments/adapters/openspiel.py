"""OpenSpiel games (Lanctot et al. 2019): `open_spiel` on PyPI."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np

from troupe.workflow.environments.interface import (
    Action,
    Environment,
    IllegalRule,
    Observation,
    Properties,
    Reset,
    Step,
)
from troupe.workflow.errors import EntrypointError, IllegalMoveError, missing_library

# Prefix of moves in some games: "[P0]Bid: 3".
_MOVER: Final = "[P{}]"

Describe = Callable[[Any, int], str]
"""(pyspiel state, player) -> text of the player's observation, without hidden information."""


class OpenSpiel(Environment):
    """One OpenSpiel game by name, such as `kuhn_poker` or `goofspiel(num_cards=4)`.

    Seats are `p0`, `p1`, ...; chance is drawn from the seed. A seat sees its information state as
    OpenSpiel's text, or the text of `describe`; tensors are in `arrays`. Mean-field games are not
    supported.
    """

    def __init__(
        self,
        game: str,
        *,
        describe: Describe | None = None,
        rules: str = "",
        illegal: IllegalRule = "resample",
        illegal_reward: float | None = None,
    ) -> None:
        try:
            import pyspiel
        except ImportError as error:
            raise missing_library("OpenSpiel", "open_spiel", error) from error
        try:
            # `load_game` prints all names for an unknown one.
            if game.partition("(")[0] not in pyspiel.registered_names():
                raise pyspiel.SpielError(f"Unknown game '{game}'")
            self.game = pyspiel.load_game(game)
        except pyspiel.SpielError as error:
            raise EntrypointError(
                f"OpenSpiel has no such game: {str(error).splitlines()[0]}",
                field="game",
                value=game,
                remedy="`pyspiel.registered_names()` lists them.",
            ) from error
        kind = self.game.get_type()
        if kind.dynamics == pyspiel.GameType.Dynamics.MEAN_FIELD:
            raise EntrypointError(
                f"'{game}' is a mean-field game, which has no seats",
                field="game",
                value=game,
                remedy="Use a sequential or a simultaneous game.",
            )
        utility = pyspiel.GameType.Utility
        self._describe = describe or self._own_text
        self._players = range(self.game.num_players())
        self._seats = tuple(f"p{player}" for player in self._players)
        self._state: Any = None
        self._random = random.Random()
        worst = self.game.min_utility()
        if illegal_reward is None:
            illegal_reward = worst if math.isfinite(worst) else -1.0
        self._properties = Properties(
            name=f"openspiel/{game}",
            seats=self._seats,
            rules=rules,
            simultaneous=kind.dynamics == pyspiel.GameType.Dynamics.SIMULTANEOUS,
            zero_sum=kind.utility == utility.ZERO_SUM,
            cooperative=kind.utility == utility.IDENTICAL,
            illegal=illegal,
            illegal_reward=illegal_reward,
            max_steps=self.game.max_game_length(),
        )

    @property
    def properties(self) -> Properties:
        """The properties that OpenSpiel declares."""
        return self._properties

    def reset(self, seed: int) -> Reset:
        """Begin a game."""
        self._random = random.Random(seed)
        self._state = self.game.new_initial_state()
        self._draw_chance()
        return Reset(self._seats, self._current(), self._observe())

    def step(self, actions: Mapping[str, Action]) -> Step:
        """Apply a move, or the joint move of a simultaneous node."""
        state = self._state
        moves = {self._seats.index(seat): action for seat, action in actions.items()}
        for player, action in moves.items():
            if action not in state.legal_actions(player):
                raise IllegalMoveError(
                    f"player {player} cannot do {action!r}",
                    seat=self._seats[player],
                    value=action,
                    remedy="Choose one of `legal`.",
                )
        before = self._state.returns()
        if state.is_simultaneous_node():
            # Players without a move in this node still have an entry.
            state.apply_actions([moves.get(player, 0) for player in self._players])
        else:
            state.apply_action(next(iter(moves.values())))
        self._draw_chance()
        over = state.is_terminal()
        # `rewards()` omits rewards of chance nodes and skipped nodes.
        rewards = [now - was for now, was in zip(state.returns(), before, strict=True)]
        return Step(
            self._observe(),
            dict(zip(self._seats, rewards, strict=True)),
            dict.fromkeys(self._seats, over),
            dict.fromkeys(self._seats, False),
            self._current(),
        )

    def _draw_chance(self) -> None:
        while self._state.is_chance_node():
            outcomes, weights = zip(*self._state.chance_outcomes(), strict=True)
            self._state.apply_action(self._random.choices(outcomes, weights)[0])

    def _current(self) -> tuple[str, ...]:
        state = self._state
        if state.is_terminal():
            return ()
        if state.is_simultaneous_node():
            return tuple(self._seats[p] for p in self._players if state.legal_actions(p))
        return (self._seats[state.current_player()],)

    def seen(self, state: Any, player: int) -> Observation:
        """Return the observation of `player`, which moves in `state`, without `arrays`."""
        return Observation(self._describe(state, player), _legal(state, player))

    def _observe(self) -> dict[str, Observation]:
        current = self._current()
        return {
            seat: Observation(
                self._describe(self._state, player),
                _legal(self._state, player) if seat in current else None,
                self._arrays(player),
            )
            for player, seat in enumerate(self._seats)
        }

    def _arrays(self, player: int) -> dict[str, Any]:
        kind, arrays = self.game.get_type(), {}
        if kind.provides_information_state_tensor:
            tensor = self._state.information_state_tensor(player)
            arrays["information_state"] = np.array(tensor, np.float32)
        if kind.provides_observation_tensor:
            arrays["observation"] = np.array(self._state.observation_tensor(player), np.float32)
        return arrays

    def _own_text(self, state: Any, player: int) -> str:
        kind = self.game.get_type()
        text = ""
        if kind.provides_observation_string:
            text = str(state.observation_string(player))
        if kind.provides_information_state_string:
            # Empty in some games of perfect information.
            text = str(state.information_state_string(player)) or text
        return text if text.strip() else f"Moves so far: {state.history_str() or 'none'}"


def _legal(state: Any, player: int) -> dict[str, Action]:
    """Return the legal moves by label."""
    mover, legal = _MOVER.format(player), {}
    for action in state.legal_actions(player):
        label = state.action_to_string(player, action).removeprefix(mover)
        # Labels may be ambiguous.
        legal[label if label not in legal else f"{label} #{action}"] = action
    return legal
