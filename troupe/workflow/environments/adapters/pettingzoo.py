"""PettingZoo environments (Terry et al. 2021), AEC and Parallel: `pettingzoo` on PyPI.

PettingZoo's agents are seats.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from troupe.workflow.environments.adapters.spaces import (
    SpacesEnvironment,
    check_playable,
    native,
)
from troupe.workflow.environments.interface import Action, Observation, Properties, Reset, Step
from troupe.workflow.errors import EntrypointError, missing_library
from troupe.workflow.loading import load_attribute

Make = str | Callable[..., Any]
"""The factory of the environment, or its name: `pettingzoo.classic.rps_v2:parallel_env`."""

Describe = Callable[[Any, str, Any], str]
"""(environment, seat, observation) -> text."""


class _PettingZoo(SpacesEnvironment):
    """Base class of both kinds.

    `declared`: fields of `Properties` that PettingZoo lacks: `zero_sum`, `max_steps`, `rules`, ...
    `moves`: names of discrete actions, in order. The text is the result of `describe`, else the
    `ansi` rendering if the environment was made with it, else numbers.
    """

    simultaneous: bool

    def __init__(
        self,
        make: Make,
        *,
        make_args: Mapping[str, Any] | None = None,
        moves: Sequence[str] | None = None,
        describe: Describe | None = None,
        declared: Mapping[str, Any] | None = None,
    ) -> None:
        try:
            import pettingzoo  # noqa: F401
        except ImportError as error:
            raise missing_library("PettingZoo", "pettingzoo", error) from error
        function = load_attribute(make, "make") if isinstance(make, str) else make
        self._env: Any = function(**(make_args or {}))
        if hasattr(self._env, "agent_iter") == self.simultaneous:
            kind, other = ("AEC", "Aec") if self.simultaneous else ("parallel", "Parallel")
            raise EntrypointError(
                f"makes a PettingZoo environment of the {kind} kind",
                field="make",
                value=make if isinstance(make, str) else getattr(make, "__name__", str(make)),
                remedy=f"Use the adapter `{other}`, or PettingZoo's conversions between the two.",
            )
        self._moves = moves
        self._describe = describe
        name = getattr(self._env, "metadata", {}).get("name") or type(self._env).__name__
        self._properties = Properties(
            **{
                "name": f"pettingzoo/{name}",
                "seats": tuple(self._env.possible_agents),
                "simultaneous": self.simultaneous,
                **(declared or {}),
            }
        )
        self._seats = self._properties.seats
        for seat in self._seats:
            check_playable(self._env.action_space(seat), seat)
        self._ended: set[str] = set()

    def _flags(
        self,
        terminations: Mapping[str, Any],
        truncations: Mapping[str, Any],
        current: Sequence[str],
    ) -> tuple[dict[str, bool], dict[str, bool]]:
        """Return terminations and truncations by seat. When no seat is left, seats that never
        joined the episode end with it."""
        over = {seat: bool(flag) for seat, flag in terminations.items()}
        cut = {seat: bool(flag) for seat, flag in truncations.items()}
        self._ended |= {seat for flags in (over, cut) for seat, flag in flags.items() if flag}
        if not current:
            over |= dict.fromkeys(set(self._seats) - self._ended, True)
        return over, cut

    def _seen_by(self, seat: str, seen: Any, info: Mapping[str, Any]) -> Observation:
        describe = self._describe and partial(self._describe, self._env, seat)
        return self._observation(self._env.action_space(seat), seen, info, describe)


class Parallel(_PettingZoo):
    """A `ParallelEnv`: all active seats move simultaneously."""

    simultaneous = True

    def reset(self, seed: int) -> Reset:
        """Begin an episode."""
        seen, infos = self._env.reset(seed=seed % 2**31)
        self._ended.clear()
        # All possible seats: some may join the episode later.
        return Reset(self._seats, tuple(self._env.agents), self._observe(seen, infos), infos)

    def step(self, actions: Mapping[str, Action]) -> Step:
        """Play a joint move."""
        moves = {
            seat: native(self._env.action_space(seat), actions[seat], seat)
            for seat in self._env.agents
        }
        seen, rewards, terminations, truncations, infos = self._env.step(moves)
        current = tuple(self._env.agents)
        return Step(
            self._observe(seen, infos),
            {seat: float(reward) for seat, reward in rewards.items()},
            *self._flags(terminations, truncations, current),
            current,
            infos,
        )

    def _observe(
        self, seen: Mapping[str, Any], infos: Mapping[str, Mapping[str, Any]]
    ) -> dict[str, Observation]:
        # Observations of finished seats may have no mask.
        return {s: self._seen_by(s, o, infos.get(s, {})) for s, o in seen.items()}


class Aec(_PettingZoo):
    """An `AECEnv`: one seat moves after another."""

    simultaneous = False

    def reset(self, seed: int) -> Reset:
        """Begin an episode."""
        self._env.reset(seed=seed % 2**31)
        self._ended.clear()
        return Reset(self._seats, self._current(), self._observe())

    def step(self, actions: Mapping[str, Action]) -> Step:
        """Play the move of the seat whose turn it is."""
        env = self._env
        (seat,) = actions
        env.step(native(env.action_space(seat), actions[seat], seat))
        # These are the last step's, of every seat that has joined.
        rewards = {s: float(env.rewards.get(s, 0.0)) for s in self._seats}
        terminations, truncations = dict(env.terminations), dict(env.truncations)
        # Finished seats must make an empty move before the others may move.
        while env.agents and (
            env.terminations[env.agent_selection] or env.truncations[env.agent_selection]
        ):
            env.step(None)
        current = self._current()
        flags = self._flags(terminations, truncations, current)
        return Step(self._observe(), rewards, *flags, current)

    def _current(self) -> tuple[str, ...]:
        return (self._env.agent_selection,) if self._env.agents else ()

    def _observe(self) -> dict[str, Observation]:
        env = self._env
        return {
            seat: self._seen_by(seat, env.observe(seat), env.infos.get(seat, {}))
            for seat in self._current()
        }
