"""The section `population`: pools of frozen versions, opponents, matches, stopping.

The docstring under a field is its documentation: `troupe job schema`, the job reference
and editors show it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal, Self

from pydantic import Field, model_validator

from troupe.job.section import (
    MAX_AGENTS,
    MAX_POLICIES,
    MAX_QUERIES,
    MAX_RATE,
    Rate,
    Seconds,
    Section,
    Steps,
    StepsOrNone,
)
from troupe.job.sections.agents import AgentSpec
from troupe.job.sections.policy import EngineSpec, PolicySpec

PopulationAlgorithm = Literal[
    "self_play",
    "regularized",
    "fictitious",
    "prioritized",
    "psro",
    "pipeline_psro",
    "league",
]
# The same as in `troupe.populations`, repeated because a job is read without the libraries that
# solve games.
MetaSolverName = Literal[
    "nash",
    "zero_sum_nash",
    "alpha_rank",
    "projected_replicator",
    "fictitious_play",
    "uniform",
    "latest",
]
WeightingName = Literal["hard", "variance", "linear"]
Beginning = Literal["latest", "base"]
LearnerKind = Literal["main", "main_exploiter", "league_exploiter"]


class LearnerSpec(Section):
    """A trained policy whose versions become members."""

    agents: list[str] = Field(default=[], max_length=MAX_AGENTS)
    """Agents that it learns to play. Default: the agents of this policy; in a symmetric game all
    players."""
    kind: LearnerKind = "main"
    """`league`: role. `main`: beats all members; `main_exploiter`: finds weaknesses of the main
    agents; `league_exploiter`: finds weaknesses of all members."""


class MatchesSpec(Section):
    """Matches between members, which estimate payoffs and are not trained on."""

    least: int = Field(default=16, ge=0, le=MAX_QUERIES)
    """Minimum number of matches per cell of the payoff table, at least 2; 0: no matches."""
    most: int = Field(default=256, ge=2, le=MAX_QUERIES)
    """Maximum number of matches per cell."""
    half_width: Rate | None = None
    """Play further matches of a cell while half of its 95 % confidence interval is wider than this.
    Default: only `least` matches."""


class LeagueSpec(Section):
    """AlphaStar's league (Vinyals et al. 2019, extended data table 5 and methods)."""

    self_play: float = Field(default=0.35, ge=0, le=1)
    """Fraction of a main agent's games against current main agents."""
    forgotten: float = Field(default=0.15, ge=0, le=1)
    """Fraction of its games against frozen versions that it has begun to lose to."""
    exploiter_hopeless: float = Field(default=0.2, ge=0, le=1)
    """A main exploiter with a lower win rate against the main agent plays its past versions."""
    freeze_at: float = Field(default=0.7, gt=0, le=1)
    """Win rate against all its opponents at which a learner is frozen as a member."""
    freeze_after: Steps = 4
    """A learner is also frozen after so many iterations since the last time."""


class StopSpec(Section):
    """Stopping criteria of a population, in addition to `pipeline.steps`, checked after every
    iteration; the first that holds ends the job."""

    nash_conv: float | None = Field(default=None, ge=0, le=MAX_RATE)
    """NashConv of the meta-strategy over all members is at most this: the sum of the agents' gains
    from best responses (half of it is exploitability). Needs `population.game`."""
    improvement: float | None = Field(default=None, ge=0, le=MAX_RATE)
    """The payoff gain of new members is at most this, in every pool, in `patience` consecutive
    iterations."""
    patience: Steps = 2
    """See `improvement`."""
    iterations: Steps | None = None
    """Maximum number of iterations."""
    seconds: Seconds | None = None
    """Maximum time since the job began."""


class PopulationSpec(Section):
    """Policies that learn against pools of their own frozen versions (MALib; docs/populations.md).

    The players of the game are the agents whose policy is trained. In every query of a step one
    learner plays one agent, in turn, and members drawn from the pools play the others.
    """

    algorithm: PopulationAlgorithm = "psro"
    """Opponents of a learner. `self_play`: its current version; `regularized`: the same with a KL
    or entropy term (`algorithm.kl_coefficient`, `entropy_coefficient`; of a network under its
    `learning`), a strong baseline; `fictitious`: earlier versions, uniformly from the newest
    `delta` of them (Bansal et al. 2018, section 4.2); `prioritized`: earlier versions, more often
    those that it loses to (PFSP; Vinyals et al. 2019); `psro`: the meta-strategy of
    the payoff table (Lanctot et al. 2017, algorithm 1); `pipeline_psro`: the same with several
    learners of a pool, each against those below it (McAleer et al. 2020); `league`: main agents,
    main exploiters and league exploiters."""
    symmetric: bool | None = None
    """All players are equivalent and draw from one pool, as where a workflow changes seats from
    episode to episode. Default: true if one policy plays all of them."""
    learners: dict[str, LearnerSpec] = Field(default={}, max_length=MAX_POLICIES)
    """Learners by policy; trained policies that are left out have all defaults."""
    iteration_steps: Steps = 10
    """Optimizer steps of one iteration (one best response). Then the learners' versions are frozen,
    matches fill the payoff table, and the next opponents are chosen."""
    restart: Beginning = "latest"
    """Initial weights of the next best response. `latest`: the learner's current ones; `base`: the
    policy's first weights with a new optimizer, as in the papers: for every learner after every
    iteration; in `pipeline_psro` for those whose best response was frozen; in a `league` for frozen
    exploiters, never for main agents. A restart is a version without a step, which learning-rate
    schedules count. Version 0 is kept on disk."""
    redraw_steps: StepsOrNone = 0
    """Steps between changes of the members in the slots, if there are more opponents than slots; 0:
    once per iteration. In mode `async` open steps end first."""
    slots: int = Field(default=2, ge=1, le=64)
    """Members of each pool that are served at a time. Each slot is a frozen policy
    `{pool}--{number}` with its own engines: the cost of a population depends on its slots, not on
    its members. A symmetric game needs one slot per player, for matches."""
    evaluation_slots: int = Field(default=0, ge=0, le=64)
    """Slots of each pool for matches only. Matches are then played during the next iteration, and
    payoffs are known one iteration later. 0: matches are played between iterations, in the same
    slots."""
    engine: EngineSpec | None = None
    """Engines of a slot; `urls` are divided among all slots. Default: one engine like the engines
    of the pool's first learner."""
    meta_solver: MetaSolverName = "nash"
    """`psro`, `pipeline_psro`: computes a mixture over each pool from the payoffs. `nash`: an
    equilibrium; `zero_sum_nash`: the same, refusing games that are not zero-sum; `alpha_rank`
    (needs OpenSpiel); `projected_replicator`; `fictitious_play`; `uniform`; `latest`. With the
    other algorithms it is only reported."""
    delta: float = Field(default=1.0, ge=0, le=1)
    """`fictitious`: fraction of earlier versions to draw from; 0: only the newest, 1: all."""
    weighting: WeightingName = "hard"
    """`prioritized` and `league`: weight of an opponent by the win rate x. `hard`: (1 - x)^2,
    strong ones; `variance`: x (1 - x), equal ones; `linear`: 1 - x."""
    league: LeagueSpec = LeagueSpec()
    """`league`: fractions and thresholds."""
    matches: MatchesSpec = MatchesSpec()
    """How many matches fill the payoff table."""
    game: str | None = Field(default=None, min_length=1)
    """OpenSpiel name of the game that the workflow plays ("kuhn_poker"; a `GameWorkflow` over the
    OpenSpiel environment), or the environment of networks (`openspiel`, all players agents), where
    its tree is small enough to traverse. Payoffs and NashConv are then computed exactly from the
    members' answers in every information state, without matches (except for `prioritized` and
    `league`, which need win rates). Needs sampling without `top_p` and `top_k`."""
    stop: StopSpec = StopSpec()
    """Stopping criteria."""

    @model_validator(mode="after")
    def _agree(self) -> Self:
        chooses = self.algorithm in ("psro", "pipeline_psro") and self.game is None
        if (chooses or self.by_wins) and self.matches.least == 0:
            raise ValueError(
                f"matches.least: `{self.algorithm}` chooses opponents by payoffs, and without "
                "matches there are none; set it to 2 or more"
            )
        if self.stop.nash_conv is not None and self.game is None:
            raise ValueError(
                "stop.nash_conv: is known only for OpenSpiel games; set `game`, or stop on "
                "`improvement`"
            )
        if self.stop.improvement is not None and self.matches.least == 0 and self.game is None:
            raise ValueError(
                "stop.improvement: needs payoffs, and without matches there are none; set "
                "matches.least to 2 or more"
            )
        if self.matches.least == 1 or self.matches.most < self.matches.least:
            raise ValueError(
                f"matches.least: {self.matches.least} is not between 2 and matches.most = "
                f"{self.matches.most} (or 0: no matches)"
            )
        if self.restart == "base" and self.algorithm in ("self_play", "regularized"):
            raise ValueError(
                f"restart: `{self.algorithm}` continues one policy and never restarts a best "
                "response "
                "from `base`; remove it, or choose another algorithm"
            )
        if self.league.self_play + self.league.forgotten > 1:
            raise ValueError("league.forgotten: together with `self_play` it exceeds 1")
        return self

    @property
    def by_wins(self) -> bool:
        """Whether opponents are chosen by win rates, which need matches."""
        return self.algorithm in ("prioritized", "league")

    @property
    def plays_matches(self) -> bool:
        """Whether matches, not an exact computation, fill the payoff table."""
        return self.matches.least > 0 and (self.game is None or self.by_wins)


# Name of the only pool of a symmetric game.
EVERYBODY: Final = "all"
# Algorithms whose learners play all sides: no opponents are drawn.
_TOGETHER: Final = ("self_play", "regularized")
# Maximum of pools: after one iteration a payoff table has 2^pools cells.
_MOST_SIDES: Final = 16


@dataclass(frozen=True)
class OpponentPool:
    """A pool of frozen versions, from which opponents that play its agents are drawn."""

    name: str
    agents: tuple[str, ...]
    learners: tuple[str, ...]
    slots: tuple[str, ...]
    """Slot policies for training; also for matches unless there are `evaluation_slots`."""
    evaluation_slots: tuple[str, ...]

    @property
    def match_slots(self) -> tuple[str, ...]:
        """Slot policies for matches."""
        return self.evaluation_slots or self.slots


@dataclass(frozen=True)
class Pools:
    """The pools of a job's population, derived from its agents and policies."""

    agents: tuple[str, ...]
    """The players, in the job's order."""
    symmetric: bool
    pools: tuple[OpponentPool, ...]
    """One pool in a symmetric game, else one per player, in their order."""
    learners: Mapping[str, LearnerSpec]
    seats: Mapping[str, tuple[str, ...]]
    """By learner: agents that it learns to play."""
    together: bool
    """Learners play their current versions: training tickets have no cast."""
    rosters: Mapping[str, tuple[str, ...]]
    """By learner: all agents that it and the slots of its pools may play, in the job's order. Equal
    for all learners of a pool, since their versions alternate in its slots."""

    @classmethod
    def of(
        cls,
        population: PopulationSpec,
        agents: Mapping[str, AgentSpec],
        policies: Mapping[str, PolicySpec],
    ) -> Pools:
        """Derive the pools. Raises ValueError that names the field if settings do not match."""
        trained = {name for name, policy in policies.items() if policy.trainable}
        for name in population.learners:
            if name not in trained:
                known = ", ".join(sorted(trained))
                raise ValueError(
                    f"population.learners.{name}: is not a trained policy; known: {known}"
                )
        learners = {name: population.learners.get(name, LearnerSpec()) for name in sorted(trained)}
        players = tuple(name for name, agent in agents.items() if agent.policy in trained)
        if len(players) < 2:
            raise ValueError(
                "population: a game has at least two players, and only "
                f"{', '.join(players) or 'no agent'} has a trained policy; name each player as an "
                "agent (they may share a policy)"
            )
        symmetric = population.symmetric
        if symmetric is None:
            symmetric = len({agents[name].policy for name in players}) == 1
        most = MAX_POLICIES if symmetric else _MOST_SIDES
        if population.algorithm not in _TOGETHER and len(players) > most:
            raise ValueError(
                f"population: {len(players)} players, and a payoff table has a cell for every "
                f"choice of members of all of them; at most {most} can have one, or choose the "
                "algorithm `self_play` or `regularized`, which need none"
            )
        pooled = 1 if symmetric else len(players)
        if (added := pooled * (population.slots + population.evaluation_slots)) > MAX_POLICIES:
            raise ValueError(
                f"population.slots: {added} frozen policies would be added, more than "
                f"{MAX_POLICIES}; lower it, or evaluation_slots"
            )
        seats = {}
        for name, learner in learners.items():
            own = tuple(one for one in players if agents[one].policy == name)
            seats[name] = tuple(learner.agents) or (players if symmetric else own)
            if bad := [one for one in seats[name] if one not in players]:
                raise ValueError(
                    f"population.learners.{name}.agents: '{bad[0]}' is not a player; known: "
                    + ", ".join(players)
                )
            if twice := [one for one, count in Counter(seats[name]).items() if count > 1]:
                raise ValueError(
                    f"population.learners.{name}.agents: '{twice[0]}' is named twice; name it once"
                )
            if not seats[name]:
                raise ValueError(
                    f"population.learners.{name}.agents: name the agents that it learns to play: "
                    "no agent has this policy"
                )
        groups = {EVERYBODY: players} if symmetric else {one: (one,) for one in players}
        pools = tuple(
            OpponentPool(
                name,
                members,
                tuple(one for one, places in seats.items() if set(places) & set(members)),
                tuple(f"{name}--{k}" for k in range(population.slots)),
                tuple(f"{name}--e{k}" for k in range(population.evaluation_slots)),
            )
            for name, members in groups.items()
        )
        together = population.algorithm in _TOGETHER
        rosters = _rosters(agents, pools, seats)
        found = cls(players, symmetric, pools, learners, seats, together, rosters)
        found._check(population, policies)
        if population.game is not None and all(policies[one].network is None for one in learners):
            found._check_answers(agents, policies)
        return found

    @property
    def slots(self) -> tuple[str, ...]:
        """All frozen policies that the section adds to the job."""
        return tuple(name for pool in self.pools for name in (*pool.slots, *pool.evaluation_slots))

    @property
    def places(self) -> tuple[tuple[str, tuple[str, ...]], ...]:
        """Pairs of learner and agents to which queries are assigned in turn; in a symmetric game
        the learner alternates among the agents."""
        if self.together:
            return ()
        if self.symmetric:
            return tuple(self.seats.items())
        return tuple((name, (agent,)) for name, seats in self.seats.items() for agent in seats)

    def pool_of(self, agent: str) -> OpponentPool:
        """Return the pool whose members play `agent`."""
        return next(pool for pool in self.pools if agent in pool.agents)

    def roster(self, policy: str) -> tuple[str, ...]:
        """Return the agents that a learner or slot may play; empty for other policies."""
        pool = next((one for one in self.pools if policy in one.slots + one.evaluation_slots), None)
        return self.rosters.get(policy if pool is None else pool.learners[0], ())

    def added(
        self, population: PopulationSpec, policies: Mapping[str, PolicySpec]
    ) -> dict[str, PolicySpec]:
        """Return the policies of the slots."""
        found = {}
        urls = list(population.engine.urls) if population.engine is not None else []
        share = len(urls) // len(self.slots)
        for pool in self.pools:
            model = policies[pool.learners[0]]
            for name in (*pool.slots, *pool.evaluation_slots):
                # Networks have no engines.
                count = 1 if model.network is None else None
                changes: dict[str, object] = {"pools": [], "urls": [], "replicas": count}
                engine = model.engine
                if population.engine is not None:
                    engine = population.engine
                    changes = {"urls": urls[:share], "replicas": engine.replicas or count}
                    urls = urls[share:]
                if model.network is None:  # a slot serves weights of several policies in turn
                    changes["share"] = "never"
                own = EngineSpec.model_validate(engine.model_dump() | changes)
                given = {"trainable": False, "engine": own, "init_from": model.init_from}
                if model.init_from is not None:  # slots have weights only
                    given["init_from"] = model.init_from.model_copy(update={"optimizer": False})
                found[name] = model.model_copy(update=given)
        return found

    def _check(self, population: PopulationSpec, policies: Mapping[str, PolicySpec]) -> None:
        for pool in self.pools:
            if not pool.learners:
                raise ValueError(f"population.learners: no learner plays '{pool.name}'")
            first, *others = pool.learners
            # The settings that an engine depends on.
            served = {"model", "network", "lora", "simulated"}
            wanted = policies[first].model_dump(include=served)
            for name in others:
                if policies[name].model_dump(include=served) != wanted:
                    raise ValueError(
                        f"policies.{name}: a slot serves versions of '{first}' and '{name}' in "
                        "turn, but their models differ; give them one `model` and `lora`"
                    )
        least = len(self.agents) if self.symmetric else 1
        for field in ("slots", "evaluation_slots"):
            count = getattr(population, field)
            if count < least and (field == "slots" or count):
                raise ValueError(
                    f"population.{field}: {count} cannot serve a match of {least} players; set it "
                    f"to {least} or more"
                )
        kinds = {learner.kind for learner in self.learners.values()}
        if population.algorithm != "league" and kinds != {"main"}:
            raise ValueError(
                f"population.learners: exploiters need a league, but this is "
                f"`{population.algorithm}`; set population.algorithm to `league`, or remove `kind`"
            )
        if population.algorithm == "league" and "main" not in kinds:
            raise ValueError("population.learners: a league has at least one `main` agent")
        engine = population.engine
        if engine is not None and engine.share not in ("auto", "never"):
            raise ValueError(
                f"population.engine.share: is '{engine.share}', but slots serve weights of several "
                "policies in turn and share no engines; leave it out"
            )
        if engine is None:
            for name in self.learners:
                if policies[name].engine.urls and policies[name].simulated is None:
                    raise ValueError(
                        f"population.engine: the servers of '{name}' hold its own weights; name "
                        "servers of the slots under `urls`, or have them launched"
                    )
        elif engine.urls and len(engine.urls) % len(self.slots):
            raise ValueError(
                f"population.engine.urls: {len(engine.urls)} servers cannot be divided evenly "
                f"among {len(self.slots)} slots ({', '.join(self.slots)})"
            )

    def _check_answers(
        self, agents: Mapping[str, AgentSpec], policies: Mapping[str, PolicySpec]
    ) -> None:
        """Check the requirements of `game`: sampling from the full distribution, and one prompt per
        pool."""
        for name in self.agents:
            sampling = agents[name].sampling
            cut = sampling.top_p < 1 or sampling.top_k > 0 or sampling.temperature == 0
            if cut or (sampling.stop and sampling.max_new_tokens > 1):
                raise ValueError(
                    f"agents.{name}.sampling: with `population.game` answers are drawn from all "
                    "tokens; remove top_p, top_k, stop and temperature 0"
                )
        for pool in self.pools:
            ways = [(agents[name].sampling, agents[name].system_prompt) for name in pool.agents]
            if any(one != ways[0] for one in ways):
                raise ValueError(
                    f"agents.{pool.agents[-1]}: with `population.game` all agents of a pool have "
                    f"one `sampling` and `system_prompt`; copy both from {pool.agents[0]}, or "
                    "set population.symmetric to false"
                )
        if others := [name for name in agents if name not in self.agents]:
            raise ValueError(
                f"population.game: the agent '{others[0]}' is not a player, so its actions are not "
                "in the game's tree; remove either"
            )


def _rosters(
    agents: Mapping[str, AgentSpec],
    pools: tuple[OpponentPool, ...],
    seats: Mapping[str, tuple[str, ...]],
) -> dict[str, tuple[str, ...]]:
    played = {
        name: {one for one, agent in agents.items() if agent.policy == name} | set(own)
        for name, own in seats.items()
    }
    # Learners of a common pool share their agents; repeated for chains of pools.
    for _ in pools:
        for pool in pools:
            shared = set(pool.agents).union(*(played[name] for name in pool.learners))
            played |= dict.fromkeys(pool.learners, shared)
    return {name: tuple(one for one in agents if one in own) for name, own in played.items()}


def slot_problem(policy: str) -> str:
    """Return why a slot of the population cannot be named where a frozen policy is meant."""
    return (
        f"'{policy}' is a slot of the population, which serves one member after another; name a "
        "frozen policy of the job"
    )
