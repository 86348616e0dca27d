"""Checks of every reset, move and step of an environment against the interface."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from troupe.outcomes import NotFiniteError, finite_number
from troupe.workflow.environments.interface import Action, Observation, Properties, Reset, Step
from troupe.workflow.errors import (
    EnvironmentContractError,
    EpisodeOverError,
    IllegalMoveError,
    ObservationTooLargeError,
    RewardNotFiniteError,
    UnknownPlayerError,
    shown,
)


class Contract:
    """The state of one environment's episode for the checks: the seats to move, and their legal
    moves."""

    def __init__(self, properties: Properties) -> None:
        self.properties = properties
        self.agents: tuple[str, ...] = ()
        """The seats of the episode."""
        self.current: tuple[str, ...] = ()
        """The seats that move now."""
        self.steps = 0
        """Number of steps so far in the episode."""
        self._obs: dict[str, Observation] = {}
        self._done: set[str] = set()

    def began(self, reset: Reset) -> Reset:
        """Check a reset and begin an episode. Raises `EnvironmentContractError`."""
        is_reset(reset)
        known = self.properties.seats
        unknown = [seat for seat in reset.agents if seat not in known]
        if unknown or not reset.agents or len(set(reset.agents)) != len(reset.agents):
            raise self._broken(
                "reset.agents",
                reset.agents,
                "these are not the seats that the environment declares",
                f"Give each of some of: {', '.join(known)}.",
            )
        if not reset.current:
            raise self._broken(
                "reset.current", (), "nobody moves first", "Name the seats that move."
            )
        self.agents, self.steps, self._done = reset.agents, 0, set()
        self._turn("reset", reset.current, reset.obs)
        return reset

    def moves(self, actions: Mapping[str, Action]) -> None:
        """Check a joint move before the environment sees it. Raises `MoveError`."""
        if not self.current:
            raise EpisodeOverError(
                f"{self.properties.name}: nobody moves: the episode is over or has not begun",
                field="actions",
                value=dict(actions),
                remedy="Call `reset(seed)` first.",
            )
        if set(actions) != set(self.current):
            raise UnknownPlayerError(
                f"{self.properties.name}: there are moves for {_names(actions)}, "
                f"but it is the turn of {_names(self.current)}",
                field="actions",
                value=sorted(actions),
                remedy="Give one action for every seat of `current`, and no other.",
            )
        for seat, action in actions.items():
            legal = self._obs[seat].legal
            if legal is not None and action not in legal.values():
                raise IllegalMoveError(
                    f"{self.properties.name}: '{seat}' cannot do {action!r} now",
                    seat=seat,
                    value=action,
                    remedy=f"Legal: {', '.join(legal)}.",
                )

    def went(self, step: Step) -> Step:
        """Check a step. Raises `EnvironmentContractError`."""
        is_step(step)
        self.steps += 1
        for field in ("obs", "rewards", "terminations", "truncations"):
            strangers = sorted(set(getattr(step, field)) - set(self.agents))
            if strangers:
                raise self._broken(
                    f"step.{field}",
                    strangers,
                    "names seats that this episode does not have",
                    "The seats of an episode must not change.",
                )
        for seat, reward in step.rewards.items():
            if not _is_finite(reward):
                raise RewardNotFiniteError(
                    f"{self.properties.name}: the reward of '{seat}' in step {self.steps} is not "
                    "a finite number",
                    field=f"step.rewards.{seat}",
                    value=reward,
                    remedy="Give a failed attempt a low reward instead.",
                )
        ended = (step.terminations, step.truncations)
        self._done |= {s for s in self.agents for flags in ended if flags.get(s, False)}
        gone = self._done & set(step.current)
        if gone:
            raise self._broken(
                "step.current", sorted(gone), "seats move that have ended", "Leave them out."
            )
        if not step.current and self._done != set(self.agents):
            raise self._broken(
                "step.current",
                (),
                "nobody moves, though some seats are neither terminated nor truncated",
                "Set one of the two for every seat when the episode is over.",
            )
        if step.current and self.steps >= self.properties.max_steps:
            raise self._broken(
                "properties.max_steps",
                self.properties.max_steps,
                "the episode is longer than the environment declares",
                "Truncate the episode, or declare more steps.",
            )
        self._turn("step", step.current, step.obs)
        return step

    def over(self) -> None:
        """End the episode: no seat moves any more."""
        self.current = ()

    def _turn(self, where: str, current: tuple[str, ...], obs: Mapping[str, Observation]) -> None:
        strangers = [seat for seat in current if seat not in self.agents]
        if strangers or len(set(current)) != len(current):
            raise self._broken(
                f"{where}.current", current, "names seats twice or unknown ones", "Name agents."
            )
        if len(current) > 1 and not self.properties.simultaneous:
            raise self._broken(
                f"{where}.current",
                current,
                "several seats move at once, which is not declared",
                "Declare `simultaneous=True`.",
            )
        unseen = [seat for seat in current if seat not in obs]
        if unseen:
            raise self._broken(
                f"{where}.obs",
                sorted(obs),
                f"{_names(unseen)} must move without an observation",
                "Add their observations.",
            )
        for seat, seen in obs.items():
            self._check_observation(where, seat, seen)
            if seat in current and seen.legal is not None and not seen.legal:
                raise self._broken(
                    f"{where}.obs.{seat}.legal",
                    {},
                    "a seat without a legal move must move",
                    "Leave it out of `current`, or give None if any move is legal.",
                )
        self.current = current
        self._obs = {seat: obs[seat] for seat in current}

    def _check_observation(self, where: str, seat: str, seen: Observation) -> None:
        if len(seen.text) > self.properties.max_observation_chars:
            raise ObservationTooLargeError(
                f"{self.properties.name}: '{seat}' sees {len(seen.text):,} characters; "
                f"{self.properties.max_observation_chars:,} are declared",
                field=f"{where}.obs.{seat}.text",
                value=seen.text,
                remedy="Show less, or declare more `max_observation_chars`.",
            )

    def _broken(
        self, field: str, value: object, message: str, remedy: str
    ) -> EnvironmentContractError:
        return EnvironmentContractError(
            f"{self.properties.name}: {field} {message}", field=field, value=value, remedy=remedy
        )


def is_reset(given: Any) -> Reset:
    """Return the result of `reset` if it is a `Reset`. Raises `EnvironmentContractError`."""
    if not isinstance(given, Reset):
        raise _no_such("reset", given, "Return a `Reset`.")
    _check_texts("reset", given.obs)
    return given


def is_step(given: Any) -> Step:
    """Return the result of `step` if it is a `Step`. Raises `EnvironmentContractError`."""
    if not isinstance(given, Step):
        raise _no_such("step", given, "Return a `Step`.")
    for field in ("obs", "rewards", "terminations", "truncations", "infos"):
        value = getattr(given, field)
        if not isinstance(value, Mapping):
            raise _no_such(f"step.{field}", value, "Give a dict by seat.")
    _check_texts("step", given.obs)
    return given


def _check_texts(where: str, obs: Any) -> None:
    if not isinstance(obs, Mapping):
        raise _no_such(f"{where}.obs", obs, "Give a dict by seat.")
    for seat, seen in obs.items():
        if not isinstance(seen, Observation) or not isinstance(seen.text, str):
            raise _no_such(f"{where}.obs.{seat}", seen, "Make an `Observation` with a text.")


def _no_such(field: str, value: object, remedy: str) -> EnvironmentContractError:
    return EnvironmentContractError(
        f"{field} is {shown(value)}", field=field, value=value, remedy=remedy
    )


def _is_finite(value: Any) -> bool:
    try:
        finite_number(value)
    except NotFiniteError:
        return False
    return type(value) is not bool


def _names(seats: Iterable[str]) -> str:
    return ", ".join(f"'{seat}'" for seat in sorted(seats)) or "nobody"
