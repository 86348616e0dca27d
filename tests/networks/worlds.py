"""Environments of Gymnasium and PettingZoo whose spaces, masks and agents a test chooses."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import gymnasium
import numpy as np
from pettingzoo import ParallelEnv

from troupe.networks.environments.gymnasium import GymnasiumCopies, PettingZooCopies

HERE = "tests.networks.worlds"
NUMBERS = gymnasium.spaces.Box(-np.inf, np.inf, (2,))
TWO = gymnasium.spaces.Discrete(2)


class Solo(gymnasium.Env[Any, Any]):
    """An environment that asserts that every action is in its space; it never ends by itself.

    `masks`: what `info` holds as the action mask after reset and after each step; None: nothing."""

    def __init__(
        self, seen: Any = NUMBERS, moves: Any = TWO, masks: Sequence[Any] = (), name: str = ""
    ) -> None:
        self.observation_space, self.action_space, self._masks = seen, moves, masks
        self.name, self._step = name, 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.observation_space.seed(seed)
        self._step = 0
        return self.observation_space.sample(), self._info()

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert self.action_space.contains(action), f"{action!r} is not in {self.action_space}"
        self._step += 1
        reward = float(np.sum(action)) if isinstance(action, np.ndarray | np.integer) else 0.0
        return self.observation_space.sample(), reward, False, False, self._info()

    def _info(self) -> dict[str, Any]:
        mask = self._masks[self._step] if self._step < len(self._masks) else None
        return {} if mask is None else {"action_mask": mask}


class Unmasked(Solo):
    """`Solo` whose infos name a mask that they do not have."""

    def _info(self) -> dict[str, Any]:
        return {"action_mask": None}


gymnasium.register("Solo-v0", Solo, disable_env_checker=True, order_enforce=False)
gymnasium.register("Unmasked-v0", Unmasked, disable_env_checker=True, order_enforce=False)


def solo(copies: int = 2, steps: int = 4, **made: Any) -> GymnasiumCopies:
    return GymnasiumCopies(copies, f"{HERE}:Solo-v0", steps, made)


@dataclass(frozen=True)
class Part:
    """An agent's part of an episode."""

    joins: int = 0
    """After how many steps it is there."""
    leaves: int = 99
    """After how many steps it is gone."""
    cut: bool = False
    """Whether it is truncated, not terminated."""
    masks: Mapping[int, Any] | None = None
    """Its masks, by the number of steps that were made."""
    returns: int = 0
    """After how many steps it is there again; 0: never."""


class Cast(ParallelEnv[str, Any, Any]):
    """A parallel environment of agents that come and go. Everyone sees the number of steps made and
    gets 1 for each; an action from an agent that is not there is an error."""

    metadata: ClassVar = {"name": "cast"}
    render_mode = None

    def __init__(self, parts: Mapping[str, Part], in_observation: bool = False) -> None:
        self.possible_agents, self._parts = list(parts), parts
        self._in_observation = in_observation
        self.agents: list[str] = []

    def observation_space(self, agent: str) -> Any:
        seen = gymnasium.spaces.Box(0, 100, (1,))
        mask = gymnasium.spaces.MultiBinary(3)
        if not self._in_observation:
            return seen
        return gymnasium.spaces.Dict({"observation": seen, "action_mask": mask})

    def action_space(self, agent: str) -> Any:
        return gymnasium.spaces.Discrete(3, start=10)

    def reset(self, seed: int | None = None, options: Any = None) -> tuple[Any, Any]:
        self._step = 0
        self.agents = [name for name, part in self._parts.items() if part.joins == 0]
        return self._seen(self.agents)

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, Any]:
        assert sorted(actions) == sorted(self.agents)
        for name, action in actions.items():
            assert 10 <= action < 13, action
            mask = (self._parts[name].masks or {}).get(self._step)
            assert mask is None or mask[action - 10], "an illegal action"
        self._step += 1
        were = self.agents
        gone = {name: self._parts[name].leaves <= self._step for name in were}
        over = {name: gone[name] and not self._parts[name].cut for name in were}
        cut = {name: gone[name] and self._parts[name].cut for name in were}
        self.agents = [name for name in were if not gone[name]]
        self.agents += [
            name for name, part in self._parts.items() if self._step in (part.joins, part.returns)
        ]
        seen = [*were, *self.agents]
        return *self._seen(seen, rewards=were), over, cut, self._infos(seen)

    def _seen(self, names: Sequence[str], rewards: Sequence[str] | None = None) -> tuple[Any, ...]:
        seen: dict[str, Any] = {}
        for name in names:
            seen[name] = np.array([self._step], np.float32)
            if self._in_observation:
                mask = (self._parts[name].masks or {}).get(self._step, np.ones(3, np.int8))
                seen[name] = {"observation": seen[name], "action_mask": mask}
        if rewards is None:
            return seen, self._infos(names)
        return seen, dict.fromkeys(rewards, 1.0)

    def _infos(self, names: Sequence[str]) -> dict[str, Any]:
        if self._in_observation:
            return {name: {} for name in names}
        masks = {name: (self._parts[name].masks or {}).get(self._step) for name in names}
        return {n: {} if mask is None else {"action_mask": mask} for n, mask in masks.items()}


def cast(copies: int = 2, steps: int = 6, in_observation: bool = False, **parts: Part) -> Any:
    return PettingZooCopies(
        copies, f"{HERE}:Cast", steps, parts=parts, in_observation=in_observation
    )


class Twisted(Cast):
    """Agents `a` and `b` that stay, in an environment whose results `reset` and `step`
    transform."""

    def __init__(self, reset: Callable[[Any], Any], step: Callable[[Any], Any]) -> None:
        super().__init__({"a": Part(), "b": Part()})
        self._twist_reset, self._twist_step = reset, step

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        return self._twist_reset(super().reset(seed))

    def step(self, actions: Any) -> Any:
        return self._twist_step(super().step(actions))


def _as_it_is(given: Any) -> Any:
    return given


def twisted(
    reset: Callable[[Any], Any] = _as_it_is, step: Callable[[Any], Any] = _as_it_is
) -> PettingZooCopies:
    return PettingZooCopies(2, f"{HERE}:Twisted", 3, reset=reset, step=step)
