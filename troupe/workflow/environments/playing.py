"""Plays environments without any agent: random legal moves, and a record to compare."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from troupe.workflow.environments.contract import Contract
from troupe.workflow.environments.errors import EnvironmentContractError
from troupe.workflow.environments.interface import (
    Action,
    Environment,
    Observation,
    Reset,
    Step,
)

Mover = Callable[[Observation, random.Random, str], Action]
"""(observation, random, seat) -> action."""

_WORDS = ("yes", "no", "1", "2", "[0]", "[pass]", "hello")


def legal_mover(seen: Observation, draw: random.Random, seat: str) -> Action:
    """A random legal move; where any text is one, one of a few words."""
    if seen.legal is None:
        return draw.choice(_WORDS)
    return seen.legal[draw.choice(sorted(seen.legal))]


@dataclass(slots=True)
class Record:
    """What happened in one episode, as plain values that compare."""

    seed: int
    reset: Reset
    moves: list[dict[str, Action]] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)

    @property
    def returns(self) -> dict[str, float]:
        """The sum of rewards of every seat."""
        totals = dict.fromkeys(self.reset.agents, 0.0)
        for step in self.steps:
            for seat, reward in step.rewards.items():
                totals[seat] = totals.get(seat, 0.0) + float(reward)
        return totals

    def plain(self) -> list[Any]:
        """Everything but infos, in values that `==` compares."""
        first = (self.reset.agents, self.reset.current, plain_observations(self.reset.obs))
        return [first, *(plain_step(step) for step in self.steps)]


def play_randomly(
    environment: Environment,
    seed: int,
    move: Mover = legal_mover,
    *,
    moves: list[dict[str, Action]] | None = None,
    limit: int | None = None,
) -> Record:
    """One episode, held to the contract; by `moves` instead of random ones if they are given.

    `limit` ends it after so many steps. Raises `WorkflowError`.
    """
    contract = Contract(environment.properties)
    record = Record(seed, contract.began(environment.reset(seed)))
    draw = random.Random(seed)
    obs = record.reset.obs
    bound = environment.properties.max_steps if limit is None else limit
    while contract.current and len(record.steps) < bound:
        number = len(record.steps)
        if moves is not None and (
            number >= len(moves) or set(moves[number]) != set(contract.current)
        ):
            raise EnvironmentContractError(
                f"in step {number} it is the turn of {', '.join(contract.current)}, unlike before",
                field="step.current",
                value=contract.current,
                remedy="Derive all chance from the seed.",
            )
        joint = (
            moves[number]
            if moves is not None
            else {seat: move(obs[seat], draw, seat) for seat in contract.current}
        )
        contract.moves(joint)
        step = contract.went(environment.step(dict(joint)))
        record.moves.append(dict(joint))
        record.steps.append(step)
        obs = step.obs
    return record


def plain_step(step: Step) -> tuple[Any, ...]:
    """A step as values that compare, without infos."""
    return (
        plain_observations(step.obs),
        {seat: float(reward) for seat, reward in step.rewards.items()},
        {seat: bool(flag) for seat, flag in step.terminations.items()},
        {seat: bool(flag) for seat, flag in step.truncations.items()},
        step.current,
    )


def plain_observations(obs: Mapping[str, Observation]) -> dict[str, Any]:
    """Observations as values that compare; arrays as dtype, shape and bytes."""
    return {
        seat: (
            seen.text,
            None if seen.legal is None else dict(seen.legal),
            {name: _plain_array(array) for name, array in seen.arrays.items()},
        )
        for seat, seen in obs.items()
    }


def _plain_array(array: Any) -> tuple[str, tuple[int, ...], bytes]:
    values = np.asarray(array)
    return values.dtype.str, values.shape, values.tobytes()
