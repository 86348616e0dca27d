"""Populations: pools of frozen versions, who meets whom, when it is over: `population` in a job.

The docstring under a field is its documentation: `troupe job schema`, the job reference
and editors show it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, Self

from pydantic import Field, model_validator

from troupe.job.policy import EngineSpec, PolicySpec
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
from troupe.job.sections import AgentSpec

if TYPE_CHECKING:
    from troupe.job.spec import JobSpec

PopulationAlgorithm = Literal[
    "self_play",
    "regularized",
    "fictitious",
    "prioritized",
    "psro",
    "pipeline_psro",
    "league",
]
# As `troupe.populations` has them: a job is read without the libraries that solve games.
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
    """Whom it learns to play; default: the agents that it is the policy of, and in a symmetric game
    all players."""
    kind: LearnerKind = "main"
    """`league`: what it is for. `main`: to beat everybody; `main_exploiter`: to find what the main
    agents are weak against; `league_exploiter`: what everybody is weak against."""


class MatchesSpec(Section):
    """How well payoffs are known: matches between members, of which nothing is trained."""

    least: int = Field(default=16, ge=0, le=MAX_QUERIES)
    """Matches of every cell of the payoff table, at least 2; 0: no matches at all."""
    most: int = Field(default=256, ge=2, le=MAX_QUERIES)
    """After so many matches a cell is as good as it gets."""
    half_width: Rate | None = None
    """Cells whose 95 % confidence interval is wider than this to either side are played on;
    default: `least` matches are enough."""


class LeagueSpec(Section):
    """AlphaStar's league (Vinyals et al. 2019, extended data table 5 and methods)."""

    self_play: float = Field(default=0.35, ge=0, le=1)
    """Part of a main agent's games against the main agents themselves."""
    forgotten: float = Field(default=0.15, ge=0, le=1)
    """Part of its games against frozen versions that it has begun to lose to."""
    exploiter_hopeless: float = Field(default=0.2, ge=0, le=1)
    """A main exploiter that wins fewer games against the main agent meets its past instead."""
    freeze_at: float = Field(default=0.7, gt=0, le=1)
    """A learner that beats everybody it is to beat so often becomes a member for good."""
    freeze_after: Steps = 4
    """Or after so many iterations since it last did."""


class StopSpec(Section):
    """When a population is good enough, besides `pipeline.steps`. Looked at after every iteration;
    the first that holds ends the job."""

    nash_conv: float | None = Field(default=None, ge=0, le=MAX_RATE)
    """The agents together would gain at most so much by best responses in the whole game, against
    the meta-strategy over all members (half of it is exploitability); needs `population.game`."""
    improvement: float | None = Field(default=None, ge=0, le=MAX_RATE)
    """New members get at most so much more than what was played before, in every pool, in
    `patience` iterations one after another."""
    patience: Steps = 2
    """See `improvement`."""
    iterations: Steps | None = None
    """So many iterations are over."""
    seconds: Seconds | None = None
    """So much time has passed since the job began."""


class PopulationSpec(Section):
    """Policies that learn against pools of their own frozen versions (MALib; docs/populations.md).

    The players of the game are the agents whose policy is trained. In every query of a step one
    learner plays one agent, in turn, and members drawn from the pools play the others.
    """

    algorithm: PopulationAlgorithm = "psro"
    """Whom a learner meets. `self_play`: itself as it is now, nothing frozen; `regularized`: the
    same, held near its first version or at some entropy (`algorithm.kl_coefficient`,
    `entropy_coefficient`; that of a network is under its `learning`), a baseline that is hard to
    beat; `fictitious`: earlier selves, the
    newest `1 - delta` of them equally often (Bansal et al. 2018, section 4.2); `prioritized`: those
    that it has trouble with more often (PFSP; Vinyals et al. 2019); `psro`: the meta-strategy of
    the payoff table (Lanctot et al. 2017, algorithm 1); `pipeline_psro`: the same with several
    learners of a pool, each against those below it (McAleer et al. 2020); `league`: main agents,
    main exploiters and league exploiters."""
    symmetric: bool | None = None
    """All players have the same chances and draw from one pool, as where a workflow changes seats
    from episode to episode. Default: true where one policy plays all of them."""
    learners: dict[str, LearnerSpec] = Field(default={}, max_length=MAX_POLICIES)
    """By policy; those that are left out are main agents with all defaults."""
    iteration_steps: Steps = 10
    """Optimizer steps of one best response. After each such iteration the learners' versions are
    frozen, matches fill the payoff table, and the next opponents are decided upon."""
    restart: Beginning = "latest"
    """What the next best response begins with. `latest`: its learner as it is; `base`: the first
    weights of its policy and a fresh optimizer, as in the papers: of every learner after every
    iteration; in `pipeline_psro` of those whose best response was settled, in a `league` of
    exploiters that were settled, never of main agents. It is a version of its own, without a step;
    learning rates that warm up or fall count it. Version 0 stays on disk."""
    redraw_steps: StepsOrNone = 0
    """Steps after which the slots are given other members, where fewer fit than there are to meet;
    0: once per iteration. In mode `async` open steps end first."""
    slots: int = Field(default=2, ge=1, le=64)
    """Members of each pool that opponents are drawn from at a time. Each is served by a frozen
    policy of its own, `{pool}--{number}`, with engines of its own: the cost of a population is that
    of its slots, not of its members. A symmetric game needs one per player, to play its matches."""
    evaluation_slots: int = Field(default=0, ge=0, le=64)
    """Slots of each pool for matches alone, which are then played beside the training of the next
    iteration: payoffs are known one iteration later. 0: matches are played between iterations, in
    the same slots."""
    engine: EngineSpec | None = None
    """What serves a slot; `urls` are shared out among all slots. Default: one engine like those of
    the pool's first learner."""
    meta_solver: MetaSolverName = "nash"
    """`psro`, `pipeline_psro`: what makes a mixture over each pool of the payoffs. `nash`: an
    equilibrium; `zero_sum_nash`: the same, refusing games that are not zero-sum; `alpha_rank`
    (needs OpenSpiel); `projected_replicator`; `fictitious_play`; `uniform`; `latest`. With the
    other algorithms it is what is reported."""
    delta: float = Field(default=1.0, ge=0, le=1)
    """`fictitious`: 0 is the newest self alone, 1 all earlier ones."""
    weighting: WeightingName = "hard"
    """`prioritized` and `league`: f(x) of the chance x to win. `hard`: (1 - x)^2, those it loses
    to; `variance`: x (1 - x), its equals; `linear`: 1 - x."""
    league: LeagueSpec = LeagueSpec()
    """`league`: its shares and thresholds."""
    matches: MatchesSpec = MatchesSpec()
    """How many matches fill the payoff table."""
    game: str | None = Field(default=None, min_length=1)
    """OpenSpiel name of the game that the workflow plays ("kuhn_poker"; a `GameWorkflow` over the
    OpenSpiel environment), or the environment of networks (`openspiel`, all players agents), where
    its tree is small enough to walk. Payoffs and NashConv are then computed of what members say in
    every information state, exactly, and no matches are played; but for `prioritized` and `league`,
    which choose by wins. Players then draw from the whole vocabulary: no `top_p`, no `top_k`."""
    stop: StopSpec = StopSpec()
    """When it is good enough."""

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
                "stop.nash_conv: is known only of games that OpenSpiel has; set `game`, or stop on "
                "`improvement`"
            )
        if self.stop.improvement is not None and self.matches.least == 0 and self.game is None:
            raise ValueError(
                "stop.improvement: is known of payoffs, and without matches there are none; set "
                "matches.least to 2 or more"
            )
        if self.matches.least == 1 or self.matches.most < self.matches.least:
            raise ValueError(
                f"matches.least: {self.matches.least} is not between 2 and matches.most = "
                f"{self.matches.most} (or 0: no matches)"
            )
        if self.restart == "base" and self.algorithm in ("self_play", "regularized"):
            raise ValueError(
                f"restart: `{self.algorithm}` goes on with one policy, and no best response begins "
                "again from `base`; remove it, or choose another algorithm"
            )
        if self.league.self_play + self.league.forgotten > 1:
            raise ValueError("league.forgotten: with `self_play` it is more than all games")
        return self

    @property
    def by_wins(self) -> bool:
        """Whether opponents are chosen by who beats whom, which takes matches."""
        return self.algorithm in ("prioritized", "league")

    @property
    def plays_matches(self) -> bool:
        """Whether matches fill the payoff table, and no computation does."""
        return self.matches.least > 0 and (self.game is None or self.by_wins)


def check_population(job: JobSpec, pools: Pools) -> None:
    """Raise ValueError, naming the field, for what does not go together with the rest of `job`."""
    population = job.population
    assert population is not None, "its pools are given"
    for name in pools.slots:
        # Those of a job that services pass on are frozen, as they were made.
        if name in job.policies and job.policies[name].trainable:
            raise ValueError(
                f"policies.{name}: is a slot, which the population adds; choose another name, or "
                "remove it"
            )
    if population.algorithm != "regularized":
        return
    for name in pools.learners:
        network = job.policies[name].network
        if network is not None:
            held = getattr(network.learning, "entropy_coefficient", 0.0) > 0
            by = f"policies.{name}.network.learning.entropy_coefficient (ppo, mappo)"
        else:
            held = job.algorithm.kl_coefficient > 0 or job.algorithm.entropy_coefficient > 0
            by = "algorithm.kl_coefficient or algorithm.entropy_coefficient"
        if not held:
            raise ValueError(
                f"population.algorithm: nothing holds '{name}', so that `regularized` would be "
                f"`self_play`; set {by}, or take that"
            )


# The one pool of a symmetric game.
EVERYBODY: Final = "all"
# Whose learners train on all sides at once: nobody is drawn for them.
_TOGETHER: Final = ("self_play", "regularized")
# Players with pools of their own: a payoff table has two to this power of cells after a step.
_MOST_SIDES: Final = 16


@dataclass(frozen=True)
class OpponentPool:
    """Where some agents' opponents come from."""

    name: str
    agents: tuple[str, ...]
    learners: tuple[str, ...]
    slots: tuple[str, ...]
    """Policies that serve its members to training, and to matches unless these have their own."""
    evaluation_slots: tuple[str, ...]

    @property
    def match_slots(self) -> tuple[str, ...]:
        """Policies that serve its members to matches."""
        return self.evaluation_slots or self.slots


@dataclass(frozen=True)
class Pools:
    """A job's population as its agents and policies make it."""

    agents: tuple[str, ...]
    """The players, in the job's order."""
    symmetric: bool
    pools: tuple[OpponentPool, ...]
    """One in a symmetric game, else one per player, in their order."""
    learners: Mapping[str, LearnerSpec]
    seats: Mapping[str, tuple[str, ...]]
    """Whom each learner learns to play."""
    together: bool
    """Learners meet each other as they are: training tickets have no cast."""
    rosters: Mapping[str, tuple[str, ...]]
    """By learner: whom it and the slots of its pools may ever play, in the job's order. All
    learners of a pool have one, since their versions take turns in its slots."""

    @classmethod
    def of(
        cls,
        population: PopulationSpec,
        agents: Mapping[str, AgentSpec],
        policies: Mapping[str, PolicySpec],
    ) -> Pools:
        """Raises ValueError naming the field where they do not fit."""
        trained = {name for name, policy in policies.items() if policy.trainable}
        for name in population.learners:
            if name not in trained:
                known = ", ".join(sorted(trained))
                raise ValueError(
                    f"population.learners.{name}: is no trained policy; there are: {known}"
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
                    f"population.learners.{name}.agents: '{bad[0]}' is no player; there are: "
                    + ", ".join(players)
                )
            if twice := [one for one, count in Counter(seats[name]).items() if count > 1]:
                raise ValueError(
                    f"population.learners.{name}.agents: '{twice[0]}' is named twice; once is "
                    "enough"
                )
            if not seats[name]:
                raise ValueError(
                    f"population.learners.{name}.agents: say whom it learns to play: no agent has "
                    "this policy"
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
        """Learner and agents, for what queries are made in turn: where the game is symmetric the
        learner changes among the agents."""
        if self.together:
            return ()
        if self.symmetric:
            return tuple(self.seats.items())
        return tuple((name, (agent,)) for name, seats in self.seats.items() for agent in seats)

    def pool_of(self, agent: str) -> OpponentPool:
        """Where the members that play `agent` come from."""
        return next(pool for pool in self.pools if agent in pool.agents)

    def roster(self, policy: str) -> tuple[str, ...]:
        """Whom a learner or a slot may ever play; nobody, for a policy that is neither."""
        pool = next((one for one in self.pools if policy in one.slots + one.evaluation_slots), None)
        return self.rosters.get(policy if pool is None else pool.learners[0], ())

    def added(
        self, population: PopulationSpec, policies: Mapping[str, PolicySpec]
    ) -> dict[str, PolicySpec]:
        """The policies of the slots."""
        found = {}
        urls = list(population.engine.urls) if population.engine is not None else []
        share = len(urls) // len(self.slots)
        for pool in self.pools:
            model = policies[pool.learners[0]]
            for name in (*pool.slots, *pool.evaluation_slots):
                changes: dict[str, object] = {"pools": [], "urls": [], "replicas": 1}
                engine = model.engine
                if population.engine is not None:
                    engine, changes = population.engine, {"urls": urls[:share]}
                    urls = urls[share:]
                found[name] = model.model_copy(
                    update={"trainable": False, "engine": _changed(engine, changes)}
                )
        return found

    def _check(self, population: PopulationSpec, policies: Mapping[str, PolicySpec]) -> None:
        for pool in self.pools:
            if not pool.learners:
                raise ValueError(f"population.learners: nobody learns to play '{pool.name}'")
            first, *others = pool.learners
            for name in others:
                if _made_for(policies[name]) != _made_for(policies[first]):
                    raise ValueError(
                        f"policies.{name}: a slot serves versions of '{first}' and '{name}' in "
                        "turn, and their models are not the same; give them one `model` and `lora`"
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
                f"population.learners: exploiters are of a league, and this is "
                f"`{population.algorithm}`; set population.algorithm to `league`, or remove `kind`"
            )
        if population.algorithm == "league" and "main" not in kinds:
            raise ValueError("population.learners: a league has at least one `main` agent")
        engine = population.engine
        if engine is None:
            for name in self.learners:
                if policies[name].engine.urls and policies[name].simulated is None:
                    raise ValueError(
                        f"population.engine: the servers of '{name}' hold its own weights; name "
                        "servers of the slots under `urls`, or have them launched"
                    )
        elif engine.urls and len(engine.urls) % len(self.slots):
            raise ValueError(
                f"population.engine.urls: {len(engine.urls)} servers cannot be shared out evenly "
                f"among {len(self.slots)} slots ({', '.join(self.slots)})"
            )

    def _check_answers(
        self, agents: Mapping[str, AgentSpec], policies: Mapping[str, PolicySpec]
    ) -> None:
        """`game`: log-probs are what is drawn from, and members of a pool answer in one way."""
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
                    f"one `sampling` and `system_prompt`; give it those of {pool.agents[0]}, or "
                    "set population.symmetric to false"
                )
        if others := [name for name in agents if name not in self.agents]:
            raise ValueError(
                f"population.game: the agent '{others[0]}' is no player, and what it does is not "
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
    # Who shares a pool with somebody shares whom he plays, and so on.
    for _ in pools:
        for pool in pools:
            everybody = set(pool.agents).union(*(played[name] for name in pool.learners))
            played |= dict.fromkeys(pool.learners, everybody)
    return {name: tuple(one for one in agents if one in own) for name, own in played.items()}


def _made_for(policy: PolicySpec) -> dict[str, object]:
    """What of a policy its engine has to be made for."""
    return policy.model_dump(include={"model", "network", "lora", "simulated"})


def _changed(engine: EngineSpec, changes: dict[str, object]) -> EngineSpec:
    return EngineSpec.model_validate(engine.model_dump() | changes)
