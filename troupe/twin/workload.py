"""Trajectories in the twin: their turns, lengths and waits.

A workload is a function of a query's index, so that splits of a cluster are compared on the same
trajectories. `TeamWorkload` draws them from a few published properties of agentic jobs.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple, TypeAlias


class TwinTurn:
    """One turn: `policy` reads `prompt` tokens, of which the first `shared` repeat its previous
    turn in the trajectory, and draws `response` tokens; `after` seconds pass before the next turn
    (tools, environment)."""

    __slots__ = ("after", "domain", "policy", "prompt", "response", "shared")

    def __init__(
        self,
        policy: str,
        prompt: int,
        response: int,
        after: float = 0.0,
        shared: int = 0,
        domain: str = "",
    ) -> None:
        self.policy = policy
        self.prompt = prompt
        self.response = response
        self.after = after
        self.shared = shared
        self.domain = domain


class TwinTrajectory(NamedTuple):
    """One run of a workflow: `before` seconds (environment reset), then its turns one after
    another."""

    turns: tuple[TwinTurn, ...]
    before: float = 0.0


Workload: TypeAlias = Callable[[int], Sequence[TwinTrajectory]]
"""The trajectories of query `index`, one per member of its group."""


# Constant of Kinderman and Monahan's method for normal draws, as in the module `random`.
_NORMAL_CONSTANT: Final = 4 * math.exp(-0.5) / math.sqrt(2.0)


@dataclass(frozen=True, slots=True)
class Lengths:
    """A lognormal law: its mean, and the sigma of its logarithm; draws are at most `most`."""

    mean: float
    sigma: float = 0.6
    most: float = math.inf

    def draw(self, rng: random.Random) -> float:
        """Draw `rng.lognormvariate` to the last bit, by arithmetic that can be compiled."""
        if self.mean <= 0 or self.sigma <= 0:
            return min(self.mean, self.most)
        location = math.log(self.mean) - self.sigma * self.sigma / 2
        while True:
            first, second = rng.random(), 1.0 - rng.random()
            normal = _NORMAL_CONSTANT * (first - 0.5) / second
            if normal * normal / 4.0 <= -math.log(second):
                return min(self.most, math.exp(location + normal * self.sigma))


@dataclass(frozen=True)
class TeamWorkload:
    """Rounds of a team, in each of which the k-th agent of the query's order speaks with
    probability `1 / k ** skew`, so that calls per agent follow Zipf's law within a query
    (FlexMARL's skew).

    `lead`: the agent that is always first; the order of the others depends on the query. With
    `skew` 0 all speak in every round. Prompts grow by earlier messages (`history`).
    """

    agents: tuple[str, ...]
    rounds: Lengths
    prompt: Lengths
    response: Lengths
    wait: Lengths = Lengths(0.0)
    group_size: int = 8
    skew: float = 0.0
    lead: str = ""
    history: float = 1.0
    """Fraction of a turn's prompt and response that the agent's next prompt repeats."""
    own_response: Mapping[str, Lengths] = field(default_factory=dict)
    group_spread: float = 0.0
    """Sigma of a factor on all lengths of a query, since hard questions are long for the whole
    group."""
    reset: Lengths = Lengths(0.0)
    most_context: int = 32_768
    domain: str = ""
    """The `domain` of its turns."""
    seed: int = 0

    def __call__(self, index: int) -> list[TwinTrajectory]:
        """Return the trajectories of a query."""
        rng = random.Random(f"{self.seed}/{index}")
        others = [name for name in self.agents if name != self.lead]
        rng.shuffle(others)
        order = [self.lead, *others] if self.lead else others
        rounds = max(1, round(self.rounds.draw(rng)))
        hard = Lengths(1.0, self.group_spread).draw(rng) if self.group_spread else 1.0
        return [self._trajectory(rng, order, rounds, hard) for _ in range(self.group_size)]

    def _trajectory(
        self, rng: random.Random, order: Sequence[str], rounds: int, hard: float
    ) -> TwinTrajectory:
        turns: list[TwinTurn] = []
        kept: dict[str, int] = {}
        most = self.most_context
        speaks = [
            (
                agent,
                1.0 / rank**self.skew if self.skew else 1.0,
                self.own_response.get(agent, self.response),
            )
            for rank, agent in enumerate(order, 1)
        ]
        for _ in range(rounds):
            for agent, chance, response in speaks:
                if chance < 1.0 and rng.random() >= chance:
                    continue
                new, said = self.prompt.draw(rng), response.draw(rng) * hard
                shared = kept.get(agent, 0)
                room = max(2, most - shared) / 2
                read = max(1, round(new if new < room else room))
                drawn = max(1, round(said if said < room else room))
                after = self.wait.draw(rng)
                turns.append(TwinTurn(agent, shared + read, drawn, after, shared, self.domain))
                kept[agent] = round(self.history * (shared + read + drawn))
        return self._finished(rng, turns)

    def _finished(self, rng: random.Random, turns: list[TwinTurn]) -> TwinTrajectory:
        """Return the trajectory of these turns."""
        return TwinTrajectory(tuple(turns), self.reset.draw(rng))


class Replayed:
    """A workload of recorded trajectories, such as a rehearsal of the workflow."""

    def __init__(self, queries: Sequence[Sequence[TwinTrajectory]]) -> None:
        """Raises ValueError without queries."""
        if not queries:
            raise ValueError("queries: a workload needs at least one recorded query")
        self._queries = queries

    def __call__(self, index: int) -> Sequence[TwinTrajectory]:
        """Return the recorded trajectories of a query; after the last recording the first one
        follows."""
        return self._queries[index % len(self._queries)]
