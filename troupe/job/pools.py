"""What a `population` section means in its job: players, pools, learners, slots."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from troupe.job.policy import EngineSpec, PolicySpec
from troupe.job.population import LearnerSpec, PopulationSpec
from troupe.job.section import MAX_POLICIES
from troupe.job.sections import AgentSpec

# The one pool of a symmetric game.
EVERYBODY: Final = "all"
# Whose learners train on all sides at once: nobody is drawn for them.
_TOGETHER: Final = ("self_play", "regularized")
# Players with pools of their own: a payoff table has two to this power of cells after a step.
_MOST_SIDES: Final = 16


@dataclass(frozen=True)
class Pool:
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
    pools: tuple[Pool, ...]
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
            Pool(
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

    def pool_of(self, agent: str) -> Pool:
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
                if policies[name].engine.urls and policies[name].paced is None:
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
    agents: Mapping[str, AgentSpec], pools: tuple[Pool, ...], seats: Mapping[str, tuple[str, ...]]
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
    return policy.model_dump(include={"model", "network", "lora", "paced"})


def _changed(engine: EngineSpec, changes: dict[str, object]) -> EngineSpec:
    return EngineSpec.model_validate(engine.model_dump() | changes)
