"""PSRO and pipeline PSRO on enumerable games, with exact or learned best responses.

PSRO: Lanctot et al. 2017; pipeline PSRO: McAleer et al. 2020. A learned member is a network that
plays its most probable or best action. Its actions in all information sets form a plan
(`troupe.populations.tree`), so NashConv is exact, and so are payoffs unless they are sampled.
Importing this module needs torch.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Self

import numpy as np
import torch

from troupe.job.sections.network import NetworkSpec, QLearningSpec
from troupe.networks.acting import ActingNetwork
from troupe.networks.actor import Actor, Seat
from troupe.networks.environments.openspiel import GameCopies, histories_of
from troupe.networks.jobs import make_learner
from troupe.networks.vector import Spaces
from troupe.populations.games import Array, Profile
from troupe.populations.histories import Histories, cumulated
from troupe.populations.payoffs import Members, PayoffTable, Precision, matches_due
from troupe.populations.solvers import MetaSolver, solve
from troupe.populations.tree import Indices, SequenceForm

Tensors = dict[str, torch.Tensor]
# Policies of one player's members [k, m, A], and the probabilities of meeting them [k].
Opponents = tuple[Array, Array]
# Function that maps `train` over tasks: `map`, or the `map` of a process pool.
Workers = Callable[[Callable[["Training"], "Trained"], Iterable["Training"]], Iterable["Trained"]]
# The name of the only policy of an actor.
_POLICY: Final = "answer"
# Games per call of `play` by `SampledGame`.
_GAMES_AT_ONCE: Final = 1 << 16


@dataclass(frozen=True)
class Iteration:
    """The state after one iteration."""

    number: int
    meta: Profile
    """The meta-strategy of each player."""
    plans: tuple[Array, ...]
    """Each player's mixture of its members, as one plan [s]."""
    nash_conv: float
    """NashConv of those plans in the whole game."""
    sizes: tuple[int, ...]
    """The size of each pool."""


class MetaGame:
    """Pools of plans with their exact payoffs; each pool starts with the uniform policy."""

    def __init__(self, form: SequenceForm) -> None:
        self.form = form
        self.pools: list[list[Array]] = [[form.uniform(player)] for player in range(form.players)]
        self.payoffs = form.values([pool[0] for pool in self.pools]).reshape(
            form.players, *[1] * form.players
        )

    @property
    def sizes(self) -> tuple[int, ...]:
        """The size of each pool."""
        return tuple(len(pool) for pool in self.pools)

    def copy(self) -> Self:
        """Return an independent copy."""
        found = copy.copy(self)
        found.pools = [list(pool) for pool in self.pools]
        return found

    def mixed(self, meta: Profile) -> tuple[Array, ...]:
        """Return each player's mixture of its members, as one plan [s]."""
        return tuple(
            np.tensordot(weights, np.stack(pool), axes=1)
            for weights, pool in zip(meta, self.pools, strict=True)
        )

    def grow(self, answers: Sequence[Array]) -> bool:
        """Add a plan to each player's pool unless the pool has it; return whether any was added."""
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
        """Compute the payoffs of a pool's newest member against all members of the other pools."""
        shape = list(self.payoffs.shape[1:])
        slab = np.empty((self.form.players, *[k for i, k in enumerate(shape) if i != player]))
        others = [i for i in range(self.form.players) if i != player]
        newest = self.pools[player][-1]
        reach = newest[self.form.leaves[:, player]][:, None] * self.form.returns
        # One matrix product over the last of the other players, instead of a loop.
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
    """PSRO with exact best responses to the others' meta-strategies.

    A pool does not grow if it has the best response already, since no policy is better.
    """

    def __init__(
        self,
        form: SequenceForm,
        solver: MetaSolver = "nash",
        *,
        tremble: float = 1e-9,
        **options: Any,
    ) -> None:
        """`tremble`: see `SequenceForm.best_response`; `options`: passed to the meta-solver."""
        super().__init__(form)
        self._tremble = tremble
        self._solver, self._options = solver, options

    def run(self, iterations: int) -> Iterator[Iteration]:
        """Yield at most `iterations` iterations; ends when no pool grows."""
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


def play(
    histories: Histories,
    tables: Sequence[Array],
    members: Indices,
    random: np.random.Generator,
) -> Array:
    """Play g games to their end, and return their payoffs [g, n].

    `tables`: by player, the policies of its members [k, m, A]; `members`: [g, n], the indices of
    the members that play each game.
    """
    tree, width = histories, histories.children.shape[1]
    blocks = [one.reshape(-1, one.shape[-1]) for one in tables] + [tree.chances]
    first = np.concatenate([[0], np.cumsum([len(block) for block in blocks])])
    rows = np.concatenate([cumulated(block, width) for block in blocks])
    # The first row in `rows` of each player's member, then of chance.
    sets = np.array([one.shape[1] for one in tables])
    begin = np.concatenate(
        [members * sets + first[:-2], np.full((len(members), 1), first[-2])], axis=1
    )
    node, games = np.zeros(len(members), dtype=np.int64), np.arange(len(members))
    while True:
        at = node[games]
        runs = tree.actor[at] != tree.over
        games, at = games[runs], at[runs]
        if not len(games):
            break
        own = rows[begin[games, tree.actor[at]] + tree.sets[at]]
        drawn = random.random(len(games), dtype=np.float32)
        node[games] = tree.children[at, (drawn[:, None] >= own).sum(axis=1)]
    found: Array = tree.returns[node]
    return found


class SampledGame(MetaGame):
    """A `MetaGame` with payoffs from sampled games, as many as `precision` requires.

    Deterministic given the pools and the seed.
    """

    def __init__(self, histories: Histories, precision: Precision, seed: int = 0) -> None:
        """`precision`: the required precision of the payoffs."""
        self.form, self.histories, self.precision = histories.form, histories, precision
        players = histories.form.players
        self.pools = [[histories.form.uniform(player)] for player in range(players)]
        self.table = PayoffTable([1] * players)
        self._tables = [[histories.uniform(player)] for player in range(players)]
        self._seed, self._rounds = seed, 0
        self._play_due()

    def copy(self) -> Self:
        """Return an independent copy, with the matches played so far."""
        found = super().copy()
        found.table = PayoffTable.from_json(self.table.to_json())
        found._tables = [list(pool) for pool in self._tables]
        return found

    def _fill(self, player: int) -> None:
        """Play the matches of a pool's newest member."""
        self._tables[player].append(self.histories.table(player, self.pools[player][-1]))
        self.table.grow(self.sizes)
        self._play_due()

    def _play_due(self) -> None:
        while due := matches_due(self.table, self.precision):
            self._play(due)
        self.payoffs = self.table.tensor()

    def _play(self, due: Sequence[tuple[Members, int]]) -> None:
        """Play the given number of matches of each cell."""
        random = np.random.default_rng((self._seed, self._rounds))
        self._rounds += 1
        tables = [np.stack(pool) for pool in self._tables]
        counts = [count for _, count in due]
        members = np.repeat(np.array([cell for cell, _ in due]), counts, axis=0)
        parts = [
            play(self.histories, tables, members[at : at + _GAMES_AT_ONCE], random)
            for at in range(0, len(members), _GAMES_AT_ONCE)
        ]
        ends = np.cumsum(counts)[:-1]
        for (cell, _), found in zip(due, np.split(np.concatenate(parts), ends), strict=True):
            self.table.record_all(cell, found)


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
    """The configuration of best-response training: network, paradigm and budget."""

    network: NetworkSpec = field(default_factory=_dqn)
    """The network and its learning paradigm; `kind: mlp`, since an information state contains all
    that its player has seen."""
    copies: int = 512
    """Games played at once: the episodes of one update."""
    updates: int = 60
    """Updates of the learner before its network becomes a member."""


@dataclass(frozen=True)
class Training:
    """A task for a worker process: one part of a best response's training."""

    game: str
    player: int
    oracle: Oracle
    opponents: Mapping[int, Opponents]
    """By player: its policies and their probabilities."""
    seed: int
    first: int
    """The number of the first update."""
    updates: int
    """Number of updates."""
    state: Tensors | None = None
    """The learner's state after the previous part; None: a new learner, initialized by `seed`."""


@dataclass(frozen=True)
class Trained:
    """The result of a `Training` task."""

    table: Array
    """The network's policy [m, A]."""
    state: Tensors
    """The learner's state."""
    weights: Tensors
    """The network's weights."""


def train(task: Training) -> Trained:
    """Run a training task. Deterministic on one kind of machine with one torch thread.

    Raises InvalidArgument for a paradigm that cannot learn this game, and the ValueErrors of
    `enumerated`.
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
    """Return the greedy policy [m, A] of a network in all information sets of a player.

    Raises ValueError for a recurrent network, InvalidArgument for weights of another network.
    """
    if network.kind != "mlp":
        raise ValueError("a recurrent network has no action per information set; use kind: mlp")
    acting = ActingNetwork(network, spaces, 1)
    acting.take(weights)
    observations = torch.from_numpy(histories.tensors[player])[:, None]
    legal = torch.from_numpy(histories.legal[player])[:, None]
    acting.begin(len(observations))
    drawn = acting.act(observations, legal, torch.Generator(), explore=False)
    table: Array = np.eye(histories.actions)[drawn.actions[:, 0].numpy()]
    return table


@dataclass
class _Active:
    """The best responses of one level in training, one per player."""

    seeds: tuple[int, ...]
    updates: int = 0
    trained: list[Trained] = field(default_factory=list)


class LearnedPsro:
    """PSRO whose best responses are learned by networks.

    With `levels` above 1 (pipeline PSRO) every player trains that many best responses at once: the
    lowest level against the meta-strategy over members, each higher level against one over members
    and the levels below. When the lowest level has had all its updates, it becomes a member, and a
    new level starts on top. Mixtures are updated every `stretch` updates.
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
        """`game`: the name of an OpenSpiel game. `workers`: maps `train` over the tasks of a
        stretch: `map`, or `Executor.map` of processes with one torch thread each. `sampled`: sample
        payoffs to this precision instead of computing them; NashConv stays exact. Raises
        ValueError.
        """
        self.oracle = oracle or Oracle()
        if levels < 1 or (stretch is not None and stretch < 1):
            raise ValueError(f"levels and stretch must be at least 1, not {levels} and {stretch}")
        self.game, self.histories = game, histories_of(game)
        self.meta_game = (
            MetaGame(self.histories.form)
            if sampled is None
            else SampledGame(self.histories, sampled, seed)
        )
        self.tables: list[list[Array]] = [
            [self.histories.uniform(player)] for player in range(self.histories.form.players)
        ]
        """By player, the policy [m, A] of each member."""
        self._solver, self._seed, self._workers = solver, seed, workers
        self._levels, self._stretch = levels, stretch or self.oracle.updates
        self._begun = 0
        self._active = [self._new() for _ in range(levels)]

    def run(self, iterations: int) -> Iterator[Iteration]:
        """Yield `iterations` iterations."""
        for number in range(iterations):
            if number:
                self._raise_lowest()
            meta = solve(self._solver, self.meta_game.payoffs)
            plans = self.meta_game.mixed(meta)
            gap = max(self.histories.form.nash_conv(plans), 0.0)
            yield Iteration(number, meta, plans, gap, self.meta_game.sizes)

    def _raise_lowest(self) -> None:
        """Train all levels until the lowest has all its updates, and add it to the pools."""
        while self._active[0].updates < self.oracle.updates:
            tasks = [task for level in range(self._levels) for task in self._tasks(level)]
            answers = iter(list(self._workers(train, tasks)))
            for active in self._active:
                active.trained = [next(answers) for _ in active.seeds]
                active.updates += self._length()
        self._add(self.meta_game, self.tables, self._active.pop(0))
        self._active.append(self._new())

    def _add(self, game: MetaGame, tables: list[list[Array]], answers: _Active) -> None:
        """Add best responses to the pools of a game, unless a pool has them already."""
        before = game.sizes
        game.grow(
            [self.histories.plan(p, answer.table) for p, answer in enumerate(answers.trained)]
        )
        for player, answer in enumerate(answers.trained):
            if game.sizes[player] > before[player]:
                tables[player].append(answer.table)

    def _length(self) -> int:
        """Return the number of updates in the next stretch."""
        return min(self._stretch, self.oracle.updates - self._active[0].updates)

    def _tasks(self, level: int) -> list[Training]:
        """Return the tasks of the next stretch of a level, one per player."""
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
        """Return the policies of members and of the levels below `level`, and their
        meta-strategy."""
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
