"""PSRO whose best responses are networks that learn (Lanctot et al. 2017), several at once
(pipeline PSRO, McAleer et al. 2020), on games whose tree can be walked.

A member is a network, and by what it does at every information set it is a plan, too: NashConv is
exact, and so are payoffs unless they are to be played. It answers with its likeliest or best
action. Importing this needs torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import torch

from troupe.networks.acting import ActingNetwork
from troupe.networks.actor import Actor, Seat
from troupe.networks.environments.openspiel import GameCopies, histories_of
from troupe.networks.learning import make_learner
from troupe.networks.spec import NetworkSpec, QLearningSpec
from troupe.networks.vector import Spaces
from troupe.populations.games import Array, Profile
from troupe.populations.histories import Histories
from troupe.populations.matches import Precision
from troupe.populations.psro import Iteration, MetaGame
from troupe.populations.sampled import SampledGame
from troupe.populations.solvers import MetaSolver, solve

Tensors = dict[str, torch.Tensor]
# Members of one player as probabilities of actions [k, m, A], and how often each is met [k].
Opponents = tuple[Array, Array]

_POLICY: Final = "answer"


def _dqn() -> NetworkSpec:
    learning = QLearningSpec(
        lr=1e-3,
        gamma=1.0,
        buffer=20_000,
        batch=256,
        updates=16,
        tau=0.05,
        epsilon=(1.0, 0.1),
        epsilon_episodes=10_000,
    )
    return NetworkSpec(hidden=(64, 64), learning=learning)


@dataclass(frozen=True)
class Oracle:
    """How a best response is learned."""

    network: NetworkSpec = field(default_factory=_dqn)
    """What it is and which paradigm trains it; `kind: mlp`, since an information state holds all
    that its player has seen."""
    copies: int = 512
    """Games that are played at once: the episodes of one update."""
    updates: int = 60
    """Of the learner, before its network becomes a member."""


@dataclass(frozen=True)
class Training:
    """A stretch of a best response's training: all that a process needs to carry it out."""

    game: str
    player: int
    oracle: Oracle
    opponents: Mapping[int, Opponents]
    """By player."""
    seed: int
    first: int
    """The number of its first update."""
    updates: int
    """How many."""
    state: Tensors | None = None
    """The learner's, as the stretch before left it; None: a new one, drawn by `seed`."""


@dataclass(frozen=True)
class Trained:
    """What became of it."""

    table: Array
    """What the network does at every information set [m, A]."""
    state: Tensors
    """The learner's."""
    weights: Tensors
    """The network's."""


def train(task: Training) -> Trained:
    """Play and learn. A function of the task, on one kind of machine with one torch thread.

    Raises InvalidArgument for a paradigm that cannot learn this game, ValueError as `enumerated`.
    """
    histories, oracle = histories_of(task.game), task.oracle
    environment = GameCopies(oracle.copies, histories, (task.player,))
    for player, (tables, weights) in task.opponents.items():
        environment.against(player, list(tables), list(weights))
    spaces, agents = environment.spaces, environment.agents
    learner = make_learner(oracle.network, spaces, agents, task.seed)
    if task.state is not None:
        learner.restore(task.state)
    actor = Actor(environment, {_POLICY: Seat(oracle.network, agents)})
    for number in range(task.first, task.first + task.updates):
        actor.load(_POLICY, learner.published(), number)
        seed = int(np.random.SeedSequence((task.seed, number)).generate_state(1)[0])
        learner.update([actor.sample(seed).fragments[_POLICY]])
    published = learner.published()
    table = enumerated(oracle.network, spaces, published, histories, task.player)
    return Trained(table, dict(learner.state()), published)


@torch.inference_mode()
def enumerated(
    network: NetworkSpec,
    spaces: Spaces,
    weights: Mapping[str, torch.Tensor],
    histories: Histories,
    player: int,
) -> Array:
    """The likeliest or best action of a network at every information set of a player, as
    probabilities [m, A].

    Raises ValueError for a network with a memory of its own, InvalidArgument for weights that are
    not its.
    """
    if network.kind != "mlp":
        raise ValueError("a network with a memory has no action by information set; take kind: mlp")
    acting = ActingNetwork(network, spaces, 1)
    acting.take(weights)
    observations = torch.from_numpy(histories.tensors[player])[:, None]
    legal = torch.from_numpy(histories.legal[player])[:, None]
    acting.begin(len(observations))
    drawn = acting.act(observations, legal, torch.Generator(), explore=False)
    table: Array = np.eye(histories.actions)[drawn.actions[:, 0].numpy()]
    return table


# How tasks are carried out: `map`, or that of processes that do so beside each other.
Workers = Callable[[Callable[[Training], Trained], Iterable[Training]], Iterable[Trained]]


@dataclass
class _Active:
    """Best responses, one of each player, that are in training."""

    seeds: tuple[int, ...]
    updates: int = 0
    trained: list[Trained] = field(default_factory=list)


class LearnedPsro:
    """Pools that grow by what networks learn against the others' meta-strategy.

    With `levels` above 1 so many best responses of every player learn at once: the lowest against
    the mixture of all members, each above it against the mixture of members and of those below it,
    as they are by then; when the lowest has had all its updates it becomes a member, and a new one
    begins on top. `stretch`: after how many updates the mixtures are formed anew.
    """

    def __init__(
        self,
        game: str,
        oracle: Oracle | None = None,
        solver: MetaSolver = "nash",
        *,
        seed: int = 0,
        levels: int = 1,
        stretch: int | None = None,
        workers: Workers = map,
        sampled: Precision | None = None,
    ) -> None:
        """`game`: OpenSpiel's name. `workers`: carries out the trainings of a stretch, all at once
        if it can (`Executor.map` of processes with one torch thread each). `sampled`: payoffs are
        not computed, but played to this precision; NashConv stays exact. Raises ValueError."""
        self.oracle = oracle or Oracle()
        if levels < 1 or (stretch is not None and stretch < 1):
            raise ValueError(f"levels and stretch are at least 1, not {levels} and {stretch}")
        self.game, self.histories = game, histories_of(game)
        self.meta_game = (
            MetaGame(self.histories.form)
            if sampled is None
            else SampledGame(self.histories, sampled, seed)
        )
        self.tables: list[list[Array]] = [
            [self.histories.uniform(player)] for player in range(self.histories.form.players)
        ]
        """By player, what each member does at its information sets [m, A]."""
        self._solver, self._seed, self._workers = solver, seed, workers
        self._levels, self._stretch = levels, stretch or self.oracle.updates
        self._begun = 0
        self._active = [self._new() for _ in range(levels)]

    def run(self, iterations: int) -> Iterator[Iteration]:
        """One `Iteration` after another, as long as asked for."""
        for number in range(iterations):
            if number:
                self._raise_lowest()
            meta = solve(self._solver, self.meta_game.payoffs)
            plans = self.meta_game.mixed(meta)
            gap = max(self.histories.form.nash_conv(plans), 0.0)
            yield Iteration(number, meta, plans, gap, self.meta_game.sizes)

    def _raise_lowest(self) -> None:
        """Train all levels until the lowest is done, and make members of it."""
        while self._active[0].updates < self.oracle.updates:
            tasks = [task for level in range(self._levels) for task in self._tasks(level)]
            answers = iter(list(self._workers(train, tasks)))
            for active in self._active:
                active.trained = [next(answers) for _ in active.seeds]
                active.updates += self._length()
        self._add(self.meta_game, self.tables, self._active.pop(0))
        self._active.append(self._new())

    def _add(self, game: MetaGame, tables: list[list[Array]], answers: _Active) -> None:
        """Make them members of these pools; what a pool has already is not added again."""
        before = game.sizes
        game.grow(
            [self.histories.plan(p, answer.table) for p, answer in enumerate(answers.trained)]
        )
        for player, answer in enumerate(answers.trained):
            if game.sizes[player] > before[player]:
                tables[player].append(answer.table)

    def _length(self) -> int:
        """Updates of the next stretch."""
        return min(self._stretch, self.oracle.updates - self._active[0].updates)

    def _tasks(self, level: int) -> list[Training]:
        """The next stretch of all players' best responses at a level."""
        pools, mixture = self._known(level)
        everybody = {
            player: (np.stack(pool), weights)
            for player, (pool, weights) in enumerate(zip(pools, mixture, strict=True))
        }
        active = self._active[level]
        return [
            Training(
                game=self.game,
                player=player,
                oracle=self.oracle,
                opponents={other: one for other, one in everybody.items() if other != player},
                seed=seed,
                first=active.updates,
                updates=self._length(),
                state=active.trained[player].state if active.trained else None,
            )
            for player, seed in enumerate(active.seeds)
        ]

    def _known(self, level: int) -> tuple[list[list[Array]], Profile]:
        """Members and what is in training below `level`, and their meta-strategy."""
        below = [one for one in self._active[:level] if one.trained]
        if not below:
            return self.tables, solve(self._solver, self.meta_game.payoffs)
        pools, game = [list(tables) for tables in self.tables], self.meta_game.copy()
        for one in below:
            self._add(game, pools, one)
        return pools, solve(self._solver, game.payoffs)

    def _new(self) -> _Active:
        self._begun += 1
        players = self.histories.form.players
        seeds = np.random.SeedSequence((self._seed, self._begun)).generate_state(players)
        return _Active(tuple(int(one) for one in seeds))
