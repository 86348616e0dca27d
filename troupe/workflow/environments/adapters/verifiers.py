"""Environments of the `verifiers` library (Prime Intellect): their tasks, workflow and rewards.

    tasks: {verifiers: {environment: wordle, python: /envs/wordle/bin/python}}

The environment runs unchanged in a child process with its own interpreter. Every model call of a
role goes to the OpenAI-compatible endpoint of the trajectory's agent, so different roles can be
different policies. `VerifiersTasks` gives the queries, `play` is the workflow.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from troupe.contracts import kinds, metric_names
from troupe.job.sections.data import VerifiersSpec
from troupe.workflow.agent import Agents
from troupe.workflow.environments.adapters.verifiers_process import pool_of
from troupe.workflow.errors import EntrypointError, EnvironmentContractError
from troupe.workflow.loading import Query
from troupe.workflow.tools import Tools
from troupe.workflow.turns import TurnRecord

TRAIN: Final = "train"
# Number of queries of an environment with unlimited tasks.
_ENDLESS: Final = 1_000_000
Traces = Sequence[Mapping[str, Any]]


class VerifiersTasks:
    """One split of an environment's tasks. Each is {"verifiers": the environment, with the
    arguments of this split, "task": the data of the task}."""

    def __init__(
        self,
        spec: VerifiersSpec,
        split: str,
        *,
        held_out: float | None = None,
        whole: bool = False,
        field: str = "tasks",
    ) -> None:
        """Load the tasks. `held_out`: the fraction reserved for the split "held_out". `whole`:
        reserve none, as for a named evaluation. Blocking. Raises `EntrypointError` and
        `EnvironmentFault`."""
        training = split == TRAIN
        if not training and spec.held_out_args is not None:
            args = merged(spec.args, spec.held_out_args)
            spec = spec.model_copy(update={"args": args})
        alone = whole or spec.held_out_args is not None
        self._spec = spec.model_copy(update={"held_out_args": None})
        self._field = f"{field}.verifiers"
        self._pool = pool_of(self._spec, self._field)
        # Evaluations use the environment's own evaluation tasks, if it has any.
        self._own_split = False
        count = None
        if not training and held_out is None:
            count = self._count(held_out=True)
            self._own_split = count is not None
        if count is None:
            if not training and held_out is None and not alone:
                raise EntrypointError(
                    f"environment '{spec.environment}' has no evaluation tasks",
                    kind="split_missing",
                    field=f"{field}.held_out",
                    remedy="Give a fraction (0.05) of its tasks, or `verifiers.held_out_args`.",
                )
            count = self._count(held_out=False) or 0
        self.endless = count < 0
        """Whether the tasks are unlimited; they are then used in their own order."""
        every = Stride(held_out, training) if held_out is not None else None
        self._stride = every
        count = _ENDLESS if self.endless else count
        self._length = count if every is None else every.length(count)
        if not self._length:
            raise EntrypointError(
                f"environment '{spec.environment}' has no tasks for {split}",
                kind="split_missing",
                field=self._field if held_out is None else f"{field}.held_out",
                value=held_out,
                remedy="Choose others in `args`, or hold out another fraction.",
            )

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> dict[str, Any]:
        at = index if self._stride is None else self._stride.position(index)
        request = {"index": at, "held_out": self._own_split}
        task = self._pool.opened().call("task", request, self._spec.start_seconds)["task"]
        return {
            "verifiers": self._spec.model_dump(mode="json", exclude_defaults=True),
            "task": task,
        }

    def _count(self, *, held_out: bool) -> int | None:
        request = {"held_out": held_out}
        answer = self._pool.opened().call("count", request, self._spec.start_seconds)
        found: int | None = answer["count"]
        return found


class Stride:
    """A split in which every k-th task is held out and the others are trained on, also for
    unlimited tasks."""

    def __init__(self, fraction: float, training: bool) -> None:
        """Create the split. `fraction`: the held-out part, between 0 and 1."""
        self._k, self._training = max(2, round(1 / fraction)), training

    def length(self, count: int) -> int:
        """Return how many of `count` tasks belong to this split."""
        aside = -(-count // self._k)
        return count - aside if self._training else aside

    def position(self, index: int) -> int:
        """Return the number of the task at `index` of this split."""
        if not self._training:
            return index * self._k
        return index + index // (self._k - 1) + 1


def merged(args: Mapping[str, Any], others: Mapping[str, Any]) -> dict[str, Any]:
    """Return `args` overridden by `others`, section by section."""
    both = dict(args)
    for name, value in others.items():
        old = both.get(name)
        sections = isinstance(old, Mapping) and isinstance(value, Mapping)
        both[name] = merged(old, value) if sections else value  # type: ignore[arg-type]
    return both


async def play(query: Query, agents: Agents, tools: Tools) -> dict[str, float]:
    """Play one episode: the workflow of jobs whose tasks are `verifiers`.

    The rewards are the environment's, its reward functions and metrics are logged by name. Raises
    `EntrypointError`, `EnvironmentFault` and `TurnError`.
    """
    if "verifiers" not in query:
        raise EntrypointError(
            f"query {query.id} is not a task of a verifiers environment",
            field="tasks",
            remedy="For a mix with other sources, set a `workflow` that plays them too.",
        )
    spec = VerifiersSpec.model_validate(query["verifiers"])
    process = await pool_of(spec).for_episode()
    assigned = assign_roles(process.roles, process.fixed_roles, spec.roles, tuple(agents))
    endpoints = {}
    for role, name in assigned.items():
        address = agents[name].endpoint()
        endpoints[role] = {
            "base_url": address.base_url,
            "api_key": address.api_key,
            "model": address.model,
        }
    traces = await process.play(query["task"], endpoints)
    scores = EpisodeScores.of(traces, assigned, spec.weights, single=len(process.roles) == 1)
    query.log(**scores.metrics)
    return scores.reward(agents.turns)


def assign_roles(
    roles: Collection[str], fixed: Collection[str], given: Mapping[str, str], agents: Sequence[str]
) -> dict[str, str]:
    """Return the agent by role. `fixed`: roles played by a model of their own, unless `given`
    assigns an agent. Raises `EntrypointError` of kind `environment_role`."""
    if strange := sorted(set(given) - set(roles)):
        raise EntrypointError(
            f"the environment has no role '{strange[0]}'; it has {', '.join(sorted(roles))}",
            kind=kinds.ENVIRONMENT_ROLE,
            field=f"tasks.verifiers.roles.{strange[0]}",
            value=strange[0],
            remedy="Name roles of the environment.",
        )
    assigned = {}
    for role in roles:
        if role in given or role in agents or not agents:  # no agents: a trial invents them
            assigned[role] = given.get(role, role)
        elif role not in fixed:
            if len(roles) > 1 or len(agents) > 1:
                raise EntrypointError(
                    f"the environment's role '{role}' has no agent",
                    kind=kinds.ENVIRONMENT_ROLE,
                    field=f"tasks.verifiers.roles.{role}",
                    value=role,
                    remedy=f"Name one of the agents {', '.join(sorted(agents))}, an agent "
                    f"'{role}', or in `args` the role's own `client` and `model`.",
                )
            assigned[role] = agents[0]
    if not assigned:
        raise EntrypointError(
            "the job's agents do not play any role of the environment",
            kind=kinds.ENVIRONMENT_ROLE,
            field="tasks.verifiers.roles",
            remedy=f"Give agents some of {', '.join(sorted(roles))}.",
        )
    return assigned


@dataclass(frozen=True, slots=True)
class TraceScore:
    """The environment's rewards and metrics for one conversation of a role."""

    agent: str
    session: str
    reward: float | None
    """None: the environment rewards no conversation of this kind."""


@dataclass(frozen=True, slots=True)
class EpisodeScores:
    """The rewards of one episode by agent, and its metrics."""

    traces: Sequence[TraceScore]
    team: float
    """Mean reward of the conversations that the environment rewards."""
    metrics: dict[str, float] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        traces: Traces,
        assigned: Mapping[str, str],
        weights: Mapping[str, float],
        *,
        single: bool,
    ) -> EpisodeScores:
        """Compute the scores of an episode. `weights`: by name of a reward or metric, instead of
        its own. `single`: the environment has one role, whose name metrics leave out. Raises
        `EnvironmentContractError` for an unknown name."""
        named: dict[str, list[float]] = {}
        scores = []
        known: set[str] = set()
        for trace in traces:
            values = {**trace["metrics"], **{n: s for n, (s, _) in trace["rewards"].items()}}
            known |= set(values)
            for name, value in values.items():
                named.setdefault(name if single else f"{trace['role']}/{name}", []).append(value)
            reward = float(trace["reward"])
            if weights:
                own = {name: weight for name, (_, weight) in trace["rewards"].items()}
                reward = sum(
                    weights.get(name, own.get(name, 0.0)) * value for name, value in values.items()
                )
            weighed = any(weights.get(name) for name in values)
            rewarded = bool(trace["rewards"]) or weighed or reward != 0
            agent = assigned.get(trace["role"], "")
            scores.append(TraceScore(agent, trace["session"], reward if rewarded else None))
        if unknown := sorted(set(weights) - known):
            raise EnvironmentContractError(
                f"the environment gave no reward or metric '{unknown[0]}'",
                field=f"tasks.verifiers.weights.{unknown[0]}",
                value=unknown[0],
                remedy=f"It gave {', '.join(sorted(known)) or 'none'}.",
            )
        given = [one.reward for one in scores if one.reward is not None]
        team = sum(given) / len(given) if given else 0.0
        return cls(scores, team, {name: sum(v) / len(v) for name, v in named.items()})

    def reward(self, turns: Sequence[TurnRecord]) -> dict[str, float]:
        """Return rewards per agent, as a workflow's result.

        An agent with one conversation gets its reward; with several, each turn gets the reward of
        its conversation, and each conversation is a chain. A role that the environment does not
        reward gets the team's reward.
        """
        rewards = {metric_names.TEAM: self.team}
        for agent in {one.agent for one in self.traces if one.agent}:
            own = [one for one in self.traces if one.agent == agent]
            worth = {one.session: self.team if one.reward is None else one.reward for one in own}
            if len(own) == 1:
                rewards[agent] = worth[own[0].session]
                continue
            mean = sum(worth.values()) / len(worth)
            last: dict[str, Any] = {}
            for turn in turns:
                if turn.reply is not None and turn.role.name == agent:
                    turn.reply.reward = worth.get(turn.reply.session, mean)
                    turn.reply.earned = 0.0
                    turn.reply.chain = turn.reply.session
                    last[turn.reply.session] = turn.reply
            for session, reply in last.items():
                reply.earned = worth.get(session, mean)
        return rewards
