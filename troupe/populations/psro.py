"""PSRO with exact best responses and payoffs (Lanctot et al. 2017, algorithm 1)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from troupe.populations.games import Array, Profile
from troupe.populations.solvers import MetaSolver, solve
from troupe.populations.tree import SequenceForm


@dataclass(frozen=True)
class Iteration:
    """The state after one iteration."""

    number: int
    meta: Profile
    """Probabilities of each player's members."""
    plans: tuple[Array, ...]
    """Each player's mixture of its members, as one plan [s]."""
    nash_conv: float
    """Of those plans in the whole game."""
    sizes: tuple[int, ...]
    """Members of each pool."""


class MetaGame:
    """Pools of plans, which begin with the uniform policy, and their exact payoffs."""

    def __init__(self, form: SequenceForm) -> None:
        self.form = form
        self.pools: list[list[Array]] = [[form.uniform(player)] for player in range(form.players)]
        self.payoffs = form.values([pool[0] for pool in self.pools]).reshape(
            form.players, *[1] * form.players
        )

    @property
    def sizes(self) -> tuple[int, ...]:
        """Members of each pool."""
        return tuple(len(pool) for pool in self.pools)

    def copy(self) -> MetaGame:
        """One that grows apart from this."""
        found = MetaGame.__new__(MetaGame)
        found.form, found.payoffs = self.form, self.payoffs
        found.pools = [list(pool) for pool in self.pools]
        return found

    def mixed(self, meta: Profile) -> tuple[Array, ...]:
        """Each player's mixture of its members, as one plan [s]."""
        return tuple(
            np.tensordot(weights, np.stack(pool), axes=1)
            for weights, pool in zip(meta, self.pools, strict=True)
        )

    def grow(self, answers: Sequence[Array]) -> bool:
        """Add a plan to each player's pool, unless it is there already; whether one was added."""
        new = [
            not any(np.array_equal(answer, one) for one in pool)
            for answer, pool in zip(answers, self.pools, strict=True)
        ]
        for player, answer in enumerate(answers):
            if new[player]:
                self.pools[player].append(answer)
                self._fill(player)
        return any(new)

    def _fill(self, player: int) -> None:
        """The payoffs of a pool's newest member against all choices of the others."""
        shape = list(self.payoffs.shape[1:])
        slab = np.empty((self.form.players, *[k for i, k in enumerate(shape) if i != player]))
        others = [i for i in range(self.form.players) if i != player]
        newest = self.pools[player][-1]
        reach = newest[self.form.leaves[:, player]][:, None] * self.form.returns
        # By the last of the others at one stroke: a matrix product instead of a loop.
        last = others[-1]
        columns = np.stack([plan[self.form.leaves[:, last]] for plan in self.pools[last]])
        for members in np.ndindex(*[shape[i] for i in others[:-1]]):
            weighed = reach
            for other, member in zip(others[:-1], members, strict=True):
                weighed = weighed * self.pools[other][member][self.form.leaves[:, other]][:, None]
            slab[(slice(None), *members)] = (columns @ weighed).T
        self.payoffs = np.concatenate(
            [self.payoffs, np.expand_dims(slab, player + 1)], axis=player + 1
        )


class ExactPsro(MetaGame):
    """Pools that grow by a best response to the others' meta-strategy in every iteration.

    Members that a pool has already are not added again: a pool that does not grow has no better
    response among all policies of its player.
    """

    def __init__(
        self,
        form: SequenceForm,
        solver: MetaSolver = "nash",
        *,
        tremble: float = 1e-9,
        **options: Any,
    ) -> None:
        """`tremble`: see `SequenceForm.best_response`; `options` go to the meta-solver."""
        super().__init__(form)
        self._tremble = tremble
        self._solver, self._options = solver, options

    def run(self, iterations: int) -> Iterator[Iteration]:
        """One `Iteration` after another, at most so many; ends when no pool grows."""
        for number in range(iterations):
            meta = solve(self._solver, self.payoffs, **self._options)
            plans = self.mixed(meta)
            answers = [
                self.form.best_response(i, plans, tremble=self._tremble)
                for i in range(self.form.players)
            ]
            gains = sum(value for _, value in answers) - self.form.values(plans).sum()
            yield Iteration(number, meta, plans, float(max(gains, 0.0)), self.sizes)
            if not self.grow([plan for plan, _ in answers]):
                return
