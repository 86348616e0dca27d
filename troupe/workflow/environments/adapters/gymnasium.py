"""Gymnasium environments (Towers et al. 2024) as games of one seat: `gymnasium` on PyPI."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from typing import Any, Final

from troupe.workflow.environments.adapters.spaces import (
    SpacesEnvironment,
    check_playable,
    native,
)
from troupe.workflow.environments.interface import (
    Action,
    IllegalRule,
    Observation,
    Properties,
    Reset,
    Step,
)
from troupe.workflow.errors import EntrypointError, missing_library

SEAT: Final = "player"
_DEFAULT_STEPS: Final = 1000

Describe = Callable[[Any, Any], str]
"""(environment, observation) -> text."""


class Gymnasium(SpacesEnvironment):
    """One environment of Gymnasium's registry, made with `make_args`; its only seat is `player`.

    The text is the result of `describe`, else the `ansi` rendering if there is one, else numbers.
    `moves`: names of the actions of a discrete space, in order. Actions of other spaces are JSON
    lists of numbers (`spaces.numbers` reads them from a text).
    """

    def __init__(
        self,
        id: str,
        *,
        make_args: Mapping[str, Any] | None = None,
        moves: Sequence[str] | None = None,
        describe: Describe | None = None,
        rules: str = "",
        max_steps: int | None = None,
        illegal: IllegalRule = "resample",
        illegal_reward: float = -1.0,
    ) -> None:
        try:
            import gymnasium
        except ImportError as error:
            raise missing_library("Gymnasium", "gymnasium", error) from error
        args = dict(make_args or {})
        # `module:id` is an environment that the module registers.
        module, _, name = id.rpartition(":")
        try:
            if module:
                import_module(module)
            spec = gymnasium.spec(name)
            if describe is None and "render_mode" not in args and _has_text(gymnasium, spec):
                args["render_mode"] = "ansi"
            self._env: Any = gymnasium.make(id, **args)
        except (gymnasium.error.Error, ModuleNotFoundError) as error:
            raise EntrypointError(
                f"Gymnasium cannot make '{id}': {error}",
                field="id",
                value=id,
                remedy="`gymnasium.pprint_registry()` lists the ids; some need further packages.",
            ) from error
        check_playable(self._env.action_space, SEAT)
        self._describe = describe
        self._moves = moves
        self._max_steps = max_steps or spec.max_episode_steps or _DEFAULT_STEPS
        self._steps = 0
        self._properties = Properties(
            name=f"gymnasium/{id}",
            seats=(SEAT,),
            rules=rules,
            illegal=illegal,
            illegal_reward=illegal_reward,
            max_steps=self._max_steps,
        )

    def reset(self, seed: int) -> Reset:
        """Begin an episode."""
        self._steps = 0
        # Its generators accept unsigned 32-bit seeds.
        seen, info = self._env.reset(seed=seed % 2**31)
        return Reset((SEAT,), (SEAT,), {SEAT: self._observe(seen, info)}, {SEAT: info})

    def step(self, actions: Mapping[str, Action]) -> Step:
        """Play one action."""
        action = native(self._env.action_space, actions[SEAT], SEAT)
        seen, reward, terminated, truncated, info = self._env.step(action)
        self._steps += 1
        truncated = bool(truncated) or (self._steps >= self._max_steps and not terminated)
        return Step(
            {SEAT: self._observe(seen, info)},
            {SEAT: float(reward)},
            {SEAT: bool(terminated)},
            {SEAT: truncated},
            () if terminated or truncated else (SEAT,),
            {SEAT: info},
        )

    def _observe(self, seen: Any, info: Mapping[str, Any]) -> Observation:
        describe = self._describe and partial(self._describe, self._env)
        return self._observation(self._env.action_space, seen, info, describe)


def _has_text(gymnasium: Any, spec: Any) -> bool:
    """Return whether the environment renders itself as text."""
    entrypoint = spec.entry_point
    cls = (
        gymnasium.envs.registration.load_env_creator(entrypoint)
        if isinstance(entrypoint, str)
        else entrypoint
    )
    return "ansi" in (getattr(cls, "metadata", None) or {}).get("render_modes", ())
