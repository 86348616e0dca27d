"""Workflows that play an environment with the job's agents.

In a module of yours, `workflow = GameWorkflow(MyGame)`; in the job, `workflow: my_module:workflow`.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

import xxhash

from troupe.contracts.metric_names import TEAM
from troupe.workflow.agent import Agents
from troupe.workflow.environments.episode import Episode, Outcome, PlayRules, Seating, job_rules
from troupe.workflow.environments.host import AsyncEnvironment, FaultLimits, Local, open_environment
from troupe.workflow.environments.interface import Environment, EnvironmentFactory, IllegalRule
from troupe.workflow.environments.process import EnvironmentPool, Hosted
from troupe.workflow.errors import EntrypointError, WorkflowError
from troupe.workflow.loading import Query
from troupe.workflow.tools import Tools

Credit = Literal["episode", "to_go"]
"""Reward of a turn: the return of its seat over the `episode`, or from that turn onwards
(`to_go`)."""

# Maximum number of local environments kept for later episodes, since construction may be slow.
_KEPT_IDLE: Final = 64


class Episodes:
    """Tasks of a job that plays a game: query i is the episode of one seed.

    For `tasks.source`, with `size` and `first_seed` under `tasks.args`. The splits share no seed.
    `illegal` and `resamples` override the workflow's rules for illegal moves (`PlayRules`). Raises
    `EntrypointError` for an unknown rule.
    """

    def __init__(
        self,
        split: str,
        size: int = 1_000_000,
        first_seed: int = 0,
        illegal: IllegalRule | None = None,
        resamples: int | None = None,
    ) -> None:
        given = {"illegal": illegal, "resamples": resamples}
        job_rules(PlayRules(), given)
        self._given = {name: value for name, value in given.items() if value is not None}
        # Training seeds stay below this: no split has 2**40 queries.
        self._first = first_seed + (0 if split == "train" else 2**40)
        self._size = size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"seed": self._first + index, **self._given}


class GameWorkflow:
    """A workflow: one episode per trajectory, rewards per agent.

    `environment`: a factory, or its name (`package.module:attribute`, called with `args`); a named
    one can be `hosted` in at most `processes` child processes. `seats`: agent by seat; by default
    the job's agents take the seats in order, and a single agent takes all. With `permute` the
    agents change seats from seed to seed.

    The seed of an episode is `query["seed"]` (see `Episodes`), else it is derived from the query's
    split and index: all trajectories of a group play the same episode from the same seats, so that
    their rewards are comparable.
    """

    def __init__(
        self,
        environment: EnvironmentFactory | str,
        *,
        args: Mapping[str, Any] | None = None,
        hosted: bool = False,
        processes: int = 16,
        seats: Mapping[str, str] | None = None,
        permute: bool = True,
        credit: Credit = "episode",
        rules: PlayRules | None = None,
        limits: FaultLimits | None = None,
    ) -> None:
        self._seats = seats
        self.permutes = permute
        self._credit = credit
        self.rules = rules or PlayRules()
        self._limits = limits or FaultLimits()
        self._environment = environment
        self._args = dict(args or {})
        self._pool: EnvironmentPool | None = None
        if hosted:
            if not isinstance(environment, str):
                raise EntrypointError(
                    "a hosted environment must be given by name, since its process has to import "
                    "it",
                    field="environment",
                    value=environment,
                    remedy='Pass "package.module:attribute" and `args`.',
                )
            self._pool = EnvironmentPool(
                environment, self._args, processes=processes, limits=self._limits
            )
        # Idle local environments.
        self._idle: list[Local] = []

    async def __call__(self, query: Query, agents: Agents, tools: Tools) -> dict[str, float]:
        """Play one query. Raises `EnvironmentFault` and the errors of agents."""
        environment = self._take()
        try:
            outcome = await self._play(environment, query, agents)
        except BaseException:
            # The environment may be in any state; only the first error is reported.
            with contextlib.suppress(WorkflowError):
                await environment.close()
            raise
        await self._put_back(environment)
        for name, value in figures(outcome).items():
            query.log(**{name: value})
        rewards = reward_turns(outcome, self._credit)
        if environment.properties.cooperative:
            seats = outcome.rewards
            rewards[TEAM] = sum(outcome.total(seat) for seat in seats) / len(seats)
        return rewards

    def seating(self, seats: Sequence[str], agents: Sequence[str], seed: int) -> Seating:
        """Return the seating in the episode of a seed. Raises `SeatingError`."""
        held = self._seats if self._seats is not None else tuple(agents)
        return Seating.of(seats, held, permutation=seed if self.permutes else 0)

    def make(self) -> Environment:
        """Return a new environment in this process, which the caller has to close.

        Raises the errors of `open_environment`.
        """
        if isinstance(self._environment, str):
            return open_environment(self._environment, self._args)
        return self._environment()

    async def close(self) -> None:
        """End the processes. Repeatable; idle ones also end by themselves."""
        if self._pool is not None:
            await self._pool.close()
        while self._idle:
            await self._idle.pop().close()

    async def _play(self, environment: AsyncEnvironment, query: Query, agents: Agents) -> Outcome:
        seed = seed_of(query)
        episode = Episode(environment, agents, job_rules(self.rules, query), seed=seed)
        return await episode.play(
            self._seats if self._seats is not None else tuple(agents), seed if self.permutes else 0
        )

    def _take(self) -> AsyncEnvironment:
        if self._pool is not None:
            return Hosted(self._pool)
        if self._idle:
            return self._idle.pop()
        named = self._environment
        if isinstance(named, str):
            return Local(
                lambda: open_environment(named, self._args), name=named, limits=self._limits
            )
        return Local(named, limits=self._limits)

    async def _put_back(self, environment: AsyncEnvironment) -> None:
        if isinstance(environment, Local) and len(self._idle) < _KEPT_IDLE:
            self._idle.append(environment)
        else:
            await environment.close()


async def play_game(
    environment: AsyncEnvironment,
    agents: Agents,
    *,
    seed: int,
    seats: Mapping[str, str] | None = None,
    permutation: int = 0,
    rules: PlayRules | None = None,
) -> Outcome:
    """Play one episode inside a custom workflow; `reward_turns` then gives its rewards.

    `seats` and its default are as in `GameWorkflow`, `permutation` as in `Seating.of`. The
    environment stays open.
    """
    episode = Episode(environment, agents, rules or PlayRules(), seed=seed)
    return await episode.play(seats if seats is not None else tuple(agents), permutation)


def seed_of(query: Query) -> int:
    """Return the seed of a query's episode, equal for all trajectories of its group."""
    if "seed" in query:
        return int(query["seed"])
    return xxhash.xxh3_64_intdigest(f"{query.split}/{query.index}".encode()) >> 1


def reward_turns(outcome: Outcome, credit: Credit = "episode") -> dict[str, float]:
    """Return rewards per agent, as a workflow's result, and set `reward` and `earned` of the turns.

    For groups: an agent on one seat gets the return of that seat. For an agent on several seats
    each turn gets its own seat's return, since the sum carries no information (0 in a zero-sum game
    against itself). With `to_go` each turn gets the return from that turn onwards. An illegal reply
    always gets `illegal_reward`.

    For a critic (`reply.earned`): the turns of a seat add up to its return. The last turn earns all
    of it, or with `to_go` each turn earns the rewards up to the seat's next turn. An illegal reply
    also earns `illegal_reward`, unless it ended the game, whose rewards then include it.
    """
    seating = outcome.seating
    rewards = {}
    for agent in seating.agents:
        seats = seating.seats_of(agent)
        if len(seats) == 1 and credit == "episode":
            rewards[agent] = outcome.total(seats[0])
    for turn in outcome.turns:
        agent = seating.agent_of[turn.seat]
        if not turn.legal:
            turn.reply.reward = outcome.illegal_reward
        elif agent not in rewards:
            since = turn.step if credit == "to_go" else 0
            turn.reply.reward = outcome.total(turn.seat, since)
    for seat in outcome.rewards:
        own = [turn for turn in outcome.turns if turn.seat == seat]
        agent = seating.agent_of[seat]
        for turn, following in itertools.zip_longest(own, own[1:]):
            if agent in rewards:  # earned at the end of the chain
                earned = 0.0
            elif credit == "to_go":
                until = None if following is None else following.step
                earned = sum(outcome.rewards[seat][turn.step : until])
            else:
                earned = 0.0 if following is not None else outcome.total(seat)
            forfeits = following is None and seat in outcome.forfeited
            if not turn.legal and not forfeits:
                earned += outcome.illegal_reward
            turn.reply.earned = earned
            if len(seating.seats_of(agent)) > 1:
                turn.reply.chain = seat
    return rewards


def figures(outcome: Outcome) -> dict[str, float]:
    """Return metrics of an episode: its length, its illegal replies, and the return of every
    seat."""
    return {
        "game_steps": float(outcome.steps),
        "illegal_moves": float(len(outcome.illegal_turns)),
        "forfeits": float(len(outcome.forfeited)),
        **{f"return_{seat}": outcome.total(seat) for seat in outcome.rewards},
    }
