"""TextArena games (Guertler et al. 2025): `textarena` on PyPI."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from troupe.workflow.environments.interface import (
    Action,
    Environment,
    Observation,
    Properties,
    Reset,
    Step,
)
from troupe.workflow.errors import EntrypointError, missing_library


class TextArena(Environment):
    """One game of TextArena's registry, such as `KuhnPoker-v0`; seats are `p0`, `p1`, ...

    Moves are texts, and the game itself handles illegal ones: it answers with a warning, and ends
    after too many. Rewards arrive at the end. `declared`: fields of `Properties` that TextArena
    lacks: `zero_sum`, `max_steps`, ... Observations repeat the whole episode, as TextArena's
    wrapper for language models does: play them with `PlayRules(history="latest")`.

    TextArena uses Python's global random generators, whose state is swapped during each call, so
    that games are independent.
    """

    def __init__(
        self,
        id: str,
        *,
        players: int = 2,
        make_args: Mapping[str, Any] | None = None,
        declared: Mapping[str, Any] | None = None,
    ) -> None:
        try:
            import textarena
            from textarena.wrappers import LLMObservationWrapper
        except ImportError as error:
            raise missing_library("TextArena", "textarena", error) from error
        if id not in textarena.envs.registration.ENV_REGISTRY:
            raise EntrypointError(
                f"TextArena has no game '{id}'",
                field="id",
                value=id,
                remedy="`textarena.pprint_registry_detailed()` lists them.",
            )
        self._make: Callable[[], Any] = lambda: textarena.make(id, **(make_args or {}))
        self._wrap: Any = LLMObservationWrapper
        self._env: Any = None
        self._players = players
        self._seats = tuple(f"p{player}" for player in range(players))
        self._states: tuple[Any, Any] | None = None
        try:
            with self._randomness(0):
                self._make()
        except Exception as error:  # games raise errors of any type
            raise EntrypointError(
                f"TextArena cannot make '{id}': {type(error).__name__}: "
                f"{' '.join(str(error).split())[:300]}",
                field="id",
                value=id,
                remedy="Some games need NLTK word lists, a key, or a newer Python version.",
            ) from error
        self._properties = Properties(
            **{
                "name": f"textarena/{id}",
                "seats": self._seats,
                "illegal": "game",
                **(declared or {}),
            }
        )

    @property
    def properties(self) -> Properties:
        """The declared properties; the game handles illegal moves."""
        return self._properties

    def reset(self, seed: int) -> Reset:
        """Begin a game."""
        self._states = None
        with self._randomness(seed):
            # Wrappers keep observations of earlier games.
            env = self._make()
            self._env = env if _speaks(env) else self._wrap(env)
            self._env.reset(num_players=self._players, seed=seed % 2**31)
            return Reset(self._seats, *self._turn())

    def step(self, actions: Mapping[str, Action]) -> Step:
        """Play the text of the seat whose turn it is."""
        (text,) = actions.values()
        with self._randomness():
            over, info = self._env.step(action=str(text))
            if not over:
                current, obs = self._turn()
                going = dict.fromkeys(self._seats, False)
                return Step(obs, {}, going, going, current, dict.fromkeys(current, info))
            rewards, infos = self._env.close()
        ended = dict.fromkeys(self._seats, True)
        return Step(
            {},
            # Some games swap reason and reward, which the contract refuses.
            {seat: (rewards or {}).get(p, 0.0) for p, seat in enumerate(self._seats)},
            ended,
            dict.fromkeys(self._seats, False),
            (),
            {seat: infos.get(p, {}) for p, seat in enumerate(self._seats)},
        )

    def _turn(self) -> tuple[tuple[str, ...], dict[str, Observation]]:
        player, text = self._env.get_observation()
        seat = self._seats[player]
        return (seat,), {seat: Observation(str(text).strip())}

    @contextmanager
    def _randomness(self, seed: int | None = None) -> Iterator[None]:
        """Swap in this game's state of the global random generators, and restore the old state
        afterwards."""
        others = random.getstate(), np.random.get_state()
        if self._states is not None:
            random.setstate(self._states[0])
            np.random.set_state(self._states[1])
        elif seed is not None:
            random.seed(seed)
            np.random.seed(seed % 2**32)
        try:
            yield
        finally:
            self._states = random.getstate(), np.random.get_state()
            random.setstate(others[0])
            np.random.set_state(others[1])


def _speaks(env: Any) -> bool:
    """Return whether a wrapper of the game already joins its messages into one text."""
    from textarena.core import ObservationWrapper, Wrapper

    while isinstance(env, Wrapper):
        if isinstance(env, ObservationWrapper):
            return True
        env = env.env
    return False
